"""Algorithms 1 to 3 in plain NumPy, line by line, against the aggregator; and the flaws, which are to stay."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_seg import aggregation
from fedjax_seg.aggregation import make
from fedjax_seg.core.types import Cohort

CLIP, EPSILON, DELTA = 2.0, 10.0, 1e-5
FACTOR = 4.844805262605389 / EPSILON  # sqrt(2 ln(1.25e5)) / epsilon


def l2_clip(v, c):
    """Algorithm 3."""
    v = np.asarray(v)
    if v.ndim == 0:
        return v
    flat = v.reshape(-1)
    norm = np.sqrt(np.sum(flat**2))
    if norm > c:
        return ((c / norm) * flat).reshape(v.shape)
    return v


def algorithm_1(tensors, weights, is_weight, c=CLIP, clipping=True, similarity=True):
    """Lines 3 to 28 without the noise: (pm, Df)."""
    t = [np.array(x, np.float64) for x in tensors]
    w = [float(x) for x in weights]
    if not is_weight:
        return sum(wi * ti for wi, ti in zip(w, t)) / sum(w), c
    if clipping:
        t = [l2_clip(x, c) for x in t]
    if similarity:
        mean = sum(t) / len(t)
        d = [np.linalg.norm((mean - x).reshape(-1)) for x in t]
        total = sum(d)
        s = [total / (1e-8 + di) for di in d]
        combined = [wi + si for wi, si in zip(w, s)]
        norm = [x / (1e-8 + sum(combined)) for x in combined]
    else:
        norm = [x / sum(w) for x in w]
    pm = sum(a * x for a, x in zip(norm, t))
    other = [np.ones_like(t[0]) * c, *t[1:]]
    return pm, np.linalg.norm((pm - sum(a * x for a, x in zip(norm, other))).reshape(-1))


SERVER = {
    "params": {"bias": np.array([0.5, -1.0]), "gain": np.float64(30.0), "kernel": np.ones((3, 4))},
    "batch_stats": {"mean": np.array([50.0, 0.0, 1.0])},
}
PRESENT = np.array([False, True, True, True, True])
EXAMPLES = np.array([9.0, 3.0, 40.0, 7.0, 2.0])


def a_round(seed=0, size=0.5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: size * rng.normal(size=(5, *np.shape(x))), SERVER)


@functools.cache
def program(**options):
    aggregator = make("dp_simagg", **{"clip": CLIP, "epsilon": EPSILON, **options})

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(deltas, key, server, examples):
        total = {
            "value": deltas["params"],
            "statistics": {k: v for k, v in deltas.items() if k != "params"},
            "examples": examples,
        }
        cohort = Cohort(jnp.arange(5), jnp.asarray(PRESENT))
        delta, _, metrics = aggregator.decode(total, cohort, {}, variables=server, round=jnp.int32(0), key=key)
        return delta, metrics

    def call(deltas, key=0):
        server, examples = jax.tree.map(jnp.asarray, SERVER), jnp.asarray(EXAMPLES)
        if np.ndim(key):
            keys = jax.vmap(jax.random.key)(key)
            return jax.vmap(run, in_axes=(None, 0, None, None))(deltas, keys, server, examples)
        return run(deltas, jax.random.key(key), server, examples)

    return call


def expected_of(deltas, of="weights", shares="normalised", **options):
    w = EXAMPLES[PRESENT] / (EXAMPLES[PRESENT].sum() if shares == "normalised" else 1)
    pm, change = {}, []
    for name in ("batch_stats", "params"):
        pm[name] = {}
        for leaf, server in SERVER[name].items():
            shift = server if of == "weights" else 0
            rows = (deltas[name][leaf] + shift)[PRESENT]
            value, df = algorithm_1(rows, w, name == "params", **options)
            pm[name][leaf] = value - shift
            change.append(df)
    return pm, np.array(change)


ABLATION = [
    {},
    {"shares": "counts"},
    {"of": "updates"},
    {"clipping": False},
    {"similarity": False},
    {"clipping": False, "similarity": False},
]


@pytest.mark.parametrize("options", ABLATION)
def test_the_aggregate_is_algorithm_1(options):
    with jax.enable_x64(True):
        for seed in range(3):
            deltas = a_round(seed)
            delta, metrics = program(noise=False, **options)(deltas)
            expected, change = expected_of(deltas, **options)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-9), delta, expected)
            assert metrics["sensitivity_mean"] == pytest.approx(change.mean(), rel=1e-6)
            assert metrics["sigma_mean"] == pytest.approx(FACTOR * change.mean(), rel=1e-6)
            assert metrics["sigma_max"] == pytest.approx(FACTOR * change.max(), rel=1e-6)


def test_scalars_and_other_collections_are_not_clipped():
    with jax.enable_x64(True):
        deltas = a_round()
        delta, metrics = program(noise=False)(deltas)
        assert delta["params"]["gain"] + 30 > 20 * CLIP / 2
        assert delta["batch_stats"]["mean"][0] + 50 > 20 * CLIP
        norm = np.linalg.norm(np.ravel(delta["params"]["kernel"] + SERVER["params"]["kernel"]))
        assert norm <= CLIP * (1 + 1e-6)  # full weights were 3.5 long: clipping them shrinks the model
        assert 0 < metrics["clipped_fraction"] < 1


def test_the_noise_is_gaussian_with_the_estimated_scale():
    """Chi-square of (noisy - noiseless) / sigma over many rounds, per tensor; other rounds, other noise."""
    with jax.enable_x64(True):
        deltas, rounds = a_round(), 200
        clean, _ = program(noise=False)(deltas)
        _, change = expected_of(deltas)
        sigma = dict(zip(("mean", "bias", "gain", "kernel"), FACTOR * change))
        noise = jax.tree.map(np.subtract, program()(deltas, np.arange(rounds))[0], clean)
        for leaf, name in {leaf: part for part in SERVER for leaf in SERVER[part]}.items():
            values = noise[name][leaf]
            statistic = np.sum((values / sigma[leaf]) ** 2)
            assert 1e-4 < scipy.stats.chi2.sf(statistic, values.size) < 1 - 1e-4, leaf
            assert abs(values.mean()) < 5 * sigma[leaf] / math.sqrt(values.size)
        kernels = noise["params"]["kernel"].ravel() / sigma["kernel"]
        assert scipy.stats.kstest(kernels, "norm").pvalue > 1e-4
        assert sigma["mean"] == pytest.approx(FACTOR * CLIP)


def test_the_estimate_by_hand():
    """Df = W_norm[0] ||T[0] - C 1||. The first of four present clients is off by l, the others are identical: distances
    3l/4 and l/4, s = 2 and 6 (three times), so the outlier, whom the estimate replaces, has a weight of (W + 2)/21."""
    deltas = jax.tree.map(np.zeros_like, a_round())
    deltas["params"]["kernel"][1:] = 0.1
    deltas["params"]["kernel"][1] = 0.5
    share = EXAMPLES[1] / EXAMPLES[PRESENT].sum()
    kernel = (share + 2) / 21 * math.sqrt(12) * (CLIP - 0.5)
    same = share * CLIP * (math.sqrt(2) + 1)  # bias and gain: identical clients, weights W
    with jax.enable_x64(True):
        _, metrics = program(noise=False, of="updates")(deltas)
    assert metrics["sensitivity_mean"] == pytest.approx((kernel + same + CLIP) / 4, rel=1e-6)


def test_the_same_input_can_have_no_noise_at_all():
    """A scalar tensor whose first client is C: T'[0] = T[0], Df = 0, although the true sensitivity is not."""
    with jax.enable_x64(True):
        deltas = jax.tree.map(np.zeros_like, a_round())
        deltas["params"]["gain"][1] = CLIP
        quiet, loud = (program(of="updates", **how)(deltas)[0]["params"]["gain"] for how in ({"noise": False}, {}))
    assert quiet == loud and quiet > 0


def test_nothing_is_promised():
    aggregator = make("dp_simagg")
    assert aggregator.bound is None and aggregator.reads == "each"
    mechanism = aggregator.mechanism
    assert (mechanism.unit, mechanism.formal) == ("client", False) and math.isnan(mechanism.sensitivity)
    assert mechanism.noise_multiplier == pytest.approx(4.8448, abs=1e-4)
    assert make("dp_simagg", noise=False).mechanism is None
    reasons = aggregation.make("dp_simagg").mechanism.reasons
    assert len(reasons) == 8 and all("\n" not in r and len(r) < 160 for r in reasons)


def test_the_literal_noise_at_the_papers_clip():
    """C = 100, epsilon 10, small weights: the noise is hundreds of times the weights it is added to."""
    rng = np.random.default_rng(0)
    deltas = jax.tree.map(lambda x: 0.05 * rng.normal(size=(5, *np.shape(x))), SERVER)
    with jax.enable_x64(True):
        _, metrics = program(clip=100.0, noise=False, of="updates")(deltas)
    assert metrics["sigma_max"] == pytest.approx(48.4, abs=0.1) and metrics["clipped_fraction"] == 0
