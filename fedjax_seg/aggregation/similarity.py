"""Weights by closeness to the plain mean: SimAgg as DP-SimAgg prints it, as it was released, RegSimAgg.

Three texts of one idea exist, and they weight differently. With n = 6 clients, one of them three times as far away, and
shares W = .4 .3 .1 .1 .05 .05 (L2 distances in all rows):

  printed         .187 .186 .187 .181 .185 .074    W_i + s_i, s_i about n: the shares have next to no say
  released        .291 .241 .145 .142 .119 .062    W_i + u_i, sum u = 1: half shares, half similarity
  multiplicative  .409 .308 .106 .103 .053 .021    W_i u_i

Singular: a client on the mean has distance 0 and takes all the weight, up to eps.
"""

import jax.numpy as jnp

from fedjax_seg.aggregation.lift import About, Metrics, combine, lift, lift_with_round
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, Array

SAFE = 1e-8  # eps_safe of DP-SimAgg
RELEASED_SAFE = 1e-5  # eps of the released code
VARIANTS = ("printed", "released", "multiplicative")
SHARES = ("normalised", "counts")


def similarity_weights(x: Array, w: Array, present: Array, eps: float = SAFE) -> Array:
    """W_norm of DP-SimAgg: (W_i + s_i) / (eps + sum_j (W_j + s_j)), s_i = sum_j d_j / (eps + d_i).

    Source: DP-SimAgg, Algorithm 1, lines 10-17: the mean is unweighted, d_i is the Euclidean distance to it. Deviation:
    none. Since sum s >= n^2, shares W that sum to 1 have an influence of at most 1/(1 + n^2) (2.7 % for n = 6), while
    raw counts dominate.

    With W = 0 and identical clients the total distance is 0 and ALL WEIGHTS ARE 0: the printed rule then returns 0, not
    the mean. (In float32 the mean of equal rows can differ from them by rounding, which hides this.)

    Args:
      x: float [C, D]; a row per client.
      w: float [C], W: shares, counts, or 0.
      present: bool [C]; other rows count for nothing.
      eps: in the units of x; keeps a client on the mean finite.
    Returns: float32 [C]; sums to 1 up to eps, 0 where absent.
    """
    distance = distances(x, present)
    factors = jnp.where(present, jnp.sum(distance) / (eps + distance), 0)
    combined = jnp.where(present, w + factors, 0)
    return combined / (eps + jnp.sum(combined))


def distances(x: Array, present: Array, kind: str = "l2") -> Array:
    """[C, D], bool [C] -> [C]: from the unweighted mean of the present rows; 0 where absent.

    kind: 'l2', 'l1', or 'signed_sum': |sum(mean) - sum(x_i)|, which is 0 for any two tensors with equal sums.
    """
    count = jnp.maximum(jnp.sum(present), 1).astype(x.dtype)
    mean = combine(present / count, jnp.where(present[:, None], x, 0))
    if kind == "l2":
        found = root(jnp.sum(jnp.square(x - mean), axis=1))
    elif kind == "l1":
        found = jnp.sum(jnp.abs(x - mean), axis=1)
    else:
        found = jnp.abs(jnp.sum(mean) - jnp.sum(x, axis=1))
    return jnp.where(present, found, 0)


def root(square: Array) -> Array:
    """The square root with a finite gradient at 0."""
    some = square > 0
    return jnp.where(some, jnp.sqrt(jnp.where(some, square, 1)), 0)


def shares_of(w: Array, shares: str) -> Array:
    """W from the examples per client: 'normalised' W_i / sum W (what OpenFL hands over), or the raw 'counts'."""
    return w if shares == "counts" else w / jnp.where(jnp.sum(w) > 0, jnp.sum(w), 1)


def sim_agg(
    variant: str = "printed", *, shares: str = "normalised", per: str = "tensor", of: str = "weights"
) -> Aggregator:
    """Mean of the clients weighted by their closeness to the plain mean.

    Source: 'printed': DP-SimAgg, Algorithm 1, lines 10-18 (L2 distance, eps 1e-8, W_i + s_i with s_i not normalised).
    'released': the similarity_weighted_aggregation of the FeTS 2021 code: distance |sum(mean) - sum(T_i)| (a signed
    sum: 0 for a reversed copy), u_i = s_i / (sum s + eps) with eps 1e-5, w_i = (W_i + u_i) / (sum + eps), then a
    weighted average that divides by its weights again and falls back to W where they are all 0. 'multiplicative': the
    same with W_i u_i (RegAgg of 2021). Deviation: none in 'printed'; the released code was transliterated from its
    description, not copied.

    Args:
      variant: 'printed', 'released' or 'multiplicative'.
      shares: what W is: 'normalised' examples_i / sum (OpenFL), or 'counts'. Printed with normalised shares: the data
        sizes have an influence of at most 1/(1 + n^2); with counts they have nearly all of it. Not decided by the
        paper, whose text says "volume weights".
      per: 'tensor' (OpenFL calls the rule once per tensor: every tensor has weights of its own) or 'model'.
      of: 'weights' (OpenFL: full weights) or 'updates'; the same up to rounding and eps, as the rule commutes with
        translations.
    Returns: an Aggregator with reads='each'; metrics (means over tensors) largest_weight, and mean_distance. Batch
      statistics are averaged by examples, as the else branch of Algorithm 1 (line 25) does.
    """
    _checked("sim_agg", variant, shares, per)

    def weights(x: Array, w: Array, present: Array) -> Array:
        shared = shares_of(w, shares)
        if variant == "printed":
            return similarity_weights(x, shared, present)
        return _released_weights(distances(x, present, "signed_sum"), shared, present, variant == "multiplicative")

    def rule(x: Array, w: Array, present: Array) -> Array:
        return combine(weights(x, w, present), x)

    def metrics(x: Array, w: Array, present: Array) -> Metrics:
        mean = jnp.sum(distances(x, present)) / jnp.maximum(jnp.sum(present), 1)
        return {"largest_weight": jnp.max(weights(x, w, present)), "mean_distance": mean}

    kept = {"permutation", "consensus", "translation", "hull"}
    kept |= {"orthogonal"} if variant == "printed" else set()
    return lift(rule, per=per, of=of, metrics=metrics, weighted=True, properties=frozenset(kept))


def reg_sim_agg(
    variant: str = "published", *, start: int = 10, decimals: int = 0, per: str = "tensor", shares: str = "normalised"
) -> Aggregator:
    """SimAgg with a regularisation from round `start` on, on weights.

    Source: RegSimAgg, "Regularized weight aggregation in networked federated learning for glioblastoma segmentation"
    (2022). 'published', as its equations are reported: (2) d_i = ||p_i - mean||_1 and s_i = sum d / (d_i + eps);
    (3) u = s / (sum s + eps); (4) v = N_i / sum N; (5) w = (u + v) / (sum + eps); (6) after round 10 w is divided by
    the parameter shift. Read here as each client's own mean absolute shift from the previous global tensor,
    |p_i - p_prev|, + eps, and the weights normalised again: a shift that all clients share would cancel. The paper's
    text was not at hand, so this is a reading.

    'released': the FeTS 2022 code, which divides all weights, elementwise, by ONE tensor, the weighted mean of
    (previous - local), + 1e-5. A weighted average divides by the sum of its weights, so the divisor cancels: its
    REGULARISATION IS A NO-OP, and this variant is `sim_agg(variant='released')`, in every round. Not imitated: where
    the divisor is exactly 0 the code raises and falls back to FedAvg.

    Args:
      start: rounds r > start (counted from 0) are regularised; >= 0.
      decimals: > 0 rounds the new weights to so many decimals, as the released code does (4); 0 = off.
      per: 'tensor' or 'model'.
      shares: as in `sim_agg`.
    """
    checks.one_of("aggregator reg_sim_agg: variant", variant, ("published", "released"))
    checks.one_of("aggregator reg_sim_agg: shares", shares, SHARES)
    checks.one_of("aggregator reg_sim_agg: per", per, ("tensor", "model"))
    checks.number("aggregator reg_sim_agg: start", start, low=0, integer=True)
    checks.number("aggregator reg_sim_agg: decimals", decimals, low=0, high=12, integer=True)
    kind = "l1" if variant == "published" else "signed_sum"

    def rule(x: Array, w: Array, present: Array, about: About) -> tuple[Array, Metrics]:
        weights = _released_weights(distances(x, present, kind), shares_of(w, shares), present, multiplied=False)
        shift = jnp.where(present, jnp.mean(jnp.abs(x - about.server), axis=1), 0)
        if variant == "published":
            damped = jnp.where(present, weights / (shift + RELEASED_SAFE), 0)
            weights = jnp.where(about.round > start, damped / jnp.maximum(jnp.sum(damped), 1e-30), weights)
        y = combine(weights, x)
        metrics = {"largest_weight": jnp.max(weights), "mean_shift": jnp.sum(shift) / jnp.maximum(jnp.sum(present), 1)}
        return jnp.round(y, decimals) if decimals else y, metrics

    kept = frozenset() if decimals else frozenset({"permutation", "consensus", "translation", "hull"})
    return lift_with_round(rule, per=per, of="weights", weighted=True, properties=kept)


def _released_weights(distance: Array, share: Array, present: Array, multiplied: bool) -> Array:
    """Steps 3 to 6 of the released code: weights that sum to 1, the shares where they would all be 0."""
    factors = jnp.where(present, jnp.sum(distance) / (distance + RELEASED_SAFE), 0)
    u = factors / (jnp.sum(factors) + RELEASED_SAFE)
    combined = jnp.where(present, share * u if multiplied else share + u, 0)
    combined = combined / (jnp.sum(combined) + RELEASED_SAFE)
    some = jnp.sum(combined) > 0
    combined = jnp.where(some, combined, share)
    return combined / jnp.where(jnp.sum(combined) > 0, jnp.sum(combined), 1)


def _checked(name: str, variant: str, shares: str, per: str) -> None:
    checks.one_of(f"aggregator {name}: variant", variant, VARIANTS)
    checks.one_of(f"aggregator {name}: shares", shares, SHARES)
    checks.one_of(f"aggregator {name}: per", per, ("tensor", "model"))
