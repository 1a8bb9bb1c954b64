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
from fedjax_seg.core.types import Mechanism, Sampler
from fedjax_seg.privacy import accounting, balls_in_bins, curves, events
from fedjax_seg.privacy.events import Event

CLASSICAL_PROVEN_BELOW = 1.0
CLAIMED = "claimed, not proven"
VACUOUS = 1e5  # an advanced composition beyond this says nothing
MONTE_CARLO = 200_000  # samples for five bins
METHODS = {
    "poisson": "Poisson, PLD",
    "truncated_poisson": "truncated Poisson, PLD",
    "fixed_size": "fixed size, RDP",
    "balls_in_bins": "balls in bins, PLD",
}


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


def advanced_epsilon(epsilon: float, count: int, delta: float) -> float:
    """Advanced composition of `count` mechanisms with this epsilon each: epsilon sqrt(2 k ln(1/delta)) +
    k epsilon (e^epsilon - 1), at a delta of `delta` beside the k deltas of the parts.

    Source: Dwork, Rothblum and Vadhan (2010), Theorem III.3. 55.8 for 20 of epsilon 1 at 1e-5: worse than their sum.
    """
    grown = math.expm1(min(epsilon, 700.0))
    return epsilon * math.sqrt(2 * count * math.log(1 / delta)) + count * epsilon * grown


def round_ledger(
    mechanism: Mechanism,
    sampler: Sampler,
    *,
    clients: int,
    rounds: int,
    smallest_cohort: int | None,
    delta: float,
    tensors: int = 1,
    reasons: Sequence[str] = (),
) -> dict[str, Any]:
    """What a mechanism of one noisy release per round promises a client over a run.

    Everything about the sampling is read from the sampler. The epsilon is the least of what is proven in the
    mechanism's own adjacency (curves.ways): by the rounds that one client is in, and by the way clients are drawn.

    Args:
      mechanism: of the aggregator.
      sampler: of the run, over `clients` clients.
      rounds: T.
      smallest_cohort: the fewest clients of a round, as the bound has used it; recorded.
      delta: of every row but basic and advanced composition, whose deltas add up, and Monte Carlo.
      tensors: releases per round where the rule adds noise tensor by tensor (DP-SimAgg).
      reasons: why there is no guarantee, where mechanism.formal is False; '' = mechanism.reasons.

    Returns: {'unit', 'adjacency', 'formal', 'sensitivity' (None where it depends on the data), 'noise_multiplier',
      'smallest_cohort', 'rounds', 'participations', 'delta', 'epsilon' (of the whole run; None = no guarantee),
      'epsilon_round' (where noise is correlated over rounds: of all of them), 'epsilon_classical' (what the classical
      formula claims for this noise), 'delta_of_classical' (what is true at that epsilon), 'amplification' (a sentence),
      'reasons', 'rows', 'events' (described), 'curve' [{'delta', 'epsilon'}], 'per_round' [{'round', 'epsilon'}],
      'gdp_mu' (None = no guarantee), 'gdp_meaning'}. A row: {'what', 'method', 'adjacency', 'releases', 'epsilon'
      (infinite where the method says nothing), 'delta', 'status'}, status 'proven', 'claimed, not proven', 'vacuous' or
      'Monte Carlo, ...'.
    """
    checks.number("rounds", rounds, low=1, integer=True)
    checks.number("tensors", tensors, low=1, integer=True)
    checks.number("delta", delta, low=0.0, above=0.0, high=0.5)
    rounds, tensors, z = int(rounds), int(tensors), mechanism.noise_multiplier
    times = min(int(sampler.max_participations(rounds)), rounds)
    judged = mechanism._replace(reasons=tuple(reasons) or mechanism.reasons)
    why = events.objections(judged, sampler, rounds)
    ran = events.of_rounds(mechanism, sampler, rounds, clients, tensors)
    found = curves.ways(judged, sampler, clients=clients, rounds=rounds, delta=delta, tensors=tensors)
    head = {
        "unit": mechanism.unit,
        "adjacency": mechanism.adjacency,
        "formal": not why,
        "sensitivity": mechanism.sensitivity if math.isfinite(mechanism.sensitivity) else None,
        "noise_multiplier": z,
        "smallest_cohort": smallest_cohort,
        "rounds": rounds,
        "participations": times,
        "delta": delta,
        "amplification": _amplification(judged, sampler, ran[0], not why),
        "reasons": why,
        "events": [events.described(event) for event in ran],
    }
    if not z > 0:
        nothing = dict.fromkeys((*_ROUND, "epsilon", "gdp_mu"))
        return head | nothing | {"rows": [], "curve": [], "per_round": [], "gdp_meaning": "none: there is no noise"}
    classical = classical_sigma(1.0, delta) / z
    one = {
        "epsilon_round": accounting.gaussian_epsilon(z, delta),
        "epsilon_classical": classical,
        "delta_of_classical": gaussian_delta(z, classical),
    }
    rows = _rows(mechanism, rounds, times, delta, tensors, not why, one)
    rows += _drawn_rows(mechanism, found, ran[0], delta)
    epsilon, way = curves.best(found, delta)
    mu, meaning = _as_gaussian(found, way, epsilon, delta)
    extras = {
        "epsilon": epsilon if way else None,
        "rows": rows,
        "curve": curves.by_delta(found),
        "per_round": curves.by_round(found, rounds, delta),
        "gdp_mu": mu,
        "gdp_meaning": meaning,
    }
    return head | one | extras


_ROUND = ("epsilon_round", "epsilon_classical", "delta_of_classical")


def _amplification(mechanism: Mechanism, sampler: Sampler, ran: Event, formal: bool) -> str:
    """What the sampling is worth, in a sentence."""
    if ran.kind == "gaussian":
        if mechanism.span:
            return "none: noise that is correlated over rounds is one release, whoever is drawn"
        if mechanism.local:
            return "none: clients add the noise themselves, and the server sees who comes"
        if sampler.q is None:
            return "none: the sampler is not Poisson; a client's loss is bounded by its number of participations"
        return "none: every client is in every round"
    if not formal:
        return "none: there is no guarantee to amplify"
    accountant = "rdp" if ran.kind == "fixed_size" else "pld"
    if events.objection(ran, mechanism.adjacency, accountant):
        proven = {
            "truncated_poisson": "Poisson draws are cut to the capacity, so clients are not independent; what they are"
            " worth is proven here for zero-out",
            "fixed_size": "what subsets of a fixed size are worth is proven here for replace-one",
        }.get(ran.kind, "it is proven here for add-remove and zero-out")
        return f"none: {proven}, the mechanism is stated for {mechanism.adjacency}"
    noise, drawn = (
        "rounds without a client must release their noise too",
        f"Poisson sampling of clients, q = {ran.q or 0:.6g}",
    )
    return {
        "poisson": f"{drawn}; {noise}",
        "truncated_poisson": f"{drawn}, cut to a random {ran.capacity} of those drawn; {noise}",
        "fixed_size": f"a fresh uniform subset of {ran.sample} of {ran.population} clients in every round, by RDP",
        "balls_in_bins": f"every client draws one of {ran.bins} places of the cycle once, independently; {noise}",
    }[ran.kind]


def _as_gaussian(
    found: Sequence[curves.Way], way: curves.Way | None, epsilon: float, delta: float
) -> tuple[float | None, str]:
    """(mu, what it means). The rounds that one client is in are a Gaussian mechanism, whatever else is proven."""
    if way is None:
        return None, "none: there is no guarantee"
    mu = curves.gdp_mu(found[0].event)
    if way.event.kind == "gaussian":
        return mu, "exact: the run is mu-GDP"
    at = curves.mu_at(epsilon, delta)
    return mu, (
        f"the run is mu-GDP by the rounds that one client is in; as it is drawn it has the epsilon of mu = {at:.4g} at"
        f" delta {delta:.3g}, and nothing is promised by that mu elsewhere"
    )


def _rows(
    mechanism: Mechanism,
    rounds: int,
    times: int,
    delta: float,
    tensors: int,
    formal: bool,
    one: dict[str, float],
) -> list[dict[str, Any]]:
    """The releases as Gaussians, counted in several ways."""
    z, own = mechanism.noise_multiplier, mechanism.adjacency
    status = "proven" if formal else CLAIMED

    def row(what: str, method: str, releases: int, epsilon: float, of: float = delta, adjacency: str = own) -> Any:
        return _row(what, method, adjacency, releases, epsilon, min(1.0, of), status)

    def of_replaced(what: str, number: int) -> list[dict[str, Any]]:
        if own == "replace-one":
            return []
        found = _exact(z / 2, number, delta)
        return [row(f"{what}, replace-one", "exact Gaussian", number, found, adjacency="replace-one")]

    if mechanism.span:
        what = "all rounds, one release"
        rows = [row(what, "exact Gaussian", tensors, _exact(z, tensors, delta))]
        return [*rows, row(what, "RDP", tensors, rdp_epsilon(z, tensors, delta)), *of_replaced(what, tensors)]
    classical = row("one round", "classical formula", 1, one["epsilon_classical"])
    if one["epsilon_classical"] >= CLASSICAL_PROVEN_BELOW:
        classical["status"] = CLAIMED
    rows = [row("one round", "exact Gaussian", tensors, _exact(z, tensors, delta)), classical]
    # The papers add up what the classical formula gave them; a proven row adds up what is true.
    each = one["epsilon_round"] if formal else one["epsilon_classical"]
    for what, number in (("all rounds", rounds), ("rounds of one client", times)):
        many = number * tensors
        advanced = advanced_epsilon(each, many, delta) if many else 0.0
        rows.append(row(what, "basic composition", many, many * each, many * delta))
        rows.append(row(what, "advanced composition", many, advanced, (many + 1) * delta))
        if advanced > VACUOUS:
            rows[-1] |= {"epsilon": math.inf, "status": "vacuous"}
        rows.append(row(what, "RDP", many, rdp_epsilon(z, many, delta) if many else 0.0))
        rows.append(row(what, "exact Gaussian", many, _exact(z, many, delta)))
    return [*rows, *of_replaced("rounds of one client", times * tensors)]


def _drawn_rows(mechanism: Mechanism, found: Sequence[curves.Way], ran: Event, delta: float) -> list[dict[str, Any]]:
    """The whole run by the way its clients are drawn, as far as it is proven; both adjacencies."""
    if not found or ran.kind == "gaussian":
        return []
    own, rows = mechanism.adjacency, []
    for adjacency in dict.fromkeys((own, "replace-one")):
        what = "all rounds" if adjacency == own else f"all rounds, {adjacency}"
        for accountant in events.ACCOUNTANTS:
            if events.objection(ran, adjacency, accountant):
                continue
            way = next((w for w in found if w.event == ran and adjacency == own), None)
            if way and METHODS[ran.kind].endswith(accountant.upper()):
                epsilon = way.at(ran.count, delta)
            else:
                epsilon = accounting.epsilon_of(ran, delta, adjacency, accountant)
            method = f"{METHODS[ran.kind].rsplit(',', 1)[0]}, {accountant.upper()}"
            rows.append(_row(what, method, adjacency, ran.count, epsilon, delta, "proven"))
    if ran.kind == "balls_in_bins" and any(way.event == ran for way in found):
        rows.append(_sampled_row(ran, own, delta))
    return rows


def _sampled_row(ran: Event, own: str, delta: float) -> dict[str, Any]:
    """By Monte Carlo: a check on the proven row beside it, and never the run's epsilon."""
    assert ran.bins is not None
    samples = min(MONTE_CARLO, max(10_000, 5 * MONTE_CARLO // ran.bins))
    epsilon, supported, _ = balls_in_bins.epsilon(ran.noise_multiplier, ran.bins, ran.count, delta, samples)
    status = f"Monte Carlo, {samples} samples: they show delta {delta:.3g}, which is formal at {supported:.3g} only"
    return _row("all rounds", "balls in bins, Monte Carlo", own, ran.count, epsilon, supported, status)


def _row(
    what: str, method: str, adjacency: str, releases: int, epsilon: float, delta: float, status: str
) -> dict[str, Any]:
    values = {"releases": releases, "epsilon": epsilon, "delta": delta, "status": status}
    return {"what": what, "method": method, "adjacency": adjacency, **values}


def _exact(noise_multiplier: float, releases: int, delta: float) -> float:
    return accounting.any_order_epsilon(noise_multiplier, releases, delta)
