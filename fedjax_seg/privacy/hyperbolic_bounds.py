"""Proven sensitivities of means in the Poincare ball (aggregation.hyperbolic), one point of the ball per client.

Setting: updates u_i with ||u_i|| <= C over the whole model, points y_i = exp0(gamma u_i) in the ball of curvature -c, a
mean of the points, log0 of it, divided by gamma. Throughout a = sqrt(c) gamma C, the length of the longest update in
the units of the ball. 'replace-one' exchanges one u_k for any other of that norm. The maps' margin only moves a result
back onto a ball around 0, which is a projection and shortens distances. Float32 rounding is not part of the proofs.
"""

import math

from fedjax_seg.core import checks
from fedjax_seg.core.types import ProvenBound
from fedjax_seg.privacy.bounds import checked_adjacency, checked_clip, checked_cohort, checked_share


def extrinsic(
    clip: float, smallest_cohort: int, c: float, gamma: float, *, largest_share: float | None = None
) -> ProvenBound:
    """C - artanh((1 - 2/K) tanh a) / (sqrt(c) gamma) for the extrinsic mean of K >= smallest_cohort clients.

    With public weights of at most p the same with 2 p in the place of 2/K; 2 C for K = 1 or p > 1/2. It is attained:
    all others at one point of the rim, and the client moves to the opposite one. It tends to 2 C/K (the plain mean) for
    a -> 0 and to C - ln(K - 1)/(2 sqrt(c) gamma) for a -> infinity, and is below sinh(2 a)/(K sqrt(c) gamma), which
    follows from the largest slope of log0.

    Proof. In units with sqrt(c) = gamma = 1; R = tanh a, h = artanh, g(r) = h(r)/r. h is convex and increasing on
    [0, 1) with h(0) = 0, so the secant over [0, r], which is g(r), increases in r.

    1. The means m, m' lie in the ball of radius R, and m - m' = p_k (y_k - y_k'), so ||m - m'|| <= L := 2 R/K (2 R p).
    Let r >= r' be their norms, d = r - r' <= ||m - m'|| <= L. Since log0 m = g(r) m,
        ||log0 m - log0 m'||^2 = h(r)^2 + h(r')^2 - 2 g(r) g(r') <m, m'>
                               = (h(r) - h(r'))^2 + g(r) g(r') (||m - m'||^2 - d^2)
                              <= (h(r) - h(r - d))^2 + g(r) g(r - d) (L^2 - d^2) =: F(r, d).
    2. h is convex, so h(r) - h(r - d) increases in r, and so do g(r) and g(r - d): F(r, d) <= F(R, d).
    3. F(R, d) <= F(R, L) = (h(R) - h(R - L))^2 where L <= R, that is K >= 2 (p <= 1/2). For d < L
        (h(R) - h(R - L))^2 - (h(R) - h(R - d))^2 = [h(R - d) - h(R - L)] [2 h(R) - h(R - d) - h(R - L)].
    The first factor over L - d is the secant over [R - L, R - d], by convexity at least that over [0, R - d], g(R - d).
    The second over L + d is a weighted mean (weights d, L) of the secants over [R - d, R] and [R - L, R], both at least
    that over [0, R], g(R). So the difference is at least g(R) g(R - d) (L^2 - d^2). QED

    R - L = (1 - 2/K) R, and the value decreases in K, so the smallest K serves. Add-remove with K the larger number:
    m - m' = (y_k - m')/K, and ||m - m'|| <= L again. For K = 1 or p > 1/2: both results are in the ball of radius C.

    Args:
      clip: C > 0. smallest_cohort: K >= 1, public, guaranteed by the sampler.
      c, gamma: > 0, of the mean.
      largest_share: p, the largest weight of a client in a weighted mean with public weights; smallest_cohort then
        plays no part. None: uniform.
    """
    a = _length("extrinsic", clip, c, gamma)
    n = checked_cohort("extrinsic", smallest_cohort)
    share = 1 / n if largest_share is None else checked_share("extrinsic", largest_share)
    if share > 0.5:
        value, proof = 2 * float(clip), "both means are in the ball of radius C: 2C"
    else:
        # The same without cancellation: tanh a is 1 to rounding where a is large.
        up = math.log1p(share * math.expm1(2 * a)) if a < 300 else 2 * a + math.log(share)
        value = (up - math.log1p(share * math.expm1(-2 * a))) / (2 * a) * float(clip)
        proof = f"C - artanh((1 - 2p) tanh a)/(sqrt(c) gamma), p={share:.4g}, a={a:.4g}; hyperbolic_bounds.extrinsic"
    return ProvenBound(value, "replace-one", "client", proof)


def gyro(clip: float, clients: int, position: int | None, c: float, gamma: float) -> ProvenBound:
    """min{2 C, (2 C/K) exp(2 a (K - k)/K)} for the client at position k of the gyro mean's fold over K clients.

    The mean depends on the order of its clients: the first can move it most, the last by 2 C/K exactly.

    Proof. Let D(x, y) = 2 artanh(sqrt(c) ||-x (+) y||), the hyperbolic distance in curvature -1. Left translations
    x -> z (+) x keep it, so D(0, x (+) y) = D(-x, y) <= D(0, x) + D(0, y). The fold adds the points 1/K (x) y_i =
    exp0(gamma u_i/K), of distance at most 2 a/K from 0.

    1. The result is at most K (2 a/K) = 2 a from 0, and sqrt(c) ||log0 m|| = D(0, m)/2: both results are in the ball of
    radius C, at most 2 C apart.
    2. A right translation x -> x (+) y with l = D(0, y) stretches D by at most e^l. For w = -x (+) x' and the rotation
    G = gyr[-x, x'], -x (+) (x' (+) y) = w (+) G y, so D(x (+) y, x' (+) y) = D(y, w (+) G y) <= D(y, w (+) y) +
    D(y, G y). Let x' go to x: a translation by a short w moves a point at distance l by at most D(0, w) cosh l, and G
    turns by the area of the triangle (0, x, x'), at most D(0, w) tanh(D(0, x)/2) < D(0, w), which moves y by at most
    sinh l times as much. The stretch at every x is below cosh l + sinh l = e^l; along the geodesic from x to x' that
    adds up to the claim.
    3. Replacing client k moves the fold at k by D(y_k/K, y_k'/K) <= 4 a/K (left translation), and the K - k clients
    behind it stretch that by e^(2 a/K) each. log0 does not lengthen: 2 sqrt(c) ||log0 m - log0 m'|| <= D(m, m'). So the
    results differ by at most (4 a/K) exp(2 a (K - k)/K) / (2 sqrt(c) gamma). QED

    Args:
      clip: C > 0.
      clients: K >= 1, exactly: the bound is not monotone in K. Where rounds differ, take the largest value.
      position: k from 1 to K, public like the whole order; None = the worst one, the first.
      c, gamma: > 0, of the mean.
    """
    a = _length("gyro", clip, c, gamma)
    checks.number("bound gyro: clients", clients, low=1, integer=True)
    k = 1 if position is None else position
    checks.number("bound gyro: position", k, low=1, high=clients, integer=True)
    exponent = 2 * a * (clients - k) / clients
    most = 2 * float(clip)
    value = most if exponent > math.log(clients) else most / clients * math.exp(exponent)
    proof = f"(2C/K) exp(2a(K - k)/K), at most 2C, K = {clients}, k = {k}, a = {a:.4g}; hyperbolic_bounds.gyro"
    return ProvenBound(value, "replace-one", "client", proof)


def ball_sum(c: float, adjacency: str = "zero-out") -> ProvenBound:
    """1/sqrt(c) (zero-out, add-remove) or 2/sqrt(c) (replace-one) for the sum of points of the ball; no clip.

    Proof. Whatever the update, its point is in the ball: ||exp0(gamma u)|| = tanh(sqrt(c) gamma ||u||)/sqrt(c), below
    1/sqrt(c), and 0 goes to 0. The sum changes by one point, or by the difference of two. QED. Both are approached by
    long updates.
    """
    checks.number("bound ball_sum: c", c, low=0.0, above=0.0)
    times = 2 if checked_adjacency("ball_sum", adjacency) == "replace-one" else 1
    proof = f"every point of the ball is shorter than 1/sqrt(c), c = {c:g}: {times}/sqrt(c)"
    return ProvenBound(times / math.sqrt(c), adjacency, "client", proof)


def _length(name: str, clip: float, c: float, gamma: float) -> float:
    """a = sqrt(c) gamma C."""
    checked_clip(name, clip)
    checks.number(f"bound {name}: c", c, low=0.0, above=0.0)
    checks.number(f"bound {name}: gamma", gamma, low=0.0, above=0.0)
    return math.sqrt(c) * gamma * clip
