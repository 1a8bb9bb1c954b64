"""What a run promises: its differential privacy, computed before it trains and printed with its origin.

Two promises are possible, side by side: of DP-SGD, about the units of each client (`_of_units`), and of a private
aggregator, about whole clients (`_of_clients`).
"""

import math
from typing import Any

import jax
import ml_collections
import numpy as np

from fedjax_seg.assembly import (
    Experiment,
    clients_of,
    patient_numbers,
    places,
    plan_of,
    replicas_of,
)
from fedjax_seg.core.types import Mechanism
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.federation import local_batches
from fedjax_seg.rehearsal import message_entries, variable_shapes


def mechanism_of_rounds(experiment: Experiment) -> Mechanism | None:
    """The aggregator's mechanism on what is really summed: rounded, where a secure sum encodes it."""
    from fedjax_seg.privacy import gaussian

    mechanism, secure = experiment.parts.aggregator.mechanism, experiment.parts.secure
    if mechanism is not None and secure is not None and secure.rounding:
        return gaussian.rounded(mechanism, secure.rounding, message_entries(experiment))
    return mechanism


def of_run(experiment: Experiment, rounds: int | None = None) -> dict[str, Any]:
    """The ledger of a run with a mechanism: 'rows', the 'epsilon' of the whole run (None = no guarantee), 'delta',
    'caption' of the rows, 'text' for the report and 'lines' for the log; {} for a run without one.

    Args:
      rounds: those that were run; None = as planned.
    """
    ran = rounds or experiment.config.rounds
    units = _of_units(experiment, ran) if experiment.client.mechanism else {}
    clients = _of_clients(experiment, ran) if experiment.parts.aggregator.mechanism else {}
    if units and clients:
        both = {"clients": clients, "text": f"{units['text']}\n\n{clients['text']}"}
        return units | both | {"lines": [*units["lines"], *clients["lines"]]}
    return units or clients


def _of_clients(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """What an aggregator with noise once per round promises a client."""
    from fedjax_seg.privacy import composition

    sampler, config = experiment.parts.sampler, experiment.config
    mechanism = mechanism_of_rounds(experiment)
    assert mechanism is not None
    tensors = 1
    if mechanism.per == "tensor":
        tensors = len(jax.tree.leaves(variable_shapes(experiment)))
    found = composition.round_ledger(
        mechanism,
        sampler,
        clients=clients_of(experiment.data),
        rounds=rounds,
        smallest_cohort=places(sampler),
        delta=config.privacy.delta,
        tensors=tensors,
        reasons=mechanism.reasons,
    )
    found |= {"span": mechanism.span, "epsilon_if_known": _if_known(found)}
    text = _round_text(config.aggregator.name, mechanism, found, tensors) + _of_replicas(experiment, found)
    text += _of_secure_sum(experiment, found)
    rows = [{"client": f"{row['what']}, {row['method']}"} | _finite(row) for row in found["rows"]]
    rows = [{k: v for k, v in row.items() if k not in ("what", "method")} for row in rows]
    about = {k: v for k, v in found.items() if k not in ("rows", "epsilon", "span")}
    return {
        "epsilon": found["epsilon"],
        "delta": config.privacy.delta,
        "rows": rows,
        "caption": PROMISED if found["epsilon"] is not None else CLAIMED,
        "corner": "Releases",
        "text": text,
        "lines": text.split("\n\n")[:1],
        **about,
    }


PROMISED = "What one client is promised, by the releases that count and the way they are composed."
CLAIMED = "What the rule's formula claims. Nothing is promised."


def _if_known(found: dict[str, Any]) -> float | None:
    """Epsilon towards somebody who knows in which rounds a client was, where the claim needs that to be secret."""
    kept = [row["epsilon"] for row in found["rows"] if row["what"] in KNOWN and row["method"] == "exact Gaussian"]
    amplified = found["epsilon"] is not None and kept and found["epsilon"] < min(kept) * (1 - 1e-9)
    return min(kept) if amplified else None


KNOWN = ("all rounds", "rounds of one client")  # rows of releases that count whoever knows who came


def _of_secure_sum(experiment: Experiment, found: dict[str, Any]) -> str:
    """What a simulated secure sum means for the claim."""
    secure, asked = experiment.parts.secure, experiment.parts.aggregator.mechanism
    if secure is None or asked is None or found["epsilon"] is None or asked.local:
        return ""
    if not secure.hides:
        return (
            f"\n\nThe secure sum {secure.name} hides nothing: neighbours and server see single updates without noise,"
            " and towards them nothing is promised."
        )
    more = found["sensitivity"] / asked.sensitivity - 1 if asked.sensitivity else 0.0
    return (
        f"\n\nThe messages are summed by {secure.name}: noise comes to the opened sum, so the server must be trusted"
        f" with that. Rounding by its encoding makes the sensitivity {100 * more:.3g} % larger, which is in the numbers"
        " above. Who is there, and who is lost, is public; a client is compared with one that is there and sends 0."
    )


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Infinity is null in JSON."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in row.items()}


def _round_text(rule: str, mechanism: Mechanism, found: dict[str, Any], tensors: int) -> str:
    z = f"noise multiplier {found['noise_multiplier']:.4g}"
    if found["epsilon"] is None:
        text = f"Aggregator {rule} ({z}): NO privacy guarantee."
        if found["rows"]:
            text += f" Its formula claims epsilon {found['epsilon_classical']:.4g} per"
            text += f" round{' and tensor' if tensors > 1 else ''}, which is not proven."
        if tensors > 1:
            text += f" {tensors} tensors are noised in every round, each a release of its own."
        reasons = "".join(f"\n- {reason}" for reason in found["reasons"])
        return f"{text}\n\nWhy:{reasons}" if reasons else text
    text = (
        f"Aggregator {rule}: client-level differential privacy ({found['adjacency']}), {z} on a sensitivity of"
        f" {found['sensitivity']:.4g}: epsilon {found['epsilon']:.3f} at delta {found['delta']:.3g} for every client"
        f" over {found['rounds']} rounds, of which one is in at most {found['participations']}."
    )
    text += " The noise of all rounds is one release." if mechanism.span else (
        f" One round: epsilon {found['epsilon_round']:.3f}."
    )  # fmt: skip
    text += f" Amplification by sampling: {found['amplification']}."
    if found["epsilon_if_known"] is not None:
        text += (
            f" That needs it to be secret who took part in which round: whoever knows it is told epsilon"
            f" {found['epsilon_if_known']:.3f} at most."
        )
    if found["smallest_cohort"]:
        text += f" A round has {found['smallest_cohort']} places; one that nobody fills counts as an update of 0."
    who = "what leaves a client, and needs no trust in the server" if mechanism.local else (
        "the models that the server releases, and trusts the server"
    )  # fmt: skip
    return text + (
        f"\n\nThe guarantee is about {who}. It does not cover what a simulation sees beside: losses, norms,"
        " recovered updates of a leak demonstration,"
        " scores of the sites, what they keep at home (of which an external site takes the mean): without noise."
        " It is of one run; other runs on the same data add up, and models of one execution only may be published:"
        " elsewhere the same run has the same noise, rounded otherwise. Random numbers are pseudo-random and follow"
        " from the seed, the config and the data; a deployment must keep its seed secret."
    )


def _of_replicas(experiment: Experiment, found: dict[str, Any]) -> str:
    """What all models of a run tell together, where there are several."""
    from fedjax_seg.privacy import accounting

    count = len(experiment.replicas)
    if count == 1 or found["epsilon"] is None:
        return ""
    releases = count * (1 if found["span"] else found["participations"])
    together = accounting.gaussian_epsilon(found["noise_multiplier"] / math.sqrt(releases), found["delta"])
    return (
        f"\n\nThat is for one model. This run made {count} (folds x seeds) from the same clients; whoever sees all of"
        f" them sees {releases} releases of one client: epsilon {together:.3f}."
    )


def _of_units(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """The ledger of a run of DP-SGD, a row per client."""
    mechanism, config = experiment.client.mechanism, experiment.config
    assert mechanism is not None
    from fedjax_seg.privacy import curves

    rows = rows_of_units(experiment, rounds)
    extras = curves.client_extras(
        rows,
        local_epochs=config.local_epochs,
        sampler=experiment.parts.sampler,
        rounds=rounds,
        delta=config.privacy.delta,
    )
    worst = max(row["epsilon_pld"] for row in rows)
    for row in rows:
        row |= {k: None for k in ("epsilon_pld", "epsilon_rdp") if row[k] is not None and math.isinf(row[k])}
    epsilon = None if math.isinf(worst) else worst
    text = _text(mechanism, config, epsilon, rows, rounds)
    if epsilon is not None and len(experiment.replicas) > 1:
        text += (
            f"\n\nThat is for one model. This run made {len(experiment.replicas)} (folds x seeds) from the same data;"
            " whoever sees all of them sees so many times the steps."
        )
    return {
        "epsilon": epsilon,
        "delta": max(row["delta"] for row in rows),  # with what cutting draws adds
        "rows": rows,
        "text": text,
        "lines": text.split("\n\n")[:1],
        **extras,
    }


def rows_of_units(experiment: Experiment, rounds: int) -> list[dict[str, Any]]:
    """A row per client: that of its worst number of units over the folds."""
    mechanism, config, data = experiment.client.mechanism, experiment.config, experiment.data
    assert mechanism is not None
    from fedjax_seg.privacy import accounting

    counted = unit_counts(config, data, mechanism.unit)
    capacity = local_batches.poisson_capacity(int(counted.max()), config.batch_size)
    rows = []
    for site, counts in _units(data, counted).items():
        of_site = accounting.client_ledger(
            mechanism,
            sampling=config.batch_sampling,
            batch_size=config.batch_size,
            local_epochs=config.local_epochs,
            participations=experiment.parts.sampler.max_participations(rounds),
            units={f"{site} ({count})" if len(counts) > 1 else site: count for count in counts},
            delta=config.privacy.delta,
            capacity=capacity,
        )
        rows.append(max(of_site, key=lambda row: row["epsilon_pld"]))
    return rows


def unit_counts(config: ml_collections.ConfigDict, data: FederatedData, unit: str) -> np.ndarray:
    """int [R, K]: the units every client trains on in every replica."""
    plan = plan_of(data, replicas_of(config, data))
    return local_batches.unit_counts(plan.train, plan.train_sizes, patient_numbers(data) if unit == "patient" else None)


def _units(data: FederatedData, counts: np.ndarray) -> dict[str, list[int]]:
    """{client: the numbers of units it trains on, of all folds}; `counts` as of `unit_counts`."""
    found = {site: sorted({int(n) for n in counts[:, k] if n}) for k, site in enumerate(data.sites)}
    return {site: numbers for site, numbers in found.items() if numbers}


def _text(mechanism: Any, config: ml_collections.ConfigDict, epsilon: float | None, rows: Any, rounds: int) -> str:
    scale = f"noise multiplier {mechanism.noise_multiplier:g} on gradients clipped to {mechanism.sensitivity:g}"
    if epsilon is None:
        return f"DP-SGD ({scale}): NO guarantee; {rows[0]['rests_on']}."
    delta = max(row["delta"] for row in rows)
    text = (
        f"DP-SGD, {mechanism.unit} level ({mechanism.adjacency}), {scale}: epsilon {epsilon:.2f} at delta {delta:.3g}"
        f" for every {mechanism.unit} of the worst client over {rounds} rounds. Rests on: {rows[0]['rests_on']}."
    )
    return text + (
        "\n\nThe guarantee is about the models that leave the clients. It does not cover what a simulation sees beside"
        " them: training losses and scores on a client's own cases are computed from the data without noise. The random"
        " numbers are pseudo-random and follow from the seed, which a deployment must keep secret."
    )
