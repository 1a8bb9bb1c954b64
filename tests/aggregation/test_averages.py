"""Means against hand computations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.aggregation import make
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, ProvenBound

TWO = {"a": jnp.asarray([[3.0], [0.0]]), "b": jnp.asarray([[4.0], [0.5]])}  # whole-model norms 5 and .5


def test_uniform_and_weighted_mean(aggregate):
    x = jnp.asarray([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]])
    np.testing.assert_allclose(aggregate(make("mean"), x, weights=[1, 1, 2])[0], [3, 30], rtol=1e-6)
    np.testing.assert_allclose(aggregate(make("weighted_mean"), x, weights=[1, 1, 2])[0], [3.75, 37.5], rtol=1e-6)
    absent = [True, False, True]
    np.testing.assert_allclose(aggregate(make("mean"), x, present=absent)[0], [3.5, 35], rtol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "weighted_mean"])
def test_whole_weights_may_be_sent_in_the_place_of_updates(aggregate, rule):
    rng = np.random.default_rng(0)
    x, server = rng.normal(size=(4, 50)).astype(np.float32), rng.normal(size=50).astype(np.float32)
    weights, present = np.array([3.0, 1.0, 7.0, 2.0]), np.array([True, True, False, True])
    given = {"weights": weights, "server": server, "present": present}
    updates, whole = (aggregate(make(rule, of=of), x, **given)[0] for of in ("updates", "weights"))
    by = (weights if rule == "weighted_mean" else np.ones(4))[present]
    np.testing.assert_allclose(updates, np.average(x[present], axis=0, weights=by), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole, updates, rtol=0, atol=1e-6)

    update, variables = ClientUpdate({"params": x[0]}, jnp.float32(3), jnp.int32(1), {}, {}), {"params": server}
    message = make(rule, of="weights").encode(update, {}, variables=variables, key=None)
    times = 3 if rule == "weighted_mean" else 1
    np.testing.assert_allclose(message["value"], times * (server + x[0]), rtol=1e-6)
    with pytest.raises(UserError, match="of: 'model' given, one of 'updates', 'weights' expected"):
        make(rule, of="model")


def test_clipping_is_of_the_whole_model(aggregate):
    delta, metrics = aggregate(make("clipped_mean", clip=1.0), TWO)
    np.testing.assert_allclose([delta["a"][0], delta["b"][0]], [0.3, 0.65], rtol=1e-6)  # (.6, .8) and (0, .5)
    assert metrics["clipped_fraction"] == 0.5
    delta, metrics = aggregate(make("clipped_mean", clip=1.0, weighted=True), TWO, weights=[1, 3])
    np.testing.assert_allclose([delta["a"][0], delta["b"][0]], [0.15, 0.575], rtol=1e-6)
    assert metrics["clipped_fraction"] == 0.5
    delta, metrics = aggregate(make("clipped_mean", clip=5.0), TWO)
    np.testing.assert_array_equal([delta["a"][0], delta["b"][0]], [1.5, 2.25])
    assert metrics["clipped_fraction"] == 0


def test_the_bound_covers_all_that_leaves_a_client(aggregate):
    aggregator = make("clipped_mean", clip=0.75, statistics="refuse")
    assert isinstance(aggregator.bound, ProvenBound)
    assert (aggregator.bound.value, aggregator.bound.adjacency, aggregator.bound.unit) == (0.75, "zero-out", "client")
    for size in (0.0, 0.1, 1e6):
        delta = {"params": jax.tree.map(lambda x, size=size: size * x[0], TWO)}
        update = ClientUpdate(delta, jnp.float32(163), jnp.int32(9), {}, {})
        message = aggregator.encode(update, {}, variables=delta, key=jax.random.key(0))
        norm = math.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(message)))
        assert norm <= 0.75 * (1 + 1e-6)
    same = aggregate(make("clipped_mean", clip=0.75), TWO)[0]
    jax.tree.map(np.testing.assert_array_equal, aggregate(aggregator, TWO)[0], same)


def test_no_bound_is_claimed_where_something_unbounded_is_sent():
    for options in ({}, {"weighted": True}):
        assert make("clipped_mean", clip=1.0, **options).bound is None
    with pytest.raises(UserError, match="bare"):
        make("clipped_mean", clip=1.0, statistics="refuse", weighted=True)
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    update = ClientUpdate(variables, jnp.float32(1), jnp.int32(1), {}, {})
    with pytest.raises(UserError, match="collections batch_stats found, only 'params' expected"):
        make("clipped_mean", clip=1.0, statistics="refuse").encode(update, {}, variables=variables, key=None)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), "1", None, True])
def test_clip_must_be_a_positive_number(clip):
    with pytest.raises(UserError, match=r"clipped_mean: clip: .* expected"):
        make("clipped_mean", clip=clip)
