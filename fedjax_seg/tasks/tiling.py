"""Tiled inference: a volume of any size through a model of one tile size, on the device and inside jit.

The tiles lie on a product grid, and their blending weights are products over the axes as well. So the sum of the
weights at a voxel is known beforehand, every tile is added with its weights already divided by it, and one accumulator
is all that is kept. The number of tiles is computed from the true extent of the volume while the program runs: a small
volume in a large buffer costs its own tiles only.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array

BLENDS = ("uniform", "gaussian")
SIGMA = 1 / 8  # of the tile's length


class Axis(NamedTuple):
    """The tiles along one axis of a buffer of n voxels; T = the most that there can be.

    Attributes:
      starts: int32 [T]; those behind `tiles` repeat the last one.
      tiles: int32 scalar, how many there are.
      weights: float32 [T, n]; over the tiles they sum to 1 at every voxel of the extent, and to 0 outside.
    """

    starts: Array
    tiles: Array
    weights: Array


def check(tile: Sequence[int], overlap: float, blend: str, at_once: int) -> None:
    """Raises UserError unless the options of `tiled` are right."""
    if not tile or isinstance(tile, str) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in tile):
        raise checks.UserError(f"task.tile: {tile!r} given, a positive number of voxels per axis expected")
    checks.number("task.overlap", overlap, low=0, high=1)
    if overlap == 1:
        raise checks.UserError("task.overlap: 1 given, a share of the tile below 1 expected")
    checks.one_of("task.blend", blend, BLENDS)
    checks.number("task.tiles_at_once", at_once, low=1, integer=True)


def step_of(size: int, overlap: float) -> int:
    """The most voxels between the starts of two neighbours: size * (1 - overlap), rounded down, at least 1."""
    return max(1, int(size * (1 - overlap) + 1e-9))


def along(extent: Array, buffer: int, size: int, overlap: float, blend: str) -> Axis:
    """The tiles of `size` voxels that cover 0 <= i < extent (traced), in a buffer of at least `size` voxels.

    The first one starts at 0 and the last one ends at the extent: it is moved inwards instead of being padded. Those
    between them are evenly spaced. Where the extent is shorter than a tile, one tile at 0 reaches over its end.
    """
    step = step_of(size, overlap)
    room = jnp.maximum(extent - size, 0)
    number = jnp.arange(1 + -(-(buffer - size) // step))
    tiles = 1 + -(-room // step)
    starts = jnp.minimum(number, tiles - 1) * room // jnp.maximum(tiles - 1, 1)
    voxel = jnp.arange(buffer)
    within = voxel - starts[:, None]
    covers = (within >= 0) & (within < size) & (number < tiles)[:, None] & (voxel < extent)
    weights = jnp.where(covers, jnp.asarray(profile(size, blend))[jnp.clip(within, 0, size - 1)], 0)
    total = jnp.sum(weights, 0)
    return Axis(starts, tiles, weights / jnp.where(total > 0, total, 1))


def profile(size: int, blend: str) -> np.ndarray:
    """Blending weights along one axis of a tile, float32 [size]: 1, or a Gaussian of standard deviation size / 8.

    Source: nnU-Net (Isensee et al. 2021), Methods, "Inference": weights fall off from the centre of the patch; the
    1/8 is that of its code. Deviation: the centre is that of the tile, (size - 1) / 2, where the code has size // 2.
    """
    if blend == "uniform":
        return np.ones(size, np.float32)
    return np.exp(-0.5 * ((np.arange(size) - (size - 1) / 2) / (SIGMA * size)) ** 2).astype(np.float32)


def tiled(
    predict: Callable[[Array], Array],
    x: Array,
    shape: Array,
    *,
    tile: tuple[int, ...],
    overlap: float = 0.0,
    blend: str = "uniform",
    at_once: int = 1,
    fill: Array | float = 0.0,
) -> Array:
    """The weighted mean of the predictions of overlapping tiles, at every voxel of a volume.

    Source: FeTS Task 1 predicts by a grid of 64^3 tiles without overlap (TorchIO's GridSampler and GridAggregator).
    Deviation: there the tiles lie `tile` apart, only the last one is moved inwards, and where two meet the later one
    is kept; here the same number of tiles is evenly spaced and where tiles meet their predictions are averaged.

    Args:
      predict: [at_once, *tile, channels] -> [at_once, *tile, classes], e.g. probabilities; what it gives is averaged.
      x: [*space, channels], a buffer; the volume lies in its first corner. Voxels behind its end count as
        `fill`, those of a tile that is longer than the buffer too.
      shape: int32 [axes], traced: the extent of the volume, 1 <= shape <= space.
      tile: voxels along every axis, a shape that `predict` takes.
      overlap: of neighbouring tiles, as a share of the tile; 0 <= overlap < 1. At least that much: tiles are whole.
      blend: 'uniform' or 'gaussian' (see `profile`).
      fill: what surrounds the volume, a number or [channels]; as in the patches that `predict` was trained on, since a
        norm over a tile sees it.
      at_once: tiles of one call of `predict`; the last call may hold up to at_once - 1 tiles that count nothing.

    Returns: float32 [*space, classes]; 0 outside the extent. Beside it and the tiles of one call nothing is kept.
    """
    space, channels = x.shape[:-1], x.shape[-1]
    buffer = tuple(max(n, size) for n, size in zip(space, tile))
    x = jnp.pad(x, [*((0, wide - n) for wide, n in zip(buffer, space)), (0, 0)])
    axes = [along(shape[a], n, size, overlap, blend) for a, (n, size) in enumerate(zip(buffer, tile))]
    total = count(axes)
    classes = jax.eval_shape(predict, jax.ShapeDtypeStruct((at_once, *tile, channels), x.dtype)).shape[-1]

    def cut(starts: list[Array]) -> Array:
        piece = jax.lax.dynamic_slice(x, (*starts, 0), (*tile, channels))
        inside = [(start + jnp.arange(size) < end)[:, None] for start, size, end in zip(starts, tile, shape)]
        return jnp.where(outer(inside), piece, jnp.asarray(fill, x.dtype))

    def call(number: Array, result: Array) -> Array:
        which = number * at_once + jnp.arange(at_once)
        places = [place(axes, jnp.minimum(i, total - 1)) for i in which]
        starts = [[axis.starts[i] for axis, i in zip(axes, each)] for each in places]
        found = predict(jnp.stack([cut(own) for own in starts])).astype(jnp.float32)
        for i, each, own, values in zip(which, places, starts, found):
            weights = [
                jax.lax.dynamic_slice_in_dim(axis.weights[t], start, size)[:, None]
                for axis, t, start, size in zip(axes, each, own, tile)
            ]
            values = values * jnp.where(i < total, outer(weights), 0)
            before = jax.lax.dynamic_slice(result, (*own, 0), values.shape)
            result = jax.lax.dynamic_update_slice(result, before + values, (*own, 0))
        return result

    result = jax.lax.fori_loop(0, -(-total // at_once), call, jnp.zeros((*buffer, classes)))
    return result[tuple(slice(n) for n in space)]


def count(axes: Sequence[Axis]) -> Array:
    """The number of tiles, int32 scalar."""
    return jnp.prod(jnp.stack([axis.tiles for axis in axes]))


def place(axes: Sequence[Axis], i: Array) -> list[Array]:
    """Where tile i lies in the grid; the last axis runs fastest."""
    result: list[Array] = []
    for axis in reversed(axes):
        result.insert(0, i % axis.tiles)
        i = i // axis.tiles
    return result


def outer(factors: Sequence[Array]) -> Array:
    """[n, 1] of every axis -> their product [*n, 1]; bools are anded."""
    result = factors[0]
    for factor in factors[1:]:
        result = result[..., None, :] * factor
    return result
