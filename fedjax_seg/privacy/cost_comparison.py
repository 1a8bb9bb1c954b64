"""The same round by every way to sum in secret: the table of what each would cost. Counted on the host."""

from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.privacy.communication import PROTOCOLS, SIZES, Cost, Exchange, Sizes, cost_of
from fedjax_seg.privacy.latency import Network, seconds


class Ciphertext(NamedTuple):
    """A published size. slots: numbers in one ciphertext; size: bytes; source: where from, and the arithmetic."""

    slots: int
    size: int
    source: str


# Sums only need the smallest modulus that keeps them: two 60-bit primes, of which a ciphertext carries one (the other
# is for keys). 120 bits are below the 218 that SEAL's table allows at degree 8192 for 128 bits of security.
CKKS = Ciphertext(
    slots=8192 // 2,
    size=int(128.13 * 1024),
    source=(
        "CKKS ciphertexts as published in TenSEAL's tutorial 3 'Benchmarks': degree 8192, moduli [60, 60], scale 2^38:"
        " 128.13 KB (of 1024 bytes) serialised, for degree / 2 = 4096 numbers; a sum keeps 2^-26. Check: 2 polynomials"
        " x 8192 coefficients x 8 bytes = 131,072 bytes, and a header. Moduli [60, 40, 60], which leave room for one"
        " multiplication: 229.82 KB, 1.79 times as much"
    ),
)
ROWS = ("none", "chained", "mesh", "clusters", "seeds", "secagg", "secagg_plus", "homomorphic")


def full_exchange(
    protocol: str, places: int, entries: int, *, clusters: int = 1, degree: Any = 0, transport: str = "vectors"
) -> Exchange:
    """A round in which nobody is lost: K = places rows in so many clusters, of sizes that differ by 1 at most."""
    everybody = np.ones(places, bool)
    parts = np.array_split(np.arange(places), clusters)
    group = np.repeat(np.arange(clusters), [len(p) for p in parts])
    return Exchange(
        protocol, transport, entries, everybody, everybody, everybody, group, np.broadcast_to(degree, (places,))
    )


def regular_degrees(places: int, neighbours: int) -> np.ndarray:
    """int [K]: k linked peers for every row; where K k is odd, one row has one more (a graph has no half an edge)."""
    degree = np.full(places, min(neighbours, places - 1))
    degree[0] += degree.sum() % 2
    return degree


def homomorphic(places: int, entries: int, ciphertext: Ciphertext = CKKS) -> Cost:
    """Uploads and the way down as ciphertexts. Computed from a published size: nothing is encrypted anywhere."""
    ciphertexts = -(-entries // ciphertext.slots)
    return cost_of(full_exchange("none", places, ciphertexts), Sizes(word=ciphertext.size))


def row_key(protocol: str, transport: str, clusters: int) -> str:
    """The row of `comparison` that a run is; clusters: how many there are in its rounds."""
    checks.lookup(PROTOCOLS, protocol, "communication: protocol")
    if protocol in ("none", "assumed"):
        return "none"
    if protocol not in ("smc_scalar", "additive"):
        return protocol
    if protocol == "additive" and transport == "seeds":
        return "seeds"
    return "mesh" if clusters == 1 else "clusters"


def comparison(
    places: int,
    entries: int,
    cluster_size: int,
    neighbours: int,
    network: Network | None = None,
    sizes: Sizes = SIZES,
    clusters: int = 0,
) -> list[dict[str, Any]]:
    """What a round in which nobody is lost costs by every protocol.

    Source: notes on secure aggregation, 4.4. Deviation: sizes of keys and shares are counted field by field (see
    communication.Sizes) where the notes have ~450 bytes a pair; the row of homomorphic encryption is added.

    Args:
      places: K >= 2, hospitals of a round.
      entries: D, of a message.
      cluster_size: N in [2, K]; M = K // N clusters, of sizes that differ by 1 at most.
      neighbours: k of secagg_plus in [1, K - 1], or more, which is everybody.
      network: of the K sites; None = the suppositions of latency.Network.
      sizes: of keys, shares and seeds.
      clusters: M itself, in [1, K / 2]; 0 = by cluster_size.

    Returns: JSON-able rows in the order of ROWS ('clusters' is left out where one cluster is all: it is 'mesh' then):
      key, name, hides (who does not see a single update), bytes (up + peer), ratio (to the bytes of 'none'), messages,
      hops, seconds, bytes_up, bytes_peer, bytes_down, computed (True where nothing of it can be run here), source.
    """
    checks.number("communication: places", places, low=2, integer=True)
    checks.number("communication: entries", entries, low=1, integer=True)
    checks.number("communication: cluster_size", cluster_size, low=2, high=places, integer=True)
    checks.number("communication: neighbours", neighbours, low=1, integer=True)
    checks.number("communication: clusters", clusters, low=0, high=places // 2, integer=True)
    network, many, rows = network or Network(), clusters or places // cluster_size, []
    costs = _costs(places, entries, many, neighbours, sizes)
    texts = _texts(places, many, min(neighbours, places - 1))
    plain = costs["none"].bytes_up
    for key in ROWS:
        if key == "clusters" and many == 1:
            continue
        cost, (name, hides) = costs[key], texts[key]
        sent = cost.bytes_up + cost.bytes_peer
        counts = {k: getattr(cost, k) for k in ("messages", "hops", "bytes_up", "bytes_peer", "bytes_down")}
        row = {"key": key, "name": name, "hides": hides, "bytes": sent, "ratio": sent / plain, **counts}
        computed = key == "homomorphic"
        row |= {"seconds": seconds(cost, network, np.arange(places)), "computed": computed}
        rows.append(row | {"source": CKKS.source if computed else ""})
    return rows


def _costs(places: int, entries: int, many: int, neighbours: int, sizes: Sizes) -> dict[str, Cost]:
    full = {
        "none": full_exchange("none", places, entries),
        "chained": full_exchange("chained", places, entries),
        "mesh": full_exchange("additive", places, entries),
        "clusters": full_exchange("additive", places, entries, clusters=many),
        "seeds": full_exchange("additive", places, entries, clusters=many, transport="seeds"),
        "secagg": full_exchange("secagg", places, entries, degree=places - 1),
        "secagg_plus": full_exchange("secagg_plus", places, entries, degree=regular_degrees(places, neighbours)),
    }
    costs = {key: cost_of(exchange, sizes) for key, exchange in full.items()}
    return costs | {"homomorphic": homomorphic(places, entries)}


def _texts(places: int, many: int, neighbours: int) -> dict[str, tuple[str, str]]:
    """{key: (name, who does not see a single update)}."""
    small, large = places // many, -(-places // many)
    where = "to everybody" if many == 1 else f"in clusters of {small}" + (f" or {large}" if large > small else "")
    single, sums = "server and any one neighbour", "" if many == 1 else " (the server sees sums of clusters)"
    threshold = "server and neighbours, below a threshold of colluders"
    if places == 2:  # in clusters of two of a larger round nobody but the server gets the sum of the two
        single = threshold = "server only: two learn each other's from the sum"
    return {
        "none": ("no secure sum", "nobody"),
        "chained": ("chain through all hospitals", single),
        "mesh": ("shares to everybody", f"{single}; with scalar portions: nobody"),
        "clusters": (f"shares {where}", f"{single}{sums}; with scalar portions: nobody"),
        "seeds": (f"shares {where}, as seeds", f"{single}{sums}"),
        "secagg": ("SecAgg", threshold),
        "secagg_plus": (f"SecAgg+, {neighbours} neighbours", threshold),
        "homomorphic": ("homomorphic encryption, CKKS", "server, if no hospital lends it the key"),
    }
