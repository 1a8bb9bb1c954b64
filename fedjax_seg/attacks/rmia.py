"""RMIA: is a case likelier under the attacked model, relative to its usual likelihood, than random cases are?

Source: Zarifzadeh et al., "Low-cost high-power membership inference attacks" (2024). Needs few reference models:
a handful does what LiRA needs dozens for. float64 on the host; a higher score claims membership.
"""

import numpy as np
from scipy.special import logsumexp

from fedjax_seg.core import checks


def rmia(
    target: np.ndarray,
    shadows: np.ndarray,
    inside: np.ndarray,
    population_target: np.ndarray,
    population_shadows: np.ndarray,
    *,
    gamma: float = 1.0,
    offline_share: float | None = None,
) -> np.ndarray:
    """Share of population cases z that a case x beats by the factor gamma: Pr_z[LR(x, z) >= gamma].

    LR(x, z) = [p(x | t) / p(x)] / [p(z | t) / p(z)], p(x | t) = exp(-loss) under the attacked model t, and p(x) the
    mean of that over models that saw x and models that did not, half and half.

    Losses are given as log(mean cross entropy + 1e-8), the tasks' evidence 'log_loss'. Of a segmentation the mean is
    over voxels, so that p is the geometric mean of the true labels' probabilities.

    Args:
      target: [n], of the attacked cases under the attacked model.
      shadows: [M, n], of these cases under the reference models; entries that are not finite count as missing.
      inside: bool [M, n], whether a model trained on a case.
      population_target: [z]; population_shadows: [M, z], of cases that no model was trained on.
      gamma: > 0, by how much a case must beat another.
      offline_share: a in [0, 1]: no IN models are used, p_in is taken as 1 - a (1 - p_out), so that
        p = ((1 + a) p_out + 1 - a) / 2. None: IN and OUT models are used for attacked cases; the population cases, of
        which there are OUT models alone, and cases that lack a side get the other one by the same line, whose a is
        fitted to the cases that have both. Deviation: the paper takes a from a search over a model of its own.

    Returns: float64 [n] in [0, 1], multiples of 1 / z; NaN where the target is not finite. Cases without any model
      count as the mean of those that have one.
    Raises: UserError for shapes that do not fit, no population, or no models of a kind that is needed.
    """
    checks.number("gamma", gamma, low=0.0, above=0.0)
    shadows, inside = np.asarray(shadows, np.float64), np.asarray(inside, bool)
    population_shadows = np.asarray(population_shadows, np.float64)
    _fit_shapes(np.shape(target), shadows, inside, np.shape(population_target), population_shadows)
    finite = np.isfinite(shadows)
    log_in, log_out = _log_mean(shadows, inside & finite), _log_mean(shadows, ~inside & finite)
    if offline_share is None:
        share = _share(log_in, log_out)
        log_in = np.where(np.isnan(log_in), _with(log_out, share), log_in)
        log_out = np.where(np.isnan(log_out), _without(log_in, share), log_out)
    else:
        checks.number("offline_share", offline_share, low=0.0, high=1.0)
        if np.isnan(log_out).all():
            raise checks.UserError("rmia: no reference model without any of the cases, at least 1 expected")
        share, log_in = float(offline_share), _with(log_out, offline_share)
    with np.errstate(invalid="ignore"):  # NaN: cases without models
        usual = np.logaddexp(log_in, log_out) - np.log(2)
    usual = np.where(np.isnan(usual), np.nanmean(usual), usual)
    others = _log_mean(population_shadows, np.isfinite(population_shadows))
    other_usual = np.logaddexp(_with(others, share), others) - np.log(2)

    ratio = _log_p(target) - usual
    other_ratio = _log_p(population_target) - other_usual
    other_ratio = np.sort(other_ratio[np.isfinite(other_ratio)])
    if not len(other_ratio):
        raise checks.UserError("rmia: no population case with finite losses, at least 1 expected")
    beaten = np.searchsorted(other_ratio, ratio - np.log(gamma), side="right") / len(other_ratio)
    return np.where(np.isfinite(ratio), beaten, np.nan)


def _fit_shapes(target: tuple, shadows: np.ndarray, inside: np.ndarray, population: tuple, others: np.ndarray) -> None:
    right = shadows.ndim == 2 and shadows.shape == inside.shape and target == shadows.shape[1:]
    if not right or others.ndim != 2 or others.shape[0] != shadows.shape[0] or population != others.shape[1:]:
        raise checks.UserError(
            f"rmia: target {target}, shadows {shadows.shape}, inside {inside.shape}, population {population} and"
            f" {others.shape} given; [n], [M, n], [M, n], [z] and [M, z] expected"
        )


def _log_p(log_loss: np.ndarray) -> np.ndarray:
    """log p = -loss; the 1e-8 in the logarithm is in all of them and moves none of the ratios."""
    return -np.exp(np.asarray(log_loss, np.float64))


def _log_mean(log_loss: np.ndarray, use: np.ndarray) -> np.ndarray:
    """log of the mean p over the models in use; NaN where there are none. [n]"""
    count = np.sum(use, 0)
    weights = np.where(count > 0, use, 1.0)
    total = logsumexp(np.where(use, _log_p(log_loss), 0.0), axis=0, b=weights)
    return np.where(count > 0, total - np.log(np.maximum(count, 1)), np.nan)


def _share(log_in: np.ndarray, log_out: np.ndarray) -> float:
    """a of 1 - p_in = a (1 - p_out), least squares over the cases that have both, within [0, 1]."""
    both = np.isfinite(log_in) & np.isfinite(log_out)
    if not both.any():
        raise checks.UserError(
            "rmia: no case has reference models both with and without it; train more, or set offline_share"
        )
    doubt_in, doubt_out = -np.expm1(log_in[both]), -np.expm1(log_out[both])
    scale = float(doubt_out @ doubt_out)
    return float(np.clip(doubt_in @ doubt_out / scale, 0.0, 1.0)) if scale > 0 else 1.0


def _with(log_out: np.ndarray, share: float) -> np.ndarray:
    """log p_in from log p_out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.logaddexp(np.log(share) + log_out, np.log1p(-share))


def _without(log_in: np.ndarray, share: float) -> np.ndarray:
    """log p_out from log p_in, the same line read backwards; no p below the least that a float can hold."""
    if share == 0:
        return log_in
    return np.log(np.maximum(1 + np.expm1(log_in) / share, np.finfo(np.float64).tiny))
