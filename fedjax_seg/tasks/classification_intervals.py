"""Bootstrap intervals of classification metrics: patients are drawn again, never single cases of a patient.

Nothing is copied: a resample is a vector of how often each patient was drawn, so all that is a ratio of sums (accuracy,
recalls, F1, losses, calibration gaps) is one matrix product with sums per patient, and an area under a ROC curve is a
weighted Mann-Whitney statistic along one sorted order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.core import checks

LEVEL = 0.95
BINS = 10  # equal-width bins of the calibration error
_BLOCK = 2_000_000  # entries of the largest temporary array: resamples are taken in blocks of so many


def calibration_bin(confidence: np.ndarray, bins: int = BINS) -> np.ndarray:
    """int [n]: which of `bins` equal-width bins (low, high] of [0, 1] a confidence is in."""
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def intervals(
    values: Mapping[str, float],
    outputs: Mapping[str, np.ndarray],
    patients: Sequence[Any],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """95 % percentile intervals of metrics over some cases.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), sections 13.3 (percentile interval) and 8
    (the unit that is drawn is the independent one: here the patient with all of its cases, as in a cluster bootstrap).
    The calibration error of a resample is biased upwards: its interval may lie above its value.

    Args:
      values: the metrics of the cases as they are; {name: value}, names as in `resampled`.
      outputs: {'probability': [n, classes], 'loss': [n], 'label': int [n]}, of these cases only.
      patients: n names; equal names are drawn together.
      resamples: draws of as many patients as there are, with replacement.
      seed: of the draws; the same patients and the same seed give the same intervals.

    Returns: rows {'metric', 'value', 'low', 'high', 'n' (cases), 'patients', 'resamples'} in the order of `values`;
      'resamples' is the number of those where the metric is defined, the interval is over them. low and high are NaN
      where there are none, and for one patient, who has nothing to be drawn against. No case: no row.
    Raises: UserError for resamples below 1 or another number of patients than of cases.
    """
    checks.number("intervals: resamples", resamples, low=1, integer=True)
    label = np.asarray(outputs["label"])
    if len(patients) != len(label):
        raise checks.UserError(
            f"intervals: patients: {len(patients)} names given, {len(label)} expected, one of every case that is scored"
        )
    if len(label) == 0:
        return []
    group = np.unique(np.asarray(patients), return_inverse=True)[1]
    count = int(group.max()) + 1
    found = _draws(outputs, group, count, resamples, seed) if count > 1 else []
    rows = []
    for metric, value in values.items():
        draws = np.concatenate([block[metric] for block in found] or [np.zeros(0)])
        kept = draws[np.isfinite(draws)]
        low, high = np.quantile(kept, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(kept) else (np.nan, np.nan)
        ends = {"low": float(low), "high": float(high)}
        rows.append(
            {"metric": metric, "value": value, **ends, "n": len(label), "patients": count, "resamples": len(kept)}
        )
    return rows


def _draws(
    outputs: Mapping[str, np.ndarray], group: np.ndarray, count: int, resamples: int, seed: int
) -> list[dict[str, np.ndarray]]:
    """`resampled` of all resamples, block by block; the blocks change no number."""
    random, step = np.random.default_rng(seed), max(1, _BLOCK // len(group))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return [
        resampled(outputs, group, random.multinomial(count, np.full(count, 1 / count), size=size)) for size in sizes
    ]


def resampled(outputs: Mapping[str, np.ndarray], group: np.ndarray, drawn: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric of `classification.score` with case i counted drawn[:, group[i]] times.

    Args:
      outputs: as in `intervals`.
      group: int [n], below G.
      drawn: int [R, G], how often every group is taken.

    Returns: {metric: float64 [R]}, NaN where a metric is not defined.
    """
    probability = np.asarray(outputs["probability"], np.float64)
    label, classes = np.asarray(outputs["label"]).astype(int), probability.shape[1]
    predicted, confidence, groups = probability.argmax(1), probability.max(1), drawn.shape[1]
    finite = bool(np.all(np.isfinite(probability)))
    times = np.ascontiguousarray(drawn.T, np.float64)  # [G, R]: curves gather and add whole rows

    def sums(weights: np.ndarray | None, kind: np.ndarray | int = 0, kinds: int = 1) -> np.ndarray:
        """float [R, kinds]: sums of the weights of the drawn cases, by kind."""
        of_group = np.bincount(group * kinds + kind, weights, groups * kinds).reshape(groups, kinds)
        return times.T @ of_group

    size = sums(None)[:, 0]
    pairs = sums(None, label * classes + predicted, classes * classes).reshape(-1, classes, classes)
    ece = np.full(len(drawn), np.nan)
    if finite:
        gaps = sums((predicted == label) - confidence, calibration_bin(confidence), BINS)
        ece = np.sum(np.abs(gaps), axis=1) / size
    found = {
        "accuracy": np.einsum("rcc->r", pairs) / size,
        "cross_entropy": sums(np.asarray(outputs["loss"], np.float64))[:, 0] / size,
        "ece": ece,
        **_of_pairs(pairs),
    }
    # Two classes have one curve, that of class 1; more have one each, and their mean. `score` brings rows to a sum of 1
    # for more than two, which can change an order.
    curves = [1] if classes == 2 else range(classes)
    ranked = probability if classes == 2 else probability / probability.sum(1, keepdims=True)
    areas = [_areas(ranked[:, c], label == c, group, times) if finite else ece for c in curves]
    return found | {"auc": np.mean(areas, axis=0)}  # NaN in one is NaN in the mean: all classes must be present


def _of_pairs(pairs: np.ndarray) -> dict[str, np.ndarray]:
    """What follows from counts [R, classes (truth), classes (predicted)]; the rules are those of `score`."""
    right, truth, said = np.einsum("rcc->rc", pairs), pairs.sum(2), pairs.sum(1)
    f1 = 2 * right / np.maximum(truth + said, 1)
    occur = np.sum(truth + said > 0, axis=1)  # classes: others enter no mean
    recall = np.where(truth > 0, right / np.maximum(truth, 1), np.nan)
    if pairs.shape[1] == 2:
        return {
            "f1": f1[:, 1],
            "sensitivity": recall[:, 1],
            "specificity": recall[:, 0],
            "balanced_accuracy": recall.mean(1),
        }
    present = np.sum(truth > 0, axis=1)
    mean = np.nansum(recall, axis=1) / np.maximum(present, 1)
    return {"f1": f1.sum(1) / np.maximum(occur, 1), "balanced_accuracy": np.where(present > 1, mean, np.nan)}


def _areas(score: np.ndarray, positive: np.ndarray, group: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Areas under the ROC curve [R] with whole-number weights: the share of pairs (one of each class) in which the
    positive case has the higher score, ties counting half (Mann and Whitney 1947; Hanley and McNeil 1982).

    Args: score float [n], positive bool [n], group int [n], times [G, R] float.  Returns: NaN without both classes.
    """
    ours, theirs = np.flatnonzero(positive), np.flatnonzero(~positive)
    theirs = theirs[np.argsort(score[theirs], kind="stable")]
    lower = np.zeros((len(theirs) + 1, times.shape[1]))  # row i: weight of the i lowest negatives
    np.cumsum(times[group[theirs]], axis=0, out=lower[1:])
    won, weight = np.zeros(times.shape[1]), times[group[ours]]
    for side in ("left", "right"):  # negatives below the score, and those at most as high: the half of ties
        won += np.einsum("nr,nr->r", weight, lower[np.searchsorted(score[theirs], score[ours], side)]) / 2
    both = weight.sum(0) * lower[-1]
    return np.where(both > 0, won / np.maximum(both, 1), np.nan)
