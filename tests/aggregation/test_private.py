"""Private aggregators: what leaves a client, the sound SimAgg in NumPy, the noise, and what is refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation import make
from fedjax_seg.aggregation.private import clip_to, sound_weights
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort

CLIP, N = 2.0, 5
SHAPES = {"a": (3, 2), "b": (4,)}
NAMES = {
    "private_sim_agg": {"clip": CLIP, "smallest_cohort": 4},
    "dp_fedavg": {"clip": CLIP, "smallest_cohort": 4},
    "local_dp": {"clip": CLIP},
}


def deltas_of(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {k: (size * rng.normal(size=(N, *s))).astype(np.float32) for k, s in SHAPES.items()}


def flat(delta):
    return np.concatenate([np.ravel(delta[k]) for k in SHAPES])


def rows_of(deltas):
    return np.concatenate([np.reshape(deltas[k], (N, -1)) for k in SHAPES], axis=1).astype(np.float64)


def clipped(rows, clip=CLIP):
    return rows * np.minimum(1, clip / np.linalg.norm(rows, axis=1))[:, None]


@functools.cache
def program(name, **options):
    """A round: (deltas, present, key) -> delta, with a key of its own for every client, as the engine gives them; for
    keys [M] so many of them side by side."""
    aggregator = make(name, **NAMES.get(name, {}), **options)
    variables = {"params": {k: jnp.zeros(s) for k, s in SHAPES.items()}}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(deltas, present, key):
        def encode(delta, client):
            update = ClientUpdate({"params": delta}, jnp.float32(7), jnp.int32(1), {}, {})
            return aggregator.encode(update, {}, variables=variables, key=jax.random.fold_in(key, client))

        total = jax.vmap(encode)(deltas, jnp.arange(N))
        total = jax.tree.map(lambda x: jnp.where(present.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0), total)
        if aggregator.reads == "sum":
            total = jax.tree.map(lambda x: jnp.sum(x, axis=0), total)
        cohort = Cohort(jnp.arange(N), present)
        delta, _, metrics = aggregator.decode(
            total, cohort, {}, variables=variables, round=jnp.int32(0), key=jax.random.fold_in(key, 99)
        )
        return delta["params"], metrics

    many = jax.vmap(run, in_axes=(None, None, 0))

    def call(deltas, present=(True,) * N, key=0):
        how = many if np.ndim(key) else run
        return how(deltas, jnp.asarray(present), jax.vmap(jax.random.key)(key) if np.ndim(key) else jax.random.key(key))

    return call


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_client_does_its_message_is_in_the_ball(name):
    aggregator = make(name, noise_multiplier=0.0, **NAMES[name])
    for value in (0.0, 1.0, -1e30, 3e38, np.inf, -np.inf, np.nan):
        delta = {"a": jnp.full((3, 2), value), "b": jnp.arange(4.0)}
        update = ClientUpdate({"params": delta}, jnp.float32(163), jnp.int32(9), {}, {})
        message = aggregator.encode(update, {}, variables=None, key=jax.random.key(0))
        norm = math.sqrt(sum(float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(message["value"])))
        assert norm <= CLIP * (1 + 1e-6)
        assert set(message) <= {"value", "statistics", "examples"} and not message.get("statistics")
        assert message.get("examples", 1) == 1  # the number of examples stays at home
        if np.isfinite(value) and value:
            assert norm == pytest.approx(CLIP, rel=1e-5)
        empty = aggregator.encode(update._replace(weight=jnp.float32(0)), {}, variables=None, key=jax.random.key(0))
        assert not any(np.any(x) for x in jax.tree.leaves(empty["value"]))


def test_clipping_holds_in_compiled_programs():
    """A compiler may turn x / 3e38 into x * (1 / 3e38), whose factor is no float32."""
    clip = jax.jit(lambda x: clip_to({"w": x}, CLIP)["w"])
    for largest in (0.0, 1e-38, 1.0, 1e30, 1e37, 3e38):
        x = jnp.array([largest, -largest, 0.5 * largest], jnp.float32)
        norm = float(jnp.linalg.norm(clip(x)))
        assert norm == pytest.approx(min(CLIP, 1.5 * largest), rel=1e-5, abs=1e-37)


@settings(deadline=None, max_examples=20)
@given(st.floats(-30, 30), st.integers(0, 99))
def test_clipping_is_that_of_the_joined_vector(power, seed):
    delta = {k: np.float32(10.0**power) * x[0] for k, x in deltas_of(seed).items()}
    norm = np.linalg.norm(flat(delta).astype(np.float64))
    expected = flat(delta).astype(np.float64) * min(1, CLIP / norm)
    np.testing.assert_allclose(flat(clip_to(delta, CLIP)), expected, rtol=2e-6, atol=1e-37)


def sound(rows, n):
    """SimAgg with W = 1/n on the rows and n - len(rows) zeros, no eps in the normaliser."""
    rows = np.concatenate([rows, np.zeros((max(0, n - len(rows)), rows.shape[1]))])
    n = len(rows)
    mean = rows.mean(axis=0)
    d = np.linalg.norm(rows - mean, axis=1)
    w = 1 / n + d.sum() / (1e-8 + d)
    return w @ rows / w.sum()


@pytest.mark.parametrize("present", [(True,) * 5, (True, False, True, True, True), (False, True, False, False, True)])
def test_private_sim_agg_is_simagg_of_clipped_updates_with_missing_clients_as_zeros(present):
    for seed, size in ((0, 0.1), (1, 1.0), (2, 30.0)):
        deltas = deltas_of(seed, size)
        delta, _ = program("private_sim_agg", noise_multiplier=0.0)(deltas, present)
        expected = sound(clipped(rows_of(deltas))[np.array(present)], 4)
        np.testing.assert_allclose(flat(delta), expected, rtol=1e-5, atol=2e-6)


def test_identical_updates_give_their_mean():
    """The printed rule gives 0 without shares; the sound one has no such hole, also in exact arithmetic."""
    with jax.enable_x64(True):
        weights = sound_weights(jnp.ones((4, 3)), jnp.ones(4, bool), 4)
        np.testing.assert_allclose(weights, 0.25, rtol=1e-12)
        np.testing.assert_allclose(sound_weights(jnp.zeros((4, 3)), jnp.ones(4, bool), 4), 0.25, rtol=1e-12)
    same = {k: np.broadcast_to(x[:1], x.shape) * 0.1 for k, x in deltas_of(0).items()}
    delta, _ = program("private_sim_agg", noise_multiplier=0.0)(same)
    np.testing.assert_allclose(flat(delta), rows_of(same)[0], rtol=1e-5)


def test_dp_fedavg_divides_by_a_constant():
    deltas, present = deltas_of(3, 2.0), np.array([True, False, False, True, True])
    for options, divisor in (({}, 4), ({"expected_clients": 6.5}, 6.5)):
        delta, _ = program("dp_fedavg", noise_multiplier=0.0, **options)(deltas, present)
        np.testing.assert_allclose(flat(delta), clipped(rows_of(deltas))[present].sum(axis=0) / divisor, rtol=1e-5)


def test_local_dp_without_noise_is_the_mean_of_those_present():
    deltas, present = deltas_of(3, 2.0), np.array([True, False, False, True, True])
    delta, _ = program("local_dp", noise_multiplier=0.0)(deltas, present)
    np.testing.assert_allclose(flat(delta), clipped(rows_of(deltas))[present].mean(axis=0), rtol=1e-5, atol=1e-7)


TIGHT = (1 / math.sqrt(2) + 2 / 4) * CLIP
NOISE = [  # name, options, standard deviation of a coordinate of the delta with noise multiplier 1.5
    ("private_sim_agg", {}, 1.5 * TIGHT),
    ("private_sim_agg", {"bound": "2C"}, 1.5 * 2 * CLIP),
    ("private_sim_agg", {"bound": "4C"}, 1.5 * 4 * CLIP),
    ("dp_fedavg", {}, 1.5 * CLIP / 4),
    ("dp_fedavg", {"expected_clients": 10.0}, 1.5 * CLIP / 10),
    ("local_dp", {}, 1.5 * 2 * CLIP / math.sqrt(N)),
]


@pytest.mark.parametrize("name, options, stddev", NOISE)
def test_the_noise_has_the_calibrated_scale(name, options, stddev):
    deltas = deltas_of(5)
    quiet = flat(program(name, noise_multiplier=0.0, **options)(deltas)[0])
    loud = program(name, noise_multiplier=1.5, **options)
    noisy = loud(deltas, key=np.arange(150))[0]
    noise = (np.concatenate([np.reshape(noisy[k], (150, -1)) for k in SHAPES], axis=1) - quiet) / stddev
    assert 1e-4 < scipy.stats.chi2.sf(np.sum(noise**2), noise.size) < 1 - 1e-4
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    assert np.max(np.abs(np.corrcoef(noise.T) - np.eye(10))) < 5 / math.sqrt(150)


@pytest.mark.parametrize("name", ["private_sim_agg", "dp_fedavg"])
def test_a_round_without_clients_is_noise_of_the_same_scale(name):
    """Otherwise an unchanged model would tell that nobody came."""
    absent, some = (False,) * N, (True,) * N
    deltas = deltas_of(6)
    run, quiet = (program(name, noise_multiplier=z) for z in (1.5, 0.0))
    np.testing.assert_allclose(
        flat(run(deltas, absent, 7)[0]), flat(run(deltas, some, 7)[0]) - flat(quiet(deltas, some)[0]), atol=1e-5
    )
    assert np.any(flat(run(deltas, absent, 7)[0]))


def test_noise_from_epsilon_is_the_analytic_one():
    for epsilon, factor in ((1.0, 3.7306), (10.0, 0.49989)):
        for name, options in NAMES.items():
            mechanism = make(name, epsilon=epsilon, **options).mechanism
            assert mechanism.noise_multiplier == pytest.approx(factor, abs=1e-4) and mechanism.formal


def test_mechanisms_and_bounds():
    cases = [
        ("private_sim_agg", {}, TIGHT, "replace-one"),
        ("private_sim_agg", {"bound": "2C", "adjacency": "add-remove"}, 2 * CLIP, "add-remove"),
        ("private_sim_agg", {"bound": "4C"}, 4 * CLIP, "replace-one"),
        ("dp_fedavg", {"expected_clients": 100.0}, CLIP, "zero-out"),
        ("local_dp", {}, 2 * CLIP, "replace-one"),
    ]
    for name, options, sensitivity, adjacency in cases:
        made = make(name, noise_multiplier=1.5, **NAMES[name], **options)
        expected = ("client", pytest.approx(sensitivity, rel=1e-6), 1.5, adjacency, True)
        assert made.mechanism[:5] == expected and made.mechanism.reasons == ()
        assert made.mechanism.local == (name == "local_dp")
        assert "orthogonal" not in made.properties  # else a change of basis would leave part of the noise out
        if made.bound is not None:
            assert made.bound.value == made.mechanism.sensitivity
        assert not make(name, noise_multiplier=0.0, **NAMES[name], **options).mechanism.formal
    assert make("private_sim_agg", clip=1.0, epsilon=1.0, bound="2C").bound.value == 2  # no cohort needed


def test_geyer_clips_to_the_median_norm_and_promises_nothing():
    deltas, present = deltas_of(8), np.array([True, True, False, True, True])
    rows = rows_of(deltas)[present]
    norms = np.linalg.norm(rows, axis=1)
    middle = np.median(norms)
    expected = np.mean(rows / np.maximum(1, norms / middle)[:, None], axis=0)
    delta, metrics = program("geyer", noise_multiplier=0.0)(deltas, present)
    np.testing.assert_allclose(flat(delta), expected, rtol=1e-5, atol=1e-7)
    assert metrics["median_norm"] == pytest.approx(middle, rel=1e-6)
    loud = program("geyer", noise_multiplier=1.5)
    noisy = loud(deltas, present, np.arange(150))[0]
    noise = np.concatenate([np.reshape(noisy[k], (150, -1)) for k in SHAPES], axis=1) - expected
    statistic = np.sum((noise / (1.5 * middle / 4)) ** 2)
    assert 1e-4 < scipy.stats.chi2.sf(statistic, noise.size) < 1 - 1e-4
    made = make("geyer", noise_multiplier=1.5)
    assert made.bound is None and not made.mechanism.formal and math.isnan(made.mechanism.sensitivity)


REFUSED = [
    ("private_sim_agg", {"clip": 1.0, "epsilon": 1.0}, "'tight' given; .*smallest cohort 0 found, at least 1 client"),
    (
        "private_sim_agg",
        {"clip": 1.0, "epsilon": 1.0, "smallest_cohort": 0},
        "at least 1 client in every round expected",
    ),
    ("private_sim_agg", {"clip": 1.0, "smallest_cohort": 3}, "neither of noise_multiplier and epsilon .* expected"),
    ("private_sim_agg", {"clip": 1.0, "epsilon": 1.0, "bound": "3C"}, "bound: '3C' given, one of"),
    ("private_sim_agg", {"clip": 1.0, "epsilon": 1.0, "adjacency": "zero"}, "adjacency: 'zero' given, one of"),
    ("dp_fedavg", {"clip": 1.0, "epsilon": 1.0}, "expected_clients: None given .* a number above 0 expected"),
    ("dp_fedavg", {"clip": 1.0, "epsilon": 1.0, "noise_multiplier": 1.0}, "both of noise_multiplier and epsilon"),
    ("local_dp", {"clip": 1.0, "epsilon": 1.0, "delta": 0.0}, "delta: 0.0 given"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_bad_options_are_one_clear_line(name, options, message):
    with pytest.raises(UserError, match=message) as error:
        make(name, **options)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"aggregator {name}: ")


@pytest.mark.parametrize("name", NAMES)
def test_batch_statistics_are_refused_with_advice(name):
    delta = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    update = ClientUpdate(delta, jnp.float32(1), jnp.int32(1), {}, {})
    with pytest.raises(UserError, match=r"batch_stats found, only 'params' expected, .*tracked=False"):
        make(name, epsilon=1.0, **NAMES[name]).encode(update, {}, variables=delta, key=jax.random.key(0))
