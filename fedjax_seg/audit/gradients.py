"""DP-SGD as something to audit: one step of it, on gradients that are chosen freely."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.audit.audited import LENGTHS, Audited
from fedjax_seg.clients.dp_sgd import private_gradient
from fedjax_seg.core.types import Array, ProvenBound, Tree


def dp_sgd(n: int, dim: int, clip: float, epsilon: float, delta: float) -> Audited:
    """One step of DP-SGD: a sum of clipped gradients, C."""
    from fedjax_seg.privacy import accounting  # here: its library is slow to load

    z = accounting.gaussian_sigma(epsilon, delta)
    return dp_sgd_step(clip, z, (epsilon, delta))


def dp_sgd_step(clip: float, noise_multiplier: float, claimed: tuple[float, float], unit: str = "example") -> Audited:
    """The step that clients.dp_sgd takes, on a loss <w, x> whose gradients are the rows themselves."""

    def step(key: Array, given: Any, noise: float) -> Array:
        x, present = given

        def loss(params: Tree, batch: Tree, k: Array) -> tuple[Array, dict[str, Tree]]:
            return jnp.sum((batch["x"] @ params["w"]) * batch["mask"]), {}

        batch = {"x": x, "mask": present.astype(x.dtype)}
        one = jnp.ones((), x.dtype)
        params = {"w": jnp.zeros(x.shape[1], x.dtype)}
        return private_gradient(loss, params, batch, key, clip=clip, noise=noise, expected=one, at_once="all")[1]["w"]

    bound = ProvenBound(clip, "zero-out", unit, "the sum of clipped gradients changes by one of them: C")
    return Audited(
        "dp_sgd",
        lambda x, present: step(jax.random.key(0), (x, present), 0.0),
        math.inf,
        bound,
        "add-remove",
        release=lambda key, given: step(key, given, noise_multiplier),
        quiet=lambda given: step(jax.random.key(0), given, 0.0),
        claimed=claimed,
        formal=True,
        scales=tuple(s * clip for s in LENGTHS),
    )
