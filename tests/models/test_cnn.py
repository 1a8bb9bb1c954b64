"""The residual CNN against a forward pass written out in lax, and its parameter count by hand."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_unet import variables_of
from tiny_federation import close, quick_jit

from fedjax_seg import models
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.models import conv, layers

IMAGES = np.random.default_rng(0).normal(size=(3, 9, 6, 2)).astype(np.float32)  # sizes need not be even


def forward_in_lax(params, x):
    """stem, a block, a block of half the size, mean, dense; no norm."""
    convolve = lambda x, layer, stride=1: (
        layer["bias"]
        + lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=conv.DIMENSIONS)
    )
    relu = lambda x: jnp.maximum(x, 0)
    x = relu(convolve(x, params["stem"]))
    first, second = params["block_0"], params["block_1"]
    x = relu(x + convolve(relu(convolve(x, first["Conv_0"])), first["Conv_1"]))
    inner = convolve(relu(convolve(x, second["Conv_0"], 2)), second["Conv_1"])
    x = relu(convolve(x, second["shortcut"], 2) + inner)
    return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]


def test_logits_and_gradients_equal_the_network_written_out():
    module = models.make("cnn", width=4, blocks=2, classes=3, norm="none")
    params = variables_of(module, IMAGES)["params"]
    both = lambda logits_of: jax.value_and_grad(
        lambda p: (lambda y: (jnp.sum(jnp.sin(y)), y))(logits_of(p)), has_aux=True
    )
    apply = lambda p: module.apply({"params": p}, IMAGES, train=True)
    found, expected = quick_jit(lambda p: (both(apply)(p), both(lambda p: forward_in_lax(p, IMAGES))(p)))(params)
    assert found[0][1].shape == (3, 3)
    close(found, expected, rtol=1e-4, atol=1e-4)


def test_parameters_by_hand_and_layers_by_name():
    module = models.make("cnn")  # width 16, three blocks, GroupNorm
    paths = tree.paths(jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3))))
    block = lambda i, o: 9 * (i + o) * o + 6 * o + ((i + 1) * o if i != o else 0)  # kernels, biases, norms, shortcut
    by_hand = 9 * 3 * 16 + 3 * 16 + block(16, 16) + block(16, 32) + block(32, 64) + 64 * 2 + 2
    assert sum(leaf.size for leaf in paths.values()) == by_hand
    assert {p for p in paths if fnmatch.fnmatch(p, "params/head/*")} == {"params/head/kernel", "params/head/bias"}
    assert sum(fnmatch.fnmatch(p, "*Norm*") for p in paths) == 2 * 7 and module.classes == 2
    batch = tree.paths(jax.eval_shape(models.make("cnn", norm="batch").init, jax.random.key(0), IMAGES))
    assert sum(p.startswith("batch_stats/") for p in batch) == 2 * 7


@pytest.mark.parametrize("norm", layers.NORMS)
def test_only_batch_norm_mixes_examples_and_none_mixes_padding(norm):
    module = models.make("cnn", width=2, blocks=1, norm=norm)
    variables = variables_of(module, IMAGES)
    apply = quick_jit(lambda x, mask: module.apply(variables, x, train=True, mask=mask, mutable=["batch_stats"]))
    other = IMAGES.copy()
    other[1] *= -3
    for mask, mixes in ((np.ones(3, np.float32), norm == "batch"), (np.array([1, 0, 1], np.float32), False)):
        (logits, updated), (changed, also) = apply(IMAGES, mask), apply(other, mask)
        assert np.any(logits[0] != changed[0]) == mixes
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(also))) == mixes


@pytest.mark.parametrize(
    "options, text",
    [
        ({"width": -1}, "model.width: -1 given"),
        ({"blocks": 0}, r"model.blocks: 0 given, an integer in \[1, 8\] expected"),
        ({"classes": True}, "model.classes: True given"),
        ({"norm": "instance"}, "model.norm: 'instance' given"),
        ({"conv": ""}, "model.conv: '' given"),
        ({"depth": 2}, "model 'cnn': unknown option 'depth'"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        models.make("cnn", **options)


def test_what_is_no_image_is_one_line():
    with pytest.raises(UserError, match=r"model 'cnn': an input of shape \(2, 9\) given, images \[B, H, W, channels\]"):
        jax.eval_shape(models.make("cnn").init, jax.random.key(0), jnp.zeros((2, 9)))
