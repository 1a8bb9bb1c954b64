"""Does a generator repeat its training slices? Distances to the nearest, compared with those of new real slices."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedjax_seg.core import checks
from fedjax_seg.synthesis import contact_sheet
from fedjax_seg.synthesis.storage import write_whole

SIDE = 16  # pixels per side that are compared
QUANTILE = 0.01  # of the reference distances
REPEATED = 1 / 3  # a copy is so much nearer to its original than to the next slice
SIGNIFICANT = 0.01
_PAIRS = 6
_ROWS = 256  # compared at a time


class Nearest(NamedTuple):
    """For each slice [n]: distance to the nearest training slice, its row, and the nearest one of another patient."""

    distance: np.ndarray
    row: np.ndarray
    second: np.ndarray

    @property
    def copies(self) -> np.ndarray:
        """bool [n]: much nearer to one training slice than to any of other patients."""
        return self.distance < REPEATED * self.second


class Memorisation(NamedTuple):
    """What `check` found.

    Attributes:
      samples, reference: nearest training slices of the samples and of the real slices they are compared with.
      threshold: the reference distance that about 1 % of the reference slices are below.
      nearer: share of the samples below it.
      p: chance that so many samples lie below it if they are as new as the reference slices.
      ratio: median distance of the samples over that of the reference.
      copies, reference_copies: shares of slices three times nearer to one training slice than to any other patient's.
      copies_p: chance of so many among the samples rather than the reference (Fisher's exact test).
      clear: number of such samples that are also three times nearer than the nearest reference slice.
      verdict: all that in words.
    """

    samples: Nearest
    reference: Nearest
    threshold: float
    nearer: float
    p: float
    ratio: float
    copies: float
    reference_copies: float
    copies_p: float
    clear: int
    verdict: str
    pairs: np.ndarray  # [2, pairs, H, W]; the samples nearest to a training slice, and those slices


def check(
    samples: np.ndarray, training: np.ndarray, held_out: np.ndarray, *, patients: Sequence[str] = ()
) -> Memorisation:
    """Compares samples with training slices.

    Slices are averaged over blocks of pixels to 16 per side, so that neither noise nor a shift by a pixel hides a copy.
    The distance of two is the root mean square of their difference (1 = half of the window).

    Two signs, since one alone misleads:
    * More samples than chance allows lie nearer to training than the nearest 1 % of real slices that were held out.
      If samples are as new as those, any order of the two groups is equally likely, and the number of m samples below
      the k-th smallest of n reference distances is beta-binomial (m, k, n + 1 - k): `p` is its upper tail. Samples
      that are smoother than real slices lie nearer to everything, without any copy among them.
    * Copies: a sample three times nearer to one training slice than to all those of other patients (Yoon et al. 2023,
      "Diffusion probabilistic models generalize when they fail to memorize": nearest against second nearest).
      Whatever makes samples smooth moves both distances. They are called copies where there are significantly more
      of them than among the reference slices, or where one is three times nearer than any reference slice.

    Args:
      samples, training, held_out: float [n, H, W, 1] in [-1, 1], of one size. Without held-out slices the reference is
        the training slices, each compared with those of other patients.
      patients: of the training slices; () = each slice is of its own.

    Raises: UserError where there are fewer than two patients to compare with.
    """
    patients = list(patients) or [str(i) for i in range(len(training))]
    if len(set(patients)) < 2 + (len(held_out) == 0):
        raise checks.UserError(
            f"memorisation: {len(set(patients))} training patient(s); more are needed to compare with"
        )
    _, person = np.unique(patients, return_inverse=True)
    small = [_reduced(x) for x in (samples, training, held_out)]
    own = nearest(small[0], small[1], person)
    if len(held_out):
        kind, reference = "held-out slices", nearest(small[2], small[1], person)
    else:
        kind, reference = "training slices of other patients", nearest(small[1], small[1], person, person)
    n, m = len(reference.distance), len(own.distance)
    k = math.ceil(QUANTILE * n)
    threshold = float(np.sort(reference.distance)[k - 1])
    count = int(np.sum(own.distance < threshold))
    p = float(stats.betabinom(m, k, n + 1 - k).sf(count - 1))
    ratio = float(np.median(own.distance) / max(np.median(reference.distance), 1e-12))
    found, usual = int(own.copies.sum()), int(reference.copies.sum())
    copies_p = float(stats.fisher_exact([[found, m - found], [usual, n - usual]], alternative="greater").pvalue)
    clear = int(np.sum(own.copies & (own.distance < REPEATED * reference.distance.min())))
    closest = np.argsort(own.distance / np.maximum(own.second, 1e-12))[:_PAIRS]
    facts = (
        f"median distance to the nearest training slice {ratio:.2f} times that of {n} {kind};"
        f" {count} of {m} samples ({count / m:.1%}) nearer than the nearest 1 % of those (p = {p:.2g});"
        f" {found} ({found / m:.1%}) three times nearer to one slice than to any other patient's"
        f" (of the {kind}: {usual / n:.1%}, p = {copies_p:.2g})"
    )
    return Memorisation(
        samples=own,
        reference=reference,
        threshold=threshold,
        nearer=count / m,
        p=p,
        ratio=ratio,
        copies=found / m,
        reference_copies=usual / n,
        copies_p=copies_p,
        clear=clear,
        verdict=f"memorisation: {_verdict(p, copies_p, clear)}: {facts}",
        pairs=np.stack([samples[closest, ..., 0], training[own.row[closest], ..., 0]]),
    )


def _verdict(p: float, copies_p: float, clear: int) -> str:
    if copies_p < SIGNIFICANT or clear:
        return "COPIES of training slices are likely"
    if p < SIGNIFICANT:
        return "nearer to training than new slices are, but no copies (too smooth, or overfit)"
    return "no sign of it"


def _reduced(x: np.ndarray) -> np.ndarray:
    """[n, H, W, 1] -> [n, pixels]; means over blocks, at most so many that 16 per side remain."""
    if not len(x):
        return np.zeros((0, 1))
    n, h, w, _ = x.shape
    rows, columns = (max(f for f in range(1, max(1, side // SIDE) + 1) if side % f == 0) for side in (h, w))
    return x.reshape(n, h // rows, rows, w // columns, columns).mean((2, 4), dtype=np.float64).reshape(n, -1)


def nearest(x: np.ndarray, training: np.ndarray, person: np.ndarray, of: np.ndarray | None = None) -> Nearest:
    """Nearest rows of training [N, D] to each of x [n, D]; person [N].

    `of` [n]: the persons of x, where they are among those of training and must not be compared with themselves.
    """
    found = []
    for first in range(0, len(x), _ROWS):
        part = x[first : first + _ROWS]
        # As differences, not by the expanded square: a copy's distance of 0 must not drown in rounding.
        square = np.stack([np.mean(np.square(training - row), 1) for row in part])
        if of is not None:
            square[of[first : first + _ROWS, None] == person[None]] = np.inf
        row = square.argmin(1)
        best = square[np.arange(len(part)), row]
        square[person[row][:, None] == person[None]] = np.inf
        found.append((np.sqrt(best), row, np.sqrt(square.min(1))))
    return Nearest(*(np.concatenate(column) for column in zip(*found)))


def save(folder: Path, found: Memorisation, *, pairs: bool) -> Path:
    """Writes memorisation.json (the verdict), .csv (a row per slice) and .png.

    Args:
      pairs: whether the figure shows training slices beside the samples nearest to them; not for real patients.
    """
    numbers = {k: v for k, v in found._asdict().items() if isinstance(v, float | int | str)}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("group", "slice", "distance", "training_row", "distance_other_patient"))
    for group, own in (("sample", found.samples), ("reference", found.reference)):
        rows.writerows((group, i, f"{d:.6f}", r, f"{s:.6f}") for i, (d, r, s) in enumerate(zip(*own)))
    write_whole(folder / "memorisation.json", (json.dumps(numbers, indent=2, sort_keys=True) + "\n").encode())
    write_whole(folder / "memorisation.csv", text.getvalue().encode())
    return contact_sheet.save_figure(folder / "memorisation.png", _figure(found, pairs))


def _figure(found: Memorisation, pairs: bool) -> Any:
    chart = contact_sheet.figure(7.5, 5.6 if pairs else 3.2)
    if pairs:
        parts: Any = chart.subfigures(2, 1, height_ratios=(3, 2.4))
        above, below = parts
        panels = below.subplots(*found.pairs.shape[:2], squeeze=False)
        for axis, image in zip(panels.ravel(), found.pairs.reshape(-1, *found.pairs.shape[2:])):
            contact_sheet.show(axis, image)
        for axis, name in zip(panels[:, 0], ("sample", "nearest")):
            axis.set_ylabel(name, fontsize=8)
        axis = above.subplots()
    else:
        axis = chart.subplots()
    both = [found.reference.distance, found.samples.distance]
    edges = np.linspace(0, max(d.max() for d in both) * 1.02 + 1e-9, 41).tolist()
    for distance, name, colour in zip(both, ("slices of the data set (reference)", "samples"), ("#0072B2", "#D55E00")):
        weights = np.full(len(distance), 1 / len(distance))
        axis.hist(distance, edges, weights=weights, histtype="step", color=colour, label=name, linewidth=1.4)
    axis.axvline(found.threshold, color="#000000", linestyle=":", label="nearest 1 % of the reference")
    axis.set_xlabel(f"distance to the nearest training slice (RMS at {SIDE} pixels per side, 1 = half of the window)")
    axis.set_ylabel("share of slices")
    axis.legend(frameon=False)
    return chart
