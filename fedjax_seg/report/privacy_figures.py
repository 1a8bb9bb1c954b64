"""Figures of attacks and of what privacy costs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedjax_seg.report import canvas

SMALLEST_RATE = 1e-3  # left end of the logarithmic axes


def roc(
    curves: Mapping[str, tuple[Any, Any]], folder: str | os.PathLike[str], name: str = "roc", note: str = ""
) -> Path:
    """ROC curves with linear and with logarithmic axes: how many members are found at few false alarms.

    Args:
      curves: {name: (false positive rates, true positive rates)}, each from (0, 0) to (1, 1).
    """
    chart = canvas.figure(8.6, 4.6)
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
    for axis in (plain, log):
        axis.plot([SMALLEST_RATE, 1], [SMALLEST_RATE, 1], color="#999999", linewidth=0.8)
        axis.set(xlabel="False positive rate (non-members called members)", ylabel="True positive rate")
        axis.grid(alpha=0.25)
    plain.set_title("linear axes")
    log.set(xscale="log", yscale="log", xlim=(SMALLEST_RATE, 1), ylim=(SMALLEST_RATE, 1.05), title="logarithmic axes")
    chart.suptitle(f"Membership inference; grey: guessing. {note}".strip(), fontsize=11)
    canvas.legend(chart, plain)
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
