"""Attention-MIL against equations 7 to 9 written out in numpy, and what must not matter: order and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_unet import variables_of
from tiny_federation import quick_jit

from fedjax_seg import models
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.models.attention_mil import bag_weights

BAGS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
INSTANCES = np.array([5, 1, 3, 4], np.int32)
WEIGHTS = jax.jit(bag_weights)


def by_the_equations(params, bag, gated):
    """Logits and attention of one bag [n, d] in float64, instance by instance."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    h = [np.maximum(row @ p["embedding"]["kernel"] + p["embedding"]["bias"], 0) for row in bag.astype(np.float64)]
    scores = []
    for row in h:
        inner = np.tanh(row @ p["attention"]["kernel"])
        if gated:
            inner = inner / (1 + np.exp(-row @ p["gate"]["kernel"]))
        scores.append(float((inner @ p["score"]["kernel"])[0]))
    a = np.exp(scores) / np.sum(np.exp(scores))
    z = sum(weight * row for weight, row in zip(a, h))
    return z @ p["head"]["kernel"] + p["head"]["bias"], a


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def model(request):
    """(gated, variables, apply, apply without jit): logits and attention."""
    module = models.make("attention_mil", hidden=6, attention=4, gated=request.param, classes=3)
    variables = variables_of(module, BAGS)

    def apply(variables, x, instances):
        logits, state = module.apply(variables, x, train=True, instances=instances, mutable=["intermediates"])
        return logits, state["intermediates"]["weights"]

    return request.param, variables, quick_jit(apply), apply


def test_logits_and_attention_by_the_equations(model):
    gated, variables, apply, _ = model
    logits, attention = apply(variables, BAGS, INSTANCES)
    whole, _ = apply(variables, BAGS, np.full(4, 5, np.int32))
    for b, n in enumerate(INSTANCES):
        expected, weights = by_the_equations(variables["params"], BAGS[b, :n], gated)
        np.testing.assert_allclose(logits[b], expected, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(attention[b, :n], weights, rtol=2e-5)
        np.testing.assert_array_equal(attention[b, n:], 0)
        np.testing.assert_allclose(
            whole[b], by_the_equations(variables["params"], BAGS[b], gated)[0], rtol=2e-5, atol=2e-6
        )


def test_without_instances_all_rows_are_real():
    module = models.make("attention_mil", hidden=6, attention=4)
    variables = variables_of(module, BAGS)
    apply = quick_jit(lambda x: (module.apply(variables, x), module.apply(variables, x, instances=jnp.full(4, 5))))
    plain, told = apply(BAGS)
    assert plain.shape == (4, 2)
    np.testing.assert_allclose(plain, told, rtol=1e-6, atol=1e-6)


def test_padding_and_its_content_change_nothing(model):
    _, variables, apply, _ = model
    logits, _ = apply(variables, BAGS, INSTANCES)
    longer = np.concatenate([BAGS, np.zeros((4, 7, 3), np.float32)], axis=1)
    np.testing.assert_allclose(apply(variables, longer, INSTANCES)[0], logits, rtol=1e-6, atol=1e-6)
    other = longer.copy()
    for b, n in enumerate(INSTANCES):
        other[b, n:] = 1e3 * (b + 1)
    np.testing.assert_array_equal(apply(variables, other, INSTANCES)[0], apply(variables, longer, INSTANCES)[0])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_instances_does_not_matter(model, seed):
    _, variables, apply, _ = model
    random = np.random.default_rng(seed)
    shuffled = BAGS.copy()
    for b, n in enumerate(INSTANCES):
        shuffled[b, :n] = BAGS[b, random.permutation(n)]
    expected, found = apply(variables, BAGS, INSTANCES)[0], apply(variables, shuffled, INSTANCES)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_by_hand():
    """h = (relu(x), relu(-x)); equation 8 with V = (1, 0), w = ln(3) / tanh(1): scores w tanh(h_0)."""
    module = models.make("attention_mil", hidden=2, attention=1, gated=False, classes=2)
    params = {
        "embedding": {"kernel": jnp.array([[1.0, -1.0]]), "bias": jnp.zeros(2)},
        "attention": {"kernel": jnp.array([[1.0], [0.0]])},
        "score": {"kernel": jnp.array([[np.log(3) / np.tanh(1)]])},
        "head": {"kernel": jnp.array([[1.0, 0.0], [0.0, 10.0]]), "bias": jnp.array([0.0, 0.5])},
    }
    bag = np.array([[[1.0], [-2.0], [99.0]]], np.float32)  # scores ln 3 and 0: weights 3/4 and 1/4
    apply = quick_jit(lambda x, n: module.apply({"params": params}, x, instances=n))
    # z = 3/4 (1, 0) + 1/4 (0, 2) = (0.75, 0.5)
    np.testing.assert_allclose(apply(bag, np.array([2])), [[0.75, 5.5]], rtol=1e-6)


def test_zero_attention_is_the_plain_mean(model):
    _, variables, apply, _ = model
    zeroed = tree.map_paths(lambda path, leaf: leaf * 0 if path.endswith("score/kernel") else leaf, variables)
    logits, attention = apply(zeroed, BAGS, INSTANCES)
    p = variables["params"]
    for b, n in enumerate(INSTANCES):
        h = np.maximum(BAGS[b, :n] @ p["embedding"]["kernel"] + p["embedding"]["bias"], 0)
        expected = h.mean(0) @ p["head"]["kernel"] + p["head"]["bias"]
        np.testing.assert_allclose(logits[b], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(attention[b, :n], 1 / n, rtol=1e-6)


def test_a_row_of_padding_is_finite_and_has_no_say(model):
    _, variables, apply, plain = model
    bags, instances = BAGS.copy(), np.array([5, 0, 3, 4], np.int32)
    bags[1] = 0
    logits, attention = apply(variables, bags, instances)
    np.testing.assert_allclose(logits[1], variables["params"]["head"]["bias"], rtol=1e-6)
    np.testing.assert_array_equal(attention[1], 0)

    def loss(variables, x, rows):
        return jnp.sum(jnp.sin(plain(variables, x, instances)[0]) * rows[:, None])

    grad = quick_jit(jax.grad(loss, argnums=(0, 1)))
    of_params, of_x = grad(variables, bags, np.ones(4, np.float32))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((of_params, of_x)))
    np.testing.assert_array_equal(of_x[1], 0)
    assert np.all(np.any(np.asarray(of_x)[[0, 2, 3]] != 0, axis=(1, 2)))
    without, _ = grad(variables, bags, np.array([1, 0, 1, 1], np.float32))
    for path, leaf in tree.paths(of_params).items():
        if path != "params/head/bias":  # an empty bag is its class prior
            np.testing.assert_allclose(leaf, tree.paths(without)[path], rtol=1e-5, atol=1e-6, err_msg=path)


@settings(max_examples=25, deadline=None)
@given(
    scores=st.lists(st.integers(-40, 40), min_size=4, max_size=4),
    power=st.sampled_from([-3, 0, 3, 30]),
    n=st.integers(0, 4),
)
def test_weights_of_any_scores_are_a_finite_softmax(scores, power, n):
    scores = np.array([scores], np.float32) * 10.0**power
    weights = np.asarray(WEIGHTS(scores.astype(np.float32), np.array([n])))[0]
    real = scores[0, :n].astype(np.float32).astype(np.float64)
    expected = np.exp(real - real.max()) / np.exp(real - real.max()).sum() if n else []
    np.testing.assert_allclose(weights[:n], expected, rtol=1e-5, atol=1e-7)
    assert not weights[n:].any()


def test_parameters_by_hand_and_layers_by_name():
    module = models.make("attention_mil", classes=5)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, 3, 1024)))
    paths = tree.paths(shapes)
    assert sum(leaf.size for leaf in paths.values()) == 1024 * 128 + 128 + 2 * 128 * 64 + 64 + 128 * 5 + 5
    assert {p for p in paths if "head" in p} == {"params/head/kernel", "params/head/bias"}
    assert set(shapes) == {"params"} and module.classes == 5 and not hasattr(module, "linear_input")
    plain = tree.paths(
        jax.eval_shape(models.make("attention_mil", gated=False).init, jax.random.key(0), jnp.zeros((2, 3, 1024)))
    )
    assert {p for p in paths if p not in plain} == {"params/gate/kernel"}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"hidden": 0}, r"model.hidden: 0 given, an integer in \[1"),
        ({"attention": 1.5}, "model.attention: 1.5 given"),
        ({"classes": 1}, "model.classes: 1 given"),
        ({"gated": "yes"}, "model.gated: 'yes' given, one of True, False expected"),
        ({"dropout": 0.1}, "model 'attention_mil': unknown option 'dropout'"),
    ],
    ids=["hidden", "attention", "classes", "gated", "unknown"],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        models.make("attention_mil", **options)


def test_what_is_no_bag_is_one_line():
    with pytest.raises(UserError, match=r"an input of shape \(2, 9\) given, bags \[B, instances, features\] expected"):
        jax.eval_shape(models.make("attention_mil").init, jax.random.key(0), jnp.zeros((2, 9)))
