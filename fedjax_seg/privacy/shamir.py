"""Shamir's secret sharing: any t of n shares give the secret, any t - 1 tell nothing about it.

Source: Shamir, "How to share a secret" (1979), over the field of `field31`. A secret is a vector of limbs below p, each
with a polynomial of its own; a secret of 256 bits is nine limbs of 30 bits (`limbs`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array
from fedjax_seg.privacy import field31

LIMB = 30  # bits: the largest whole number of bits that always fits below p


def share(randomness: Array, secrets: Array, threshold: Array, points: Array) -> Array:
    """The shares at `points` of random polynomials of degree threshold - 1 whose values at 0 are the secrets.

    Args:
      randomness: a key; or the coefficients, uint32 [n - 1, L] below p, of which the first threshold - 1 are used.
      secrets: uint32 [L], below p.
      threshold: int32 scalar t in [1, n]; may be traced.
      points: uint32 [n] in [1, p), different from one another.

    Returns: uint32 [n, L].
    """
    degree = points.shape[0] - 1
    if jnp.issubdtype(randomness.dtype, jax.dtypes.prng_key):
        randomness = field31.draw(randomness, (degree, secrets.shape[0]))
    coefficients = jnp.where((jnp.arange(degree) < threshold - 1)[:, None], randomness, jnp.uint32(0))
    x = points[:, None]

    def horner(i: Array, value: Array) -> Array:  # from the highest power down to the first
        return field31.multiply(field31.add(value, coefficients[degree - 1 - i]), x)

    value = jnp.zeros((points.shape[0], secrets.shape[0]), jnp.uint32)
    if degree:
        value = jax.lax.fori_loop(0, degree, horner, value)
    return field31.add(value, secrets)


def reconstruct(points: Array, shares: Array, which: Array) -> Array:
    """The secrets from the shares where `which`: the value at 0 by Lagrange. Fewer than t of them give something else.

    Args:
      points: uint32 [n], as in `share`; those outside `which` do not matter.
      shares: uint32 [n, L].
      which: bool [n].

    Returns: uint32 [L].
    """
    one = jnp.uint32(1)

    def with_point(m: Array, fraction: tuple[Array, Array]) -> tuple[Array, Array]:
        above, below = fraction
        other = which[m] & which & (jnp.arange(points.shape[0]) != m)
        above = field31.multiply(above, jnp.where(other, points[m], one))
        return above, field31.multiply(below, jnp.where(other, field31.subtract(points[m], points), one))

    ones = jnp.ones_like(points)
    above, below = jax.lax.fori_loop(0, points.shape[0], with_point, (ones, ones))
    weights = jnp.where(which, field31.multiply(above, field31.inverse(below)), jnp.uint32(0))
    terms = field31.multiply(weights[:, None], shares)
    add_row = lambda i, total: field31.add(total, terms[i])
    return jax.lax.fori_loop(0, points.shape[0], add_row, jnp.zeros_like(shares[0]))


def limbs(secret: bytes) -> np.ndarray:
    """Bytes (a little-endian number) as uint32 limbs of 30 bits, the lowest first."""
    number = int.from_bytes(secret, "little")
    return np.array([number >> at & (1 << LIMB) - 1 for at in range(0, 8 * len(secret), LIMB)], np.uint32)


def from_limbs(words: np.ndarray, size: int) -> bytes:
    """The inverse of `limbs` for `size` bytes. Words that are no limbs of such a number give other bytes, no error."""
    number = sum(int(word) << LIMB * i for i, word in enumerate(words))
    return (number % (1 << 8 * size)).to_bytes(size, "little")
