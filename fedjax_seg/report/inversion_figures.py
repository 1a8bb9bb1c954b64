"""What gradient inversion recovered: the images beside the originals, and a chart of how good they are."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedjax_seg.report import canvas

NAME = "inversion_images"
ACROSS = 6  # pictures in a line
_LETTERS = 22  # of a line above a picture
GUESS, TRUTH = "baseline", "truth"
RECOVERED, FAILED, LINE = canvas.COLOURS[5], canvas.COLOURS[4], canvas.COLOURS[7]


def images(
    rows: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, np.ndarray],
    better: float,
    folder: str | os.PathLike[str],
    name: str = NAME,
) -> Path:
    """Every attacked image: the original, the guess without a gradient, and what came back in every scenario.

    Args:
      rows: of the attack (attacks.inversion_rows.row).
      pictures: 'truth' [n, H, W, C], 'baseline' [H, W, C] and, for every scenario, [m, H, W, C] in the order of the
        originals, as far as it has them; values from 0 to 1.
      better: dB above the guess from which a picture counts as recovered; its frame is then drawn in another colour.

    Returns: the path of the PNG; its CSV has the PSNR below every picture.
    """
    truth, guess = np.asarray(pictures[TRUTH]), np.asarray(pictures[GUESS])
    numbers: list[tuple[Any, ...]] = []
    panels: list[tuple[str, np.ndarray, str, str]] = []
    for i, original in enumerate(truth):
        base = _psnr(guess, original)
        line = [("original", original, "a training image", "#333333")]
        line.append(("guess without a gradient: mean of public images", guess, f"{base:.1f} dB", LINE))
        numbers.append((i, GUESS, base))
        for row in rows:
            mine = pictures.get(row["scenario"], ())
            if i >= len(mine):
                continue
            value = row["each"][i]
            colour = RECOVERED if value > base + better else FAILED
            line.append((row["words"], mine[i], f"{value:.1f} dB", colour))
            numbers.append((i, row["scenario"], value))
        blank = -len(line) % ACROSS if i < len(truth) - 1 else 0
        panels += line + [("", np.zeros(0), "", "")] * blank
    down = -(-len(panels) // ACROSS)
    chart = canvas.figure(1.75 * ACROSS + 0.2, 2.35 * down + 0.9)
    axes = chart.subplots(down, ACROSS, squeeze=False).ravel()
    for axis, panel in zip(axes, panels):
        _picture(axis, *panel)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    chart.suptitle("What can be computed from what leaves the hospital?", fontsize=12)
    looks = ((RECOVERED, f"recovered: {better:g} dB better than the guess"), (FAILED, "not recovered"))
    handles = [Line2D([], [], color=c, linewidth=3, label=text) for c, text in looks]
    chart.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return canvas.save(chart, folder, name, ("image", "scenario", "psnr_db"), numbers)


def _psnr(image: np.ndarray, truth: np.ndarray) -> float:
    return float(-10 * np.log10(max(float(np.mean(np.square(image - truth))), 1e-20)))


def _picture(axis: Axes, words: str, image: np.ndarray, below: str, colour: str) -> None:
    axis.set(xticks=[], yticks=[])
    if not image.size:
        axis.set_axis_off()
        return
    shown = np.clip(image if image.shape[-1] == 3 else image[..., 0], 0, 1)
    axis.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_title("\n".join(textwrap.wrap(words, _LETTERS)), fontsize=8, verticalalignment="bottom")
    axis.set_xlabel(below, fontsize=9)
    for side in axis.spines.values():
        side.set(color=colour, linewidth=2.5)


def chart(
    rows: Sequence[Mapping[str, Any]],
    better: float,
    folder: str | os.PathLike[str],
    name: str = "inversion_psnr",
) -> Path:
    """PSNR of every scenario: a dot per image, their mean, and the guess for the same images. Higher is more of a leak.

    Args: as of `images`.
    """
    figure = canvas.figure(8.2, 1.5 + 0.42 * len(rows))
    axis = figure.subplots()
    for place, row in enumerate(rows):
        leak = row["psnr"] > row["baseline"] + better
        axis.plot(row["each"], [place] * len(row["each"]), "o", color=LINE, markersize=4, alpha=0.7)
        axis.plot([row["psnr"]], [place], "D", color=RECOVERED if leak else FAILED, markersize=8)
        axis.plot([row["baseline"]] * 2, [place - 0.35, place + 0.35], "-", color="black", linewidth=2)
        axis.plot([row["baseline"] + better] * 2, [place - 0.35, place + 0.35], ":", color="black", linewidth=1.5)
    axis.set_yticks(range(len(rows)), [row["words"] for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel("PSNR of the recovered image (dB)")
    axis.grid(axis="x", alpha=0.25)
    marks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mean: recovered", {"marker": "D", "color": RECOVERED, "linestyle": "none"}),
        ("mean: not recovered", {"marker": "D", "color": FAILED, "linestyle": "none"}),
        ("one image", {"marker": "o", "color": LINE, "linestyle": "none", "markersize": 4}),
        ("guess without a gradient", {"color": "black", "linewidth": 2}),
        (f"guess + {better:g} dB", {"color": "black", "linewidth": 1.5, "linestyle": ":"}),
    )
    handles = [Line2D([], [], label=text, **look) for text, look in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    numbers = [(row["scenario"], i, x, row["baseline"]) for row in rows for i, x in enumerate(row["each"])]
    return canvas.save(figure, folder, name, ("scenario", "image", "psnr_db", "baseline_mean_db"), numbers)
