"""Epsilons of what ran (events.Event), and what a run of DP-SGD guarantees to the units of each client.

Adjacency is 'zero-out' unless said otherwise: the two data sets differ in the data of one unit, which one of them
replaces by nothing, and the number of units is public. It fits what runs here, since the sampling probability, the
number of steps and the divisor of a sum are all computed from that number. For Poisson-sampled Gaussians it gives the
same epsilon as 'add-remove'. 'replace-one' (other data in a unit's place) moves a sum by up to 2 C.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dp_accounting
from dp_accounting import pld, rdp
from scipy import optimize, stats

from fedjax_seg.core import checks, noise
from fedjax_seg.core.types import Mechanism
from fedjax_seg.privacy import balls_in_bins
from fedjax_seg.privacy.events import ACCOUNTANTS, ADJACENCIES, Event, objection

_MOST_NOISE = 1e4  # where a calibration ends
_RELATIONS = (dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, dp_accounting.NeighboringRelation.REPLACE_ONE)
_ROUGH = tuple(range(2, 65))  # Renyi orders; fractional ones are slow under sampling
# Fractional ones below 1.6 hardly converge; large ones matter at next to no epsilon.
_ORDERS = (*(1.6 + i / 10 for i in range(14)), *(3 + i / 4 for i in range(12)), *range(6, 65), 128, 256)
_WHOLE = (1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64)  # of subsets of fixed size: quadratic in the order

NO_AMPLIFICATION = (
    "shuffled epochs: the Poisson-sampled epsilon is not proven for them and is not printed (batch_sampling=poisson"
    " earns it); the bound holds for any order of the examples, each once per epoch"
)


def poisson_epsilon(
    noise_multiplier: float, q: float, steps: int, delta: float, *, accountant: str = "pld", adjacency: str = "zero-out"
) -> float:
    """Epsilon of `steps` sums of clipped terms with Gaussian noise, every unit in each of them with probability q.

    Source: Koskela et al. (2020) and Doroshenko et al. (2022) for 'pld' (tight up to the discretisation, pessimistic),
    Mironov et al. (2019) for 'rdp'; both as in dp-accounting. For the paper's sigma = 1.2, q = 0.02, 5000 steps and
    delta = 1e-5: 6.76 and 7.32.

    Args:
      noise_multiplier: standard deviation of the noise / clip norm, >= 0; 0 gives infinity.
      adjacency: 'replace-one' with 'pld' only: the other accountant has no such theorem.
    """
    checks.number("noise_multiplier", noise_multiplier, low=0.0)
    checks.number("sampling probability q", q, low=0.0, high=1.0)
    checks.number("steps", steps, low=0, integer=True)
    if q == 0:
        return 0.0
    event = Event("gaussian" if q == 1 else "poisson", noise_multiplier, int(steps), q=q)
    return epsilon_of(event, delta, adjacency, accountant)


def epsilon_of(events: Event | Sequence[Event], delta: float, adjacency: str = "", accountant: str = "pld") -> float:
    """Epsilon of all events together at delta. Infinite without noise.

    Args:
      adjacency: '' = that of the events. 'replace-one' of events stated for zero-out doubles what a unit moves.
      accountant: 'pld' (exact for Gaussians, else tight up to a pessimistic grid) or 'rdp' (a cross-check).
    Raises: UserError where no theorem gives one (events.objection).
    """
    events = (events,) if isinstance(events, Event) else tuple(e for e in events if e.count)
    if not events:
        return 0.0
    if len(events) == 1:
        return by_count(events[0], delta, adjacency, accountant)(events[0].count, delta)
    own = {event.adjacency for event in events}
    asked = adjacency or (own.pop() if len(own) == 1 else "replace-one")
    _check(events, delta, asked, accountant)
    if any(event.noise_multiplier == 0 for event in events):
        return math.inf
    if accountant == "rdp":
        return _renyi(events, asked)(1, delta)
    if any(event.kind == "balls_in_bins" for event in events):
        raise checks.UserError("balls in bins: given together with other releases, alone expected")
    grid = _grid(events, asked, delta)
    total = functools.reduce(lambda a, b: a.compose(b), [_losses(event, asked, grid) for event in events])
    return float(total.get_epsilon_for_delta(delta))


def by_count(event: Event, delta: float, adjacency: str = "", accountant: str = "pld") -> Callable[[int, float], float]:
    """(count, delta) -> epsilon of `count` releases of this kind, the event's own count or fewer: a run on its way.

    The distribution of one release is computed once; `delta` and the event's count set its grid. Else as `epsilon_of`.
    """
    asked = adjacency or event.adjacency
    _check((event,), delta, asked, accountant)
    if event.noise_multiplier == 0 or event.count == 0:
        return lambda count, delta: math.inf if count else 0.0
    if event.kind == "gaussian" and accountant == "pld":
        moved = 1.0 if event.adjacency == asked else _moved(asked)
        return lambda count, delta: any_order_epsilon(event.noise_multiplier / moved, count, delta)
    if accountant == "rdp":
        return _renyi((replace(event, count=1),), asked)
    if event.kind == "balls_in_bins":
        assert event.bins is not None
        return balls_in_bins.by_count(event.noise_multiplier, event.bins)
    one = _losses(replace(event, count=1), asked, _grid((event,), asked, delta))
    several = functools.cache(one.self_compose)
    return lambda count, delta: float(several(count).get_epsilon_for_delta(delta)) if count else 0.0


def any_order_epsilon(noise_multiplier: float, epochs: int, delta: float, *, adjacency: str = "zero-out") -> float:
    """Epsilon of `epochs` passes over the data in which every unit is in one step each, whatever the order.

    In one pass a unit moves a single sum, by at most C; all other steps are the same functions of what was released
    before. So a pass is one Gaussian mechanism, and `epochs` passes are one with noise_multiplier / sqrt(epochs). An
    order drawn at random is a mixture of such runs and no worse. No amplification is claimed, hence the size: 69.5 for
    sigma = 1.2, 100 epochs, delta = 1e-5. It is no loose accounting either: for shuffled batches of the paper's sizes
    Monte Carlo LOWER bounds are 22.9 (q = 0.02) and 30.3 (q = 0.04), after the pair of distributions of Chua et al.,
    "How private are DP-SGD implementations?" (2024), where Poisson sampling gives 6.76 and 10.29.
    """
    checks.number("epochs", epochs, low=0, integer=True)
    checks.number("noise_multiplier", noise_multiplier, low=0.0)
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
    checks.one_of("adjacency", adjacency, ADJACENCIES)
    if epochs == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    return float(dp_accounting.get_epsilon_gaussian(noise_multiplier / _moved(adjacency) / math.sqrt(epochs), delta))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism, noise_multiplier = standard deviation / sensitivity. Exact.

    Source: Balle and Wang (2018), Theorem 8; the sensitivity is that of whatever adjacency is meant.
    """
    return any_order_epsilon(noise_multiplier, 1, delta)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The least standard deviation / sensitivity that makes one Gaussian mechanism (epsilon, delta). Exact.

    Source: Balle and Wang (2018), Algorithm 1: 3.73063 for (1, 1e-5) and 0.49989 for (10, 1e-5).
    """
    checks.number("epsilon", epsilon, low=0.0, above=0.0)
    checks.number("delta", delta, low=0.0, above=0.0, high=0.5)
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def calibrate(target_epsilon: float, q: float, steps: int, delta: float) -> float:
    """The smallest noise multiplier whose `poisson_epsilon` is at most the target, rounded up by less than 2e-4.

    core.noise.LEAST where next to no noise is needed. For a federation take the worst client: the largest of the
    values over the clients' (q, steps).
    """
    checks.number("target_epsilon", target_epsilon, low=0.01)
    checks.number("steps", steps, low=1, integer=True)
    checks.number("sampling probability q", q, low=0.0, above=0.0, high=1.0)

    return least_multiplier(lambda z: poisson_epsilon(z, q, steps, delta), target_epsilon)


def least_multiplier(epsilon_at: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier z with epsilon_at(z) <= target, rounded up by less than 2e-4; at least noise.LEAST.

    Args:
      epsilon_at: z > 0 -> epsilon, falling in z.
    """
    checks.number("target_epsilon", target, low=0.01)
    excess = functools.cache(lambda log: math.log(max(epsilon_at(math.exp(log)), 1e-9) / target))  # nearly straight
    high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(_MOST_NOISE):
            raise checks.UserError(f"target_epsilon: {target:g} needs a noise multiplier above {_MOST_NOISE:g}")
    low = high - math.log(2)
    while excess(low) <= 0:
        low, high = low - math.log(2), low
        if high < math.log(noise.LEAST):
            return noise.LEAST
    found = math.exp(optimize.brentq(excess, low, high, xtol=1e-5))
    rounded = math.ceil(found * 1e4) / 1e4
    return max(noise.LEAST, rounded if excess(math.log(rounded)) <= 0 else rounded + 1e-4)


def cut_slack(epsilon: float, units: int, q: float, capacity: int, steps: int) -> float:
    """What cutting Poisson draws to `capacity` adds to delta.

    The mechanism that runs, M', differs from the one with whole draws, M, only on the event that some draw is larger
    than the capacity; which units are drawn has nothing to do with their data, so this event has the same probability
    beta <= steps * P(Binomial(units, q) > capacity) with both of two adjacent data sets D, D'. Hence, for every set S,
    P(M'(D) in S) <= P(M(D) in S) + beta <= e^eps P(M(D') in S) + delta + beta
                  <= e^eps P(M'(D') in S) + delta + beta (1 + e^eps).
    """
    if capacity >= units:
        return 0.0
    beta = steps * float(stats.binom.sf(capacity, units, q))
    return min(1.0, beta * (1 + math.exp(min(epsilon, 700.0))))


def client_ledger(
    mechanism: Mechanism,
    *,
    sampling: str,
    batch_size: int,
    local_epochs: int,
    participations: int,
    units: Mapping[str, int],
    delta: float,
    capacity: int = 0,
) -> list[dict[str, Any]]:
    """One row per client: what its DP-SGD guarantees to one of its units over the run.

    Each client's guarantee is about its own units and its own steps; combining clients, the server's step and whatever
    is computed later from the models is post-processing.

    Args:
      mechanism: of the client (clients.dp_sgd).
      sampling: 'poisson' or 'shuffled', how batches are drawn (config.batch_sampling).
      batch_size, local_epochs: of the run.
      participations: the most rounds that any client takes part in (Sampler.max_participations(rounds)).
      units: {client: number of its units}: examples, or patients where the mechanism's unit is the patient.
      delta: the target; `delta` of a row is this plus what the capacity adds.
      capacity: rows of a Poisson batch (local_batches.poisson_capacity); 0 = draws are never cut.

    Returns: rows {'client', 'unit', 'adjacency', 'units', 'sampling', 'q' (None where no epsilon rests on it),
      'q_origin' ('16/800 = 0.02'), 'steps', 'noise_multiplier', 'clip', 'epsilon_pld', 'epsilon_rdp' (None where it
      does not apply), 'delta', 'delta_slack', 'rests_on'}. Without a guarantee epsilon_pld is infinite.
    """
    checks.one_of("sampling", sampling, ("poisson", "shuffled"))
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
    row_of = _poisson_row if sampling == "poisson" else _shuffled_row
    known: dict[int, dict[str, Any]] = {}
    rows = []
    for client, count in units.items():
        if count == 0:
            known[0] = _row(0.0, 0.0, None, "none: no unit, no step", 0, delta, 0.0, "the client has no data")
        if count not in known:
            known[count] = row_of(mechanism, count, batch_size, local_epochs, participations, delta, capacity)
        common = {"client": client, "unit": mechanism.unit, "adjacency": mechanism.adjacency, "units": int(count)}
        noise = {"noise_multiplier": mechanism.noise_multiplier, "clip": mechanism.sensitivity}
        rows.append({**common, "sampling": sampling, **noise, **known[count]})
    return rows


def _poisson_row(
    mechanism: Mechanism, units: int, batch: int, epochs: int, rounds: int, delta: float, capacity: int
) -> dict[str, Any]:
    q, steps = min(1.0, batch / units), -(-units // batch) * epochs * rounds
    origin = f"{batch}/{units} = {q:.4g}" if units > batch else f"1 ({units} units, batches of {batch})"
    if not mechanism.formal or mechanism.noise_multiplier == 0:
        return _row(math.inf, math.inf, q, origin, steps, delta, 0.0, _nothing(mechanism))
    z, adjacency = mechanism.noise_multiplier, mechanism.adjacency
    tight = poisson_epsilon(z, q, steps, delta, adjacency=adjacency)
    loose = None if adjacency == "replace-one" else poisson_epsilon(z, q, steps, delta, accountant="rdp")
    slack = cut_slack(max(tight, loose or 0.0), units, q, capacity, steps) if capacity else 0.0
    rests = f"Poisson sampling of {mechanism.unit}s, the Gaussian mechanism, PLD composition over {steps} steps"
    if q == 1:
        rests = f"the Gaussian mechanism, composed over {steps} steps; every {mechanism.unit} is in every step"
    if slack:
        rests += f"; batches cut at {capacity} rows (in delta)"
    if delta + slack >= 1:
        rests = f"nothing: at epsilon {tight:.3g} delta is 1; {rests}"
        return _row(math.inf, None, q, origin, steps, 1.0, slack, rests)
    return _row(tight, loose, q, origin, steps, delta + slack, slack, rests)


def _shuffled_row(
    mechanism: Mechanism, units: int, batch: int, epochs: int, rounds: int, delta: float, capacity: int
) -> dict[str, Any]:
    del capacity
    steps, origin = -(-units // batch) * epochs * rounds, "none: batches are shuffled epochs, no unit is sampled"
    if not mechanism.formal or mechanism.noise_multiplier == 0:
        return _row(math.inf, None, None, origin, steps, delta, 0.0, _nothing(mechanism))
    if mechanism.unit != "example":
        why = f"nothing: several examples of one {mechanism.unit} are in a shuffled epoch; batch_sampling=poisson"
        return _row(math.inf, None, None, origin, steps, delta, 0.0, why)
    epsilon = any_order_epsilon(mechanism.noise_multiplier, epochs * rounds, delta, adjacency=mechanism.adjacency)
    return _row(epsilon, None, None, origin, steps, delta, 0.0, f"{NO_AMPLIFICATION}; {epochs * rounds} epochs")


def _row(
    tight: float, loose: float | None, q: float | None, origin: str, steps: int, delta: float, slack: float, rests: str
) -> dict[str, Any]:
    found = {"q": q, "q_origin": origin, "steps": steps, "epsilon_pld": tight, "epsilon_rdp": loose}
    return found | {"delta": delta, "delta_slack": slack, "rests_on": rests}


def _check(events: Sequence[Event], delta: float, adjacency: str, accountant: str) -> None:
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
    checks.one_of("accountant", accountant, ACCOUNTANTS)
    checks.one_of("adjacency", adjacency, ADJACENCIES)
    for event in events:
        checks.number("noise_multiplier", event.noise_multiplier, low=0.0)
        if found := objection(event, adjacency, accountant):
            raise checks.UserError(found)


def _moved(adjacency: str) -> float:
    """What a unit moves, in units of the zero-out sensitivity."""
    return 2.0 if adjacency == "replace-one" else 1.0


def _noise_of(event: Event) -> float:
    """Standard deviation / the zero-out sensitivity; of events stated for replace-one, half that sensitivity."""
    return event.noise_multiplier * _moved(event.adjacency)


def _gaussian(noise_multiplier: float, accountant: str, adjacency: str) -> Any:
    """The event as this accountant reads it. dp-accounting 0.6: under replace-one the PLD accountant doubles the
    sensitivity by itself, the RDP accountant does not; passing the same event to both halves one of the epsilons."""
    return dp_accounting.GaussianDpEvent(noise_multiplier / (1.0 if accountant == "pld" else _moved(adjacency)))


def _losses(event: Event, adjacency: str, grid: float) -> Any:
    """The privacy loss distribution of all releases of an event, on that grid."""
    one: Any = _gaussian(_noise_of(event), "pld", adjacency).noise_multiplier
    same = {"value_discretization_interval": grid, "neighboring_relation": _RELATIONS[adjacency == "replace-one"]}
    made = pld.privacy_loss_distribution
    if event.kind == "gaussian":
        return made.from_gaussian_mechanism(one / math.sqrt(event.count), **same)
    if event.kind == "poisson":
        return made.from_gaussian_mechanism(one, sampling_prob=event.q, **same).self_compose(event.count)
    cut = made.from_truncated_subsampled_gaussian_mechanism(event.population, event.q, event.capacity, one, **same)
    return cut.self_compose(event.count)


def _renyi(events: Sequence[Event], adjacency: str, orders: Sequence[float] = ()) -> Callable[[float, float], float]:
    """(times, delta) -> epsilon of so many times all of the events; divergences, which add up, are computed once."""
    kinds = {event.kind for event in events}
    usual: Any = _WHOLE if "fixed_size" in kinds else None if kinds == {"gaussian"} else _ORDERS
    total: Any = rdp.RdpAccountant(orders or usual, _RELATIONS[adjacency == "replace-one"])
    for event in events:
        made = _gaussian(_noise_of(event), "rdp", adjacency)
        if event.kind == "fixed_size":
            made = dp_accounting.SampledWithoutReplacementDpEvent(event.population, event.sample, made)
        elif event.kind != "gaussian":
            made = dp_accounting.PoissonSampledDpEvent(event.q, made)
        total.compose(made, event.count)
    return lambda times, delta: float(rdp.compute_epsilon(total._orders, times * total._rdp, delta)[0])


def _grid(events: Sequence[Event], adjacency: str, delta: float) -> float:
    """Of the privacy losses. A grid of h adds about h^2 / 8 per release to their variance, which is near
    (epsilon / 6)^2 at usual deltas: so h makes epsilon at most a thousandth too large (it is never too small)."""
    plain = [replace(e, noise_multiplier=_noise_of(e) / _moved(adjacency), adjacency="zero-out") for e in events]
    rough = _renyi(plain, "zero-out", _ROUGH)(1, delta)
    steps = sum(e.count for e in events if e.kind != "gaussian") or 1
    return min(3e-3, max(1e-5, rough / 6 * math.sqrt(2e-3 / steps)))


def _nothing(mechanism: Mechanism) -> str:
    return f"nothing: {mechanism.reasons[0] if mechanism.reasons else 'there is no noise'}"
