"""Metrics of segmented cases on the host: overlaps, border distances, and the stated rule for empty masks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.tasks import surface

COUNTS = ("n_missed", "n_false_alarm", "n_both_empty")


class Rules(NamedTuple):
    """How cases are scored.

    Attributes:
      classes: number of labels with the background, 0.
      distances: whether HD95 and NSD are computed.
      tolerance: of NSD, in mm.
      hd95: 'max' or 'pooled' (surface.percentile_distance).
      both_empty: truth and prediction empty: 'perfect' (Dice, IoU, NSD 1 and HD95 0) or 'undefined' (NaN).
      one_empty: only one empty, Dice, IoU, NSD are 0 and HD95 is: 'diagonal' of the image or 'undefined' (NaN).
    """

    classes: int
    distances: bool = True
    tolerance: float = 1.0
    hd95: str = "max"
    both_empty: str = "perfect"
    one_empty: str = "diagonal"


def definitions(rules: Rules) -> dict[str, tuple[str, str]]:
    """{metric: (direction, definition)}; with several foreground classes also one metric per class, `dice_<k>`."""
    perfect, penalty = rules.both_empty == "perfect", rules.one_empty == "diagonal"
    over = "; the mean of a case's foreground classes" if rules.classes > 2 else ""
    mean = f"{over}; mean over cases, n of them defined"
    overlap_rule = f"truth and prediction both empty: {'1' if perfect else 'undefined'}, one of them: 0"
    distance_rule = (
        f"both empty: {'0' if perfect else 'undefined'}, one of them: "
        + ("the diagonal of the image" if penalty else "undefined, see n_missed and n_false_alarm")
    )  # fmt: skip
    percentile = (
        "the larger one of the two directed 95th percentiles"
        if rules.hd95 == "max"
        else "the 95th percentile of the distances of both directions pooled"
    )
    border = "border voxels (the mask without its erosion, connectivity 1)"
    table = {
        "dice": ("max", f"2 |truth and prediction| / (|truth| + |prediction|); {overlap_rule}{mean}"),
        "iou": ("max", f"|truth and prediction| / |truth or prediction|; {overlap_rule}{mean}"),
        "hd95": (
            "min",
            f"{percentile} from {border} of one mask to those of the other, in mm (voxels where no spacing is known); "
            f"{distance_rule}{mean}",
        ),
        "nsd": (
            "max",
            f"share of {border} of both masks within {rules.tolerance:g} mm (voxels where no spacing is known) of the "
            f"other mask's; {overlap_rule}{mean}",
        ),
        "sensitivity": ("max", f"share of the truth's voxels predicted; undefined where the truth is empty{mean}"),
        "specificity": (
            "max",
            f"share of the voxels outside the truth not predicted; undefined where the truth is the whole image{mean}",
        ),
    }
    if not rules.distances:
        del table["hd95"], table["nsd"]
    per_class = {
        f"{name}_{k}": (direction, f"class {k} only: {text.replace(over, '')}")
        for name, (direction, text) in table.items()
        for k in range(1, rules.classes)
        if rules.classes > 2
    }
    where = " (case, foreground class) pairs" if rules.classes > 2 else " cases"
    counts = {
        "n_missed": ("", f"number of{where} with an empty prediction and a truth that is not"),
        "n_false_alarm": ("", f"number of{where} with an empty truth and a prediction that is not"),
        "n_both_empty": ("", f"number of{where} with truth and prediction empty"),
    }
    entropy = ("min", "mean over voxels of the negative log probability of the label; mean over n cases")
    return table | {"cross_entropy": entropy} | counts | per_class


def case_table(outputs: Mapping[str, np.ndarray], cases: np.ndarray, rules: Rules) -> dict[str, np.ndarray]:
    """The metrics of every given case; NaN where one is undefined.

    Args:
      outputs: of the segmentation task, on the host: 'loss' [N], 'counts' int [N, classes - 1, 3] (voxels of true
        positives, false positives, false negatives), 'shape' int [N, axes], 'predicted' and 'truth' uint8
        [N, classes - 1, bytes] (masks, packed; unless rules.distances is False), 'spacing' [N, axes] where known.
      cases: int [n].

    Returns: {column: float64 [n]}: the metrics of `definitions` but the counts, and the voxels of the masks.
    """
    found = np.asarray(outputs["counts"], np.float64)[cases]
    size = np.prod(np.asarray(outputs["shape"], np.float64)[cases], -1)
    hit, false, missed = np.moveaxis(found, -1, 0)  # each [n, classes - 1]
    truth, predicted = hit + missed, hit + false
    none = (truth + predicted) == 0
    empty = 1.0 if rules.both_empty == "perfect" else np.nan
    columns = {
        "dice": np.where(none, empty, 2 * hit / np.maximum(truth + predicted, 1)),
        "iou": np.where(none, empty, hit / np.maximum(hit + false + missed, 1)),
    }
    if rules.distances:
        columns["hd95"], columns["nsd"] = _border_columns(outputs, cases, truth > 0, predicted > 0, rules)
    outside = size[:, None] - truth
    columns["sensitivity"] = np.where(truth > 0, hit / np.maximum(truth, 1), np.nan)
    columns["specificity"] = np.where(outside > 0, (outside - false) / np.maximum(outside, 1), np.nan)
    table = {name: _mean_defined(values) for name, values in columns.items()}
    table["cross_entropy"] = np.asarray(outputs["loss"], np.float64)[cases]
    if rules.classes > 2:
        table |= {f"{name}_{k + 1}": v[:, k] for name, v in columns.items() for k in range(rules.classes - 1)}
    return table | {"truth_voxels": truth.sum(1), "predicted_voxels": predicted.sum(1)}


def _mean_defined(values: np.ndarray) -> np.ndarray:
    """Mean of every row over its values that are not NaN; NaN where there are none. [n, m] -> [n]."""
    defined = np.isfinite(values)
    total = np.sum(np.where(defined, values, 0.0), 1)
    return np.where(defined.any(1), total / np.maximum(defined.sum(1), 1), np.nan)


def _border_columns(
    outputs: Mapping[str, np.ndarray], cases: np.ndarray, truth: np.ndarray, predicted: np.ndarray, rules: Rules
) -> tuple[np.ndarray, np.ndarray]:
    """HD95 and NSD, [n, classes - 1] each; `truth` and `predicted` tell which masks are not empty."""
    far = np.full(truth.shape, 0.0 if rules.both_empty == "perfect" else np.nan)
    near = np.full(truth.shape, 1.0 if rules.both_empty == "perfect" else np.nan)
    for i, case in enumerate(cases):
        shape = tuple(int(s) for s in outputs["shape"][case])
        spacing = np.asarray(outputs["spacing"][case], float) if "spacing" in outputs else np.ones(len(shape))
        for k in np.flatnonzero(truth[i] | predicted[i]):
            if truth[i, k] and predicted[i, k]:
                masks = [unpack(outputs[name][case, k], shape) for name in ("truth", "predicted")]
                distances = surface.directed_distances(masks[0], masks[1], spacing)
                far[i, k] = surface.percentile_distance(distances, 95.0, rules.hd95)
                near[i, k] = surface.surface_dice(distances, rules.tolerance)
            else:
                far[i, k] = surface.diagonal(shape, spacing) if rules.one_empty == "diagonal" else np.nan
                near[i, k] = 0.0
    return far, near


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """bool [*shape] from the bits of the flattened mask, uint8 [bytes]."""
    return np.unpackbits(np.asarray(packed), count=int(np.prod(shape))).reshape(shape).astype(bool)


def label_maps(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(truth, predicted) of cases of one shape, uint8 [n, *space]; `outputs` as in `case_table`, with the masks."""
    maps = []
    for name in ("truth", "predicted"):
        labels = []
        for case in cases:
            planes = [unpack(plane, tuple(int(s) for s in outputs["shape"][case])) for plane in outputs[name][case]]
            labels.append(sum((k + 1) * plane.astype(np.uint8) for k, plane in enumerate(planes)))
        maps.append(np.stack(labels))
    return maps[0], maps[1]


def rows(outputs: Mapping[str, np.ndarray], cases: np.ndarray, rules: Rules) -> list[dict[str, Any]]:
    """Rows {'metric', 'value', 'n'} over some cases: means over the n cases where a metric is defined, and counts."""
    n = len(cases)
    if n == 0:
        return []
    table = case_table(outputs, cases, rules)
    found = np.asarray(outputs["counts"])[cases]
    truth, predicted = found[..., 0] + found[..., 2] > 0, found[..., 0] + found[..., 1] > 0
    counts = dict(zip(COUNTS, (truth & ~predicted, predicted & ~truth, ~truth & ~predicted)))
    result = []
    for metric in definitions(rules):
        if metric in counts:
            result.append({"metric": metric, "value": float(counts[metric].sum()), "n": n})
            continue
        defined = ~np.isnan(table[metric])
        value = float(table[metric][defined].mean()) if defined.any() else float("nan")
        result.append({"metric": metric, "value": value, "n": int(defined.sum())})
    return result
