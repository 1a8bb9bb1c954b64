"""Seconds of a round's communication, from what was counted and from what the sites' links are like. On the host."""

from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.privacy.communication import Cost


class Network(NamedTuple):
    """The sites' links. The defaults are suppositions: 50 ms and 100 Mbit/s.

    Attributes:
      rtt_s: seconds of a round trip, one value or [K].
      bandwidth_bytes_s: bytes per second in either direction at the same time, one value or [K].
      server_bytes_s: the server's own link, likewise; None = wide enough never to be waited for.
    """

    rtt_s: Any = 0.05
    bandwidth_bytes_s: Any = 12.5e6
    server_bytes_s: float | None = None


def site_links(network: Network, sites: int) -> Network:
    """The network with arrays float64 [sites].

    Raises: UserError for a value that is not finite and above 0, or a number of values that is not the sites'.
    """
    found = {}
    for field in ("rtt_s", "bandwidth_bytes_s"):
        try:
            values = np.asarray(getattr(network, field), np.float64)
        except (TypeError, ValueError):
            raise checks.UserError(
                f"network.{field}: {getattr(network, field)!r} given, a number or one for each site expected"
            ) from None
        if values.ndim > 1 or values.size != (sites if values.ndim else 1):
            raise checks.UserError(
                f"network.{field}: {values.size} values given, one, or one for each of {sites} sites expected"
            )
        for value in np.atleast_1d(values):
            checks.number(f"network.{field}", float(value), above=0.0)
        found[field] = np.broadcast_to(values, (sites,))
    if network.server_bytes_s is not None:
        checks.number("network.server_bytes_s", network.server_bytes_s, above=0.0)
    return Network(found["rtt_s"], found["bandwidth_bytes_s"], network.server_bytes_s)


def seconds(cost: Cost, network: Network, clients: Any) -> float:
    """Seconds of a round's communication: the download, then the hops one after the other. No computing, no time-outs.

    A hop takes as long as its slowest site: the site's round trip, and the larger of what it sends and receives over
    its bandwidth (links are duplex, its peers share them). A peer is as far away as the slower of the two is from the
    server. The download adds bytes and no round trip: its request is the first hop's.

    Args:
      network: of the K sites; their ids are below K. See `site_links`.
      clients: int [C], the site of every row; of a row that was not there it means nothing.
    """
    clients = np.asarray(clients, np.int64)
    if clients.shape != cost.up.shape:
        raise checks.UserError(
            f"communication: {clients.size} clients given for {cost.up.size} rows, one each expected"
        )
    clients = np.where(cost.down > 0, clients, 0)  # padding may have any id
    lengths = [np.size(v) for v in (network.rtt_s, network.bandwidth_bytes_s) if np.ndim(v)]
    sites = max([int(clients.max(initial=-1)) + 1, *lengths])
    network = site_links(network, sites)
    rtt, rate = network.rtt_s[clients], network.bandwidth_bytes_s[clients]
    server = network.server_bytes_s or np.inf
    total = max(float((cost.down / rate).max(initial=0.0)), cost.bytes_down / server)
    for hop in cost.phases:
        load = np.maximum(hop.up + hop.peer, hop.received)
        slowest = float((rtt[hop.rows] + load / rate[hop.rows]).max())
        taken = int(hop.up.sum()) + (int(hop.peer.sum()) if hop.relayed else 0)
        total += max(slowest, max(taken, hop.handed) / server)
    return total
