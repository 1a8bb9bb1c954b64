"""SCAFFOLD on the server: the mean update, and the mean of the clients' control variates."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.averages import mean
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, Client, ClientUpdate, Cohort, Tree, Variables

CONTROL_VARIATES = "control_variates"  # the property of a client that sends them and of a rule that reads them


def scaffold(clients: int) -> Aggregator:
    """x += 1/|S| sum (y_i - x) and c += 1/N sum (c_i+ - c_i), for clients.scaffold.

    Source: Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning" (2020), Algorithm 1,
    lines 16 and 17, equation 5; the global rate is the server's lr. Deviation: none.

    c is the mean of the c_i over ALL clients, those that never came included (theirs are 0), which is why N is needed:
    the cohort tells |S| only.

    Args:
      clients: N, all clients of the federation. Handed over by the engine.
    Returns: an Aggregator that reads the sum. Its state and its broadcast are {'control': c}, of the parameters' shape;
      `encode` raises a UserError for updates without a control variate.
    """
    checks.number("aggregator scaffold: clients", clients, low=1, integer=True)
    average = mean()

    def init(variables: Variables) -> Tree:
        return {"control": tree.zeros_like(variables["params"])}

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        if "control" not in update.extra:
            raise checks.UserError(_MISMATCH.format("aggregator.name: 'scaffold'", "client.name=scaffold"))
        message = average.encode(update, broadcast, variables=variables, key=key)
        return {**message, "control": update.extra["control"]}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        delta, _, metrics = average.decode(total, cohort, {}, variables=variables, round=round, key=key)
        present = jnp.any(cohort.present)
        moved = jax.tree.map(lambda c, s: c + jnp.where(present, s, 0) / clients, state["control"], total["control"])
        norm = jnp.sqrt(tree.squared_norm(moved))
        return delta, {"control": moved}, {**metrics, "control_norm": norm}

    properties = average.properties | {CONTROL_VARIATES}
    return average._replace(
        init=init, broadcast=lambda state: state, encode=encode, decode=decode, properties=properties
    )


_MISMATCH = "{} given without its other half; SCAFFOLD is a client and an aggregator: set {} too"


def check_pair(client: Client, aggregator: Aggregator) -> None:
    """Raises where only one of the two speaks of control variates."""
    sends, reads = (CONTROL_VARIATES in part.properties for part in (client, aggregator))
    if sends and not reads:
        raise checks.UserError(_MISMATCH.format("client.name: 'scaffold'", "--config.aggregator.name=scaffold"))
    if reads and not sends:
        raise checks.UserError(_MISMATCH.format("aggregator.name: 'scaffold'", "--config.client.name=scaffold"))
