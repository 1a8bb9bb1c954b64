"""SimAgg and RegSimAgg against NumPy written from the texts, and against published weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation import make
from fedjax_seg.aggregation.similarity import similarity_weights
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort

# Six clients, the last three times as far away as the others. Published for them: the printed weights, and those of the
# released form with L2 distances. Two rows of six weights fix the five ratios of the distances (twice).
SHARES = np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])
PRINTED = np.array([0.187, 0.186, 0.187, 0.181, 0.185, 0.074])
RELEASED = np.array([0.291, 0.241, 0.145, 0.142, 0.119, 0.062])
DISTANCES = np.array([5.4956, 5.4709, 5.2816, 5.4525, 5.3105, 13.4759])


def printed_weights(x, w, eps=1e-8):
    """Algorithm 1, lines 10-17."""
    mean = sum(x) / len(x)
    d = np.array([np.sqrt(np.sum((mean - t) ** 2)) for t in x])
    total = d.sum()
    s = np.array([total / (eps + di) for di in d])
    combined = w + s
    return combined / (eps + combined.sum())


def released_weights(x, w, distance, eps=1e-5, multiply=False):
    """Steps 1 to 6 of the released code; np.average divides by the sum of its weights once more."""
    mean = np.average(x, axis=0)
    d = np.array([distance(mean, t) for t in x])
    s = d.sum() / (d + eps)
    u = s / (s.sum() + eps)
    combined = w * u if multiply else w + u
    return combined / (combined.sum() + eps)


def signed_sum(mean, t):
    return abs(mean.sum() - t.sum())


def l1(mean, t):
    return np.sum(np.abs(mean - t))


def with_distances(d):
    """Points of the plane whose mean is 0 and whose norms are d: sides of a polygon inscribed in a circle."""
    excess = lambda r: np.sum(np.arcsin(np.minimum(d / (2 * r), 1))) - np.pi
    radius = scipy.optimize.brentq(excess, d.max() / 2, 10 * d.sum())
    corners = np.concatenate([[0], np.cumsum(2 * np.arcsin(d / (2 * radius)))])
    at = radius * np.stack([np.cos(corners), np.sin(corners)], axis=1)
    return np.diff(at, axis=0)


def test_published_weights():
    x = with_distances(DISTANCES)
    np.testing.assert_allclose(x.sum(axis=0), 0, atol=1e-9)
    found = similarity_weights(jnp.asarray(x), jnp.asarray(SHARES), jnp.ones(6, bool))
    np.testing.assert_allclose(found, PRINTED, atol=5.1e-4)
    norm = lambda mean, t: np.linalg.norm(mean - t)
    np.testing.assert_allclose(released_weights(x, SHARES, norm), RELEASED, atol=5.1e-4)  # the same distances fit both


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.lists(st.booleans(), min_size=7, max_size=7).filter(any), st.booleans())
def test_the_printed_weights_are_algorithm_1_on_those_present(seed, present, counts):
    rng, present = np.random.default_rng(seed), np.array(present)
    x, w = rng.normal(size=(7, 4)), rng.integers(1, 200, size=7) * present
    w = w if counts else w / w.sum()
    with jax.enable_x64(True):
        found = np.asarray(similarity_weights(jnp.asarray(x), jnp.asarray(w), jnp.asarray(present)))
    # A single present client lies on its mean: D = 0.
    np.testing.assert_allclose(found[present], printed_weights(x[present], w[present]), rtol=1e-9)
    assert not found[~present].any()


def test_shares_have_next_to_no_say_in_the_printed_rule_and_counts_have_all():
    """sum s >= n^2, so shares that sum to 1 have at most 1/(1 + n^2) of the weight."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 20)))
    w, present = jnp.asarray(SHARES), jnp.ones(6, bool)
    without = similarity_weights(x, 0 * w, present)
    assert float(jnp.max(jnp.abs(similarity_weights(x, w, present) - without))) <= 1 / 37
    counts = similarity_weights(x, 1e5 * w, present)
    np.testing.assert_allclose(counts, SHARES, atol=1e-3)


def test_identical_clients_without_shares_give_zero_as_printed():
    """A flaw of the printed rule: D = 0, all weights 0, and 0 instead of the common value."""
    x, present = jnp.ones((4, 3)), jnp.ones(4, bool)
    assert not np.asarray(similarity_weights(x, jnp.zeros(4), present)).any()
    np.testing.assert_allclose(similarity_weights(x, jnp.full(4, 0.25), present), 0.25, rtol=1e-6)


def test_a_client_on_the_mean_takes_all_the_weight():
    x = jnp.asarray([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(similarity_weights(x, jnp.full(3, 1 / 3), jnp.ones(3, bool)), [0, 0, 1], atol=1e-7)


RULES = {
    "printed": lambda x, w: printed_weights(x, w) @ x,
    "released": lambda x, w: np.average(x, axis=0, weights=released_weights(x, w, signed_sum)),
    "multiplicative": lambda x, w: np.average(x, axis=0, weights=released_weights(x, w, signed_sum, multiply=True)),
}


@pytest.mark.parametrize("variant", RULES)
@pytest.mark.parametrize("per, shares", [("tensor", "normalised"), ("model", "counts")])
def test_sim_agg_is_numpy_per_tensor_and_on_the_model(aggregate, variant, per, shares):
    rng, n = np.random.default_rng(3), np.array([3.0, 40, 7, 2, 5])
    present = np.array([True, True, False, True, True])
    with jax.enable_x64(True):
        tensors = {"a": rng.normal(size=(5, 4)), "b": rng.normal(size=(5, 2, 3)) * 10, "c": rng.normal(size=5)}
        server = {"a": rng.normal(size=4), "b": rng.normal(size=(2, 3)), "c": np.float64(0.5)}
        w = n[present] if shares == "counts" else n[present] / n[present].sum()
        rows = {k: (x + server[k])[present].reshape(4, -1) for k, x in tensors.items()}
        rule = make("sim_agg", variant=variant, shares=shares, per=per)
        delta, metrics = aggregate(rule, tensors, server=server, weights=n, present=present)
        joined = [np.concatenate(list(rows.values()), axis=1)] if per == "model" else list(rows.values())
        expected = np.concatenate([RULES[variant](x, w) for x in joined])
        found = np.concatenate([np.ravel(delta[k] + server[k]) for k in rows])
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
        assert set(metrics) == {"largest_weight", "mean_distance"}


def test_the_released_distance_does_not_see_a_reversed_copy(aggregate):
    """|sum - sum| = 0 for it; the falling back to the shares makes it a data-weighted mean."""
    row = np.arange(6.0)
    x = np.stack([row, row[::-1]])
    delta, _ = aggregate(make("sim_agg", variant="multiplicative"), x, weights=[1.0, 3.0])
    np.testing.assert_allclose(delta, (row + 3 * row[::-1]) / 4, rtol=1e-6)


@functools.cache
def program(name, **options):
    aggregator = make(name, **options)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(rows, server, weights, round):
        total = {"value": {"w": rows}, "statistics": {}, "examples": weights}
        cohort, variables = Cohort(jnp.arange(len(rows)), jnp.ones(len(rows), bool)), {"params": {"w": server}}
        result = aggregator.decode(total, cohort, {}, variables=variables, round=round, key=jax.random.key(0))
        return result[0]["params"]["w"] + server

    return run


@pytest.mark.parametrize("round", [0, 10, 11])
def test_the_released_regularisation_is_a_no_op(round):
    """The released step, elementwise division by one tensor, done here in full: np.average cancels it."""
    rng, n = np.random.default_rng(4), np.array([5.0, 1, 2, 8])
    with jax.enable_x64(True):
        deltas, server, w = rng.normal(size=(4, 6)), rng.normal(size=6), n / n.sum()
        x = deltas + server
        weights = np.repeat(released_weights(x, w, signed_sum)[:, None], 6, axis=1)
        if round > 10:
            weights = weights / (np.average(server - x, axis=0, weights=w) + 1e-5)
        expected = np.average(x, axis=0, weights=weights)
        found = program("reg_sim_agg", variant="released")(deltas, server, n, round)
        np.testing.assert_allclose(found, expected, rtol=1e-7)
        plain = program("sim_agg", variant="released")(deltas, server, n, round)
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12)
        rounded = program("reg_sim_agg", variant="released", decimals=4)(deltas, server, n, round)
        np.testing.assert_allclose(rounded, np.round(expected, 4), atol=1e-12)


@pytest.mark.parametrize("round", [10, 11])
def test_published_reg_sim_agg(round):
    rng, n = np.random.default_rng(5), np.array([5.0, 1, 2, 8])
    with jax.enable_x64(True):
        deltas, server = rng.normal(size=(4, 6)) * [[1], [1], [1], [4]], rng.normal(size=6)
        x = deltas + server
        w = released_weights(x, n / n.sum(), l1)
        w = w / w.sum()
        if round > 10:
            w = w / (np.mean(np.abs(x - server), axis=1) + 1e-5)
            w = w / w.sum()
        found = program("reg_sim_agg")(deltas, server, n, round)
        np.testing.assert_allclose(found, w @ x, rtol=1e-9)


BAD = [
    ("sim_agg", {"variant": "paper"}),
    ("sim_agg", {"shares": "raw"}),
    ("sim_agg", {"per": "coordinate"}),
    ("sim_agg", {"of": "gradients"}),
    ("reg_sim_agg", {"variant": "printed"}),
    ("reg_sim_agg", {"start": -1}),
    ("reg_sim_agg", {"decimals": 1.5}),
]


@pytest.mark.parametrize(("name", "options"), BAD)
def test_bad_options_are_one_clear_line(name, options):
    with pytest.raises(UserError, match=r"given, .*expected") as error:
        make(name, **options)
    assert "\n" not in str(error.value)
