"""What a run of DP-SGD guarantees: (epsilon, delta) per client, and what each number rests on.

Adjacency is 'zero-out' unless said otherwise: the two data sets differ in the data of one unit, which one of them
replaces by nothing, and the number of units is public. It fits what runs here, since the sampling probability, the
number of steps and the divisor of a sum are all computed from that number. For Poisson-sampled Gaussians it gives the
same epsilon as 'add-remove'. 'replace-one' (other data in a unit's place) moves a sum by up to 2 C.
"""

import math
from collections.abc import Mapping
from typing import Any

import dp_accounting
from dp_accounting import pld, rdp
from scipy import optimize, stats

from fedjax_seg.core import checks, noise
from fedjax_seg.core.types import Mechanism

ACCOUNTANTS = ("pld", "rdp")
ADJACENCIES = ("zero-out", "add-remove", "replace-one")
# (rough epsilon below, grid of the privacy losses): three digits of epsilon at least, and no slow fine grid far out.
INTERVALS = ((0.3, 1e-5), (5.0, 1e-4), (30.0, 3e-4), (300.0, 1e-3), (math.inf, 1e-2))
_MOST_NOISE = 1e4  # where a calibration ends

NO_AMPLIFICATION = (
    "shuffled epochs: the Poisson-sampled epsilon is not proven for them and is not printed (batch_sampling=poisson"
    " earns it); the bound holds for any order of the examples, each once per epoch"
)


def poisson_epsilon(
    noise_multiplier: float,
    q: float,
    steps: int,
    delta: float,
    *,
    accountant: str = "pld",
    adjacency: str = "zero-out",
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
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
    checks.one_of("accountant", accountant, ACCOUNTANTS)
    checks.one_of("adjacency", adjacency, ADJACENCIES)
    if adjacency == "replace-one" and accountant == "rdp" and q < 1:
        raise checks.UserError("accountant: 'rdp' given for replace-one under Poisson sampling, 'pld' expected")
    if steps == 0 or q == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if q == 1 and accountant == "pld":  # a Gaussian mechanism again, known in closed form
        return any_order_epsilon(noise_multiplier, steps, delta, adjacency=adjacency)

    gaussian = _gaussian(noise_multiplier, accountant, adjacency)
    event = gaussian if q == 1 else dp_accounting.PoissonSampledDpEvent(q, gaussian)
    relation = dp_accounting.NeighboringRelation
    kind = relation.REPLACE_ONE if adjacency == "replace-one" else relation.ADD_OR_REMOVE_ONE
    if accountant == "rdp":
        return float(rdp.RdpAccountant(neighboring_relation=kind).compose(event, int(steps)).get_epsilon(delta))
    rough = rdp.RdpAccountant(orders=range(2, 65)).compose(event, int(steps)).get_epsilon(delta)
    grid = next(grid for below, grid in INTERVALS if rough < below or math.isinf(below))
    total = pld.PLDAccountant(kind, value_discretization_interval=grid).compose(event, int(steps))
    return float(total.get_epsilon(delta))


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
    moved = 2.0 if adjacency == "replace-one" else 1.0
    return float(dp_accounting.get_epsilon_gaussian(noise_multiplier / moved / math.sqrt(epochs), delta))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism, noise_multiplier = standard deviation / sensitivity. Exact.

    Source: Balle and Wang (2018), Theorem 8. Whatever the adjacency, as long as the sensitivity is that adjacency's.
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

    def excess(log_noise: float) -> float:
        epsilon = poisson_epsilon(math.exp(log_noise), q, steps, delta)
        return math.log(max(epsilon, 1e-9) / target_epsilon)  # near a straight line in the logarithm of the noise

    high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(_MOST_NOISE):
            raise checks.UserError(f"target_epsilon: {target_epsilon:g} needs a noise multiplier above {_MOST_NOISE:g}")
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
        return _row(
            math.inf, None, q, origin, steps, 1.0, slack, f"nothing: at epsilon {tight:.3g} delta is 1; {rests}"
        )
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
    return {
        "q": q,
        "q_origin": origin,
        "steps": steps,
        "epsilon_pld": tight,
        "epsilon_rdp": loose,
        "delta": delta,
        "delta_slack": slack,
        "rests_on": rests,
    }


def _gaussian(noise_multiplier: float, accountant: str, adjacency: str) -> Any:
    """The event as this accountant reads it. dp-accounting 0.6: under replace-one the PLD accountant doubles the
    sensitivity by itself, the RDP accountant does not; passing the same event to both halves one of the epsilons."""
    halved = accountant == "rdp" and adjacency == "replace-one"
    return dp_accounting.GaussianDpEvent(noise_multiplier / 2 if halved else noise_multiplier)


def _nothing(mechanism: Mechanism) -> str:
    return f"nothing: {mechanism.reasons[0] if mechanism.reasons else 'there is no noise'}"
