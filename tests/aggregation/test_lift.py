"""Rules of one's own, groups of tensors, and the Gram matrix by blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.aggregation import lift, lift_sum
from fedjax_seg.aggregation.lift import combine, gram
from fedjax_seg.core.checks import UserError

DELTAS = {"a": jnp.asarray([[3.0, 0.0], [0.0, 1.0]]), "b": jnp.asarray([[[1.0]], [[9.0]]])}


def largest(x, w, present):
    return x[jnp.argmax(jnp.where(present, jnp.sum(x**2, axis=1), -1))]


def test_a_rule_of_ones_own_sees_tensors_or_the_model(aggregate):
    delta, _ = aggregate(lift(largest), DELTAS)
    jax.tree.map(np.testing.assert_array_equal, delta, {"a": [3.0, 0.0], "b": [[9.0]]})
    delta, _ = aggregate(lift(largest, per="model"), DELTAS)  # 9 + 1 against 1 + 81
    jax.tree.map(np.testing.assert_array_equal, delta, {"a": [0.0, 1.0], "b": [[9.0]]})
    delta, _ = aggregate(lift(largest, per="model"), DELTAS, present=[True, False])
    jax.tree.map(np.testing.assert_array_equal, delta, {"a": [3.0, 0.0], "b": [[1.0]]})


def test_rules_on_weights_get_server_plus_delta_and_return_a_delta(aggregate_inside):
    seen = []

    def first(x, w, present):
        seen.append((x, w))
        return x[0] * 2

    server = {"a": jnp.asarray([10.0, 20.0]), "b": jnp.asarray([[30.0]])}
    aggregator = lift(first, of="weights", weighted=True)
    delta, _ = aggregate_inside(aggregator, DELTAS, server=server, weights=[4, 5], present=[True, False])
    np.testing.assert_array_equal(seen[0][0], [[13.0, 20.0], [0.0, 0.0]])
    np.testing.assert_array_equal(seen[0][1], [4.0, 0.0])
    jax.tree.map(np.testing.assert_array_equal, delta, {"a": [16.0, 20.0], "b": [[32.0]]})
    assert "weighted" in aggregator.properties


def test_unweighted_rules_get_ones_for_present_clients(aggregate):
    def weights(x, w, present):
        return w

    delta, _ = aggregate(lift(weights), jnp.ones((3, 3)), weights=[4, 5, 6], present=[True, False, True])
    np.testing.assert_array_equal(delta, [1.0, 0.0, 1.0])


def test_metrics_are_means_over_tensors(aggregate):
    aggregator = lift(largest, metrics=lambda x, w, present: {"entries": jnp.float32(x.shape[1])})
    assert aggregate(aggregator, DELTAS)[1] == {"entries": 1.5}


def test_coordinate_rules_see_small_tensors_joined_and_large_ones_alone(aggregate):
    widths = []

    def middle(x, w, present):
        widths.append(x.shape[1])
        return x[1]

    deltas = [jnp.arange(3.0 * n).reshape(3, n) for n in (5, 70_000, 7)]
    delta, _ = aggregate(lift(middle, per="coordinate"), deltas)
    assert sorted(widths) == [12, 70_000]
    for got, given in zip(delta, deltas):
        np.testing.assert_array_equal(got, given[1])


def test_a_sum_of_ones_own(aggregate):
    """The root mean square as a quasi-arithmetic mean: sqrt((9 + 0) / 2), ..."""
    square = lambda t: (jax.tree.map(jnp.square, t), {"seen": jnp.float32(3)})
    root = lambda t: (jax.tree.map(jnp.sqrt, t), {})
    delta, metrics = aggregate(lift_sum(square, root), {"a": DELTAS["a"]})
    np.testing.assert_allclose(delta["a"], [np.sqrt(4.5), np.sqrt(0.5)], rtol=1e-6)
    assert metrics == {"seen": 3}


@pytest.mark.parametrize("options", [{"per": "layer"}, {"of": "gradients"}])
def test_unknown_words_are_refused(options):
    with pytest.raises(UserError, match=r"aggregation: (per|of): '(layer|gradients)' given, one of "):
        lift(largest, **options)


@pytest.mark.parametrize("size", [1, 1000, 65_537, 100_001])
def test_gram_by_blocks(size):
    x, middle = np.random.default_rng(size).normal(size=(4, size)), np.linspace(-1, 1, size)
    with jax.enable_x64(True):
        np.testing.assert_allclose(gram(jnp.asarray(x)), x @ x.T, rtol=1e-12, atol=1e-9)
        centred = gram(jnp.asarray(x), jnp.asarray(middle))
        np.testing.assert_allclose(centred, (x - middle) @ (x - middle).T, rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(combine(jnp.arange(4.0), jnp.asarray(x)), np.arange(4) @ x, rtol=1e-12, atol=1e-12)
    single = np.asarray(gram(jnp.asarray(x, jnp.float32)))
    np.testing.assert_array_equal(single, single.T)
