"""The residual 3D U-Net: FeTS's counts, an independent PyTorch network, its norm, up-sampling and dropout."""

import fnmatch
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import close, quick_jit

from fedjax_seg import models
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.models import layers3d

BATCH, SIZE, CHANNELS = 2, 8, 3
rng = np.random.default_rng(0)
VOLUMES = rng.normal(size=(BATCH, SIZE, SIZE, SIZE, CHANNELS)).astype(np.float32)
TINY = {"width": 2, "depth": 1, "classes": 3}


def torch_model():
    pytest.importorskip("torch", reason="the independent network is in PyTorch: pip install -e '.[bench]'")
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import torch_resunet
        import torch_rounds
    finally:
        sys.path.pop(0)
    return torch_resunet, torch_rounds


def variables_of(module, volumes=VOLUMES, seed=0):
    """Random values of about the size of 1 everywhere: biases, scales and running variances too."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), volumes)
    values = np.random.default_rng(seed)
    draw = lambda path, leaf: (
        values.uniform(0.5, 1.5, leaf.shape)
        if path.endswith(("var", "scale"))
        else 0.1 * values.normal(size=leaf.shape)
    ).astype(np.float32)
    return tree.map_paths(draw, shapes)


def shapes_of(channels=4, size=16, **options):
    volume = jnp.zeros((1, size, size, size, channels))
    return jax.eval_shape(models.make("resunet3d", **options).init, jax.random.key(0), volume)


def test_the_size_of_the_challenges_network():
    """FeTS 2022, derived from GaNDLF's layers: 33,377,028 parameters, 32 convolutions, 27 norms, 54 running buffers."""
    shapes = shapes_of()
    leaves = tree.paths(shapes)
    kernels = [p for p in leaves if p.endswith("/kernel")]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == 33_377_028
    assert len(kernels) == 32 and sum(p.endswith("/scale") for p in leaves) == 27
    assert len(jax.tree.leaves(shapes["params"])) == 118 and len(jax.tree.leaves(shapes["batch_stats"])) == 54
    assert max(leaf.size for leaf in leaves.values()) == 7_077_888
    norms = [p for p in leaves if fnmatch.fnmatch(p, "*Norm*")]  # what FedBN keeps
    assert set(leaves) - set(norms) == {p.replace("/kernel", end) for p in kernels for end in ("/kernel", "/bias")}
    assert leaves["params/head/kernel"].shape == (3, 3, 3, 64, 4) and models.make("resunet3d").classes == 4
    assert set(shapes_of(tracked=False, width=2)) == {"params"}


@pytest.mark.parametrize("train", [True, False])
def test_logits_equal_those_of_an_independent_network(train):
    reference, torch_rounds = torch_model()
    import torch

    module = models.make("resunet3d", **{**TINY, "depth": 2}, dropout=0.0)
    variables = variables_of(module)
    apply = quick_jit(lambda v, x: module.apply(v, x, train=train, mutable=["batch_stats"] if train else False))
    found = apply(variables, VOLUMES)
    other = reference.ResUnet3d(2, 2, CHANNELS, 3).train(train)
    torch_rounds.load(other, reference.state_of(tree.paths(variables)))
    with torch.no_grad():
        expected = other(torch.tensor(np.moveaxis(VOLUMES, -1, 1))).numpy()
    logits, updated = found if train else (found, {})
    np.testing.assert_allclose(np.moveaxis(logits, -1, 1), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    for name, value in reference.state_of(tree.paths(updated)).items():  # the running statistics
        np.testing.assert_allclose(value, other.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_running_statistics_by_hand_and_rows_of_padding():
    """Instance norm in numpy; the row with mask 0 enters no running statistic, a batch of padding changes none."""
    x = np.concatenate([VOLUMES, 100 * VOLUMES[:1]])
    layer = layers3d.InstanceNorm()
    variables = {
        "params": {"scale": np.array([1, 2, 3.0], "f4"), "bias": np.array([0.5, 0, -1], "f4")},
        "batch_stats": {"mean": np.array([1, 0, 2.0], "f4"), "var": np.array([2, 1, 3.0], "f4")},
    }
    step = quick_jit(lambda mask: layer.apply(variables, x, True, mask, mutable=["batch_stats"]))
    y, updated = step(jnp.array([1.0, 1, 0]))
    mean, var = x.mean((1, 2, 3), keepdims=True), x.var((1, 2, 3), keepdims=True)
    own = lambda mean, var: (x - mean) / np.sqrt(var + 1e-5) * [1, 2, 3] + [0.5, 0, -1]
    np.testing.assert_allclose(y, own(mean, var), rtol=1e-4, atol=1e-4)
    stats = updated["batch_stats"]
    np.testing.assert_allclose(stats["mean"], 0.9 * np.array([1, 0, 2]) + 0.1 * x[:2].mean((0, 1, 2, 3)), atol=1e-5)
    unbiased = x[:2].reshape(2, -1, 3).var(1, ddof=1).mean(0)
    np.testing.assert_allclose(stats["var"], 0.9 * np.array([2, 1, 3]) + 0.1 * unbiased, rtol=1e-5)
    close(step(jnp.zeros(3))[1]["batch_stats"], variables["batch_stats"])
    running = own(np.array([1, 0, 2]), np.array([2, 1, 3]))
    np.testing.assert_allclose(layer.apply(variables, x, False), running, rtol=1e-4, atol=1e-4)
    alone = layers3d.InstanceNorm(tracked=False).apply({"params": variables["params"]}, x, False)
    np.testing.assert_allclose(alone, own(mean, var), rtol=1e-4, atol=1e-4)


def test_doubling_aligns_the_corners():
    """[0, 3] has its corners kept and thirds between; against PyTorch in three dimensions where it is there."""
    np.testing.assert_allclose(layers3d.line_weights(2) @ [0, 3], [0, 1, 2, 3], atol=1e-6)
    np.testing.assert_allclose(layers3d.line_weights(3) @ [0, 5, 0], [0, 2, 4, 4, 2, 0], atol=1e-6)
    np.testing.assert_allclose(layers3d.line_weights(1), [[1], [1]])
    torch = pytest.importorskip("torch", reason="compared with torch.nn.functional.interpolate")
    x = VOLUMES[:, :4, :3, :5]
    options = {"scale_factor": 2, "mode": "trilinear", "align_corners": True}
    expected = torch.nn.functional.interpolate(torch.tensor(np.moveaxis(x, -1, 1)), **options).numpy()
    np.testing.assert_allclose(np.moveaxis(layers3d.double(jnp.asarray(x)), -1, 1), expected, rtol=1e-5, atol=1e-6)


def test_dropout_takes_whole_channels_and_wants_a_key():
    layer, x = layers3d.ChannelDropout(0.5), jnp.ones((4, 2, 2, 2, 64))
    y = np.asarray(layer.apply({}, x, True, rngs={"dropout": jax.random.key(0)}))
    assert set(np.unique(y)) == {0, 2} and (y == y[:, :1, :1, :1]).all()
    kept = (y[:, 0, 0, 0] > 0).mean()
    assert abs(kept - 0.5) < 4 * 0.5 / np.sqrt(4 * 64)
    assert (layer.apply({}, x, False) == x).all() and (layers3d.ChannelDropout(0.0).apply({}, x, True) == x).all()
    module = models.make("resunet3d", **TINY)
    assert module.dropout == 0.5
    shapes = jax.eval_shape(module.init, jax.random.key(0), VOLUMES)
    train = lambda **more: jax.eval_shape(
        lambda v: module.apply(v, VOLUMES, train=True, mutable=["batch_stats"], **more), shapes
    )
    with pytest.raises(UserError, match=r"model.dropout=0.5: training without a random key; give apply\(..., rngs="):
        train()
    assert train(rngs={"dropout": jax.random.key(0)})[0].shape == (BATCH, SIZE, SIZE, SIZE, 3)


@pytest.mark.parametrize("norm", layers3d.NORMS)
def test_half_precision_keeps_parameters_statistics_and_logits_in_float32(norm):
    whole, half = (models.make("resunet3d", **TINY, norm=norm, dropout=0.0, dtype=d) for d in ("float32", "bfloat16"))
    shapes = jax.eval_shape(half.init, jax.random.key(0), VOLUMES)
    run = lambda module: lambda v: module.apply(v, VOLUMES, train=True, mutable=["batch_stats"])
    leaves = jax.tree.leaves((shapes, jax.eval_shape(run(half), shapes)))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    if norm == "instance":
        a, b = quick_jit(lambda v: (run(whole)(v)[0], run(half)(v)[0]))(variables_of(whole))
        assert 1e-4 < float(jnp.abs(a - b).max() / jnp.abs(a).max()) < 0.1


@pytest.mark.parametrize(
    "size, message",
    [
        ((16, 24, 20), "volumes of 16 x 24 x 20 given, multiples of 8 .*depth=3.*; pad or crop them to 16 x 24 x 24"),
        ((8, 8), r"an input of shape \(1, 8, 8, 3\) given, volumes \[B, D, H, W, channels\] expected"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(size, message):
    with pytest.raises(UserError, match=message):
        models.make("resunet3d", depth=3).init(jax.random.key(0), jnp.zeros((1, *size, CHANNELS)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"norm": "layer"}, "model.norm: 'layer' given"),
        ({"dropout": 1.0}, "model.dropout: 1.0 given"),
        ({"dtype": "float16"}, "model.dtype: 'float16' given"),
        ({"tracked": "yes"}, "model.tracked: 'yes' given"),
        ({"depth": 0}, "model.depth: 0 given"),
        ({"conv": "map"}, "model.conv: 'map' given"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        models.make("resunet3d", **options)
