"""What the updates of one round tell a curious server about single cases: is it in there, and whose is it?

Each client's update is a sum of its cases' negative gradients, roughly; the gradient of a case that was trained on
points along it. And the model that a client sends has a lower loss on that client's cases than the others' models.
For measuring leaks; nothing of it enters a run's state or numbers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, ClientUpdate, Cohort, FederatedState, Task, Tree, Variables
from fedjax_seg.federation import client_axis, evaluate, round
from fedjax_seg.federation.witness import MODEL

TINY = 1e-30


def update_evidence(
    parts: round.Parts,
    task: Task,
    arrays: Mapping[str, Array],
    state: FederatedState,
    plan: round.Plan,
    index: Array,
    how: client_axis.Lanes,
    *,
    hidden: bool,
    chunk: int = 64,
) -> dict[str, Array]:
    """Trains the cohort of the next round once more, and asks its updates about cases.

    The gradient is that of the training loss at the model that the server sends, of the case alone. Deviation: of a
    model with batch statistics, it is normalised by that case, not by its batch.

    Seen is what a client sends, decoded as far as its public encoding allows: its update; with noise of its own (local
    DP), the noised message. A clip only scales an update, which no cosine sees. Personal layers stay at home.

    Source: cosine and scalar product of gradient and update, as in Li et al., "Effective passive membership inference
    attacks in federated learning against overparameterized models" (2023); losses as in Hu et al., "Source inference
    attacks in federated learning" (2021).

    Args:
      arrays: the cases, {'x': [N, ...], ...}.
      index: int32 [K, A], the cases asked of every client.
      hidden: only the sum of the updates can be seen: every case is compared with that.
      chunk: cases per forward pass.

    Returns: 'cosine', 'product' [K, A], of the case's gradient and minus the update of client k (or the sum); 'sent'
      bool [K], whether there is such an update; and unless hidden 'losses' [K, A, K], evidence 'log_loss' under the
      model of every client, NaN of those that sent none.
    """
    there = round.gather(parts, state, plan, round.WITNESS)  # no masks of a round that may still come
    bare, clients = parts._replace(secure=None), jnp.arange(index.shape[0])
    if not hidden:
        bare = bare._replace(aggregator=bare.aggregator._replace(encode=_shown(bare)))
    seen, ok = _messages(bare, state, plan, there.cohort, how, hidden and bare.aggregator.reads == "sum")
    hits = (there.cohort.clients[None] == clients[:, None]) & ok[None]
    rows, sent = jnp.argmax(hits, 1).astype(jnp.int32), jnp.any(hits, 1)
    if hidden:
        seen, rows = _of_sum(bare, state, seen, Cohort(there.cohort.clients, ok)), jnp.zeros_like(rows)
    wide = 16 if how.lanes > 1 else 1  # gradients at once: a CPU is fastest with one

    def of_client(k: Array) -> tuple[Array, Array]:
        direction = tree.row(seen["params"], rows[k])
        one = lambda case: _alignment(task, state.variables, arrays, case, direction)
        return jax.lax.map(one, index[k], batch_size=wide)

    cosine, product = jax.lax.map(of_client, clients)
    found = {"cosine": cosine, "product": product, "sent": sent}
    if hidden or task.evidence is None:
        return found
    public = parts.client._replace(personalise=lambda variables, own: variables)
    look = task.evidence

    def under(j: Array) -> Array:
        local = state._replace(variables=tree.add(dict(state.variables), tree.row(seen, rows[j])))
        found = evaluate.case_outputs(look, public, arrays, local, index, plan.train_sizes, chunk)["log_loss"]
        return jnp.where(sent[j], found, jnp.nan)

    return found | {"losses": jnp.moveaxis(jax.lax.map(under, clients), 0, -1)}


def _messages(
    parts: round.Parts, state: FederatedState, plan: round.Plan, cohort: Cohort, how: client_axis.Lanes, summed: bool
) -> tuple[Tree, Array]:
    """(sum or stack of the messages, bool [C] whether each of them counts)."""
    steps = round.steps_of(parts, state, plan, cohort)
    train_one = round.local_round(parts, state, plan, None)
    total, _, info, _ = client_axis.run(train_one, cohort, steps, state.personal, how, summed)
    return total, info["ok"]


def _shown(parts: round.Parts) -> Any:
    """encode that shows the update a server can read out of a client's message."""
    mechanism, encode = parts.aggregator.mechanism, parts.aggregator.encode

    def shown(update: ClientUpdate, told: Tree, *, variables: Variables, key: Array) -> Tree:
        if mechanism is None or not mechanism.local:
            return dict(update.delta)
        message = encode(update._replace(weight=jnp.ones_like(update.weight)), told, variables=variables, key=key)
        return {**update.delta, "params": _model(message)}

    return shown


def _of_sum(parts: round.Parts, state: FederatedState, total: Tree, cohort: Cohort) -> Tree:
    """{'params': the direction that a sum of messages shows}, with a leading axis of 1; of a server that adds noise
    itself, before it does."""
    params, mechanism = state.variables["params"], parts.aggregator.mechanism
    if mechanism is not None and tree.paths(_model(total)).keys() == tree.paths(params).keys():
        return {"params": jax.tree.map(lambda x: x[None], _model(total))}
    key = round.stream(jax.random.wrap_key_data(state.key), round.AGGREGATOR, state.round)
    delta, _, _ = parts.aggregator.decode(
        total, cohort, state.aggregator, variables=state.variables, round=state.round, key=key
    )
    return {"params": jax.tree.map(lambda x: x[None], delta["params"])}


def _model(message: Tree) -> Tree:
    return message[MODEL] if isinstance(message, dict) and MODEL in message else message


def _alignment(
    task: Task, variables: Variables, arrays: Mapping[str, Array], case: Array, direction: Tree
) -> tuple[Array, Array]:
    """(cosine, scalar product) of a case's gradient and minus the direction; 0 where one of them is 0."""
    batch = {name: x[case][None] for name, x in arrays.items()} | {"mask": jnp.ones((1,))}
    key = jax.random.key(0)  # of dropout, where a model has it: the same for all cases
    gradient = jax.grad(lambda p: task.loss({**variables, "params": p}, batch, key)[0])(variables["params"])
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction))
    product = -sum((jnp.sum(g.astype(jnp.float32) * d) for g, d in pairs), jnp.zeros(()))
    norms = jnp.sqrt(tree.squared_norm(gradient) * tree.squared_norm(direction))
    return product / jnp.maximum(norms, TINY), product
