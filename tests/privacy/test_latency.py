"""Seconds of a round: message by message, and by hand."""

import math

import numpy as np
import pytest
from every_message import chain_messages, clusters_messages, exchange, secagg_messages, simulated_seconds

from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import latency
from fedjax_seg.privacy.communication import cost_of
from fedjax_seg.privacy.latency import Network, seconds

RTT, RATE = [0.02, 0.3, 0.05, 0.1, 0.01], [1e3, 5e4, 2e2, 9e3, 4e4]


@pytest.mark.parametrize("protocol", ["smc_scalar", "chained", "secagg"])
@pytest.mark.parametrize("gone", [(), (1,)], ids=str)
def test_seconds_are_those_of_the_slowest_site_of_every_step(protocol, gone):
    links = {i: [j for j in range(5) if j != i] for i in range(5)}
    messages = {
        "smc_scalar": lambda: clusters_messages([range(5)], 400, 400, gone),
        "chained": lambda: chain_messages(range(5), 400, gone),
        "secagg": lambda: secagg_messages(links, 400, gone),
    }[protocol]()
    cost = cost_of(exchange(protocol, 100, [range(5)], gone=gone, degree=[4] * 5))
    expected = simulated_seconds(messages, 5, 400, RTT, RATE)
    assert seconds(cost, Network(RTT, RATE), np.arange(5)) == pytest.approx(expected, rel=1e-12)
    back = np.arange(5)[::-1]  # the same sites under other numbers
    assert seconds(cost, Network(RTT[::-1], RATE[::-1]), back) == pytest.approx(expected, rel=1e-12)


def test_seconds_by_hand():
    # 250 entries = 1000 bytes at 1000 bytes/s: a second for the way down, and 0.1 + 1 up
    plain = cost_of(exchange("none", 250, [range(3)]))
    assert seconds(plain, Network(0.1, 1e3), range(3)) == pytest.approx(2.1)
    # three others: 3 s of shares in each direction, then a second up; the chain has 5 hops of a second
    mesh, chain = (cost_of(exchange(p, 250, [range(4)])) for p in ("additive", "chained"))
    assert seconds(mesh, Network(0.1, 1e3), range(4)) == pytest.approx(1 + 0.1 + 3 + 0.1 + 1)
    assert seconds(chain, Network(0.1, 1e3), range(4)) == pytest.approx(1 + 5 * 1.1)
    # a server of 2000 bytes/s needs 1.5 s for three models in either direction; its peers' shares pass it by
    assert seconds(plain, Network(0.1, 1e3, 2e3), range(3)) == pytest.approx(1.5 + 1.5)
    assert seconds(mesh, Network(0.1, 1e3, 1e3), range(4)) == pytest.approx(4 + 3.1 + 4)
    # of secagg the server carries keys and shares both ways: 4 x 3 x 160 bytes are the most
    masked = cost_of(exchange("secagg", 1, [range(4)], degree=[3] * 4))
    assert seconds(masked, Network(1e-9, 1e12, 1.0), range(4)) == pytest.approx(16 + 768 + 1920 + 16 + 1056, rel=1e-6)


def test_padding_may_name_any_site():
    cost = cost_of(exchange("none", 250, [[0, 1]], rows=3))
    assert seconds(cost, Network([0.1, 0.1], 1e3), [1, 0, 77]) == pytest.approx(2.1)


@pytest.mark.parametrize(
    "network, message",
    [
        (Network(0.0), r"network.rtt_s: 0.0 given, a finite number in \(0, inf\] expected"),
        (Network([0.1, -1, 0.1]), "network.rtt_s: -1.0 given"),
        (Network(0.1, math.nan), "network.bandwidth_bytes_s: nan given"),
        (Network(0.1, [1, 2]), "network.bandwidth_bytes_s: 2 values given, one, or one for each of 3 sites expected"),
        (Network("fast"), "network.rtt_s: 'fast' given, a number or one for each site expected"),
        (Network(0.1, 1.0, -3.0), "network.server_bytes_s: -3.0 given"),
    ],
    ids=["zero", "negative", "nan", "length", "word", "server"],
)
def test_links_that_cannot_be(network, message):
    with pytest.raises(UserError, match=message):
        latency.site_links(network, 3)
    with pytest.raises(UserError, match=message):
        seconds(cost_of(exchange("none", 1, [range(3)])), network, range(3))


def test_one_site_per_row():
    with pytest.raises(UserError, match="2 clients given for 3 rows"):
        seconds(cost_of(exchange("none", 1, [range(3)])), Network(), [0, 1])
