"""How well scores tell members from non-members; a higher score claims membership. float64, exact with ties."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A value with its interval, of confidence 0.95."""

    value: float
    low: float
    high: float


class Roc(NamedTuple):
    """Points of the ROC curve, float64 [points]; from (0, 0) to (1, 1), one point per distinct score."""

    fpr: np.ndarray
    tpr: np.ndarray


def mann_whitney_auc(members: np.ndarray, non_members: np.ndarray) -> float:
    """P(member scores higher) + P(tie)/2 over all pairs: the area under the raw ROC curve, not of its concave hull.

    Constant scores give exactly 0.5; swapped arguments give exactly 1 - AUC in floating point, because always the
    larger one of the two areas is divided and the smaller one is its complement.

    Args:
      members, non_members: finite scores [n], [m].
    """
    n, m = len(members), len(non_members)
    ranks = stats.rankdata(np.concatenate([members, non_members]).astype(np.float64))
    wins = float(np.sum(ranks[:n])) - n * (n + 1) / 2  # a multiple of 1/2: exact
    losses = n * m - wins
    return wins / (n * m) if wins >= losses else 1 - losses / (n * m)


def null_deviation(n: int, m: int) -> float:
    """Standard deviation of the AUC of scores without information: sqrt((n + m + 1) / (12 n m)); 0.0183 at 500/500."""
    return math.sqrt((n + m + 1) / (12 * n * m))


def bootstrap_interval(
    members: np.ndarray,
    non_members: np.ndarray,
    units: tuple[Sequence[str], Sequence[str]] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """The AUC with the percentile interval of a bootstrap that draws members and non-members apart.

    Args:
      members, non_members: finite scores [n], [m].
      units: patient of every member and of every non-member; patients are drawn, with all their cases. None: cases are.
      resamples: number of draws.
      seed: of the draws; equal arguments give an equal interval.

    The interval of a perfect separation is a point: no draw can undo it.
    """
    first, count_first = _groups(units[0] if units else range(len(members)))
    second, count_second = _groups(units[1] if units else range(len(non_members)))
    a, b = np.asarray(members, np.float64)[:, None], np.asarray(non_members, np.float64)[None]
    wins = (a > b) + 0.5 * (a == b)
    wins = _sum_groups(_sum_groups(wins, first, count_first).T, second, count_second).T  # [patients, patients]
    sizes = np.bincount(first, minlength=count_first), np.bincount(second, minlength=count_second)
    rng = np.random.default_rng(seed)
    draws = [rng.multinomial(c, np.full(c, 1 / c), resamples).astype(np.float64) for c in (count_first, count_second)]
    total = np.sum((draws[0] @ wins) * draws[1], 1)
    areas = total / ((draws[0] @ sizes[0]) * (draws[1] @ sizes[1]))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(areas, [tail, 100 - tail])
    return Interval(mann_whitney_auc(members, non_members), float(low), float(high))


def _groups(labels: Sequence) -> tuple[np.ndarray, int]:
    names, inverse = np.unique(np.asarray(labels), return_inverse=True)
    return inverse, len(names)


def _sum_groups(rows: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Sums of the rows of every group, [count, columns]."""
    if count == len(rows):
        return rows[np.argsort(group)]
    result = np.zeros((count, rows.shape[1]))
    np.add.at(result, group, rows)
    return result


def roc(members: np.ndarray, non_members: np.ndarray) -> Roc:
    """The ROC curve; cases of equal score enter together."""
    scores = np.unique(np.concatenate([members, non_members]))[::-1]
    points = [
        np.concatenate([[0.0], 1 - np.searchsorted(np.sort(side), scores, side="left") / len(side)])
        for side in (non_members, members)
    ]
    return Roc(*points)


def advantage(auc: float) -> float:
    """|AUC - 1/2|, two-sided: an AUC of 0.25 is worth as much to an attacker as 0.75."""
    return abs(auc - 0.5)


def balanced_advantage(members: np.ndarray, non_members: np.ndarray) -> float:
    """max |TPR - FPR| over thresholds; two-sided. The best threshold is taken from the same scores: optimistic."""
    curve = roc(members, non_members)
    return float(np.max(np.abs(curve.tpr - curve.fpr)))


def clopper_pearson(hits: int, trials: int) -> Interval:
    """A binomial share with its exact interval."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(stats.beta.ppf(1 - tail, hits + 1, trials - hits))
    return Interval(hits / trials, low, high)


def tpr_at_fpr(members: np.ndarray, non_members: np.ndarray, fpr: float) -> Interval | None:
    """Share of members above the lowest threshold that at most a share `fpr` of the non-members exceeds.

    Returns: the share with its Clopper-Pearson interval (of the members alone: the threshold is taken as given), or
      None where not even one non-member may exceed the threshold, fpr * m < 1.
    """
    allowed = math.floor(fpr * len(non_members) + 1e-9)  # 0.29 * 100 is 28.999...
    if allowed < 1:
        return None
    if allowed >= len(non_members):
        return clopper_pearson(len(members), len(members))
    threshold = np.sort(np.asarray(non_members))[::-1][allowed]
    return clopper_pearson(int(np.sum(np.asarray(members) > threshold)), len(members))
