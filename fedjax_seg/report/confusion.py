"""The confusion-matrix figure: all sites together, and every site."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import canvas

POOLED = "pooled"
SITES_SHOWN = 12
_PRINTED = 12  # a small panel with more classes than this shows colours only
_LINE = 30  # letters that fit below the large panel in one line
_NO_CASE = "#DDDDDD"


def confusion_figure(
    matrices: Mapping[str, Any],
    classes: Sequence[str],
    folder: str | os.PathLike[str],
    name: str = "confusion",
) -> Path:
    """One large panel of all sites, a small one for each: numbers of cases, coloured by the share of the true class.

    Args:
      matrices: {site: int [c, c]}, truth by prediction; 'pooled' is the large panel, their sum where it is not given.
      classes: c names. The small panels number them, as the axes of the large one do.
      folder, name: of the PNG and, beside it, of the CSV of all sites: site, truth, predicted, cases, share.

    At most 12 sites are drawn, those with most cases; the title says so. Cases are of all given folds and seeds.
    Returns: the path of the PNG.  Raises: UserError where there is no matrix; ValueError for another shape.
    """
    counts = {site: np.asarray(matrix) for site, matrix in matrices.items()}
    if not counts:
        raise UserError("figure: no confusion matrix given, one of 'pooled' or of a site expected")
    for site, matrix in counts.items():
        if matrix.shape != (len(classes), len(classes)):
            raise ValueError(f"a matrix of shape {matrix.shape} of {site!r} for {len(classes)} classes")
    sites = [site for site in counts if site != POOLED]
    pooled = counts.get(POOLED)
    counts[POOLED] = np.sum([counts[site] for site in sites], axis=0) if pooled is None else pooled
    largest = sorted(sites, key=lambda site: -counts[site].sum())[:SITES_SHOWN]
    shown = [site for site in sites if site in largest] if len(sites) > 1 else []
    chart, large, small = _panels(len(shown), len(classes))
    image = _large(large, counts[POOLED], classes, numbered=bool(shown))
    for axis, site in zip(small, shown):
        _small(axis, counts[site], site)
    large.figure.colorbar(image, ax=large, label="share of the cases of the true class", shrink=0.8)
    some = f"; the {len(shown)} largest of {len(sites)} sites" if len(shown) < len(sites) and shown else ""
    chart.suptitle(f"Cases by true and predicted class{some}")
    numbers = [
        (site, a, b, int(counts[site][i, j]), shares(counts[site])[i, j])
        for site in (POOLED, *sites)
        for i, a in enumerate(classes)
        for j, b in enumerate(classes)
    ]
    return canvas.save(chart, folder, name, ("site", "truth", "predicted", "cases", "share"), numbers)


def shares(matrix: np.ndarray) -> np.ndarray:
    """Rows over their sums, float [c, c]; NaN in the row of a class without cases."""
    total = matrix.sum(1, keepdims=True)
    return np.where(total > 0, matrix / np.maximum(total, 1), np.nan)


def _panels(small: int, classes: int) -> tuple[Figure, Axes, list[Axes]]:
    """The figure, the large panel on the left, and so many small ones on its right."""
    side = min(9.0, max(4.6, 2.2 + 0.75 * classes))
    if not small:
        chart = canvas.figure(side + 1.6, side)
        return chart, chart.subplots(), []
    across = math.ceil(math.sqrt(small))
    down = math.ceil(small / across)
    each = max(1.9, min(2.6, 1.2 + 0.22 * classes), (side - 1.0) / down - 0.3)
    height = down * (each + 0.3)
    side = max(side, 0.8 * height)
    chart = canvas.figure(side + across * each + 1.4, max(side, height) + 0.4)
    parts = chart.subfigures(1, 2, width_ratios=(side + 0.8, across * each), wspace=0.02, squeeze=False)
    left, right = parts.ravel()
    axes = list(right.subplots(down, across, squeeze=False).ravel())
    for unused in axes[small:]:
        unused.remove()
    return chart, left.subplots(), axes[:small]


def _heat(axis: Axes, matrix: np.ndarray) -> AxesImage:
    axis.set_facecolor(_NO_CASE)
    return axis.imshow(np.ma.masked_invalid(shares(matrix)), cmap="cividis", vmin=0, vmax=1)


def _large(axis: Axes, matrix: np.ndarray, classes: Sequence[str], numbered: bool) -> AxesImage:
    image, ticks, many = _heat(axis, matrix), range(len(classes)), len(classes) > _PRINTED
    labels = [f"{i}  {name}" if numbered or many else str(name) for i, name in enumerate(classes)]
    short = [str(i) for i in ticks] if many else labels
    flat = many or max(map(len, labels)) * len(classes) <= _LINE
    turned: dict[str, Any] = {} if flat else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(ticks, short, fontsize=7 if many else 10, **turned)
    axis.set_yticks(ticks, labels, fontsize=8 if many else 10)
    axis.set(xlabel="Predicted", ylabel="Truth", title=f"All sites ({matrix.sum()} cases)")
    size = 10 if len(classes) <= 6 else 8 if len(classes) <= 10 else 6
    share = shares(matrix)
    for i, j in np.ndindex(matrix.shape) if len(classes) <= 2 * _PRINTED else ():
        percent = "" if math.isnan(share[i, j]) or len(classes) > _PRINTED else f"\n{100 * share[i, j]:.0f} %"
        _number(axis, share, i, j, f"{matrix[i, j]}{percent}", size)
    return image


def _small(axis: Axes, matrix: np.ndarray, site: str) -> None:
    _heat(axis, matrix)
    count, share = len(matrix), shares(matrix)
    every = 1 if count <= _PRINTED else math.ceil(count / _PRINTED)
    ticks = range(0, count, every)
    axis.set_xticks(ticks, [str(t) for t in ticks], fontsize=7)
    axis.set_yticks(ticks, [str(t) for t in ticks], fontsize=7)
    axis.tick_params(length=2, pad=2)
    axis.set_title(f"{canvas.short(site)}\n{matrix.sum()} cases", fontsize=8)
    for i, j in np.ndindex(matrix.shape) if count <= _PRINTED else ():
        if matrix[i, j]:  # zeros only take room here
            _number(axis, share, i, j, str(matrix[i, j]), 7 if count <= 6 else 5)


def _number(axis: Axes, share: np.ndarray, i: int, j: int, text: str, size: int) -> None:
    dark = not math.isnan(share[i, j]) and share[i, j] <= 0.5
    axis.text(j, i, text, ha="center", va="center", color="white" if dark else "black", fontsize=size)
