"""Nuclei and red blood cells: tables of ellipses, and painting them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_seg.synthesis.histology_fields import Grid


class Nuclei(NamedTuple):
    """One row per nucleus, float [n].

    Attributes:
      x, y: centres.
      long, short: half axes.
      turn: of the long axis, radians.
      dark: haematoxylin, 1 = usual.
      open: 0 = solid chromatin, 1 = pale inside with a dark rim and a nucleolus.
    """

    x: np.ndarray
    y: np.ndarray
    long: np.ndarray
    short: np.ndarray
    turn: np.ndarray
    dark: np.ndarray
    open: np.ndarray


def nuclei(
    random: np.random.Generator,
    points: np.ndarray,
    *,
    radius: float,
    spread: float,
    shape: tuple[float, float],
    turn: np.ndarray | float | None = None,
    dark: tuple[float, float] = (1.0, 0.12),
    open: float = 0.0,
) -> Nuclei:
    """Nuclei at points [n, 2].

    Args:
      radius: median of the geometric mean of the half axes.
      spread: of its logarithm (pleomorphism).
      shape: least and greatest ratio of long to short.
      turn: of the long axis, None = any.
      dark: mean and deviation of haematoxylin.
      open: the share of open chromatin on average.
    """
    n = len(points)
    mean = radius * np.exp(random.normal(0, spread, n).clip(-2.2, 2.2))
    ratio = np.sqrt(random.uniform(*shape, n))
    angle = random.uniform(0, np.pi, n) if turn is None else turn + random.normal(0, 0.15, n)
    pale = np.clip(random.normal(open, 0.25, n), 0, 1) if open else np.zeros(n)
    tint = random.normal(*dark, n).clip(0.4, 1.8)
    return Nuclei(points[:, 0], points[:, 1], mean * ratio, mean / ratio, angle, tint, pale)


def joined(parts: Sequence[Nuclei]) -> Nuclei:
    return Nuclei(*(np.concatenate(column) for column in zip(*parts)))


def paint(where: Grid, layers: Sequence[Nuclei], grain: np.ndarray) -> np.ndarray:
    """[layers, 2, S, S]: the stain of each layer's nuclei, and the share of each pixel that they cover.

    Where nuclei overlap the darker one is seen. Small and large ones are painted apart, in windows of their size.

    Args:
      grain: [S, S], the grain of chromatin, of unit variance.
    """
    table = joined(layers)
    layer = np.repeat(np.arange(len(layers)), [len(own.x) for own in layers])
    rim = 2 * int(np.ceil(table.long.max(initial=0) / where.pixel)) + 4  # a window may lie a whole nucleus outside
    canvas = np.zeros((len(layers), 2, where.size + 2 * rim, where.size + 2 * rim), np.float32)
    near = np.flatnonzero(
        (np.minimum(table.x, table.y) > -table.long) & (np.maximum(table.x, table.y) < where.side + table.long)
    )
    near = near[np.argsort(table.long[near], kind="stable")]
    cuts = len(near) * 3 // 5, len(near) * 9 // 10
    for part in np.split(near, cuts):
        if len(part):
            own = Nuclei(*(column[part].astype(np.float32)[:, None, None] for column in table))
            rows, columns, value = _windows(where, own, grain)
            side = value.shape[-1]
            for which, row, column, one in zip(
                layer[part].tolist(), (rows + rim).tolist(), (columns + rim).tolist(), value
            ):
                below = canvas[which, :, row : row + side, column : column + side]
                np.maximum(below, one, out=below)
    return canvas[..., rim : rim + where.size, rim : rim + where.size]


def _windows(where: Grid, own: Nuclei, grain: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First row and column of each window [n], stain and cover there [n, 2, w, w]; columns of `own` are [n, 1, 1]."""
    pixel = np.float32(where.pixel)
    half = int(np.ceil(own.long.max() / where.pixel)) + 1
    off = np.arange(-half, half + 1)
    column, row = (np.floor(c / pixel).astype(np.int32) for c in (own.x, own.y))
    i, j = row + off[:, None], column + off[None, :]  # [n, w, 1], [n, 1, w]
    dx, dy = (j + np.float32(0.5)) * pixel - own.x, (i + np.float32(0.5)) * pixel - own.y
    c, s = np.cos(own.turn), np.sin(own.turn)
    u = dx * (c / own.long) + dy * (s / own.long)
    across = np.square(dy * (c / own.short) - dx * (s / own.short))
    u += np.float32(0.25) * (own.dark - 1) * across  # a bean rather than an egg
    square, mean = u * u + across, np.sqrt(own.long * own.short)
    depth = (1 - np.sqrt(square)) * mean
    value = np.empty((len(depth), 2, *depth.shape[1:]), np.float32)
    inside = depth * np.float32(1 / max(1.1 * where.pixel, 0.7)) + np.float32(0.5)
    inside = np.minimum(np.maximum(inside, 0), 1, out=value[:, 1])
    shell = np.square((depth - np.float32(0.5)) * np.float32(1 / max(0.8, 0.8 * where.pixel)))
    nucleolus = square * np.square(mean / np.float32(1.3))
    pale = np.float32(-0.5) + np.float32(0.4) / (1 + shell) + np.float32(0.45) / (1 + nucleolus)
    texture = grain[np.clip(i, 0, where.size - 1), np.clip(j, 0, where.size - 1)]
    body = 1 + own.open * pale + texture * (np.float32(0.08) + np.float32(0.14) * own.open)
    np.multiply(own.dark * body, inside, out=value[:, 0])
    return row.ravel() - half, column.ravel() - half, value
