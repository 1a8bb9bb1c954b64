"""What a secure sum costs: messages, bytes, sequential steps and, for a given network, seconds. Counted on the host.

Who is who in the counts:
  up: what a client sends to the server for the sum: its upload, and its answer when masks have to be taken off.
  peer: what the protocol adds: between clients, directly or through the server (then on both legs), and what the server
    hands out for it.
  down: the model that a round begins with, as long as a message; the same for all protocols, and no step of them.
A hop is a step that has to wait for the one before: the round trips of a round in which everybody works in parallel.

Protocols without recovery (smc_scalar, chained, additive) lose the sum of a group when a member leaves; the others of
its group do the exchange again, with new random numbers. It is noticed by an upload that is missing, so what the others
had sent by then is counted too. secagg and secagg_plus repeat nothing: unmasking takes care of it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks

SERVER = -1  # in the links of a chain
TRANSPORTS = ("vectors", "seeds")
Ints = np.ndarray


class Sizes(NamedTuple):
    """Bytes of what is sent. The defaults are X25519 keys, AES-GCM, and Shamir's shares modulo 2^521 - 1.

    So a client causes 64 + 160 + 160 + 66 = 450 bytes for each of its peers, and 64 + 66 more. Lengths of fields only:
    no client ids, no framing, no transport layer. What an implementation really sends can be given in their place.

    Attributes:
      word: of an entry: float32 or uint32.
      public_keys: two of 32 (RFC 7748), for the masks and for the transport of shares (Bonawitz et al. 2017, round 0).
      encrypted_shares: a share of the mask's seed and one of the mask's secret key (round 1), with the nonce of 12 and
        the tag of 16 of AES-GCM (NIST SP 800-38D).
      share: 521 bits in whole bytes; a secret of 32 bytes needs a prime above 2^256, and 2^521 - 1 is Mersenne's next.
      seed: of a generator, 32, with a tag of 16; the nonce is a counter that both sides know.
    """

    word: int = 4
    public_keys: int = 2 * 32
    encrypted_shares: int = 12 + 2 * 66 + 16
    share: int = 66
    seed: int = 32 + 16


SIZES = Sizes()


class Exchange(NamedTuple):
    """What the record of a round tells. Rows are those of the cohort, C; arrays or lists.

    Attributes:
      protocol: a name in PROTOCOLS.
      transport: 'vectors' or 'seeds': how 'additive' sends its shares; not read by the others.
      entries: D, of a message, the coordinates of weights included.
      joined: bool [C], is there when the exchange begins.
      counts: bool [C], of those, who is still there for the upload as far as was known.
      arrived: bool [C], of those, whose upload came.
      group: int [C], the cluster of a row; read by smc_scalar, chained and additive.
      degree: int [C], joined peers that a row is linked with; read by secagg and secagg_plus.
      failed: the round gave no sum.
      present: bool [C], who was sent the model; None = joined.
      answered: bool [C], who answered when masks were taken off; None = the arrived, or nobody where it failed: that
        too few have arrived is known before anybody is asked.
      place: int [C], of a row in its chain; None = the order of the rows.
    """

    protocol: str
    transport: str
    entries: int
    joined: Any
    counts: Any
    arrived: Any
    group: Any
    degree: Any
    failed: bool = False
    present: Any = None
    answered: Any = None
    place: Any = None


class Phase(NamedTuple):
    """One hop. rows int [P], who takes part; up, peer (sent) and received int64 [P], bytes of each of them.

    handed: bytes that the server sends. relayed: whether `peer` goes to the server. messages: in this hop.
    """

    rows: Ints
    up: Ints
    peer: Ints
    received: Ints
    handed: int
    relayed: bool
    messages: int


class Cost(NamedTuple):
    """What a round has cost; see the head of this file for what up, peer and down are.

    Attributes:
      messages, bytes_up, bytes_peer, bytes_down, hops: totals; the model's way down is in bytes_down alone.
      repeated: groups whose exchange was done again.
      up, peer, down: int64 [C], bytes of every row: sent up, sent for the exchange, received as the model.
      phases: the hops in order; what latency.seconds reads.
    """

    messages: int
    bytes_up: int
    bytes_peer: int
    bytes_down: int
    hops: int
    repeated: int
    up: Ints
    peer: Ints
    down: Ints
    phases: tuple[Phase, ...]


def cost_of(exchange: Exchange, sizes: Sizes = SIZES) -> Cost:
    """The cost of one round, from who was there; deterministic.

    Source: notes on secure aggregation, 4.4; Bonawitz et al. 2017, figure 4, for the four rounds of secagg.
    Deviation: the consistency check against an active server (their round 3) is left out; waiting until a lost client
    is given up is not counted.

    Raises: UserError for an unknown protocol or transport, D < 1, or rows that cannot be.
    """
    maker = checks.lookup(PROTOCOLS, exchange.protocol, "communication: protocol")
    x = _checked(exchange)
    phases, repeated = maker(x, sizes)
    return _total(phases, repeated, x.present, x.entries * sizes.word)


def _checked(x: Exchange) -> Exchange:
    checks.number("communication: entries", x.entries, low=1, integer=True)
    if x.protocol == "additive":
        checks.one_of("communication: transport", x.transport, TRANSPORTS)
    joined, counts, arrived = (np.asarray(a, bool) for a in (x.joined, x.counts, x.arrived))
    present = joined if x.present is None else np.asarray(x.present, bool)
    answered = arrived & (not x.failed) if x.answered is None else np.asarray(x.answered, bool)
    group, degree = np.asarray(x.group, np.int64), np.asarray(x.degree, np.int64)
    place = np.arange(len(joined)) if x.place is None else np.asarray(x.place, np.int64)
    lengths = {len(a) for a in (joined, counts, arrived, present, answered, group, degree, place)}
    nested = ((answered, arrived), (arrived, counts), (counts, joined), (joined, present))
    if len(lengths) > 1 or any((inner & ~outer).any() for inner, outer in nested):
        raise checks.UserError(
            f"communication: rows of lengths {sorted(lengths)} given, one length expected, with answered in arrived in"
            " counts in joined in present: give the record of one round"
        )
    entries, failed = int(x.entries), bool(x.failed)
    checked = (joined, counts, arrived, group, degree, failed, present, answered, place)
    return Exchange(x.protocol, x.transport, entries, *checked)


def _total(phases: Sequence[Phase], repeated: int, present: Ints, model: int) -> Cost:
    up, peer = np.zeros(len(present), np.int64), np.zeros(len(present), np.int64)
    for phase in phases:
        np.add.at(up, phase.rows, phase.up)
        np.add.at(peer, phase.rows, phase.peer)
    down = present.astype(np.int64) * model
    handed = sum(p.handed for p in phases)
    messages = sum(p.messages for p in phases)
    totals = (messages, int(up.sum()), int(peer.sum()) + handed, int(down.sum()), len(phases), repeated)
    return Cost(*totals, up, peer, down, tuple(phases))


def _uploads(arrived: Ints, size: int) -> list[Phase]:
    """One hop: the message of everybody who arrives; none where nobody does."""
    rows = np.flatnonzero(arrived)
    none = np.zeros(len(rows), np.int64)
    return [Phase(rows, none + size, none, none, 0, False, len(rows))] if len(rows) else []


def _plain(x: Exchange, sizes: Sizes) -> tuple[list[Phase], int]:
    return _uploads(x.arrived, x.entries * sizes.word), 0


def _clusters(x: Exchange, sizes: Sizes) -> tuple[list[Phase], int]:
    """Everybody sends a share to each other member of its group, then the sum of what it holds to the server."""
    size = x.entries * sizes.word
    share = sizes.seed if (x.protocol, x.transport) == ("additive", "seeds") else size

    def exchange(who: Ints) -> list[Phase]:
        rows = np.flatnonzero(who)
        peers = np.bincount(x.group[rows], minlength=1)[x.group[rows]] - 1
        sent = peers * share
        return [Phase(rows, np.zeros_like(sent), sent, sent, 0, False, int(peers.sum()))] if len(rows) else []

    hit = np.isin(x.group, x.group[x.joined & ~x.arrived])
    left = x.arrived & hit & (not x.failed)
    members = np.bincount(x.group[left], minlength=1)
    again = left & (members[np.minimum(x.group, len(members) - 1)] >= 2)  # one alone would give its message away
    phases = exchange(x.joined) + _uploads(x.arrived, size) + exchange(again) + _uploads(again, size)
    return phases, len(np.unique(x.group[again]))


def _chained(x: Exchange, sizes: Sizes) -> tuple[list[Phase], int]:
    """The server hands a random vector to the first, each adds its own and passes it on, the last returns it.

    A chain breaks at the first member that is gone, who was still sent the vector; it starts again without those gone.
    """
    size, chains, repeated = x.entries * sizes.word, [], 0
    for g in np.unique(x.group[x.joined]):
        rows = np.flatnonzero(x.joined & (x.group == g))
        rows = rows[np.argsort(x.place[rows], kind="stable")]
        arrived = x.arrived[rows]
        if arrived.all():
            chains.append(_links([*rows, SERVER]))
            continue
        rest, links = rows[arrived], _links(rows[: np.argmin(arrived) + 1])
        if len(rest) >= 2 and not x.failed:
            links, repeated = links + _links([*rest, SERVER]), repeated + 1
        chains.append(links)
    return [_hop([link for link in step if link], size) for step in zip_longest(*chains)], repeated


def _links(stations: Sequence[int] | Ints) -> list[tuple[int, int]]:
    """(from, to) of every step along the stations, from the server on."""
    return list(pairwise([SERVER, *map(int, stations)]))


def _hop(links: Sequence[tuple[int, int]], size: int) -> Phase:
    """The same step of all chains; each link carries `size` bytes."""
    rows = np.array(sorted({row for link in links for row in link} - {SERVER}), np.int64)
    ups = np.isin(rows, [a for a, b in links if b == SERVER]) * size
    peers = np.isin(rows, [a for a, b in links if b != SERVER]) * size
    received = np.isin(rows, [b for _, b in links]) * size
    handed = sum(size for a, _ in links if a == SERVER)
    return Phase(rows, ups, peers, received, handed, False, len(links))


def _masked(x: Exchange, sizes: Sizes) -> tuple[list[Phase], int]:
    """Four rounds through the server: advertise keys, share keys, masked input, unmasking.

    Seven messages for a client that stays: keys up, the peers' keys down, shares up and down, its masked input, who is
    left (a bit for each peer), and shares for each peer and itself: of the mask's seed of who is left, else of its key.
    """
    rows, arrived = np.flatnonzero(x.joined), np.flatnonzero(x.arrived)
    if not len(rows):
        return [], 0
    links, none = x.degree[rows], np.zeros(len(rows), np.int64)
    keys, shares = links * sizes.public_keys, links * sizes.encrypted_shares
    phases = [
        Phase(rows, none, none + sizes.public_keys, keys, int(keys.sum()), True, 2 * len(rows)),
        Phase(rows, none, shares, shares, int(shares.sum()), True, 2 * len(rows)),
        *_uploads(x.arrived, x.entries * sizes.word),
    ]
    if x.answered.any():
        bits = -(-x.degree[arrived] // 8)
        answers = (x.degree[arrived] + 1) * x.answered[arrived] * sizes.share
        messages = len(arrived) + int(x.answered.sum())
        phases.append(Phase(arrived, answers, np.zeros_like(bits), bits, int(bits.sum()), True, messages))
    return phases, 0


PROTOCOLS: dict[str, Callable[[Exchange, Sizes], tuple[list[Phase], int]]] = {
    "none": _plain,
    "assumed": _plain,
    "smc_scalar": _clusters,
    "chained": _chained,
    "additive": _clusters,
    "secagg": _masked,
    "secagg_plus": _masked,
}


def ledger_entry(exchange: Exchange, cost: Cost, taken: float, *, dropped: int, saturated: int) -> dict[str, Any]:
    """One round's line of the ledger, JSON-able.

    Args:
      taken: seconds, from latency.seconds.
      dropped: clients that failed, before or after the exchange.
      saturated: entries beyond the range of the encoding, of all clients.
    """
    totals = {k: getattr(cost, k) for k in ("messages", "bytes_up", "bytes_peer", "bytes_down", "hops")}
    ends = {"repeated": cost.repeated, "aborted": int(exchange.failed), "dropped": int(dropped)}
    return totals | {"seconds": float(taken)} | ends | {"saturated": int(saturated)}
