"""Costs of secure sums against a list of every single message, rounds with losses among them."""

import numpy as np
import pytest
from every_message import SEED, SHARE, chain_messages, clusters_messages, exchange, secagg_messages, totals
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import communication
from fedjax_seg.privacy.communication import Exchange, cost_of
from fedjax_seg.privacy.latency import Network, seconds


def counted(cost):
    return (*cost[:3], cost.hops, cost.up.tolist(), cost.peer.tolist())


ROUNDS = {
    "three in one": ([[0, 1, 2]], ()),
    "pairs": ([[0, 1], [2, 3]], ()),
    "uneven, a padded row": ([[0, 3, 5], [1, 2]], ()),
    "one lost": ([[0, 1, 2], [3, 4]], (1,)),
    "one lost of a pair": ([[0, 1, 2], [3, 4]], (4,)),
    "two groups hit": ([[0, 1, 2, 3], [4, 5, 6]], (0, 2, 6)),
    "all lost": ([[0, 1], [2, 3, 4]], (2, 3, 4)),
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("protocol", ["smc_scalar", "additive", "seeds"])
def test_clusters_cost_what_their_messages_are(protocol, name):
    groups, gone = ROUNDS[name]
    kind, share = ("additive", SEED) if protocol == "seeds" else (protocol, 400)
    made = exchange(kind, 100, groups, gone=gone, rows=8, transport="seeds" if protocol == "seeds" else "vectors")
    messages = clusters_messages(groups, 400, share, gone)
    assert counted(cost_of(made)) == totals(messages, 8)
    again = sum(any(i in gone for i in g) and sum(i not in gone for i in g) > 1 for g in groups)
    assert cost_of(made).repeated == again


@pytest.mark.parametrize("gone", [(), (0,), (3,), (1, 2), (0, 1, 2)], ids=str)
def test_a_chain_breaks_where_somebody_is_gone_and_starts_again(gone):
    messages = chain_messages([0, 1, 2, 3], 400, gone)
    cost = cost_of(exchange("chained", 100, [[0, 1, 2, 3]], gone=gone))
    assert counted(cost) == totals(messages, 4) and cost.repeated == (0 < len(gone) < 3)


def test_a_chain_goes_in_its_own_order_and_chains_run_side_by_side():
    cost = cost_of(exchange("chained", 100, [[0, 1, 2, 3]], gone=(3,), place=[2, 1, 3, 0]))
    assert counted(cost) == totals(chain_messages([3, 1, 0, 2], 400, (3,)), 4)
    both = cost_of(exchange("chained", 100, [[0, 1], [2, 3, 4]]))
    messages = chain_messages([0, 1], 400) + chain_messages([2, 3, 4], 400)
    assert counted(both) == totals(messages, 5) and both.hops == 4


def ring(rows):
    return {i: [(i - 1) % rows, (i + 1) % rows] for i in range(rows)}


@pytest.mark.parametrize("protocol", ["secagg", "secagg_plus"])
@pytest.mark.parametrize("gone, aborted", [((), False), ((2,), False), ((0, 3), False), ((0, 1, 2), True)], ids=str)
def test_masked_sums_cost_what_their_messages_are(protocol, gone, aborted):
    links = {i: [j for j in range(12) if j != i] for i in range(12)} if protocol == "secagg" else ring(12)
    degree = [len(links[i]) for i in range(12)]
    cost = cost_of(exchange(protocol, 100, [range(12)], gone=gone, degree=degree, failed=aborted))
    assert counted(cost) == totals(secagg_messages(links, 400, gone, aborted), 12)
    assert cost.repeated == 0 and cost.hops == (3 if aborted else 4)


def test_who_leaves_after_its_upload_gives_no_answer():
    degree, stays = [3] * 4, [True, True, False, True]
    full = cost_of(exchange("secagg", 100, [range(4)], degree=degree))
    cost = cost_of(exchange("secagg", 100, [range(4)], degree=degree, answered=stays))
    assert full.messages - cost.messages == 1 and full.bytes_up - cost.bytes_up == 4 * SHARE
    assert cost.up[2] == 400


@pytest.mark.parametrize("protocol", ["none", "assumed"])
def test_a_plain_sum_is_its_uploads(protocol):
    cost = cost_of(exchange(protocol, 100, [[0, 1, 2]], gone=(1,), rows=4))
    assert counted(cost) == (2, 800, 0, 1, [400, 0, 400, 0], [0] * 4)
    assert cost.down.tolist() == [400, 400, 400, 0] and cost.bytes_down == 1200


def test_the_model_goes_to_all_who_are_present_and_nobody_else():
    made = exchange("additive", 10, [[0, 1]], rows=4, present=[True, True, True, False])
    assert cost_of(made).down.tolist() == [40, 40, 40, 0]


def test_an_aborted_round_repeats_nothing():
    cost = cost_of(exchange("additive", 10, [[0, 1, 2], [3, 4]], gone=(0, 4), failed=True))
    assert cost.repeated == 0 and cost.hops == 2


def test_nobody_there_costs_nothing():
    for protocol in communication.PROTOCOLS:
        cost = cost_of(Exchange(protocol, "vectors", 5, *[[False] * 3] * 3, [0, 1, 2], [0] * 3))
        assert cost[:6] == (0,) * 6 and seconds(cost, Network(), [0, 1, 2]) == 0


@settings(max_examples=40, deadline=None)
@given(
    protocol=st.sampled_from(sorted(communication.PROTOCOLS)),
    present=st.lists(st.booleans(), min_size=1, max_size=9),
    data=st.data(),
)
def test_rows_add_up_and_order_of_rows_does_not_matter(protocol, present, data):
    rows = len(present)
    flags = st.lists(st.booleans(), min_size=rows, max_size=rows)
    joined = np.array(present) & data.draw(flags)
    arrived = joined & data.draw(flags)
    group = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
    made = Exchange(protocol, "vectors", 7, joined, arrived, arrived, group, np.full(rows, joined.sum() - 1), False,
                    np.array(present), place=np.arange(rows))  # fmt: skip
    cost = cost_of(made)
    handed = sum(phase.handed for phase in cost.phases)
    assert (cost.up.sum(), cost.peer.sum() + handed, cost.down.sum()) == (
        cost.bytes_up,
        cost.bytes_peer,
        cost.bytes_down,
    )
    order = np.array(data.draw(st.permutations(range(rows))))
    fields = ("joined", "counts", "arrived", "group", "degree", "present", "place")
    other = cost_of(made._replace(**{f: getattr(made, f)[order] for f in fields}))
    assert other[:6] == cost[:6] and (other.up == cost.up[order]).all() and (other.peer == cost.peer[order]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"protocol": "secag"}, "communication: protocol: unknown name 'secag'; did you mean 'secagg'"),
        ({"protocol": "additive", "transport": "seed"}, "communication: transport: 'seed' given"),
        ({"entries": 0}, "communication: entries: 0 given"),
        ({"arrived": [True, True, True]}, r"rows of lengths \[3\] given, one length expected, with .* arrived in"),
        ({"present": [True, True, False]}, "counts in joined in present"),
        ({"group": [0, 0]}, r"rows of lengths \[2, 3\] given"),
    ],
    ids=["protocol", "transport", "entries", "arrived", "present", "length"],
)
def test_records_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        cost_of(exchange("none", 1, [range(3)], gone=(1,))._replace(**change))


def test_a_line_of_the_ledger():
    made = exchange("additive", 10, [[0, 1, 2]], gone=(1,))
    line = communication.ledger_entry(made, cost_of(made), 1.5, dropped=1, saturated=7)
    # three to two others each, two uploads, then two to one other, two uploads
    assert line == {
        "messages": 6 + 2 + 2 + 2, "bytes_up": 160, "bytes_peer": 8 * 40, "bytes_down": 120, "hops": 4,
        "repeated": 1, "aborted": 0, "dropped": 1, "seconds": 1.5, "saturated": 7,
    }  # fmt: skip
