"""Masks of a secure sum inside jit: the whole protocol with small secrets, of simulation grade.

What is simulated is honest: the server's step works on the shares that arrived and on public keys alone. What makes it
no more than a simulation: secrets of 31 bits, a group whose logarithms anybody computes, streams with keys of 64 bits,
and one process that knows everything.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array, Meeting
from fedjax_seg.privacy import field31, fixed_point, shamir
from fedjax_seg.privacy.neighbourhood import SECRETS, Masks, Request, holders, least

_PAIR = 2**32 - 1  # the second word of a pair's seed; no self-mask seed has it, whose words are below 2^31 - 1


def masks(table: np.ndarray) -> Masks:
    """Masks from threefry streams.

    Source: Bonawitz et al. (2017), Figure 4. Deviation: Diffie-Hellman in GF(2^31 - 1) with g = 7, self-mask seeds of
    two field elements; shares reach their holders without encryption.

    Args:
      table: int32 [H + 1], the threshold by the number of holders.
    """
    most = len(table) - 1

    def of(meeting: Meeting, row: Array, size: int) -> Array:
        """PRG(b_i) + sum over linked j of sign(i, j) PRG(s_ij)."""
        mask_key, seed, _ = _secrets(meeting)
        other, real = (x[row] for x in holders(meeting, most))
        own = other == row
        agreed = field31.power(_public(mask_key)[other], mask_key[row])
        positive = own | (meeting.clients[row] < meeting.clients[other])
        return _expanded(_words(own, seed[row], agreed), positive, real, size)

    def left(meeting: Meeting, request: Request, size: int) -> Array:
        mask_key, seed, polynomial = _secrets(meeting)
        public = _public(mask_key)
        # What every holder keeps: [C owners, H holders, 3].
        other, real = holders(meeting, most)
        points = point_of(meeting.clients)[other]
        dealt = jnp.concatenate([mask_key[:, None], seed], 1)
        held = jax.vmap(shamir.share)(polynomial, dealt, least(meeting, table), points)
        # What the arrived send to the server, of each owner one kind only.
        answers = real & request.arrived[other]
        asked = jnp.stack([request.keys, request.seeds, request.seeds], 1)
        shown = jnp.where(answers[:, :, None] & asked[:, None], held, jnp.uint32(0))
        found = jax.vmap(shamir.reconstruct)(points, shown, answers)
        # The server's masks: of itself where arrived, of every arrived neighbour where not.
        own = other == jnp.arange(other.shape[0])[:, None]
        agreed = field31.power(public[other], found[:, :1])
        positive = own | (meeting.clients[other] < meeting.clients[:, None])  # as in the neighbour's upload
        wanted = real & jnp.where(own, request.seeds[:, None], request.keys[:, None] & request.arrived[other])
        words = _words(own, found[:, None, 1:], agreed)
        return _expanded(words.reshape(-1, 2), positive.reshape(-1), wanted.reshape(-1), size)

    return Masks(of, left)


def point_of(clients: Array) -> Array:
    """uint32: where a client's shares are evaluated; never 0, where the secret is."""
    return clients.astype(jnp.uint32) + 1


def _secrets(meeting: Meeting) -> tuple[Array, Array, Array]:
    """Of every row: the mask key [C], the self-mask seed [C, 2], a key for its polynomials [C]."""
    base = jax.random.fold_in(meeting.key, SECRETS)

    def one(client: Array) -> tuple[Array, Array, Array]:
        own = jax.random.fold_in(base, client)
        drawn = field31.draw(jax.random.fold_in(own, 0), (3,))
        return drawn[0], drawn[1:], jax.random.fold_in(own, 1)

    mask_key, seed, polynomial = jax.vmap(one)(meeting.clients)
    if not jnp.issubdtype(polynomial.dtype, jax.dtypes.prng_key):
        polynomial = jax.random.wrap_key_data(polynomial)
    return mask_key, seed, polynomial


def _public(mask_key: Array) -> Array:
    return field31.power(jnp.uint32(field31.GENERATOR), mask_key)


def _words(own: Array, seed: Array, agreed: Array) -> Array:
    """uint32 [..., 2], the seed of every stream: of oneself, or of a pair."""
    pair = jnp.stack([agreed, jnp.full_like(agreed, _PAIR)], -1)
    return jnp.where(own[..., None], jnp.broadcast_to(seed, pair.shape), pair)


def _expanded(words: Array, positive: Array, wanted: Array, size: int) -> Array:
    """The sum of the wanted streams, each with its sign: uint32 [size]. Only wanted ones are expanded, one at a time.

    Args:
      words: uint32 [M, 2]; positive, wanted: bool [M].
    """
    order = jnp.argsort(~wanted, stable=True)

    def add(i: Array, total: Array) -> Array:
        at = order[i]
        stream = fixed_point.stream(jax.random.wrap_key_data(words[at], impl="threefry2x32"), size)
        return total + jnp.where(positive[at], stream, -stream)

    return jax.lax.fori_loop(0, jnp.sum(wanted), add, jnp.zeros((size,), jnp.uint32))
