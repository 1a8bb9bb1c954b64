"""Proven sensitivities of aggregates of clipped updates: how far one client can move what is released.

Every function returns a ProvenBound whose proof is its docstring. Common setting: n >= 1 clients of one round, their
updates T_i in the ball ||T_i|| <= C over the WHOLE flattened model, m their plain mean. 'replace-one' exchanges one T_k
for any other point of the ball (the 0 of 'zero-out' is one), 'add-remove' leaves the client out. Float32 rounding is
not part of the proofs. Hyperbolic means: `hyperbolic_bounds`.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import ProvenBound

KAPPA = 1 / (2 * math.sqrt(2))  # how far one similarity step can lead from the mean, in units of C
SAFE = 1e-8  # DP-SimAgg's eps_safe, in the units of the updates
ADJACENCIES = ("zero-out", "add-remove", "replace-one")


def mean_replace_one(clip: float, smallest_cohort: int) -> ProvenBound:
    """2 C / n for the mean over n >= smallest_cohort clients.

    Proof. m - m' = (T_k - T_k') / n and both lie in the ball. For add-remove with n the larger number the same holds:
    m - m' = (T_k - m') / n.
    """
    checked_clip("mean_replace_one", clip)
    n = checked_cohort("mean_replace_one", smallest_cohort)
    return ProvenBound(2 * float(clip) / n, "replace-one", "client", f"m - m' = (T_k - T_k')/n, n >= {n}: 2C/n")


def weighted_mean(clip: float, largest_share: float) -> ProvenBound:
    """2 C max_i p_i for sum_i p_i T_i with public weights p_i >= 0 of sum 1.

    Proof. A - A' = p_k (T_k - T_k'), both in the ball. That holds for public weights only: where the number of examples
    is itself to be protected, the weights move with the client and nothing below 2 C follows (`convex_combination`).

    Args:
      largest_share: the largest p_i of any client in any round, in (0, 1]; 1/n is `mean_replace_one`.
    """
    checked_clip("weighted_mean", clip)
    share = checked_share("weighted_mean", largest_share)
    proof = f"m - m' = p_k (T_k - T_k'), public p_k <= {share:.4g}: 2C max p"
    return ProvenBound(2 * float(clip) * share, "replace-one", "client", proof)


def mean_zero_out(clip: float, divisor: float) -> ProvenBound:
    """C / divisor for sum_i T_i / divisor with a public divisor.

    Proof. Replacing T_k by 0 (or leaving it out) changes the sum by T_k, of norm at most C.
    """
    checked_clip("mean_zero_out", clip)
    checks.number("bound mean_zero_out: divisor", divisor, low=0.0, above=0.0)
    proof = f"the sum changes by T_k, ||T_k|| <= C; divisor {divisor:g} public: C/divisor"
    return ProvenBound(float(clip) / float(divisor), "zero-out", "client", proof)


def clipped_sum(clip: float) -> ProvenBound:
    """C for sum_i T_i: zero-out (or leaving out) of one client changes it by T_k."""
    checked_clip("clipped_sum", clip)
    return ProvenBound(float(clip), "zero-out", "client", "the sum changes by one clipped update, ||T_k|| <= C")


def paper_four_c(clip: float) -> ProvenBound:
    """4 C for every aggregate A = sum_i a_i(T) T_i with a_i >= 0, sum a_i <= 1.

    Source: DP-SimAgg, Proposition S1, whose proof splits A - A' into a change of T_k (2 C) and a change of the weights
    (2 C). It is valid and loose: `convex_combination` is the same statement without the triangle inequality.
    """
    checked_clip("paper_four_c", clip)
    proof = "DP-SimAgg, Proposition S1: 2C for the changed update + 2C for the changed weights"
    return ProvenBound(4 * float(clip), "replace-one", "client", proof)


def convex_combination(clip: float, adjacency: str = "replace-one") -> ProvenBound:
    """2 C for every aggregate A = sum_i a_i(T) T_i with a_i >= 0, sum a_i <= 1 (A = 0 for nobody).

    Proof. A and A' are (sub-)convex combinations of points of the ball, and the ball is convex and holds 0: both lie in
    it, so ||A - A'|| <= 2 C. Nothing is asked of the weights, so it holds for every adjacency and any number of
    clients. With one dominant weight it is approached (1.99999 C), hence tight in general.

    It serves SimAgg, the geometric median by Weiszfeld steps, Krum and multi-Krum. Not the coordinate-wise median or
    trimmed mean: what they return is no combination of whole updates and may lie outside the ball.
    """
    checked_clip("convex_combination", clip)
    proof = "both aggregates are (sub-)convex combinations of points of the ball of radius C: ||A - A'|| <= 2C"
    return ProvenBound(2 * float(clip), checked_adjacency("convex_combination", adjacency), "client", proof)


def simagg_tight(
    clip: float, smallest_cohort: int, *, eps: float = SAFE, adjacency: str = "replace-one"
) -> ProvenBound:
    """(1/sqrt 2 + 2/n) C for SimAgg on the whole model with uniform or zero W, n >= smallest_cohort; at most 2 C.
    (1/sqrt 2 + 1/n) C under zero-out.

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

    3. ||m - m'|| <= 2 C/n (`mean_replace_one`; add-remove with n the larger number; under zero-out, where T_k becomes 0
    and stays counted, m - m' = T_k/n: C/n). So ||A - A'|| <= ||A - m|| + ||m - m'|| + ||m' - A'|| <=
    2 kappa (C + eps) + 2 C/n, and 2 kappa = 1/sqrt 2. Both aggregates are in the ball: at most 2 C. QED

    No constant below 0.3002 C can hold for any n (a client at the mean has weight 1 and may leave it), so there is no
    factor 1/n to be had from a weighting that refers to the data themselves.

    Args:
      smallest_cohort: the fewest clients of a round, >= 1. Public, guaranteed by the sampler.
      eps: eps_safe of the rule, in the units of the updates.
      adjacency: 'replace-one', 'zero-out', or 'add-remove' where the larger of the two rounds has at least
        smallest_cohort clients.
    Raises: UserError where the smallest cohort is unknown or 0: the bound then says nothing below 2 C.
    """
    checked_clip("simagg_tight", clip)
    n = checked_cohort("simagg_tight", smallest_cohort)
    moved = 1 if checked_adjacency("simagg_tight", adjacency) == "zero-out" else 2
    value = 2 * KAPPA * (clip + eps) + moved * clip / n
    proof = (
        "||A - m|| <= C/(2 sqrt 2) (a similarity step is a Weiszfeld step from the mean), ||m - m'|| <="
        f" {moved}C/n, n >= {n}: (1/sqrt 2 + {moved}/n) C, at most 2C; privacy.bounds.simagg_tight"
    )
    return ProvenBound(min(2 * float(clip), float(value)), adjacency, "client", proof)


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
    checked_clip("simagg_public_weights", clip)
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


def ref_sim_agg(adjacency: str = "zero-out") -> ProvenBound:
    """1 (zero-out, add-remove) or 2 (replace-one) for the sum of Ref-SimAgg's messages; no clip, no number of clients.

    The message of a client with update u, for a public reference r (a function of EARLIER releases), a public tau > 0
    and any p in [0, 1], its own secret or not: with x = u - r and a = tau/(tau + ||x||) in (0, 1],
        q = p (a x/tau, a), one vector with one more entry than the model.

    Proof. ||a x||/tau = ||x||/(tau + ||x||) = 1 - a. With s = p a and t = p (1 - a) the two parts of q have the norms
    t and s, where s, t >= 0 and s + t = p <= 1. Zero-out and add-remove change the sum by q:
    ||q||^2 = t^2 + s^2 <= (t + s)^2 <= 1. Replace-one: ||q - q'||^2 <= (t + t')^2 + (s - s')^2, which is convex in
    (s, t, s', t'), so largest where each of (s, t), (s', t') is a corner of its triangle; the nine values are at most
    4, at t = t' = 1. QED. Both are approached by an update of great length (and its opposite).

    The reference must be released before the messages are made: with the mean of the messages' own updates in its
    place one client moves all of them, and the sum changes by up to 2 (n - 2).
    """
    checked_adjacency("ref_sim_agg", adjacency)
    if adjacency == "replace-one":
        return ProvenBound(2.0, adjacency, "client", "||q - q'||^2 <= (t + t')^2 + (s - s')^2 <= 4; bounds.ref_sim_agg")
    return ProvenBound(1.0, adjacency, "client", "||(h/tau, a)||^2 <= (1 - a)^2 + a^2 <= 1, r released; ref_sim_agg")


def weiszfeld_steps(steps: int, adjacency: str = "zero-out") -> ProvenBound:
    """sqrt(M) or 2 sqrt(M) for M smoothed Weiszfeld steps towards the geometric median, each from a released reference.

    A step from r: v = r + tau Q/Q_0 with (Q, Q_0) = sum_i q_i, the messages of `ref_sim_agg`: the weighted mean of the
    updates with weights 1/(tau + ||u_i - r||). Step j starts from r_j, any function of the releases before it, and
    releases (Q, Q_0) + N(0, sigma^2) in every coordinate.

    What is proven: all M releases together give away no more than ONE Gaussian release of sensitivity sqrt(M) s with
    the same sigma, s = 1 or 2 the bound of a step. Hence sigma = z sqrt(M) s gives what a noise multiplier of z gives.
    It is no bound of the change of the last step's point without noise.

    Proof. Fix two neighbouring rounds, 0 and 1. Given the releases before it, step j is N(m_j, sigma^2 I) in the one
    and N(m_j + v_j, sigma^2 I) in the other, ||v_j|| <= s. Draw y in R^M with y_j ~ N(b s, sigma^2), b = 0 or 1: one
    Gaussian release of sensitivity sqrt(M) s. Whoever knows both rounds, but not b, makes all releases from y in turn:
    with l = ||v_j||/s <= 1 and fresh standard normal numbers, the release of step j is m_j plus
    l y_j + sqrt(1 - l^2) sigma xi along v_j plus N(0, sigma^2) across it, which is N(m_j + b v_j, sigma^2 I). So the
    releases are post-processing of y: no test tells b from them that cannot tell it from y. QED. (The same
    follows from Dong, Roth and Su, "Gaussian differential privacy", arXiv:1905.02383, Corollary 3.3.)

    Args:
      steps: M >= 1, fixed before the first release.
    """
    checks.number("bound weiszfeld_steps: steps", steps, low=1, integer=True)
    one = ref_sim_agg(checked_adjacency("weiszfeld_steps", adjacency))
    proof = f"{steps} Gaussian releases of bound {one.value:g}, composed adaptively: times sqrt(M); weiszfeld_steps"
    return one._replace(value=math.sqrt(steps) * one.value, proof=proof)


def checked_clip(name: str, clip: float) -> None:
    """Raises a UserError unless clip is a finite number above 0."""
    checks.number(f"bound {name}: clip", clip, low=0.0, above=0.0)


def checked_share(name: str, share: float) -> float:
    """The largest weight of a client in a mean; raises a UserError unless it is in (0, 1]."""
    checks.number(f"bound {name}: largest_share", share, low=0.0, above=0.0, high=1.0)
    return float(share)


def checked_adjacency(name: str, adjacency: str, allowed: Sequence[str] = ADJACENCIES) -> str:
    """adjacency; raises a UserError unless it is an allowed one."""
    checks.one_of(f"bound {name}: adjacency", adjacency, allowed)
    return adjacency


def checked_cohort(name: str, smallest: int | None) -> int:
    """The fewest clients of a round; raises a UserError where it is unknown or 0."""
    if smallest is None or smallest < 1:
        found = "none known" if smallest is None else f"{smallest} found"
        raise checks.UserError(
            f"bound {name}: smallest cohort {found}, at least 1 client in every round expected; take a sampler of fixed"
            " size, or the bound '2C'"
        )
    return int(smallest)
