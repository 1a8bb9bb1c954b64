"""Figures of a federation of volumes: its institutions, its images, its segmentations, and what privacy costs.

Source: DP-SimAgg, Figures 1, 2 and 4; Figure 3 (who takes part) is `figures.participation`. Each is drawn beside the
CSV of the numbers it shows.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import canvas
from fedjax_seg.report.planes import NAMES, planes
from fedjax_seg.report.runs import values_of
from fedjax_seg.report.tables import SUMMARIES, sites_mean, summarise

# DP-SimAgg, Fig. 2: oedema yellow, enhancing tumour blue, necrotic core green.
REGION_COLOURS = {"ED": "#F0E442", "ET": "#0072B2", "NCR": "#009E73"}
_OTHER_COLOURS = ("#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#0072B2", "#009E73")
_OPACITY = 0.5


class Case(NamedTuple):
    """One segmented volume.

    Attributes:
      title: printed beside its row.
      image: float [X, Y, Z], one channel.
      truth, predicted: class maps [X, Y, Z].
      spacing: mm per voxel along the axes.
    """

    title: str
    image: Any
    truth: Any
    predicted: Any
    spacing: Sequence[float] = (1.0, 1.0, 1.0)


def institutions(
    sizes: Mapping[str, tuple[int, int]],
    folder: str | os.PathLike[str],
    name: str = "institutions",
    unit: str = "patients",
) -> Path:
    """Bars of how many cases every institution trains and validates on, in the order of the ids ('2' before '10').

    Source: DP-SimAgg, Fig. 1. Deviation: training and validation cases are told apart.

    Args:
      sizes: {site: (training cases, validation cases)}.
    """
    sites = sorted(sizes, key=_natural)
    train, held = (np.array([sizes[s][i] for s in sites]) for i in (0, 1))
    chart = canvas.figure(min(16.0, max(5.0, 1.6 + 0.34 * len(sites))), 4.4)
    axis = chart.subplots()
    places = np.arange(len(sites))
    axis.bar(places, train, label="training", color=canvas.COLOURS[4], width=0.8)
    axis.bar(places, held, bottom=train, label="validation", color=canvas.COLOURS[1], width=0.8, hatch="///")
    for place, count in enumerate(train + held):
        axis.text(place, float(count), str(count), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(places, sites, rotation=0 if max(map(len, sites)) <= 3 else 60)
    axis.set(xlabel="Institution", ylabel=unit.capitalize(), xlim=(-0.7, len(sites) - 0.3))
    total = train + held
    axis.set_title(f"{total.sum():,} {unit} at {len(sites)} institutions ({total.min()} to {total.max()} each)")
    axis.margins(y=0.08)
    axis.grid(axis="y", alpha=0.25)
    canvas.legend(chart, axis)
    rows = [(s, int(t), int(h), int(t + h)) for s, t, h in zip(sites, train, held)]
    return canvas.save(chart, folder, name, ("site", "training", "validation", "total"), rows)


def modalities(
    image: Any,
    truth: Any,
    channels: Sequence[str],
    classes: Sequence[str],
    folder: str | os.PathLike[str],
    name: str = "modalities",
    *,
    title: str = "",
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    orientation: str = "LPS",
) -> Path:
    """All channels of a case, plain and with its coloured sub-regions, in three planes through its largest area.

    Source: DP-SimAgg, Fig. 2. Deviation: three planes, and a first row without colours.

    Args:
      image: float [X, Y, Z, channels].
      truth: class map [X, Y, Z].
      channels: names.
      classes: names of the class ids 0 (background), 1, 2, ...
      orientation: see planes.upright.
    """
    image, truth = np.asarray(image), np.asarray(truth)
    if image.shape != (*truth.shape, len(channels)):
        raise ValueError(f"{len(channels)} channels of a class map {truth.shape}, an image of shape {image.shape}")
    cuts = [planes("", image[..., c], truth, None, spacing, orientation) for c in range(len(channels))]
    shown = [(0, False), (0, True), (1, True), (2, True)]  # (plane, with colours)
    heights = [cuts[0][plane].truth.shape[0] / cuts[0][plane].truth.shape[1] for plane, _ in shown]
    chart = canvas.figure(2.2 * len(channels) + 0.5, 2.2 * sum(heights) + 1.1)
    axes = chart.subplots(len(shown), len(channels), squeeze=False, height_ratios=heights)
    for line, (plane, coloured) in zip(axes, shown):
        for axis, scans in zip(line, cuts):
            scan = scans[plane]
            _show(axis, scan.image, scan.truth if coloured else None, classes)
        line[0].set_ylabel(NAMES[plane])
    for c, axis in enumerate(axes[0]):
        axis.set_title(f"({chr(ord('A') + c)}) {channels[c]}", fontsize=10)
    if title:
        chart.suptitle(title, fontsize=11)
    _class_legend(chart, classes, np.unique(truth))
    counts = [[int(np.sum(scan.truth == k)) for k in range(len(classes))] for scan in cuts[0]]
    rows = [(plane, label, n) for plane, row in zip(NAMES, counts) for label, n in zip(classes, row)]
    rows += [("volume", label, int(np.sum(truth == k))) for k, label in enumerate(classes)]
    return canvas.save(chart, folder, name, ("plane", "class", "pixels"), rows)


def segmentations(
    cases: Sequence[Case],
    classes: Sequence[str],
    folder: str | os.PathLike[str],
    name: str = "segmentations",
    orientation: str = "LPS",
) -> Path:
    """A row per case: three planes with the true sub-regions, then the same planes with the predicted ones."""
    cuts = [planes(c.title, c.image, c.truth, c.predicted, c.spacing, orientation) for c in cases]
    widths = [max(scans[i].truth.shape[1] / scans[i].truth.shape[0] for scans in cuts) for i in range(3)] * 2
    chart = canvas.figure(1.9 * sum(widths) + 0.8, 1.95 * len(cases) + 0.9)
    axes = chart.subplots(len(cases), 6, squeeze=False, width_ratios=widths)
    rows = []
    for line, case, scans in zip(axes, cases, cuts):
        for place, (plane, scan) in enumerate(zip(NAMES, scans)):
            assert scan.predicted is not None
            _show(line[place], scan.image, scan.truth, classes)
            _show(line[place + 3], scan.image, scan.predicted, classes)
            for k, label in enumerate(classes[1:], 1):
                true, found = scan.truth == k, scan.predicted == k
                rows.append((case.title, plane, label, int(true.sum()), int(found.sum()), int((true & found).sum())))
        line[0].set_ylabel(case.title, fontsize=8)
    for place, plane in enumerate(NAMES):
        axes[0, place].set_title(f"truth, {plane}", fontsize=9)
        axes[0, place + 3].set_title(f"prediction, {plane}", fontsize=9)
    _class_legend(chart, classes, range(len(classes)))
    header = ("case", "plane", "class", "truth_pixels", "predicted_pixels", "common_pixels")
    return canvas.save(chart, folder, name, header, rows)


def metric_panels(
    runs_rows: Mapping[str, Iterable[Mapping[str, Any]]],
    metrics: Sequence[str],
    folder: str | os.PathLike[str],
    name: str = "metric_panels",
    *,
    site: str = "mean_of_sites",
    titles: Mapping[str, str] | None = None,
    split: str = "test",
) -> Path:
    """A panel for every metric, in it a line for every method over the rounds; band = one sample standard deviation
    over folds and seeds.

    Source: DP-SimAgg, Fig. 4. A metric or method that has no row in that split has no line.

    Args:
      runs_rows: {method: metrics rows}.
      site: whose rows: a site, or one of the summaries 'mean_of_sites', 'worst_site', 'pooled'.
      titles: {metric: the panel's title}; default the metric's name.

    Raises: UserError where no method has any of the metrics there.
    """
    found: dict[tuple[str, str], dict[int, list[Any]]] = {}
    for method, rows in runs_rows.items():
        for row in rows:
            if row["metric"] in metrics and row["split"] == split and row["site"] == site:
                found.setdefault((method, row["metric"]), {}).setdefault(int(row["round"]), []).append(row)
    if not found:
        raise UserError(f"figure: no row with a metric of {', '.join(metrics)} of {site!r} in split {split!r}")
    chart, axes = canvas.grid(len(metrics))
    numbers, n = [], 0
    for metric, axis in zip(metrics, axes):
        for index, method in enumerate(runs_rows):
            rounds = found.get((method, metric), {})
            cells = {
                t: summarise(sites_mean(v, [site]) for v in values_of(rows, metric, split).values())
                for t, rows in sorted(rounds.items())
            }
            numbers += [(metric, method, t, c.mean, c.std, c.n) for t, c in cells.items()]
            n = max([n, *(c.n or 0 for c in cells.values())])
            mean = np.array([c.mean for c in cells.values()])
            spread = np.array([c.std or 0.0 for c in cells.values()])
            look = canvas.style(index)
            axis.plot(list(cells), mean, label=method, marker="o", markersize=2.5, linewidth=1.6, **look)
            axis.fill_between(list(cells), mean - spread, mean + spread, color=look["color"], alpha=0.12, linewidth=0)
        axis.set(title=(titles or {}).get(metric, metric), xlabel="Round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    band = "; band: ± one std" if n > 1 else ""
    chart.suptitle(f"{SUMMARIES.get(site, site).capitalize()}, {split} cases. Mean over folds and seeds, n ≤ {n}{band}")
    canvas.legend(chart, axes[0])
    return canvas.save(chart, folder, name, ("metric", "method", "round", "mean", "std", "n"), numbers)


def epsilon_utility(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    folder: str | os.PathLike[str],
    name: str = "epsilon_utility",
    *,
    without: tuple[float, float] | None = None,
    y_label: str = "Dice",
    unit: str = "client",
    delta: float | None = None,
) -> Path:
    """Utility over the privacy budget, and the line of the same run without privacy.

    Args:
      curves: {method: (total epsilon, mean, std over folds and seeds or NaN)}; an infinite epsilon is left out.
      without: (mean, std or NaN) of the run without privacy.
      unit: what one unit of the guarantee protects.
      delta: of all the points; None = not printed.
    """
    chart = canvas.figure(6.5, 4.4)
    axis = chart.subplots()
    numbers: list[tuple[Any, ...]] = []
    for index, (label, points) in enumerate(curves.items()):
        kept = sorted(p for p in points if math.isfinite(p[0]) and p[0] > 0)
        numbers += [(label, *p) for p in kept]
        x, y, spread = (np.array(column, float) for column in zip(*kept)) if kept else (np.zeros(0),) * 3
        bars = None if np.isnan(spread).all() else np.nan_to_num(spread)
        axis.errorbar(x, y, yerr=bars, label=label, marker="osD^vP*X"[index % 8], capsize=3, **canvas.style(index + 1))
    if without is not None:
        mean, spread_of = without[0], np.nan_to_num(without[1])
        axis.axhline(mean, color=canvas.COLOURS[0], linewidth=1.2, linestyle="--", label="without privacy")
        axis.axhspan(mean - spread_of, mean + spread_of, color=canvas.COLOURS[0], alpha=0.08, linewidth=0)
        numbers.append(("without privacy", math.inf, *without))
    axis.set_xscale("log")
    tail = "" if delta is None else f", δ = {delta:g}"
    axis.set(xlabel=f"Total ε of the run (unit: {unit}{tail}); further right is less private", ylabel=y_label)
    axis.set_title("Privacy against utility; bars and band: ± one std over folds and seeds", fontsize=11)
    axis.grid(alpha=0.25, which="both")
    canvas.legend(chart, axis)
    return canvas.save(chart, folder, name, ("method", "epsilon", y_label, "std"), numbers)


def _show(axis: Axes, image: np.ndarray, classes_of: np.ndarray | None, classes: Sequence[str]) -> None:
    """One slice, values from 0 to 1, under the colours of its classes."""
    coloured = np.repeat(image[..., None], 3, axis=-1)
    for k, colour in _colours(classes).items():
        if classes_of is not None:
            inside = (classes_of == k)[..., None]
            coloured = np.where(inside, (1 - _OPACITY) * coloured + _OPACITY * np.array(to_rgb(colour)), coloured)
    axis.imshow(coloured, interpolation="nearest", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set_visible(False)


def _colours(classes: Sequence[str]) -> dict[int, str]:
    """{class id: colour} of all but the background."""
    taken = {REGION_COLOURS[name] for name in classes if name in REGION_COLOURS}
    others = [colour for colour in _OTHER_COLOURS if colour not in taken]
    found, position = {}, 0
    for k, name in enumerate(classes[1:], 1):
        if name in REGION_COLOURS:
            found[k] = REGION_COLOURS[name]
        else:
            found[k], position = others[position % len(others)], position + 1
    return found


def _class_legend(chart: Any, classes: Sequence[str], present: Iterable[int]) -> None:
    colours, kept = _colours(classes), set(map(int, present))
    handles = [Patch(color=colours[k], label=classes[k]) for k in colours if k in kept]
    if handles:
        chart.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False)


def _natural(site: str) -> list[tuple[bool, int, str]]:
    """Sorts '2' before '10', 'b2' before 'b10', and numbers before words."""
    parts = (part for part in re.split(r"(\d+)", site) if part)
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]
