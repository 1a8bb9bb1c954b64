"""Noise for a target, and rounds for a budget: what has to be known of a run's epsilon before it starts."""

import ml_collections

from fedjax_seg import guarantee
from fedjax_seg.assembly import Experiment, aggregator_of, clients_of
from fedjax_seg.core import checks
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.federation import sampling


def calibrated(config: ml_collections.ConfigDict, loaded: FederatedData) -> ml_collections.ConfigDict:
    """The config with the noise multiplier that its target epsilon needs for the worst client; without one, as it is.

    The target is of the whole run. It is kept by the noise of dp_sgd or by that of the aggregator, whichever there is.

    Raises: UserError where the target could not be kept.
    """
    target = config.privacy.target_epsilon
    if not target:
        return config
    own, central = ("noise_multiplier" in config[room] for room in ("client", "aggregator"))
    if own == central or (own and config.batch_sampling != "poisson"):
        raise checks.UserError(
            f"config.privacy.target_epsilon: {target:g} given, which needs --config.client.name=dp_sgd and"
            f" --config.batch_sampling=poisson, or an aggregator with a noise_multiplier, not both; client"
            f" {config.client.name!r}, batches {config.batch_sampling!r}, aggregator {config.aggregator.name!r} found"
        )
    made = config.copy_and_resolve_references()
    if own:
        made.client.noise_multiplier = _noise_of_clients(config, loaded, target)
    else:
        made.aggregator.noise_multiplier = _noise_of_aggregator(config, loaded, target)
    return made


def _noise_of_clients(config: ml_collections.ConfigDict, loaded: FederatedData, target: float) -> float:
    from fedjax_seg.privacy import accounting

    batch, noise = config.batch_size, []
    # The client with the fewest units is not always the worst.
    for count in {int(n) for n in guarantee.unit_counts(config, loaded, config.client.unit).ravel() if n}:
        steps = -(-count // batch) * config.local_epochs * config.rounds
        noise.append(accounting.calibrate(target, min(1.0, batch / count), steps, config.privacy.delta))
    return max(noise)


def _noise_of_aggregator(config: ml_collections.ConfigDict, loaded: FederatedData, target: float) -> float:
    from fedjax_seg.privacy import budget

    if config.aggregator.get("epsilon"):
        raise checks.UserError(
            f"config.aggregator.epsilon: {config.aggregator.epsilon:g} per round given together with"
            f" config.privacy.target_epsilon {target:g} of the whole run; one of them expected"
        )
    clients = clients_of(loaded)
    sampler = sampling.make(clients=clients, **config.sampler)
    mechanism = aggregator_of(config, sampler, clients, noise_multiplier=1.0).mechanism
    if mechanism is None or not mechanism.formal:
        why = f": {mechanism.reasons[0]}" if mechanism and mechanism.reasons else ""
        raise checks.UserError(
            f"config.privacy.target_epsilon: {target:g} given with the aggregator {config.aggregator.name!r}, which"
            f" promises nothing{why}; a rule with a proof expected, e.g. dp_fedavg"
        )
    delta, rounds = config.privacy.delta, config.rounds
    return budget.multiplier_for(mechanism, sampler, clients=clients, rounds=rounds, delta=delta, target=target)


def for_rounding(experiment: Experiment) -> ml_collections.ConfigDict | None:
    """The config with the noise that a target needs where a secure sum's encoding makes the sensitivity larger; None
    where its noise is enough."""
    config, own = experiment.config, experiment.parts.aggregator.mechanism
    if not config.privacy.target_epsilon or own is None or experiment.client.mechanism:
        return None
    summed = guarantee.mechanism_of_rounds(experiment)
    assert summed is not None
    if summed.noise_multiplier >= own.noise_multiplier:
        return None
    made = config.copy_and_resolve_references()
    made.aggregator.noise_multiplier = own.noise_multiplier**2 / summed.noise_multiplier
    return made


def rounds_allowed(experiment: Experiment) -> int:
    """The rounds that config.privacy.budget allows, at most config.rounds. Raises: UserError where it allows none."""
    config, parts = experiment.config, experiment.parts
    most = config.privacy.budget
    if not most:
        return config.rounds
    from fedjax_seg.privacy import budget

    allowed, found = config.rounds, False
    if (mechanism := guarantee.mechanism_of_rounds(experiment)) and mechanism.formal:
        found = True
        of_rounds = budget.rounds_within(
            mechanism,
            parts.sampler,
            clients=clients_of(experiment.data),
            rounds=config.rounds,
            delta=config.privacy.delta,
            budget=most,
        )
        allowed = min(allowed, of_rounds)
    if experiment.client.mechanism and experiment.client.mechanism.formal:
        found = True
        of_clients = budget.client_rounds_within(
            guarantee.rows_of_units(experiment, config.rounds),
            local_epochs=config.local_epochs,
            sampler=parts.sampler,
            rounds=config.rounds,
            delta=config.privacy.delta,
            budget=most,
        )
        allowed = min(allowed, of_clients)
    if not found:
        raise checks.UserError(
            f"config.privacy.budget: {most:g} given for a run that promises nothing, so it would be spent before it"
            " starts; a mechanism with a proof expected (dp_sgd, dp_fedavg, ...), or 0"
        )
    if not allowed:
        raise checks.UserError(
            f"config.privacy.budget: {most:g} given, and one round alone takes the run's epsilon beyond it; a larger"
            " budget or more noise expected"
        )
    return allowed
