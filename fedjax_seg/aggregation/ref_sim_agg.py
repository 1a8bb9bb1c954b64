"""Ref-SimAgg: similarity weights that refer to a released point, so that one client moves a sum of n by at most 1.

SimAgg weighs a client by its distance to the mean of the round. That mean is data: no proven bound of it shrinks with
the number of clients. Here distances are taken to what was released in earlier rounds, every client computes its own
weight, and the numerator and the denominator of the weighted mean are one sum of messages of norm at most 1.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.private import at_scale_one, own_parameters, public_count
from fedjax_seg.aggregation.similarity import root
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, Tree, Variables
from fedjax_seg.privacy import bounds, gaussian

REFERENCES = ("released", "zero")
DENOMINATORS = ("constant", "noisy")
_LEAST = 1e-30  # of a denominator without noise


def ref_sim_agg(
    tau: float,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    adjacency: str = "zero-out",
    reference: str = "released",
    denominator: str = "constant",
    expected_clients: float | None = None,
    expected_weight: float = 0.5,
    cap: float = 0.0,
    lr: float = 1.0,
    smallest_cohort: int | None = None,
) -> Aggregator:
    """lr (r + tau Q/den), (Q, Q_0) = sum_k p_k (a_k x_k/tau, a_k) + noise, x_k = u_k - r, a_k = tau/(tau + |x_k|).

    A client sends `similarity_message`, times p_k: a vector with one entry more than the model, of norm at most 1
    whatever the client does (privacy.bounds.ref_sim_agg), so nothing is clipped; updates far from r are shortened to
    tau. Without noise, with r the mean, tau = eps_safe and den = Q_0, it is SimAgg without shares, algebraically.
    Source: none; the weights have the form of DP-SimAgg's, Algorithm 1, lines 12-14.

    The next r is the released mean r + tau Q/den, shrunk as James and Stein do by what its noise alone would give:
    max(0, 1 - d s^2/|.|^2), s = tau z bound/den the noise of a coordinate, d the number of parameters. Unshrunk, its
    noise would make all distances equal. r is part of the state, begins at 0, and is told to all clients.

    Args:
      tau: > 0, in the units of the update's norm: the distance to r at which a client counts half.
      epsilon, noise_multiplier, delta: as in `private_sim_agg`; z = standard deviation / bound, the bound being 1
        for 'zero-out' and 'add-remove', 2 for 'replace-one'.
      adjacency: 'zero-out', 'add-remove' or 'replace-one': what the guarantee is stated for.
      reference: 'released', or 'zero': r stays 0.
      denominator: 'constant': den = expected_clients expected_weight, public. 'noisy': den = Q_0, at least the standard
        deviation of its noise (below it there is no signal). Take the constant where expected_clients/z is below 8.
      expected_clients: as in `dp_fedavg`; for denominator='constant'.
      expected_weight: the mean p a that is reckoned with, in (0, 1]; for denominator='constant'. 1 never oversteps;
        below half the real one the released r swings around the clients.
      cap: 0: all clients alike, p = 1. Else p = min(N, cap)/cap with N the weight of the update: its examples, or under
        a secure sum their fraction of the most that any client has, a public number. p is covered by the guarantee, N
        is not sent.
      lr: > 0, of the server's step; r is not scaled by it.
      smallest_cohort: the fewest clients of a round. Handed over by the engine.
    Raises: UserError where the constant denominator has no count of clients; for a model with more than parameters.
    Returns: an Aggregator with reads='sum'. Metrics, post-processing of the release: denominator, reference_norm (of
      the next r).
    """
    what = "aggregator ref_sim_agg"
    checks.number(f"{what}: tau", tau, low=0.0, above=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    checks.one_of(f"{what}: adjacency", adjacency, bounds.ADJACENCIES)
    checks.one_of(f"{what}: reference", reference, REFERENCES)
    checks.one_of(f"{what}: denominator", denominator, DENOMINATORS)
    checks.number(f"{what}: expected_weight", expected_weight, low=0.0, above=0.0, high=1.0)
    checks.number(f"{what}: cap", cap, low=0.0)
    checks.number(f"{what}: lr", lr, low=0.0, above=0.0)
    constant = denominator == "constant"
    if constant or expected_clients is not None:
        expected = public_count(what, expected_clients, smallest_cohort) * expected_weight
    proven = bounds.ref_sim_agg(adjacency)
    stddev = z * proven.value
    follows = reference == "released"

    def init(variables: Variables) -> Tree:
        return {"reference": tree.zeros_like(variables["params"])} if follows else {}

    def broadcast(state: Tree) -> Tree:
        return state

    def encode(update: ClientUpdate, told: Tree, *, variables: Variables, key: Array) -> Tree:
        params = own_parameters(update, what)
        value, weight = similarity_message(params, told["reference"] if follows else tree.zeros_like(params), tau)
        # Without examples nothing is sent, not even the way back from r to 0.
        p = jnp.where(update.weight > 0, jnp.minimum(update.weight, cap) / cap if cap else 1.0, 0.0)
        return {"value": jax.tree.map(lambda x: x * p.astype(x.dtype), value), "weight": weight * p}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        den = jnp.float32(expected) if constant else jnp.maximum(total["weight"], max(stddev, _LEAST))
        centre = jax.tree.map(lambda q: q * (tau / den).astype(q.dtype), total["value"])
        if follows:
            centre = tree.add(state["reference"], centre)
        delta = jax.tree.map(lambda x, s: (lr * x).astype(s.dtype), centre, variables["params"])
        if not follows:
            return {"params": delta}, state, {"denominator": den, "reference_norm": jnp.zeros(())}
        following = shrunk(centre, tau * stddev / den)
        metrics = {"denominator": den, "reference_norm": root(tree.squared_norm(following))}
        return {"params": delta}, {"reference": following}, metrics

    kept = {"permutation", "orthogonal"}
    kept |= {"consensus", "hull"} if not constant and lr == 1 else set()
    kept |= {"weighted"} if cap else set()
    plain = Aggregator(init, broadcast, encode, decode, reads="sum", bound=proven, properties=frozenset(kept))
    return gaussian.privatize(plain, noise_multiplier=z)


def similarity_message(params: Tree, reference: Tree, tau: float) -> tuple[Tree, Array]:
    """(a x/tau, a) with x = params - reference and a = tau/(tau + |x|), |x| over all leaves.

    Formed as (x, tau)/(tau + |x|) at the scale of the largest entry: the norm is at most 1 for finite params of any
    size, in float32 as well.
    """
    (own, other), unit = at_scale_one((params, reference), tau)
    x, least = tree.subtract(own, other), tau / unit
    below = jnp.maximum(least + root(tree.squared_norm(x)), 1e-30)
    return jax.tree.map(lambda v: v / below.astype(v.dtype), x), least / below


def shrunk(values: Tree, stddev: Array) -> Tree:
    """values max(0, 1 - d stddev^2/|values|^2), d their number: 0 where they are no longer than noise of that size.

    Source: James and Stein (1961), positive part, d for d - 2.
    """
    square = tree.squared_norm(values)
    noise = tree.size(values) * jnp.square(stddev)
    some = square > noise
    factor = jnp.where(some, 1 - noise / jnp.where(some, square, 1), 0)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), values)
