"""What can be audited: {name: maker(n, dim, clip, epsilon, delta) -> Audited}. The code that runs, never a copy of it.

A maker gives the rule without noise, the proven bound that is to hold for it, and, where the mechanism makes a claim,
the noisy release. A new aggregator with a bound needs one line here: `of_aggregator` reads the rest from it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_seg import aggregation
from fedjax_seg.aggregation.adaptive_clipping import adaptive_dp_fedavg as make_adaptive
from fedjax_seg.aggregation.lift import combine
from fedjax_seg.aggregation.private import dp_fedavg as make_dp_fedavg
from fedjax_seg.aggregation.private import private_sim_agg as make_private_sim_agg
from fedjax_seg.aggregation.private_ball import dp_fedhavg as make_dp_fedhavg
from fedjax_seg.aggregation.ref_sim_agg import ref_sim_agg as make_ref_sim_agg
from fedjax_seg.aggregation.similarity import SAFE, similarity_weights
from fedjax_seg.audit.audited import Audited, of_aggregator
from fedjax_seg.audit.gradients import dp_sgd
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, Array, ProvenBound
from fedjax_seg.privacy import audit, audit_starts, bounds, hyperbolic_bounds

_CURVATURE, _GAMMA = 2.0, 1.0  # of the hyperbolic means, FedHAvg's


def _plain(
    name: str, clip: float, n: int, bound: ProvenBound, *, examples: Sequence[float] | None = None, **options: Any
) -> Audited:
    """An aggregator that does not clip, on updates in the ball: the change of what it decodes."""
    made = of_aggregator(aggregation.make(name, **options), n, clip, name=name, examples=examples)
    rule = audit.rule_of(aggregation.make(name, **options), examples=examples, decoded=True)
    return made._replace(rule=rule, radius=clip, bound=bound, adjacency=bound.adjacency, scales=())


def _private(
    name: str, maker: Callable[..., Aggregator], n: int, size: float, epsilon: float, delta: float, **options: Any
) -> Audited:
    """A private aggregator, and its twin without noise."""
    try:
        loud = maker(smallest_cohort=n, epsilon=epsilon, delta=delta, **options)
    except checks.UserError as error:  # of some no noise serves so few clients
        quiet = maker(smallest_cohort=n, noise_multiplier=0.0, **options)
        return of_aggregator(quiet, n, size, name=name, note=f"no canaries: {error}")
    options |= {"noise_multiplier": 0.0}
    return of_aggregator(loud, n, size, name=name, quiet=maker(smallest_cohort=n, **options), claimed=(epsilon, delta))


def sizes(n: int) -> list[float]:
    """Public examples per client for the weighted rules: 171, 86, 43, ... 1, like the uneven hospitals of FeTS."""
    return [max(1.0, float(round(171 * 0.5**i))) for i in range(n)]


def mean(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """FedAvg with equal weights: 2 C/n."""
    return _plain("mean", clip, n, bounds.mean_replace_one(clip, n))


def weighted_mean(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """FedAvg with public weights: 2 C max p."""
    share = max(sizes(n)) / sum(sizes(n))
    return _plain("weighted_mean", clip, n, bounds.weighted_mean(clip, share), examples=sizes(n))


def clipped_mean(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """The sum of clipped updates: C."""
    made = aggregation.make("clipped_mean", clip=clip, statistics="refuse")
    return of_aggregator(made, n, clip, name="clipped_mean")


def similarity_rule(shares: Any, eps: Any = SAFE) -> audit.Rule:
    """The printed SimAgg on clipped updates with public W = shares; the mean where all weights are 0."""

    def rule(x: Array, present: Array) -> Array:
        weights = similarity_weights(x, jnp.asarray(shares, x.dtype), present, eps)
        return combine(jnp.where(jnp.sum(weights) > 0.5, weights, present / jnp.sum(present)), x)

    return rule


def sim_agg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """SimAgg over the whole model, public W = 1/n: the tight bound."""
    made = _plain("sim_agg", clip, n, bounds.simagg_tight(clip, n), per="model", of="updates")
    return made._replace(changed=(0,), smooth=lambda eps: similarity_rule(np.full(n, 1 / n), eps))


def sim_agg_without_shares(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """SimAgg with W = 0."""
    proven, none = bounds.simagg_tight(clip, n), np.zeros(n)
    smooth = lambda eps: similarity_rule(none, eps)
    return Audited("sim_agg, W = 0", similarity_rule(none), clip, proven, proven.adjacency, smooth=smooth)


def sim_agg_weighted(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """SimAgg with uneven public W."""
    shares = [size / sum(sizes(n)) for size in sizes(n)]
    proven = bounds.simagg_public_weights(clip, shares)
    made = _plain("sim_agg", clip, n, proven, examples=sizes(n), per="model", of="updates")
    return made._replace(name="sim_agg_weighted", smooth=lambda eps: similarity_rule(shares, eps))


def extrinsic_mean(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """FedHAvg's mean in the ball."""
    proven = hyperbolic_bounds.extrinsic(clip, n, _CURVATURE, _GAMMA)
    options: dict[str, Any] = {"c": _CURVATURE, "gamma": _GAMMA, "per": "model", "of": "updates"}
    return _plain("extrinsic_mean", clip, n, proven, **options)


def gyro_mean(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """FedHAvg's gyro-barycentre, any client changed."""
    return gyro_at(n, clip, None)


def gyro_mean_last(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """The same with the last client changed: 2 C/K."""
    return gyro_at(n, clip, n)._replace(name="gyro_mean, the last client")


def gyro_at(n: int, clip: float, position: int | None) -> Audited:
    """The gyro mean with the client at one position of its order (1 to n) changed; None: any of them."""
    proven = hyperbolic_bounds.gyro(clip, n, position, _CURVATURE, _GAMMA)
    options: dict[str, Any] = {"c": _CURVATURE, "gamma": _GAMMA, "per": "model", "of": "updates"}
    made = _plain("gyro_mean", clip, n, proven, **options)
    return made if position is None else made._replace(changed=(position - 1,))


def geometric_median(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """RFA: 2 C."""
    return _plain("geometric_median", clip, n, bounds.convex_combination(clip))


def krum(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """Krum: 2 C."""
    if n < 3:
        raise checks.UserError(f"mechanism krum: n: {n} given, at least 3 clients expected")
    return _plain("krum", clip, n, bounds.convex_combination(clip), f=min(1, n - 3))


def private_sim_agg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """SimAgg with noise for the tight bound."""
    made = _private("private_sim_agg", make_private_sim_agg, n, clip, epsilon, delta, clip=clip)
    return made._replace(smooth=_smooth_on_the_ball(n, clip))


def private_sim_agg_2c(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """SimAgg with noise for 2 C."""
    made = _private("private_sim_agg", make_private_sim_agg, n, clip, epsilon, delta, clip=clip, bound="2C")
    return made._replace(name="private_sim_agg_2c", smooth=_smooth_on_the_ball(n, clip))


def _smooth_on_the_ball(n: int, clip: float) -> Callable[[Array], audit.Rule]:
    def clipped(x: Array) -> Array:
        norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=1, keepdims=True) + 1e-24)
        return x * jnp.minimum(1, clip / norms)

    return lambda eps: lambda x, present: similarity_rule(np.full(n, 1 / n), eps)(clipped(x), present)


def dp_fedavg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """DP-FedAvg: C."""
    return _private("dp_fedavg", make_dp_fedavg, n, clip, epsilon, delta, clip=clip)


def adaptive_dp_fedavg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """DP-FedAvg with a clip that follows a quantile."""
    return _private("adaptive_dp_fedavg", make_adaptive, n, clip, epsilon, delta, clip=clip)


def local_dp(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """Noise at every client: 2 C."""
    loud = aggregation.make("local_dp", clip=clip, epsilon=epsilon, delta=delta)
    quiet = aggregation.make("local_dp", clip=clip, noise_multiplier=0.0)
    quiet = quiet._replace(mechanism=loud.mechanism)  # its messages are what is audited, also without noise
    return of_aggregator(loud, n, clip, name="local_dp", quiet=quiet, claimed=(epsilon, delta))


def ref_sim_agg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """Similarity to a released reference, zero-out: 1."""
    return _private("ref_sim_agg", make_ref_sim_agg, n, clip, epsilon, delta, tau=clip, denominator="noisy")


def ref_sim_agg_replace(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """The same for replace-one: 2."""
    options = {"tau": clip, "denominator": "noisy", "adjacency": "replace-one"}
    return _private("ref_sim_agg", make_ref_sim_agg, n, clip, epsilon, delta, **options)._replace(
        name="ref_sim_agg_replace"
    )


def dp_fedhavg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """Noise in the ball: 1/sqrt(c)."""
    return _private("dp_fedhavg", make_dp_fedhavg, n, clip, epsilon, delta, c=_CURVATURE, gamma=_GAMMA)


def dp_simagg(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """DP-SimAgg as printed; its epsilon is claimed, not proven.

    Canaries: the first client on the mean of the others, where the estimated sensitivity, hence the noise, is nearly 0;
    then moved away from it.
    """
    loud = aggregation.make("dp_simagg", clip=clip, epsilon=epsilon, delta=delta)
    quiet = aggregation.make("dp_simagg", clip=clip, noise=False)
    made = of_aggregator(loud, n, clip, name="dp_simagg", quiet=quiet, claimed=(epsilon, delta))
    canary = None
    if n > 1:
        up = n // 2
        start = next(s for s in audit_starts.structured(n, dim, 0) if s.name.startswith(f"client on the mean, {up} of"))
        canary = audit.Witness(clip * start.rows, 0, clip * start.other, start.name, "replace-one")
    smooth = lambda eps: similarity_rule(np.full(n, 1 / n), eps)
    note = "as printed: the epsilon is claimed, not proven"
    return made._replace(changed=(0,), canary=canary, smooth=smooth, note=note)


def geyer(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """Geyer's clip by the median of the round; its epsilon is claimed, not proven.

    Canaries: half of the clients long, half short; without one of the long ones the median, hence the noise, is small.
    """
    from fedjax_seg.privacy import accounting  # here: its library is slow to load

    z = accounting.gaussian_sigma(epsilon, delta)
    loud, quiet = (aggregation.make("geyer", noise_multiplier=s) for s in (z, 0.0))
    made = of_aggregator(loud, n, clip, name="geyer", quiet=quiet, claimed=(epsilon, delta))
    rows = np.where(np.arange(n)[:, None] < (n + 1) // 2, 1.0, 1e-3) * clip * np.eye(dim)[:1]
    canary = audit.Witness(rows, 0, np.zeros(dim), "half long, half short; a long one to 0", made.adjacency)
    return made._replace(canary=canary, note="the clip is the median of the round: the epsilon is claimed, not proven")


MECHANISMS: dict[str, Callable[[int, int, float, float, float], Audited]] = {
    "mean": mean,
    "weighted_mean": weighted_mean,
    "clipped_mean": clipped_mean,
    "sim_agg": sim_agg,
    "sim_agg_without_shares": sim_agg_without_shares,
    "sim_agg_weighted": sim_agg_weighted,
    "extrinsic_mean": extrinsic_mean,
    "gyro_mean": gyro_mean,
    "gyro_mean_last": gyro_mean_last,
    "geometric_median": geometric_median,
    "krum": krum,
    "dp_fedavg": dp_fedavg,
    "adaptive_dp_fedavg": adaptive_dp_fedavg,
    "local_dp": local_dp,
    "private_sim_agg": private_sim_agg,
    "private_sim_agg_2c": private_sim_agg_2c,
    "ref_sim_agg": ref_sim_agg,
    "ref_sim_agg_replace": ref_sim_agg_replace,
    "dp_fedhavg": dp_fedhavg,
    "dp_sgd": dp_sgd,
    "dp_simagg": dp_simagg,
    "geyer": geyer,
}
