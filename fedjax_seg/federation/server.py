"""The server's step: an optax optimiser on the trainable parameters; other collections move by their plain delta."""

import jax
import optax

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Tree, Variables

OPTIMIZERS = ("sgd", "adam", "yogi", "adagrad")


def make(
    name: str = "sgd", *, lr: float = 1.0, momentum: float = 0.0, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3
) -> optax.GradientTransformation:
    """FedAvg = 'sgd' at lr 1; FedAvgM = 'sgd' with momentum; FedAdam, FedYogi, FedAdagrad by optax name.

    Source: Reddi et al., Adaptive federated optimization (2021), Algorithm 2; b1, b2 and eps (their tau) default to
    theirs. Deviations: optax corrects Adam's and Yogi's moments for their bias; Adagrad's tau is only the start of its
    accumulator, tau^2, and is not added to the root again; Yogi's accumulators start at 1e-6 whatever tau is.
    """
    checks.one_of("server.name", name, OPTIMIZERS)
    checks.number("server.lr", lr, low=0.0)
    checks.number("server.momentum", momentum, low=0.0, high=1.0)
    checks.number("server.b1", b1, low=0.0, high=0.999999)
    checks.number("server.b2", b2, low=0.0, high=0.999999)
    checks.number("server.eps", eps, low=0.0)
    if momentum and name != "sgd":
        raise checks.UserError(f"server.momentum: for 'sgd' only, {name!r} given; use server.b1")
    if name == "sgd":
        return optax.sgd(lr, momentum=momentum or None)
    if name == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=eps**2, eps=0.0)  # optax adds its eps inside the root
    return {"adam": optax.adam, "yogi": optax.yogi}[name](lr, b1=b1, b2=b2, eps=eps)


def step(
    optimizer: optax.GradientTransformation, variables: Variables, delta: Variables, state: Tree
) -> tuple[Variables, Tree]:
    """variables after the aggregated delta; batch statistics never pass through the optimiser."""
    gradient = jax.tree.map(lambda d: -d, delta["params"])
    updates, state = optimizer.update(gradient, state, variables["params"])
    moved = {name: tree.add(value, delta[name]) for name, value in variables.items() if name != "params"}
    return {"params": optax.apply_updates(variables["params"], updates), **moved}, state
