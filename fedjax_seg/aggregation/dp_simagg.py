"""DP-SimAgg as printed: Algorithms 1 to 3, with what is wrong in them left in. It has NO privacy guarantee.

Source: "Similarity weighted aggregation with global differential privacy for federated brain lesion segmentation",
Algorithms 1 (DP-SimAgg), 2 (AddGaussianNoise) and 3 (L2Clip). Sound relatives: `private.private_sim_agg`, `dp_fedavg`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.lift import combine, lift
from fedjax_seg.aggregation.similarity import SHARES, root, shares_of, similarity_weights
from fedjax_seg.core import checks
from fedjax_seg.core import noise as long_tailed
from fedjax_seg.core.types import Aggregator, Array, Cohort, Mechanism, Tree, Variables

NO_GUARANTEE = (
    "the neighbour T'[0] = 1*C has norm C sqrt(d), not C, and one fixed direction is not the worst case",
    "the weights are not computed anew for the neighbour, so the estimated sensitivity can be next to 0 where the true"
    " one is a quarter of C",
    "the sensitivity depends on the data, and so does the noise's standard deviation, which the release shows: two"
    " neighbours are told apart by it alone",
    "noise is added and accounted per tensor: a round of P tensors is P releases, not one",
    "the classical formula for the standard deviation is proven for epsilon < 1 only; at epsilon = 10 it is too small",
    "sliding windows are no random sampling; only the number of a site's participations bounds its loss",
    "tensors other than weights and biases are noised for a sensitivity of C but never clipped, and scalars are not"
    " clipped either",
    "full weights are clipped instead of updates, at a bound (100) that no tensor reaches",
)

CLIP, EPSILON, DELTA = 100.0, 1.0, 1e-5  # section III-F; epsilon 1 and 10 are the paper's two


def dp_simagg(
    clip: float = CLIP,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    shares: str = "normalised",
    of: str = "weights",
    clipping: bool = True,
    similarity: bool = True,
    noise: bool = True,
) -> Aggregator:
    """Clip, similarity weights, an estimated sensitivity, Gaussian noise; tensor by tensor.

    Source: DP-SimAgg, Algorithm 1, literally. Parameters take its branch for weights and biases (lines 4 to 23); every
    other collection (batch statistics) the else branch (lines 25 to 28): a mean by W, not clipped, noise for Df = C.
    "First" (T'[0], line 19) is the first PRESENT row of the cohort, so permuting the cohort changes the noise.
    Deviations: noise comes from the round's key; integers do not occur, so none are noised.

    With `similarity` and W = 0 (not reachable here: a round without examples moves nothing) identical clients would
    aggregate to 0, see `similarity.similarity_weights`.

    Args:
      clip: C > 0, per tensor, in the units of the weights (or updates). Paper: 100.
      epsilon, delta: per tensor and round. Paper: 1 or 10, and 1e-5. There is no guarantee behind them.
      shares: W, see `similarity.sim_agg`.
      of: 'weights' (OpenFL hands over full weights) or 'updates'.
      clipping: False leaves Algorithm 3 out; C still is the adversarial tensor of line 19.
      similarity: False puts the data-weighted mean W_i / sum W in the place of lines 10-17.
      noise: False leaves Algorithm 2 out; sensitivities are still reported. These three are the ablation that the paper
        names as missing: clip only, similarity only, noise only, all.

    Returns: an Aggregator with reads='each', `bound` None and a mechanism with formal=False (`NO_GUARANTEE` says why):
      its noise_multiplier is sigma / Df = sqrt(2 ln(1.25/delta)) / epsilon, its sensitivity is not a number, as Df
      changes with the data. Metrics over all tensors: sigma_mean, sigma_max, sensitivity_mean, clipped_fraction (of
      tensors and clients), largest_weight (mean over weight tensors).
    """
    what = "aggregator dp_simagg"
    checks.number(f"{what}: clip", clip, low=0.0, above=0.0)
    checks.number(f"{what}: epsilon", epsilon, low=0.0, above=0.0)
    checks.number(f"{what}: delta", delta, low=0.0, above=0.0, high=0.5)
    checks.one_of(f"{what}: shares", shares, SHARES)
    for name, value in (("clipping", clipping), ("similarity", similarity), ("noise", noise)):
        checks.one_of(f"{what}: {name}", value, (False, True))
    factor = math.sqrt(2 * math.log(1.25 / delta)) / epsilon

    def weight_branch(x: Array, w: Array, present: Array, scalar: bool) -> tuple[Array, Array, dict[str, Array]]:
        """Lines 4 to 21 for one tensor [C, D]: (pm, Df, what is noted)."""
        norm = root(jnp.sum(jnp.square(x), axis=1))
        over = present & (norm > clip) & (clipping and not scalar)
        x = x * jnp.where(over, clip / jnp.where(over, norm, 1), 1)[:, None]
        x = jnp.where(present[:, None], x, 0)
        shared = shares_of(w, shares)
        weights = similarity_weights(x, shared, present) if similarity else shares_of(w, "normalised")
        pm = combine(weights, x)
        first = jnp.argmax(present)
        neighbour = jnp.where(jnp.arange(x.shape[0])[:, None] == first, jnp.full_like(x, clip), x)
        change = root(jnp.sum(jnp.square(pm - combine(weights, neighbour))))
        clipped = jnp.sum(over) / jnp.maximum(jnp.sum(present), 1)
        return pm, change, {"clipped_fraction": clipped, "largest_weight": jnp.max(weights)}

    lifted = lift(lambda x, w, present: x[0], per="tensor", of=of, weighted=True)  # for its messages

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        del round
        present = cohort.present
        w = jnp.where(present, total["examples"], 0)
        alive = jnp.any(present) & (jnp.sum(w) > 0)
        mean = w / jnp.where(alive, jnp.sum(w), 1)
        sigmas, changes, noted = [], [], []

        sizes = [x.size for x in jax.tree.leaves(dict(variables))]
        drawn = long_tailed.normal(key, sum(sizes)) if noise else jnp.zeros(0)

        def noisy(value: Array, change: Array, start: int) -> Array:
            """Algorithm 2; `start`: where the tensor's draws begin."""
            sigma = factor * change
            sigmas.append(sigma)
            changes.append(change)
            if not noise:
                return value
            return value + (sigma * drawn[start : start + value.size]).astype(value.dtype)

        def aggregate(start: int, server: Array, deltas: Array, is_weight: bool) -> Array:
            x = deltas + server if of == "weights" else deltas
            x = jnp.where(present.reshape((-1,) + (1,) * server.ndim), x, 0).reshape(len(present), -1)
            if is_weight:
                pm, change, seen = weight_branch(x, w, present, server.ndim == 0)
                noted.append(seen)
            else:
                pm, change = combine(mean, x), jnp.float32(clip)
            pm = noisy(pm, change, start).reshape(server.shape)
            return jnp.where(alive, pm - server if of == "weights" else pm, 0).astype(server.dtype)

        out, start = {}, 0
        for name in variables:
            server, structure = jax.tree.flatten(variables[name])
            is_weight, leaves = name == "params", []
            rows = jax.tree.leaves(total["value"] if is_weight else total["statistics"][name])
            for one, x in zip(server, rows):
                leaves.append(aggregate(start, one, x, is_weight))
                start += one.size
            out[name] = jax.tree.unflatten(structure, leaves)
        sigma, change = jnp.stack(sigmas), jnp.stack(changes)
        metrics = {k: jnp.mean(jnp.stack([n[k] for n in noted])) for k in noted[0]}
        metrics |= {"sigma_mean": jnp.mean(sigma), "sigma_max": jnp.max(sigma), "sensitivity_mean": jnp.mean(change)}
        return out, state, metrics

    mechanism = None
    if noise:
        mechanism = Mechanism("client", math.nan, factor, "replace-one", False, reasons=NO_GUARANTEE, per="tensor")
    kept = set() if noise else {"permutation", "orthogonal"}
    return lifted._replace(decode=decode, mechanism=mechanism, properties=frozenset({"weighted", *kept}))
