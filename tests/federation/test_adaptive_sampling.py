"""Selection by divergence: its law against an enumeration, and its memory in a run that stops, resumes, or is laned."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_federation import SIZES, cases, close, equal, parts, plan, quadratic, quick_jit, runner
from tiny_federation import start as start_of

from fedjax_seg.clients import local_sgd
from fedjax_seg.core.types import Cohort
from fedjax_seg.federation import round, sampling


def seen_by(sampler, norms, ok=None):
    """The memory after every client has returned an update of that norm."""
    cohort = Cohort(jnp.arange(len(norms)), jnp.ones(len(norms), bool))
    ok = jnp.ones(len(norms), bool) if ok is None else jnp.asarray(ok)
    return sampler.memory.observe(sampler.memory.init(), cohort, jnp.asarray(norms, jnp.float32), ok)


def remembered(sampler, memory, rounds, seed=0):
    """int [rounds, C]: cohorts that all have the same memory."""
    many = jax.vmap(sampler.memory.sample, (None, 0, None))
    return np.asarray(quick_jit(many)(jax.random.key(seed), jnp.arange(rounds), memory).clients)


def successive(weights, size):
    """P(set) of drawing `size` without replacement, each place in proportion to the weights that are left."""
    table = {}
    for order in itertools.permutations(range(len(weights)), size):
        left, p = sum(weights), 1.0
        for k in order:
            p, left = p * weights[k] / left, left - weights[k]
        table[tuple(sorted(order))] = table.get(tuple(sorted(order)), 0) + p
    return table


@pytest.mark.parametrize("temperature, explore", [(1.0, 0.1), (0.5, 0.4), (3.0, 1.0)])
def test_adaptive_draws_in_proportion_to_divergence(temperature, explore):
    norms, size, rounds = [4.0, 2.0, 1.0, 0.5, 0.0], 2, 12000
    sampler = sampling.make("adaptive", 5, size=size, temperature=temperature, explore=explore)
    ids = remembered(sampler, seen_by(sampler, norms), rounds)
    powers = np.array(norms) ** (1 / temperature)
    weights = (1 - explore) * powers / powers.sum() + explore / 5
    expected = successive(list(weights), size)
    counts = {pair: int((ids == pair).all(1).sum()) for pair in expected}
    assert stats.chisquare(list(counts.values()), [rounds * p for p in expected.values()]).pvalue > 1e-3


def test_adaptive_sees_everyone_before_anyone_twice():
    sampler = sampling.make("adaptive", 10, size=4)
    sample, memory, drawn = quick_jit(sampler.memory.sample), sampler.memory.init(), []
    for number in range(3):
        cohort = sample(jax.random.key(0), number, memory)
        drawn.append(cohort.clients.tolist())
        assert drawn[-1] == sorted(drawn[-1])
        # the third client of each cohort returns nothing usable: it has had its turn all the same
        norms = jnp.array([1e6, 1.0, jnp.nan, 1.0])
        memory = sampler.memory.observe(memory, cohort, norms, jnp.array([True, True, False, True]))
    assert len({*drawn[0], *drawn[1]}) == 8 and {*drawn[0], *drawn[1], *drawn[2]} == set(range(10))
    lost = [cohort[2] for cohort in drawn[:2]]
    again = memory["divergence"][jnp.array(lost)]
    assert all(d == 0 or k in drawn[2] for k, d in zip(lost, again.tolist()))


def test_adaptive_keeps_what_a_client_moved_last():
    sampler = sampling.make("adaptive", 3, size=2)
    memory = seen_by(sampler, [1.0, 2.0, 3.0])
    cohort = Cohort(jnp.array([2, 0]), jnp.ones(2, bool))
    memory = sampler.memory.observe(memory, cohort, jnp.array([7.0, 5.0]), jnp.array([True, False]))
    assert memory["divergence"].tolist() == [1.0, 2.0, 7.0] and memory["seen"].all()


@pytest.mark.parametrize("norms", [[0.0] * 4, [1e-30] * 4, [3e38] * 4])
def test_adaptive_is_uniform_where_all_moved_alike(norms):
    sampler = sampling.make("adaptive", 4, size=1, temperature=0.01)
    counts = np.bincount(remembered(sampler, seen_by(sampler, norms), 4000).ravel(), minlength=4)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_adaptive_first_round_is_uniform_over_subsets():
    sampler = sampling.make("adaptive", 5, size=2)
    ids = remembered(sampler, sampler.memory.init(), 6000)
    counts = np.unique(ids[:, 0] * 5 + ids[:, 1], return_counts=True)[1]
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-3


# In a run: the memory is a part of the state like any other.


@functools.cache
def federation(lanes):
    """(run, begin) of two of four clients a round; client 2's update is not a number in round 1."""
    arrays, task = cases(), quadratic()
    honest = local_sgd(task, lr=0.1)

    def train(variables, personal, batches, key, *, round, broadcast):
        update, rest = honest.train(variables, personal, batches, key, round=round, broadcast=broadcast)
        return update._replace(
            delta=jax.tree.map(lambda x: jnp.where((batches.client == 2) & (round == 1), jnp.nan, x), update.delta)
        ), rest

    sampler = sampling.make("adaptive", len(SIZES), size=2, explore=0.2)
    made = parts(honest._replace(train=train), arrays, sampler=sampler, skip_nonfinite=True, skip_empty=True)
    return runner(made, lanes), start_of(made, task, arrays), sampler


def test_a_remembering_sampler_is_told_what_moved():
    run, begin, sampler = federation(1)
    state, records, done = run(begin, plan(), 12)
    assert done == 12
    drawn, norms, ok = records["cohort"]["clients"], records["clients"]["update_norm"], records["clients"]["ok"]
    moved, seen, sample = np.zeros(len(SIZES)), set(), quick_jit(sampler.memory.sample)
    for t in range(12):
        expected = {"seen": jnp.array([k in seen for k in range(4)]), "divergence": jnp.asarray(moved, jnp.float32)}
        key = round.stream(jax.random.wrap_key_data(begin.key), round.SAMPLER)
        np.testing.assert_array_equal(sample(key, t, expected).clients, drawn[t])
        for k, norm, good in zip(drawn[t], norms[t], ok[t]):
            seen.add(int(k))
            moved[k] = norm if good else moved[k]
    np.testing.assert_allclose(state.sampler["divergence"], moved, rtol=1e-6)
    assert not ok[1].all() and seen == {0, 1, 2, 3}  # client 2 was in round 1, and came to nothing
    assert len({tuple(c) for c in drawn.tolist()}) > 2


def test_a_remembering_sampler_goes_on_where_it_stopped():
    run, begin, _ = federation(1)
    whole, records, _ = run(begin, plan(), 8)
    half, first, _ = run(begin, plan(), 3)
    rest, second, _ = run(jax.tree.map(np.asarray, half), plan(), 8)  # through the host, as a checkpoint does
    equal(rest, whole)
    drawn = np.concatenate([first["cohort"]["clients"][:3], second["cohort"]["clients"][:5]])
    np.testing.assert_array_equal(drawn, records["cohort"]["clients"][:8])
    _, other, _ = run(half._replace(sampler=begin.sampler), plan(), 8)
    assert (other["cohort"]["clients"][:5] != drawn[3:]).any()  # the memory did decide


def test_lanes_do_not_change_whom_a_remembering_sampler_draws():
    (one, begin, _), (two, _, _) = federation(1), federation(2)
    a, records, _ = one(begin, plan(), 10)
    b, others, _ = two(begin, plan(), 10)
    np.testing.assert_array_equal(records["cohort"]["clients"], others["cohort"]["clients"])
    close(a.variables, b.variables)
    close(a.sampler, b.sampler)


def test_sites_without_training_cases_do_not_block_a_remembering_sampler():
    run, begin, _ = federation(1)
    nobody = plan()._replace(train_sizes=np.array([0, 4, 0, 1], np.int32))
    state, records, done = run(begin, nobody, 14)
    assert done == 14 and state.sampler["seen"].all()
    np.testing.assert_array_equal(state.sampler["divergence"] > 0, [False, True, False, True])
    drawn = records["cohort"]["clients"][:14]
    came = np.bincount(drawn[2:].ravel(), minlength=4)
    assert came[1] + came[3] > came[0] + came[2]


def test_a_stopped_round_leaves_no_trace_in_the_memory():
    arrays, task = cases(), quadratic()
    arrays["x"][:] = np.nan
    made = parts(task, arrays, sampler=sampling.make("adaptive", len(SIZES), size=2))
    begin = start_of(made, task, arrays)
    state, records, done = runner(made)(begin, plan(), 3)
    assert done == 1 and state.round == 0 and records["halt"][0]
    equal(state.sampler, begin.sampler)
