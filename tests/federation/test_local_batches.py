"""Local batches: shuffled epochs visit every case once, Poisson samples draw every unit by chance, from keys alone."""

import functools
import itertools
import math
from fractions import Fraction

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


# Poisson sampling. Patient p has the cases of PATIENT p; case 0 is of a patient who has cases nowhere else.

PATIENT = np.array([9] + [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8] + [20 + i for i in range(22)], np.int32)
STEPS = 300


@functools.cache
def samples_of(unit, batch, longest_plan=20, longest=20):
    """(plan, size, client, seed) -> (batches of STEPS steps, Batches' scalars)."""
    arrays = {"x": jnp.arange(CASES) * 10.0, "y": jnp.arange(CASES), "unit": jnp.asarray(PATIENT)}
    batches_of = local_batches.make("poisson", arrays, batch, 2, unit=unit, longest=longest)

    @quick_jit
    def all_steps(plan, size, client, seed):
        local = batches_of(plan, size, client, jax.random.key(seed))
        scalars = {"steps": local.steps, "examples": local.examples, "client": local.client, "expected": local.expected}
        return jax.vmap(local.at)(jnp.arange(STEPS)), scalars

    def call(cases, client=0, seed=0, padding=0):
        plan = np.full(longest_plan, padding, np.int32)
        plan[: len(cases)] = cases
        return all_steps(plan, np.int32(len(cases)), np.int32(client), seed)

    return call


def drawn(batches):
    """bool [STEPS, CASES]: which cases a step holds; real rows come first and hold no case twice."""
    mask, y = np.asarray(batches["mask"]), np.asarray(batches["y"])
    assert np.all(np.diff(mask, axis=1) <= 0)
    found = np.zeros((STEPS, CASES), int)
    for step in range(STEPS):
        np.add.at(found[step], y[step][mask[step] > 0], 1)
    assert found.max() <= 1
    return found.astype(bool)


def test_every_case_joins_every_step_independently_with_the_stated_chance():
    mine, batch = np.arange(1, 19), 6
    batches, scalars = samples_of("example", batch)(mine, client=3)
    assert {k: float(v) for k, v in scalars.items()} == {"steps": 6, "examples": 18, "client": 3, "expected": 6}
    assert set(batches) == {"x", "y", "mask"}  # the patients' numbers reach no model
    found, q = drawn(batches), batch / 18
    assert not found[:, 0].any() and not found[:, 19:].any()
    z = (found[:, mine].sum(0) - STEPS * q) / math.sqrt(STEPS * q * (1 - q))
    assert np.sum(z**2) < 45.0  # chi-square, 18 degrees of freedom: 0.04 %
    sizes = found.sum(1)  # of independent draws: binomial, whose variance a fixed batch or an epoch would not have
    assert abs(sizes.mean() - batch) < 5 * math.sqrt(18 * q * (1 - q) / STEPS)
    assert 0.6 < sizes.var() / (18 * q * (1 - q)) < 1.5
    both = (found[1:] & found[:-1])[:, mine].mean()  # and steps know nothing of each other
    assert abs(both - q * q) < 5 * math.sqrt(q * q / (18 * STEPS))
    # masked rows hold a case of the client itself, never another one's
    assert set(np.asarray(batches["y"]).ravel()) <= set(mine)
    np.testing.assert_array_equal(batches["x"], 10.0 * np.asarray(batches["y"]))


def test_a_patient_brings_one_case_at_most():
    mine, batch = np.arange(17, 0, -1), 3  # nine patients, their cases not side by side in order
    batches, scalars = samples_of("patient", batch)(mine)
    assert {k: float(v) for k, v in scalars.items()} == {"steps": 6, "examples": 17, "client": 0, "expected": 3}
    found, q = drawn(batches)[:, 1:18], batch / 9
    of = PATIENT[1:18][None] == np.arange(9)[:, None]  # [patients, cases]
    joined = found @ of.T.astype(int)
    assert joined.max() == 1
    z = (joined.sum(0) - STEPS * q) / math.sqrt(STEPS * q * (1 - q))
    assert np.sum(z**2) < 30.0  # chi-square, 9 degrees of freedom: 0.04 %
    share = STEPS * q / of.sum(1)[PATIENT[1:18]]  # every case of a patient stands for him alike
    assert np.sum((found.sum(0) - share) ** 2 / share) < 45.0


def test_few_units_are_all_in_every_step():
    for unit, mine, units in (("example", [3, 8, 5], 3), ("patient", [4, 5, 6, 7], 2)):
        batches, scalars = samples_of(unit, 6 if unit == "example" else 3)(np.array(mine))
        assert (scalars["steps"], scalars["expected"]) == (2, units)
        assert np.all(drawn(batches).sum(1) == units)


@pytest.mark.parametrize("unit, batch", [("example", 6), ("patient", 3)])
def test_samples_depend_on_the_key_alone(unit, batch):
    mine = np.array([2, 3, 14, 13, 8, 9, 4, 12, 17])
    one = drawn(samples_of(unit, batch)(mine)[0])
    np.testing.assert_array_equal(one, drawn(samples_of(unit, batch)(mine, client=5, padding=33)[0]))
    np.testing.assert_array_equal(one, drawn(samples_of(unit, batch, 9)(mine)[0]))
    assert np.any(one != drawn(samples_of(unit, batch)(mine, seed=1)[0]))


def test_a_draw_beyond_the_capacity_is_cut(monkeypatch):
    whole = drawn(samples_of("example", 6)(np.arange(1, 19))[0])
    monkeypatch.setattr(local_batches, "poisson_capacity", lambda units, batch: 5)
    batches, _ = samples_of.__wrapped__("example", 6)(np.arange(1, 19))
    cut = drawn(batches)
    assert batches["mask"].shape == (STEPS, 5)
    np.testing.assert_array_equal(cut.sum(1), np.minimum(whole.sum(1), 5))
    assert np.all(whole | ~cut)  # nobody is drawn in another's place


@pytest.mark.parametrize("units, batch", [(800, 16), (60, 16), (17, 16), (16, 16), (5, 16), (300, 1)])
def test_the_capacity_is_the_smallest_that_nearly_never_overflows(units, batch):
    """Tails in exact fractions."""
    q = Fraction(min(batch, units), units)
    chance = lambda k: math.comb(units, k) * q**k * (1 - q) ** (units - k)
    tail = lambda rows: sum((chance(k) for k in range(rows + 1, min(units, rows + 60) + 1)), Fraction(0))
    rows = local_batches.poisson_capacity(units, batch)
    assert tail(rows) <= Fraction(1, 10**15)
    assert rows == min(units, batch) or tail(rows - 1) > Fraction(1, 10**15)


def test_units_are_counted_per_client():
    plan = np.array([[[1, 2, 3, 0], [4, 5, 6, 7]], [[7, 0, 0, 0], [1, 3, 2, 0]]])
    sizes = np.array([[3, 4], [1, 0]])
    np.testing.assert_array_equal(local_batches.unit_counts(plan, sizes), sizes)
    np.testing.assert_array_equal(local_batches.unit_counts(plan, sizes, PATIENT), [[2, 2], [1, 0]])


@pytest.mark.parametrize(
    "sampling, options, text",
    [
        ("cyclic", {}, "batch_sampling: 'cyclic' given, one of 'shuffled', 'poisson'"),
        ("shuffled", {"unit": "patient"}, "batch_sampling: 'shuffled' given with the patient as the unit"),
        ("poisson", {"unit": "slice"}, "unit of privacy: 'slice' given"),
        ("poisson", {"unit": "patient"}, "data: no patient numbers found, an array 'unit' expected"),
        ("poisson", {"longest": 0}, "units of the largest client: 0 given"),
    ],
)
def test_samplings_are_checked(sampling, options, text):
    with pytest.raises(UserError, match=text):
        local_batches.make(sampling, {"x": jnp.zeros(3)}, 4, 1, **{"longest": 3} | options)
