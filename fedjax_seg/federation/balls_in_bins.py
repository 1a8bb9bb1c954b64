"""Balls in bins: every client throws itself into one slot of a cycle and comes in that slot's rounds."""

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Cohort, Sampler

_STREAM = 0x1B873593  # keeps these draws apart from the other samplers'


def balls_in_bins(clients: int, cycle: int) -> Sampler:
    """Each client draws one of `cycle` slots, uniformly and independently, once for the run; it is in the rounds r with
    r mod cycle = its slot.

    Source: Choquette-Choo et al., "Near exact privacy amplification for matrix mechanisms" (2024); for one cycle also
    Chua et al., "Balls-and-bins sampling for DP-SGD" (2025); with clients as balls. Every client comes once per cycle,
    as in a cyclic order; since its slot is its own secret draw, amplification can be proven, as under Poisson sampling.
    Bins are not drawn anew in later cycles, so two participations are exactly `cycle` rounds apart. The price is that
    the size of a round varies, about K / cycle, and may be 0.

    Args:
      clients: K.
      cycle: rounds per cycle, >= 1; 1 = everyone in every round.
    """
    checks.number("sampler: number of clients", clients, low=1, integer=True)
    checks.number("sampler balls_in_bins: cycle", cycle, low=1, high=2**31 - 1, integer=True)

    def sample(key: Array, round: Array) -> Cohort:
        ids = jnp.arange(clients, dtype=jnp.int32)
        joined = slots(key, clients, cycle) == jnp.asarray(round) % cycle
        # Present rows first, so that whole groups of lanes are empty and cost nothing.
        order = jnp.argsort(jnp.where(joined, ids, ids + clients))
        return Cohort(ids[order], joined[order])

    return Sampler(
        sample=sample,
        capacity=clients,
        q=None,
        truncated=False,
        max_participations=lambda rounds: -(-rounds // cycle),
        min_cohort=clients if cycle == 1 else 0,
        min_separation=cycle,
        bins=cycle,
    )


def slots(key: Array, clients: int, cycle: int) -> Array:
    """int32 [clients], the slot of every client, in [0, cycle). key: the run's."""
    return jax.random.randint(jax.random.fold_in(key, _STREAM), (clients,), 0, cycle, jnp.int32)
