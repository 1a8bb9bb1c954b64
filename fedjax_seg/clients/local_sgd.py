"""Local training by an optax optimiser: FedAvg's client, FedProx as a gradient transform, FedBN as a path predicate."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_seg.clients import blocked_linear, forms, lazy_linear
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Array, Batches, Client, ClientUpdate, Task, Tree, Variables

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "yogi", "lamb", "lion", "radam", "nadam")
COORDINATEWISE = tuple(name for name in OPTIMIZERS if name != "lamb")  # no norm over a tensor
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
    if name in ("adamw", "lamb", "lion"):  # always: optax's own defaults are not 0
        options |= {"weight_decay": weight_decay}
    elif weight_decay:  # as PyTorch: added to the gradient, before momentum
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.with_extra_args_support(optax.chain(*parts, getattr(optax, name)(1.0, **options)))


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda path: any(fnmatch.fnmatch(path, p) for p in patterns)


class Descent(NamedTuple):
    """How a client descends, whatever gradient it follows.

    Attributes:
      chain: the optimiser at learning rate 1.
      rate: global round -> learning rate.
      stays: leaf path -> whether the leaf never leaves the client.
      keep_optimizer: whether the optimiser's state lasts over rounds.
    """

    chain: Any
    rate: Callable[[Array], Array]
    stays: Callable[[str], bool]
    keep_optimizer: bool


def descent(
    *,
    lr: float,
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
) -> Descent:
    """The options of `local_sgd`, checked; a bad one is a UserError."""
    checks.number("client.lr", lr, low=0.0)
    checks.number("client.momentum", momentum, low=0.0, high=1.0)
    for what, value in (("weight_decay", weight_decay), ("mu", mu), ("clip", clip), ("schedule_decay", schedule_decay)):
        checks.number(f"client.{what}", value, low=0.0)
    checks.number("client.schedule_every", schedule_every, low=1, integer=True)
    chain = _optimizer(optimizer, momentum, nesterov, weight_decay, mu, clip)
    rate = learning_rate(schedule, lr, schedule_rounds, schedule_decay, schedule_every)
    return Descent(chain, rate, _matcher(local), keep_optimizer)


def local_training(task: Task, how: Descent, form_of: Callable[..., forms.Form]) -> Client:
    """A client that takes one step per local batch: what local_sgd and the clients with other gradients share.

    Args:
      form_of: (optimizer, params, optimiser state, batches) -> the Form whose `step` is one step of this client.
    """
    chain, stays = how.chain, how.stays

    def init(variables: Variables) -> dict[str, Array]:
        kept = {LOCAL_LEAF + p: x for p, x in tree.paths(variables).items() if stays(p)}
        if how.keep_optimizer:
            kept |= {OPTIMIZER_STATE + p: x for p, x in tree.paths(chain.init(variables["params"])).items()}
        return kept

    def personalise(variables: Variables, personal: Mapping[str, Array]) -> Variables:
        if not any(name.startswith(LOCAL_LEAF) for name in personal):
            return variables
        return tree.map_paths(lambda p, x: personal.get(LOCAL_LEAF + p, x), variables)

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
        if how.keep_optimizer:
            fresh = tree.map_paths(lambda p, x: personal[OPTIMIZER_STATE + p], fresh)
        scale = jnp.asarray(how.rate(round), jnp.float32)
        form = form_of(forms.Optimizer(chain, scale), start["params"], fresh, batches)
        rest = {k: v for k, v in start.items() if k != "params"}

        def body(s: Array, carry: Tree) -> Tree:
            params, rest, state, total = carry
            loss_of = lambda params, batch, key: task.loss({**rest, "params": params}, batch, key)
            (loss, aux), params, state = form.step(loss_of, params, state, batches.at(s), jax.random.fold_in(key, s), s)
            updated = {name: x for name, x in aux.items() if name not in form.measures}
            measured = {"loss": loss, **{name: aux[name] for name in form.measures}}
            return params, {**rest, **updated}, state, tree.add(total, measured)

        nothing = dict.fromkeys(("loss", *form.measures), jnp.zeros(()))
        carry = (form.params, rest, form.state, nothing)
        params, last, state, total = jax.lax.fori_loop(0, batches.steps, body, carry)
        delta = {**tree.subtract(last, rest), "params": form.change(params)}
        delta = tree.map_paths(lambda p, x: jnp.zeros_like(x) if stays(p) else x, {k: delta[k] for k in start})
        last = {**last, "params": form.whole(params)}
        kept = {LOCAL_LEAF + p: x for p, x in tree.paths(last).items() if stays(p)}
        if how.keep_optimizer:
            kept |= {OPTIMIZER_STATE + p: x for p, x in tree.paths(form.whole(state)).items()}
        metrics = {**{name: x / jnp.maximum(batches.steps, 1) for name, x in total.items()}, "lr": scale}
        return ClientUpdate(delta, batches.examples, batches.steps, {}, metrics), kept

    return Client(init, train, personalise)


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
    how = descent(
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        mu=mu,
        clip=clip,
        schedule=schedule,
        schedule_rounds=schedule_rounds,
        schedule_decay=schedule_decay,
        schedule_every=schedule_every,
        keep_optimizer=keep_optimizer,
        local=local,
    )
    stays_home = how.stays(task.linear_input)
    linear = task.linear_input.removeprefix("params/") if not clip and not stays_home else ""

    def form_of(optimizer_now: forms.Optimizer, params: Tree, state: Tree, batches: Batches) -> forms.Form:
        """The cheapest way to hold a wide first layer; all give the same numbers up to rounding."""
        if linear and optimizer == "sgd" and lazy_linear.pays(forms.at(params, linear), batches):
            return lazy_linear.form(optimizer_now, params, state, batches, linear, keep_optimizer)
        if linear and optimizer in COORDINATEWISE and blocked_linear.pays(forms.at(params, linear)):
            return blocked_linear.form(optimizer_now, params, state, linear)
        return forms.whole(optimizer_now, params, state)

    rotates = frozenset({"orthogonal"} if optimizer == "sgd" else ())
    return local_training(task, how, form_of)._replace(properties=rotates)
