"""Who exchanges with whom, against sets in plain Python."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_sums import quick_jit

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort
from fedjax_seg.privacy import clusters

COLUMNS = {
    "region": ["north", "south", "north", "south", "north"],
    "ward": ["a", "b", "a", "a", "b "],
    "lone": ["a", "b", "a", "a", "a"],
    "gap": ["a", "", "a", "b", "b"],
    "nan": ["a", "a", "a", float("nan"), "a"],
    "short": ["a", "a"],
}


def chosen(clients, places=0, **options):
    return clusters.chosen("secure_sum 'x'", clients, places or clients, COLUMNS, **options)


DEALT = [  # (K, options, sizes): M and N as in the paper, K = 33 of it cannot be divided by 4
    (33, {}, (33,)),
    (8, {"clusters": 4}, (2, 2, 2, 2)),
    (33, {"clusters": 4}, (9, 8, 8, 8)),
    (33, {"clusters": 1}, (33,)),
    (33, {"size": 3}, (3,) * 11),
    (33, {"size": 4}, (5, 4, 4, 4, 4, 4, 4, 4)),
    (5, {"size": 5}, (5,)),
    (5, {"size": 2}, (3, 2)),
    (33, {"clusters": 11, "size": 3}, (3,) * 11),
    (33, {"clusters": 8, "size": 4}, (5, 4, 4, 4, 4, 4, 4, 4)),
    (7, {"sizes": (2, 3, 2)}, (2, 3, 2)),
    (5, {"column": "region"}, (3, 2)),
    (5, {"column": "ward"}, (3, 2)),
]


@pytest.mark.parametrize(("clients", "options", "sizes"), DEALT, ids=str)
def test_sizes_of_clusters(clients, options, sizes):
    dealt = chosen(clients, **options)
    assert dealt.sizes == sizes and tuple(np.bincount(dealt.of)) == sizes
    assert dealt.facts["clusters"] == len(sizes) and dealt.facts["cluster_sizes"] == list(sizes)
    if "column" in options:
        names = [value.strip() for value in COLUMNS[options["column"]]]
        for i, k in itertools.combinations(range(clients), 2):
            assert (names[i] == names[k]) == (dealt.of[i] == dealt.of[k])


def test_dealing_is_random_and_fixed_by_its_seed():
    found = [tuple(chosen(12, clusters=3, seed=seed).of) for seed in range(200)]
    assert found[7] == tuple(chosen(12, clusters=3, seed=7).of)
    assert len(set(found)) > 190
    together = np.mean([of[0] == of[1] for of in found])
    assert abs(together - 3 / 11) < 5 * np.sqrt(3 / 11 * 8 / 11 / 200)  # 3 of the 11 others share a cluster of 4


FAULTS = [
    (5, {"size": 6}, "size: N = 6 given for 5 clients, at most 5 expected"),
    (5, {"size": 1}, "size: 1 given, at least 2 expected: a cluster of 1 hides nothing: its sum is its message"),
    (5, {"clusters": 5}, "clusters: M = 5 given for 5 clients, at most 2 expected: a cluster of 1 hides nothing"),
    (5, {"clusters": 3}, "clusters: M = 3 given for 5 clients, at most 2 expected"),
    (5, {"clusters": 9}, "clusters: M = 9 given for 5 clients, at most 2 expected"),
    (9, {"clusters": 2, "size": 3}, "clusters: M = 2 and size N = 3 given for 9 clients, which make M = 9 // 3 = 3"),
    (5, {"clusters": -1}, "clusters: -1 given"),
    (5, {"clusters": 1.5}, "clusters: 1.5 given, an integer"),
    (5, {"seed": -1, "clusters": 2}, "seed: -1 given"),
    (5, {"sizes": (2, 2)}, r"sizes: \(2, 2\) given, which add up to 4, 5 expected"),
    (5, {"sizes": (4, 1)}, "sizes: 1 given, at least 2 members each expected: a cluster of 1 hides nothing"),
    (5, {"sizes": (2.5, 2.5)}, "sizes: 2.5 given, an integer"),
    (5, {"column": "regoin"}, "column: unknown name 'regoin'; did you mean 'region'"),
    (5, {"column": "lone"}, "column 'lone': 'b' has client 1 only, at least 2 clients"),
    (5, {"column": "gap"}, "column 'gap': no value found for client 1"),
    (5, {"column": "nan"}, "column 'nan': no value found for client 3"),
    (5, {"column": "short"}, "column 'short': 2 values found for 5 clients"),
    (5, {"column": "region", "size": 2}, "clusters, size and column given, one way"),
    (5, {"redraw": True}, "redraw given with one cluster of all, with clusters or size expected"),
    (5, {"redraw": True, "column": "region"}, "redraw given with column"),
    (5, {"redraw": 2, "size": 2}, "redraw: 2 given"),
]


@pytest.mark.parametrize(("clients", "options", "message"), FAULTS, ids=[str(f[1]) for f in FAULTS])
def test_faults_are_one_line(clients, options, message):
    with pytest.raises(UserError, match=f"^secure_sum 'x': {message}") as error:
        chosen(clients, **options)
    assert "\n" not in str(error.value)


def test_redrawn_clusters_are_of_those_in_a_round():
    assert chosen(100, places=7, size=3, redraw=True).sizes == (4, 3)
    with pytest.raises(UserError, match="size: N = 8 given for 7 places of a round"):
        chosen(100, places=7, size=8, redraw=True)


MEET = quick_jit(
    lambda of, clients, present, stays, key: clusters.meet(
        clusters.Clusters(of, (), False, 0, ""), Cohort(clients, present), stays, key
    )
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_meeting_against_sets(data):
    """9 clients in clusters that may be of one, 6 of them in the round."""
    of = np.asarray(data.draw(st.lists(st.integers(0, 8), min_size=9, max_size=9)))
    clients = np.asarray(data.draw(st.permutations(range(9)))[:6])
    flags = st.lists(st.booleans(), min_size=6, max_size=6)
    present, stays = np.asarray(data.draw(flags)), np.asarray(data.draw(flags))
    found = jax.tree.map(np.asarray, MEET(of, clients, present, stays, 0))
    members = {i: {k for k in range(6) if present[k] and of[clients[k]] == of[clients[i]]} for i in range(6)}
    joined = {i for i in range(6) if present[i] and len(members[i]) > 1}
    counts = {i for i in joined if stays[i] and any(stays[k] for k in members[i] - {i})}
    assert set(np.flatnonzero(found.joined)) == joined and set(np.flatnonzero(found.counts)) == counts
    links = {(i, k) for i in joined for k in members[i] - {i}}
    assert set(zip(*np.nonzero(found.links), strict=True)) == links
    assert ((found.group >= 0) & (found.group < 6)).all() and found.group.dtype == np.int32
    for i, k in itertools.combinations(sorted(joined), 2):
        assert (found.group[i] == found.group[k]) == ((i, k) in links)
    for i in set(range(6)) - joined:
        assert Counter(found.group)[found.group[i]] == 1  # in no group of others
    np.testing.assert_array_equal(found.clients, clients)


def test_redrawing_leaves_nobody_alone():
    for options in ({"size": 3}, {"clusters": 4}):
        dealt = chosen(50, places=9, redraw=True, **options)
        meet = quick_jit(
            lambda clients, present, key, dealt=dealt: clusters.meet(
                dealt, Cohort(clients, present), jnp.ones(9, bool), jax.random.key(key)
            )._replace(key=0)
        )
        seen = set()
        for seed in range(12):
            rng = np.random.default_rng(seed)
            clients, there = rng.permutation(50)[:9], seed % 10
            present = np.isin(np.arange(9), rng.permutation(9)[:there])
            found = jax.tree.map(np.asarray, meet(clients, present, seed))
            sizes = sorted(Counter(found.group[found.joined]).values())
            wanted = max(1, there // 3 if "size" in options else min(4, there // 2)) if there > 1 else 0
            assert sum(sizes) == (there if there > 1 else 0) and len(sizes) == wanted
            assert not sizes or (sizes[-1] - sizes[0] <= 1 and sizes[0] >= 2)
            seen.add(tuple(found.group))
            # the same clients in other rows: the same clusters
            order = rng.permutation(9)
            moved = jax.tree.map(np.asarray, meet(clients[order], present[order], seed))
            np.testing.assert_array_equal(moved.links, found.links[np.ix_(order, order)])
        everybody = [np.asarray(meet(np.arange(9), np.ones(9, bool), seed).links).tobytes() for seed in range(8)]
        assert len(set(everybody)) == 8


def test_a_lone_arrival_is_found():
    of, present = jnp.asarray([0, 0, 0, 1, 1, 2]), jnp.ones(6, bool)
    meeting = MEET(of, jnp.arange(6), present, present, 0)
    alone = quick_jit(lambda arrived: clusters.alone(meeting, arrived))
    for arrived, expected in [([], False), ([0, 1], False), ([0], True), ([0, 1, 2, 3], True), ([0, 2, 3, 4], False)]:
        assert bool(alone(np.isin(np.arange(6), arrived))) == expected


def test_the_order_of_a_chain_is_a_random_permutation_of_those_in_it():
    among = jnp.asarray([True, True, False, True, True])
    clients = jnp.asarray([4, 9, 1, 0, 30])
    ranks = quick_jit(jax.vmap(lambda seed: clusters.ranks(jax.random.key(seed), clients, among)))
    places = np.asarray(ranks(jnp.arange(2000)))[:, np.asarray(among)]
    assert (np.sort(places, axis=1) == np.arange(4)).all()
    orders = Counter(map(tuple, places))
    assert stats.chisquare([orders[p] for p in itertools.permutations(range(4))]).pvalue > 1e-3
