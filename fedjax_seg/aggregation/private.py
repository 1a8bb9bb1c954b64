"""Aggregators with client-level differential privacy that is proven: one clip of the whole update, one noise per round.

A client sends its clipped update and nothing else: no number of examples, no batch statistics. An update that is not
finite counts as 0 in those coordinates, and a client without examples sends 0, so whatever a client does, its message
is in the ball of radius `clip`. Noise comes with every round, also one without clients.

Feasibility: the signal-to-noise ratio of one release is at most n / (z sqrt d): with 6 to 33 hospitals and a whole
U-Net no aggregator can be useful; with a few hundred trainable numbers, or hundreds of clients, it can.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.lift import Metrics, combine, lift, lift_sum
from fedjax_seg.aggregation.similarity import SAFE, root
from fedjax_seg.core import checks, noise, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, Mechanism, Tree, Variables
from fedjax_seg.privacy import bounds, gaussian

ISOTROPIC = frozenset({"permutation", "orthogonal"})
BOUNDS = ("tight", "2C", "4C")
GEYER_NO_GUARANTEE = (
    "the clip is the median of the clients' norms of this round: it depends on the data, no noise protects it, and"
    " neither is the standard deviation sigma * median, which the release shows",
)


def private_sim_agg(
    clip: float,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    bound: str = "tight",
    adjacency: str = "replace-one",
    smallest_cohort: int | None = None,
) -> Aggregator:
    """SimAgg of clipped updates over the whole model, with noise for a proven sensitivity.

    Source: DP-SimAgg, Algorithm 1, lines 10-18 and 22, made sound. Deviations: updates instead of weights, ONE clip and
    one set of weights for the flattened model, W = 1/n (public), no eps in the normaliser, a sensitivity that is
    proven instead of estimated (privacy.bounds), analytic instead of classical noise, one noise per round.

    With fewer counted clients than `smallest_cohort` (a client can fail) the missing ones count as updates of 0; so the
    bound holds whoever fails. Identical updates give their mean (where the printed rule without W gives 0).

    Args:
      clip: C > 0, the Euclidean norm of the update over all parameters.
      epsilon: per round, with `delta`; the noise is the least that the Gaussian mechanism needs for it.
      noise_multiplier: instead of epsilon: z >= 0, standard deviation / sensitivity. 0 = no guarantee.
      bound: 'tight' ((1/sqrt 2 + 2/n) C with n = smallest_cohort), '2C', or '4C' (the paper's Proposition S1).
      adjacency: 'replace-one', 'zero-out' (a client that stays counted, with an update of 0) or 'add-remove': what the
        guarantee is stated for. All three bounds hold for each, the tight one of 'zero-out' is (1/sqrt 2 + 1/n) C;
        amplification by Poisson sampling is proven for 'zero-out' and 'add-remove'.
      smallest_cohort: the fewest clients of a round. Handed over by the engine.
    Raises: UserError for 'tight' where a round may be empty (Poisson sampling); where the model has more than
      parameters, when the round is built.
    Returns: an Aggregator with reads='each'. Metrics, computed without noise and not covered: clipped_fraction and
      largest_weight.
    """
    what = "aggregator private_sim_agg"
    checks.number(f"{what}: clip", clip, low=0.0, above=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    checks.one_of(f"{what}: bound", bound, BOUNDS)
    checks.one_of(f"{what}: adjacency", adjacency, bounds.ADJACENCIES)
    if bound == "tight":
        try:
            proven = bounds.simagg_tight(clip, smallest_cohort or 0, adjacency=adjacency)
        except checks.UserError as error:
            raise checks.UserError(f"{what}: bound 'tight' given; {error}") from None
    else:
        proven = bounds.convex_combination(clip, adjacency) if bound == "2C" else bounds.paper_four_c(clip)
        proven = proven._replace(adjacency=adjacency)
    fewest = smallest_cohort or 0

    def rule(x: Array, w: Array, present: Array) -> Array:
        return combine(sound_weights(x, present, fewest), x)

    def metrics(x: Array, w: Array, present: Array) -> Metrics:
        weights = sound_weights(x, present, fewest)
        over = present & (jnp.sum(jnp.square(x), axis=1) >= (clip * (1 - 1e-5)) ** 2)
        clipped = jnp.sum(over) / jnp.maximum(jnp.sum(present), 1)
        return {"largest_weight": jnp.max(weights), "clipped_fraction": clipped}

    plain = lift(rule, per="model", metrics=metrics, properties=ISOTROPIC)
    aggregator = plain._replace(encode=bounded_encode(plain, what, clip), bound=proven)
    return gaussian.privatize(aggregator, noise_multiplier=z)


def dp_fedavg(
    clip: float,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    expected_clients: float | None = None,
    smallest_cohort: int | None = None,
) -> Aggregator:
    """(sum_k clip(delta_k) + N(0, (z C)^2)) / expected_clients.

    Source: McMahan et al., "Learning differentially private recurrent language models" (2018), Algorithm 1 with the
    fixed-denominator estimator and uniform weights.

    Args:
      clip: C > 0, the Euclidean norm of the update over all parameters.
      epsilon, noise_multiplier, delta: as in `private_sim_agg`; the sensitivity is C (zero-out).
      expected_clients: the public divisor, > 0, never the number that came: qK under Poisson sampling. None = the
        fewest clients of a round.
      smallest_cohort: the fewest clients of a round. Handed over by the engine.
    Raises: UserError where expected_clients is None and a round may be empty; for a model with more than parameters.
    """
    what = "aggregator dp_fedavg"
    checks.number(f"{what}: clip", clip, low=0.0, above=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    divisor = public_count(what, expected_clients, smallest_cohort)
    proven = bounds.clipped_sum(clip)
    plain = lift_sum(unchanged, unchanged, bare=True, divisor=divisor, bound=proven, properties=ISOTROPIC)
    return gaussian.privatize(plain._replace(encode=bounded_encode(plain, what, clip)), noise_multiplier=z)


def local_dp(
    clip: float, *, epsilon: float | None = None, noise_multiplier: float | None = None, delta: float = 1e-5
) -> Aggregator:
    """Mean of clip(delta_k) + N(0, (z 2C)^2): every client adds its own noise before anything leaves it.

    Source: the local model that DP-SimAgg sets its central one against (section V). No trust in the server is needed;
    a mean of n has noise of standard deviation 2 C z / sqrt n, sqrt n times that of a central replace-one mechanism.

    Args:
      clip: C > 0, the Euclidean norm of the update over all parameters.
      epsilon, noise_multiplier, delta: per client and round; two updates of a client differ by at most 2 C, whatever
        its data are (replace-one), so z = standard deviation / 2C.
    Raises: UserError for a model with more than parameters.
    """
    what = "aggregator local_dp"
    checks.number(f"{what}: clip", clip, low=0.0, above=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    plain = lift_sum(unchanged, unchanged, bare=True, properties=ISOTROPIC if z == 0 else frozenset())
    bounded, stddev = bounded_encode(plain, what, clip), z * 2 * float(clip)

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        message = bounded(update, broadcast, variables=variables, key=key)
        return noise.add(message, key, stddev)

    proof = "two clipped updates of one client differ by at most 2C, whatever its data are"
    mechanism = gaussian.mechanism_of("client", 2 * float(clip), z, "replace-one", proof)._replace(local=True)
    return plain._replace(encode=encode, mechanism=mechanism)


def geyer(noise_multiplier: float = 1.0) -> Aggregator:
    """(1/n) (sum_k delta_k / max(1, ||delta_k|| / S) + N(0, (z S)^2)), S the median of the norms of this round.

    Source: Geyer, Klein and Nabi, "Differentially private federated learning: a client level perspective" (2017),
    Algorithm 1, norms over the whole model. Deviation: batch statistics, which it does not have, are averaged by
    examples. NO GUARANTEE as published (`GEYER_NO_GUARANTEE`): S is data. With a public constant in its place it is
    `dp_fedavg`.

    Args:
      noise_multiplier: z >= 0, the paper's sigma.
    """
    checks.number("aggregator geyer: noise_multiplier", noise_multiplier, low=0.0)

    def rule(x: Array, w: Array, present: Array) -> Array:
        norm, middle = _norms(x, present)
        over = norm > middle
        factors = jnp.where(over, middle / jnp.where(over, norm, 1), 1)
        return combine(jnp.where(present, factors, 0) / jnp.maximum(jnp.sum(present), 1), x)

    def metrics(x: Array, w: Array, present: Array) -> Metrics:
        return {"median_norm": _norms(x, present)[1]}

    plain = lift(rule, per="model", metrics=metrics)

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        delta, state, metrics = plain.decode(total, cohort, state, variables=variables, round=round, key=key)
        if noise_multiplier:
            count = jnp.sum(cohort.present)
            stddev = noise_multiplier * metrics["median_norm"] / jnp.maximum(count, 1)
            delta = {**delta, "params": noise.add(delta["params"], key, stddev)}
        return delta, state, metrics

    mechanism = Mechanism("client", math.nan, float(noise_multiplier), "zero-out", False, reasons=GEYER_NO_GUARANTEE)
    kept = {"permutation"} if noise_multiplier else {*ISOTROPIC, "scale", "consensus"}
    return plain._replace(decode=decode, mechanism=mechanism, properties=frozenset(kept))


def sound_weights(x: Array, present: Array, fewest: int) -> Array:
    """Weights [C] of SimAgg with W = 1/n over the present rows and as many rows of 0 as are missing to `fewest`.

    No eps in the normaliser: with total distance 0 the weights are 1/n, the mean.
    """
    count = jnp.sum(present).astype(x.dtype)
    n = jnp.maximum(jnp.maximum(count, fewest), 1)
    missing = n - count
    x = jnp.where(present[:, None], x, 0)
    mean = combine(present / n, x)
    distance = jnp.where(present, root(jnp.sum(jnp.square(x - mean), axis=1)), 0)
    at_zero = root(jnp.sum(jnp.square(mean)))
    total = jnp.sum(distance) + missing * at_zero
    factors = jnp.where(present, 1 / n + total / (SAFE + distance), 0)
    return factors / jnp.maximum(jnp.sum(factors) + missing * (1 / n + total / (SAFE + at_zero)), 1e-30)


def _norms(x: Array, present: Array) -> tuple[Array, Array]:
    """Norms of the rows [C], and the median of those present (the mean of the middle two for an even number)."""
    norm = root(jnp.sum(jnp.square(x), axis=1))
    ordered = jnp.sort(jnp.where(present, norm, jnp.inf))
    count = jnp.maximum(jnp.sum(present), 1)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return norm, jnp.where(jnp.any(present), middle, 0)


def bounded_encode(aggregator: Aggregator, what: str, clip: float) -> Callable[..., Tree]:
    """encode that sends a point of the ball of radius `clip`, of parameters only, with one example per client."""

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        clipped = clip_to(own_parameters(update, what), clip)
        update = update._replace(delta={"params": clipped}, weight=jnp.ones_like(update.weight))
        return aggregator.encode(update, broadcast, variables=variables, key=key)

    return encode


def own_parameters(update: ClientUpdate, what: str) -> Tree:
    """The update's parameters with 0 for every entry that is not finite; all 0 from a client without examples.

    Raises: UserError where the model has more than parameters: nothing would bound that.
    """
    other = sorted(set(update.delta) - {"params"})
    if other:
        raise checks.UserError(
            f"{what}: collections {', '.join(other)} found, only 'params' expected, because nothing clips batch"
            " statistics; use a model without them (--config.model.norm=group, or --config.model.tracked=False)"
        )
    some = update.weight > 0
    return jax.tree.map(lambda v: jnp.where(some & jnp.isfinite(v), v, 0), update.delta["params"])


def public_count(what: str, expected_clients: float | None, smallest_cohort: int | None) -> float:
    """The clients that a sum is divided by, a constant: as given, else the fewest of a round.

    Raises: UserError where neither is a number above 0.
    """
    if expected_clients is not None:
        checks.number(f"{what}: expected_clients", expected_clients, low=0.0, above=0.0)
    count = expected_clients or smallest_cohort
    if not count:
        raise checks.UserError(
            f"{what}: expected_clients: None given and the smallest cohort is {smallest_cohort}, a number above 0"
            " expected: clients per round, q times all clients under Poisson sampling"
        )
    return float(count)


def clip_to(params: Tree, clip: float) -> Tree:
    """params min(1, clip / ||params||) over all leaves; finite for finite input of any size, also in its gradient."""
    scaled, unit = at_scale_one(params, clip)
    norm = root(tree.squared_norm(scaled))
    over = norm * unit > clip
    factor = clip / jnp.where(over, norm, 1)
    return jax.tree.map(lambda x, y: jnp.where(over, y * factor.astype(y.dtype), x), params, scaled)


def at_scale_one(values: Tree, least: float) -> tuple[Tree, Array]:
    """(values / unit, unit) with unit = max(least, the largest entry), a constant to gradients; for finite values.

    The square of 1e30 is no float32. Nor is 1/3e38, which a compiler may form: beyond 1e37 the scale stays 1e37.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(values)]))
    unit = jax.lax.stop_gradient(jnp.clip(largest, least, 1e37))
    return jax.tree.map(lambda x: x / unit.astype(x.dtype), values), unit


def unchanged(params: Tree) -> tuple[Tree, Metrics]:
    return params, {}
