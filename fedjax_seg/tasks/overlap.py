"""Metrics of segmented cases on the host: overlaps, border distances, and the stated rule for empty masks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.tasks import surface

METRICS = ("dice", "iou", "hd95", "nsd", "sensitivity", "specificity")
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
      names: (name, what it is) of every mask; () = the foreground classes, '1', '2', ...
    """

    classes: int
    distances: bool = True
    tolerance: float = 1.0
    hd95: str = "max"
    both_empty: str = "perfect"
    one_empty: str = "diagonal"
    names: tuple[tuple[str, str], ...] = ()


def masks_of(rules: Rules) -> tuple[tuple[str, str], ...]:
    """(name, what it is) of every mask that is scored."""
    return rules.names or tuple((str(k), f"class {k}") for k in range(1, rules.classes))


def definitions(rules: Rules, whole: str = "image") -> dict[str, tuple[str, str]]:
    """{metric: (direction, definition)}; with several masks also one metric for each of them, `dice_<name>`.

    Args:
      whole: the word for what has a diagonal and a number of voxels.
    """
    perfect, penalty = rules.both_empty == "perfect", rules.one_empty == "diagonal"
    masks = masks_of(rules)
    several = len(masks) > 1
    kind = f"masks ({', '.join(name for name, _ in masks)})" if rules.names else "foreground classes"
    over = f"; the mean of a case's {kind}" if several else ""
    mean = f"{over}; mean over cases, n of them defined"
    overlap_rule = f"truth and prediction both empty: {'1' if perfect else 'undefined'}, one of them: 0"
    distance_rule = (
        f"both empty: {'0' if perfect else 'undefined'}, one of them: "
        + (f"the diagonal of the {whole}" if penalty else "undefined, see n_missed and n_false_alarm")
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
            "share of the voxels outside the truth not predicted; "
            f"undefined where the truth is the whole {whole}{mean}",
        ),
    }
    if not rules.distances:
        del table["hd95"], table["nsd"]
    per_class = {
        f"{name}_{mask}": (direction, f"{what} only: {text.replace(over, '')}")
        for name, (direction, text) in table.items()
        for mask, what in masks
        if several
    }
    where = f" (case, {'mask' if rules.names else 'foreground class'}) pairs" if several else " cases"
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
    found = np.asarray(outputs["counts"])[cases]
    shapes = np.asarray(outputs["shape"])[cases]
    spacing = np.asarray(outputs["spacing"], float)[cases] if "spacing" in outputs else np.ones(shapes.shape)
    planes = lambda i: [
        [unpack(m, tuple(shapes[i])) for m in outputs[name][cases[i]]] for name in ("truth", "predicted")
    ]
    columns = mask_columns(found, np.prod(shapes.astype(float), -1), rules)
    if rules.distances:
        columns |= border_columns(found, planes, shapes, spacing, rules)
    table = case_means(columns, rules)
    table["cross_entropy"] = np.asarray(outputs["loss"], np.float64)[cases]
    truth, predicted = voxels(found)
    return table | {"truth_voxels": truth.sum(1), "predicted_voxels": predicted.sum(1)}


def voxels(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Voxels of truth and prediction, float64 [n, masks], of (true positives, false positives, false negatives)."""
    hit, false, missed = np.moveaxis(np.asarray(found, np.float64), -1, 0)
    return hit + missed, hit + false


def mask_columns(found: np.ndarray, size: np.ndarray, rules: Rules) -> dict[str, np.ndarray]:
    """The metrics that follow from counts, {metric: float64 [n, masks]}; NaN where one is undefined.

    Args:
      found: int [n, masks, 3], voxels of true positives, false positives, false negatives.
      size: [n], all voxels of the image.
    """
    hit, false, missed = np.moveaxis(np.asarray(found, np.float64), -1, 0)
    truth, predicted = voxels(found)
    none = (truth + predicted) == 0
    empty = 1.0 if rules.both_empty == "perfect" else np.nan
    outside = np.asarray(size, np.float64)[:, None] - truth
    return {
        "dice": np.where(none, empty, 2 * hit / np.maximum(truth + predicted, 1)),
        "iou": np.where(none, empty, hit / np.maximum(hit + false + missed, 1)),
        "sensitivity": np.where(truth > 0, hit / np.maximum(truth, 1), np.nan),
        "specificity": np.where(outside > 0, (outside - false) / np.maximum(outside, 1), np.nan),
    }


def case_means(columns: Mapping[str, np.ndarray], rules: Rules) -> dict[str, np.ndarray]:
    """{metric: [n, masks]} -> {metric: [n]}: mean of the masks where it is defined; with several masks, each too."""
    columns = {name: columns[name] for name in METRICS if name in columns}
    table = {name: _mean_defined(values) for name, values in columns.items()}
    names = [name for name, _ in masks_of(rules)]
    if len(names) > 1:
        table |= {f"{metric}_{name}": v[:, k] for metric, v in columns.items() for k, name in enumerate(names)}
    return table


def empties(found: np.ndarray) -> dict[str, np.ndarray]:
    """How many masks of every case were missed, found in vain, or empty in both; COUNTS, int [n] each."""
    truth, predicted = (v > 0 for v in voxels(found))
    each = (truth & ~predicted, predicted & ~truth, ~truth & ~predicted)
    return {name: np.sum(which, 1) for name, which in zip(COUNTS, each)}


def _mean_defined(values: np.ndarray) -> np.ndarray:
    """Mean of every row over its values that are not NaN; NaN where there are none. [n, m] -> [n]."""
    defined = np.isfinite(values)
    total = np.sum(np.where(defined, values, 0.0), 1)
    return np.where(defined.any(1), total / np.maximum(defined.sum(1), 1), np.nan)


def border_columns(
    found: np.ndarray,
    planes: Callable[[int], Sequence[Any]],
    shapes: np.ndarray,
    spacing: np.ndarray,
    rules: Rules,
) -> dict[str, np.ndarray]:
    """HD95 and NSD, {metric: float64 [n, masks]}.

    Args:
      found: as in `mask_columns`; tells which masks are not empty.
      planes: case number -> (truth, predicted), a bool [*space] per mask each; asked only where both masks of a pair
        have voxels.
      shapes: int [n, axes], of the image; its diagonal is the penalty.
      spacing: [n, axes], in mm.
    """
    truth, predicted = (v > 0 for v in voxels(found))
    far = np.full(truth.shape, 0.0 if rules.both_empty == "perfect" else np.nan)
    near = np.full(truth.shape, 1.0 if rules.both_empty == "perfect" else np.nan)
    for i in range(len(found)):
        one = truth[i] != predicted[i]
        far[i, one] = surface.diagonal(shapes[i], spacing[i]) if rules.one_empty == "diagonal" else np.nan
        near[i, one] = 0.0
        both = np.flatnonzero(truth[i] & predicted[i])
        if len(both):
            truths, predictions = planes(i)
        for k in both:
            distances = surface.directed_distances(truths[k], predictions[k], spacing[i])
            far[i, k] = surface.percentile_distance(distances, 95.0, rules.hd95)
            near[i, k] = surface.surface_dice(distances, rules.tolerance)
    return {"hd95": far, "nsd": near}


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
    if len(cases) == 0:
        return []
    table = case_table(outputs, cases, rules) | empties(np.asarray(outputs["counts"])[cases])
    return summary(table, definitions(rules))


def summary(table: Mapping[str, np.ndarray], metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Rows {'metric', 'value', 'n'} of the columns [n] of all cases: COUNTS are summed, all else is averaged over the
    cases where it is defined."""
    result = []
    for metric in metrics:
        column = np.asarray(table[metric], np.float64)
        if metric in COUNTS:
            result.append({"metric": metric, "value": float(column.sum()), "n": len(column)})
            continue
        defined = ~np.isnan(column)
        value = float(column[defined].mean()) if defined.any() else float("nan")
        result.append({"metric": metric, "value": value, "n": int(defined.sum())})
    return result
