"""LiRA: is a case's confidence more likely under models that saw it, or under models that did not?

Every case has its own difficulty, which a threshold on the loss mistakes for membership. The attacker trains M shadow
models, each on some of the cases, and so knows for every case how confident models are with it (IN) and without it
(OUT). Source: Carlini et al., "Membership inference attacks from first principles" (2022), online and offline attack.
Everything is float64 on the host; a higher score claims membership.

With M in the hundreds the scores are the paper's. Hospitals cannot train hundreds of federations; for few models:
  - A case's two means rest on few models. Deviation: the distribution of a new model's confidence allows for that, its
    variance is the models' plus the mean's; and the online attack lets each mean be pulled towards the other one moved
    by the mean shift over cases, as far as the shift is the same for all cases (empirical Bayes). Measured with a shift
    of 1 deviation and a spread of difficulty of 3: AUC 0.73 instead of 0.67 with 4 models, 0.75 instead of 0.70 with 8,
    where 0.76 is possible; no difference with 128.
  - Shared variances are pooled WITHIN cases, so that they hold none of the spread of difficulty between cases.
    Deviation: the authors' code takes the deviation of all confidences.
A shadow entry that is not finite (a model that diverged) counts as not trained; a target that is not finite gives NaN
for its case alone.
"""

from typing import NamedTuple

import numpy as np

from fedjax_seg.core import checks

FEW = 16  # models of a side below which a case's own variance is noise
KINDS = ("segmentation", "classification")
BLOCK = 256  # cases whose matrices of rounds are held at a time
LEAST_LOSS = 1e-8  # what the tasks add to a loss before its logarithm


class Side(NamedTuple):
    """Normal distributions of the confidence of every case, under models of one side; float64 [n] each."""

    mean: np.ndarray
    variance: np.ndarray  # of a new model's confidence


def confidence(log_loss: np.ndarray, kind: str = "segmentation") -> np.ndarray:
    """A statistic of a case that is nearly normal over models; the higher, the surer of the true label.

    Source: Carlini et al. (2022): the logit log(p / (1 - p)) of the true class's probability p = e^-loss.
    Segmentation averages the loss over voxels and has no single p: minus the log of the mean loss there (measured to be
    nearly normal). For small losses both are the same number.

    Args:
      log_loss: log(mean cross entropy + 1e-8), any shape: the tasks' evidence of that name, already a logarithm.
      kind: 'segmentation' or 'classification'.
    """
    checks.one_of("kind", kind, KINDS)
    log_loss = np.maximum(np.asarray(log_loss, np.float64), np.log(LEAST_LOSS))
    if kind == "segmentation":
        return -log_loss
    loss = np.exp(log_loss)
    return -loss - np.log(-np.expm1(-loss))  # -log(expm1(loss)) without overflow


def online(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, *, shared_variance: str | bool = "auto"
) -> np.ndarray:
    """Log likelihood ratio of every case: IN against OUT.

    Args:
      target: confidences [..., n] of the attacked model(s).
      shadows: confidences [M, n] of the shadow models.
      inside: bool [M, n], whether a model trained on a case.
      shared_variance: True: one variance of all cases for IN and one for OUT; False: every case its own, where it has
        two models of that side; 'auto': its own where it has at least 16, the shared one elsewhere.

    Cases that lack a side have the other one's mean, moved by the mean shift and less certain by as much as shifts
    differ. Cases without any model score 0. `coverage` counts them.

    Returns: float64 [..., n].
    Raises: UserError where no case has models of both sides; `offline` needs OUT alone.
    """
    shadows, inside, outside = _known(shadows, inside)
    return _ratio(np.asarray(target, np.float64), *_sides(shadows, inside, outside, shared_variance))


def offline(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, *, shared_variance: str | bool = "auto"
) -> np.ndarray:
    """(confidence - mean OUT) / deviation OUT, one-sided: how surprisingly sure a model is that did not see the case.

    Source: Carlini et al. (2022), the offline attack, in the order of their 1 - Pr[N(mean, variance) > phi].
    Arguments and result as for `online`. Cases without OUT models are compared with the OUT means of all cases.

    Raises: UserError where no case has an OUT model.
    """
    shadows, _, outside = _known(shadows, inside)
    mean, variance, count = _fit(shadows, outside, shared_variance)
    known = count > 0
    if not known.any():
        raise checks.UserError("lira: no shadow model without any of the cases, at least 1 expected; train shadows")
    if np.isnan(variance[known]).any():  # one model per case: the spread over cases is all there is, and too much
        variance = np.where(np.isnan(variance), np.var(mean[known]), variance)
    between = np.var(mean[known])
    variance = np.where(known, variance * (1 + 1 / np.maximum(count, 1)), variance + between)
    mean = np.where(known, mean, np.mean(mean[known]))
    return (np.asarray(target, np.float64) - mean) / np.sqrt(np.maximum(variance, _floor(shadows)))


def trajectory(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, *, shared_variance: str | bool = "auto"
) -> np.ndarray:
    """Log likelihood ratio of the confidences in T rounds together: the attacker saw every global model.

    Rounds are correlated: one lucky round is followed by others, and a sum of the rounds' ratios would count it T
    times. So T-variate normals are used: means and variances of a case per round and side as in `online`, one
    correlation matrix R of the rounds, pooled over cases and sides, and a ridge: D is the diagonal matrix of a side's
    deviations, E that of the root mean squares of both sides' deviations, S = (1 - r) D R D + r E E, r = T / (T + M).
    Residuals of one model are correlated over cases, hence M and not M n is the number of observations that R rests
    on. The ridge is the same for both sides, so that directions of which nothing is known say nothing. Many models: the
    full likelihood ratio. Few: towards a sum over rounds.

    Args:
      target: [T, n]; shadows: [T, M, n], of the same rounds; inside: bool [M, n].

    Returns: float64 [n]. Raises: as `online`.
    """
    target, shadows = np.asarray(target, np.float64), np.asarray(shadows, np.float64)
    if shadows.ndim != 3 or target.shape != (shadows.shape[0], shadows.shape[2]):
        raise checks.UserError(
            f"lira.trajectory: target {target.shape} and shadows {shadows.shape} given, [T, n] and [T, M, n] expected"
        )
    usable = np.isfinite(shadows).all(0)  # a model that diverges half way is no model of the whole way
    fitted = []
    for states in shadows:
        known = _known(np.where(usable, states, np.nan), inside)
        fitted.append((known, _sides(*known, shared_variance)))
    means, variances = (
        np.stack([[getattr(side, name) for side in sides] for _, sides in fitted], -1) for name in Side._fields
    )  # [2, n, T]
    ridge = len(target) / (len(target) + shadows.shape[1])
    correlation, ridges = _correlation(fitted), ridge * variances.mean(0)
    score = np.zeros(target.shape[1])
    for block in np.array_split(np.arange(len(score)), -(-len(score) // BLOCK)):
        both = []
        for mean, variance in zip(means[:, block], variances[:, block]):
            deviation = np.sqrt(variance)
            spread = (1 - ridge) * deviation[:, :, None] * correlation * deviation[:, None]
            spread += ridges[block][:, :, None] * np.eye(len(target))
            away = target.T[block] - mean
            distance = np.sum(away * np.linalg.solve(spread, away[..., None])[..., 0], -1)
            both.append(-0.5 * (distance + np.linalg.slogdet(spread)[1]))
        score[block] = both[0] - both[1]
    return score


def coverage(inside: np.ndarray, shadows: np.ndarray | None = None) -> dict[str, int | float]:
    """How many shadow models the cases have.

    Args:
      inside: bool [M, n]; shadows: [M, n] where entries that are not finite are to count as missing.

    Returns: 'models' M, 'cases' n, 'no_in', 'no_out', 'neither' (numbers of cases that lack a side, or both),
      'median_in', 'median_out' (models per case).
    """
    inside = np.asarray(inside, bool)
    known = np.ones_like(inside) if shadows is None else np.isfinite(shadows)
    ins, outs = np.sum(inside & known, 0), np.sum(~inside & known, 0)
    return {
        "models": int(inside.shape[0]),
        "cases": int(inside.shape[1]),
        "no_in": int(np.sum(ins == 0)),
        "no_out": int(np.sum(outs == 0)),
        "neither": int(np.sum((ins == 0) & (outs == 0))),
        "median_in": float(np.median(ins)),
        "median_out": float(np.median(outs)),
    }


def _known(shadows: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shadows with zeros for what is missing, and the entries that are IN and that are OUT."""
    shadows, inside = np.asarray(shadows, np.float64), np.asarray(inside, bool)
    if shadows.ndim != 2 or shadows.shape != inside.shape:
        raise checks.UserError(
            f"lira: shadows {shadows.shape} and inside {inside.shape} given, both [models, cases] expected"
        )
    finite = np.isfinite(shadows)
    return np.where(finite, shadows, 0.0), inside & finite, ~inside & finite


def _fit(x: np.ndarray, use: np.ndarray, shared: str | bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (NaN without models), variance of one model (NaN where nothing tells) and number of models, [n] each."""
    checks.one_of("shared_variance", shared, ("auto", True, False))
    count = np.sum(use, 0)
    mean = np.sum(x * use, 0) / np.where(count > 0, count, np.nan)
    squares = np.sum(np.where(use, x - mean, 0.0) ** 2, 0)
    freedom = np.sum(np.maximum(count - 1, 0))
    pooled = np.sum(squares) / freedom if freedom else np.nan
    least = {"auto": FEW, True: np.inf, False: 2}[shared]
    return mean, np.where(count >= least, squares / np.maximum(count - 1, 1), pooled), count


def _sides(x: np.ndarray, inside: np.ndarray, outside: np.ndarray, shared: str | bool) -> tuple[Side, Side]:
    """IN and OUT of every case, missing ones filled in as `online` says."""
    fits = [_fit(x, use, shared) for use in (inside, outside)]
    (mean_in, _, count_in), (mean_out, _, count_out) = fits
    both = (count_in > 0) & (count_out > 0)
    if not both.any():
        raise checks.UserError(
            "lira: no case has shadow models both with and without it; train more shadow models, or use offline scores"
        )
    moved = (mean_in - mean_out)[both]
    shift, spread = float(np.mean(moved)), float(np.var(moved))
    # One model per side and case: the difference of the two varies as both together do.
    spare = [np.nanmean(v) if np.isfinite(v).any() else spread / 2 for _, v, _ in fits]
    floor = _floor(x[inside | outside])
    variances = [np.maximum(np.where(np.isnan(v), other, v), floor) for (_, v, _), other in zip(fits, spare[::-1])]
    precision = [count / v for (_, _, count), v in zip(fits, variances)]  # of the means; 0 without models
    chance = np.mean(sum(1 / p[both] for p in precision))  # what the difference varies by although the shift does not
    true_spread = max(0.0, spread - float(chance))
    found = []
    for sign, own, other in ((1, 0, 1), (-1, 1, 0)):
        with np.errstate(divide="ignore"):
            weight = 1 / (1 / precision[other] + true_spread)  # of the other side's mean, moved by the shift
        total = precision[own] + weight
        safe = np.where(total > 0, total, 1.0)
        means = [np.nan_to_num(fits[side][0]) for side in (own, other)]
        mean = (precision[own] * means[0] + weight * (means[1] + sign * shift)) / safe
        found.append(Side(np.where(total > 0, mean, 0.0), np.where(total > 0, variances[own] + 1 / safe, 1.0)))
    return found[0], found[1]  # a case without models has twice the same: a ratio of 1


def _floor(x: np.ndarray) -> float:
    """The least variance that is believed: models that agree to the bit agree by rounding, not by law."""
    return max(1e-6 * float(np.var(x)), 1e-12) if x.size else 1e-12


def _ratio(target: np.ndarray, inside: Side, outside: Side) -> np.ndarray:
    log_density = [-0.5 * ((target - mean) ** 2 / variance + np.log(variance)) for mean, variance in (inside, outside)]
    return log_density[0] - log_density[1]


def _correlation(fitted: list) -> np.ndarray:
    """Correlation matrix [T, T] of the rounds, from residuals of both sides in units of their deviations."""
    rows = []
    for (x, inside, outside), sides in fitted:
        parts = []
        for use, side in zip((inside, outside), sides):
            count = np.sum(use, 0)
            mean = np.sum(x * use, 0) / np.maximum(count, 1)
            parts.append(np.where(use & (count > 1), (x - mean) / np.sqrt(side.variance), 0.0))
        rows.append(np.concatenate(parts).ravel())
    residuals = np.stack(rows)
    moments = residuals @ residuals.T
    scale = np.sqrt(np.diag(moments))
    safe = np.where(scale > 0, scale, 1.0)
    result = moments / np.outer(safe, safe)
    np.fill_diagonal(result, 1.0)
    return result
