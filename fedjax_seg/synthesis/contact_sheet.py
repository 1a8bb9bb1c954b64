"""A picture of many slices with the outlines of their masks."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_seg.synthesis.storage import write_whole

ACROSS = 8
_INCH = 1.1  # per slice
_OUTLINE = "#E69F00"


def figure(width: float, height: float) -> Figure:
    """An empty figure without a display, in inches."""
    chart = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(chart)
    return chart


def show(axis: Axes, image: np.ndarray, label: np.ndarray | None = None) -> None:
    """One slice [H, W] in [-1, 1] in grey, with the outline of its mask."""
    axis.imshow(image, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
    if label is not None and label.any() and not label.all():
        axis.contour(label > 0, levels=[0.5], colors=_OUTLINE, linewidths=0.7)
    axis.set_xticks([])
    axis.set_yticks([])


def save(path: Path, slices: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """Writes a PNG with two rows for each entry: its first slices with outlines, and the same ones without.

    Args:
      slices: {name: (images [n, H, W] in [-1, 1], masks [n, H, W])}.
    """
    chart = figure(ACROSS * _INCH + 0.6, 2 * len(slices) * _INCH)
    axes = chart.subplots(2 * len(slices), ACROSS, squeeze=False)
    for n, (name, (images, labels)) in enumerate(slices.items()):
        axes[2 * n, 0].set_ylabel(name, fontsize=8)
        for i in range(ACROSS):
            for axis, label in ((axes[2 * n, i], labels), (axes[2 * n + 1, i], None)):
                if i < len(images):
                    show(axis, images[i], None if label is None else label[i])
                else:
                    axis.set_axis_off()
    return save_figure(path, chart)


def save_figure(path: Path, chart: Figure) -> Path:
    content = io.BytesIO()
    chart.savefig(content, format="png", metadata={"Software": None})  # same slices, same bytes
    write_whole(path, content.getvalue())
    return path
