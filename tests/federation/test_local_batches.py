"""Local batches: every epoch visits every case once, in an order that depends on the client's key alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_federation import quick_jit

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import local_batches

CASES, LONGEST = 40, 12


@functools.cache
def steps_of(batch, epochs, longest=LONGEST):
    """(plan [longest], size, client, seed) -> (batches of all steps there could be, steps, examples, client)."""
    arrays = {"x": jnp.arange(CASES) * 10.0, "y": jnp.arange(CASES)}
    batches_of = local_batches.in_memory(arrays, batch, epochs)

    @quick_jit
    def all_steps(plan, size, client, seed):
        local = batches_of(plan, size, client, jax.random.key(seed))
        most = jnp.arange(epochs * -(-longest // batch))
        return jax.vmap(local.at)(most), local.steps, local.examples, local.client

    return all_steps


def visited(batches, steps):
    """The case numbers of every real step, masked ones dropped."""
    return [y[m > 0].tolist() for y, m in zip(batches["y"][:steps], batches["mask"][:steps])]


@settings(max_examples=60, deadline=None)
@given(
    mine=st.lists(st.integers(1, CASES - 1), min_size=0, max_size=LONGEST, unique=True),
    shape=st.sampled_from([(4, 2), (16, 1)]),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_epoch_visits_every_case_once(mine, shape, seed):
    batch, epochs = shape
    plan = np.zeros(LONGEST, np.int32)
    plan[: len(mine)] = mine
    batches, steps, examples, client = steps_of(batch, epochs)(plan, np.int32(len(mine)), 2, seed)
    per_epoch = -(-len(mine) // batch)
    assert (steps, examples, client) == (per_epoch * epochs, len(mine), 2)
    seen = visited(batches, int(steps))
    for epoch in range(epochs):
        chunk = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*chunk)) == sorted(mine)
        assert all(len(b) == batch for b in chunk[:-1])
    # masked rows hold a case of the client itself, never another one's
    assert set(np.asarray(batches["y"][: int(steps)]).ravel()) <= set(mine)
    np.testing.assert_array_equal(batches["x"], 10.0 * np.asarray(batches["y"]))


def test_epochs_and_keys_are_shuffled_apart():
    mine = np.arange(1, LONGEST + 1, dtype=np.int32)
    steps = [visited(steps_of(4, 2)(mine, np.int32(LONGEST), 0, seed)[0], 6) for seed in range(20)]
    orders = [tuple(itertools.chain(*epoch)) for six in steps for epoch in (six[:3], six[3:])]
    assert len(set(orders)) == 40
    assert len({order[0] for order in orders}) > 6  # of 12 cases, 40 draws: fewer has probability below 1e-9


def test_the_order_depends_neither_on_the_padded_length_nor_on_the_client():
    mine = np.array([3, 9, 4, 30, 11, 5, 2], np.int32)
    results = []
    for longest, padding, client in ((7, 0, 0), (12, 0, 3), (12, 33, 1)):
        plan = np.full(longest, padding, np.int32)
        plan[:7] = mine
        batches, steps, _, _ = steps_of(4, 2, longest)(plan, np.int32(7), client, 5)
        results.append(visited(batches, int(steps)))
    assert results[0] == results[1] == results[2]


def test_what_a_shuffle_draws_is_uniform():
    """The first of three cases: chi-square over 600 keys, two degrees of freedom; 13.8 is the 0.1 % point."""
    plan = np.array([1, 2, 3] + [0] * 9, np.int32)
    first = [visited(steps_of(4, 2)(plan, np.int32(3), 0, seed)[0], 1)[0][0] for seed in range(600)]
    counts = np.bincount(first, minlength=4)[1:]
    assert np.sum((counts - 200.0) ** 2 / 200.0) < 13.8


@pytest.mark.parametrize("batch, epochs, name", [(0, 1, "batch_size"), (4, 0, "local_epochs"), (2.5, 1, "batch_size")])
def test_sizes_are_checked(batch, epochs, name):
    with pytest.raises(UserError, match=f"{name}: .* given, an integer in"):
        local_batches.in_memory({}, batch, epochs)
