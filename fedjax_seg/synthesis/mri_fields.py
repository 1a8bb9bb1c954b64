"""The voxel grid of a synthetic head, smooth noise on it, and distances to simple shapes. numpy only.

Lengths are in mm. The field of view is that of BraTS, 240 by 240 by 155 mm, whatever the number of voxels: x runs from
the patient's right to left, y from front to back, z upwards. All arrays are float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage, sparse

FIELD = (240.0, 240.0, 155.0)
# No brain reaches out of this box: only its voxels are drawn.
LOW, HIGH = (40.0, 26.0, 0.0), (200.0, 222.0, 155.0)


class Grid(NamedTuple):
    """Voxel centres of the box that holds the brain.

    Attributes:
      x, y, z: [X, 1, 1], [1, Y, 1], [1, 1, Z].
      spacing: of the voxels, three numbers.
      window: three slices, the place of the box in the whole volume.
    """

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    spacing: tuple[float, ...]
    window: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.x.shape[0], self.y.shape[1], self.z.shape[2])

    @property
    def widest(self) -> float:
        """The longest side of a voxel."""
        return max(self.spacing)


def grid(size: Sequence[int]) -> Grid:
    """The grid of a volume of `size` voxels."""
    spacing = tuple(f / n for f, n in zip(FIELD, size))
    window, axes = [], []
    for n, step, low, high in zip(size, spacing, LOW, HIGH):
        centres = (np.arange(n) + 0.5) * step
        inside = np.flatnonzero((centres > low) & (centres < high))
        window.append(slice(int(inside[0]), int(inside[-1]) + 1))
        axes.append(centres[inside].astype(np.float32))
    x, y, z = axes
    return Grid(x[:, None, None], y[None, :, None], z[None, None, :], spacing, tuple(window))


def affine(size: Sequence[int]) -> np.ndarray:
    """float64 [4, 4], voxel index -> mm, as in BraTS: diag(-1, -1, 1) and the origin (0, 239, 0) for 1 mm.

    Another size covers the same field of view: the corner of the first voxel stays where it is.
    """
    spacing = np.array([f / n for f, n in zip(FIELD, size)])
    direction = np.array([-1.0, -1.0, 1.0])
    out = np.diag([*(direction * spacing), 1.0])
    out[:3, 3] = np.array([0.0, 239.0, 0.0]) + direction * (spacing - 1) / 2
    return out


def nodes(scale: float) -> tuple[int, ...]:
    """How many values along each axis make noise of that scale (mm between values) in the box."""
    return tuple(max(2, round((h - low) / scale) + 1) for low, h in zip(LOW, HIGH))


def noise(random: np.random.Generator, scale: float) -> np.ndarray:
    """Normal numbers that `smooth` spreads over the box, one per `scale` mm: the same ones for every size."""
    return random.standard_normal(nodes(scale), np.float32)


def smooth(values: np.ndarray, at: Grid) -> np.ndarray:
    """[X, Y, Z]; Gaussian interpolation of values spread over the box; unit variance in, unit variance out."""
    x, y, z = (_weights(axis.ravel(), n, a) for a, (axis, n) in enumerate(zip((at.x, at.y, at.z), values.shape)))
    a, b, c = values.shape
    # the longest axis last: most of the work is on the smallest array
    out = (z @ values.reshape(a * b, c).T).reshape(-1, a, b).transpose(2, 1, 0)  # [b, a, Z]
    out = (y @ out.reshape(b, -1)).reshape(-1, a, len(at.z.ravel())).transpose(1, 0, 2)  # [a, Y, Z]
    return (x @ out.reshape(a, -1)).reshape(at.shape)


def _weights(places: np.ndarray, n: int, axis: int) -> sparse.csr_array:
    """[places, n]. Sparse, not for speed alone: products of dense matrices depend on the number of threads."""
    at = (places - LOW[axis]) / (HIGH[axis] - LOW[axis]) * (n - 1)
    off = np.abs(at[:, None] - np.arange(n))
    weights = np.where(off < 2.5, np.exp(-0.5 * (off / 0.65) ** 2), 0)
    return sparse.csr_array((weights / np.sqrt((weights**2).sum(1, keepdims=True))).astype(np.float32))


def banded(random: np.random.Generator, wave: float, side: int = 48) -> np.ndarray:
    """Periodic noise [side, side, side] of unit variance whose waves all are about `wave` nodes long."""
    spectrum = np.fft.rfftn(random.standard_normal((side,) * 3, np.float32))
    full, half = np.fft.fftfreq(side) * wave, np.fft.rfftfreq(side) * wave
    length = np.sqrt(full[:, None, None] ** 2 + full[None, :, None] ** 2 + half**2)
    out = np.fft.irfftn(spectrum * np.exp(-0.5 * ((length - 1) / 0.2) ** 2), (side,) * 3, axes=(0, 1, 2))
    return (out / out.std()).astype(np.float32)


def zero_distance(lattice: np.ndarray, step: float) -> np.ndarray:
    """About how many mm every node of a periodic lattice lies from where its noise is zero; with the noise's sign."""
    slopes = [(np.roll(lattice, -1, axis) - np.roll(lattice, 1, axis)) / 2 for axis in range(3)]
    slope = np.sqrt(sum(s * s for s in slopes))
    return lattice / np.maximum(slope, 0.4 * slope.mean()) * np.float32(step)


def looked_up(lattice: np.ndarray, places: Sequence[np.ndarray], step: float) -> np.ndarray:
    """[n]; a periodic lattice with a node every `step` mm at the places (x, y, z), [n] each."""
    at = np.stack([p / np.float32(step) for p in places])
    return ndimage.map_coordinates(lattice, at, order=1, mode="grid-wrap", prefilter=False)


def cover(depth: np.ndarray, width: float) -> np.ndarray:
    """The share of a voxel inside a shape: 1 at `depth` above width/2, 0 below -width/2, linear between."""
    return np.clip(0.5 + depth / np.float32(width), 0, 1)


def depth(places: Sequence[np.ndarray], centre: Sequence[float], axes: Sequence[float | np.ndarray]) -> np.ndarray:
    """Depth under the surface of an ellipsoid, below 0 outside; exact at the surface to first order."""
    level: Any = np.float32(1e-12)
    slope: Any = np.float32(1e-12)
    for place, c, a in zip(places, centre, axes):
        p = (place - np.float32(c)) * np.float32(1 / np.asarray(a))
        q = p * np.float32(1 / np.asarray(a))
        level, slope = level + p * p, slope + q * q
    root = np.sqrt(level)
    return (root - level) / np.sqrt(slope)


def capsule(
    places: Sequence[np.ndarray], a: Sequence[float], b: Sequence[float], radii: tuple[float, float]
) -> np.ndarray:
    """Depth inside a rod from a to b whose radius goes from the first to the second; below 0 outside."""
    along = np.subtract(b, a).astype(np.float32)
    off = [p - np.float32(c) for p, c in zip(places, a)]
    t = np.clip(sum(o * d for o, d in zip(off, along)) / np.float32(along @ along), 0, 1)
    away = np.sqrt(sum((o - t * d) ** 2 for o, d in zip(off, along)))
    return radii[0] + (radii[1] - radii[0]) * t - away
