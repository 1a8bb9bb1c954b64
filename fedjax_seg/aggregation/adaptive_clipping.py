"""DP-FedAvg whose clip follows a quantile of the clients' norms, at a price in noise that is fixed and proven."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.private import clip_to, own_parameters, public_count
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, ProvenBound, Tree, Variables
from fedjax_seg.privacy import gaussian

_RANGE = (1e-10, 1e10)  # of the clip, so that a long run of one-sided counts stays a float32
_MOST_NOISE = 0.1  # of the noise on the share of unclipped clients; above it the clip is a random walk


def adaptive_dp_fedavg(
    clip: float,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    quantile: float = 0.5,
    rate: float = 0.2,
    count_noise: float = 0.0,
    expected_clients: float | None = None,
    smallest_cohort: int | None = None,
) -> Aggregator:
    """(sum_k clip_C(u_k) + N(0, (z_delta C)^2)) / n, then C <- C exp(-rate (b~ - quantile)).

    Source: Andrew et al., "Differentially private learning with adaptive clipping" (2021), Algorithm 1. b~ is the noisy
    share of clients whose update was not clipped, b_k = 1 where ||u_k|| <= C. The clip of a round is a function of what
    earlier rounds released, so it is public and every client is told it.

    Deviation: a client sends (clip_C(u)/C, s (b - 1/2)), divided by the public clip, and ONE noise of one standard
    deviation goes on the sum of these. So the sensitivity is a constant of the run, not one that moves with C. With
    sigma_b the standard deviation of the noise on the plain count, z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) and
    s = z_delta / sigma_b:

    Bound. The value has norm at most 1 and the scaled bit is +-s/2, so a message has norm at most sqrt(1 + s^2/4).
    Zero-out replaces it by 0 and moves the sum by that much.

    Noise. z sqrt(1 + s^2/4) = z_delta, as z_delta^2 = z^2 (1 + z_delta^2/(4 sigma_b^2)) says the same as
    z_delta^-2 = z^-2 - (2 sigma_b)^-2 (divide by z^2 z_delta^2). So the sum of clip_C(u)/C gets noise z_delta, the
    sum of s (b - 1/2) the same, which is z_delta/s = sigma_b on the count: the paper's two noises at the cost of one
    mechanism with multiplier z.

    The share is b~ = 1/2 + (noisy sum of b - 1/2)/n with n = expected_clients. A client that does not come, or has no
    examples, counts as half in and half out: it pulls b~ towards 1/2.

    Args:
      clip: C of round 0, in [1e-10, 1e10], the Euclidean norm of the update over all parameters.
      epsilon: per round, with `delta`; of the model and the count together.
      noise_multiplier: instead of epsilon: z >= 0 of the two together. 0 = no guarantee, no noise.
      quantile: of the norms that the clip goes to, in [0.01, 0.99].
      rate: of the clip, in (0, 2]; the paper's eta_C = 0.2.
      count_noise: sigma_b > z/2, in clients; 0 = max(n/20, z/sqrt 2), the paper's n/20 unless the model would then get
        more than sqrt 2 times the noise it gets without a count. Unused where z = 0.
      expected_clients: n > 0, public, never the number that came: qK under Poisson sampling. None = the fewest clients
        of a round.
      smallest_cohort: the fewest clients of a round. Handed over by the engine.
    Raises: UserError where a round may be empty and expected_clients is None; where sigma_b <= z/2; where the count
      carries no signal (sigma_b > n/10), as with few hospitals: a fixed clip is then better; for a model with more
      than parameters.
    Returns: an Aggregator with reads='sum', state and broadcast {'clip': float32}. Metric: clip, of the round, public.
    """
    what = "aggregator adaptive_dp_fedavg"
    checks.number(f"{what}: clip", clip, low=_RANGE[0], high=_RANGE[1])
    checks.number(f"{what}: quantile", quantile, low=0.01, high=0.99)
    checks.number(f"{what}: rate", rate, low=0.0, above=0.0, high=2.0)
    checks.number(f"{what}: count_noise", count_noise, low=0.0)
    z = gaussian.multiplier(what, noise_multiplier, epsilon, delta)
    n = public_count(what, expected_clients, smallest_cohort)
    scale = _bit_scale(z, _count_noise(what, z, n, float(count_noise)))

    def init(variables: Variables) -> Tree:
        del variables
        return {"clip": jnp.float32(clip)}

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        del variables, key
        told, params = broadcast["clip"], own_parameters(update, what)
        # A square that overflows is far outside, one that underflows far inside: both compare right.
        within = tree.squared_norm(_over(jax.lax.stop_gradient(params), told, jnp.float32)) <= 1
        bit = jnp.where(update.weight > 0, jnp.where(within, 0.5, -0.5), 0.0)
        return {"value": _over(clip_to(params, told), told), "bit": scale * bit}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        del cohort, round, key
        held = state["clip"]
        moved = jax.tree.map(
            lambda x, server: (x * (held / n).astype(x.dtype)).astype(server.dtype), total["value"], variables["params"]
        )
        share = 0.5 + total["bit"] / (scale * n)
        following = jnp.clip(held * jnp.exp(-rate * (share - quantile)), *_RANGE)
        return {"params": moved}, {"clip": following.astype(jnp.float32)}, {"clip": held}

    aggregator = Aggregator(
        init,
        lambda state: {"clip": state["clip"]},
        encode,
        decode,
        reads="sum",
        bound=joint_bound(scale),
        properties=frozenset({"permutation", "orthogonal"}),
    )
    return gaussian.privatize(aggregator, noise_multiplier=z)


def joint_bound(scale: float) -> ProvenBound:
    """sqrt(1 + scale^2/4) for sum_k (v_k, scale (b_k - 1/2)), ||v_k|| <= 1, b_k in {0, 1}.

    Proof. Zero-out (or leaving out) of client k changes the sum by its message. The squared norm of a message is
    ||v_k||^2 + scale^2 (b_k - 1/2)^2 <= 1 + scale^2/4; a message of zeros has norm 0.
    """
    proof = (
        f"the sum changes by one (v, s (b - 1/2)), ||v|| <= 1, b in {{0, 1}}, s = {scale:.6g}: sqrt(1 + s^2/4), in"
        " units of the public clip"
    )
    return ProvenBound(math.sqrt(1 + scale**2 / 4), "zero-out", "client", proof)


def _count_noise(what: str, z: float, n: float, given: float) -> float:
    """sigma_b, in clients."""
    sigma = given or max(n / 20, z / math.sqrt(2))
    if z == 0:
        return sigma
    if 2 * sigma <= z:
        raise checks.UserError(
            f"{what}: count_noise: {given:g} given, a number above noise_multiplier/2 = {z / 2:g} expected, as the"
            " count alone would use up the guarantee; take 0 (automatic), or a fixed clip (dp_fedavg)"
        )
    if sigma > _MOST_NOISE * n:
        raise checks.UserError(
            f"{what}: count_noise: {sigma:.3g} (noise multiplier {z:.3g}) found on a count of {n:g} clients, at most"
            f" {_MOST_NOISE:g} of them = {_MOST_NOISE * n:.3g} expected, because such a count carries no signal for the"
            " clip; take a fixed clip (dp_fedavg), or more clients per round"
        )
    return sigma


def _bit_scale(z: float, sigma: float) -> float:
    """s = z_delta / sigma_b; 1 where there is no noise."""
    return (z**-2 - (2 * sigma) ** -2) ** -0.5 / sigma if z else 1.0


def _over(values: Tree, clip: Array, dtype: Any = None) -> Tree:
    """values / clip, of `dtype` or as they are."""
    return jax.tree.map(lambda x: x.astype(dtype or x.dtype) / clip.astype(dtype or x.dtype), values)
