"""Local training by an optax optimiser: FedAvg's client, FedProx as a gradient transform, FedBN as a path predicate."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Array, Batches, Client, ClientUpdate, Task, Tree, Variables

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "yogi", "lamb", "lion", "radam", "nadam")
SCHEDULES = ("constant", "cosine", "exponential", "step", "linear")
OPTIMIZER_STATE, LOCAL_LEAF = "optimizer/", "leaf/"


def proximal(mu: float) -> optax.GradientTransformationExtraArgs:
    """FedProx's term mu/2 ||w - anchor||^2 as a gradient transform; the server's parameters come as `anchor=`.

    Source: Li et al., Federated optimization in heterogeneous networks (2020), equation 2.
    """

    def update(grads: Tree, state: Tree, params: Tree = None, *, anchor: Tree, **unused: Any) -> tuple[Tree, Tree]:
        del unused
        return jax.tree.map(lambda g, w, a: g + mu * (w - a), grads, params, anchor), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def learning_rate(name: str, rate: float, rounds: int, decay: float, every: int) -> Callable[[Array], Array]:
    """Learning rate as a function of the GLOBAL round, so that it neither restarts every round nor on resume.

    Args:
      name: 'constant'; 'cosine' and 'linear' fall to 0 over `rounds`; 'exponential' = rate * decay^round;
        'step' = rate * decay^floor(round / every).
    """
    checks.one_of("client.schedule", name, SCHEDULES)
    if name in ("cosine", "linear"):
        checks.number("client.schedule_rounds", rounds, low=1, integer=True)
        maker = optax.cosine_decay_schedule if name == "cosine" else None
        return maker(rate, rounds) if maker else optax.linear_schedule(rate, 0.0, rounds)
    if name == "exponential":
        return lambda round: rate * jnp.asarray(decay, jnp.float32) ** round
    if name == "step":
        return lambda round: rate * jnp.asarray(decay, jnp.float32) ** (round // every)
    return lambda round: jnp.asarray(rate, jnp.float32)


def _optimizer(name: str, momentum: float, nesterov: bool, weight_decay: float, mu: float, clip: float) -> Any:
    """The chain at learning rate 1; the schedule multiplies its updates (all these optimisers are linear in it)."""
    checks.one_of("client.optimizer", name, OPTIMIZERS)
    parts = [proximal(mu)] if mu else []
    parts += [optax.clip_by_global_norm(clip)] if clip else []
    options: dict[str, Any] = {}
    if name == "sgd":
        options |= {"momentum": momentum or None, "nesterov": nesterov}
    elif momentum or nesterov:
        raise checks.UserError(f"client.momentum, client.nesterov: for the optimizer 'sgd' only, {name!r} given")
    if weight_decay and name in ("adamw", "lamb", "lion"):
        options |= {"weight_decay": weight_decay}
    elif weight_decay:  # as PyTorch: added to the gradient, before momentum
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.with_extra_args_support(optax.chain(*parts, getattr(optax, name)(1.0, **options)))


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda path: any(fnmatch.fnmatch(path, p) for p in patterns)


def local_sgd(
    task: Task,
    *,
    lr: float = 0.01,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mu: float = 0.0,
    clip: float = 0.0,
    schedule: str = "constant",
    schedule_rounds: int = 0,
    schedule_decay: float = 1.0,
    schedule_every: int = 1,
    keep_optimizer: bool = False,
    local: tuple[str, ...] = (),
) -> Client:
    """Steps of an optax optimiser over the local batches.

    Args:
      lr: learning rate; `schedule*` describe its course over global rounds.
      optimizer, momentum, nesterov, weight_decay: as PyTorch's SGD for 'sgd' (decay joins the gradient before the
        momentum buffer); decoupled for 'adamw', 'lamb', 'lion'.
      mu: FedProx's proximal weight, 0 = FedAvg (bitwise).
      clip: global norm of the gradient, 0 = off.
      keep_optimizer: False resets the optimiser in every round (FedAvg); True keeps each client's state over rounds,
        as the released FedHAvg code does with its momentum.
      local: patterns (fnmatch) of leaf paths that never leave the client, e.g. ('batch_stats/*', '*Norm*') for FedBN.
    """
    checks.number("client.lr", lr, low=0.0)
    checks.number("client.momentum", momentum, low=0.0, high=1.0)
    for what, value in (("weight_decay", weight_decay), ("mu", mu), ("clip", clip), ("schedule_decay", schedule_decay)):
        checks.number(f"client.{what}", value, low=0.0)
    checks.number("client.schedule_every", schedule_every, low=1, integer=True)
    chain = _optimizer(optimizer, momentum, nesterov, weight_decay, mu, clip)
    rate = learning_rate(schedule, lr, schedule_rounds, schedule_decay, schedule_every)
    stays = _matcher(local)

    def init(variables: Variables) -> dict[str, Array]:
        kept = {LOCAL_LEAF + p: x for p, x in tree.paths(variables).items() if stays(p)}
        if keep_optimizer:
            kept |= {OPTIMIZER_STATE + p: x for p, x in tree.paths(chain.init(variables["params"])).items()}
        return kept

    def personalise(variables: Variables, personal: Mapping[str, Array]) -> Variables:
        if not local:
            return variables
        return tree.map_paths(lambda p, x: personal.get(LOCAL_LEAF + p, x), variables)

    def step(carry: Tree, batch: Tree, key: Array, anchor: Tree, scale: Array) -> tuple[Tree, Array]:
        variables, optimizer_state = carry
        rest = {k: v for k, v in variables.items() if k != "params"}

        def loss_of(params: Tree) -> tuple[Array, Tree]:
            return task.loss({"params": params, **rest}, batch, key)

        (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
        updates, optimizer_state = chain.update(grads, optimizer_state, variables["params"], anchor=anchor)
        params = jax.tree.map(lambda w, u: w + scale * u, variables["params"], updates)
        return ({**variables, **updated, "params": params}, optimizer_state), loss

    def train(
        variables: Variables,
        personal: Mapping[str, Array],
        batches: Batches,
        key: Array,
        *,
        round: Array,
        broadcast: Tree,
    ) -> tuple[ClientUpdate, dict[str, Array]]:
        del broadcast
        start = personalise(variables, personal)
        fresh = chain.init(start["params"])
        if keep_optimizer:
            fresh = tree.map_paths(lambda p, x: personal[OPTIMIZER_STATE + p], fresh)
        scale = jnp.asarray(rate(round), jnp.float32)

        def body(s: Array, carry: Tree) -> Tree:
            state, total = carry
            state, loss = step(state, batches.at(s), jax.random.fold_in(key, s), start["params"], scale)
            return state, total + loss

        (last, optimizer_state), total = jax.lax.fori_loop(0, batches.steps, body, ((start, fresh), jnp.zeros(())))
        delta = tree.map_paths(lambda p, x: jnp.zeros_like(x) if stays(p) else x, tree.subtract(last, start))
        kept = {LOCAL_LEAF + p: x for p, x in tree.paths(last).items() if stays(p)}
        if keep_optimizer:
            kept |= {OPTIMIZER_STATE + p: x for p, x in tree.paths(optimizer_state).items()}
        metrics = {"loss": total / jnp.maximum(batches.steps, 1), "lr": scale}
        return ClientUpdate(delta, batches.examples, batches.steps, {}, metrics), kept

    rotates = optimizer == "sgd"
    return Client(init, train, personalise, properties=frozenset({"orthogonal"} if rotates else ()))
