"""Means of updates: uniform, by examples, and norm-clipped. All of them are sums."""

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.lift import Metrics, lift_sum
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, ProvenBound, Tree

_LINEAR = frozenset({"permutation", "consensus", "translation", "scale", "orthogonal", "hull"})


def mean(*, of: str = "updates") -> Aggregator:
    """Uniform mean over the present clients, 1/K sum delta_k (FedAvg as FedHAvg, section 4.3.1, uses it).

    Args:
      of: what a client sends: 'updates' (local - server) or 'weights' (its whole weights, as the hospitals of the
        cluster-based SMC do, equation 3). The same new model, up to rounding.
    """
    return lift_sum(_as_is, _as_is, of=of, properties=_LINEAR)


def weighted_mean(*, of: str = "updates") -> Aggregator:
    """Mean weighted by examples, sum n_k delta_k / sum n_k (FedAvg; 'FedAvg-weighted' of FedHAvg).

    Args:
      of: as in `mean`.
    """
    return lift_sum(_as_is, _as_is, of=of, weighted=True, properties=_LINEAR)


def clipped_mean(clip: float, *, weighted: bool = False, statistics: str = "average") -> Aggregator:
    """Mean of updates whose norm over the whole model is clipped to `clip` before they leave the client.

    Source: the clipped mean of DP-FedAvg (McMahan et al., "Learning differentially private recurrent language models"),
    without its noise: delta_k min(1, clip / ||delta_k||). Only parameters are clipped.

    Args:
      clip: > 0, in the units of the update's Euclidean norm over all parameters.
      weighted: weights by examples instead of uniform.
      statistics: 'average': batch statistics travel unclipped, weighted by examples, and the metric
        'clipped_fraction' (of the present clients) is reported. 'refuse': a client sends its clipped update and nothing
        else, and the mean is over the number of present clients; a model with batch statistics is a UserError.
    Returns: an Aggregator; `bound` is set where it is true of the whole message: statistics='refuse', which excludes
      weighted=True (the number of examples has no bound).
    """
    checks.number("aggregator clipped_mean: clip", clip, above=0.0, low=0.0)
    checks.one_of("aggregator clipped_mean: weighted", weighted, (False, True))
    checks.one_of("aggregator clipped_mean: statistics", statistics, ("average", "refuse"))

    def inward(params: Tree) -> tuple[Tree, Metrics]:
        square = tree.squared_norm(params)
        over = square > clip * clip
        factor = jnp.where(over, clip / jnp.sqrt(jnp.where(over, square, 1)), 1)  # no root of 0: finite gradient there
        clipped = {"clipped_fraction": over.astype(jnp.float32)}
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), params), clipped

    bound = None
    if statistics == "refuse":
        proof = "the message is delta * min(1, clip/||delta||), so its norm is at most clip (up to float32 rounding)"
        bound = ProvenBound(float(clip), adjacency="zero-out", unit="client", proof=proof)
    return lift_sum(
        inward,
        _as_is,
        weighted=weighted,
        bare=statistics == "refuse",
        bound=bound,
        properties=frozenset({"permutation", "orthogonal"}),
    )


def _as_is(params: Tree) -> tuple[Tree, Metrics]:
    return params, {}
