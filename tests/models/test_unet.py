"""The U-Net and its layers against linen, a forward pass written out in lax, and the parameter counts by hand."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from tiny_federation import close, equal, quick_jit

from fedjax_seg import models
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.models import conv, layers

SIZE, BATCH = 8, 4
rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(BATCH, SIZE, SIZE, 1)).astype(np.float32)


def variables_of(module, images=IMAGES, seed=0):
    """Random values of about the size of 1 everywhere: biases, scales and running variances too."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)
    values = np.random.default_rng(seed)
    draw = lambda path, leaf: (
        values.uniform(0.5, 1.5, leaf.shape)
        if path.endswith(("var", "scale"))
        else 0.3 * values.normal(size=leaf.shape)
    ).astype(np.float32)
    return tree.map_paths(draw, shapes)


def parameters(**options):
    shapes = jax.eval_shape(models.make("unet", **options).init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def test_the_papers_size():
    """About 1.2 M parameters; counts of a PyTorch U-Net of the same layers (biases everywhere)."""
    for width, count in ((52, 1_231_466), (64, 1_864_322)):
        assert parameters(width=width) == count
    double = lambda i, o: 9 * (i + o) * o + 6 * o  # two kernels, biases, norms
    up = lambda i: 4 * i * (i // 2) + i // 2
    by_hand = double(1, 8) + double(8, 16) + double(16, 32) + double(32, 64)
    by_hand += up(64) + double(64, 32) + up(32) + double(32, 16) + up(16) + double(16, 8) + 8 * 3 + 3
    assert parameters(width=8, depth=3, classes=3) == by_hand


def forward_in_lax(variables, x, norm, train):
    """The same network written out: windows by lax, moments by jnp."""
    p, stats = variables["params"], variables.get("batch_stats")
    convolve = lambda x, layer: (
        layer["bias"] + lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=conv.DIMENSIONS)
    )

    def normalise(x, where, i):
        if norm == "none":
            return x
        if norm == "batch":
            own = stats[where][f"BatchNorm_{i}"]
            mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (own["mean"], own["var"])
            layer = p[where][f"BatchNorm_{i}"]
        else:  # 5 channels: 5 groups; 10 channels: 5
            n, h, w, c = x.shape
            groups = x.reshape(n, h, w, 5, -1)
            mean, var = (
                jnp.broadcast_to(m, (n, 1, 1, *groups.shape[3:])).reshape(n, 1, 1, c)
                for m in (groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True))
            )
            layer = p[where][f"GroupNorm_{i}"]
        return (x - mean) / jnp.sqrt(var + 1e-5) * layer["scale"] + layer["bias"]

    def double(x, where):
        for i in range(2):
            x = jnp.maximum(normalise(convolve(x, p[where][f"Conv_{i}"]), where, i), 0)
        return x

    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    enlarge = lambda x, layer: layer["bias"] + lax.conv_transpose(x, layer["kernel"], (2, 2), "VALID")
    one = double(x, "down_0")
    x = double(pool(one), "bottleneck")
    x = double(jnp.concatenate([one, enlarge(x, p["enlarge_0"])], -1), "up_0")
    return convolve(x, p["head"])


def test_logits_and_gradients_equal_the_network_written_out():
    """One compilation; gradients of both norms, values of the rest."""
    modules = {norm: models.make("unet", width=5, depth=1, norm=norm) for norm in layers.NORMS}
    variables = {norm: variables_of(module) for norm, module in modules.items()}

    def ours(norm, train):
        return lambda v: modules[norm].apply(v, IMAGES, train=train, mutable=["batch_stats"])[0]

    def theirs(norm, train):
        return lambda v: forward_in_lax(v, IMAGES, norm, train)

    def results(logits_of, variables):
        def trained(norm):
            loss = lambda v: (lambda y: (jnp.sum(jnp.sin(y)), y))(logits_of(norm, True)(v))
            gradient, logits = jax.grad(loss, has_aux=True)(variables[norm])
            return logits, gradient["params"]

        rest = [logits_of(norm, train)(variables[norm]) for norm, train in (("batch", False), ("none", True))]
        return [trained("batch"), trained("group"), *rest]

    both = quick_jit(lambda variables: (results(ours, variables), results(theirs, variables)))
    for found, expected in zip(*both(variables)):
        logits = expected[0] if isinstance(expected, tuple) else expected
        assert logits.shape == (BATCH, SIZE, SIZE, 2)
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
        close(found, expected, rtol=1e-3, atol=1e-5 * largest)


def test_fedbn_and_fedper_find_their_layers():
    module = models.make("unet", width=3)
    paths = tree.paths(jax.eval_shape(module.init, jax.random.key(0), IMAGES))
    matching = lambda *patterns: {p for p in paths if any(fnmatch.fnmatch(p, pattern) for pattern in patterns)}
    assert len(matching("*Norm*")) == 10 * 4 and len(matching("batch_stats/*")) == 10 * 2
    assert matching("batch_stats/*") <= matching("*Norm*")
    rest = set(paths) - matching("*Norm*")
    assert {p.rsplit("/", 1)[1] for p in rest} == {"kernel", "bias"} and len(rest) == 2 * (10 + 2 + 1)
    assert matching("params/head/*") == {"params/head/kernel", "params/head/bias"}
    assert paths["params/head/kernel"].shape == (1, 1, 3, 2) and module.classes == 2
    grouped = models.make("unet", width=3, norm="group")
    paths = tree.paths(jax.eval_shape(grouped.init, jax.random.key(0), IMAGES))
    assert len(matching("*Norm*")) == 10 * 2 and not matching("batch_stats/*")


def test_padding_rows_enter_neither_statistics_nor_gradients():
    module = models.make("unet", width=2, depth=1)
    variables = variables_of(module)
    mask = jnp.array([1.0, 1, 0, 1])

    @quick_jit
    def step(images, mask):
        def loss(params, images):
            logits, updated = module.apply(
                {**variables, "params": params}, images, train=True, mask=mask, mutable=["batch_stats"]
            )
            shown = jnp.ones(len(images)) if mask is None else mask
            return jnp.sum(jnp.sin(logits) * shown[:, None, None, None]), updated

        return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], images)

    (gradient, by_image), updated = step(IMAGES, mask)
    other = IMAGES.copy()
    other[2] = 100 * IMAGES[0] - 7
    (same, _), also = step(other, mask)
    equal((gradient, updated), (same, also))
    assert not np.any(by_image[2]) and np.all(np.any(np.abs(by_image) > 0, (1, 2, 3)) == np.array(mask, bool))
    # as if the row were not there
    (alone, _), without = step(IMAGES[np.array([0, 1, 3])], None)
    close((gradient, updated), (alone, without), rtol=1e-4, atol=1e-5)
    # nobody is real
    (nothing, _), kept = step(IMAGES, jnp.zeros(BATCH))
    equal(kept["batch_stats"], jax.tree.map(jnp.asarray, variables["batch_stats"]))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(nothing))


@pytest.mark.parametrize("norm, others_matter", [("group", False), ("none", False), ("batch", True)])
def test_only_batch_norm_mixes_examples(norm, others_matter):
    module = models.make("unet", width=2, depth=1, norm=norm)
    variables = variables_of(module)
    logits = quick_jit(lambda x: module.apply(variables, x, train=True, mutable=["batch_stats"])[0])
    other = IMAGES.copy()
    other[1:] *= -3
    moved = np.abs(logits(other)[0] - logits(IMAGES)[0]).max()
    assert moved > 1e-2 if others_matter else moved == 0


def test_batch_norm_equals_linens():
    x = (2 + 3 * rng.normal(size=(4, 3, 5, 6))).astype(np.float32)
    mask = np.array([1, 0, 1, 1], np.float32)
    ours, shape = layers.BatchNorm(), (6,)
    variables = {
        "params": {"scale": rng.uniform(1, 2, shape), "bias": rng.normal(size=shape)},
        "batch_stats": {"mean": rng.normal(size=shape), "var": rng.uniform(1, 2, shape)},
    }
    variables = jax.tree.map(np.float32, variables)
    norms = {train: nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5) for train in (True, False)}

    @quick_jit
    def both(x, mask):
        found, expected = [], []
        for train, theirs in norms.items():
            for rows in (None, mask):
                where = None if rows is None else rows[:, None, None, None] > 0
                found.append(ours.apply(variables, x, train, rows, mutable=["batch_stats"]))
                expected.append(theirs.apply(variables, x, mask=where, mutable=["batch_stats"]))
        return found, expected

    close(*both(x, mask), rtol=1e-4, atol=1e-4)


def test_group_norm_equals_linens():
    """8 groups, or the most below that divide the channels."""
    inputs = {}
    for channels in (16, 52, 6, 11):
        params = {"scale": rng.uniform(1, 2, channels), "bias": rng.normal(size=channels)}
        x = 2 + 3 * rng.normal(size=(2, 3, 5, channels))
        inputs[channels] = jax.tree.map(np.float32, ({"params": params}, x))

    @quick_jit
    def both(inputs):
        apply = lambda groups, v, x: nn.GroupNorm(num_groups=groups, epsilon=1e-5).apply(v, x)
        expected = {c: apply({16: 8, 52: 4, 6: 6, 11: 1}[c], *inputs[c]) for c in inputs}
        return {c: layers.GroupNorm().apply(*inputs[c]) for c in inputs}, expected

    close(*both(inputs), rtol=1e-4, atol=1e-4)


def test_up_convolution_equals_linens_transposed_one():
    x = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    theirs, ours = nn.ConvTranspose(6, (2, 2), (2, 2)), layers.UpConv(6)
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), x)
    assert shapes == jax.eval_shape(ours.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    gradients = lambda module: jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(module.apply(v, x))), (0, 1))
    found, expected = quick_jit(lambda v, x: (gradients(ours)(v, x), gradients(theirs)(v, x)))(variables, x)
    close(found, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5, atol=1e-5)


def test_pooling_equals_linens():
    x = rng.normal(size=(2, 4, 6, 3)).astype(np.float32)  # no ties
    weights = rng.normal(size=(2, 2, 3, 3)).astype(np.float32)
    both = lambda pool, x: jax.value_and_grad(lambda x: jnp.sum(pool(x) * weights))(x)
    close(*quick_jit(lambda x: (both(layers.max_pool, x), both(lambda x: nn.max_pool(x, (2, 2), (2, 2)), x)))(x))


def test_initial_weights_have_the_stated_variance():
    """He: 2 / (fan in) before a ReLU; 1 / (fan in) before none. Biases are 0."""
    module = models.make("unet", width=24, depth=1)
    params = quick_jit(module.init)(jax.random.key(1), IMAGES)["params"]
    expected = {
        ("down_0", "Conv_1"): 2 / (9 * 24),
        ("bottleneck", "Conv_0"): 2 / (9 * 24),
        ("up_0", "Conv_0"): 2 / (9 * 48),
        ("enlarge_0",): 1 / 48,  # one pixel of 48 channels meets every output
    }
    for path, variance in expected.items():
        layer = params
        for name in path:
            layer = layer[name]
        assert np.var(layer["kernel"]) == pytest.approx(variance, rel=0.1), path
        assert not np.any(layer["bias"])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"width": 0}, r"model.width: 0 given, an integer in \[1, inf\] expected"),
        ({"depth": 2.5}, r"model.depth: 2.5 given, an integer in \[1, 8\] expected"),
        ({"classes": 1}, r"model.classes: 1 given, an integer in \[2, inf\] expected"),
        ({"norm": "layer"}, "model.norm: 'layer' given, one of 'batch', 'group', 'none' expected"),
        ({"conv": "fast"}, "model.conv: 'fast' given, one of 'auto', 'loop', 'grouped' expected"),
        ({"hidden": 3}, "model 'unet': unknown option 'hidden'"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        models.make("unet", **options)


def test_sizes_that_do_not_halve_are_one_line():
    module = models.make("unet", width=2, depth=3)
    with pytest.raises(UserError) as error:
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 60, 64, 1)))
    expected = "model 'unet': images of 60 x 64 given, multiples of 8 expected (2^depth, model.depth=3);"
    assert str(error.value) == f"{expected} pad or resize them to 64 x 64, or lower model.depth"
    with pytest.raises(UserError, match=r"an input of shape \(1, 8, 8\) given, images \[B, H, W, channels\] expected"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 8, 8)))
