"""Correlated noise: strategies against enumeration and the notes' values, the noise of a run against (C^T C)^-1."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats

from fedjax_seg import aggregation
from fedjax_seg.core import noise
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import AuditedLowerBound, ClientUpdate, Cohort, ProvenBound
from fedjax_seg.privacy import gaussian, matrix_noise
from fedjax_seg.privacy.matrix_noise import Strategy, privatize_banded, strategy

BOUND = ProvenBound(0.5, "zero-out", "client", "by assumption")
HAND = (0.8, 0.48, 0.36)  # of norm 1
COHORT = Cohort(np.arange(1), np.zeros(1, bool))
KEY = jax.random.key(3)


@functools.cache
def optimal(bands):
    return strategy(20, 5, 4, bands)


def lower(made):
    """C as a matrix, float64."""
    column = np.zeros(made.rounds)
    column[: len(made.coefficients)] = made.coefficients
    return scipy.linalg.toeplitz(column, np.zeros(made.rounds))


def rmse(made):
    """Root mean squared error of the prefix sums times the sensitivity."""
    error = np.linalg.norm(np.tril(np.ones((made.rounds, made.rounds))) @ np.linalg.inv(lower(made)), axis=1)
    return math.sqrt(np.mean(error**2) * made.sensitivity_squared)


def test_the_best_of_two_bands_by_search_over_the_angle():
    """The notes' 5.01 for two bands, without the optimiser."""
    two = lambda t: rmse(Strategy((math.cos(t), math.sin(t)), 4.0, 20, 5, 4))
    assert scipy.optimize.minimize_scalar(two, bounds=(0, 0.78), method="bounded").fun == pytest.approx(5.01, rel=0.002)


@pytest.mark.parametrize(
    "bands, expected", [(1, 6.48), pytest.param(2, 5.01, marks=pytest.mark.slow), (5, 4.00), (0, 4.00)]
)
def test_the_error_of_the_iterates_is_that_of_the_notes(bands, expected):
    """T = 20, separation 5, 4 participations; 5 bands are 1.62 times better than independent noise."""
    made = optimal(bands or 5)
    assert rmse(made) == pytest.approx(expected, rel=0.01)
    assert made.sensitivity_squared == pytest.approx(4.0, rel=1e-6)  # columns of norm 1 that do not overlap
    assert np.linalg.norm(made.coefficients) == pytest.approx(1, abs=1e-7)
    assert len(made.coefficients) == (bands or 5) and made[2:] == (20, 5, 4)


def schedules(rounds, separation, participations):
    for count in range(1, participations + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


@pytest.mark.parametrize("rounds, separation, participations", [(8, 3, 2), (8, 3, 9), (7, 4, 2), (5, 9, 1), (6, 2, 3)])
def test_the_sensitivity_is_that_of_the_worst_schedule(rounds, separation, participations):
    """All schedules tried, and random unit vectors in the place of equal ones: none is worse."""
    column = np.array(HAND, np.float32)[: min(3, separation)]
    most = min(participations, -(-rounds // separation))
    found = matrix_noise._sensitivity_squared(column, rounds, separation, most)
    c = lower(Strategy(tuple(column.tolist()), found, rounds, separation, most))
    possible = list(schedules(rounds, separation, participations))
    assert found == pytest.approx(max(np.sum(c[:, list(s)].sum(1) ** 2) for s in possible), rel=1e-6)
    rng = np.random.default_rng(0)
    for chosen in possible:
        u = rng.normal(size=(len(chosen), 3))
        moved = c[:, list(chosen)] @ (u / np.linalg.norm(u, axis=1, keepdims=True))
        assert np.sum(moved**2) <= found * (1 + 1e-6)


def test_a_strategy_knows_its_schedule():
    one = strategy(20, 5, None, 1)
    assert one == Strategy((1.0,), 4.0, 20, 5, 4)
    assert strategy(20, 5, 2, 1).sensitivity_squared == 2.0 and strategy(7, 1, 99, 0).participations == 7
    assert strategy(3, 50, None, 1) == Strategy((1.0,), 1.0, 3, 50, 1)


def identity(size, bound=BOUND):
    """A sum whose decode is the sum itself."""
    whole = aggregation.lift_sum(lambda t: (t, {}), lambda t: (t, {}), bare=True, divisor=1.0, bound=bound)
    return whole, {"params": {"w": jnp.zeros((size - 1,)), "s": jnp.zeros(())}}


def released(strategy_, z, size, skipped=(), run=0):
    """[T, size], the releases of a run of totals 0; where skipped, the release and the state are thrown away."""
    plain, variables = identity(size)
    private = privatize_banded(plain, noise_multiplier=z, strategy=strategy_)
    gone = jnp.zeros(strategy_.rounds, bool).at[jnp.array(skipped, int)].set(True)

    def one(state, x):
        round, lost = x
        key = jax.random.fold_in(jax.random.key(run), round)
        total = {"value": variables["params"]}
        delta, after, _ = private.decode(total, COHORT, state, variables=variables, round=round, key=key)
        after = jax.tree.map(lambda old, new: jnp.where(lost, old, new), state, after)
        return after, jnp.concatenate([delta["params"]["s"][None], delta["params"]["w"]])

    program = jax.jit(
        lambda: jax.lax.scan(one, private.init(variables), (jnp.arange(strategy_.rounds), gone))[1],
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return np.asarray(program(), np.float64)


HAND_MADE = Strategy(HAND, 4.0, 12, 3, 4)


@pytest.fixture(scope="module")
def run():
    return released(HAND_MADE, 1.5, 3001)


def test_noise_is_c_inverse_times_independent_normal_rows(run):
    """C X gives back the draws of the rounds' own keys, to rounding."""
    own = lambda t: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), gaussian.NOISE)
    drawn = np.asarray(jax.jit(jax.vmap(lambda t: noise.normal(own(t), 3001)))(jnp.arange(12)))
    np.testing.assert_allclose(lower(HAND_MADE) @ run, 1.5 * 0.5 * 2.0 * drawn, atol=2e-5)


def test_noise_has_the_covariance_of_the_mechanism(run):
    """(C^T C)^-1 sigma^2, sigma = z * bound * sqrt(s2); in the first round sigma^2 / c_0^2."""
    sigma = 1.5 * 0.5 * 2.0
    c = lower(HAND_MADE)
    expected = sigma**2 * np.linalg.inv(c.T @ c)
    assert expected[0, 0] == pytest.approx(sigma**2 / HAND[0] ** 2)
    found = run @ run.T / 3001
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.max(np.abs(found - expected) / scale) < 5 / math.sqrt(3001) * math.sqrt(2)
    assert 1e-4 < scipy.stats.chi2.sf(np.sum((c @ run / sigma) ** 2), 12 * 3001) < 1 - 1e-4


def test_rounds_that_released_nothing_keep_their_place():
    """Rounds 2, 5, 6 are lost: the others have the covariance that they have in a whole run."""
    lost = (2, 5, 6)
    found = released(HAND_MADE, 1.0, 6001, skipped=lost)
    kept = [t for t in range(12) if t not in lost]
    c = lower(HAND_MADE)
    expected = np.linalg.inv(c.T @ c)[np.ix_(kept, kept)]
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.max(np.abs(found[kept] @ found[kept].T / 6001 - expected) / scale) < 5 / math.sqrt(6001) * math.sqrt(2)


def decoder(aggregator, variables):
    """(total, state, round) -> (delta, state), compiled once for all rounds; nobody is present unless told."""

    def decode(total, state, round, present):
        return aggregator.decode(
            {"value": total}, Cohort(jnp.arange(1), present), state, variables=variables, round=round, key=KEY
        )[:2]

    program = jax.jit(decode, compiler_options={"xla_backend_optimization_level": 0})
    return lambda total, state, round, present=False: program(total, state, round, jnp.array([present]))


def test_one_band_is_the_independent_noise_of_privatize():
    """The same draws; sqrt(k) times as much for k participations. And NaN once the run is over."""
    plain, variables = identity(6)
    ours = privatize_banded(plain, noise_multiplier=1.5, strategy=strategy(20, 5, 4, 1))
    theirs = gaussian.privatize(plain, noise_multiplier=1.5 * 2.0)
    total = jax.tree.map(lambda x: x + 3.0, variables["params"])
    mine, state = decoder(ours, variables), ours.init(variables)
    expected, _ = decoder(theirs, variables)(total, {}, 7)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, mine(total, state, 7)[0], expected)
    assert ours.mechanism.sensitivity == 2.0 * BOUND.value and state == {"inner": {}}
    for round, over in ((19, False), (20, True), (21, True)):
        assert all(np.isnan(x).all() == over for x in jax.tree.leaves(mine(total, state, round)[0]))


def test_the_noise_comes_before_decode_whoever_is_present_and_not_after_the_last_round():
    square = lambda t: (jax.tree.map(jnp.square, t), {})
    plain = aggregation.lift_sum(lambda t: (t, {}), square, bare=True, divisor=1.0, bound=BOUND)
    variables = {"params": {"w": jnp.zeros(5)}}
    private = privatize_banded(plain, noise_multiplier=1.0, strategy=HAND_MADE)
    run, start = decoder(private, variables), private.init(variables)
    nobody, somebody = (run(variables["params"], start, 0, present)[0] for present in (False, True))
    np.testing.assert_array_equal(nobody["params"]["w"], somebody["params"]["w"])
    drawn = noise.normal(jax.random.fold_in(KEY, gaussian.NOISE), 5) / HAND[0]
    np.testing.assert_allclose(nobody["params"]["w"], np.square(drawn), rtol=1e-5)  # sigma = 1 * 0.5 * 2
    for round, over in ((11, False), (12, True), (13, True)):
        assert np.isnan(run(variables["params"], start, round)[0]["params"]["w"]).all() == over
    # The state holds the last rows, and no more, and where it is.
    assert start["noise"].shape == (2, 5) and start["done"] == 0 and start["inner"] == {}
    assert jax.eval_shape(private.init, variables)["noise"].shape == (2, 5)
    _, after = run(variables["params"], start, 4)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, start) and after["done"] == 5


def test_the_mechanism_is_one_release_of_the_run():
    private = privatize_banded(identity(6)[0], noise_multiplier=1.5, strategy=HAND_MADE)
    made = private.mechanism
    assert made[:5] == ("client", 0.5 * 2.0, 1.5, "zero-out", True)
    assert (made.span, made.separation, made.participations, made.reasons) == (12, 3, 4, ())
    assert "by assumption" in made.proof and "one release" in made.proof
    assert private.bound == BOUND  # of a message, as before
    for z in (0.0, 0.1):
        weak = privatize_banded(identity(6)[0], noise_multiplier=z, strategy=HAND_MADE).mechanism
        assert not weak.formal and weak.reasons


def test_without_noise_nothing_changes():
    plain, variables = identity(6)
    private = privatize_banded(plain, noise_multiplier=0.0, strategy=HAND_MADE)
    total = {"value": jax.tree.map(lambda x: x + 2.0, variables["params"])}
    delta, state, _ = private.decode(total, COHORT, private.init(variables), variables=variables, round=99, key=KEY)
    assert state == {"inner": {}} and all(np.all(x == 2.0) for x in jax.tree.leaves(delta))


def test_the_inner_state_and_broadcast_are_passed_through():
    plain, variables = identity(6)

    def decode(total, cohort, state, **rest):
        return total["value"], {"n": state["n"] + 1}, {}

    counting = plain._replace(init=lambda v: {"n": jnp.int32(3)}, broadcast=lambda s: {"told": s["n"]}, decode=decode)
    private = privatize_banded(counting, noise_multiplier=1.0, strategy=strategy(9, 1, None, 1))
    state = private.init(variables)
    assert private.broadcast(state) == {"told": 3}
    assert decoder(private, variables)(variables["params"], state, 0)[1] == {"inner": {"n": 4}}


@pytest.mark.parametrize(
    "broken",
    [
        lambda a: a._replace(bound=None),
        lambda a: a._replace(bound=AuditedLowerBound(0.5, "two clusters")),
        lambda a: a._replace(reads="each"),
        lambda a: gaussian.privatize(a, noise_multiplier=1.0),
    ],
    ids=["unbounded", "audited", "each", "twice"],
)
def test_only_a_sum_with_a_proven_bound_and_no_noise_yet(broken):
    with pytest.raises(UserError, match=r"privatize_banded: .* found; a ProvenBound, reads 'sum' and no mechanism"):
        privatize_banded(broken(identity(6)[0]), noise_multiplier=1.0, strategy=HAND_MADE)


@pytest.mark.parametrize("options", [(0, 1), (5, 0), (5, 2, 0), (5, 2, 1, 3), (5, 2, 1, -1), (2.5, 1)])
def test_bad_schedules_are_refused(options):
    with pytest.raises(UserError, match=r"^matrix noise: .* given, an integer in"):
        strategy(*options)


def test_encode_is_as_it_was():
    plain, variables = identity(6)
    private = privatize_banded(plain, noise_multiplier=1.0, strategy=HAND_MADE)
    update = ClientUpdate(jax.tree.map(lambda x: x + 1, variables), jnp.float32(1), jnp.int32(1), {}, {})
    message = private.encode(update, {}, variables=variables, key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, message, {"value": update.delta["params"]})
