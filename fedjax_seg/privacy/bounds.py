"""Proven sensitivities of aggregates of clipped updates: how far one client can move what is released.

Every function returns a ProvenBound whose proof is its docstring. Common setting: n >= 1 clients of one round, their
updates T_i in the ball ||T_i|| <= C over the WHOLE flattened model, m their plain mean. 'replace-one' exchanges one T_k
for any other point of the ball (the 0 of 'zero-out' is one), 'add-remove' leaves the client out. Float32 rounding is
not part of the proofs.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import ProvenBound

KAPPA = 1 / (2 * math.sqrt(2))  # how far one similarity step can lead from the mean, in units of C
SAFE = 1e-8  # DP-SimAgg's eps_safe, in the units of the updates


def mean_replace_one(clip: float, smallest_cohort: int) -> ProvenBound:
    """2 C / n for the mean over n >= smallest_cohort clients.

    Proof. m - m' = (T_k - T_k') / n and both lie in the ball. For add-remove with n the larger number the same holds:
    m - m' = (T_k - m') / n.
    """
    _checked("mean_replace_one", clip)
    n = _cohort("mean_replace_one", smallest_cohort)
    return ProvenBound(2 * float(clip) / n, "replace-one", "client", f"m - m' = (T_k - T_k')/n, n >= {n}: 2C/n")


def mean_zero_out(clip: float, divisor: float) -> ProvenBound:
    """C / divisor for sum_i T_i / divisor with a public divisor.

    Proof. Replacing T_k by 0 (or leaving it out) changes the sum by T_k, of norm at most C.
    """
    _checked("mean_zero_out", clip)
    checks.number("bound mean_zero_out: divisor", divisor, low=0.0, above=0.0)
    proof = f"the sum changes by T_k, ||T_k|| <= C; divisor {divisor:g} public: C/divisor"
    return ProvenBound(float(clip) / float(divisor), "zero-out", "client", proof)


def clipped_sum(clip: float) -> ProvenBound:
    """C for sum_i T_i: zero-out (or leaving out) of one client changes it by T_k."""
    _checked("clipped_sum", clip)
    return ProvenBound(float(clip), "zero-out", "client", "the sum changes by one clipped update, ||T_k|| <= C")


def paper_four_c(clip: float) -> ProvenBound:
    """4 C for every aggregate A = sum_i a_i(T) T_i with a_i >= 0, sum a_i <= 1.

    Source: DP-SimAgg, Proposition S1, whose proof splits A - A' into a change of T_k (2 C) and a change of the weights
    (2 C). It is valid and loose: `simagg_two_c` is the same statement without the triangle inequality.
    """
    _checked("paper_four_c", clip)
    proof = "DP-SimAgg, Proposition S1: 2C for the changed update + 2C for the changed weights"
    return ProvenBound(4 * float(clip), "replace-one", "client", proof)


def simagg_two_c(clip: float, adjacency: str = "replace-one") -> ProvenBound:
    """2 C for every aggregate A = sum_i a_i(T) T_i with a_i >= 0, sum a_i <= 1 (A = 0 for nobody).

    Proof. A and A' are (sub-)convex combinations of points of the ball, and the ball is convex and holds 0: both lie in
    it, so ||A - A'|| <= 2 C. Nothing is asked of the weights, so it holds for every adjacency and any number of
    clients. With one dominant weight it is approached (1.99999 C), hence tight in general.
    """
    _checked("simagg_two_c", clip)
    proof = "both aggregates are (sub-)convex combinations of points of the ball of radius C: ||A - A'|| <= 2C"
    return ProvenBound(2 * float(clip), _adjacency("simagg_two_c", adjacency), "client", proof)


def simagg_tight(
    clip: float, smallest_cohort: int, *, eps: float = SAFE, adjacency: str = "replace-one"
) -> ProvenBound:
    """(1/sqrt 2 + 2/n) C for SimAgg on the whole model with uniform or zero W, n >= smallest_cohort; at most 2 C.

    The rule: d_i = ||T_i - m||, s_i = D / (eps + d_i) with D = sum d, A = sum (W_i + s_i) T_i / sum (W_i + s_i), where
    W_i = 1/n for all i, or W = 0 and A = m when D = 0. (Algorithm 1, lines 10-18, without the eps of its normaliser.)

    Proof. 1. A is a mixture of m (the part of W) and A_s = sum s_i T_i / sum s_i, so ||A - m|| <= ||A_s - m||.

    2. ||A_s - m|| <= kappa (C + eps), kappa = 1/(2 sqrt 2). Write E for the plain average over clients, y = T - m (so
    E y = 0), e = d + eps, v for the unit vector along A_s - m, g = <y, v>: |g| <= d <= e and E g = 0. By Minkowski
    sqrt(E e^2) <= sqrt(E d^2) + eps <= C + eps =: R, since E d^2 = E ||T||^2 - ||m||^2 <= C^2. Now
    ||A_s - m|| = E[g/e] / E[1/e], and for every number l: E[g/e] = E[g (1/e - l)] <= E|1 - l e|. In units of R it is
    enough to find l and mu >= 0 with, for all e > 0,
        |1 - l e| <= kappa/e + mu (e^2 - 1),                                                           (*)
    because then E|1 - l e| <= kappa E[1/e] + mu (E e^2 - 1) <= kappa E[1/e]. Take r1 = 2 sin 15deg, r2 = 2 cos 15deg
    (r1 r2 = 1, r1^2 + r2^2 = 4, r1 + r2 = sqrt 6), mu = 2 kappa/(r1 + r2) = 1/(2 sqrt 3), l = kappa/r1^2 - 2 mu r1.
    The functions f(e) = kappa/e + mu (e^2 - 1) - (1 - l e) and h(e) = kappa/e + mu (e^2 - 1) + (1 - l e) are convex on
    e > 0. f has value and derivative 0 at r1, h has them at r2: both are >= 0 everywhere, and their minimum is (*).

    3. ||m - m'|| <= 2 C/n (`mean_replace_one`; add-remove with n the larger number). So ||A - A'|| <=
    ||A - m|| + ||m - m'|| + ||m' - A'|| <= 2 kappa (C + eps) + 2 C/n, and 2 kappa = 1/sqrt 2. Both aggregates are
    in the ball: at most 2 C. QED

    No constant below 0.3002 C can hold for any n (a client at the mean has weight 1 and may leave it), so there is no
    factor 1/n to be had from a weighting that refers to the data themselves.

    Args:
      smallest_cohort: the fewest clients of a round, >= 1. Public, guaranteed by the sampler.
      eps: eps_safe of the rule, in the units of the updates.
      adjacency: 'replace-one', or 'add-remove' where the larger of the two rounds has at least smallest_cohort clients.
    Raises: UserError where the smallest cohort is unknown or 0: the bound then says nothing below 2 C.
    """
    _checked("simagg_tight", clip)
    n = _cohort("simagg_tight", smallest_cohort)
    value = 2 * KAPPA * (clip + eps) + 2 * clip / n
    proof = (
        "||A - m|| <= C/(2 sqrt 2) (a similarity step is a Weiszfeld step from the mean), ||m - m'|| <= 2C/n,"
        f" n >= {n}: (1/sqrt 2 + 2/n) C, at most 2C; privacy.bounds.simagg_tight"
    )
    return ProvenBound(min(2 * float(clip), float(value)), _adjacency("simagg_tight", adjacency), "client", proof)


def simagg_public_weights(clip: float, weights: Sequence[float], *, eps: float = SAFE) -> ProvenBound:
    """C min{2, 2 max(kappa, theta tau + (1 - theta) kappa) + 2/n} for SimAgg with public W, plus O(n eps).

    theta = omega/(omega + n^2), omega = sum W > 0, tau = sum |W_i/omega - 1/n|. Replace-one, one cohort; for several
    take the largest value.

    Proof. As in `simagg_tight`, A is a mixture t A_W + (1 - t) A_s with A_W = sum W_i T_i/omega, t = omega/(omega + S),
    S = sum s_i. (a) ||A_W - m|| = ||sum (W_i/omega - 1/n) T_i|| <= tau C, and also <= max d_i <= D. (b) By the means'
    inequality S = D sum 1/(eps + d_i) >= n^2 b with b = D/(D + n eps), so t <= omega/(omega + n^2 b). Where t <= theta,
    ||A - m|| <= t tau C + (1 - t) kappa (C + eps) is at most the larger of its values at t = 0 and theta. Where
    t > theta, (t - theta) ||A_W - m|| <= (t - theta) D and t - theta <=
    omega n^2 (1 - b)/((omega + n^2 b)(omega + n^2)) <= 1 - b = n eps/(D + n eps): at most n eps. Together ||A - m|| <=
    max(kappa, theta tau + (1 - theta) kappa) C + (n + kappa) eps, and step 3 is that of `simagg_tight`. QED
    """
    _checked("simagg_public_weights", clip)
    w = np.asarray(weights, np.float64)
    if w.ndim != 1 or not len(w) or not np.all(np.isfinite(w)) or np.any(w < 0) or not w.sum() > 0:
        raise checks.UserError(
            f"bound simagg_public_weights: weights {weights!r} given, finite numbers >= 0 with a sum above 0 expected"
        )
    n, omega = len(w), float(w.sum())
    theta, tau = omega / (omega + n * n), float(np.abs(w / omega - 1 / n).sum())
    drift = max(KAPPA, theta * tau + (1 - theta) * KAPPA)
    value = 2 * (drift * clip + (n + KAPPA) * eps) + 2 * clip / n
    proof = f"as simagg_tight with public weights: theta={theta:.4g}, tau={tau:.4g}, n={n}; simagg_public_weights"
    return ProvenBound(min(2 * float(clip), value), "replace-one", "client", proof)


def _checked(name: str, clip: float) -> None:
    checks.number(f"bound {name}: clip", clip, low=0.0, above=0.0)


def _adjacency(name: str, adjacency: str) -> str:
    checks.one_of(f"bound {name}: adjacency", adjacency, ("replace-one", "add-remove"))
    return adjacency


def _cohort(name: str, smallest: int | None) -> int:
    if smallest is None or smallest < 1:
        found = "none known" if smallest is None else f"{smallest} found"
        raise checks.UserError(
            f"bound {name}: smallest cohort {found}, at least 1 client in every round expected; take a sampler of fixed"
            " size, or the bound '2C'"
        )
    return int(smallest)
