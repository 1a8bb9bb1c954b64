"""The section of a run's report on gradient inversion, and the file that keeps its pictures."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.report import inversion_figures
from fedjax_seg.report.html import Section
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import Cell, Table
from fedjax_seg.report.writer import write_arrays

FILE = Path("attack") / "inversion.npz"


def keep(folder: Path, pictures: Mapping[str, np.ndarray], allowed: bool) -> None:
    """Saves the pictures of the attack in a run's folder where they may be shown; else removes those of an earlier one.

    Args:
      allowed: whether cases may be shown (report.pictures.allowed).
    """
    path = folder / FILE
    if not (pictures and allowed):
        drawn = [folder / "figures" / f"{inversion_figures.NAME}.{suffix}" for suffix in ("png", "csv")]
        for old in (path, *drawn):  # a report that was written when they were allowed
            old.unlink(missing_ok=True)
        return
    write_arrays(path, {key: np.asarray(x, np.float32) for key, x in pictures.items()})


def sections(run: Run, figures: Path) -> list[Section]:
    """'Gradient inversion' of a run that attacked itself with it; [] of others. Draws into `figures`."""
    told = run.summary.get("inversion")
    if not told:
        return []
    rows, drawn = told["rows"], []
    path = run.folder / FILE
    if path.is_file() and not told["formal"]:
        with np.load(path) as saved:
            pictures = {name: saved[name] for name in saved.files}
        drawn.append((inversion_figures.images(rows, pictures, told["better"], figures), _pictures_text(told)))
    drawn.append((inversion_figures.chart(rows, told["better"], figures), _chart_text(told)))
    return [Section("Gradient inversion", told["text"], [table(told)], drawn, remarks=_remarks(told))]


def table(told: Mapping[str, Any]) -> Table:
    """One row per scenario: what was seen, and what came of it."""
    base = told["baseline"]
    names = ("PSNR (dB)", "guess (dB)", "gain (dB)", "SSIM", "recovered", "Dice of masks", "cosine")
    cells = [tuple(Cell(x, text=_number(x, digits)) for x, digits in _numbers(row)) for row in told["rows"]]
    labels = tuple(row["words"] for row in told["rows"])
    first = (math.nan if base["psnr"] is None else base["psnr"], base["ssim"])
    guess = ((first[0], 1), (first[0], 1), (0.0, 1), (first[1], 2), (None, 2), (None, 2), (None, 3))
    cells.append(tuple(Cell(math.nan if x is None else x, text=_number(x, digits)) for x, digits in guess))
    caption = (
        f"What an attacker recovers of training images of {told['site']} ({told['model']} model); means over images."
        " PSNR: peak signal-to-noise ratio, the peak being the range of the data; guess: that of the mean of"
        f" {base['images']} public cases, for the same images; gain: the difference. SSIM: structural similarity, 1 ="
        f" the same. recovered: share of images more than {told['better']:g} dB better than the guess. Dice of masks:"
        " of annotations that the attacker did not know and recovered as well. cosine: of the gradient of what was"
        " found with the gradient that was seen: near 1, and yet a wrong image, means that gradients do not tell it."
    )
    columns = tuple(("", n) for n in names)
    return Table(caption, "What is seen", columns, (*labels, "no gradient: the guess"), tuple(cells), ("",) * 7)


def _numbers(row: Mapping[str, Any]) -> list[tuple[Any, int]]:
    gain = row["psnr"] - row["baseline"]
    found = [(row["psnr"], 1), (row["baseline"], 1), (gain, 1), (row["ssim"], 2), (row["above"], 2)]
    return [(math.nan if x is None else x, d) for x, d in [*found, (row["dice"], 2), (row["cosine"], 3)]]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _remarks(told: Mapping[str, Any]) -> str:
    """What the rows mean for those who read them."""
    rows = told["rows"]
    lines = []
    if any(row["scenario"] == "sum" for row in rows):
        lines.append("- A secure sum shows the sum to everybody: the fewer hospitals and images in it, the more.")
    if any(row["noise"] for row in rows):
        lines.append("- Rows with noise are one release of one image; noise that a guarantee needs is usually larger.")
    own = next((row for row in rows if row["scenario"] == "own"), None)
    if own:
        lines.append(f"- This run's own mechanism (noise multiplier {own['noise']:g}): {own['psnr']:.1f} dB.")
    right = next((row["labels_right"] for row in rows if row["labels_right"] is not None), None)
    if right is not None:
        lines.append(f"- Labels that were not known were found in {100 * right:.0f} % of the images.")
    if told["formal"]:
        lines.append("- No picture is shown: beside a privacy claim no patient's data without noise belongs here.")
    return "\n".join(lines)


def _pictures_text(told: Mapping[str, Any]) -> str:
    return (
        f"Images of {told['site']} and what an attacker recovers of them in every scenario; below each its PSNR. Where"
        " several images are in one message, the recovered one that is most like each original is shown."
    )


def _chart_text(told: Mapping[str, Any]) -> str:
    return (
        "How good the recovered images are. Left of the solid line an attacker would do better without any gradient;"
        f" right of the dotted one ({told['better']:g} dB more) an image counts as recovered."
    )
