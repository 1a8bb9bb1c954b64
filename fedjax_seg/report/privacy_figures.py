"""Figures of attacks and of what privacy costs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from fedjax_seg.report import canvas

SMALLEST_RATE = 1e-3  # left end of the logarithmic axes
_LINE_COLOURS = (*canvas.COLOURS[1:7], "#5D3A9B", "#7A4A1E")  # black is what has no privacy


def roc(
    curves: Mapping[str, tuple[Any, Any]],
    folder: str | os.PathLike[str],
    name: str = "roc",
    note: str = "",
    ceiling: tuple[Any, Any] | None = None,
    ceiling_name: str = "ceiling of the guarantee",
) -> Path:
    """ROC curves with linear and with logarithmic axes: how many members are found at few false alarms.

    Args:
      curves: {name: (false positive rates, true positive rates)}, each from (0, 0) to (1, 1).
      ceiling: (false, true positive rates) that no attack may exceed if the guarantee holds; dashed.
    """
    chart = canvas.figure(8.6, 4.6 if len(curves) < 5 else 5.0)
    plain, log = chart.subplots(1, 2)
    numbers = []
    for index, (label, (false, true)) in enumerate(curves.items()):
        numbers += [(label, a, b) for a, b in zip(false, true)]
        plain.plot(false, true, label=label, drawstyle="steps-post", **canvas.style(index))
        kept = np.asarray(true) > 0
        log.plot(
            np.maximum(np.asarray(false)[kept], SMALLEST_RATE),
            np.asarray(true)[kept],
            drawstyle="steps-post",
            **canvas.style(index),
        )
    if ceiling is not None:
        numbers += [(ceiling_name, a, b) for a, b in zip(*ceiling)]
        false, true = (np.asarray(side, float) for side in ceiling)
        look: dict[str, Any] = {"color": "#B00020", "linestyle": (0, (6, 3)), "linewidth": 1.4, "zorder": 1}
        plain.plot(false, true, label=ceiling_name, **look)
        plain.fill_between(false, true, 1, color="#B00020", alpha=0.06, linewidth=0)
        fine = np.geomspace(SMALLEST_RATE, 1, 200)
        log.plot(fine, np.interp(fine, false, true), **look)
        log.fill_between(fine, np.interp(fine, false, true), 1.05, color="#B00020", alpha=0.06, linewidth=0)
    for axis in (plain, log):
        axis.plot([SMALLEST_RATE, 1], [SMALLEST_RATE, 1], color="#999999", linewidth=0.8)
        axis.set(xlabel="False positive rate (non-members called members)", ylabel="True positive rate")
        axis.grid(alpha=0.25)
    plain.set_title("linear axes")
    log.set(xscale="log", yscale="log", xlim=(SMALLEST_RATE, 1), ylim=(SMALLEST_RATE, 1.05), title="logarithmic axes")
    chart.suptitle(f"Membership inference; grey: guessing. {note}".strip(), fontsize=11)
    handles, labels = plain.get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False, handlelength=3)
    return canvas.save(chart, folder, name, ("attack", "false_positive_rate", "true_positive_rate"), numbers)


def auc_by_round(
    curves: Mapping[str, Sequence[tuple[int, float, float, int]]],
    folder: str | os.PathLike[str],
    name: str = "attack_auc",
) -> Path:
    """Attack AUC over rounds. curves: {attack: rows (round, mean, std over replicas or NaN, replicas)}."""
    chart = canvas.figure(6.5, 4.2)
    axis = chart.subplots()
    numbers, n = [], 0
    for index, (label, rows) in enumerate(curves.items()):
        numbers += [(label, *row) for row in rows]
        rounds, mean, std, count = (np.array(column, float) for column in zip(*rows))
        spread, look = np.nan_to_num(std), canvas.style(index)
        n = max(n, int(count.max()))
        axis.plot(rounds, mean, label=label, marker="o", markersize=3, **look)
        axis.fill_between(rounds, mean - spread, mean + spread, color=look["color"], alpha=0.12, linewidth=0)
    axis.axhline(0.5, color="#999999", linewidth=0.8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="Round", ylabel="AUC of membership inference")
    axis.set_title(
        f"Attack on the model of every evaluated round; grey: guessing\nmean over n ≤ {n} replicas, band: ± one std"
    )
    axis.grid(alpha=0.25)
    canvas.legend(chart, axis)
    return canvas.save(chart, folder, name, ("attack", "round", "mean", "std", "replicas"), numbers)


def privacy_utility(
    points: Mapping[str, tuple[float, float, float, float]],
    folder: str | os.PathLike[str],
    name: str = "privacy_utility",
    x_label: str = "AUC of membership inference",
    y_label: str = "Dice",
) -> Path:
    """One point per method. points: {method: (x, std of x, y, std of y)}; a NaN std has no bar."""
    chart = canvas.figure(6.2, 4.6)
    axis = chart.subplots()
    for index, (label, (x, dx, y, dy)) in enumerate(points.items()):
        bars: dict[str, Any] = {"xerr": None if np.isnan(dx) else dx, "yerr": None if np.isnan(dy) else dy}
        look = canvas.style(index) | {"linestyle": "none"}
        axis.errorbar([x], [y], **bars, label=label, marker="osD^vP*X"[index % 8], markersize=7, capsize=3, **look)
    axis.axvline(0.5, color="#999999", linewidth=0.8)
    axis.set(xlabel=x_label, ylabel=y_label, title="Privacy against utility; bars: one standard deviation over seeds")
    axis.grid(alpha=0.25)
    canvas.legend(chart, axis)
    rows = [(label, *values) for label, values in points.items()]
    return canvas.save(chart, folder, name, ("method", x_label, "std", y_label, "std "), rows)


def ledger(
    per_round: Sequence[tuple[int, float]],
    curve: Sequence[tuple[float, float]],
    folder: str | os.PathLike[str],
    name: str = "privacy_ledger",
    *,
    claimed: tuple[float, float] | None = None,
    unit: str = "unit",
) -> Path | None:
    """How epsilon grew over the rounds, and what epsilon is at other deltas; None where neither has a finite value.

    Args:
      per_round: (round, epsilon of all rounds up to it at the run's delta).
      curve: (delta, epsilon of the whole run).
      claimed: (epsilon, delta) of the run, marked in both panels.
    """
    grown = [(t, e) for t, e in per_round if np.isfinite(e)]
    traded = sorted((d, e) for d, e in curve if np.isfinite(e) and d > 0)
    shown = [panel for panel, rows in (("round", grown), ("delta", traded)) if rows]
    if not shown:
        return None
    chart = canvas.figure(4.3 * len(shown) + 0.2, 3.7)
    colour = canvas.COLOURS[4]
    for panel, axis in zip(shown, np.atleast_1d(chart.subplots(1, len(shown)))):
        rows = grown if panel == "round" else traded
        x, y = (np.array(side, float) for side in zip(*rows))
        axis.plot(x, y, color=colour, marker="o" if len(rows) < 30 else None, markersize=3, linewidth=1.6)
        axis.set_ylim(0, float(y.max()) * 1.12 or 1)
        axis.grid(alpha=0.25)
        if panel == "round":
            at = "" if claimed is None else f" at δ = {claimed[1]:g}"
            axis.set(xlabel="Rounds so far", ylabel=f"ε{at}", title="Spent over the rounds", xlim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set(xlabel="δ (logarithmic)", ylabel="ε of the whole run", title="The same run at other δ")
            axis.set_xscale("log")
        if claimed is not None:
            place = (float(x[-1]) if panel == "round" else claimed[1], claimed[0])
            axis.plot(*place, "D", color=canvas.COLOURS[5], markersize=7, zorder=3)
            aside: Any = (4, -30) if panel == "round" else (9, 5)
            axis.annotate(
                f"ε = {claimed[0]:.3g}", place, xytext=aside, textcoords="offset points", fontsize=9,
                ha="right" if panel == "round" else "left", color=canvas.COLOURS[5],
            )  # fmt: skip
    chart.suptitle(f"Privacy loss of one {unit}; diamond: what the run claims", fontsize=11)
    numbers = [("round", *row) for row in grown] + [("delta", *row) for row in traded]
    return canvas.save(chart, folder, name, ("x_is", "x", "epsilon"), numbers)


def audits(
    rows: Sequence[tuple[str, float, float]], folder: str | os.PathLike[str], name: str = "privacy_audit"
) -> Path:
    """What canaries show against what is claimed: a bar from 0 to the lower bound, and the claim as a mark.

    Args:
      rows: (name, lower bound of epsilon, claimed epsilon; infinite = no claim, no mark).
    """
    chart = canvas.figure(7.4, 1.5 + 0.42 * len(rows))
    axis = chart.subplots()
    places = np.arange(len(rows))[::-1]
    for place, (_, low, claim) in zip(places, rows):
        broken = low > claim
        colour = canvas.COLOURS[5] if broken else canvas.COLOURS[4]
        axis.barh(place, low, height=0.55, color=colour, hatch="////" if broken else None, edgecolor="white")
        axis.text(low, place, f" {low:.2f}", va="center", fontsize=9, color=colour, fontweight="bold")
        if np.isfinite(claim):
            axis.plot([claim, claim], [place - 0.38, place + 0.38], color="#000000", linewidth=2.2)
    axis.set_yticks(places, [canvas.short(label, 44) for label, _, _ in rows])
    largest = max([low for _, low, _ in rows] + [c for _, _, c in rows if np.isfinite(c)] + [0.1])
    axis.set(
        xlabel="ε; bar: shown with confidence by an attack on canaries, black mark: claimed", xlim=(0, largest * 1.12)
    )
    axis.set_title("A bar beyond its mark (hatched) refutes the claim", fontsize=11)
    axis.grid(axis="x", alpha=0.25)
    return canvas.save(chart, folder, name, ("audit", "epsilon_low", "epsilon_claimed"), rows)


def utility_panels(
    panels: Mapping[str, tuple[Mapping[str, Sequence[tuple[float, float, float]]], Mapping[str, tuple[float, float]]]],
    folder: str | os.PathLike[str],
    name: str = "trade_off",
    *,
    y_label: str = "accuracy",
    delta: float | None = None,
) -> Path:
    """Utility over the epsilon of the whole run: a panel per group, a line per method, the same colours in all.

    Args:
      panels: {group: ({method: (epsilon, mean, std or NaN)}, {method without a mechanism: (mean, std or NaN)})}.
      delta: of all the epsilons; None = not printed.
    """
    methods = list(dict.fromkeys(m for lines, _ in panels.values() for m in lines))
    plain = list(dict.fromkeys(m for _, lines in panels.values() for m in lines))
    across = min(len(panels), canvas.PANELS_ACROSS)
    down = -(-len(panels) // across)
    chart = canvas.figure(max(6.5, 4.0 * across), 1.7 + 3.1 * down)
    axes = np.atleast_1d(chart.subplots(down, across, squeeze=False, sharey=True)).ravel()
    numbers: list[tuple[Any, ...]] = []
    handles: dict[str, Any] = {}
    for axis, (group, (lines, flat)) in zip(axes, panels.items()):
        handles |= _panel(axis, lines, flat, methods, plain)
        numbers += [(group, label, np.inf, *cell) for label, cell in flat.items()]
        numbers += [(group, label, *p) for label, points in lines.items() for p in sorted(points)]
        axis.set(title=group, xlabel="ε of the whole run")
        axis.set_ylabel(y_label if axis in axes[::across] else "")
        axis.grid(alpha=0.25)
    for unused in axes[len(panels) :]:
        unused.remove()
    tail = "" if delta is None else f" (δ = {delta:g})"
    chart.suptitle(f"What a privacy budget{tail} costs; bars and bands: ± one std over folds and seeds", fontsize=11)
    names = [*(m for m in plain if m in handles), *(m for m in methods if m in handles)]
    labels = [f"{m} (no privacy)" if m in plain else m for m in names]
    columns = max(1, int(chart.get_figwidth() // 2.6))
    chart.legend([handles[m] for m in names], labels, loc="outside lower center", ncols=columns, frameon=False)
    return canvas.save(chart, folder, name, ("group", "method", "epsilon", y_label, "std"), numbers)


def _panel(
    axis: Axes,
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    flat: Mapping[str, tuple[float, float]],
    methods: Sequence[str],
    plain: Sequence[str],
) -> dict[str, Any]:
    """Draws one group of `utility_panels`; {method: its handle for the legend}."""
    handles: dict[str, Any] = {}
    for label, (mean, std) in flat.items():
        colour, half = ("#000000", "#777777")[plain.index(label) % 2], float(np.nan_to_num(std))
        handles[label] = axis.axhline(mean, color=colour, linewidth=1.3, linestyle="--", zorder=1)
        axis.axhspan(mean - half, mean + half, color=colour, alpha=0.08, linewidth=0)
    for label, points in lines.items():
        index = methods.index(label)
        x, y, spread = (np.array(side, float) for side in zip(*sorted(points)))
        look = {"color": _LINE_COLOURS[index % len(_LINE_COLOURS)], "linestyle": canvas.style(index)["linestyle"]}
        aside = x * 1.03 ** (index - (len(methods) - 1) / 2)  # bars of methods at one epsilon would cover each other
        bars = None if np.isnan(spread).all() else np.nan_to_num(spread)
        look |= {
            "marker": "osD^vP*X<>h"[index % 11],
            "markersize": 5,
            "capsize": 2,
            "linewidth": 1.5,
            "elinewidth": 0.9,
        }
        handles[label] = axis.errorbar(aside, y, yerr=bars, **look)
    axis.set_xscale("log")
    ticks = sorted({float(f"{p[0]:.2g}") for points in lines.values() for p in points})
    if 1 < len(ticks) <= 8 and ticks[-1] / ticks[0] < 1e3:
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    return handles
