"""Shapes, smooth noise and soft edges on a pixel grid, for phantoms.

Lengths are in half fields of view: the picture is [-1, 1]. x runs to the right of the
picture, y down. Positive distances are outside.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array

Number = Array | float


class Grid(NamedTuple):
    """Pixel centres. `x` float32 [1, n], `y` float32 [n, 1], `pixel` the side of one."""

    x: Array
    y: Array
    pixel: float


def grid(size: int) -> Grid:
    """The grid of a square picture with `size` pixels per side."""
    centres = jnp.asarray((np.arange(size) + 0.5) * 2 / size - 1, jnp.float32)
    return Grid(centres[None, :], centres[:, None], 2.0 / size)


def coverage(distance: Array, width: Number) -> Array:
    """The share of a pixel inside a shape (partial volume): 1 inside, 0 outside, linear over `width` at the edge."""
    return jnp.clip(0.5 - distance / width, 0.0, 1.0)


def ramp(x: Array, low: float, high: float) -> Array:
    """0 below low, 1 above high, smooth between (low > high falls instead)."""
    s = jnp.clip((x - low) / (high - low), 0.0, 1.0)
    return s * s * (3 - 2 * s)


def union(a: Array, b: Array, smooth: float) -> Array:
    """Distance of a union whose crease is rounded over `smooth`."""
    h = jnp.maximum(smooth - jnp.abs(a - b), 0.0) / smooth
    return jnp.minimum(a, b) - h * h * smooth / 4


def ellipse(x: Array, y: Array, cx: Number, cy: Number, a: Number, b: Number, turn: Number = 0.0) -> Array:
    """Distance to an ellipse with half axes a, b turned by `turn` radians; first order, exact at the edge."""
    c, s = jnp.cos(turn), jnp.sin(turn)
    u, v = (x - cx) * c + (y - cy) * s, (y - cy) * c - (x - cx) * s
    a, b = jnp.maximum(a, 1e-4), jnp.maximum(b, 1e-4)
    p, q = u / a, v / b
    level = jnp.sqrt(p * p + q * q)
    slope = jnp.sqrt((p / a) ** 2 + (q / b) ** 2)
    return jnp.where(slope > 1e-3, level * (level - 1) / jnp.maximum(slope, 1e-3), -jnp.minimum(a, b))


def upsampling(size: int, nodes: int) -> np.ndarray:
    """float32 [size, nodes]: Gaussian interpolation of `nodes` values; unit variance in, unit variance out."""
    at = (np.arange(size) + 0.5) / size * (nodes - 1)
    weights = np.exp(-0.5 * ((at[:, None] - np.arange(nodes)) / 0.65) ** 2)
    return (weights / np.sqrt((weights**2).sum(1, keepdims=True))).astype(np.float32)


def draws(key: Array, shapes: Mapping[str, tuple[int, ...]], kind: str) -> dict[str, Array]:
    """{name: array} of independent 'uniform' or 'normal' numbers from one call: every call costs compile time."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    numbers = getattr(jax.random, kind)(key, (sum(sizes),))
    ends = np.cumsum([0, *sizes])
    return {name: numbers[ends[i] : ends[i + 1]].reshape(shape) for i, (name, shape) in enumerate(shapes.items())}


def smooth(values: Array, size: int) -> Array:
    """float32 [size, size], unit variance, from normal numbers [rows, columns] spread over the picture."""
    rows, columns = values.shape
    return jnp.asarray(upsampling(size, rows)) @ values @ jnp.asarray(upsampling(size, columns)).T


def spots(where: Grid, x: Array, y: Array, radius: Array) -> Array:
    """Sum of Gaussian spots [P] as a picture: one matrix product, so that hundreds are cheap; 1 at a lone centre.

    A spot narrower than a pixel is widened to it and loses height, so that its total is kept.
    """
    sigma = jnp.maximum(radius * 0.85, 0.5 * where.pixel)
    height = jnp.minimum((radius * 0.85 / sigma) ** 2, 1.0)
    columns = jnp.exp(-0.5 * ((where.x - x[:, None]) / sigma[:, None]) ** 2)
    rows = jnp.exp(-0.5 * ((where.y.T - y[:, None]) / sigma[:, None]) ** 2)
    return (rows * height[:, None]).T @ columns


def paint(
    picture: Array, where: Grid, table: Array, stretch: Array, window: float, inside: Array | None = None
) -> tuple[Array, Array]:
    """Paints ellipses one over the other.

    Args:
      picture: float32 [H, W] in HU.
      where: the pixel centres in the coordinates of the table, arrays [H, W].
      table: float32 [M, 9]; rows (x, y, a, b, turn, HU, softness, shell, HU of the shell): softness widens the edge
        beyond a pixel, the shell is the rim that thick. Rows with a <= 0.001 paint nothing.
      stretch: [2], from coordinates of the table to those of the picture (but for the bending, at most 0.05).
      window: only this share of the picture around the centre of each ellipse is visited (most of the speed).
      inside: [H, W] in [0, 1]; what may be painted on.

    Returns: the picture, and [H, W] in [0, 1] how much of a pixel nothing was painted on.
    """
    size = picture.shape[0]
    side = min(size, 2 * math.ceil(window * size / 2))

    def one(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], None]:
        cx, cy, a, b, turn, value, softness, shell, shell_value = row
        corner = [
            jnp.clip(((c * s + 1) / 2 * size - side / 2).astype(jnp.int32), 0, size - side)
            for c, s in ((cy, stretch[1]), (cx, stretch[0]))
        ]
        x, y, *below = (jax.lax.dynamic_slice(p, corner, (side, side)) for p in (where.x, where.y, *carry))
        distance = ellipse(x, y, cx, cy, a, b, turn)
        edge = where.pixel * 1.2 + softness
        cover = coverage(distance, edge) * (a > 1e-3)
        if inside is not None:
            cover = cover * jax.lax.dynamic_slice(inside, corner, (side, side))
        core = jnp.where(shell > 0, coverage(distance + shell, edge), 1.0)
        painted = below[0] + cover * (shell_value + core * (value - shell_value) - below[0])
        new = (painted, below[1] * (1 - cover))
        return tuple(jax.lax.dynamic_update_slice(p, n, corner) for p, n in zip(carry, new)), None  # type: ignore[return-value]

    return jax.lax.scan(one, (picture, jnp.ones_like(picture)), table)[0]
