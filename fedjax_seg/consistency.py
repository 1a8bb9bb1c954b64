"""What no part of a run can see alone: whether the parts of a config, and its data, go together."""

from typing import Any

import ml_collections

from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, Client, Sampler, SecureSum
from fedjax_seg.data import federated

TRANSFORMED = ("extrinsic_mean",)  # rules whose clients send a function of their update


def check_range(config: ml_collections.ConfigDict, secure: SecureSum | None, most: int) -> None:
    """Raises: UserError where a message of the rule is known to leave the range of the secure sum.

    Args:
      most: the largest number of training cases of a client.
    """
    clip = secure.facts.get("clip") if secure else None
    if clip is None or config.aggregator.name != "fednova":
        return
    steps = -(-most // config.batch_size) * config.local_epochs
    if steps > clip:
        raise checks.UserError(
            f"config.secure_sum.clip: {clip:g} given with the aggregator 'fednova', which sends numbers of local steps,"
            f" up to {steps} here: {steps} or more expected, since larger numbers are cut"
        )


def model_of(config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> dict[str, Any]:
    """The slot of the model; classes=0 are as many as the data have.

    Raises: UserError where a classifier has another number of them.
    """
    model, found = dict(config.model), len(loaded.classes)
    given = model.get("classes", found)
    if given == 0:
        model["classes"] = found
    elif config.task.name == "classification" and given != found:
        raise checks.UserError(
            f"config.model.classes: {given} given, and the data have {found} ({', '.join(loaded.classes)}): {found}"
            " expected, or 0 for as many as there are"
        )
    return model


def check_together(
    config: ml_collections.ConfigDict, client: Client, aggregator: Aggregator, sampler: Sampler, loaded: Any
) -> None:
    """What no part can see alone. Raises: UserError."""
    if config.batch_sampling == "poisson" and client.mechanism is None:
        raise checks.UserError(
            f"config.batch_sampling: 'poisson' given for client {config.client.name!r}, whose loss is a mean over the"
            " drawn cases, of which there may be none; 'shuffled' expected (Poisson batches are for dp_sgd)"
        )
    rule, sampled = config.aggregator, config.sampler.name
    if (client.mechanism or aggregator.mechanism) and sampler.memory is not None:
        raise checks.UserError(
            f"config.sampler.name: {sampled!r} chooses by the clients' updates, which no noise covers; with noise that"
            " is to protect them another sampler expected, e.g. sliding_window"
        )
    if config.secure_sum.name != "none" and sampler.memory is not None:
        raise checks.UserError(
            f"config.sampler.name: {sampled!r} chooses by the clients' single updates, which a secure sum shows to"
            f" nobody ({config.secure_sum.name!r} given); another sampler expected, or --config.secure_sum.name=none"
        )
    simulated = config.secure_sum.name not in ("none", "assumed")
    if (config.dropout.probability or config.dropout.schedule) and config.protocol != "federated":
        raise checks.UserError(
            f"config.dropout: given with protocol {config.protocol!r}, which has no federation to drop out of;"
            " probability 0 and schedule () expected"
        )
    if config.attack.name == "share_leakage" and rule.name in TRANSFORMED:
        raise checks.UserError(
            f"config.attack.name: 'share_leakage' given with the aggregator {rule.name!r}, whose messages are neither"
            " updates nor weights, which is what the attack recovers; 'none' or another aggregator expected"
        )
    if simulated and config.protocol != "federated":
        raise checks.UserError(
            f"config.secure_sum.name: {config.secure_sum.name!r} given with protocol {config.protocol!r}, in which"
            " nothing is summed over sites; 'none' expected"
        )
    _check_claims(config, client, aggregator, sampler, loaded, simulated)
    if aggregator.mechanism and rule.get("epsilon") and rule.get("delta") != config.privacy.delta:
        raise checks.UserError(
            f"config.aggregator.delta: {rule.get('delta')!r} given, and config.privacy.delta is"
            f" {config.privacy.delta!r}: the same expected, since the one calibrates what the other reports"
        )
    if loaded.store is None:
        if config.predictions:
            raise checks.UserError("config.predictions: true given, but only volumes (data fets, msd) are saved")
        return
    _check_classes(config, loaded)
    if config.batch_sampling != "shuffled" or config.attack.name != "none":
        what = "batch_sampling" if config.batch_sampling != "shuffled" else "attack.name"
        raise checks.UserError(
            f"config.{what}: volumes are streamed from disk, for which only batch_sampling='shuffled' and attack 'none'"
            " are there; set these, or use 2D slices"
        )


def _check_claims(
    config: ml_collections.ConfigDict,
    client: Client,
    aggregator: Aggregator,
    sampler: Sampler,
    loaded: federated.FederatedData,
    simulated: bool,
) -> None:
    """What would make a privacy claim untrue. Raises: UserError."""
    if client.mechanism and client.mechanism.unit == "patient":
        _check_homes(loaded)
    formal = aggregator.mechanism if aggregator.mechanism and aggregator.mechanism.formal else None
    if aggregator.mechanism and config.protocol != "federated":
        raise checks.UserError(
            f"config.protocol: {config.protocol!r} given with the aggregator {config.aggregator.name!r}, whose noise is"
            " about hospitals that send updates apart; 'federated' expected (or dp_sgd, which is about cases)"
        )
    if formal is None:
        return
    by_coins = sampler.q is not None or sampler.bins > 1
    sampled, adjacency = config.sampler.name, formal.adjacency
    subset = bool(sampler.drawn and sampler.drawn[0] < sampler.drawn[1]) and adjacency == "replace-one"
    amplified = (by_coins or subset) and not formal.local  # no claim of local noise rests on who is drawn
    if simulated and amplified:
        raise checks.UserError(
            f"config.secure_sum.name: {config.secure_sum.name!r} given with a privacy claim that rests on the sampler"
            f" {sampled!r}: who else is counted, and whether a round is aborted, would depend on whether a client was"
            " drawn, which the claim does not cover; another sampler expected (sliding_window, full), or 'assumed'"
        )
    if config.max_sim_hours and amplified:
        raise checks.UserError(
            f"config.max_sim_hours: {config.max_sim_hours:g} given with a privacy claim that rests on the sampler"
            f" {sampled!r}: simulated time, and so the number of rounds, would tell who was drawn; 0 expected, or"
            " another sampler (sliding_window, full)"
        )
    if adjacency == "add-remove" and (not by_coins or sampler.truncated):
        raise checks.UserError(
            f"config.aggregator.adjacency: 'add-remove' given with the sampler {sampled!r}, 'replace-one' or 'zero-out'"
            " expected, because one client more or less would change who else is sampled; Poisson sampling, never cut,"
            " and balls_in_bins allow it"
        )
    if adjacency == "zero-out" and aggregator.reads == "each" and by_coins:
        raise checks.UserError(
            f"config.aggregator.adjacency: 'zero-out' given with the sampler {sampled!r} and a rule that is no sum:"
            " a client that is drawn and sends 0 is not one that is not drawn; 'add-remove' expected"
        )


def _check_homes(loaded: federated.FederatedData) -> None:
    """A patient's ledger is that of one client: nobody may train at two."""
    for split in loaded.splits:
        home: dict[str, int] = {}
        for k, cases in enumerate(split.train):
            for patient in {loaded.patient_ids[i] for i in cases}:
                if home.setdefault(patient, k) != k:
                    names = f"{loaded.sites[home[patient]]} and {loaded.sites[k]}"
                    raise checks.UserError(
                        f"config.client.unit: 'patient' given, and patient {patient} has training cases at {names},"
                        " whose guarantees would add up; every patient at one site expected"
                    )


def _check_classes(config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> None:
    """Model and metrics speak of the classes that the data have. Raises: UserError."""
    values, names = tuple(loaded.about["label_values"]), ", ".join(loaded.classes)
    if config.model.get("classes", len(values)) != len(values):
        raise checks.UserError(
            f"config.model.classes: {config.model.classes} given, the data have {len(values)} ({names}); set"
            f" --config.model.classes={len(values)}"
        )
    labels = tuple(config.task.get("labels", ()))
    if labels and labels != values:
        raise checks.UserError(
            f"config.task.labels: {labels} given, the label values of the data are {values} ({names}); set them, or ()"
        )
    regions = [[name, list(ids)] for name, ids in loaded.about["regions"]]
    if config.task.get("regions") == "brats" and regions[:3] != [["ET", [3]], ["TC", [1, 3]], ["WT", [1, 2, 3]]]:
        raise checks.UserError(
            f"config.task.regions: 'brats' given, but the classes of the data are {names}; set"
            " --config.data.label_scheme to that of the data, or --config.task.regions=classes"
        )
