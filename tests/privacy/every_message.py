"""The messages of a round one by one, from the protocols' own descriptions: the oracle of what is counted.

Every message is (step, sender, receiver, bytes, what): 'up' goes into the sum or unmasks it, 'peer' is all else.
"""

import math
from collections import Counter, defaultdict

import numpy as np

from fedjax_seg.privacy.communication import Exchange

S = "server"
KEYS, BOXES, SHARE, SEED = (
    64,
    160,
    66,
    48,
)  # two X25519 keys; nonce 12, two shares of 521 bits, tag 16; a share; 32 + 16


def clusters_messages(groups, word, share, gone=()):
    """Shares to all others of the group, then a total to the server; groups that lost somebody do it again."""
    out = []
    for attempt in (0, 1):
        for group in groups:
            lost = [i for i in group if i in gone]
            rest = [i for i in group if i not in gone]
            if attempt and not (lost and len(rest) > 1):
                continue
            senders = rest if attempt else group
            out += [(2 * attempt, i, j, share, "peer") for i in senders for j in senders if i != j]
            out += [(2 * attempt + 1, i, S, word, "up") for i in rest]
    return out


def chain_messages(stations, word, gone=(), step=0):
    """From the server through the stations and back; at the first that is gone it ends and begins again."""
    out, before = [], S
    for at in stations:
        out.append((step, before, at, word, "peer"))
        step += 1
        if at in gone:
            rest = [i for i in stations if i not in gone]
            return out + (chain_messages(rest, word, (), step) if len(rest) > 1 else [])
        before = at
    return [*out, (step, before, S, word, "up")]


def secagg_messages(links, word, gone=(), aborted=False):
    """Bonawitz et al. (2017), Figure 4: rounds 0, 1, 2 and 4. links: {client: its peers}."""
    left = [i for i in links if i not in gone]
    out = []
    for i, peers in links.items():
        out.append((0, i, S, KEYS, "peer"))
        out.append((0, S, i, KEYS * len(peers), "peer"))
        out.append((1, i, S, BOXES * len(peers), "peer"))
        out.append((1, S, i, BOXES * len(peers), "peer"))
    out += [(2, i, S, word, "up") for i in left]
    for i in [] if aborted else left:
        out.append((3, S, i, math.ceil(len(links[i]) / 8), "peer"))
        out.append((3, i, S, SHARE * (len(links[i]) + 1), "up"))
    return out


def totals(messages, rows):
    """(messages, up, peer, hops, up of every row, peer sent by every row)."""
    size = Counter()
    for _, sender, _, number, what in messages:
        size[what, sender] += number
    up, peer = ([size[what, i] for i in range(rows)] for what in ("up", "peer"))
    steps = len({step for step, *_ in messages})
    return len(messages), sum(up), sum(peer) + size["peer", S], steps, up, peer


def simulated_seconds(messages, rows, model, rtt, rate):
    """The latency model, message by message: steps one after the other, in each the slowest of the sites in it."""
    steps = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for step, sender, receiver, number, _ in messages:
        steps[step][sender][0] += number
        steps[step][receiver][1] += number
    total = max(model / rate[i] for i in range(rows))
    for sites in steps.values():
        total += max(rtt[i] + max(moved) / rate[i] for i, moved in sites.items() if i != S)
    return total


def exchange(protocol, entries, groups, *, gone=(), degree=None, rows=None, **more):
    """Rows 0.. in the groups; those of `gone` leave between the exchange and their upload."""
    inside = [i for group in groups for i in group]
    rows = rows or max(inside) + 1
    joined = np.isin(np.arange(rows), inside)
    arrived = joined & ~np.isin(np.arange(rows), list(gone))
    group = np.arange(rows)
    for members in groups:
        group[list(members)] = min(members)
    degree = [0] * rows if degree is None else degree
    more.setdefault("transport", "vectors")
    return Exchange(protocol, entries=entries, joined=joined, counts=arrived, arrived=arrived, group=group,
                    degree=degree, **more)  # fmt: skip
