"""DP-FedHAvg: the extrinsic mean without noise, points of the ball whatever a client does, noise in the ball."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_seg.aggregation.hyperbolic import extrinsic_mean
from fedjax_seg.aggregation.private_ball import dp_fedhavg
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort

SHAPES = {"a": (3, 2), "b": (4,)}
N = 5


def deltas_of(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {k: (size * rng.normal(size=(N, *s))).astype(np.float32) for k, s in SHAPES.items()}


def flat(params, lead=0):
    return np.concatenate([np.reshape(params[k], (*np.shape(params[k])[:lead], -1)) for k in SHAPES], axis=-1)


quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def points_of(aggregator, deltas, weight=7.0):
    """What clients send: [M, 10]."""

    def one(delta):
        update = ClientUpdate({"params": delta}, jnp.float32(weight), jnp.int32(1), {}, {})
        return aggregator.encode(update, {}, variables={"params": delta}, key=jax.random.key(0))

    sent = quick_jit(jax.vmap(one))(deltas)
    assert set(sent) == {"value"}
    return flat(sent["value"], lead=1)


def test_without_noise_and_with_everybody_it_is_the_extrinsic_mean_of_updates(aggregate):
    c, gamma = 0.5, 10.0
    made = dp_fedhavg(c=c, gamma=gamma, noise_multiplier=0.0, expected_clients=N)
    known = extrinsic_mean(c=c, gamma=gamma, of="updates", per="model")
    for seed, size in ((0, 0.01), (1, 0.3), (2, 30.0)):
        delta, metrics = aggregate(made, deltas_of(seed, size))
        expected, _ = aggregate(known, deltas_of(seed, size))
        np.testing.assert_allclose(flat(delta), flat(expected), rtol=2e-5, atol=1e-7)
        assert metrics["clamped_fraction"] == 0


def test_the_divisor_is_public(aggregate):
    deltas, present = deltas_of(3, 0.2), np.array([True, False, True, True, False])
    made = dp_fedhavg(noise_multiplier=0.0, smallest_cohort=4)
    few, _ = aggregate(made, deltas, present=present)
    mean = points_of(made, deltas)[present].sum(axis=0) / 4
    s = math.sqrt(2) * np.linalg.norm(mean)
    np.testing.assert_allclose(flat(few), mean * np.arctanh(s) / s, rtol=1e-5)


@pytest.mark.parametrize(("c", "gamma"), [(2.0, 1.0), (0.1, 100.0), (2.0, 1e-3)])
def test_whatever_a_client_does_its_point_is_in_the_ball(c, gamma):
    made = dp_fedhavg(c=c, gamma=gamma, noise_multiplier=1.0, expected_clients=5)
    values = np.float32([0.0, 1e-20, 1.0, -1e30, 3e38, np.inf, -np.inf, np.nan])
    deltas = {
        "a": np.broadcast_to(values[:, None, None], (8, 3, 2)),
        "b": np.tile(np.arange(4, dtype=np.float32), (8, 1)),
    }
    points = points_of(made, deltas)
    v = np.float64(np.nan_to_num(flat(deltas, lead=1), nan=0, posinf=0, neginf=0))
    s = math.sqrt(c) * gamma * np.linalg.norm(v, axis=1, keepdims=True)
    np.testing.assert_allclose(points, v * gamma * np.tanh(s) / s, rtol=1e-5, atol=1e-6)
    assert np.max(np.linalg.norm(points, axis=1)) <= made.bound.value * (1 + 1e-6)
    assert not np.any(points_of(made, deltas, weight=0.0))


def test_an_ascent_reaches_the_bounds_and_not_more():
    """Published for c = 2: 0.70711 with a client or without it, 1.41421 with it or another one."""
    made = {a: dp_fedhavg(noise_multiplier=1.0, expected_clients=5, adjacency=a) for a in ("zero-out", "replace-one")}

    def point(v):
        update = ClientUpdate({"params": {"w": v}}, jnp.float32(1), jnp.int32(1), {}, {})
        return made["zero-out"].encode(update, {}, variables=None, key=jax.random.key(0))["value"]["w"]

    change = lambda u: jnp.sqrt(jnp.sum((point(u[0]) - point(u[1])) ** 2))

    def climb(step, u):
        slope = jax.grad(change)(u)
        return u + 0.5 * 0.97**step * slope / jnp.linalg.norm(slope, axis=1, keepdims=True)

    @quick_jit
    def run(u):
        u = jax.lax.fori_loop(0, 200, climb, u)
        return change(u), jnp.linalg.norm(point(u[0]))

    both, one = run(0.3 * jax.random.normal(jax.random.key(1), (2, 4)))
    for found, adjacency, published in ((both, "replace-one", 1.41421), (one, "zero-out", 0.70711)):
        assert float(found) == pytest.approx(published, abs=5e-5)
        assert float(found) <= made[adjacency].bound.value * (1 + 1e-6)


@pytest.mark.parametrize(("adjacency", "scale"), [("zero-out", 1), ("replace-one", 2)])
def test_the_noise_of_the_sum_has_the_calibrated_scale(adjacency, scale):
    """The map back undone: delta -> the point that it came from."""
    many, gamma = 1000.0, 3.0
    made = dp_fedhavg(noise_multiplier=1.5, gamma=gamma, expected_clients=many, adjacency=adjacency)
    total = {"value": {k: np.full(s, 30.0, np.float32) for k, s in SHAPES.items()}}
    variables = {"params": {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}}
    cohort = Cohort(jnp.arange(N), jnp.zeros(N, bool))

    @quick_jit
    @jax.vmap
    def run(key):
        return made.decode(total, cohort, {}, variables=variables, round=0, key=key)[0]["params"]

    v = flat(run(jax.vmap(jax.random.key)(np.arange(150))), lead=1).astype(np.float64) * gamma
    s = math.sqrt(2) * np.linalg.norm(v, axis=1, keepdims=True)
    noise = (v * np.tanh(s) / s * many - 30) / (1.5 * scale / math.sqrt(2))
    assert 1e-4 < scipy.stats.chi2.sf(np.sum(noise**2), noise.size) < 1 - 1e-4
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    assert made.mechanism[:5] == ("client", pytest.approx(scale / math.sqrt(2)), 1.5, adjacency, True)
    assert made.properties == {"permutation"} and made.mechanism.proof


def test_noise_that_leaves_the_ball_is_moved_back(aggregate):
    for margin, ceiling in ((1e-5, 4.31549), (0.5, 0.38842)):  # artanh(1 - margin)/sqrt 2
        made = dp_fedhavg(noise_multiplier=50.0, expected_clients=2, margin=margin)
        delta, metrics = aggregate(made, deltas_of(0), present=[False] * N)  # a round without clients releases noise
        assert metrics["clamped_fraction"] == 1
        assert np.linalg.norm(flat(delta)) == pytest.approx(ceiling, rel=1e-5)


def test_batch_statistics_are_refused_with_advice():
    delta = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    update = ClientUpdate(delta, jnp.float32(1), jnp.int32(1), {}, {})
    with pytest.raises(UserError, match=r"dp_fedhavg: collections batch_stats found, only 'params' .*tracked=False"):
        dp_fedhavg(epsilon=1.0, smallest_cohort=4).encode(update, {}, variables=delta, key=jax.random.key(0))


REFUSED = [
    ({"c": 0.0}, "c: 0.0 given"),
    ({"gamma": -1.0}, "gamma: -1.0 given"),
    ({"margin": 0.0}, "margin: 0.0 given"),
    ({"adjacency": "one"}, "adjacency: 'one' given, one of"),
    (
        {"smallest_cohort": None},
        "expected_clients: None given and the smallest cohort is None, a number above 0 expected",
    ),
    ({"epsilon": 1.0}, "both of noise_multiplier and epsilon"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        dp_fedhavg(**{"noise_multiplier": 1.0, "smallest_cohort": 4, **options})
    assert "\n" not in str(error.value) and str(error.value).startswith("aggregator dp_fedhavg: ")
