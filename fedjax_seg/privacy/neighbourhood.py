"""Who is linked with whom in a secure sum with masks, who holds whose shares, and which secrets may be asked for."""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array, Meeting
from fedjax_seg.privacy import clusters as dealing

GRAPH, SECRETS = range(1, 3)  # what is drawn from a meeting's key


class Request(NamedTuple):
    """What the server asks for once it knows whose upload arrived.

    Attributes:
      seeds: bool [C], shares of these rows' self-mask seeds b_i.
      keys: bool [C], shares of these rows' mask keys sk_i.
      arrived: bool [C], who answers.
    """

    seeds: Array
    keys: Array
    arrived: Array


class Masks(NamedTuple):
    """Where masks come from.

    Attributes:
      of: (meeting, row, size) -> uint32 [size], all that this row adds to its message.
      left: (meeting, request, size) -> uint32 [size], what of the masks is left in the sum of the uploads of the
        arrived, recomputed from the shares that the request brings in; 0 where nothing is requested.
    """

    of: Callable[[Meeting, Array, int], Array]
    left: Callable[[Meeting, Request, int], Array]


def requests(joined: Array, arrived: Array) -> tuple[Array, Array]:
    """(seeds, keys): whose self-mask seed and whose mask key is asked for. Never both of one client.

    Both together would unmask its upload, had it arrived late. Source: Bonawitz et al. (2017), Figure 4, round 4.
    """
    return joined & arrived, joined & ~arrived


def full(joined: Array) -> Array:
    """bool [C, C]: every two joined rows are linked."""
    return joined[:, None] & joined[None] & ~jnp.eye(joined.shape[0], dtype=bool)


def harary(clients: Array, joined: Array, key: Array, neighbours: int) -> Array:
    """bool [C, C]: the joined rows on a circle in random order, linked with the neighbours / 2 next ones on each side.

    Source: Bell et al. (2020), Algorithm 2 and section 3.3 (k-regular, k-connected). With at most `neighbours` + 1
    joined rows it is the full graph. The order depends on the key and the client ids, not on the order of the rows.
    """
    place = dealing.ranks(jax.random.fold_in(key, GRAPH), clients, joined)
    apart = jnp.abs(place[:, None] - place[None])
    near = jnp.minimum(apart, jnp.sum(joined) - apart) <= neighbours // 2
    return full(joined) & near


def holders(meeting: Meeting, most: int) -> tuple[Array, Array]:
    """(row int32 [C, H], real bool [C, H]): who holds the shares of a row's secrets, itself among them; H = most."""
    mask = meeting.links | jnp.diag(meeting.joined)
    row = jnp.argsort(~mask, axis=1, stable=True)[:, :most]
    return row.astype(jnp.int32), jnp.take_along_axis(mask, row, 1)


def thresholds(threshold: float, most: int) -> np.ndarray:
    """int32 [most + 1]: t = floor(threshold * holders) + 1 for 0, 1, ..., most holders; exact in the decimals given."""
    part = Fraction(repr(float(threshold)))
    return np.array([int(part * n) + 1 for n in range(most + 1)], np.int32)


def least(meeting: Meeting, table: np.ndarray) -> Array:
    """int32 [C], t of every row's secrets."""
    return jnp.asarray(table)[jnp.sum(meeting.links, 1) + meeting.joined]


def below_threshold(meeting: Meeting, request: Request, table: np.ndarray) -> Array:
    """Whether some secret that is needed has fewer than t holders among the arrived; or nobody arrived at all."""
    arrived = request.arrived & meeting.joined
    beside = jnp.sum(meeting.links & arrived, 1)  # arrived neighbours
    needed = request.seeds | (request.keys & (beside > 0))
    short = jnp.any(needed & (beside + arrived < least(meeting, table)))
    return short | (jnp.any(meeting.joined) & ~jnp.any(arrived))
