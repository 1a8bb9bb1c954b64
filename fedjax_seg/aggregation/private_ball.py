"""DP-FedHAvg: noise on the sum of points of the Poincare ball, before the map back; no clip, no bound to estimate.

FedHAvg's extrinsic mean has no useful sensitivity after log0: near the boundary a small move in the ball is a long one
outside (privacy.hyperbolic_bounds.extrinsic). In the ball every client's point is shorter than 1/sqrt(c), whatever it
learned; all that follows the noise is post-processing.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp

from fedjax_seg.aggregation.hyperbolic import exp0, log0
from fedjax_seg.aggregation.lift import Metrics, lift_sum
from fedjax_seg.aggregation.private import clip_to, own_parameters, public_count
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Tree, Variables
from fedjax_seg.privacy import bounds, gaussian, hyperbolic_bounds

_RIM = 20.0  # tanh is 1 from here on, in float64 as well


def dp_fedhavg(
    *,
    c: float = 2.0,
    gamma: float = 1.0,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    adjacency: str = "zero-out",
    expected_clients: float | None = None,
    margin: float = 1e-5,
    smallest_cohort: int | None = None,
) -> Aggregator:
    """log0((sum_k exp0(gamma delta_k) + N(0, (z bound)^2)) / expected_clients) / gamma over the whole model.

    Source: FedHAvg, section 3.2.1, made private. Deviations: updates, the flattened model as one point, a public
    divisor. Without noise and with all the expected clients it is extrinsic_mean with of='updates', per='model'. The
    result is no longer than artanh(1 - margin)/(sqrt(c) gamma), also where the noise leaves the ball.

    gamma plays the part of a clip: an update is straight up to about 1/(sqrt(c) gamma), and a direction beyond.

    Args:
      c: curvature, > 0. gamma: norm scale, > 0.
      epsilon, noise_multiplier, delta: as in `private_sim_agg`; the bound is 1/sqrt(c) for 'zero-out' and
        'add-remove', 2/sqrt(c) for 'replace-one'.
      adjacency: 'zero-out', 'add-remove' or 'replace-one': what the guarantee is stated for.
      expected_clients: the public divisor, as in `dp_fedavg`.
      margin: distance kept from the boundary, in [1e-7, 0.5], on the argument of artanh.
      smallest_cohort: the fewest clients of a round. Handed over by the engine.
    Raises: UserError where expected_clients is None and a round may be empty; for a model with more than parameters.
    Returns: an Aggregator with reads='sum'; metric clamped_fraction: 1 where the mean was moved back to the margin.
    """
    what = "aggregator dp_fedhavg"
    checks.number(f"{what}: c", c, low=0.0, above=0.0)
    checks.number(f"{what}: gamma", gamma, low=0.0, above=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    checks.one_of(f"{what}: adjacency", adjacency, bounds.ADJACENCIES)
    checks.number(f"{what}: margin", margin, low=1e-7, high=0.5)
    divisor = public_count(what, expected_clients, smallest_cohort)
    proven = hyperbolic_bounds.ball_sum(c, adjacency)
    longest = _RIM / (math.sqrt(c) * gamma)  # longer updates have the same point, and squares that are no float32

    def inward(params: Tree) -> tuple[Tree, Metrics]:
        return _whole(clip_to(params, longest), lambda v: exp0(gamma * v, c)), {}

    def outward(params: Tree) -> tuple[Tree, Metrics]:
        beyond = c * tree.squared_norm(params) >= (1 - margin) ** 2
        vectors = _whole(params, lambda y: log0(y, c, margin=margin) / gamma)
        return vectors, {"clamped_fraction": beyond.astype(jnp.float32)}

    kept = frozenset({"permutation", "orthogonal"})
    plain = lift_sum(inward, outward, bare=True, divisor=divisor, bound=proven, properties=kept)

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        own = update._replace(delta={"params": own_parameters(update, what)})
        return plain.encode(own, broadcast, variables=variables, key=key)

    return gaussian.privatize(plain._replace(encode=encode), noise_multiplier=z)


def _whole(params: Tree, function: Callable[[Array], Array]) -> Tree:
    """A function of the flattened model, [D] -> [D], back in its tensors."""
    return tree.unflat(function(tree.flat(params)), params)
