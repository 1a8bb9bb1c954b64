"""Arithmetic in the field of p = 2^31 - 1 elements, on uint32: all that secret sharing needs, inside jit.

Elements are uint32 in [0, p); operands must be, results are. Elementwise, with the usual broadcasting.
"""

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array

P = 2**31 - 1  # a Mersenne prime: 2^31 = 1, so that a remainder is a shift and an addition
GENERATOR = 7  # of the multiplicative group, whose order is 2 * 3^2 * 7 * 11 * 31 * 151 * 331


def reduce(x: Array) -> Array:
    """Any uint32 modulo p."""
    folded = (x & P) + (x >> 31)  # at most p + 1
    return jnp.where(folded >= P, folded - P, folded)


def add(a: Array, b: Array) -> Array:
    return reduce(a + b)  # below 2^32


def subtract(a: Array, b: Array) -> Array:
    return reduce(a + (P - b))


def multiply(a: Array, b: Array) -> Array:
    """a b modulo p by halves of 16 bits, since there are no words of 64 bits.

    With a = a1 2^16 + a0 and b alike: a b = a1 b1 2^32 + m 2^16 + a0 b0, m = a1 b0 + a0 b1 < 2^32. Here 2^32 = 2, and
    with m = m1 2^15 + m0 the middle is m1 2^31 + m0 2^16 = m1 + m0 2^16.
    """
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a1 * b0 + a0 * b1
    high = 2 * (a1 * b1) + (middle >> 15)  # below 2^31 + 2^17
    return add(add(reduce(high), reduce((middle & 0x7FFF) << 16)), reduce(a0 * b0))


def power(base: Array, exponent: Array) -> Array:
    """base^exponent, exponent uint32 below 2^31; 0^0 = 1."""
    base, exponent = jnp.broadcast_arrays(jnp.asarray(base, jnp.uint32), jnp.asarray(exponent, jnp.uint32))

    def bit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        result, square = carry
        odd = ((exponent >> i.astype(jnp.uint32)) & 1) == 1
        return jnp.where(odd, multiply(result, square), result), multiply(square, square)

    return jax.lax.fori_loop(0, 31, bit, (jnp.ones_like(base), base))[0]


def inverse(a: Array) -> Array:
    """1 / a by Fermat; of 0 it is 0."""
    return power(a, jnp.uint32(P - 2))


def draw(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform elements, but for a probability of 2^-31 that goes to 0 instead of p."""
    return reduce(jax.random.bits(key, shape, jnp.uint32) >> 1)
