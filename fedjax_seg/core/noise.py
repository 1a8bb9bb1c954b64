"""Gaussian noise whose tails are long enough for a privacy claim.

jax.random.normal makes a float32 from 23 random bits: it never leaves [-5.42, 5.22]. A release beyond that, seen from a
neighbouring data set, gives the difference away for certain, with a probability of P(N > 5.22 - 1/z): 6e-4 at a noise
multiplier of z = 0.5, where delta = 1e-5 is claimed. Here a radius is made from 64 bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Tree

REACH = math.sqrt(2 * 64 * math.log(2))  # 9.42 standard deviations: P(|N| > REACH) = 5e-21
# The least noise multiplier z that may carry a claim. What cannot be reached has probability Q(REACH - 1/z): 2e-8 at
# 0.25, and this is per release: 1.5e-4 for 5000 of them, more than the claim. At 0.35 it is 2.6e-11, 3e-7 for 10,000.
LEAST = 0.35


def normal(key: Array, count: int) -> Array:
    """float32 [count], independent standard normal draws, by Box and Muller (1958) with a radius of 64 bits."""
    half = (count + 1) // 2
    bits = jax.random.bits(key, (3, half), jnp.uint32)
    high, low, turn = (b.astype(jnp.float32) for b in bits)
    uniform = jnp.minimum(high * 2.0**-32 + (low + 0.5) * 2.0**-64, 1.0)  # in (0, 1]: never 0, whose logarithm is not
    radius, angle = jnp.sqrt(-2 * jnp.log(uniform)), turn * (2 * math.pi * 2.0**-32)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)])[:count]


def add(values: Tree, key: Array, stddev: Any) -> Tree:
    """values + independent N(0, stddev^2) in every coordinate; a stddev that is the number 0 changes nothing.

    One draw for all leaves: on a CPU a draw of its own costs every tensor two seconds of compilation.
    """
    if isinstance(stddev, int | float) and stddev == 0:
        return values
    return tree.add(values, tree.unflat(stddev * normal(key, tree.size(values)), values))


def objections(noise_multiplier: float) -> tuple[str, ...]:
    """Why a noise multiplier carries no claim; () where it may."""
    if noise_multiplier >= LEAST:
        return ()
    if not noise_multiplier > 0:
        return ("there is no noise",)
    return (
        f"the noise multiplier is below {LEAST}: the {REACH:.1f} standard deviations that float32 noise reaches end it",
    )
