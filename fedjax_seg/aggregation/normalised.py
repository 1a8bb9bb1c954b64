"""FedNova: updates of unequal numbers of local steps, made comparable before they are averaged."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.averages import weighted_mean
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, Tree, Variables


def fednova(momentum: float = 0.0) -> Aggregator:
    """tau_eff * sum_i p_i delta_i / a_i with tau_eff = sum_i p_i a_i and p_i the share of the examples.

    A client's delta is about lr * a_i times its mean gradient, so a plain mean drifts to the optimum of those who take
    many steps. Here every client counts with its mean gradient.

    Source: Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization" (2020),
    equations 5, 6 and the table of ||a_i||_1: tau_i for SGD, (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) for
    SGD with momentum rho. Deviation: none for these two; the paper's further cases (FedProx, decaying local rates) have
    other a_i. A client with tau_i = 0 adds nothing.

    Args:
      momentum: rho in [0, 1) of the clients' SGD, whose buffer starts anew in every round (keep_optimizer=False). It
        must be the clients' own: nothing else tells the server.
    Returns: an Aggregator that reads the sum: messages are {n_i delta_i / a_i, n_i, n_i a_i, ...}. Batch statistics are
      averaged by examples, not normalised.
    """
    checks.number("aggregator fednova: momentum", momentum, low=0.0, high=0.9999)
    average = weighted_mean()

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        amount = accumulated(update.steps, momentum)
        share = jnp.where(amount > 0, 1 / jnp.where(amount > 0, amount, 1), 0)
        delta = {**update.delta, "params": jax.tree.map(lambda x: x * share.astype(x.dtype), update.delta["params"])}
        message = average.encode(update._replace(delta=delta), broadcast, variables=variables, key=key)
        return {**message, "effective": update.weight * amount}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        effective = total["effective"] / jnp.where(total["weight"] > 0, total["weight"], 1)
        delta, state, metrics = average.decode(total, cohort, state, variables=variables, round=round, key=key)
        moved = jax.tree.map(lambda x: x * effective.astype(x.dtype), delta["params"])
        return {**delta, "params": moved}, state, {**metrics, "effective_steps": effective}

    return average._replace(encode=encode, decode=decode)


def accumulated(steps: Array, momentum: float) -> Array:
    """||a||_1 of `steps` local steps, float32: how often the gradients of a round count together."""
    tau = jnp.asarray(steps, jnp.float32)
    if not momentum:
        return tau
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
