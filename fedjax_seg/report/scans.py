"""Pictures of cases: examples of every client, and segmentations beside the truth. 2D slices only."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D

from fedjax_seg.report import canvas

TRUTH, PREDICTION = "#E69F00", "#56B4E9"
ACROSS = 4


class Scan(NamedTuple):
    """One slice.

    Attributes:
      title: printed above it.
      image: float [H, W] or [H, W, 3], values from 0 to 1 (or any range: it is stretched).
      truth: integer [H, W], 0 = background.
      predicted: as truth; None = not shown.
    """

    title: str
    image: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray | None = None


def examples(
    rows: Sequence[tuple[str, Sequence[Scan]]], folder: str | os.PathLike[str], name: str = "examples"
) -> Path:
    """A row of slices for every site, the truth as a contour. rows: (site, its scans)."""
    across = max(len(scans) for _, scans in rows)
    chart = canvas.figure(1.9 * across + 0.4, 1.95 * len(rows) + 0.7)
    axes = chart.subplots(len(rows), across, squeeze=False)
    for line, (site, scans) in zip(axes, rows):
        for axis, scan in zip(line, scans):
            _slice(axis, scan)
        for unused in line[len(scans) :]:
            unused.set_axis_off()
        line[0].set_ylabel(site)
    contours = any(np.any(scan.truth > 0) for _, scans in rows for scan in scans)
    what = "slices of every site; contour: annotated tumour" if contours else "images of every site"
    chart.suptitle(f"Training {what}", fontsize=11)
    numbers = [(site, scan.title, int(np.sum(scan.truth > 0))) for site, scans in rows for scan in scans]
    return canvas.save(chart, folder, name, ("site", "case", "tumour_pixels"), numbers)


def overlays(scans: Sequence[Scan], folder: str | os.PathLike[str], name: str = "overlays") -> Path:
    """Slices with the contours of truth and prediction, the image alone above each."""
    down = -(-len(scans) // ACROSS)
    across = min(ACROSS, len(scans))
    chart = canvas.figure(2.3 * across + 0.3, 4.9 * down + 0.7)
    axes = chart.subplots(2 * down, across, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for i, scan in enumerate(scans):
        above, below = axes[2 * (i // ACROSS), i % ACROSS], axes[2 * (i // ACROSS) + 1, i % ACROSS]
        _slice(above, scan._replace(truth=np.zeros_like(scan.truth), predicted=None))
        _slice(below, scan._replace(title=""))
    handles = [Line2D([], [], color=TRUTH, label="truth"), Line2D([], [], color=PREDICTION, label="prediction")]
    chart.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    sums = [(s.title.replace("\n", " "), *_pixels(s)) for s in scans]
    return canvas.save(chart, folder, name, ("case", "truth_pixels", "predicted_pixels", "common_pixels"), sums)


def _pixels(scan: Scan) -> tuple[int, int, int]:
    truth, predicted = scan.truth > 0, np.zeros_like(scan.truth) > 0 if scan.predicted is None else scan.predicted > 0
    return int(truth.sum()), int(predicted.sum()), int((truth & predicted).sum())


def _slice(axis, scan: Scan) -> None:
    image = np.asarray(scan.image, float)
    low, high = float(image.min()), float(image.max())
    axis.imshow((image - low) / max(high - low, 1e-12), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for mask, colour in ((scan.predicted, PREDICTION), (scan.truth, TRUTH)):
        if mask is not None and np.any(mask > 0) and not np.all(mask > 0):
            # An image of few pixels is drawn large: the contour runs along pixel edges, not through their middles.
            fine = np.kron(np.asarray(mask > 0, float), np.ones((4, 4)))
            place = (np.arange(fine.shape[1]) + 0.5) / 4 - 0.5, (np.arange(fine.shape[0]) + 0.5) / 4 - 0.5
            axis.contour(*place, fine, levels=[0.5], colors=[colour], linewidths=1.1)
    axis.set_title(scan.title, fontsize=8)
    axis.set(xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set_visible(False)
