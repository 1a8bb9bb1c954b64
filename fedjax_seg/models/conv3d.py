"""A 3D convolution made of 2D ones and of dots: on a CPU, XLA's own is 5 times slower in loops (see conv.py).

Depth is folded into the batch, and the taps of the kernel along the depth are summed:

* y: one 2D convolution per depth tap, or one of all taps side by side where an input has few channels;
* dx: the same of dy and the turned kernel. A strided convolution is taken apart by phase: input voxels that lie on the
  same place between two windows meet the same few taps, so that no multiplication by an inserted zero remains;
* dw: per chunk of voxels that stays in the cache, the patches of x as a matrix times dy as a matrix. Along the depth
  the taps are shifts of dy, which is narrower than patches of x.

Measured on two cores, one device each, in a loop (GF/s, 27 taps; a dot of 1024^3 in the same minutes ran at 74):
voxels, channels; y as a sum of taps | as taps side by side; dw as here | as a 2D one of taps side by side:
32^3 4->24: 59 | 71; 21 | 29.  32^3 24->24: 70 | 59; 47 | 34.  32^3 48->24: 64 | 48; 50 | 26.
16^3 48->48: 68 | 66; 66 | 40.  8^3 96->96: 65 | 69; 71 | 46.

As in conv.py the three maps are the three derivatives of one trilinear form, each one's gradient is made of the other
two, and vmap follows the rule 'loop' or 'grouped'.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_seg.models import trilinear

PLANES = ("NHWC", "HWIO", "NHWC")
Pads = tuple[tuple[int, int], ...]
NARROW = 16  # depth taps x channels up to which they are laid side by side
CHUNK = 1024  # output voxels of a matrix product of the gradient by a kernel


class _Spec(NamedTuple):
    """A 3D convolution apart from its arrays; axes are depth, height, width."""

    strides: tuple[int, ...]
    pads: Pads
    size: tuple[int, ...]  # of the input
    kernel: tuple[int, ...]
    precision: Any
    rule: str  # 'loop' or 'grouped'

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(
            (n + lo + hi - k) // s + 1 for n, (lo, hi), k, s in zip(self.size, self.pads, self.kernel, self.strides)
        )


def convolve(
    x: jax.Array,
    w: jax.Array,
    strides: Sequence[int],
    pads: Pads,
    precision: Any,
    rule: str,
    planes: Callable[..., jax.Array],
) -> jax.Array:
    """y [N, D', H', W', O] of x [N, D, H, W, I] and w [*kernel, I, O], of one floating type.

    Args:
      strides: of depth, height and width.
      pads: voxels (before, after) along each axis; negative ones cut.
      rule: what vmap does, 'loop' or 'grouped'.
      planes: a 2D convolution (x [N, H, W, I], w, strides, pads) for kernels that are one voxel deep.
    """
    if w.shape[0] == 1:
        x = _pad(x, (pads[0], (0, 0), (0, 0)))[:, :: strides[0]]
        y = planes(x.reshape(-1, *x.shape[2:]), w[0], strides[1:], pads[1:])
        return y.reshape(*x.shape[:2], *y.shape[1:])
    return _forward(_Spec(tuple(strides), pads, x.shape[1:4], w.shape[:3], precision, rule), x, w)


# ---- how they are computed ----


def _wide(dtype: Any) -> Any:
    """The type of sums."""
    return jnp.promote_types(dtype, jnp.float32)


def _pad(x: jax.Array, pads: Pads) -> jax.Array:
    if all(pair == (0, 0) for pair in pads):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)])


def _shifts(x: jax.Array, axis: int, starts: Sequence[int], count: int, stride: int) -> list[jax.Array]:
    """`count` entries along an axis, `stride` apart, from each start."""
    return [lax.slice_in_dim(x, t, t + (count - 1) * stride + 1, stride, axis) for t in starts]


def _sum_of_taps(x: jax.Array, w: jax.Array, strides: Sequence[int], pads: Pads, precision: Any) -> jax.Array:
    """The convolution, as 2D ones over the depth taps."""
    depth, taps = pads[0], w.shape[0]
    if min(min(pair) for pair in pads) < 0:  # a 2D convolution pads by itself, but does not cut
        x, pads = _pad(x, pads), ((0, 0),) * 3
    else:
        x = _pad(x, (depth, (0, 0), (0, 0)))
    count = (x.shape[1] - taps) // strides[0] + 1
    parts = _shifts(x, 1, range(taps), count, strides[0])
    kernels = [w[t] for t in range(taps)]
    if taps * x.shape[-1] <= NARROW:
        parts, kernels = [jnp.concatenate(parts, -1)], [jnp.concatenate(kernels, 2)]
    options = {"precision": precision, "preferred_element_type": _wide(x.dtype)}

    def plane(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x.reshape(-1, *x.shape[2:])
        if w.shape[:2] == (1, 1) and tuple(strides[1:]) == (1, 1) and pads[1:] == ((0, 0), (0, 0)):
            flat = lax.dot_general(x.reshape(-1, x.shape[-1]), w[0, 0], (((1,), (0,)), ((), ())), **options)
            return flat.reshape(*x.shape[:3], -1)
        return lax.conv_general_dilated(x, w, strides[1:], pads[1:], dimension_numbers=PLANES, **options)

    total = functools.reduce(jnp.add, [plane(part, kernel) for part, kernel in zip(parts, kernels)])
    return total.reshape(x.shape[0], count, *total.shape[1:]).astype(x.dtype)


def _plain_forward(spec: _Spec, x: jax.Array, w: jax.Array) -> jax.Array:
    return _sum_of_taps(x, w, spec.strides, spec.pads, spec.precision)


def _input_gradient(spec: _Spec, dy: jax.Array, w: jax.Array) -> jax.Array:
    """Phase by phase: dx[s m + r] = sum over u of dy[m + q - u] w[t + s u]; t = (r + lo) mod s, q = (r + lo - t)/s."""
    turned = jnp.swapaxes(w, 3, 4)
    lengths = [-(-n // s) for n, s in zip(spec.size, spec.strides)]

    def phase(place: Sequence[int]) -> jax.Array:
        window, pads = [], []
        for r, s, (lo, _), k, out, length in zip(place, spec.strides, spec.pads, spec.kernel, spec.out, lengths):
            first = (r + lo) % s
            taps = len(range(first, k, s))
            before = taps - 1 - (r + lo - first) // s
            window.append(slice(first, None, s))
            pads.append((before, length - out - before + taps - 1))
        kernel = turned[tuple(window)][::-1, ::-1, ::-1]
        if 0 in kernel.shape[:3]:  # voxels that no window touches
            return jnp.zeros((dy.shape[0], *lengths, w.shape[3]), dy.dtype) * dy.reshape(-1)[0]
        return _sum_of_taps(dy, kernel, (1, 1, 1), tuple(pads), spec.precision)

    found = [phase(place) for place in itertools.product(*map(range, spec.strides))]
    for axis in (2, 1, 0):  # phases of the last axis vary fastest
        s = spec.strides[axis]
        found = [_interleave(found[i : i + s], axis + 1) for i in range(0, len(found), s)]
    return found[0][:, : spec.size[0], : spec.size[1], : spec.size[2]]


def _interleave(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return jnp.stack(parts, axis + 1).reshape(shape)


def _kernel_gradient(spec: _Spec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Patches of x, [voxels, taps * I], against dy, [voxels, (depth taps) * O], summed over chunks of voxels.

    At a depth stride of 1 the loop goes over the planes of x, each beside the planes of dy it meets; else over the
    planes of dy, each beside all its patches.
    """
    (kd, kh, kw), (sd, sh, sw) = spec.kernel, spec.strides
    i, o, shift_dy = x.shape[-1], dy.shape[-1], sd == 1
    _, out_h, out_w = spec.out
    # Exactly what the windows touch.
    pads = [
        (lo, (out - 1) * s + k - n - lo)
        for out, s, k, n, (lo, _) in zip(spec.out, spec.strides, spec.kernel, spec.size, spec.pads)
    ]
    if shift_dy:
        pads[0] = (0, 0)
        lo = spec.pads[0][0]
        before = kd - 1 - lo
        dy = _pad(dy, ((before, spec.size[0] + kd - 1 - spec.out[0] - before), (0, 0), (0, 0)))
    x = _pad(x, tuple(pads))
    loop = spec.size[0] if shift_dy else spec.out[0]
    examples, planes, rows = _chunk(x.shape[0], loop, out_h, out_w)
    counts = (x.shape[0] // examples, loop // planes, out_h // rows)
    taps = 1 if shift_dy else kd
    deep = (planes - 1) * (1 if shift_dy else sd) + taps
    wide = _wide(x.dtype)

    def of(number: Any) -> jax.Array:
        example = number // (counts[1] * counts[2]) * examples
        plane, row = number // counts[2] % counts[1] * planes, number % counts[2] * rows
        high = (rows - 1) * sh + kh
        block = lax.dynamic_slice(x, (example, plane * sd, row * sh, 0, 0), (examples, deep, high, *x.shape[3:]))
        images = [
            part
            for slab in _shifts(block, 1, range(taps), planes, sd)
            for band in _shifts(slab, 2, range(kh), rows, sh)
            for part in _shifts(band, 3, range(kw), out_w, sw)
        ]
        other = planes + kd - 1 if shift_dy else planes
        below = lax.dynamic_slice(dy, (example, plane, row, 0, 0), (examples, other, rows, *dy.shape[3:]))
        shifted = _shifts(below, 1, range(kd - 1, -1, -1) if shift_dy else (0,), planes, 1)
        a, b = (jnp.concatenate(parts, -1).reshape(-1, sum(p.shape[-1] for p in parts)) for parts in (shifted, images))
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())), spec.precision, wide)

    # From the first chunk and not from zeros: under shard_map the sum then varies over devices as its terms do.
    count = counts[0] * counts[1] * counts[2]
    total = of(0) if count == 1 else lax.fori_loop(1, count, lambda n, total: total + of(n), of(0))
    if shift_dy:
        dw = jnp.transpose(total.reshape(kd, o, kh, kw, i), (0, 2, 3, 4, 1))
    else:
        dw = jnp.transpose(total.reshape(o, kd, kh, kw, i), (1, 2, 3, 4, 0))
    return dw.astype(x.dtype)


def _chunk(examples: int, planes: int, rows: int, width: int) -> tuple[int, int, int]:
    """(examples, planes, rows) of about CHUNK voxels: divisors, whole planes before rows of one are cut."""
    largest = lambda size, most: max(d for d in range(1, size + 1) if size % d == 0 and d <= max(most, 1))
    if rows * width > CHUNK:
        return 1, 1, largest(rows, CHUNK // width)
    if planes * rows * width > CHUNK:
        return 1, largest(planes, CHUNK // (rows * width)), rows
    return largest(examples, CHUNK // (planes * rows * width)), planes, rows


_forward, _by_input, _by_kernel = trilinear.maps(_plain_forward, _input_gradient, _kernel_gradient)
