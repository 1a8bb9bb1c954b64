"""Local batches of in-memory data, gathered on the device from an index plan: shuffled epochs, or Poisson samples."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batches

BatchesOf = Callable[[Array, Array, Array, Array], Batches]
SAMPLINGS = ("shuffled", "poisson")
UNITS = ("example", "patient")
UNIT = "unit"  # the array of patient numbers; it steers the sampling and never reaches a model
TAIL = 1e-15  # the chance per step that a Poisson sample does not fit into its batch


def make(
    sampling: str, arrays: Mapping[str, Array], batch_size: int, epochs: int, *, unit: str = "example", longest: int
) -> BatchesOf:
    """The batches of a run.

    Args:
      sampling: 'shuffled' (in_memory) or 'poisson'.
      arrays: {name: [N, ...]} on the device; 'unit' int32 [N], where it is there, is the number of a case's patient.
      batch_size, epochs: as in `in_memory` and `poisson`.
      unit: what is sampled: 'example', or 'patient' (Poisson only).
      longest: the most units any client of the run has (max of `unit_counts`).
    """
    checks.one_of("batch_sampling", sampling, SAMPLINGS)
    if sampling == "poisson":
        return poisson(arrays, batch_size, epochs, unit=unit, longest=longest)
    checks.one_of("unit of privacy", unit, UNITS)
    if unit != "example":
        raise checks.UserError(
            "batch_sampling: 'shuffled' given with the patient as the unit of privacy, 'poisson' expected, because"
            " several cases of a patient would meet in one step; use --config.batch_sampling=poisson"
        )
    return in_memory(arrays, batch_size, epochs)


def in_memory(arrays: Mapping[str, Array], batch_size: int, epochs: int) -> BatchesOf:
    """Shuffled epochs over a client's own cases; the last batch of an epoch is masked, never padded with repeats.

    Args:
      arrays: {'x': [N, ...], 'y': [N, ...]} on the device.
      batch_size: B.
      epochs: local epochs per round, each with a shuffle of its own.

    Returns: (plan [M], size, client, key) -> Batches of ceil(size/B) * epochs steps. The order of a client's cases
      depends on its key alone: not on M, nor on who else takes part.
    """
    _check(batch_size, epochs)
    seen = _without_unit(arrays)

    def batches_of(plan: Array, size: Array, client: Array, key: Array) -> Batches:
        capacity = plan.shape[0]
        per_epoch = (size + batch_size - 1) // batch_size

        def shuffled(epoch: Array) -> Array:
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, epoch), i))(jnp.arange(capacity))
            draw = jax.vmap(jax.random.uniform)(keys)
            order = jnp.argsort(jnp.where(jnp.arange(capacity) < size, draw, 2.0))
            return jnp.concatenate([plan[order], jnp.zeros((batch_size,), plan.dtype)])  # the last slice stays inside

        orders = jax.vmap(shuffled)(jnp.arange(epochs))

        def at(step: Array) -> dict[str, Array]:
            epoch, first = step // jnp.maximum(per_epoch, 1), (step % jnp.maximum(per_epoch, 1)) * batch_size
            index = jax.lax.dynamic_slice(orders, (epoch, first), (1, batch_size))[0]
            real = first + jnp.arange(batch_size) < size
            index = jnp.where(real, index, index[0])  # masked, but NaN * 0 is NaN: no other client's case comes near
            mask = real.astype(jnp.float32)
            return {**{name: x[index] for name, x in seen.items()}, "mask": mask}

        longest = -(-capacity // batch_size) * epochs
        return Batches(at, per_epoch * epochs, size.astype(jnp.float32), client, longest)

    return batches_of


def poisson(
    arrays: Mapping[str, Array], batch_size: int, epochs: int, *, unit: str = "example", longest: int
) -> BatchesOf:
    """Poisson sampling: in every step each unit of the client joins independently with q = min(1, B / units).

    This is the sampling that the amplified epsilon of DP-SGD is proven for; shuffled epochs are not. A batch has the
    static shape [capacity, ...] with the drawn cases first and the others masked; it may be empty, so its loss is for
    clients that sum over examples (clients.dp_sgd), not for those that divide by the drawn number.

    With the patient as the unit, a patient who joins brings ONE of his cases, drawn uniformly anew in every step. So
    whatever he has in the data, he adds at most one clipped gradient to a step, and joins it with probability q: the
    mechanism is the Poisson-sampled Gaussian over patients, and its epsilon that of n = patients. (Given which case
    stands for him this is the theorem itself; the draw of the case is the same with every data set of that many cases,
    and a mixture of pairs is not easier to tell apart than the worst of them.)

    A draw of more than `capacity` units is cut to the first ones. See privacy.accounting.cut_slack.

    Args:
      arrays: as in `make`; 'unit' is needed for patients.
      batch_size: B, the expected number of units in a step of a client with at least so many.
      epochs: a round has ceil(units / B) * epochs steps.
      unit: 'example' or 'patient'.
      longest: the most units any client of the run has; sets the capacity (`poisson_capacity`).

    Returns: (plan [M], size, client, key) -> Batches with `expected` = q * units. What a step draws depends on the key,
      the step and the position of a unit among the client's (patients: in ascending numbers), and on nothing else. The
      probability is q rounded down by less than 3e-7 of itself, on the safe side of an accountant that uses q.
    """
    _check(batch_size, epochs)
    checks.one_of("unit of privacy", unit, UNITS)
    if unit == "patient" and UNIT not in arrays:
        raise checks.UserError("data: no patient numbers found, an array 'unit' expected, for the patient as the unit")
    capacity = poisson_capacity(longest, batch_size)
    most_steps = -(-longest // batch_size) * epochs
    seen = _without_unit(arrays)

    def batches_of(plan: Array, size: Array, client: Array, key: Array) -> Batches:
        groups = _patients(plan, size, arrays[UNIT]) if unit == "patient" else _singles(plan, size)
        position = jnp.arange(plan.shape[0])
        # In float32 a quotient and a product are off by 2^-24 each: the factor keeps the threshold below q 2^32.
        q = batch_size / jnp.maximum(groups.number, batch_size + 1).astype(jnp.float32)
        threshold = (q * (1 - 2.0**-22) * 2.0**32).astype(jnp.uint32)

        def at(step: Array) -> dict[str, Array]:
            now = jax.random.fold_in(key, step)
            draw = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(now, i), (2,), jnp.uint32))(position)
            joined = ((draw[:, 0] < threshold) | (groups.number <= batch_size)) & (position < groups.number)
            drawn = jnp.nonzero(joined, size=capacity, fill_value=0)[0]
            real = jnp.arange(capacity) < jnp.sum(joined)
            which = groups.first[drawn]
            if unit == "patient":
                cases = groups.cases[drawn]
                part = ((draw[drawn, 1] >> 8).astype(jnp.float32) * 2.0**-24 * cases).astype(jnp.int32)
                which = which + jnp.minimum(part, cases - 1)
            index = jnp.where(real, groups.order[which], plan[0])  # masked rows hold a case of the client's own
            return {**{name: x[index] for name, x in seen.items()}, "mask": real.astype(jnp.float32)}

        steps = (groups.number + batch_size - 1) // batch_size * epochs
        expected = jnp.minimum(groups.number, batch_size).astype(jnp.float32)
        return Batches(at, steps, size.astype(jnp.float32), client, most_steps, expected)

    return batches_of


def poisson_capacity(units: int, batch_size: int) -> int:
    """Rows of a Poisson batch: the fewest m with P(Binomial(n, B/n) > m) <= 1e-15; never more than n.

    For the client with the most units; it is then enough for all, since for m >= B that tail only grows with n at a
    given mean (Anderson and Samuels, "Some inequalities among binomial and Poisson probabilities", 1967).
    """
    checks.number("units of the largest client", units, low=1, integer=True)
    if units <= batch_size:
        return units
    rows = np.arange(batch_size, units + 1)
    return int(rows[np.argmax(stats.binom.sf(rows, units, batch_size / units) <= TAIL)])


def unit_counts(plan: Any, sizes: Any, numbers: Any = None) -> np.ndarray:
    """How many units every client has; on the host.

    Args:
      plan: int [..., M], the cases of the clients, padded behind `sizes` [...].
      numbers: int [N], the number of every case's patient; None = the unit is the example.
    Returns: int64 [...].
    """
    sizes = np.asarray(sizes).astype(np.int64)
    if numbers is None:
        return sizes
    rows = np.asarray(plan).reshape(-1, np.shape(plan)[-1])
    found = [len(np.unique(np.asarray(numbers)[row[:size]])) for row, size in zip(rows, sizes.ravel())]
    return np.array(found, np.int64).reshape(sizes.shape)


class _Units(NamedTuple):
    """The units of a client, in the first `number` positions: unit i has the `cases[i]` cases from order[first[i]] on.

    Leaves: number scalar; order, first, cases int32 [M].
    """

    number: Array
    order: Array
    first: Array
    cases: Array


def _singles(plan: Array, size: Array) -> _Units:
    return _Units(size, plan, jnp.arange(plan.shape[0]), jnp.ones_like(plan))


def _patients(plan: Array, size: Array, numbers: Array) -> _Units:
    """The cases in the order of their patients' numbers."""
    longest = plan.shape[0]
    real = jnp.arange(longest) < size
    number = jnp.where(real, numbers[plan], jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(number, stable=True)
    number = number[order]
    begins = real & (jnp.concatenate([jnp.ones((1,), bool), number[1:] != number[:-1]]))
    first = jnp.nonzero(begins, size=longest, fill_value=size)[0].astype(jnp.int32)
    ends = jnp.concatenate([first[1:], jnp.asarray(size, jnp.int32)[None]])
    return _Units(jnp.sum(begins).astype(jnp.int32), plan[order], first, ends - first)


def _without_unit(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: x for name, x in arrays.items() if name != UNIT}


def _check(batch_size: int, epochs: int) -> None:
    checks.number("batch_size", batch_size, low=1, integer=True)
    checks.number("local_epochs", epochs, low=1, integer=True)
