"""Samplers against hand-made lists, closed forms and scipy's distributions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import sampling


@functools.cache
def compiled(function):
    """jit without the compiler's optimiser: these functions run for milliseconds and would compile for seconds."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def over_rounds(sample):
    return jax.vmap(sample, (None, 0))


def draw(sampler, rounds, seed=0):
    """Cohorts of rounds 0 .. rounds-1 as numpy [rounds, C] twice."""
    key = jax.random.key(seed)
    cohorts = compiled(over_rounds(sampler.sample))(key, jnp.arange(rounds))
    return np.asarray(cohorts.clients), np.asarray(cohorts.present)


def joined(sampler, clients, rounds, seed=0):
    """Bool [rounds, K]: who is present."""
    ids, present = draw(sampler, rounds, seed)
    table = np.zeros((rounds, clients), bool)
    for t in range(rounds):
        table[t, ids[t, present[t]]] = True
    return table


# full, static


def test_full_is_everyone_in_ascending_order():
    ids, present = draw(sampling.make("full", 4), 3)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert present.all()


@pytest.mark.parametrize("options", [{"size": 3}, {"rho": 0.3}])
def test_static_draws_one_subset_for_the_whole_run(options):
    ids, present = draw(sampling.make("static", 10, **options), 30)
    assert present.all() and ids.shape == (30, 3)
    assert (ids == ids[0]).all() and (np.diff(ids[0]) > 0).all()


def test_static_subsets_of_many_runs_are_uniform():
    sampler = sampling.make("static", 5, size=2)
    keys = jax.random.split(jax.random.key(3), 4000)
    ids = np.asarray(compiled(jax.vmap(lambda k: sampler.sample(k, 0).clients))(keys))
    counts = np.unique(ids[:, 0] * 5 + ids[:, 1], return_counts=True)[1]
    assert len(counts) == math.comb(5, 2)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_static_members_keep_the_given_order():
    ids, present = draw(sampling.make("static", 4, members=(0, 1, 3, 2)), 5)
    assert ids.tolist() == [[0, 1, 3, 2]] * 5
    assert present.all()


# uniform


def test_uniform_inclusion_frequency():
    clients, size, rounds = 10, 3, 5000
    counts = joined(sampling.make("uniform", clients, size=size), clients, rounds).sum(0)
    # One round's indicators have covariance p (1 - p) K / (K - 1) (I - 11'/K): scaled by it, the sum of squares of the
    # centred counts is chi-square with K - 1 degrees of freedom.
    p = size / clients
    statistic = ((counts - rounds * p) ** 2).sum() / (rounds * p * (1 - p) * clients / (clients - 1))
    assert 1e-3 < stats.chi2.sf(statistic, clients - 1) < 1 - 1e-3


def test_uniform_subsets_are_equally_likely_and_fresh():
    ids, present = draw(sampling.make("uniform", 5, size=2), 6001)
    assert present.all()
    subset = ids[:, 0] * 5 + ids[:, 1]
    counts = np.unique(subset, return_counts=True)[1]
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-3
    # A round says nothing of the next one: the same subset again with probability 1/10.
    repeats = int((subset[1:] == subset[:-1]).sum())
    assert stats.binomtest(repeats, 6000, 0.1).pvalue > 1e-3


# poisson


def test_poisson_cohort_size_is_binomial():
    clients, q, rounds = 6, 0.3, 8000
    sampler = sampling.make("poisson", clients, q=q)
    assert (sampler.q, sampler.truncated, sampler.capacity, sampler.min_cohort) == (0.3, False, 6, 0)
    sizes = joined(sampler, clients, rounds).sum(1)
    expected = rounds * stats.binom.pmf(np.arange(clients + 1), clients, q)
    assert stats.chisquare(np.bincount(sizes, minlength=clients + 1), expected).pvalue > 1e-3
    assert (sizes == 0).any()  # an empty round is a round


def test_poisson_clients_and_rounds_are_independent():
    clients, q, rounds = 6, 0.3, 20000
    table = joined(sampling.make("poisson", clients, q=q), clients, rounds, seed=1).astype(float) - q
    limit = 5 * q * (1 - q) / math.sqrt(rounds)  # five standard deviations of a mean of products
    pairs = table.T @ table / rounds
    assert np.abs(pairs - np.diag(np.diag(pairs))).max() < limit
    assert np.abs(table[:-1].T @ table[1:] / rounds).max() < limit
    assert np.abs(table.mean(0)).max() < 5 * math.sqrt(q * (1 - q) / rounds)


@pytest.mark.parametrize("q, size", [(0.0, 0), (1.0, 7)])
def test_poisson_ends_of_the_range(q, size):
    assert (joined(sampling.make("poisson", 7, q=q), 7, 50).sum(1) == size).all()


def test_poisson_capacity_cuts_nobody_in_particular():
    clients, q, capacity, rounds = 8, 0.5, 2, 8000
    sampler = sampling.make("poisson", clients, q=q, capacity=capacity)
    assert sampler.truncated and sampler.capacity == capacity
    table = joined(sampler, clients, rounds)
    pmf = stats.binom.pmf(np.arange(clients + 1), clients, q)
    expected = rounds * np.array([pmf[0], pmf[1], pmf[2:].sum()])
    assert stats.chisquare(np.bincount(table.sum(1), minlength=3), expected).pvalue > 1e-3
    p = (pmf[1] + 2 * pmf[2:].sum()) / clients
    assert np.abs(table.mean(0) - p).max() < 4.5 * math.sqrt(p * (1 - p) / rounds)


def test_poisson_capacity_of_all_clients_is_not_truncated():
    assert not sampling.make("poisson", 8, q=0.5, capacity=8).truncated


# randomized_order


def test_randomized_order_reads_one_list_cyclically():
    sampler = sampling.make("randomized_order", 5, size=2)
    ids, present = draw(sampler, 10)
    a, b, c, d = ids[:2].ravel()
    e = ids[2, 0]
    assert sorted([a, b, c, d, e]) == [0, 1, 2, 3, 4]
    assert ids.tolist() == [[a, b], [c, d], [e, a], [b, c], [d, e]] * 2
    assert present.all()
    # By hand from that list: a is in rounds 0, 2, 5, 7, ...
    assert [sampler.max_participations(r) for r in (1, 2, 3, 5, 6, 8, 10)] == [1, 1, 2, 2, 3, 4, 4]
    assert sampler.min_separation == 2


def test_randomized_order_survives_rounds_that_overflow_int32_places():
    sampler = sampling.make("randomized_order", 7, size=5)
    round = 2_000_000_000  # 10^10 places; 10^10 mod 7 = 4, and round 5 starts at 25 mod 7 = 4
    ids = compiled(over_rounds(sampler.sample))(jax.random.key(0), jnp.array([5, round])).clients
    assert ids[0].tolist() == ids[1].tolist()


# sliding_window


@pytest.mark.parametrize("clients, size", [(33, 6), (12, 4), (8, 7)])
def test_sliding_window_has_everyone_once_per_cycle(clients, size):
    cycle = math.ceil(clients / size)
    table = joined(sampling.make("sliding_window", clients, size=size), clients, 50 * cycle)
    assert (table.reshape(50, cycle, clients).sum(1) == 1).all()
    last = clients - (cycle - 1) * size
    assert table.sum(1).tolist() == ([size] * (cycle - 1) + [last]) * 50


def test_sliding_window_of_the_paper():
    # K = 33, rho = 0.2: 6 clients, cycles of 6 rounds; 20 rounds are 4 cycles begun, so at most 4 participations.
    sampler = sampling.make("sliding_window", 33, rho=0.2)
    assert sampler.capacity == 6
    assert [sampler.max_participations(r) for r in (1, 6, 7, 18, 20, 24)] == [1, 1, 2, 3, 4, 4]
    assert sampler.min_cohort == 3  # 33 = 5 * 6 + 3
    assert sampler.min_separation == 1
    assert sampler.q is None
    tables = [joined(sampler, 33, 20, seed) for seed in range(3)]
    assert max(t.sum(0).max() for t in tables) == 4
    assert any((t[:-1] & t[1:]).any() for t in tables)  # separation 1 does happen, across a boundary


def test_sliding_window_shuffles_every_cycle_uniformly():
    sampler = sampling.make("sliding_window", 4, size=1)
    ids, _ = draw(sampler, 4 * 4800)
    orders = ids.reshape(4800, 4) @ [64, 16, 4, 1]
    counts = np.unique(orders, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_released_window_reads_the_first_cycle_in_order():
    ids, present = draw(sampling.make("sliding_window", 33, rho=0.2, released=True), 6)
    assert ids.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17],
        [18, 19, 20, 21, 22, 23],
        [24, 25, 26, 27, 28, 29],
        [30, 31, 32, 0, 1, 2],
    ]
    assert present.all()


def test_released_window_shuffles_the_padded_list_and_trains_nobody_twice():
    cycles = 2001
    ids, present = draw(sampling.make("sliding_window", 33, size=6, released=True), 6 * cycles)
    listed = np.array([np.bincount(c, minlength=33) for c in ids.reshape(cycles, 36)])
    assert (listed == [2] * 3 + [1] * 30).all()
    for window, here in zip(ids, present, strict=True):
        first = [c not in window[:i] for i, c in enumerate(window)]
        assert here.tolist() == first
    # Each of the three pairs meets in one window with probability 5/35: the other copy takes one of the 5 places left.
    meetings = (~present).reshape(cycles, 36).sum(1)[1:]
    assert abs(meetings.mean() - 3 * 5 / 35) < 5 * meetings.std() / math.sqrt(cycles - 1)


def test_released_window_bounds_by_hand():
    sampler = sampling.make("sliding_window", 33, size=6, released=True)
    # Client 0: window 0 only until the last window of cycle 0; later up to two windows a cycle.
    assert [sampler.max_participations(r) for r in (1, 5, 6, 7, 8, 12, 20)] == [1, 1, 2, 3, 4, 4, 8]
    assert sampler.min_cohort == 3  # three pairs in one window of six
    assert sampler.min_separation == 1
    even = sampling.make("sliding_window", 12, size=4, released=True)  # nothing appended: as the paper's
    assert [even.max_participations(r) for r in (1, 3, 4, 20)] == [1, 1, 2, 7]
    assert even.min_cohort == 4


# options


@pytest.mark.parametrize(
    "clients, rho, size", [(33, 0.2, 6), (100, 0.29, 29), (33, 1 / 3, 11), (23, 0.2, 4), (5, 1, 5)]
)
def test_rho_is_a_floor(clients, rho, size):
    assert sampling.make("uniform", clients, rho=rho).capacity == size


SIZED = ["uniform", "static", "randomized_order", "sliding_window", "adaptive"]
BAD_SIZES = [
    ({"size": 0}, "size: 0 given"),
    ({"size": 6}, "size: 6 given"),
    ({"size": 2.0}, "an integer"),
    ({"size": True}, "an integer"),
    ({"rho": 0.0}, "rho: 0.0 given"),
    ({"rho": 1.1}, "rho: 1.1 given"),
    ({"rho": float("nan")}, "rho: nan given"),
    ({"rho": 0.1}, "less than one client"),
    ({}, "neither of size and rho"),
    ({"size": 2, "rho": 0.4}, "both of size and rho"),
    ({"sise": 2}, "did you mean 'size'"),
]


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("options, message", BAD_SIZES)
def test_bad_sizes_are_one_line(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        sampling.make(name, 5, **options)
    assert f"sampler {name}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, clients, options, message",
    [
        ("poisson", 5, {"q": -0.1}, "q: -0.1 given"),
        ("poisson", 5, {"q": 1.5}, "q: 1.5 given"),
        ("poisson", 5, {"q": float("nan")}, "q: nan given"),
        ("poisson", 5, {}, "missing a required argument: 'q'"),
        ("poisson", 5, {"q": 0.5, "capacity": 6}, "capacity .*: 6 given"),
        ("poisson", 5, {"q": 0.5, "capacity": -1}, "capacity .*: -1 given"),
        ("static", 5, {"members": (0, 5)}, "members .*: 5 given"),
        ("static", 5, {"members": (0, 1, 0)}, "name a client twice"),
        ("static", 5, {"members": (0,), "size": 1}, "only one of them expected"),
        ("static", 5, {"members": ()}, "neither of size and rho"),
        ("sliding_window", 5, {"size": 2, "released": "yes"}, "released: 'yes' given"),
        ("adaptive", 5, {"size": 2, "temperature": 0.0}, "temperature: 0.0 given"),
        ("adaptive", 5, {"size": 2, "explore": 0.0}, "explore: 0.0 given"),
        ("adaptive", 5, {"size": 2, "explore": 1.5}, "explore: 1.5 given"),
        ("full", 0, {}, "number of clients: 0 given"),
        ("full", 5, {"size": 2}, "unknown option 'size'"),
        ("slidingwindow", 5, {"size": 2}, "did you mean 'sliding_window'"),
    ],
)
def test_bad_options_are_one_line(name, clients, options, message):
    with pytest.raises(UserError, match=message) as caught:
        sampling.make(name, clients, **options)
    assert "\n" not in str(caught.value)
