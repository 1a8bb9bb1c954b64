"""Noise that is correlated over the rounds: the banded matrix mechanism, for schedules that keep a client away a while.

Source: Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private training" (2023);
Toeplitz strategies: McKenna, "Scaling up the banded matrix factorization mechanism" (2024). With X the T totals of a
run as rows and C a lower triangular matrix, the mechanism releases X + C^-1 Z, where Z has independent normal entries.
This is a function of C X + Z: a Gaussian mechanism once for the whole run, of sensitivity max ||C (X - X')||. It stays
one where later totals depend on earlier releases (Denisov et al. 2022). Where a model is the sum of all releases so
far, noise that is negatively correlated over rounds cancels in the sum: the model gets less of it at the same epsilon.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks, noise, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, ProvenBound, Tree, Variables
from fedjax_seg.privacy import gaussian

_MISSED = 0x6E02  # stream of a round's aggregator key: noise of rounds that released nothing
_STEPS = 200  # of the optimiser; it stands still after some 20


class Strategy(NamedTuple):
    """A lower triangular banded Toeplitz matrix C [rounds, rounds], and what it costs.

    Attributes:
      coefficients: of the first column, not negative, not increasing, of norm 1; as many as there are bands. Each is a
        float32 number.
      sensitivity_squared: max ||C u||^2 over u [rounds] with |u_t| <= 1 in the rounds of one client, 0 in others.
      rounds, separation, participations: the promise that it rests on: over so many rounds a client is in at most
        `participations` of them, any two at least `separation` apart.
    """

    coefficients: tuple[float, ...]
    sensitivity_squared: float
    rounds: int
    separation: int
    participations: int


def strategy(rounds: int, separation: int, participations: int | None = None, bands: int = 0) -> Strategy:
    """The Toeplitz strategy with the least mean squared error of the prefix sums, by L-BFGS in float64 on the CPU.

    Sensitivity. The coefficients are not negative, so all inner products of columns of C are not negative and the worst
    case of ||C (X - X')||, rows of X - X' being 0 or of norm at most 1, is that of rows all equal. They do not
    increase, so it is participation in the rounds 0, b, 2b, ... (Kalinin and Lampert, "Banded square root matrix
    factorization for differentially private model training" (2024), Theorem 2). What the optimiser returns is projected
    onto these conditions first. With bands <= separation the columns do not overlap: at most `participations`.

    Args:
      rounds: T >= 1, of the whole run.
      separation: b >= 1, the fewest rounds between two participations of a client.
      participations: most rounds of a client, >= 1; None = ceil(T/b), the most that the separation allows.
      bands: in [1, separation]; 0 = min(separation, T), the best. 1 is independent noise.
    """
    checks.number("matrix noise: rounds", rounds, low=1, integer=True)
    checks.number("matrix noise: separation", separation, low=1, integer=True)
    most = -(-rounds // separation)
    if participations is not None:
        checks.number("matrix noise: participations", participations, low=1, integer=True)
        most = min(most, int(participations))
    checks.number("matrix noise: bands (0 = automatic)", bands, low=0, high=separation, integer=True)
    bands = min(bands or separation, rounds)
    coefficients = _optimised(rounds, bands) if bands > 1 else np.ones(1, np.float32)
    squared = _sensitivity_squared(coefficients, rounds, separation, most) if bands > 1 else float(most)
    return Strategy(tuple(coefficients.tolist()), squared, int(rounds), int(separation), most)


def privatize_banded(aggregator: Aggregator, *, noise_multiplier: float, strategy: Strategy) -> Aggregator:
    """The aggregator with noise on the total of every round that is correlated over the rounds of the run.

    As `gaussian.privatize` (once per round, on the finished total, whoever is present, before `decode`, from the same
    stream of the round's aggregator key), with row t of C^-1 Z, Z ~ N(0, (noise_multiplier bound)^2
    sensitivity_squared). ONE release of multiplier noise_multiplier for the whole run: the noise has no meaning for
    fewer or more rounds, and a run of T rounds cannot be made longer.

    State: {'inner': the aggregator's, 'done': int32, 'noise': [bands - 1, D] float32, the last rows of C^-1 Z}; bands=1
    or no noise: {'inner'} alone. A round whose release was thrown away leaves the state as it was; its row is drawn
    then, so that row t always belongs to round t. (Else participations would be nearer to each other than promised.)
    From round T on, where nothing is proven any more, the delta is NaN: the round stops instead of releasing.

    Args:
      noise_multiplier: z >= 0, of the whole run; 0 changes nothing and promises nothing.
      strategy: for the schedule that is run.
    Returns: the aggregator with `mechanism` set: its `span` is T, its sensitivity bound * sqrt(sensitivity_squared).
    Raises: UserError unless it reads the sum, has a ProvenBound of a message, and no mechanism yet.
    """
    checks.number("noise_multiplier", noise_multiplier, low=0.0)
    bound = _sum_bound(aggregator)
    z, scale = float(noise_multiplier), math.sqrt(strategy.sensitivity_squared)
    stddev, remembers = z * bound.value * scale, z > 0 and len(strategy.coefficients) > 1

    def init(variables: Variables) -> Tree:
        inner = aggregator.init(variables)
        if not remembers:
            return {"inner": inner}
        size = _message_size(aggregator, inner, variables)
        rows = jnp.zeros((len(strategy.coefficients) - 1, size), jnp.float32)
        return {"inner": inner, "done": jnp.int32(0), "noise": rows}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        rest, own = jax.random.fold_in(key, 0), jax.random.fold_in(key, gaussian.NOISE)
        kept = {}
        if z > 0:
            row = noise.normal(own, tree.size(total))
            if remembers:
                past = _caught_up(strategy, state, round, jax.random.fold_in(key, _MISSED))
                row, past = _next_row(strategy, row, past)
                kept = {"done": jnp.asarray(round, jnp.int32) + 1, "noise": past}
            row = jnp.where(jnp.asarray(round) < strategy.rounds, stddev, jnp.nan) * row
            total = tree.add(total, tree.unflat(row, total))
        delta, inner, metrics = aggregator.decode(
            total, cohort, state["inner"], variables=variables, round=round, key=rest
        )
        return delta, {"inner": inner, **kept}, metrics

    proof = (
        f"{bound.proof}; rounds of one client are at least {strategy.separation} apart, at most"
        f" {strategy.participations} of {strategy.rounds}: times sqrt({strategy.sensitivity_squared:.6g}) for a banded"
        f" Toeplitz strategy of {len(strategy.coefficients)} band(s), one release for the run"
    )
    mechanism = gaussian.mechanism_of(bound.unit, bound.value * scale, z, bound.adjacency, proof)._replace(
        span=strategy.rounds, separation=strategy.separation, participations=strategy.participations
    )
    kept_properties = aggregator.properties & {"permutation", "weighted"} if z else aggregator.properties
    return aggregator._replace(
        init=init,
        broadcast=lambda state: aggregator.broadcast(state["inner"]),
        decode=decode,
        mechanism=mechanism,
        properties=kept_properties,
    )


def _sum_bound(aggregator: Aggregator) -> ProvenBound:
    bound = aggregator.bound
    if not isinstance(bound, ProvenBound) or aggregator.reads != "sum" or aggregator.mechanism is not None:
        found = type(bound).__name__ if bound is not None else "none"
        raise checks.UserError(
            f"privatize_banded: an aggregator with bound {found}, reads {aggregator.reads!r} and"
            f" {'a' if aggregator.mechanism else 'no'} mechanism found; a ProvenBound, reads 'sum' and no mechanism"
            " expected; use a sum of clipped messages"
        )
    return bound


def _optimised(rounds: int, bands: int) -> np.ndarray:
    """float32 [bands], of norm 1."""
    from jax_privacy.matrix_factorization import toeplitz  # here: it is slow to load

    # On the CPU whatever else there is, so that a run that is resumed elsewhere goes on with the same strategy.
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        start = toeplitz.optimal_max_error_strategy_coefs(bands).astype(jnp.float64)
        found = toeplitz.optimize_banded_toeplitz(rounds, bands, strategy_coef=start, max_optimizer_steps=_STEPS)
        found = np.asarray(found, np.float64)
    falling = np.minimum.accumulate(np.maximum(found, 0))
    return (falling / np.linalg.norm(falling)).astype(np.float32)


def _sensitivity_squared(coefficients: np.ndarray, rounds: int, separation: int, participations: int) -> float:
    from jax_privacy.matrix_factorization import toeplitz

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = jnp.asarray(coefficients.astype(np.float64))
        return float(toeplitz.minsep_sensitivity_squared(exact, separation, participations, n=rounds))


def _next_row(strategy: Strategy, drawn: Array, past: Array) -> tuple[Array, Array]:
    """Row t of C^-1 Z [D] from row t of Z [D] and the rows before, the newest first [bands - 1, D]; and those next."""
    from jax_privacy.matrix_factorization import toeplitz

    inverse = toeplitz.inverse_as_streaming_matrix(jnp.asarray(strategy.coefficients, jnp.float32))
    return inverse.multiply_next(drawn, past)


def _caught_up(strategy: Strategy, state: Tree, round: Array, key: Array) -> Array:
    """The rows before `round`: those of rounds that released nothing are drawn now."""

    def missing(carry: Any) -> Array:
        return carry[0] < round

    def draw(carry: Any) -> Any:
        done, past = carry
        drawn = noise.normal(jax.random.fold_in(key, done), past.shape[1])
        return done + 1, _next_row(strategy, drawn, past)[1]

    return jax.lax.while_loop(missing, draw, (state["done"], state["noise"]))[1]


def _message_size(aggregator: Aggregator, inner: Tree, variables: Variables) -> int:
    """D, the entries of a message."""

    def encode(variables: Variables) -> Tree:
        update = ClientUpdate(variables, jnp.float32(1), jnp.int32(1), {}, {})
        return aggregator.encode(update, aggregator.broadcast(inner), variables=variables, key=jax.random.key(0))

    return tree.size(jax.eval_shape(encode, variables))
