"""The pixel grid of a histology tile, smooth noise on it, and points spread over it. numpy only.

Lengths are in micrometres. x runs to the right of the tile, y down, both from its upper left corner. All pictures are
float32.
"""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

_NODES = 64  # per side of a lattice


class Grid(NamedTuple):
    """Pixel centres of a square tile.

    Attributes:
      x, y: [S, S].
      pixel: the side of one.
      side: of the tile.
    """

    x: np.ndarray
    y: np.ndarray
    pixel: float
    side: float

    @property
    def size(self) -> int:
        return self.x.shape[0]


def grid(size: int, side: float) -> Grid:
    """The grid of a tile with `size` pixels per side that shows `side` micrometres."""
    centres = ((np.arange(size) + 0.5) * side / size).astype(np.float32)
    x, y = np.meshgrid(centres, centres)
    return Grid(x, y, side / size, side)


def lattice(random: np.random.Generator) -> np.ndarray:
    """Periodic smooth noise [64, 64] of unit variance; waves are about 4 nodes long."""
    rough = random.standard_normal((_NODES, _NODES), np.float32)
    soft = ndimage.gaussian_filter(rough, 1.0, mode="wrap")
    return ((soft - soft.mean()) / soft.std()).astype(np.float32)


def noise(
    values: np.ndarray,
    random: np.random.Generator,
    x: np.ndarray,
    y: np.ndarray,
    wave: float,
    *,
    stretch: float = 1.0,
    turn: float | None = None,
) -> np.ndarray:
    """A lattice seen at a random place of its own.

    Args:
      values: a lattice.
      x, y: where, any one shape.
      wave: length of the waves across; along the direction `turn` (radians, None = any) they are `stretch` times that.
    """
    shift = random.uniform(0, _NODES, 2).astype(np.float32)
    drawn = random.uniform(0, 2 * np.pi)
    angle = drawn if turn is None else turn
    step = np.float32(4.0 / wave)
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    u, v = (c * x + s * y) * (step / np.float32(stretch)) + shift[0], (c * y - s * x) * step + shift[1]
    return _looked_up(values, u, v)


def _looked_up(values: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Bilinear interpolation on a periodic lattice."""
    i, j = np.floor(u).astype(np.int32), np.floor(v).astype(np.int32)
    p, q = u - i, v - j
    flat, last = values.ravel(), _NODES - 1
    row, below = (i & last) * _NODES, ((i + 1) & last) * _NODES
    column, right = j & last, (j + 1) & last
    upper = flat[row + column] * (1 - q) + flat[row + right] * q
    lower = flat[below + column] * (1 - q) + flat[below + right] * q
    return upper * (1 - p) + lower * p


def smooth(random: np.random.Generator, where: Grid, wave: float, count: int = 1) -> np.ndarray:
    """Noise [count, S, S] of unit variance without a direction, with waves of about that length."""
    nodes = int(np.ceil(2.5 * where.side / wave)) + 4
    values = random.standard_normal((count, nodes, nodes), np.float32)
    places = where.y[:, :1] * np.float32(2.5 / wave) + np.float32(1.5)
    weights = np.exp(np.float32(-0.5 / 0.65**2) * np.square(places - np.arange(nodes, dtype=np.float32)))
    weights /= np.sqrt(np.square(weights).sum(1, keepdims=True))
    # einsum, not @: products of dense matrices depend on the number of threads in their last bits.
    return np.einsum("kin,jn->kij", np.einsum("in,knm->kim", weights, values), weights)


def ramp(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 below low, 1 above high, smooth between; low > high falls instead."""
    s = np.clip((x - np.float32(low)) / np.float32(high - low), 0, 1)
    return s * s * (3 - 2 * s)


def slopes(picture: np.ndarray, pixel: float) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives [S, S] to the right and down, per micrometre."""
    right, down = np.empty_like(picture), np.empty_like(picture)
    half = np.float32(0.5 / pixel)
    np.subtract(picture[:, 2:], picture[:, :-2], out=right[:, 1:-1])
    np.subtract(picture[2:], picture[:-2], out=down[1:-1])
    right[:, 0], right[:, -1], down[0], down[-1] = right[:, 1], right[:, -2], down[1], down[-2]
    return right * half, down * half


def zero_distance(values: np.ndarray, pixel: float) -> np.ndarray:
    """About how far every pixel lies from where a smooth picture is zero; with the picture's sign."""
    right, down = slopes(values, pixel)
    slope = np.sqrt(right * right + down * down)
    return values / np.maximum(slope, 0.5 * slope.mean())


def spread(random: np.random.Generator, where: Grid, spacing: float, jitter: float = 0.32) -> np.ndarray:
    """[n, 2]; points (x, y) on a hexagonal grid, shaken, over the tile and a rim around it."""
    rows, columns = int(where.side / spacing / 0.866) + 4, int(where.side / spacing) + 4
    points = random.normal(0, 0.5 * jitter, (rows, columns, 2))
    points += random.uniform(-2, -1, 2)
    points[..., 0] += np.arange(columns)
    points[1::2, :, 0] += 0.5
    points[..., 1] += 0.866 * np.arange(rows)[:, None]
    return spacing * points.reshape(-1, 2)


Place = tuple[np.ndarray, np.ndarray]


def place(points: np.ndarray, where: Grid) -> Place:
    """(row, column) [n] of the pixels of points, the nearest ones of those outside: picture[place]."""
    column, row = np.minimum(np.maximum((points.T / where.pixel).astype(np.int32), 0), where.size - 1)
    return row, column


def apart(points: np.ndarray, distance: float, taken: np.ndarray | None = None) -> np.ndarray:
    """bool [n]; the points that keep a distance from all earlier ones that do, and from those taken."""
    keep = np.ones(len(points), bool)
    if taken is not None and len(taken):
        keep &= _squares(points, taken).min(1) > distance**2
    far = _squares(points, points) > distance**2
    for n in range(len(points)):
        if keep[n]:
            keep[n + 1 :] &= far[n, n + 1 :]
    return keep


def _squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[a, b]; squares of distances."""
    return np.square(a[:, None, 0] - b[:, 0]) + np.square(a[:, None, 1] - b[:, 1])
