"""Additive shares modulo 2^32: the topology of the clusters, with shares that hide.

A message is cut into words that are uniform, each alone and all but one together; only their sum means anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Array, Cohort, Meeting, SecureSum, Tree
from fedjax_seg.privacy import clusters as dealing
from fedjax_seg.privacy import fixed_point

_SHARE = 0x54A2  # stream of a meeting's key
TRANSPORTS = ("vectors", "seeds")


def additive(
    *,
    clients: int,
    places: int,
    most: float,
    site_columns: Mapping[str, Sequence[Any]] | None = None,
    transport: str = "vectors",
    clip: float = fixed_point.CLIP,
    frac: int | None = None,
    clusters: int = 0,
    size: int = 0,
    sizes: tuple[int, ...] = (),
    column: str = "",
    redraw: bool = False,
    seed: int = 0,
) -> SecureSum:
    """Every hospital cuts its encoded message into uniform shares, one for each member of its cluster, and uploads the
    sum of the shares that it holds.

    Source: additive secret sharing in a ring, in the clusters of "Cluster based secure multi-party computation in
    federated learning for histopathology images". Deviation from that paper: shares are uniform words that add up to
    the message, not multiples of it. Without recovery: if somebody leaves, the exchange is repeated among the rest.

    Args:
      clients, places, most, site_columns: K, C, the largest number of examples and the facts of sites.
      transport: 'vectors': shares travel as they are, and hide perfectly if their words are truly random; 'seeds': the
        receiver gets the seed of a generator and makes the words itself, which hides as well as the generator does and
        costs the bytes of a plain sum. The simulation draws the same words for both.
      clip, frac: as fixed_point.chosen.
      clusters, size, sizes, column, redraw, seed: as clusters.chosen.
    """
    what = "secure_sum 'additive'"
    checks.one_of(f"{what}: transport", transport, TRANSPORTS)
    form = fixed_point.chosen(what, clip, frac, places)
    dealt = dealing.chosen(
        what,
        clients,
        places,
        site_columns,
        clusters=clusters,
        size=size,
        sizes=sizes,
        column=column,
        redraw=redraw,
        seed=seed,
    )

    def meet(cohort: Cohort, stays: Array, key: Array) -> Meeting:
        return dealing.meet(dealt, cohort, stays, key)

    def seal(message: Tree, row: Array, meeting: Meeting) -> tuple[Tree, Mapping[str, Array]]:
        words, saturated = fixed_point.words_of(message, row, meeting, form)
        others = meeting.links[row] & meeting.counts
        return exchanged(words, row, others, meeting), {"saturated": saturated}

    def open_(total: Tree, meeting: Meeting, arrived: Array) -> tuple[Tree, Array]:
        rest = without(total, meeting, arrived)
        return fixed_point.decode(rest, form.frac), dealing.alone(meeting, arrived)

    def views(messages: Array, meeting: Meeting) -> Mapping[str, Array]:
        return _views(messages, meeting, seal, form.frac)

    facts = {
        "protocol": "additive shares in clusters" if len(dealt.sizes) > 1 else "additive shares, full mesh",
        "source": "additive secret sharing modulo 2^32, in the clusters of Cluster based SMC in federated learning for"
        " histopathology images",
        "hides": True,
        "grade": "simulation: threefry2x32, 64-bit keys",
        "transport": transport,
        "threat": [_THREAT[0], _anonymity(dealt), _hiding(transport), *_THREAT[1:]],
        "clip": form.clip,
        "frac": form.frac,
        "step": form.step,
        **dealt.facts,
    }
    return SecureSum("additive", True, "sum", meet, seal, open_, views, float(most), form.step, facts)


_THREAT = (
    "Semi-honest parties: everybody follows the protocol and is curious about what it receives.",
    "All other members of a cluster together with the server learn the message of the last one; without the server, or"
    " one member fewer, they learn nothing but what the sum tells.",
    "With two members each learns the other's message from the sum of the two, where it is told.",
    "A hospital that leaves stops its cluster: the exchange is repeated among the rest.",
    "No message is checked: a hospital can send what it likes.",
    "The sum itself still tells about the data; only differential privacy covers that.",
    "This is one process, which holds the secrets of all hospitals: it shows the protocol and protects nobody.",
)


def _anonymity(dealt: dealing.Clusters) -> str:
    low, high = min(dealt.sizes), max(dealt.sizes)
    span = f"{low}" if low == high else f"{low} to {high}"
    line = f"The server learns the sum of every cluster: a message is one of {span} (fewer where somebody is absent)."
    if dealt.redraw:
        line += " It sees other sums in other rounds: messages that change slowly can be solved for over many of them."
    return line


def _hiding(transport: str) -> str:
    if transport == "vectors":
        return "Shares hide perfectly if their words are truly random; here they are drawn by a generator."
    return "Shares hide as well as the generator that makes them from seeds."


def shares(key: Array, words: Array, n: int) -> Array:
    """uint32 [n, ...]: n - 1 uniform words and the rest; they add up to `words` modulo 2^32, and any n - 1 of them are
    uniform and independent of it.

    Source: additive secret sharing in Z_2^32. For demonstrations: a round draws its shares pair by pair (`share`).
    """
    drawn = jax.random.bits(key, (n - 1, *words.shape), jnp.uint32)
    return jnp.concatenate([drawn, (words - jnp.sum(drawn, axis=0, dtype=jnp.uint32))[None]])


def share(meeting: Meeting, sender: Array, receiver: Array, size: int) -> Array:
    """uint32 [D]: what row `sender` sends to row `receiver`; it follows the clients, not the rows."""
    key = jax.random.fold_in(meeting.key, _SHARE)
    for row in (sender, receiver):
        key = jax.random.fold_in(key, meeting.clients[row])
    return fixed_point.stream(key, size)


def swapped(meeting: Meeting, row: Array, other: Array, size: int) -> Array:
    """uint32 [D]: what `row` gets from `other`, less what it gives to it."""
    return share(meeting, other, row, size) - share(meeting, row, other, size)


def exchanged(words: Tree, row: Array, others: Array, meeting: Meeting) -> Tree:
    """The sum of the shares that `row` holds: its words, plus what it gets from `others` [C], less what it gives them.

    What it keeps is words - sum_j s_kj, what it gets is sum_j s_jk. Only streams of the others are drawn, two each.
    """
    size, row = tree.size(words), jnp.asarray(row, jnp.int32)
    partner = jnp.nonzero(others, size=others.shape[0], fill_value=0)[0].astype(jnp.int32)

    def swap(i: Array, words: Tree) -> Tree:
        return fixed_point.add(words, swapped(meeting, row, partner[i], size))

    return jax.lax.fori_loop(0, jnp.sum(others, dtype=jnp.int32), swap, words)


def without(total: Tree, meeting: Meeting, arrived: Array) -> Tree:
    """The sum of uploads of those that arrived, less what they exchanged with counted rows that did not.

    It stands for doing the exchange again among the rest, with new shares; the sum is the same to the bit.
    """
    missing = meeting.counts & ~arrived
    pairs = meeting.links & arrived[:, None] & missing[None, :]
    size, places = tree.size(total), arrived.shape[0]
    pair = jnp.nonzero(pairs.reshape(-1), size=places * places, fill_value=0)[0].astype(jnp.int32)

    def undo(p: Array, total: Tree) -> Tree:
        return fixed_point.add(total, swapped(meeting, pair[p] % places, pair[p] // places, size))

    return jax.lax.fori_loop(0, jnp.sum(pairs, dtype=jnp.int32), undo, total)


def _views(messages: Array, meeting: Meeting, seal: Any, frac: int) -> Mapping[str, Array]:
    size = messages.shape[1]
    both = meeting.links & meeting.counts[:, None] & meeting.counts[None, :]

    def of_row(each: tuple[Array, Array]) -> Mapping[str, Array]:
        message, k = each
        add = lambda j, total: total + jnp.where(both[k, j], share(meeting, k, j, size), 0)
        shown = {
            "neighbour": share(meeting, k, jnp.argmax(both[k]), size),
            "colluders": jax.lax.fori_loop(0, both.shape[0], add, jnp.zeros(size, jnp.uint32)),
            "server": seal(message, k, meeting)[0],
        }
        return {name: jnp.where(meeting.counts[k], words, 0) for name, words in shown.items()}

    return fixed_point.decode(jax.lax.map(of_row, (messages, jnp.arange(messages.shape[0]))), frac)
