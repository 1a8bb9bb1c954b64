"""The MLP of FedHAvg against numpy, PyTorch's documented initialisation and the paper's parameter count."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from tiny_federation import quick_jit

from fedjax_seg import models
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.models.mlp import torch_uniform

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "silu": lambda x: x * special.expit(x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
}


def test_the_papers_model_has_7_112_770_parameters():
    shapes = jax.eval_shape(models.make("mlp").init, jax.random.key(0), jax.ShapeDtypeStruct((1, 6670), jnp.float32))
    assert list(shapes) == ["params"]
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 7_112_770
    widths = [6670, 1024, 256, 64, 2]  # the same by hand: dense layers with bias, and two vectors per LayerNorm
    assert sum((a + 1) * b for a, b in itertools.pairwise(widths)) + 2 * (1024 + 256 + 64) == 7_112_770


def test_forward_equals_numpy():
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)  # trailing axes are flattened
    kinds = [(name, True) for name in ACTIVATIONS] + [("relu", False)]
    modules = {kind: models.make("mlp", hidden=(6, 5), classes=3, activation=kind[0], norm=kind[1]) for kind in kinds}

    @quick_jit
    def forward(x):
        with_norm = modules["relu", True].init(jax.random.key(1), x)
        # LayerNorm's scale and bias away from 1 and 0
        variables = jax.tree.map(lambda leaf: leaf + 0.1, with_norm)
        bare = {"params": {name: leaf for name, leaf in variables["params"].items() if "Dense" in name}}
        return variables, [m.apply(variables if norm else bare, x) for (_, norm), m in modules.items()]

    variables, logits = forward(x)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    for (activation, norm), found in zip(modules, logits):
        h = x.reshape(4, 6).astype(np.float64)
        for i in range(2):
            h = h @ p[f"Dense_{i}"]["kernel"] + p[f"Dense_{i}"]["bias"]
            if norm:
                h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)  # PyTorch's LayerNorm
                h = h * p[f"LayerNorm_{i}"]["scale"] + p[f"LayerNorm_{i}"]["bias"]
            h = ACTIVATIONS[activation](h)
        expected = h @ p["Dense_2"]["kernel"] + p["Dense_2"]["bias"]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=f"{activation}, norm {norm}")


def test_weights_start_as_pytorchs_linear_layers():
    """Weights and biases uniform in +-1/sqrt(fan_in): Kolmogorov-Smirnov against scipy's uniform distribution."""
    params = quick_jit(models.make("mlp", hidden=(200,)).init)(jax.random.key(3), jnp.zeros((1, 100)))["params"]
    for layer, fan_in in (("Dense_0", 100), ("Dense_1", 200)):
        bound = fan_in**-0.5
        for leaf in ("kernel", "bias"):
            values = np.ravel(params[layer][leaf])
            assert np.max(np.abs(values)) <= bound
            if values.size > 100:
                assert stats.kstest(values, stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3
    assert np.all(params["LayerNorm_0"]["scale"] == 1) and not np.any(params["LayerNorm_0"]["bias"])
    assert torch_uniform(jax.random.key(0), (4, 2)).shape == (4, 2)


def test_the_kernel_that_meets_the_input_is_named():
    module = models.make("mlp", hidden=(4,))
    assert module.linear_input == "params/Dense_0/kernel"
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 7)))
    assert tree.paths(shapes)[module.linear_input].shape == (7, 4)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"hidden": (8, 0)}, "model.hidden: 0 given, an integer"),
        ({"hidden": (8, 2.5)}, "model.hidden: 2.5 given"),
        ({"classes": 1}, r"model.classes: 1 given, an integer in \[2, inf\] expected"),
        ({"activation": "sine"}, "model.activation: 'sine' given, one of 'relu'"),
        ({"width": 3}, "model 'mlp': unknown option 'width'"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        models.make("mlp", **options)


def test_an_unknown_model_is_refused():
    with pytest.raises(UserError, match=r"model\.name: unknown name 'mpl'; did you mean 'mlp'"):
        models.make("mpl")
