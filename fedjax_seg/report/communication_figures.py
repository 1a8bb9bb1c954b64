"""The price of a secure sum as a picture: how much is sent, in how many steps, and how long a round then waits."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedjax_seg.report import canvas
from fedjax_seg.report.communication_table import label, size_text, time_text, told_of

OWN, OTHER, COMPUTED = canvas.COLOURS[4], "#6b6b6b", canvas.COLOURS[5]
_BANDS = "#f3f3f3"
_TIMES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 120, 600, 3600, 5 * 3600, 24 * 3600, 120 * 3600, 600 * 3600)


def protocol_costs(
    rows: Sequence[Mapping[str, Any]],
    folder: str | os.PathLike[str],
    name: str = "communication",
    own: str = "",
    title: str = "",
    protocol: str = "",
) -> Path:
    """Bytes of a round against steps in a row, a point per protocol; and seconds of a round, a point each.

    The names stand between the two panels, from most bytes to least; a line leads to the one point, the other is
    beside. The axis of seconds is logarithmic and has no zero, so nothing is drawn whose length would mean something.

    Args:
      rows: of privacy.cost_comparison.comparison.
      own: key of the run's own protocol, which is drawn large and in blue; '' = none.
      title: e.g. '33 hospitals, 1.2 million numbers each'.
      protocol: of the run; its row gets the words of it (communication_table.told_of).

    Returns: the path of the PNG; beside it a CSV of the rows. Raises: UserError for an own key not among the rows.
    """
    rows = told_of(rows, own, protocol)
    # From the bottom up. Of those that send nearly the same the leftmost is on top, so that the lines do not cross.
    least, most = (take(math.log(row["bytes"]) for row in rows) for take in (min, max))
    level = lambda row: round(8 * (math.log(row["bytes"]) - least) / (most - least or 1.0))
    ordered = sorted(rows, key=lambda row: (level(row), -row["hops"], row["bytes"]))
    chart = canvas.figure(12.5, 1.6 + 0.42 * len(rows))
    points, names, times = chart.subplots(1, 3, width_ratios=(1.35, 0.95, 1.0))
    _points(points, ordered, own)
    _names(names, ordered, own)
    _times(times, ordered, own)
    heading = "What one round of the federation sends, and how long that takes"
    chart.suptitle(f"{heading}{': ' if title else ''}{title}", fontsize=12)
    keys = ("key", "name", "bytes", "ratio", "messages", "hops", "seconds", "bytes_up", "bytes_peer", "bytes_down")
    numbers = [(*(row[k] for k in keys), int(row["key"] == own), int(row["computed"])) for row in rows]
    return canvas.save(chart, folder, name, (*keys, "own", "computed"), numbers)


def _colour(row: Mapping[str, Any], own: str) -> str:
    return OWN if row["key"] == own else COMPUTED if row["computed"] else OTHER


def _points(axis: Axes, rows: Sequence[Mapping[str, Any]], own: str) -> None:
    """A line leads from every point to the right edge, to the height of its row there."""
    size, hops = np.array([row["bytes"] for row in rows], float), np.array([row["hops"] for row in rows], float)
    margin = max(0.15 * np.log10(size.max() / size.min()), 0.15)
    ends = 10.0 ** np.array([np.log10(size.min()) - margin, np.log10(size.max()) + margin])
    wide = np.log10(hops.max()) or 1.0
    axis.set(xscale="log", yscale="log", ylim=ends, xlim=(10 ** (-0.12 * wide), 10 ** (1.3 * wide)))
    for at, row in enumerate(rows):
        mine, colour = row["key"] == own, _colour(row, own)
        axis.annotate(
            "",
            (row["hops"], row["bytes"]),
            (1.0, (at + 0.5) / len(rows)),
            textcoords="axes fraction",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "alpha": 0.5,
                "linewidth": 1.6 if mine else 0.9,
                "shrinkA": 0,
            },
        )
        _point(axis, row["hops"], row["bytes"], row, own, zorder=3 if mine else 4)
    _ticks(axis, "y", ends, size_text)
    axis.set_xticks(sorted(set(hops)), [f"{int(h)}" for h in sorted(set(hops))])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.25)
    axis.set(xlabel="Steps that wait for each other in a round", ylabel="Sent by all hospitals together")
    axis.set_title("Lower: less data. Further left: less waiting", fontsize=10.5)


def _point(axis: Axes, x: float, y: float, row: Mapping[str, Any], own: str, zorder: int) -> None:
    """Large for the run's own row, an outline for what is computed only."""
    colour, size = _colour(row, own), 12 if row["key"] == own else 8
    face = "white" if row["computed"] else colour
    look: dict[str, Any] = {"color": colour, "markerfacecolor": face, "markeredgewidth": 1.6, "markersize": size}
    axis.plot([x], [y], "o", zorder=zorder, **look)


def _rows_of(axis: Axes, count: int) -> None:
    """The frame of a panel with a row per protocol."""
    axis.set_ylim(-0.5, count - 0.5)
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    for at in range(0, count, 2):
        axis.axhspan(at - 0.5, at + 0.5, color=_BANDS, zorder=0, linewidth=0)


def _names(axis: Axes, rows: Sequence[Mapping[str, Any]], own: str) -> None:
    _rows_of(axis, len(rows))
    axis.set(xlim=(0, 1), xticks=[])
    for at, row in enumerate(rows):
        weight = "bold" if row["key"] == own else "normal"
        axis.text(0.02, at, label(row, own), va="center", fontsize=9.5, color=_colour(row, own), fontweight=weight)


def _times(axis: Axes, rows: Sequence[Mapping[str, Any]], own: str) -> None:
    values = np.array([row["seconds"] for row in rows], float)
    ends = np.array([values.min() / 2, values.max() * 2.5])
    _rows_of(axis, len(rows))
    for at, (row, value) in enumerate(zip(rows, values)):
        mine, colour = row["key"] == own, _colour(row, own)
        _point(axis, value, at, row, own, zorder=3)
        axis.annotate(
            time_text(value),
            (value, at),
            (10, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colour,
            fontweight="bold" if mine else "normal",
        )
    axis.set(xscale="log", xlim=ends, xlabel="Time of a round's communication (log axis)")
    _ticks(axis, "x", ends, time_text)
    axis.grid(axis="x", alpha=0.25)
    axis.set_title("Time of a round, by the latency model", fontsize=10.5)


def _ticks(axis: Axes, which: str, ends: np.ndarray, text: Callable[[float], str]) -> None:
    """With units: 1, 2 and 5 in every power of ten, or powers of ten where there are many; times in their own steps."""
    if which == "x":
        steps = np.array(_TIMES)
    else:
        parts = (1, 2, 5) if ends[1] / ends[0] < 300 else (1,)
        steps = np.array([10.0**power * part for power in range(15) for part in parts])
    kept = steps[(ends[0] <= steps) & (steps <= ends[1])]
    line = axis.yaxis if which == "y" else axis.xaxis
    line.set_major_locator(FixedLocator([float(t) for t in kept[:: math.ceil(len(kept) / 8)]]))
    line.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    line.set_minor_locator(NullLocator())
