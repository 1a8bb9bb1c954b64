"""Figures as PNG, each beside the CSV of the numbers it shows. Matplotlib's object interface on Agg: no display.

Rows are metrics rows (round, fold, seed, site, split, metric, value, n), as in Run.rows or a summary's 'results'.
Methods are told apart by colour (Okabe and Ito's colour-blind safe set) and by line style.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.ticker import MaxNLocator

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import canvas
from fedjax_seg.report.runs import values_of
from fedjax_seg.report.tables import sites_mean, summarise

Rows = Iterable[Mapping[str, Any]]

_MOST_PANELS = 36  # of more sites the mean alone is drawn
_PRINTED_TICKS = 25  # more cells than this along an axis: not every one gets a label or a number


def convergence(
    runs_rows: Mapping[str, Rows],
    metric: str,
    folder: str | os.PathLike[str],
    name: str = "convergence",
    sites: Sequence[str] | None = None,
    split: str = "test",
    external: Sequence[str] = (),
) -> Path:
    """One line per method over rounds: mean over folds and seeds, band = one sample standard deviation.

    Args:
      runs_rows: {method: rows}.
      sites: default all in the rows. The first panel is the unweighted mean over them, then a panel for each (of at
        most _MOST_PANELS).
      external: those of them that the mean leaves out.

    Returns: the path of the PNG.  Raises: UserError where no row has the metric in that split.
    """
    kept = {m: [r for r in rows if r["metric"] == metric and r["split"] == split] for m, rows in runs_rows.items()}
    sites = _sites(kept, sites, metric, split)
    inside = [s for s in sites if s not in external]
    alone = () if len(sites) > _MOST_PANELS else sites
    panels = [f"Mean over {len(inside)} sites", *alone] if len(inside) > 1 else list(sites)
    figure, axes = canvas.grid(len(panels))
    numbers, n = [], 0
    for index, (method, rows) in enumerate(kept.items()):
        by_round: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_round.setdefault(int(row["round"]), []).append(row)
        replicas = {t: list(values_of(at, metric, split).values()) for t, at in sorted(by_round.items())}
        for panel, axis in zip(panels, axes):
            chosen = [panel] if panel in sites else inside
            cells = {t: summarise(sites_mean(v, chosen) for v in found) for t, found in replicas.items()}
            numbers += [(method, panel, t, c.mean, c.std, c.n) for t, c in cells.items()]
            n = max([n, *(c.n or 0 for c in cells.values())])
            mean = np.array([c.mean for c in cells.values()])
            spread = np.array([c.std or 0.0 for c in cells.values()])
            style = canvas.style(index)
            marker = "o" if len(cells) == 1 else None
            axis.plot(list(cells), mean, label=method, marker=marker, linewidth=1.6, **style)
            axis.fill_between(list(cells), mean - spread, mean + spread, color=style["color"], alpha=0.12, linewidth=0)
    for panel, axis in zip(panels, axes):
        axis.set(title=canvas.short(panel, 32), xlabel="Round", ylabel=metric)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    figure.suptitle(f"{metric} on the {split} folds. Line: mean over folds and seeds, n ≤ {n}; band: ± one std")
    canvas.legend(figure, axes[0])
    header = ("method", "panel", "round", "mean", "std", "n")
    return canvas.save(figure, folder, name, header, numbers)


def site_boxes(
    runs_results: Mapping[str, Rows],
    metric: str,
    folder: str | os.PathLike[str],
    name: str = "site_boxes",
    sites: Sequence[str] | None = None,
    split: str = "test",
) -> Path:
    """Boxes per site and method over folds and seeds, every (fold, seed) a point; rows of one round (the last)."""
    kept = {m: [r for r in rows if r["metric"] == metric and r["split"] == split] for m, rows in runs_results.items()}
    sites = _sites(kept, sites, metric, split)
    figure = canvas.figure(min(16.0, max(7.0, 1.2 + len(sites) * (0.4 + 0.2 * len(kept)))), 4.8)
    axis = figure.subplots()
    width = 0.8 / len(kept)
    numbers, n = [], 0
    for index, (method, rows) in enumerate(kept.items()):
        colour = canvas.style(index)["color"]
        face = {
            "facecolor": to_rgba(colour, 0.35),
            "edgecolor": colour,
            "hatch": canvas.HATCHES[index // len(canvas.COLOURS) % 4],
        }
        axis.fill([math.nan], [math.nan], label=method, **face)  # draws nothing: for the legend only
        found = values_of(rows, metric, split)
        for place, site in enumerate(sites):
            at = place + (index - (len(kept) - 1) / 2) * width
            named = [
                (fold, seed, v[site]) for (fold, seed), v in found.items() if not math.isnan(v.get(site, math.nan))
            ]
            numbers += [(method, site, fold, seed, value) for fold, seed, value in named]
            values = [value for *_, value in named]
            n = max(n, len(values))
            if not values:
                continue
            line = {"color": colour, "linewidth": 1.2}
            axis.boxplot(
                [values],
                positions=[at],
                widths=width * 0.8,
                patch_artist=True,
                showfliers=False,
                boxprops=face,
                medianprops={"color": colour, "linewidth": 2},
                whiskerprops=line,
                capprops=line,
            )
            axis.plot(np.full(len(values), at), values, ".", color=colour, markersize=3)
    names = [canvas.short(site, 24) for site in sites]
    each = 10 * figure.get_figwidth() / len(sites)  # so many letters have room below a site
    flat = max(map(len, names)) <= each
    turned: dict[str, Any] = {} if flat else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(len(sites)), names, **turned)
    axis.set(xlabel="Site", ylabel=metric, xlim=(-0.6, len(sites) - 0.4))
    axis.set_title(f"{metric} on the {split} folds per site\nbox: quartiles over folds and seeds, n ≤ {n}")
    axis.grid(axis="y", alpha=0.25)
    canvas.legend(figure, axis)
    return canvas.save(figure, folder, name, ("method", "site", "fold", "seed", metric), numbers)


def cross_site_matrix(
    matrix: Any,
    labels: Sequence[str],
    folder: str | os.PathLike[str],
    name: str = "cross_site",
    metric: str = "accuracy",
) -> Path:
    """Heat map [trained on, tested on] of a mean metric; a NaN (the diagonal) prints as '-'."""
    matrix = np.asarray(matrix, float)
    size = max(4.5, 2.4 + (0.75 if len(labels) <= 8 else 0.5) * len(labels))
    title = f"{metric} of models trained on one site"
    return _heat(matrix, labels, labels, ("Tested on", "Trained on", metric), title, size, folder, name)


def sweep_map(
    c: Sequence[float],
    gamma: Sequence[float],
    values: Any,
    folder: str | os.PathLike[str],
    name: str = "sweep",
    metric: str = "accuracy",
    title: str = "Hyperbolic aggregation: curvature c and scale gamma",
) -> Path:
    """Heat map of values [len(c), len(gamma)]; a NaN (a run that is missing) prints as '-'."""
    rows, columns = [f"{v:g}" for v in c], [f"{v:g}" for v in gamma]
    size = max(5.0, 2.6 + 0.75 * max(len(rows), len(columns)))
    return _heat(np.asarray(values, float), rows, columns, ("gamma", "c", metric), title, size, folder, name)


def sweep_curve(
    x: Sequence[float],
    ys: Mapping[str, Sequence[float]],
    folder: str | os.PathLike[str],
    name: str = "sweep_curve",
    x_label: str = "c",
    y_label: str = "accuracy",
    spreads: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
    log_x: bool = True,
) -> Path:
    """One line per key of ys over x, with error bars where `spreads` has some (one sample standard deviation)."""
    figure = canvas.figure(6.5, 4.2)
    axis = figure.subplots()
    numbers = []
    for index, (label, y) in enumerate(ys.items()):
        spread = (spreads or {}).get(label)
        axis.errorbar(x, y, yerr=spread, label=label, marker="o", markersize=4, capsize=3, **canvas.style(index))
        numbers += [(label, a, b, s) for a, b, s in zip(x, y, spread or [math.nan] * len(x))]
    if log_x:
        axis.set_xscale("log")
        axis.set_xticks(list(x), [f"{v:g}" for v in x])
        axis.minorticks_off()
    bars = " (bars: ± one std)" if spreads else ""
    axis.set(xlabel=x_label, ylabel=y_label, title=f"{title or f'{y_label} over {x_label}'}{bars}")
    axis.grid(alpha=0.25)
    canvas.legend(figure, axis)
    return canvas.save(figure, folder, name, ("line", x_label, y_label, "std"), numbers)


def update_norms(
    rows: Rows,
    folder: str | os.PathLike[str],
    name: str = "update_norms",
    title: str = "",
    sites: Sequence[str] | None = None,
) -> Path:
    """L2 norms of the clients' updates over rounds, one line per site, log axis.

    The spread between clients within a round is what the discussion of FedHAvg names as the likely reason why
    aggregating updates does worse than aggregating weights. Needs rows of split 'train', metric 'update_norm'.
    """
    kept = [r for r in rows if r["split"] == "train" and r["metric"] == "update_norm"]
    sites = _sites({"": kept}, sites, "update_norm", "train")
    figure = canvas.figure(7.5, 4.4)
    axis = figure.subplots()
    numbers, n = [], 0
    for index, site in enumerate(sites):
        by_round: dict[int, list[float]] = {}
        for row in kept:
            if row["site"] == site:
                by_round.setdefault(int(row["round"]), []).append(float(row["value"]))
        cells = {t: summarise(v) for t, v in sorted(by_round.items())}
        numbers += [(site, t, c.mean, c.std, c.n) for t, c in cells.items()]
        n = max([n, *(c.n or 0 for c in cells.values())])
        mean = np.array([c.mean for c in cells.values()])
        spread = np.array([c.std or 0.0 for c in cells.values()])
        style = canvas.style(index)
        marker = "o" if len(cells) == 1 else None
        axis.plot(list(cells), mean, label=canvas.short(site), marker=marker, linewidth=1.5, **style)
        low = np.maximum(mean - spread, mean / 10)  # a band that reaches zero would fill the whole log axis
        axis.fill_between(list(cells), low, mean + spread, color=style["color"], alpha=0.12, linewidth=0)
    if any(mean is not None and mean > 0 for _, _, mean, *_ in numbers):
        axis.set_yscale("log")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="Round", ylabel="L2 norm of the update (no unit)")
    axis.set_title(
        f"{title or 'Norm of the clients’ updates'}\nline: mean over folds and seeds, n ≤ {n}; band: ± one std"
    )
    axis.grid(alpha=0.25, which="both")
    canvas.legend(figure, axis)
    return canvas.save(figure, folder, name, ("site", "round", "mean", "std", "n"), numbers)


def participation(
    rows: Rows,
    folder: str | os.PathLike[str],
    name: str = "participation",
    metric: str = "update_norm",
    sites: Sequence[str] | None = None,
) -> Path:
    """Map site x round of who trained: the share of folds and seeds in which the site was in the cohort.

    Args:
      rows: a site trained in a round where it has a row of split 'train' and this metric, whatever the value.
      sites: default those in the rows; give all of them to show a site that never trained.
    """
    kept = [r for r in rows if r["split"] == "train" and r["metric"] == metric]
    sites = _sites({"": kept}, sites, metric, "train")
    rounds = list(range(min(int(r["round"]) for r in kept), max(int(r["round"]) for r in kept) + 1))
    replicas = len({(r["fold"], r["seed"]) for r in kept})
    share = np.zeros((len(sites), len(rounds)))
    for site, round, *_ in {(r["site"], int(r["round"]), r["fold"], r["seed"]) for r in kept}:
        if site in sites:
            share[sites.index(site), round - rounds[0]] += 1 / replicas
    figure = canvas.figure(8.0, max(2.6, 1.6 + 0.28 * len(sites)))
    axis = figure.subplots()
    extent = (rounds[0] - 0.5, rounds[-1] + 0.5, len(sites) - 0.5, -0.5)
    image = axis.imshow(share, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest", extent=extent)
    counts = [f"{v:g} round{'' if v == 1 else 's'}" for v in np.round(share.sum(axis=1), 1)]
    axis.set_yticks(range(len(sites)), [f"{canvas.short(s, 32)} ({count})" for s, count in zip(sites, counts)])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="Round", ylabel="Site", title=f"Who trained in which round (n = {replicas} folds x seeds)")
    figure.colorbar(image, ax=axis, label="share of folds and seeds")
    numbers = [(s, t, share[i, j]) for i, s in enumerate(sites) for j, t in enumerate(rounds)]
    return canvas.save(figure, folder, name, ("site", "round", "share"), numbers)


def _heat(
    matrix: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    words: tuple[str, str, str],
    title: str,
    size: float,
    folder: str | os.PathLike[str],
    name: str,
) -> Path:
    """words: label of the x axis, of the y axis, of the values."""
    if matrix.shape != (len(rows), len(columns)):
        raise ValueError(f"a matrix of shape {matrix.shape} for {len(rows)} row and {len(columns)} column labels")
    x_label, y_label, value = words
    figure = canvas.figure(size + 1.0, size * len(rows) / max(len(rows), len(columns)) + 0.8)
    axis = figure.subplots()
    image = axis.imshow(matrix, cmap="cividis", aspect="auto")
    axis.set_xticks(range(len(columns)), columns, rotation=45 if len(columns) > 8 else 0)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel=x_label, ylabel=y_label, title=title)
    middle = np.nanmean([np.nanmin(matrix), np.nanmax(matrix)]) if np.isfinite(matrix).any() else 0.0
    for i, j in np.ndindex(matrix.shape) if max(matrix.shape) <= _PRINTED_TICKS else ():
        number = matrix[i, j]
        colour = "black" if math.isnan(number) or number > middle else "white"
        text = "-" if math.isnan(number) else f"{number:.3f}"
        axis.text(j, i, text, ha="center", va="center", color=colour, fontsize=10 if len(columns) <= 8 else 7)
    figure.colorbar(image, ax=axis, label=value)
    numbers = [(r, c, matrix[i, j]) for i, r in enumerate(rows) for j, c in enumerate(columns)]
    return canvas.save(figure, folder, name, (y_label, x_label, value), numbers)


def _sites(kept: Mapping[str, list[Any]], sites: Sequence[str] | None, metric: str, split: str) -> list[str]:
    found = list(dict.fromkeys(row["site"] for rows in kept.values() for row in rows))
    if not found:
        raise UserError(f"figure: no row with metric {metric!r} in split {split!r}")
    return list(sites) if sites is not None else found
