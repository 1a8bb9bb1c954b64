"""Scores of whole volumes on the host: one case after the other becomes a row of numbers, and its masks go.

What comes from the device is small for a volume: class maps as bits (2 per voxel for 4 classes), a confusion matrix
and sums per plane. Regions (ET, TC, WT) are made of the class maps here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.tasks import overlap, surface

# Class ids in the order background, NCR, ED, ET, whatever the files' values are (1, 2, 4 or 1, 2, 3).
REGIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "classes": {},
    "brats": {"ET": (3,), "TC": (1, 3), "WT": (1, 2, 3)},
}
SMOOTH = 1e-7  # of GaNDLF's soft Dice


class Scoring(NamedTuple):
    """How volumes are scored.

    Attributes:
      rules: of the masks; they carry the masks' names.
      masks: the class ids of every mask.
      labels: the file value of every class, background first.
    """

    rules: overlap.Rules
    masks: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]


def scoring(regions: str, labels: tuple[int, ...], rules: overlap.Rules) -> Scoring:
    """The masks of `regions` under the rules, named by region or by the file value of their class.

    Args:
      regions: 'classes' (every foreground class by itself) or 'brats' (enhancing tumour, tumour core, whole tumour).
      labels: file values of the classes; () = the class ids.

    Raises: UserError.
    """
    checks.one_of("task.regions", regions, REGIONS)
    classes = rules.classes
    if regions == "brats" and classes != 4:
        raise checks.UserError(f"task.regions: 'brats' given for {classes} classes; model.classes=4 expected")
    labels = tuple(labels) or tuple(range(classes))
    if len(labels) != classes or len(set(labels)) != classes:
        raise checks.UserError(f"task.labels: {labels} given, {classes} different values, one per class, expected")
    masks = REGIONS[regions] or {str(labels[k]): (k,) for k in range(1, classes)}
    said = lambda ids: ", ".join(str(labels[k]) for k in ids)
    names = tuple((name, f"region {name} (labels {said(ids)})" if REGIONS[regions] else f"label {name}")
                  for name, ids in masks.items())  # fmt: skip
    return Scoring(rules._replace(names=names), tuple(masks.values()), labels)


def definitions(how: Scoring) -> dict[str, tuple[str, str]]:
    """{metric: (direction, definition)}."""
    soft = (
        "GaNDLF soft Dice, (2 sum p t + 1e-7) / (sum p + sum t + 1e-7) over all voxels of the file (those cropped away"
        " are background for certain), with the predicted probability p (no threshold) and t = 1 at the label"
    )
    mean = "mean over cases, n of them defined"
    table = overlap.definitions(how.rules, "volume (the file's own shape, before any crop)")
    own = {
        "soft_dice": ("max", f"{soft}; mean over the foreground labels; {mean}"),
        "round_score": ("max", f"{soft}; mean over all labels with the background (valid_dice of FeTS 2022); {mean}"),
    }
    each = {f"soft_dice_{label}": ("max", f"label {label} only: {soft}; {mean}") for label in how.labels}
    return table | own | each


def reduce(outputs: Mapping[str, np.ndarray], how: Scoring) -> dict[str, np.ndarray]:
    """The metrics of some cases, float64 [n] each; what a metric is undefined for is NaN.

    Args:
      outputs: of the volumetric task, on the host.

    Returns: {column: [n]}: the metrics of `definitions`, and the voxels of every mask.
    """
    confusion = np.asarray(outputs["confusion"])
    found = np.stack([_counts(confusion, ids) for ids in how.masks], 1)
    full, spacing = np.asarray(outputs["full"]), np.asarray(outputs["spacing"], float)
    columns = overlap.mask_columns(found, np.prod(full.astype(float), -1), how.rules)
    if how.rules.distances:
        columns |= overlap.border_columns(found, lambda i: _planes(outputs, i, how), full, spacing, how.rules)
    table = overlap.case_means(columns, how.rules)
    extent = np.prod(np.asarray(outputs["shape"], float), -1)
    table["cross_entropy"] = np.asarray(outputs["entropy"], float).sum(-1) / extent
    both, p, t = np.moveaxis(np.asarray(outputs["soft"], float).sum(1), -1, 0)  # [n, classes] each
    for sums in (both, p, t):  # what was cropped away is background, and predicted as such
        sums[:, 0] += np.prod(full.astype(float), -1) - extent
    soft = (2 * both + SMOOTH) / (p + t + SMOOTH)
    table |= {"soft_dice": soft[:, 1:].mean(1), "round_score": soft.mean(1)}
    table |= {f"soft_dice_{label}": soft[:, k] for k, label in enumerate(how.labels)}
    table |= {name: number.astype(float) for name, number in overlap.empties(found).items()}
    for word, number in zip(("truth", "predicted"), overlap.voxels(found)):
        table |= {f"{word}_voxels_{name}": number[:, k] for k, (name, _) in enumerate(how.rules.names)}
    return table


def _counts(confusion: np.ndarray, ids: tuple[int, ...]) -> np.ndarray:
    """Voxels of true positives, false positives, false negatives, int64 [n, 3], of a mask; confusion is
    [n, truth, predicted]."""
    own = list(ids)
    rest = [k for k in range(confusion.shape[1]) if k not in ids]
    total = lambda true, predicted: confusion[:, true][:, :, predicted].sum((1, 2), dtype=np.int64)
    return np.stack([total(own, own), total(rest, own), total(own, rest)], -1)


def class_map(outputs: Mapping[str, np.ndarray], name: str, case: int) -> np.ndarray:
    """uint8 [*buffer]: the class ids of 'truth' or 'predicted'; 0 outside the volume."""
    space = tuple(int(n) for n in outputs["buffer"][case])
    planes = [np.unpackbits(bits, count=int(np.prod(space))) for bits in np.asarray(outputs[name][case])]
    result = planes[0]
    for b, plane in enumerate(planes[1:], 1):
        result |= plane << b
    return result.reshape(space)


def class_maps(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(truth, predicted), uint8 [n, *buffer] each: class ids of the device's outputs."""
    truth, predicted = (np.stack([class_map(outputs, name, i) for i in cases]) for name in ("truth", "predicted"))
    return truth, predicted


def _planes(outputs: Mapping[str, np.ndarray], case: int, how: Scoring) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The masks of truth and prediction in the smallest box that holds any of them.

    A border voxel at the wall of the box has background, or the end of the volume, behind it. So distances are those
    of the volume.
    """
    maps = [class_map(outputs, name, case) for name in ("truth", "predicted")]
    box = surface.union_box(maps[0] > 0, maps[1] > 0)
    member = np.zeros((len(how.masks), 256), bool)
    for own, ids in zip(member, how.masks):
        own[list(ids)] = True
    truth, predicted = ([own[ids[box]] for own in member] for ids in maps)
    return truth, predicted


def score(columns: Mapping[str, np.ndarray], cases: np.ndarray, how: Scoring) -> list[dict[str, Any]]:
    """Rows {'metric', 'value', 'n'} over some cases; `columns` are those of `reduce`."""
    if len(cases) == 0:
        return []
    return overlap.summary({name: np.asarray(values)[cases] for name, values in columns.items()}, definitions(how))


def case_values(columns: Mapping[str, np.ndarray], cases: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of some cases."""
    return {name: np.asarray(values)[cases] for name, values in columns.items()}
