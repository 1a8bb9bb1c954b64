"""Whole runs: what is proven for a run as it was sampled, epsilon by delta, by round, and as one Gaussian.

A sampler often gives several proven epsilons: that of the rounds a client can be in, and that of the way it is drawn.
Each is a `Way`; the run's epsilon is the least of them, at every delta and after every round.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedjax_seg.core.types import Mechanism, Sampler
from fedjax_seg.privacy import accounting, events
from fedjax_seg.privacy.events import Event

DELTAS = (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1e-1)
_POINTS = 12  # of a curve over rounds
_SLOW_POINTS = 4  # where every point costs a tenth of a second


class Way(NamedTuple):
    """One proven way to account for a run.

    Attributes:
      event: the releases of the whole run.
      count: rounds -> the releases of the event's kind after so many rounds.
      at: (releases, delta) -> epsilon.
    """

    event: Event
    count: Callable[[int], int]
    at: Callable[[int, float], float]


def ways(
    mechanism: Mechanism, sampler: Sampler, *, clients: int, rounds: int, delta: float, tensors: int = 1
) -> list[Way]:
    """What is proven for a run, in the mechanism's own adjacency; [] where nothing is (events.objections).

    Source of the first: Gaussians compose to a Gaussian with noise_multiplier / sqrt(k), and a client that is in k of
    the rounds moves k of the releases. Who comes when must not depend on the data, as with samplers that are pure in
    (key, round). Of the others: see `accounting.by_count`.

    Poisson sampling is proven for add-remove and zero-out, also of an aggregate f that is no sum: given the draws S of
    the others, the outputs are N(f(S), s^2) against its mixture with weight q with N(f(S + k), s^2), a shift by at most
    the sensitivity; and mixing over S is joint convexity. Draws cut to a uniform subset (arXiv 2508.15089): where k
    takes the place of j in a full round, its message replaces another, a shift by twice the sensitivity, in the share
    of the rounds in which that happens. Both need noise in rounds without a client: else an unchanged model tells that
    nobody came. They need an absent client to be as one that sends nothing, as in sums.
    """
    if events.objections(mechanism, sampler, rounds):
        return []
    found = [events.by_participations(mechanism, sampler, rounds, tensors)]
    found += [e for e in events.of_rounds(mechanism, sampler, rounds, clients, tensors) if e.kind != "gaussian"]
    made = []
    for event in found:
        accountant = "rdp" if event.kind == "fixed_size" else "pld"
        if not events.objection(event, mechanism.adjacency, accountant):
            at = accounting.by_count(event, delta, accountant=accountant)
            made.append(Way(event, _counted(mechanism, sampler, event), at))
    return made


def _counted(mechanism: Mechanism, sampler: Sampler, event: Event) -> Callable[[int], int]:
    if event.kind != "gaussian":
        return lambda rounds: rounds
    if mechanism.span:
        return lambda rounds: 1  # the first rounds of a release are post-processing of all of it
    return lambda rounds: min(int(sampler.max_participations(rounds)), rounds)


def best(found: Sequence[Way], delta: float) -> tuple[float, Way | None]:
    """(epsilon of the whole run, the way that gives it); (infinity, None) without any."""
    scored = [(way.at(way.event.count, delta), k) for k, way in enumerate(found)]
    if not scored:
        return math.inf, None
    epsilon, k = min(scored)
    return epsilon, found[k]


def after(found: Sequence[Way], rounds: int, delta: float) -> float:
    """Epsilon after the first `rounds` rounds of the run: the least of all ways; infinite without any."""
    return min((way.at(way.count(rounds), delta) for way in found), default=math.inf)


def by_delta(found: Sequence[Way], deltas: Sequence[float] = DELTAS) -> list[dict[str, float]]:
    """[{'delta', 'epsilon'}] of the whole run."""
    least = lambda delta: min(way.at(way.event.count, delta) for way in found)
    return [{"delta": delta, "epsilon": least(delta)} for delta in deltas] if found else []


def by_round(found: Sequence[Way], rounds: int, delta: float) -> list[dict[str, float]]:
    """[{'round', 'epsilon'}] after some of the rounds, the last among them."""
    slow = any(way.event.kind == "fixed_size" for way in found)
    return [{"round": r, "epsilon": after(found, r, delta)} for r in _some(rounds, slow)] if found else []


def _some(rounds: int, slow: bool = False) -> list[int]:
    points = min(rounds, _SLOW_POINTS if slow else _POINTS)
    return sorted({max(1, round(rounds * (k + 1) / points)) for k in range(points)} | {rounds})


def curve(event: Event, deltas: Sequence[float] = DELTAS, adjacency: str = "", accountant: str = "pld") -> Any:
    """[{'delta', 'epsilon'}] of one event; the grid is that of the middle delta."""
    at = accounting.by_count(event, sorted(deltas)[len(deltas) // 2], adjacency, accountant)
    return [{"delta": delta, "epsilon": at(event.count, delta)} for delta in deltas]


def gdp_mu(found: Event | Sequence[Event]) -> float | None:
    """mu such that the releases are mu-GDP: sqrt(sum of count / z^2), exact for Gaussians; None for anything else.

    Source: Dong, Roth and Su, "Gaussian differential privacy" (2022), Corollary 3.3. Sampled releases are close to one
    Gaussian only in a limit, so no mu is claimed for them; `mu_at` compares them at one delta.
    """
    found = [found] if isinstance(found, Event) else list(found)
    if any(event.kind != "gaussian" or (event.count and not event.noise_multiplier > 0) for event in found):
        return None
    return math.sqrt(sum(event.count / event.noise_multiplier**2 for event in found if event.count))


def mu_at(epsilon: float, delta: float) -> float:
    """The mu of the Gaussian mechanism with this epsilon at this delta: equal there, and nowhere else promised."""
    return 1 / accounting.gaussian_sigma(epsilon, delta) if epsilon > 0 else 0.0


def of_client(row: Mapping[str, Any], *, local_epochs: int, sampler: Sampler, rounds: int, delta: float) -> Way | None:
    """What a row of accounting.client_ledger rests on, as a Way; None for a row without a guarantee or without steps.

    Args:
      row: of the whole run.
      local_epochs: of a round.
      sampler: whose max_participations(rounds) the row was made with.
    """
    epsilon = row["epsilon_pld"]
    if not row["steps"] or epsilon is None or math.isinf(epsilon):
        return None
    times = lambda r: min(int(sampler.max_participations(r)), r)
    poisson, q = row["sampling"] == "poisson", row["q"]
    # Shuffled epochs: the unit is in one step of each, whatever their order; nothing is sampled.
    each = row["steps"] // times(rounds) if poisson else local_epochs
    amplified = poisson and q < 1
    event = Event("poisson" if amplified else "gaussian", row["noise_multiplier"], each * times(rounds))
    event = replace(event, q=q) if amplified else event
    return Way(event, lambda r: each * times(r), accounting.by_count(event, delta, row["adjacency"]))


def client_extras(
    rows: Sequence[Mapping[str, Any]], *, local_epochs: int, sampler: Sampler, rounds: int, delta: float
) -> dict[str, Any]:
    """What a ledger of DP-SGD clients tells beside its rows, of the worst client.

    Returns: {'events' (described), 'curve', 'per_round', 'gdp_mu' (None unless Gaussian), 'of' (the client)}. Deltas of
    the curve include what the capacity of a Poisson batch adds. Without a guarantee for the worst: empty lists.
    """
    worst = max((row for row in rows if row["steps"]), key=_epsilon, default=None)
    way = worst and of_client(worst, local_epochs=local_epochs, sampler=sampler, rounds=rounds, delta=delta)
    if not way:
        return {"events": [], "curve": [], "per_round": [], "gdp_mu": None, "of": worst and worst["client"]}
    assert worst is not None
    at = max(worst["epsilon_pld"], worst["epsilon_rdp"] or 0.0)
    cut = worst["delta_slack"] / (1 + math.exp(min(at, 700.0)))  # accounting.cut_slack
    points: list[dict[str, float]] = []
    for point in by_delta([way])[::-1]:  # a cut may cost more delta than a larger epsilon saves
        point["delta"] = min(1.0, point["delta"] + cut * (1 + math.exp(min(point["epsilon"], 700.0))))
        if not points or point["delta"] < points[0]["delta"]:
            points.insert(0, point)
    doubled = 2.0 if worst["adjacency"] == "replace-one" else 1.0
    mu = gdp_mu(way.event)
    return {
        "events": [events.described(way.event)],
        "curve": points,
        "per_round": by_round([way], rounds, delta),
        "gdp_mu": None if mu is None else doubled * mu,
        "of": worst["client"],
    }


def _epsilon(row: Mapping[str, Any]) -> float:
    return math.inf if row["epsilon_pld"] is None else row["epsilon_pld"]
