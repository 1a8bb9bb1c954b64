"""One convolution that is fast where federated training puts it: inside loops, and under vmap over clients or examples.

    nn.Conv(features, (3, 3), conv_general_dilated=conv.general_dilated)    or, shorter,    conv.Conv(features, (3, 3))

Why not lax.conv_general_dilated alone? On a CPU, XLA brings a convolution into the form its fast kernel knows only
outside of loop bodies (jax-ml/jax#12868). The gradients that autodiff writes are not in that form, so that one local
step inside a `scan`, `map` or `fori_loop` costs 15 to 150 times what it should; and a vmap over kernels makes a grouped
convolution, 3 to 6 times slower than one convolution after the other. Here

* the gradients by input and by kernel are themselves written as NHWC/HWIO convolutions of transposed arrays;
* the gradient by a kernel is summed over chunks of pixels that stay in the cache;
* vmap follows a rule of its own, `rule`: 'loop' runs a mapped axis one after the other, 'grouped' lets XLA batch;
  'auto', decided while tracing, is 'loop' on a CPU and 'grouped' elsewhere. An axis that only the images have
  (examples) is folded into the batch under both.

The three maps y = f(x, w), dx = g(dy, w), dw = h(x, dy) are the three derivatives of one trilinear form, so each one's
gradient is made of the other two: reverse mode works to any order. Forward mode (jvp, linearize) does not.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedjax_seg.core import checks
from fedjax_seg.models import conv3d, trilinear

RULES = ("auto", "loop", "grouped")
DIMENSIONS = ("NHWC", "HWIO", "NHWC")
Pair = tuple[int, ...]
# A kernel's gradient is summed over chunks of about CHUNK output pixels, unless an example has less than SMALL
# multiply-adds, where the loop would cost more than it saves.
CHUNK, SMALL = 1024, 500_000


class _Spec(NamedTuple):
    """A 2D convolution apart from its arrays. Static: sizes are what differs between convolutions, not batches."""

    strides: Pair
    pads: tuple[tuple[int, int], ...]
    lhs_dilation: Pair
    rhs_dilation: Pair
    size: Pair  # of the input
    kernel: Pair
    precision: Any
    rule: str  # 'loop' or 'grouped'
    canonical: bool  # gradients in the form that loops on a CPU need; else as XLA likes to have them

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(
            (_wide(n, d) + lo + hi - _wide(k, r)) // s + 1
            for n, d, (lo, hi), k, r, s in zip(
                self.size, self.lhs_dilation, self.pads, self.kernel, self.rhs_dilation, self.strides
            )
        )

    @property
    def is_dot(self) -> bool:
        plain = self.strides == self.lhs_dilation == (1, 1) and self.pads == ((0, 0), (0, 0))
        return plain and self.kernel == (1, 1)


def general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rule: str = "auto",
) -> jax.Array:
    """lax.conv_general_dilated with fast gradients in loops and a choice under vmap; the same values.

    Fast: two spatial dimensions, floating point, any strides, paddings and dilations, any order of dimensions (linen's
    NHWC/HWIO is free, another one costs transposes); three spatial dimensions without dilations, on a CPU (conv3d.py).
    Everything else (one spatial dimension, groups of features or of the batch, another type of the result) is handed
    to lax as it is: right, but slow in a CPU's loops.

    Args:
      lhs, rhs: images and kernel, of one floating type.
      window_strides ... preferred_element_type: as of lax.conv_general_dilated.
      rule: 'auto' | 'loop' | 'grouped', what vmap does.

    Raises: UserError for an unknown rule; lax's errors for shapes that do not fit.
    """
    checks.one_of("conv rule", rule, RULES)
    on_cpu = jax.default_backend() == "cpu"
    rule = rule if rule != "auto" else ("loop" if on_cpu else "grouped")
    plain = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    groups = feature_group_count != 1 or batch_group_count != 1
    solid = lhs.ndim == 5 and on_cpu and {*(lhs_dilation or (1,)), *(rhs_dilation or (1,))} == {1}
    other = not (lhs.ndim == 4 or solid) or lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating)
    retyped = preferred_element_type is not None and jnp.dtype(preferred_element_type) != lhs.dtype
    if groups or other or retyped or (rule == "grouped" and not on_cpu):
        return plain(lhs, rhs)
    result = jax.eval_shape(plain, lhs, rhs)  # lax's own checks and messages
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    x, w = _from_lax(lhs, numbers.lhs_spec), jnp.transpose(rhs, (*numbers.rhs_spec[2:], *numbers.rhs_spec[1::-1]))
    ones = (1,) * (lhs.ndim - 2)
    strides, lhs_dilation, rhs_dilation = (tuple(v or ones) for v in (window_strides, lhs_dilation, rhs_dilation))
    window = [_wide(k, d) for k, d in zip(w.shape, rhs_dilation)]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:-1], window, strides, padding)
    pads = tuple((int(lo), int(hi)) for lo, hi in padding)
    if solid:
        planes = functools.partial(general_dilated, dimension_numbers=DIMENSIONS, precision=precision, rule=rule)
        return _to_lax(conv3d.convolve(x, w, strides, pads, precision, rule, planes), numbers.out_spec, result.shape)
    if w.shape[:2] == (1, 1) and max(strides) > 1 and max(lhs_dilation) == 1 and pads == ((0, 0), (0, 0)):
        x, strides = x[:, :: strides[0], :: strides[1]], (1, 1)  # what is left is a dot
    spec = _Spec(
        strides, pads, lhs_dilation, rhs_dilation, x.shape[1:3], w.shape[:2], precision, rule, canonical=on_cpu
    )
    return _to_lax(_forward(spec, x, w), numbers.out_spec, result.shape)


Conv = functools.partial(nn.Conv, conv_general_dilated=general_dilated)


# {rule: general_dilated under it}; the same functions every time, so that equal linen modules stay equal.
BY_RULE = {rule: functools.partial(general_dilated, rule=rule) for rule in RULES}


def _wide(size: int, dilation: int) -> int:
    """Extent of `size` points `dilation` apart."""
    return (size - 1) * dilation + 1


def _from_lax(x: jax.Array, spec: Sequence[int]) -> jax.Array:
    batch, feature, *space = spec
    return jnp.transpose(x, (batch, *space, feature))


def _to_lax(y: jax.Array, spec: Sequence[int], shape: Sequence[int]) -> jax.Array:
    batch, feature, *space = spec
    order = [0] * y.ndim
    for own, place in enumerate((batch, *space, feature)):
        order[place] = own
    y = jnp.transpose(y, order)
    assert y.shape == tuple(shape), (y.shape, shape)
    return y


# ---- how they are computed ----


def _lax(spec: _Spec, x: jax.Array, w: jax.Array, **changed: Any) -> jax.Array:
    options: dict[str, Any] = {"window_strides": spec.strides, "padding": spec.pads, "precision": spec.precision}
    options |= {"lhs_dilation": spec.lhs_dilation, "rhs_dilation": spec.rhs_dilation, **changed}
    return lax.conv_general_dilated(x, w, dimension_numbers=DIMENSIONS, **options)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: Any, **options: Any) -> jax.Array:
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision, **options)


def _plain_forward(spec: _Spec, x: jax.Array, w: jax.Array) -> jax.Array:
    if spec.is_dot:
        return _dot(x.reshape(-1, x.shape[-1]), w[0, 0], (1, 0), spec.precision).reshape(*x.shape[:3], -1)
    return _lax(spec, x, w)


def _input_gradient(spec: _Spec, dy: jax.Array, w: jax.Array) -> jax.Array:
    """The kernel turned round and its channels swapped, over dy with strides and dilation swapped."""
    if spec.is_dot:
        return _dot(dy.reshape(-1, dy.shape[-1]), w[0, 0], (1, 1), spec.precision).reshape(*dy.shape[:3], -1)
    if not spec.canonical:
        like = jax.ShapeDtypeStruct((dy.shape[0], *spec.size, w.shape[2]), dy.dtype)
        return jax.linear_transpose(lambda x: _lax(spec, x, w), like)(dy)[0]
    pads = []
    for n, d, (lo, _), k, r, s, out in zip(
        spec.size, spec.lhs_dilation, spec.pads, spec.kernel, spec.rhs_dilation, spec.strides, spec.out
    ):
        before = _wide(k, r) - 1 - lo
        pads.append((before, _wide(n, d) + _wide(k, r) - 1 - _wide(out, s) - before))
    turned = jnp.swapaxes(w[::-1, ::-1], 2, 3)
    return _lax(spec, dy, turned, window_strides=spec.lhs_dilation, padding=tuple(pads), lhs_dilation=spec.strides)


def _kernel_gradient(spec: _Spec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Input channels as the batch, examples as the features summed over, dy as a kernel as large as itself.

    Summed over chunks of about CHUNK pixels (some examples, or some rows of one): patches of a whole batch leave the
    cache. Measured on one core: 1.1 to 1.2 times faster than the whole batch at 64x64, 1.3 times at 128x128. Padding
    comes first, because a padded convolution of one feature to 16 or fewer runs at a seventh of the speed.
    """
    wide = {"preferred_element_type": jnp.promote_types(x.dtype, jnp.float32)}  # sums over all pixels
    if spec.is_dot:
        whole = _dot(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), (0, 0), spec.precision, **wide)
        return whole[None, None].astype(x.dtype)
    if not spec.canonical:
        like = jax.ShapeDtypeStruct((*spec.kernel, x.shape[-1], dy.shape[-1]), x.dtype)
        return jax.linear_transpose(lambda w: _lax(spec, x, w), like)(dy)[0]
    window = [_wide(k, r) for k, r in zip(spec.kernel, spec.rhs_dilation)]
    edges = [
        (lo, _wide(out, s) + k - 1 - _wide(n, d) - lo, d - 1)
        for n, d, (lo, _), k, s, out in zip(spec.size, spec.lhs_dilation, spec.pads, window, spec.strides, spec.out)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    examples, rows = _chunk(dy.shape, x.shape[-1] * spec.kernel[0] * spec.kernel[1])
    high = _wide(rows, spec.strides[0]) + window[0] - 1
    per_example = spec.out[0] // rows

    def of(i: Any) -> jax.Array:
        first, row = i // per_example * examples, i % per_example * rows
        images = lax.dynamic_slice(x, (first, row * spec.strides[0], 0, 0), (examples, high, *x.shape[2:]))
        kernel = lax.dynamic_slice(dy, (first, row, 0, 0), (examples, rows, *dy.shape[2:]))
        images, kernel = jnp.transpose(images, (3, 1, 2, 0)), jnp.transpose(kernel, (1, 2, 0, 3))
        changed = {"window_strides": spec.rhs_dilation, "padding": "VALID", "rhs_dilation": spec.strides}
        return jnp.transpose(_lax(spec, images, kernel, lhs_dilation=(1, 1), **changed, **wide), (1, 2, 0, 3))

    # From the first chunk and not from zeros: under shard_map the sum then varies over devices as its terms do.
    count = dy.shape[0] // examples * per_example
    total = of(0) if count == 1 else lax.fori_loop(1, count, lambda i, total: total + of(i), of(0))
    return total.astype(x.dtype)


def _chunk(shape: Sequence[int], weights: int) -> tuple[int, int]:
    """(examples, rows) of dy [N, H, W, O] that are summed at once: divisors of N and H, one of which is 1 or H."""
    n, h, w, o = shape
    if h * w * weights * o < SMALL or n * h * w <= CHUNK:
        return n, h
    divisors = lambda size, most: [d for d in range(1, size + 1) if size % d == 0 and d <= max(most, 1)]
    rows = divisors(h, CHUNK // w)[-1]
    if 4 * rows * w < CHUNK:  # a height with no divisor of use
        rows = h
    return (divisors(n, CHUNK // (h * w))[-1], h) if rows == h else (1, rows)


_forward, _by_input, _by_kernel = trilinear.maps(_plain_forward, _input_gradient, _kernel_gradient)
