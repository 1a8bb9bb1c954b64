"""What noise once per round is worth over a run: client-level guarantees, and what a paper would have claimed.

The noise multiplier of a Mechanism is standard deviation / sensitivity, the sensitivity being that of the mechanism's
OWN adjacency (2 C/n of a mean under replace-one, C of a sum under zero-out). So nothing is doubled here, except where a
zero-out mechanism is also stated for replace-one, which moves a sum by up to 2 C.
"""

import math
from collections.abc import Sequence
from typing import Any

from scipy import special

from fedjax_seg.core import checks
from fedjax_seg.core.types import Mechanism
from fedjax_seg.privacy import accounting

CLASSICAL_PROVEN_BELOW = 1.0


def classical_sigma(epsilon: float, delta: float) -> float:
    """sqrt(2 ln(1.25/delta)) / epsilon, standard deviation / sensitivity; proven for epsilon < 1 only.

    Source: Dwork and Roth (2014), Theorem A.1; DP-SimAgg, Algorithm 2. 4.8448 for (1, 1e-5).
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact delta of one Gaussian mechanism at epsilon. Source: Balle and Wang (2018), Theorem 8."""
    half, tilt = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    first, second = special.log_ndtr(half - tilt), special.log_ndtr(-half - tilt)
    return float(max(0.0, math.exp(first) - math.exp(min(0.0, epsilon + second))))


def rdp_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Epsilon of so many Gaussian mechanisms by Renyi DP (Mironov 2017). Loose by design; the exact one is known."""
    return accounting.poisson_epsilon(noise_multiplier, 1.0, releases, delta, accountant="rdp")


def round_ledger(
    mechanism: Mechanism,
    *,
    rounds: int,
    participations: int,
    smallest_cohort: int | None,
    q: float | None,
    truncated: bool,
    delta: float,
    tensors: int = 1,
    reasons: Sequence[str] = (),
) -> dict[str, Any]:
    """What a mechanism of one noisy release per round promises a client over a run.

    Source: Balle and Wang (2018) for one Gaussian and, since Gaussians compose to a Gaussian with
    noise_multiplier / sqrt(k), for k of them (exact; it is what PLD accounting approximates). A client that is in k of
    the rounds moves k of the releases; all others are post-processing. Who comes when must not depend on the data, as
    with samplers that are pure in (key, round).

    Poisson sampling (accounting.poisson_epsilon) is proven for add-remove and zero-out, also of an aggregate f that is
    no sum: given the draws S of the others, the outputs are N(f(S), s^2) against its mixture with weight q with
    N(f(S + k), s^2), a shift by at most the sensitivity; and mixing over S is joint convexity. It needs noise in rounds
    without a client as well: else an unchanged model tells that nobody came.

    Args:
      mechanism: of the aggregator.
      rounds: T.
      participations: the most rounds any one client is in (Sampler.max_participations(rounds)).
      smallest_cohort: the fewest clients of a round, as the bound has used it; recorded.
      q: Sampler.q, or None: then no amplification is claimed.
      truncated: Sampler.truncated; a cut Poisson draw gets no amplification here.
      delta: of every row but basic composition, whose deltas add up.
      tensors: releases per round where the rule adds noise tensor by tensor (DP-SimAgg).
      reasons: why there is no guarantee, where mechanism.formal is False.

    Returns: {'unit', 'adjacency', 'formal', 'sensitivity' (None where it depends on the data), 'noise_multiplier',
      'smallest_cohort', 'rounds', 'participations', 'delta', 'epsilon' (of the whole run; None = no guarantee),
      'epsilon_round', 'epsilon_classical' (what the classical formula claims for this noise), 'delta_of_classical'
      (what is true at that epsilon), 'amplification' (a sentence), 'reasons', 'rows'}. A row: {'what', 'method',
      'adjacency', 'releases', 'epsilon', 'delta', 'status'}, status 'proven' or 'claimed, not proven'.
    """
    checks.number("rounds", rounds, low=1, integer=True)
    checks.number("participations", participations, low=0, integer=True)
    checks.number("tensors", tensors, low=1, integer=True)
    checks.number("delta", delta, low=0.0, above=0.0, high=0.5)
    times = min(int(participations), int(rounds))
    z, formal = mechanism.noise_multiplier, mechanism.formal and mechanism.noise_multiplier > 0
    sentence, amplified = _amplification(mechanism, q, truncated)
    why = tuple(reasons) or (() if formal else ("there is no noise" if not z > 0 else "the mechanism has no proof",))
    head = {
        "unit": mechanism.unit,
        "adjacency": mechanism.adjacency,
        "formal": formal,
        "sensitivity": mechanism.sensitivity if math.isfinite(mechanism.sensitivity) else None,
        "noise_multiplier": z,
        "smallest_cohort": smallest_cohort,
        "rounds": int(rounds),
        "participations": times,
        "delta": delta,
        "amplification": sentence,
        "reasons": () if formal else why,
    }
    if not z > 0:
        return head | {"epsilon": None, **dict.fromkeys(_ROUND), "rows": []}
    classical = classical_sigma(1.0, delta) / z
    one = {
        "epsilon_round": accounting.gaussian_epsilon(z, delta),
        "epsilon_classical": classical,
        "delta_of_classical": gaussian_delta(z, classical),
    }
    rows = _rows(mechanism, int(rounds), times, delta, int(tensors), formal, one)
    if amplified and formal:
        assert q is not None
        rows += _poisson_rows(mechanism, q, int(rounds), delta)
    proven = [r["epsilon"] for r in rows if r["method"] in _EXACT and r["what"] in _WHOLE_RUN]
    return head | one | {"epsilon": min(proven) if formal else None, "rows": rows}


_ROUND = ("epsilon_round", "epsilon_classical", "delta_of_classical")
_EXACT = ("exact Gaussian", "Poisson, PLD")
_WHOLE_RUN = ("all rounds", "rounds of one client")


def _amplification(mechanism: Mechanism, q: float | None, truncated: bool) -> tuple[str, bool]:
    if q is None:
        return "none: the sampler is not Poisson; a client's loss is bounded by its number of participations", False
    if truncated:
        return "none: Poisson draws are cut to the capacity, so clients are not independent", False
    if mechanism.adjacency == "replace-one":
        return "none: it is proven here for add-remove and zero-out, the mechanism is stated for replace-one", False
    if not mechanism.formal:
        return "none: there is no guarantee to amplify", False
    return f"Poisson sampling of clients, q = {q:.6g}; rounds without a client must release their noise too", True


def _rows(
    mechanism: Mechanism,
    rounds: int,
    times: int,
    delta: float,
    tensors: int,
    formal: bool,
    one: dict[str, float],
) -> list[dict[str, Any]]:
    z, own = mechanism.noise_multiplier, mechanism.adjacency
    status = "proven" if formal else "claimed, not proven"

    def row(what: str, method: str, releases: int, epsilon: float, of: float = delta, adjacency: str = own) -> Any:
        values = {"releases": releases, "epsilon": epsilon, "delta": min(1.0, of), "status": status}
        return {"what": what, "method": method, "adjacency": adjacency, **values}

    classical = row("one round", "classical formula", 1, one["epsilon_classical"])
    if one["epsilon_classical"] >= CLASSICAL_PROVEN_BELOW:
        classical["status"] = "claimed, not proven"
    rows = [row("one round", "exact Gaussian", tensors, _exact(z, tensors, delta)), classical]
    # The papers add up what the classical formula gave them; a proven row adds up what is true.
    each = one["epsilon_round"] if formal else one["epsilon_classical"]
    for what, number in (("all rounds", rounds), ("rounds of one client", times)):
        many = number * tensors
        rows.append(row(what, "basic composition", many, many * each, many * delta))
        rows.append(row(what, "RDP", many, rdp_epsilon(z, many, delta) if many else 0.0))
        rows.append(row(what, "exact Gaussian", many, _exact(z, many, delta)))
    if own != "replace-one":
        number = times * tensors
        other = _exact(z / 2, number, delta)
        rows.append(row("rounds of one client, replace-one", "exact Gaussian", number, other, adjacency="replace-one"))
    return rows


def _poisson_rows(mechanism: Mechanism, q: float, rounds: int, delta: float) -> list[dict[str, Any]]:
    z, own = mechanism.noise_multiplier, mechanism.adjacency
    found = []
    for name, accountant in (("Poisson, PLD", "pld"), ("Poisson, RDP", "rdp")):
        epsilon = accounting.poisson_epsilon(z, q, rounds, delta, accountant=accountant, adjacency=own)
        values = {"releases": rounds, "epsilon": epsilon, "delta": delta, "status": "proven"}
        found.append({"what": "all rounds", "method": name, "adjacency": own, **values})
    return found


def _exact(noise_multiplier: float, releases: int, delta: float) -> float:
    return accounting.any_order_epsilon(noise_multiplier, releases, delta)
