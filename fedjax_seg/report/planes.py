"""Slices of volumes for 2D pictures: axial, coronal and sagittal, through the largest area of a lesion.

Everything here looks at a volume whose axes point to the patient's left, back and head ('LPS', as the volumes of BraTS
and FeTS do); other orientations are turned first. Slices come as radiologists see them: axial with the front up and
the patient's right on the left, coronal and sagittal with the head up, sagittal with the front on the left.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.scans import Scan

NAMES = ("axial", "coronal", "sagittal")
_ACROSS = (2, 1, 0)  # the axis that a plane cuts
_LETTERS = ("LR", "PA", "SI")
_MARGIN = 3  # voxels of air around the head
_WINDOW = (1.0, 99.5)  # percentiles of the voxels that are not 0: a few bright vessels would darken all the rest


def upright(volume: Any, orientation: str = "LPS") -> np.ndarray:
    """The volume [X, Y, Z, ...] with its axes turned to left, back, head.

    Args:
      orientation: where the axes point to, a letter each of L or R, P or A, S or I (nibabel's axis codes).
    """
    order = _order(orientation)
    turned = np.moveaxis(np.asarray(volume), order, (0, 1, 2))
    flips = tuple(axis for axis, pair in enumerate(_LETTERS) if orientation[order[axis]] == pair[1])
    return np.flip(turned, flips)


def largest(mask: Any) -> tuple[int, int, int]:
    """For every axis of a mask [X, Y, Z], the first slice with the largest area; the middle one of an empty mask."""
    mask = np.asarray(mask) > 0
    if not mask.any():
        x, y, z = (n // 2 for n in mask.shape)
    else:
        x, y, z = (int(np.argmax(mask.sum(axis=others))) for others in ((1, 2), (0, 2), (0, 1)))
    return x, y, z


def cut(volume: np.ndarray, plane: str, at: Sequence[int], spacing: Sequence[float] = (1.0, 1.0, 1.0)) -> np.ndarray:
    """One slice [H, W, ...] of an upright volume, with square pixels as large as its smallest voxel edge.

    Args:
      plane: one of NAMES.
      at: an index for every axis of the volume, as from `largest`.
      spacing: mm per voxel of the upright volume's axes; where they differ, voxels are repeated, not interpolated.
    """
    axis = _ACROSS[NAMES.index(plane)]
    wide, high = (a for a in range(3) if a != axis)
    slice_ = np.swapaxes(np.take(volume, at[axis], axis), 0, 1)
    slice_ = slice_ if plane == "axial" else slice_[::-1]
    edge = min(spacing[wide], spacing[high])
    rows, columns = (_nearest(n, s / edge) for n, s in zip(slice_.shape, (spacing[high], spacing[wide])))
    return slice_[rows][:, columns]


def window(image: Any) -> np.ndarray:
    """The intensities of a volume from 0 to 1, its extremes cut off. A voxel of exactly 0 is black: it is the air of a
    skull-stripped image, which in z-scores over the brain alone would be as bright as the mean."""
    image = np.asarray(image, float)
    inside = image[(image != 0) & np.isfinite(image)]
    if inside.size == 0:
        return np.zeros_like(image)
    low, high = np.percentile(inside, _WINDOW)
    scaled = np.clip((np.nan_to_num(image) - low) / max(high - low, 1e-12), 0.0, 1.0)
    return np.where(image == 0, 0.0, scaled)


def planes(
    title: str,
    image: Any,
    truth: Any,
    predicted: Any = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    orientation: str = "LPS",
) -> list[Scan]:
    """The three slices of a case for scans.overlays, through the largest area of the truth (or of the prediction,
    where nothing is true), without the black air around the head.

    Args:
      title: printed above every slice, before the plane's name.
      image: float [X, Y, Z], one channel.
      truth, predicted: class maps [X, Y, Z], 0 = background; no prediction where None.
      spacing: mm per voxel along the axes as given.
      orientation: see `upright`.
    """
    if np.shape(image) != np.shape(truth):
        raise ValueError(f"an image of shape {np.shape(image)} with a class map of shape {np.shape(truth)}")
    spacing = [spacing[axis] for axis in _order(orientation)]
    image, truth = upright(image, orientation), upright(truth, orientation)
    found = np.zeros_like(truth) if predicted is None else upright(predicted, orientation)
    box = _box((image != image[0, 0, 0]) | (truth > 0) | (found > 0))  # the air is what the corner is
    image, truth, found = window(image)[box], truth[box], found[box]
    at = largest(truth if np.any(truth > 0) else found)
    scans = []
    for plane in NAMES:
        label = f"{title}\n{plane}" if title else plane
        mask = None if predicted is None else cut(found, plane, at, spacing)
        scans.append(Scan(label, cut(image, plane, at, spacing), cut(truth, plane, at, spacing), mask))
    return scans


def _box(shown: np.ndarray) -> tuple[slice, ...]:
    """The part of a volume that holds all that is shown, and a margin."""
    sides = (np.flatnonzero(shown.any(axis=others)) for others in ((1, 2), (0, 2), (0, 1)))
    return tuple(slice(max(0, s[0] - _MARGIN), s[-1] + 1 + _MARGIN) if len(s) else slice(None) for s in sides)


def _order(orientation: str) -> list[int]:
    """The axes of the volume that run left-right, back-front and head-foot."""
    places = [[axis for axis, letter in enumerate(orientation) if letter in pair] for pair in _LETTERS]
    if [len(found) for found in places] != [1, 1, 1] or len(orientation) != 3:
        raise UserError(f"orientation: {orientation!r} given, one letter each of L or R, P or A, S or I expected")
    return [found[0] for found in places]


def _nearest(length: int, stretch: float) -> np.ndarray:
    """Indices of round(length * stretch) pixels that show `length` voxels."""
    count = max(1, round(length * stretch))
    return np.minimum(((np.arange(count) + 0.5) * length / count).astype(int), length - 1)
