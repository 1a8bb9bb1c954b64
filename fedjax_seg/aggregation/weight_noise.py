"""Gaussian noise on the trained weights before they are shared: a published baseline, which promises nothing."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.averages import mean, weighted_mean
from fedjax_seg.core import checks, noise
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, Mechanism, Tree, Variables

NO_GUARANTEE = (
    "nothing is clipped: a client can move its weights by any amount, so there is no sensitivity to hold the noise"
    " against, and sigma alone states no epsilon, whatever its value (local_dp clips, and states one)"
)


def weight_noise(sigma: float = 0.01, *, weighted: bool = False) -> Aggregator:
    """Mean of w_k + N(0, sigma^2 I): every client adds noise to all of its trained weights before it shares them.

    Source: the differentially private baseline of "Cluster Based Secure Multi-Party Computation in Federated Learning
    for Histopathology Images": Gaussian noise on the trained model weights, as in its reference [9]. Deviations: the
    update is sent with the noise, which is the weights with the noise up to the server's weights, that everybody knows;
    batch statistics, trained and shared like the weights, get the same noise, and a mean variance below 0 is raised to
    0 at the server.

    The mean of n clients has noise of standard deviation sigma / sqrt(n) in every parameter (weighted, and in batch
    statistics, which are weighted always: sigma sqrt(sum n_k^2) / sum n_k).

    Args:
      sigma: >= 0, standard deviation in every entry, in the units of the weights; 0 is the plain mean.
      weighted: weights by examples instead of uniform.

    Returns: an Aggregator with reads='sum'. NO GUARANTEE (`NO_GUARANTEE`): the noise multiplier, sigma over a
      sensitivity that is infinite, is 0. The number of examples travels without noise.
    """
    checks.number("aggregator weight_noise: sigma", sigma, low=0.0)
    checks.one_of("aggregator weight_noise: weighted", weighted, (False, True))
    plain = weighted_mean() if weighted else mean()

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        noisy = update._replace(delta=noise.add(dict(update.delta), key, sigma))
        return plain.encode(noisy, broadcast, variables=variables, key=key)

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        delta, state, metrics = plain.decode(total, cohort, state, variables=variables, round=round, key=key)
        return (_without_negative_variances(delta, variables) if sigma else delta), state, metrics

    why = f"noise of standard deviation {sigma:g} is added to every weight, but {NO_GUARANTEE}"
    reasons = (why if sigma else "there is no noise",)
    mechanism = Mechanism("client", math.inf, 0.0, "replace-one", False, reasons=reasons, local=True)
    properties = plain.properties & {"weighted"} if sigma else plain.properties
    return plain._replace(encode=encode, decode=decode, mechanism=mechanism, properties=properties)


def _without_negative_variances(delta: Variables, variables: Variables) -> Variables:
    """The delta with running variances (leaves named 'var' outside of 'params') that end at 0 or above."""

    def at_least_zero(path: tuple[Any, ...], moved: Array, server: Array) -> Array:
        named = getattr(path[-1], "key", "") == "var"
        return jnp.maximum(moved, -server) if named else moved

    whole = {k: jax.tree_util.tree_map_with_path(at_least_zero, delta[k], variables[k]) for k in delta if k != "params"}
    return {k: whole.get(k, delta[k]) for k in delta}
