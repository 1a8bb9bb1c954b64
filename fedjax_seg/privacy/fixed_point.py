"""Messages as integers modulo 2^32, and the words that hide them. Sums of such words are exact in any order.

A tree of float32 leaves becomes a tree of uint32 leaves of the same structure ("words"): two's complement fixed point
with `frac` bits behind the point. XLA's uint32 arithmetic wraps, which is the ring: a uniform word added to any word
is a uniform word, so that it hides it perfectly. Over the real numbers there is no such mask.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Meeting, Tree

CLIP = 8.0
MOST_FRAC = 30  # finer than float32 itself for entries of the order of 2^-7
_ROUNDING = 0x0D17  # stream of a meeting's key: the dither of stochastic rounding


class Format(NamedTuple):
    """clip: the range is [-clip, clip], a float32 number; frac: bits behind the point."""

    clip: float
    frac: int

    @property
    def step(self) -> float:
        """The largest error of an entry: rounding is to one of the two neighbours."""
        return 2.0**-self.frac


def most_bits(clip: float, places: int) -> int:
    """The most bits behind the point for which a sum of `places` entries cannot wrap: n (clip 2^frac + 1) < 2^31.

    An encoded entry is at most clip 2^frac rounded up, which is below clip 2^frac + 1 in size. Negative where not even
    whole numbers fit.
    """
    room = (2**31 / places - 1) / clip
    return math.ceil(math.log2(room)) - 1 if room > 0 else -1


def chosen(what: str, clip: float, frac: int | None, places: int) -> Format:
    """The format of a run.

    Args:
      what: for messages, e.g. "secure_sum 'additive'".
      clip: > 0, the largest absolute value of an entry; what lies beyond is cut, and counted.
      frac: bits behind the point, 0 to 30; None = as many as fit.
      places: n, the most messages of one sum.
    Raises: UserError where clip or frac is out of range, or the sum of n entries could wrap.
    """
    checks.number(f"{what}: clip", clip, above=0.0, low=0.0, high=2.0**31)
    clip = float(np.float32(clip))  # as the device sees it: the guard must hold for that number
    checks.number(f"{what}: clip as float32", clip, above=0.0, low=0.0)
    most = min(most_bits(clip, places), MOST_FRAC)
    if most < 0:
        raise checks.UserError(
            f"{what}: clip: {clip:g} given for {places} clients, whose sum does not fit into 32 bits; less than"
            f" {2**31 / places - 1:.4g} expected: lower clip"
        )
    checks.number(f"{what}: frac", most if frac is None else frac, low=0, high=MOST_FRAC, integer=True)
    bits = most if frac is None else int(frac)
    if bits > most:
        raise checks.UserError(
            f"{what}: frac: {frac} bits given with clip {clip:g} and {places} clients, at most {most} expected, because"
            f" {places} (clip 2^frac + 1) must be below 2^31: lower frac to {most}, or clip"
        )
    if clip * 2.0**bits < 1:
        raise checks.UserError(
            f"{what}: clip: {clip:g} given, which is below one step of the encoding (2^-{bits}): nothing but zeros and"
            " single steps would be sent; raise clip"
        )
    return Format(clip, bits)


def encode(message: Tree, key: Array, form: Format) -> tuple[Tree, Array]:
    """float32 leaves -> (uint32 leaves, saturated int32): stochastic rounding, so the error has mean 0.

    Source: clipping and stochastic rounding as in secure aggregation in practice (Flower's SecAgg+: clip 8, range
    2^22). Deviation: the fraction is split off before the dither is compared with it, so that no bit of the dither is
    lost in the mantissa, whatever frac is; integers are signed, so that no offset has to be taken off the sum.

    NaN counts as 0. Infinite entries are cut like others. An entry of 0 is encoded as 0. |error| < 2^-frac for an
    entry inside the range; its mean is 0 up to 2^-23 of a step (the dither has 23 bits).

    Args:
      message: float leaves, of any shapes, scalars too.
      key: of this message's dither; a key of its own for every message.
    Returns: words in the structure of the message, and how many entries lay beyond the range.
    """
    leaves, structure = jax.tree.flatten(message)
    size = sum(leaf.size for leaf in leaves)
    dither = split(jax.random.uniform(key, (size,), jnp.float32), leaves)
    words, saturated = [], jnp.zeros((), jnp.int32)
    for leaf, u in zip(leaves, dither, strict=True):
        x = jnp.nan_to_num(leaf.astype(jnp.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
        saturated += jnp.sum(jnp.abs(x) > form.clip, dtype=jnp.int32)
        scaled = jnp.clip(x, -form.clip, form.clip) * jnp.float32(2.0**form.frac)  # a power of 2: exact
        whole = jnp.floor(scaled)
        up = (u < scaled - whole).astype(jnp.int32)
        words.append(jax.lax.bitcast_convert_type(whole.astype(jnp.int32) + up, jnp.uint32))
    return jax.tree.unflatten(structure, words), saturated


def words_of(message: Tree, row: Array, meeting: Meeting, form: Format) -> tuple[Tree, Array]:
    """`encode` with the dither of this client in this round, whichever row it has."""
    return encode(message, rounding_key(meeting, row), form)


def rounding_key(meeting: Meeting, row: Array) -> Array:
    """Of the dither of one row's message."""
    base = meeting.key if meeting.dither is None else meeting.dither
    return jax.random.fold_in(jax.random.fold_in(base, _ROUNDING), meeting.clients[row])


def decode(words: Tree, frac: int) -> Tree:
    """uint32 leaves -> float32 leaves: the signed integer over 2^frac, exact but for the one rounding of an integer
    beyond 24 bits to float32 (a relative error of at most 2^-24)."""
    scale = jnp.float32(2.0**-frac)
    return jax.tree.map(lambda w: jax.lax.bitcast_convert_type(w, jnp.int32).astype(jnp.float32) * scale, words)


def split(flat: Array, leaves: list) -> list[Array]:
    """[D] cut into pieces of the leaves' shapes, in their order."""
    ends = np.cumsum([leaf.size for leaf in leaves])
    return [flat[end - leaf.size : end].reshape(leaf.shape) for end, leaf in zip(ends, leaves, strict=True)]


def add(words: Tree, mask: Array) -> Tree:
    """words + mask modulo 2^32; mask uint32 [D] in the order of the leaves."""
    leaves, structure = jax.tree.flatten(words)
    return jax.tree.unflatten(structure, [w + m for w, m in zip(leaves, split(mask, leaves), strict=True)])


def stream(key: Array, size: int) -> Array:
    """uint32 [D] of a pseudo-random generator (threefry2x32, a key of 64 bits: simulation grade)."""
    return jax.random.bits(key, (size,), jnp.uint32)
