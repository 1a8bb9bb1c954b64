"""Balls in bins: every unit draws one of b bins once and is in the releases r with r mod b = its bin.

A cycle has the balance of a window, every unit exactly once, and the draws are independent, so that amplification is
provable. With T releases, noise multiplier z and k = ceil(T / b), a unit moves the k releases of its bin. What counts
of the releases is one number per bin: with mu = sqrt(k) / z and y standard normal in R^b, the likelihood ratio of "with
the unit" to "without" is, without it,

    S / b,  S = sum_j X_j,  X_j = exp(mu y_j - mu^2 / 2)  independent log-normals of mean 1,

    delta(epsilon) = max(E (S/b - e^epsilon)+, E (1 - e^epsilon S/b)+)      (a unit goes, a unit comes).

Source: Chua et al., "Balls-and-Bins sampling for DP-SGD" (arXiv 2412.16802): the dominating pair, and Fact 4.2, what a
number of samples supports; Choquette-Choo et al. (arXiv 2410.06266) for the same pair with adaptive releases.
Deviations: (1) T is rounded up to whole cycles; a shorter run is post-processing of that. (2) `ratio` puts arithmetic
in the place of sampling: both deltas are expectations of convex functions of S, and spreading the mass of an interval
on its two ends, mean kept, enlarges such an expectation, for one term and for sums of independent ones (convex order).
Adjacency 'zero-out' or 'add-remove'.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

from fedjax_seg.core import checks

SAMPLES = 400_000  # half a second for five bins; 1e-5 shown supports 6.3e-5
_CELLS = 1600  # of the grid of log X: epsilon to three or four digits
_REACH = 9.0  # standard deviations of log X on the grid; what lies beyond (1e-19) is added to delta
_CHUNK = 1 << 20
_MOST = 700.0  # exp of more is no float64


class Ratio(NamedTuple):
    """The likelihood ratio S / b without the unit, on a grid: larger than the true one in convex order."""

    values: Any  # float64 [n]
    mass: Any  # float64 [n]
    beyond: float  # what the grid leaves out costs at most so much delta


def epsilon(
    noise_multiplier: float, bins: int, rounds: int, delta: float, samples: int = SAMPLES, seed: int = 0
) -> tuple[float, float, str]:
    """Monte Carlo: (epsilon, delta_supported, what that means in words).

    The epsilon at which samples of the dominating pair show `delta`, the larger one of both directions. It is formal at
    `delta_supported` only, which is more: 4e5 samples that show 1e-5 support 6.3e-5; 1.1e7 that show 5e-6 support 1e-5.

    Args:
      noise_multiplier: standard deviation / sensitivity, >= 0; 0 gives infinity.
      delta: what the samples show at epsilon, in (0, 1).
    """
    _check(noise_multiplier, bins, rounds, delta)
    checks.number("samples", samples, low=1, integer=True)
    if noise_multiplier == 0:
        return math.inf, 1.0, "there is no noise"
    rng = np.random.default_rng(seed)
    mu = _mu(noise_multiplier, bins, rounds)
    found = max(_shown(_losses(mu, bins, samples, rng, present), delta) for present in (True, False))
    supported = delta_supported(samples, delta)
    words = (
        f"Monte Carlo: {samples} samples show delta {delta:.3g} at this epsilon and formally support delta"
        f" {supported:.3g}, in which the chance of unlucky samples is counted"
    )
    return found, supported, words


def delta_supported(samples: int, delta: float) -> float:
    """The delta that may be claimed where so many samples show `delta` (Fact 4.2, as in jax_privacy).

    Were the true delta at the epsilon found above tau * delta, the samples would show as little with probability at
    most exp(-samples KL(delta, tau delta)), whichever epsilon that is, since delta falls in epsilon. The claim is the
    sum of both, for the best tau.
    """
    from jax_privacy.experimental.monte_carlo import delta_calculation  # here: slow to load

    return float(delta_calculation.get_overall_delta(samples, delta))


def ratio(noise_multiplier: float, bins: int, rounds: int) -> Ratio:
    """The distribution from which `delta_of` and `epsilon_of` compute proven upper bounds. 0.1 s."""
    checks.number("noise_multiplier", noise_multiplier, low=0.0, above=0.0)
    mu = _mu(noise_multiplier, bins, rounds)
    low, high = -mu * mu / 2 - _REACH * mu, mu * mu / 2 + _REACH * mu
    step = (high - low) / _CELLS
    cells = _CELLS + 1 + 2 * bins.bit_length()  # every average may round up by a cell
    power, size = _lognormal(mu, low, step, cells), 1  # the average of `size` of the X_j
    total, terms = None, 0
    for bit in range(bins.bit_length()):
        if bit:
            power, size = _averaged(power, power, 0.5, step), 2 * size
        if bins >> bit & 1:
            total = power if total is None else _averaged(total, power, terms / (terms + size), step)
            terms += size
    # Of one X: at most 2 Q(9) of its mass and of its mean of 1 are beyond the grid; of S/b and of 1, b times that.
    beyond = 2 * bins * float(special.ndtr(-_REACH))
    return Ratio(np.exp(low + step * np.arange(cells)), total, beyond)


def delta_of(ratio: Ratio, epsilon: float) -> float:
    """An upper bound of delta at epsilon >= 0, for both directions."""
    at = math.exp(min(epsilon, _MOST))
    gone = float(np.sum(ratio.mass * np.maximum(0.0, ratio.values - at)))
    come = float(np.sum(ratio.mass * np.maximum(0.0, 1 - at * np.minimum(ratio.values, 1.0))))
    return min(1.0, max(gone, come) + ratio.beyond)


def epsilon_of(ratio: Ratio, delta: float) -> float:
    """An upper bound of epsilon at delta; infinite where the grid does not get there."""
    excess = lambda e: math.log(delta_of(ratio, e)) - math.log(delta)
    if excess(0.0) <= 0:
        return 0.0
    if excess(_MOST) > 0:
        return math.inf
    root = float(optimize.brentq(excess, 0.0, _MOST, xtol=1e-9))
    return root if excess(root) <= 0 else root + 2e-9


def proven_epsilon(noise_multiplier: float, bins: int, rounds: int, delta: float) -> float:
    """An upper bound without sampling: 8.388 for z = 1, 5 bins, 20 rounds and delta 1e-5 (4 Gaussians: 9.997)."""
    _check(noise_multiplier, bins, rounds, delta)
    return epsilon_of(ratio(noise_multiplier, bins, rounds), delta) if noise_multiplier else math.inf


def by_count(noise_multiplier: float, bins: int) -> Callable[[int, float], float]:
    """(releases, delta) -> epsilon after so many of them, as `proven_epsilon`; every distribution is made once."""
    made = functools.cache(lambda cycles: ratio(noise_multiplier, bins, cycles * bins))
    return lambda count, delta: epsilon_of(made(-(-count // bins)), delta) if count else 0.0


def _mu(noise_multiplier: float, bins: int, rounds: int) -> float:
    return math.sqrt(-(-rounds // bins)) / noise_multiplier


def _lognormal(mu: float, low: float, step: float, cells: int) -> Any:
    """Mass of X on the points exp(low + i step), i < cells: of every interval on its ends, mean kept."""
    edges = low + step * np.arange(_CELLS + 1)
    mass = _between((edges + mu * mu / 2) / mu)
    mean = _between((edges - mu * mu / 2) / mu)  # E[X; interval]: weighted by X, log X is mu^2 further up
    points = np.exp(edges)
    upper = np.clip((mean - mass * points[:-1]) / np.diff(points), 0.0, mass)
    found = np.zeros(cells)
    found[:_CELLS] += mass - upper
    found[1 : _CELLS + 1] += upper
    return found


def _between(edges: Any) -> Any:
    """P(edges[i] < N <= edges[i + 1]), to full relative precision in both tails."""
    below, above = special.ndtr(edges), special.ndtr(-edges)
    return np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])


def _averaged(p: Any, q: Any, weight: float, step: float) -> Any:
    """weight * A + (1 - weight) * B of independent A ~ p, B ~ q on the grid of logarithms, spread on it, mean kept.

    weight exp(a) + (1 - weight) exp(a - d) lies as far from exp(a) for every a: one shift for every distance d.
    """
    cells = len(p)
    found = np.zeros(cells + 1)
    for distance in range(cells):
        for high, low, share in ((p, q, weight), (q, p, 1 - weight)) if distance else ((p, q, weight),):
            factor = share + (1 - share) * math.exp(-distance * step)
            start = max(0, distance + math.floor(math.log(factor) / step))  # it is no smaller than the smaller one
            upper = (factor * math.exp((distance - start) * step) - 1) / math.expm1(step)
            upper = min(1.0, max(0.0, upper))
            pairs = high[distance:] * low[: cells - distance]
            found[start : start + len(pairs)] += (1 - upper) * pairs
            found[start + 1 : start + 1 + len(pairs)] += upper * pairs
    return found[:cells]


def _losses(mu: float, bins: int, samples: int, rng: Any, present: bool) -> Any:
    """float64 [samples]: privacy losses, drawn with the unit (the log ratio) or without it (minus that)."""
    found, most = [], max(1, _CHUNK // bins)
    for start in range(0, samples, most):
        y = rng.standard_normal((min(most, samples - start), bins))
        if present:
            y[:, 0] += mu  # all bins are alike
        top = y.max(axis=1)
        log = mu * top - mu * mu / 2 + np.log(np.mean(np.exp(mu * (y - top[:, None])), axis=1))
        found.append(log if present else -log)
    return np.concatenate(found)


def _shown(losses: Any, delta: float) -> float:
    """The least epsilon >= 0 with mean (1 - exp(epsilon - L))+ <= delta."""
    count, losses = len(losses), losses[losses > 0]
    shown = lambda e: float(-np.sum(np.expm1(np.minimum(e - losses, 0.0)))) / count - delta
    return float(optimize.brentq(shown, 0.0, float(losses.max()), xtol=1e-6)) if shown(0.0) > 0 else 0.0


def _check(noise_multiplier: float, bins: int, rounds: int, delta: float) -> None:
    checks.number("noise_multiplier", noise_multiplier, low=0.0)
    checks.number("bins", bins, low=1, integer=True)
    checks.number("rounds", rounds, low=1, integer=True)
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
