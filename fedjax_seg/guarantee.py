"""What a run promises: its differential privacy per client, computed before it trains and printed with its origin."""

import math
from typing import Any

import ml_collections
import numpy as np

from fedjax_seg.assembly import Experiment, patient_numbers, plan_of, replicas_of
from fedjax_seg.core import checks
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.federation import local_batches


def calibrated(config: ml_collections.ConfigDict, loaded: FederatedData) -> ml_collections.ConfigDict:
    """The config with the noise multiplier that its target epsilon needs for the worst client; without one, as it is.

    Raises: UserError where the target could not be kept.
    """
    target = config.privacy.target_epsilon
    if not target:
        return config
    if "noise_multiplier" not in config.client or config.batch_sampling != "poisson":
        raise checks.UserError(
            f"config.privacy.target_epsilon: {target:g} given, which needs --config.client.name=dp_sgd and"
            f" --config.batch_sampling=poisson; client {config.client.name!r}, batches {config.batch_sampling!r} found"
        )
    from fedjax_seg.privacy import accounting

    batch, noise = config.batch_size, []
    # The client with the fewest units is not always the worst.
    for count in {int(n) for n in _counts(config, loaded, config.client.unit).ravel() if n}:
        steps = -(-count // batch) * config.local_epochs * config.rounds
        noise.append(accounting.calibrate(target, min(1.0, batch / count), steps, config.privacy.delta))
    made = config.copy_and_resolve_references()
    made.client.noise_multiplier = max(noise)
    return made


def of_run(experiment: Experiment) -> dict[str, Any]:
    """The ledger of a run of DP-SGD: 'rows' per client, the worst client's 'epsilon' (None = no guarantee), 'text' for
    the report and 'lines' for the log; {} for a client without a mechanism."""
    mechanism, config, data = experiment.client.mechanism, experiment.config, experiment.data
    if mechanism is None:
        return {}
    from fedjax_seg.privacy import accounting

    counted = _counts(config, data, mechanism.unit)
    capacity = local_batches.poisson_capacity(int(counted.max()), config.batch_size)
    rows = []
    for site, counts in _units(data, counted).items():
        of_site = accounting.client_ledger(
            mechanism,
            sampling=config.batch_sampling,
            batch_size=config.batch_size,
            local_epochs=config.local_epochs,
            participations=experiment.parts.sampler.max_participations(config.rounds),
            units={f"{site} ({count})" if len(counts) > 1 else site: count for count in counts},
            delta=config.privacy.delta,
            capacity=capacity,
        )
        rows.append(max(of_site, key=lambda row: row["epsilon_pld"]))
    worst = max(row["epsilon_pld"] for row in rows)
    for row in rows:
        row |= {k: None for k in ("epsilon_pld", "epsilon_rdp") if row[k] is not None and math.isinf(row[k])}
    epsilon = None if math.isinf(worst) else worst
    text = _text(mechanism, config, epsilon, rows)
    return {
        "epsilon": epsilon,
        "delta": config.privacy.delta,
        "rows": rows,
        "text": text,
        "lines": text.split("\n\n")[:1],
    }


def _counts(config: ml_collections.ConfigDict, data: FederatedData, unit: str) -> np.ndarray:
    """int [R, K]: the units every client trains on in every replica."""
    plan = plan_of(data, replicas_of(config, data))
    return local_batches.unit_counts(plan.train, plan.train_sizes, patient_numbers(data) if unit == "patient" else None)


def _units(data: FederatedData, counts: np.ndarray) -> dict[str, list[int]]:
    """{client: the numbers of units it trains on, of all folds}; `counts` as of `_counts`."""
    found = {site: sorted({int(n) for n in counts[:, k] if n}) for k, site in enumerate(data.sites)}
    return {site: numbers for site, numbers in found.items() if numbers}


def _text(mechanism: Any, config: ml_collections.ConfigDict, epsilon: float | None, rows: Any) -> str:
    scale = f"noise multiplier {mechanism.noise_multiplier:g} on gradients clipped to {mechanism.sensitivity:g}"
    if epsilon is None:
        return f"DP-SGD ({scale}): NO guarantee; {rows[0]['rests_on']}."
    delta = max(row["delta"] for row in rows)
    text = (
        f"DP-SGD, {mechanism.unit} level ({mechanism.adjacency}), {scale}: epsilon {epsilon:.2f} at delta {delta:.3g}"
        f" for every {mechanism.unit} of the worst client over {config.rounds} rounds. Rests on: {rows[0]['rests_on']}."
    )
    return text + (
        "\n\nThe guarantee is about the models that leave the clients. It does not cover what a simulation sees beside"
        " them: training losses and scores on a client's own cases are computed from the data without noise. The random"
        " numbers are pseudo-random and follow from the seed, which a deployment must keep secret."
    )
