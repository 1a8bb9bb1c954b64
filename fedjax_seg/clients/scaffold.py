"""SCAFFOLD's client: SGD whose gradient is corrected for the client's drift."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.clients import forms
from fedjax_seg.clients.local_sgd import descent, local_training
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Array, Batch, Batches, Client, ClientUpdate, Task, Tree, Variables

CONTROL = "control/"


def scaffold(
    task: Task,
    *,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    schedule_rounds: int = 0,
    schedule_decay: float = 1.0,
    schedule_every: int = 1,
    option: int = 2,
) -> Client:
    """y <- y - lr (g_i(y) - c_i + c) for K local steps, then c_i+; for the aggregator 'scaffold', which sends c.

    Source: Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning" (2020), Algorithm 1,
    equations 3 and 4. Deviation: the K steps are the epochs of the run, so they differ from client to client; in option
    1 the gradient at x is taken over the same batches (all examples of the client, where batches are whole epochs).

    Args:
      lr, schedule*: as in `local_sgd`; the rate of a round is constant over its steps. Plain SGD: with momentum c_i+
        would not be a mean of gradients.
      weight_decay: a part of the client's loss, and so of its control variate.
      option: how c_i+ is found: 1 = the client's gradient at the server's parameters x, one more pass over the batches;
        2 = c_i - c + (x - y) / (K lr), the mean of the gradients on the way. Without a step, or at rate 0, c_i stays.

    Returns: a Client; personal holds c_i (zeros at first), `extra` of an update is {'control': c_i+ - c_i}.
    """
    checks.one_of("client.option", option, (1, 2))
    how = descent(
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        schedule_rounds=schedule_rounds,
        schedule_decay=schedule_decay,
        schedule_every=schedule_every,
    )

    def init(variables: Variables) -> dict[str, Array]:
        return {CONTROL + p: jnp.zeros_like(x) for p, x in tree.paths(variables["params"]).items()}

    def train(
        variables: Variables,
        personal: Mapping[str, Array],
        batches: Batches,
        key: Array,
        *,
        round: Array,
        broadcast: Tree,
    ) -> tuple[ClientUpdate, dict[str, Array]]:
        if "control" not in broadcast:
            raise checks.UserError(
                "client.name: 'scaffold' given without its other half; SCAFFOLD is a client and an aggregator: set"
                " --config.aggregator.name=scaffold too"
            )
        common = broadcast["control"]
        own = tree.map_paths(lambda p, x: personal[CONTROL + p], variables["params"])
        drift = tree.subtract(common, own)
        client = local_training(task, how, lambda optimizer, *rest: _corrected(optimizer, drift, *rest))
        update, _ = client.train(variables, {}, batches, key, round=round, broadcast={})
        if option == 1:
            gradient = _gradient_at(task, variables, batches, key)
            decay = tree.scale(variables["params"], weight_decay)
            change = tree.subtract(tree.add(gradient, decay), own)
        else:
            length = batches.steps * update.metrics["lr"]
            per = -1 / jnp.where(length > 0, length, 1)
            change = jax.tree.map(lambda d, c: d * per.astype(d.dtype) - c, update.delta["params"], common)
        moved = (batches.steps > 0) & (update.metrics["lr"] > 0)
        change = tree.where(moved, change, tree.zeros_like(change))
        kept = {CONTROL + p: x for p, x in tree.paths(tree.add(own, change)).items()}
        return update._replace(extra={"control": change}), kept

    return Client(init, train, lambda variables, personal: variables, properties=frozenset({"control_variates"}))


def _corrected(optimizer: forms.Optimizer, drift: Tree, params: Tree, state: Tree, batches: Batches) -> forms.Form:
    """Steps along gradient + drift, drift = c - c_i."""
    del batches

    def step(loss: forms.Loss, now: Tree, state: Tree, batch: Batch, key: Array, number: Array) -> Any:
        del number
        value, gradient = jax.value_and_grad(loss, has_aux=True)(now, batch, key)
        return value, *optimizer.apply(tree.add(gradient, drift), state, now, params)

    return forms.whole(optimizer, params, state)._replace(step=step)


def _gradient_at(task: Task, variables: Variables, batches: Batches, key: Array) -> Tree:
    """The mean gradient over the examples of all batches at the given variables."""
    rest = {name: x for name, x in variables.items() if name != "params"}

    def add(step: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        total, count = carry
        batch = batches.at(step)
        of = lambda params: task.loss({**rest, "params": params}, batch, jax.random.fold_in(key, step))[0]
        number = jnp.sum(batch["mask"])
        return tree.add(total, tree.scale(jax.grad(of)(variables["params"]), number)), count + number

    zero = (tree.zeros_like(variables["params"]), jnp.zeros(()))
    total, count = jax.lax.fori_loop(0, batches.steps, add, zero)
    return tree.scale(total, 1 / jnp.maximum(count, 1))
