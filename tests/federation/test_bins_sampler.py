"""Balls in bins: slots are uniform and independent, and everyone comes exactly once in every cycle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import sampling
from fedjax_seg.federation.balls_in_bins import slots

CLIENTS, CYCLE, ROUNDS = 12, 5, 23


@pytest.fixture(scope="module")
def there():
    """bool [seeds, ROUNDS, CLIENTS], as the sampler says; its cohorts; the slots [seeds, CLIENTS]."""
    sampler = sampling.make("balls_in_bins", CLIENTS, cycle=CYCLE)

    def draw(seed):
        key = jax.random.key(seed)
        return jax.vmap(sampler.sample, (None, 0))(key, jnp.arange(ROUNDS)), slots(key, CLIENTS, CYCLE)

    program = jax.jit(jax.vmap(draw), compiler_options={"xla_backend_optimization_level": 0})
    (ids, present), own = jax.tree.map(np.asarray, program(jnp.arange(20)))
    return ((ids[..., None] == np.arange(CLIENTS)) & present[..., None]).any(-2), ids, present, own


@pytest.fixture(scope="module")
def drawn():
    """int [4000, 3], slots out of four of three clients in so many runs."""
    draw = lambda seeds: jax.vmap(lambda seed: slots(jax.random.key(seed), 3, 4))(seeds)
    return np.asarray(jax.jit(draw, compiler_options={"xla_backend_optimization_level": 0})(jnp.arange(4000)))


def test_everyone_is_in_exactly_one_round_of_every_cycle_and_always_the_same(there):
    member, _, _, _ = there
    for start in range(ROUNDS - CYCLE + 1):
        assert (member[:, start : start + CYCLE].sum(1) == 1).all()
    np.testing.assert_array_equal(member[:, :-CYCLE], member[:, CYCLE:])


def test_present_rows_come_first_in_ascending_ids(there):
    _, ids, present, _ = there
    assert (np.diff(present.astype(int), axis=-1) <= 0).all()
    inside = present[..., 1:]  # and so is the row before
    assert (np.diff(ids, axis=-1)[inside] > 0).all()
    assert present.sum(-1).min() == 0 or present.sum(-1).std() > 0  # sizes vary


def test_slots_are_uniform_for_every_client(drawn):
    assert drawn.dtype == np.int32
    for client in range(3):
        assert scipy.stats.chisquare(np.bincount(drawn[:, client], minlength=4)).pvalue > 1e-4


def test_slots_of_two_clients_are_independent(drawn):
    for a, b in ((0, 1), (0, 2), (1, 2)):
        table = np.bincount(4 * drawn[:, a] + drawn[:, b], minlength=16).reshape(4, 4)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4
    # The size of a round is binomial, not balanced: with three balls in four bins, each number as often as it should.
    sizes = np.bincount((drawn == 0).sum(1), minlength=4)
    assert scipy.stats.chisquare(sizes, 4000 * scipy.stats.binom.pmf(np.arange(4), 3, 0.25)).pvalue > 1e-4


def test_a_client_comes_in_the_rounds_of_its_slot(there):
    member, _, _, own = there
    for round in range(ROUNDS):
        np.testing.assert_array_equal(member[:, round], own == round % CYCLE)


def test_what_an_accountant_reads():
    sampler = sampling.make("balls_in_bins", 33, cycle=5)
    assert (sampler.capacity, sampler.q, sampler.truncated, sampler.drawn) == (33, None, False, None)
    assert (sampler.min_cohort, sampler.min_separation, sampler.bins) == (0, 5, 5)
    assert [sampler.max_participations(rounds) for rounds in (0, 1, 5, 6, 20, 21)] == [0, 1, 1, 2, 4, 5]


def test_one_slot_is_everyone_in_every_round():
    sampler = sampling.make("balls_in_bins", 4, cycle=1)
    assert (sampler.min_cohort, sampler.capacity, sampler.max_participations(9)) == (4, 4, 9)


@pytest.mark.parametrize("cycle", [0, -1, 1.5, True, "five", 2**31])
def test_a_bad_cycle_is_one_clear_line(cycle):
    with pytest.raises(UserError, match=r"^sampler balls_in_bins: cycle: .* given, an integer in \[1, .* expected$"):
        sampling.make("balls_in_bins", 9, cycle=cycle)
