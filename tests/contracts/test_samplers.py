"""What every registered sampler promises, table-driven over SAMPLERS: purity, ids, and the accountant's bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.types import Cohort
from fedjax_seg.federation import sampling

ROUNDS = 200
SEEDS = (0, 1, 2)

# (clients, options, does the key matter?)
CASES = {
    "full": [(9, {}, False), (1, {}, False)],
    "uniform": [(9, {"size": 4}, True), (9, {"size": 9}, False)],
    "poisson": [
        (9, {"q": 0.4}, True),
        (9, {"q": 0.4, "capacity": 3}, True),
        (9, {"q": 0.0}, False),
        (9, {"q": 1.0}, False),
    ],
    "static": [(9, {"size": 4}, True), (9, {"members": (7, 2, 4)}, False)],
    "randomized_order": [(9, {"size": 4}, True), (9, {"rho": 0.4}, True)],
    "sliding_window": [
        (9, {"size": 4}, True),
        (9, {"rho": 0.4}, True),
        (9, {"size": 9}, True),
        (9, {"size": 4, "released": True}, True),
        (9, {"size": 5, "released": True}, True),
        (9, {"size": 3, "released": True}, True),
    ],
    "adaptive": [(9, {"size": 4}, True), (9, {"rho": 0.4, "temperature": 0.5, "explore": 0.3}, True)],
    "balls_in_bins": [(9, {"cycle": 4}, True), (9, {"cycle": 30}, True), (9, {"cycle": 1}, False)],
}
TABLE = [
    pytest.param(
        name, clients, options, keyed, id=f"{name}-{clients}-" + "-".join(f"{k}={v}" for k, v in options.items())
    )
    for name, cases in CASES.items()
    for clients, options, keyed in cases
]
every_sampler = pytest.mark.parametrize("name, clients, options, keyed", TABLE)


def history(sampler):
    """ids, present [seeds, ROUNDS, C] as the round function draws them: jitted, vmapped over keys and rounds."""
    keys = jnp.stack([jax.random.key(s) for s in SEEDS])
    over_rounds = jax.vmap(sampler.sample, (None, 0))
    # Not optimised by the compiler: it runs for milliseconds and would compile for seconds.
    jitted = jax.jit(jax.vmap(over_rounds, (0, None)), compiler_options={"xla_backend_optimization_level": 0})
    cohorts = jitted(keys, jnp.arange(ROUNDS))
    return np.asarray(cohorts.clients), np.asarray(cohorts.present)


@functools.cache
def drawn(name, clients, options):
    sampler = sampling.make(name, clients, **dict(options))
    return sampler, *history(sampler)


def case(name, clients, options):
    return drawn(name, clients, tuple(options.items()))


def membership(ids, present, clients):
    """bool [seeds, ROUNDS, K]."""
    return ((ids[..., None] == np.arange(clients)) & present[..., None]).any(-2)


def test_every_registered_sampler_has_a_case():
    assert set(CASES) == set(sampling.SAMPLERS)


@every_sampler
def test_cohorts_have_static_shape_and_distinct_known_clients(name, clients, options, keyed):
    sampler, ids, present = case(name, clients, options)
    assert ids.shape == present.shape == (len(SEEDS), ROUNDS, sampler.capacity)
    assert ids.dtype == np.int32 and present.dtype == bool
    assert ids.min() >= 0 and ids.max() < clients
    assert (membership(ids, present, clients).sum(-1) == present.sum(-1)).all()


@every_sampler
def test_sample_is_pure_and_the_same_eagerly_as_jitted_and_vmapped(name, clients, options, keyed):
    _, ids, present = case(name, clients, options)
    again = sampling.make(name, clients, **options)
    for run, round in [(1, 41), (0, 0), (1, 41), (1, 5)]:  # not in the order of a run, and one twice
        cohort = again.sample(jax.random.key(SEEDS[run]), round)
        assert np.array_equal(cohort.clients, ids[run, round])
        assert np.array_equal(cohort.present, present[run, round])


@pytest.mark.parametrize("name", sampling.SAMPLERS)
def test_the_optimised_round_draws_the_same(name):
    clients, options, _ = CASES[name][0]
    sampler, ids, present = case(name, clients, options)
    jitted = jax.jit(sampler.sample)
    for round in (7, 100, 7):
        cohort = jitted(jax.random.PRNGKey(SEEDS[1]), jnp.int32(round))  # raw key data is the same key
        assert np.array_equal(cohort.clients, ids[1, round])
        assert np.array_equal(cohort.present, present[1, round])


@every_sampler
def test_the_key_decides_where_there_is_chance(name, clients, options, keyed):
    _, ids, present = case(name, clients, options)
    differ = any(not np.array_equal(a, b) for x in (ids, present) for a, b in [(x[0], x[1]), (x[0], x[2])])
    assert differ == keyed


@every_sampler
def test_participations_stay_below_the_bound_after_every_round(name, clients, options, keyed):
    sampler, ids, present = case(name, clients, options)
    most = membership(ids, present, clients).cumsum(1).max((0, 2))
    bounds = np.array([sampler.max_participations(r) for r in range(1, ROUNDS + 1)])
    assert (most <= bounds).all()
    assert (bounds <= np.arange(1, ROUNDS + 1)).all() and (np.diff(bounds) >= 0).all()
    assert sampler.max_participations(0) == 0


@every_sampler
def test_participations_of_a_client_are_far_enough_apart(name, clients, options, keyed):
    sampler, ids, present = case(name, clients, options)
    gaps = [
        gap
        for run in membership(ids, present, clients)
        for client in range(clients)
        for gap in np.diff(np.flatnonzero(run[:, client]))
    ]
    assert sampler.min_separation >= 1
    assert all(gap >= sampler.min_separation for gap in gaps)


@every_sampler
def test_cohorts_are_large_enough(name, clients, options, keyed):
    sampler, _, present = case(name, clients, options)
    assert 0 <= sampler.min_cohort <= sampler.capacity <= clients
    assert present.sum(-1).min() >= sampler.min_cohort


@every_sampler
def test_q_belongs_to_poisson_alone(name, clients, options, keyed):
    sampler, *_ = case(name, clients, options)
    assert sampler.q == options.get("q")
    assert sampler.truncated == (0 < options.get("capacity", 0) < clients)


@every_sampler
def test_bins_belong_to_balls_in_bins_alone(name, clients, options, keyed):
    sampler, *_ = case(name, clients, options)
    assert sampler.bins == options.get("cycle", 0)
    assert sampler.drawn == ((sampler.capacity, clients) if name == "uniform" else None)


# A sampler with a memory must keep these promises after whatever it has seen.

REMEMBERING = [name for name in CASES if sampling.make(name, 9, **CASES[name][0][1]).memory is not None]


def test_only_the_adaptive_sampler_remembers():
    assert REMEMBERING == ["adaptive"]


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_memory_keeps_the_promises_of_its_sampler(name):
    clients, options, _ = CASES[name][0]
    sampler = sampling.make(name, clients, **options)
    memory = sampler.memory

    def go(key):
        def step(held, round):
            cohort = memory.sample(key, round, held)
            noise = jax.random.normal(jax.random.fold_in(key, round), (2, sampler.capacity))
            # norms of any size, 0 and NaN among them; some rounds in which nobody's update counts
            norms = jnp.where(noise[0] > 1, jnp.nan, jnp.where(noise[0] < -1, 0, 10 ** (10 * noise[0])))
            return memory.observe(held, cohort, norms, (noise[1] > 0) & (round % 7 > 0) & ~jnp.isnan(norms)), cohort

        return jax.lax.scan(step, memory.init(), jnp.arange(ROUNDS))

    run = jax.jit(jax.vmap(go), compiler_options={"xla_backend_optimization_level": 0})
    held, cohorts = run(jnp.stack([jax.random.key(s) for s in SEEDS]))
    assert all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(held))
    ids, present = map(np.asarray, cohorts)
    assert ids.shape == present.shape == (len(SEEDS), ROUNDS, sampler.capacity)
    assert ids.dtype == np.int32 and present.dtype == bool and ids.min() >= 0 and ids.max() < clients
    there = membership(ids, present, clients)
    assert (there.sum(-1) == present.sum(-1)).all() and present.sum(-1).min() >= sampler.min_cohort
    assert there.sum(1).max() <= sampler.max_participations(ROUNDS) and there.sum(1).min() > 0
    again, _ = run(jnp.stack([jax.random.key(s) for s in SEEDS]))
    jax.tree.map(np.testing.assert_array_equal, again, held)


@pytest.mark.parametrize("name", REMEMBERING)
def test_rows_that_are_absent_leave_no_trace_in_a_memory(name):
    clients, options, _ = CASES[name][0]
    memory = sampling.make(name, clients, **options).memory
    held = memory.observe(memory.init(), Cohort(jnp.arange(3), jnp.ones(3, bool)), jnp.ones(3), jnp.ones(3, bool))
    gone = Cohort(jnp.array([0, 5, 5]), jnp.zeros(3, bool))
    after = memory.observe(held, gone, jnp.full(3, 9.0), jnp.ones(3, bool))
    jax.tree.map(np.testing.assert_array_equal, after, held)
