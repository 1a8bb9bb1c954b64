"""What an adversary really tells apart: lower bounds of epsilon from many releases of two neighbouring inputs.

A lower bound above the epsilon that a mechanism claims refutes it (with the confidence stated); one below proves
nothing. The inputs are best taken from the sensitivity auditor (audit.Witness), which are the worst known.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array

STATISTICS = ("projection", "scale")
_THRESHOLDS = 400
_ENTRIES = 1 << 21  # of the releases held at a time
_LITTLE = 2e6  # numbers drawn; below it, compiling well takes longer than running badly


class CanaryAudit(NamedTuple):
    """What an audit of two inputs found. With the given confidence all of its bounds hold.

    Attributes:
      statistic: what tells the inputs apart best: 'projection' (where a release is) or 'scale' (how far it scatters).
      epsilon_cp: lower bound of epsilon at delta, for any mechanism. It saturates near ln(trials/2) - 1.3.
      epsilon_gdp, mu: lower bounds where the noise is Gaussian of a fixed standard deviation; None elsewhere.
      trials: releases of each input; half of them choose, the other half count.
      confidence: of all bounds together.
      delta: of both epsilons.
      true_positive, false_positive: rates on the counting half, at the threshold of epsilon_cp.
    """

    statistic: str
    epsilon_cp: float
    epsilon_gdp: float | None
    mu: float | None
    trials: int
    confidence: float
    delta: float
    true_positive: float
    false_positive: float

    @property
    def epsilon_low(self) -> float:
        """The larger bound."""
        return max(self.epsilon_cp, self.epsilon_gdp or 0.0)


def audit_releases(
    release: Callable[[Array, Any], Array],
    here: Any,
    there: Any,
    *,
    trials: int = 20000,
    delta: float = 1e-5,
    seed: int = 0,
    confidence: float = 0.95,
    gaussian: bool = False,
    means: tuple[Any, Any] | None = None,
) -> CanaryAudit:
    """Releases both inputs many times and bounds what epsilon can at most be claimed.

    Half of the releases choose the statistic, its direction and its threshold; error rates are counted on the other
    half, with exact (Clopper-Pearson) bounds that share the allowed error equally. Statistics are the likelihood ratios
    of N(m, s^2 V) against N(m', s'^2 V), V diagonal, with s = s' ('projection') and without ('scale'); V, s and s' are
    fitted. A coordinate that is released without noise decides alone where it differs.

    Source: Jagielski, Ullman and Oprea (2020) for the counting; Nasr et al. (2023), "Tight auditing of differentially
    private machine learning", for the bound of mu. Deviation: mu may come out negative and is then reported as 0, so
    that the bound covers where nothing can be told apart.

    Args:
      release: (key, input) -> an array of any shape; pure jax.
      here, there: two neighbouring inputs, trees of arrays.
      trials: releases of each input, >= 20.
      seed: of the releases' keys.
      gaussian: whether the mechanism adds Gaussian noise of a fixed standard deviation (or post-processes such a sum);
        only then a bound of mu is one, and epsilon_gdp is what the best such mechanism would have at delta.
      means: the releases without noise, where they are known (in many dimensions they are a better guess than the
        average of the choosing half, which is taken otherwise).
    Raises: UserError for bad options.
    """
    checks.number("audit_releases: trials", trials, low=20, integer=True)
    checks.number("audit_releases: delta", delta, low=0.0, high=0.5)
    checks.number("audit_releases: confidence", confidence, above=0.0, low=0.0, high=1 - 1e-9)
    here, there = jax.tree.map(jnp.asarray, here), jax.tree.map(jnp.asarray, there)
    size = math.prod(jax.eval_shape(release, jax.random.key(seed), here).shape)
    keys = jax.random.split(jax.random.key(seed), 2 * trials).reshape(2, trials)
    half, chunk = trials // 2, max(1, min(1000, trials // 2, _ENTRIES // max(size, 1)))
    quick = {"xla_backend_optimization_level": 0} if trials * size < _LITTLE else None
    many = jax.jit(lambda ks, one: jax.vmap(lambda k: release(k, one).reshape(-1))(ks), compiler_options=quick)

    def draw(which: int, first: int) -> Iterator[np.ndarray]:
        """The first releases of one input, float64 [some, size] at a time; the same whenever it is asked."""
        for i in range(0, first, chunk):
            padded = np.minimum(np.arange(i, i + chunk), first - 1)  # one shape, one program
            yield np.asarray(many(keys[which][padded], (here, there)[which]), np.float64)[: first - i]

    model = _fitted(draw, half, means)
    found = [np.concatenate([_seen(y, *model) for y in draw(which, trials)]) for which in (0, 1)]
    scores = _scores(found, half, size)
    return from_scores(scores, delta=delta, confidence=confidence, gaussian=gaussian)


def from_scores(
    scores: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    delta: float,
    confidence: float = 0.95,
    gaussian: bool = False,
) -> CanaryAudit:
    """The bounds, from scores of the releases of both inputs under one or more statistics.

    Args:
      scores: {statistic: (scores of `here` [trials], of `there` [trials])}, finite; in both the first half chooses. A
        statistic may be fitted on the first halves, and on nothing else.
      delta, confidence, gaussian: as in `audit_releases`.
    """
    trials = len(next(iter(scores.values()))[0])
    half = trials // 2
    error, rest = (1 - confidence) / (4 if gaussian else 2), trials - half  # two rates a bound
    best: dict[str, Any] = {}
    for name, (low, high) in scores.items():
        pooled = np.sort(np.concatenate([low[:half], high[:half]]))
        cuts = np.unique(pooled[np.linspace(0, len(pooled) - 1, _THRESHOLDS).astype(int)])
        cuts = np.unique(np.concatenate([cuts, pooled[:30], pooled[-30:]]))
        for flipped in (False, True):  # which input counts as the alarm
            true, false = _rates(low[:half], high[:half], cuts, flipped)
            tpr, fpr = clopper_pearson(true, half, error)[0], clopper_pearson(false, half, error)[1]
            # A bound of mu at rare events is all chance, and the best of many chances would be chosen.
            middle = np.maximum(true, false) >= 0.02 * half
            middle &= np.minimum(true, false) <= 0.98 * half
            mu = np.where(middle, mu_bound(tpr, fpr), -1.0)
            for kind, reached in (("cp", epsilon_bound(tpr, fpr, delta)), ("gdp", mu)):
                i = int(np.argmax(reached))
                if kind not in best or reached[i] > best[kind][0]:
                    best[kind] = (reached[i], name, flipped, cuts[i])

    def counted(kind: str) -> tuple[str, Any, Any, float, float]:
        _, name, flipped, cut = best[kind]
        low, high = scores[name]
        true, false = (int(c[0]) for c in _rates(low[half:], high[half:], np.array([cut]), flipped))
        tpr, fpr = clopper_pearson(true, rest, error)[0], clopper_pearson(false, rest, error)[1]
        return name, tpr, fpr, true / rest, false / rest

    name, tpr, fpr, *rates = counted("cp")
    found = CanaryAudit(name, float(epsilon_bound(tpr, fpr, delta)), None, None, trials, confidence, delta, *rates)
    if not gaussian:
        return found
    name, tpr, fpr, *_ = counted("gdp")
    mu_low = max(0.0, float(mu_bound(tpr, fpr)))
    return found._replace(statistic=name, mu=mu_low, epsilon_gdp=_epsilon_of(mu_low, delta))


def clopper_pearson(hits: Any, count: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """One-sided bounds (low, high) of a rate, each wrong with a probability of at most `error`. Elementwise.

    Source: Clopper and Pearson (1934).
    """
    hits = np.asarray(hits)
    low = np.where(hits > 0, stats.beta.ppf(error, np.maximum(hits, 1), count - hits + 1), 0.0)
    high = np.where(hits < count, stats.beta.ppf(1 - error, hits + 1, np.maximum(count - hits, 1)), 1.0)
    return low, high


def epsilon_bound(true_low: Any, false_high: Any, delta: float) -> np.ndarray:
    """max(0, ln((TPR - delta)/FPR)): every (epsilon, delta) mechanism has TPR <= e^epsilon FPR + delta."""
    excess = np.maximum(np.asarray(true_low) - delta, 1e-300)
    return np.maximum(0.0, np.log(excess / np.maximum(false_high, 1e-300)))


def mu_bound(true_low: Any, false_high: Any) -> np.ndarray:
    """Phi^-1(TPR) - Phi^-1(FPR), which no test of a mu-Gaussian mechanism exceeds; signed.

    Source: Dong, Roth and Su (2022), "Gaussian differential privacy", the trade-off function of two Gaussians.
    """
    return stats.norm.ppf(true_low) - stats.norm.ppf(false_high)


def _fitted(
    draw: Callable[[int, int], Iterable[np.ndarray]], half: int, means: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The centres of both inputs' releases and 1 / the variance of every coordinate, from the choosing half."""
    centres, variances = [], []
    for which in (0, 1):
        parts = draw(which, half)
        first = next(iter(parts))[0]  # squares are taken from here: far away a small variance would be lost
        moments = [(np.sum(y - first, axis=0), np.sum((y - first) ** 2, axis=0)) for y in draw(which, half)]
        shift, square = (np.sum(m, axis=0) / half for m in zip(*moments))
        centres.append(first + shift)
        variances.append(np.maximum(square - shift**2, 0))
    variance = (variances[0] + variances[1]) / 2
    least = max(1e-8 * float(np.max(variance, initial=0)), 1e-30)
    if means is not None:
        known = [np.asarray(m, np.float64).reshape(-1) for m in means]
        centres = [np.where(variance > least, k, c) for k, c in zip(known, centres)]
    return centres[0], centres[1], 1 / np.maximum(variance, least)


def _seen(y: np.ndarray, here: np.ndarray, there: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """[some, 3]: releases along the way from one centre to the other, and their squared distances to both."""
    along = (y - (here + there) / 2) @ ((there - here) * precision)
    return np.stack([along, *((y - c) ** 2 @ precision for c in (here, there))], axis=1)


def _scores(found: list[np.ndarray], half: int, size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{statistic: (scores of `here`, of `there`)}; the larger, the more like `there`."""
    spread = [max(float(np.mean(found[i][:half, 1 + i])) / max(size, 1), 1e-300) for i in (0, 1)]
    ratio = lambda f: f[:, 1] / (2 * spread[0]) - f[:, 2] / (2 * spread[1])
    return {"projection": (found[0][:, 0], found[1][:, 0]), "scale": (ratio(found[0]), ratio(found[1]))}


def _rates(low: np.ndarray, high: np.ndarray, cuts: np.ndarray, flipped: bool) -> tuple[np.ndarray, np.ndarray]:
    """Alarms on the input that is to raise one, and on the other, per threshold."""
    low, high = np.sort(low), np.sort(high)
    if flipped:  # an alarm for `here`: a score below the threshold
        return np.searchsorted(low, cuts, "left"), np.searchsorted(high, cuts, "left")
    return len(high) - np.searchsorted(high, cuts, "left"), len(low) - np.searchsorted(low, cuts, "left")


def _epsilon_of(mu: float, delta: float) -> float:
    if not mu > 0 or not delta > 0:
        return 0.0 if not mu > 0 else math.inf
    from fedjax_seg.privacy import accounting  # here: its library is slow to load

    return accounting.gaussian_epsilon(1 / mu, delta)
