"""What all figures share: a canvas without a display, colours that everybody can tell apart, a PNG beside its CSV."""

import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_seg.report.writer import csv_text, write_atomic

# Okabe and Ito (2008), "Color universal design"; grey in place of their yellow, which is too pale for lines on white.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "////", "....", "xxxx")  # tells boxes apart where the colours repeat
DPI = 150
PANELS_ACROSS = 3


def style(index: int) -> dict[str, Any]:
    """Colour and line of the index-th method."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[(index + index // len(COLOURS)) % len(LINES)],
    }


def short(name: str, most: int = 18) -> str:
    """A name of so many letters at most, its middle left out: what tells sites apart is often at the end."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    chart = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(chart)
    return chart


def grid(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes, at most three across."""
    across = min(panels, PANELS_ACROSS)
    down = math.ceil(panels / across)
    chart = figure(max(7.5, 4.0 * across), 1.4 + 2.8 * down)
    axes = list(np.atleast_1d(chart.subplots(down, across, squeeze=False)).ravel())
    for unused in axes[panels:]:
        unused.remove()
    return chart, axes[:panels]


def legend(chart: Figure, axis: Axes) -> None:
    """Below the panels, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(chart.get_figwidth() // 1.9)))
    chart.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)


def save(
    chart: Figure, folder: str | os.PathLike[str], name: str, header: Sequence[str], numbers: Iterable[Iterable[Any]]
) -> Path:
    """Writes name.png and, with the numbers it shows, name.csv; returns the path of the PNG."""
    path = Path(os.path.abspath(folder)) / f"{name}.png"
    data = io.BytesIO()
    chart.savefig(data, format="png", metadata={"Software": None})  # same numbers, same bytes
    write_atomic(path.with_suffix(".csv"), csv_text(header, numbers).encode())
    write_atomic(path, data.getvalue())
    return path
