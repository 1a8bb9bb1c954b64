"""3D convolutions against lax.conv_general_dilated: values, gradients, under vmap and loops; what they are made of."""

import functools
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import strategies as st
from jax import lax
from tiny_federation import quick_jit

from fedjax_seg.models import conv, conv3d

NDHWC = ("NDHWC", "DHWIO", "NDHWC")


def arrays(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def value_and_gradients(convolve):
    """(x, w) -> y and the gradients of a loss that is not linear in y."""

    def loss(x, w):
        y = convolve(x, w)
        return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))), y

    def both(x, w):
        gradients, y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *gradients

    return both


def assert_close(found, expected, tolerance=1e-5):
    """Relative to the largest entry of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3, np.abs(b).max(initial=0)))


CASES = {  # name: (shape of x, shape of w, options)
    "3x3x3": ((1, 4, 5, 6, 6), (3, 3, 3, 6, 2), {}),
    "few channels side by side": ((2, 4, 5, 6, 2), (3, 3, 3, 2, 3), {}),
    "stride 2, padding 1": ((1, 4, 6, 8, 2), (3, 3, 3, 2, 3), {"window_strides": (2, 2, 2), "padding": ((1, 1),) * 3}),
    "stride 2, odd size, same": ((2, 5, 3, 7, 2), (3, 3, 3, 2, 3), {"window_strides": (2, 2, 2)}),
    "1x1x1": ((2, 3, 4, 5, 3), (1, 1, 1, 3, 4), {}),
    "1x1x1, stride 2": ((1, 5, 4, 3, 3), (1, 1, 1, 3, 4), {"window_strides": (2, 2, 2)}),
    "planes of a flat kernel": ((1, 4, 5, 4, 3), (1, 3, 2, 3, 4), {"padding": ((1, 0), (1, 1), (0, 1))}),
    "a column": ((1, 5, 3, 4, 6), (3, 1, 1, 6, 2), {"window_strides": (2, 1, 1)}),
    "channels first": ((1, 3, 4, 5, 4), (4, 3, 2, 3, 3), {"dimension_numbers": ("NCDHW", "OIDHW", "NCDHW")}),
    "windows that leave gaps": ((1, 5, 6, 7, 2), (2, 1, 2, 2, 3), {"window_strides": (3, 2, 3), "padding": "VALID"}),
}  # fmt: skip
DEFAULTS = {"window_strides": (1, 1, 1), "padding": "SAME", "dimension_numbers": NDHWC}


def of_cases(convolve):
    """Values and gradients of all cases, in a loop as local steps run, in one compilation; chunks of 12 and of 1024."""
    made = {k: value_and_gradients(functools.partial(convolve, **(DEFAULTS | how))) for k, (_, _, how) in CASES.items()}
    inputs = {k: arrays(x, w) for k, (x, w, _) in CASES.items()}

    def once(inputs):
        found = {}
        for number, name in enumerate(CASES):
            with mock.patch.object(conv3d, "CHUNK", (12, 1024)[number % 2]):
                found[name] = made[name](*inputs[name])
        return found

    return quick_jit(lambda inputs: lax.scan(lambda c, _: (c, once(inputs)), 0, None, length=1)[1])(inputs)


def test_values_and_gradients():
    found, expected = of_cases(conv.general_dilated), of_cases(lax.conv_general_dilated)
    for name in CASES:
        try:
            assert_close(found[name], expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


AXIS = st.tuples(st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.integers(-1, 2), st.integers(-1, 2))


@hypothesis.settings(max_examples=3, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.tuples(AXIS, AXIS, AXIS), st.integers(1, 2), st.sampled_from([3, 1024]))
def test_values_and_gradients_over_geometries(axes, batch, chunk):
    size, kernel, strides, before, after = zip(*axes)
    hypothesis.assume(all(n + lo + hi >= k for n, k, lo, hi in zip(size, kernel, before, after)))
    how = {"window_strides": strides, "padding": tuple(zip(before, after)), "dimension_numbers": NDHWC}
    with jax.enable_x64(True):
        x, w = arrays((batch, *size, 2), (*kernel, 2, 3), dtype=np.float64)
        ours, theirs = (
            value_and_gradients(functools.partial(c, **how)) for c in (conv.general_dilated, lax.conv_general_dilated)
        )
        with mock.patch.object(conv3d, "CHUNK", chunk):
            found, expected = quick_jit(lambda x, w: (ours(x, w), theirs(x, w)))(x, w)
        assert_close(found, expected, 1e-12)


def second_order(convolve):
    """The gradient of the squared norm of a gradient, as gradient matching needs it."""
    loss = lambda x, w: jnp.sum(jnp.sin(convolve(x, w)))
    return jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w)), (0, 1))


VG = value_and_gradients
TRANSFORMS = {  # name: (leading axes of x, of w, the program of a convolution)
    "vmap over images": ((2,), (), lambda c: jax.vmap(VG(c), (0, None))),
    "vmap over kernels": ((), (2,), lambda c: jax.vmap(VG(c), (None, 0))),
    "vmap over clients and their examples": ((2, 2), (2,), lambda c: jax.vmap(jax.vmap(VG(c), (0, None)))),
    "gradient of gradient, vmapped": ((2,), (2,), lambda c: jax.vmap(second_order(c))),
}
INPUTS = {
    k: arrays((*a, 1, 3, 4, 3, 2), (*b, 3, 2, 3, 2, 2), seed=i) for i, (k, (a, b, _)) in enumerate(TRANSFORMS.items())
}


@functools.cache
def transformed(convolve):
    how = {"window_strides": (1, 2, 1), "padding": "SAME", "dimension_numbers": NDHWC}
    convolve = functools.partial(convolve, **how)
    return quick_jit(lambda inputs: {k: make(convolve)(*inputs[k]) for k, (_, _, make) in TRANSFORMS.items()})(INPUTS)


@pytest.mark.parametrize("rule", ["loop", "grouped"])
def test_values_and_gradients_under_vmap(rule):
    found = transformed(conv.BY_RULE[rule])
    for name, expected in transformed(lax.conv_general_dilated).items():
        try:
            assert_close(found[name], expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_half_precision_is_as_near_to_the_truth_as_lax():
    x, w = arrays((1, 6, 6, 6, 8), (3, 3, 3, 8, 4))
    ours, theirs = (
        value_and_gradients(functools.partial(c, **DEFAULTS)) for c in (conv.general_dilated, lax.conv_general_dilated)
    )
    half = lambda v: jnp.asarray(v, jnp.bfloat16)
    found, rounded, exact = quick_jit(lambda x, w: (ours(half(x), half(w)), theirs(half(x), half(w)), theirs(x, w)))(
        x, w
    )
    for a, b, truth in zip(found, rounded, exact):
        assert a.dtype == jnp.bfloat16 and a.shape == truth.shape
        off = [float(jnp.max(jnp.abs(v.astype(jnp.float32) - truth)) / jnp.max(jnp.abs(truth))) for v in (a, b)]
        assert off[0] <= max(1.5 * off[1], 2e-2)


def program(convolve, *shapes, **how):
    """The StableHLO of value and gradients."""
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(value_and_gradients(functools.partial(convolve, **(DEFAULTS | how)))).lower(*inputs).as_text()


def spatial_axes(text):
    """Of every convolution of a program."""
    lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    return {line.split("dim_numbers = [")[1].split("]")[0].count(",") - 1 for line in lines}


def test_a_cpu_gets_2d_convolutions_without_inserted_zeros_and_others_get_theirs():
    shapes = ((1, 4, 4, 4, 2), (3, 3, 3, 2, 3))
    for stride in (1, 2):
        text = program(conv.general_dilated, *shapes, window_strides=(stride,) * 3)
        assert spatial_axes(text) == {2} and "lhs_dilate = [2" not in text
    assert spatial_axes(program(lax.conv_general_dilated, *shapes)) == {3}
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        assert spatial_axes(program(conv.general_dilated, *shapes)) == {3}
    dilated = {"rhs_dilation": (2, 1, 1)}
    assert spatial_axes(program(conv.general_dilated, *shapes, **dilated)) == {3}  # right, if slow


def test_chunks_are_divisors_of_about_1024_voxels():
    assert conv3d._chunk(1, 32, 32, 32) == (1, 1, 32)
    assert conv3d._chunk(1, 64, 64, 64) == (1, 1, 16)
    assert conv3d._chunk(3, 16, 16, 16) == (1, 4, 16)
    assert conv3d._chunk(4, 8, 8, 8) == (2, 8, 8)
    assert conv3d._chunk(2, 7, 13, 2000) == (1, 1, 1)


def test_linen_takes_it():
    x, kernel, bias = arrays((2, 3, 5, 6, 3), (3, 3, 3, 3, 4), (4,))
    variables = {"params": {"kernel": kernel, "bias": bias}}
    theirs, ours = nn.Conv(4, (3, 3, 3), (2, 2, 2)), conv.Conv(4, (3, 3, 3), (2, 2, 2))
    np.testing.assert_allclose(ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="lhs feature dimension"):
        conv.general_dilated(x[..., :2], kernel, (1, 1, 1), "SAME", dimension_numbers=NDHWC)
