"""Lanes and shards: every client runs once, wherever it runs; sums, stacks and personal rows are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from tiny_federation import quick_jit

from fedjax_seg.core.types import Cohort
from fedjax_seg.federation import client_axis


@functools.cache
def schedule_of(size, lanes, shards):
    return quick_jit(lambda steps: client_axis.schedule(steps, lanes, shards))


@settings(max_examples=80, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 1), (5, 1, 1), (5, 2, 1), (5, 5, 1), (7, 2, 2), (6, 3, 2), (3, 1, 4), (9, 2, 4)]),
    steps=st.lists(st.integers(0, 50), min_size=9, max_size=9),
)
def test_every_row_is_scheduled_once_and_the_rest_is_nobody(shape, steps):
    size, lanes, shards = shape
    steps = np.array(steps[:size], np.int32)
    plan = np.asarray(schedule_of(*shape)(steps))
    groups = -(-size // (lanes * shards))
    assert plan.shape == (shards, groups, lanes)
    assert sorted(plan[plan < size]) == list(range(size))
    assert np.all(plan[plan >= size] == size)
    if lanes * shards == 1:
        np.testing.assert_array_equal(plan.ravel(), np.arange(size))  # one lane: the order of the cohort
        return
    # the longest run together: no group is longer than any group of an earlier turn
    longest = np.max(np.append(steps, 0)[plan], axis=2)
    assert all(longest[:, g].min() >= longest[:, g + 1].max() for g in range(groups - 1))


def test_a_schedule_by_hand():
    steps = np.array([1, 9, 4, 7, 3], np.int32)
    assert schedule_of(5, 2, 1)(steps).tolist() == [[[1, 3], [2, 4], [0, 5]]]
    # the snake over two devices: 9 | 7, then 3 | 4, then 1 | nobody: sums 13 and 11
    assert schedule_of(5, 1, 2)(steps).tolist() == [[[1], [4], [0]], [[3], [2], [5]]]


# Six rows of a cohort over eight clients: row 2 is absent, row 4 is present but its message does not count.
COHORT = Cohort(jnp.array([5, 0, 3, 7, 2, 4], jnp.int32), jnp.array([True, True, False, True, True, True]))
STEPS = jnp.array([3, 1, 0, 9, 4, 2], jnp.int32)
PERSONAL = {"seen": jnp.arange(8.0)[:, None] * jnp.ones(2)}


def train_one(client, present, personal):
    """A message that no other client sends, and a personal row that tells who wrote it."""
    ok = present & (client != 2)
    value = 10.0 * client + personal["seen"][0]
    info = {"ok": ok, "client": client}
    return {"a": value * jnp.ones(3), "n": jnp.where(ok, 1.0, jnp.nan)}, {"seen": personal["seen"] + 100}, info


@pytest.mark.parametrize("lanes, shards", [(1, 1), (2, 1), (6, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("accumulate", [True, False])
def test_sum_stack_and_personal_rows(lanes, shards, accumulate):
    how = client_axis.Lanes(lanes, shards, "client" if shards > 1 else None)
    run = lambda personal: client_axis.run(train_one, COHORT, STEPS, personal, how, accumulate)
    if shards > 1:
        mesh = jax.make_mesh((shards,), ("client",), devices=jax.devices()[:shards])
        spec = PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    total, personal, info, executed = quick_jit(run)(PERSONAL)

    ids, good = np.asarray(COHORT.clients), np.array([True, True, False, True, False, True])
    values = np.where(good, 11.0 * ids, 0.0)
    if accumulate:
        assert total["n"] == 4
        np.testing.assert_array_equal(total["a"], np.full(3, values.sum()))
    else:
        np.testing.assert_array_equal(total["n"], good)
        np.testing.assert_array_equal(total["a"], np.repeat(values[:, None], 3, 1))
    np.testing.assert_array_equal(info["ok"], good)
    np.testing.assert_array_equal(np.asarray(info["client"])[good], ids[good])
    expected = np.arange(8.0) + 100 * np.isin(np.arange(8), ids[good])
    np.testing.assert_array_equal(personal["seen"], np.repeat(expected[:, None], 2, 1))
    # sorted lengths 9 4 3 2 1 0: what the hardware runs, idle lanes included, by hand
    hand = {(1, 1): 19, (2, 1): 2 * (9 + 3 + 1), (6, 1): 6 * 9, (1, 4): 19, (4, 2): 4 * (9 + 1)}
    assert executed == hand[lanes, shards]
