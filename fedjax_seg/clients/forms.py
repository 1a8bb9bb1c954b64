"""How a round holds the parameters between its local steps: whole here, otherwise lazy_linear and blocked_linear.

The two others are for a wide first linear layer, whose matrix [d, h] is most of such a model and is read and written by
an optimiser a dozen times a step. They give the same numbers, up to rounding, from fewer passes over it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Batch, Tree

Loss = Callable[[Tree, Batch, Array], Any]  # (params, batch, key) -> (scalar, aux)


class Optimizer(NamedTuple):
    """chain: an optax optimiser at learning rate 1; scale: the learning rate of this round."""

    chain: optax.GradientTransformation
    scale: Array

    def apply(self, gradient: Tree, state: Tree, params: Tree, anchor: Tree) -> tuple[Tree, Tree]:
        """(parameters, state) after one update."""
        updates, state = self.chain.update(gradient, state, params, anchor=anchor)
        return jax.tree.map(lambda w, u: w + self.scale * u, params, updates), state


class Form(NamedTuple):
    """The parameters of one client in one round, as its steps carry them.

    Attributes:
      params, state: parameters and optimiser state at the start of the round.
      step: (loss, params, state, batch, key, number) -> ((loss, aux), params, state).
      whole: parameters or optimiser state of this form -> the same with all their matrices.
      change: parameters of this form -> whole(parameters) - parameters at the start.
      measures: names of further scalars that step measures, beside the loss; it returns them in its aux.
    """

    params: Tree
    state: Tree
    step: Callable[..., tuple[Any, Tree, Tree]]
    whole: Callable[[Tree], Tree]
    change: Callable[[Tree], Tree]
    measures: tuple[str, ...] = ()


def whole(optimizer: Optimizer, params: Tree, state: Tree) -> Form:
    """The parameters as they are."""

    def step(loss: Loss, now: Tree, state: Tree, batch: Batch, key: Array, number: Array) -> tuple[Any, Tree, Tree]:
        del number
        value, gradient = jax.value_and_grad(loss, has_aux=True)(now, batch, key)
        return value, *optimizer.apply(gradient, state, now, params)

    return Form(params, state, step, lambda values: values, lambda now: tree.subtract(now, params))


def through_preactivations(loss: Loss, params: Tree, name: str, z: Array, batch: Batch, key: Array) -> Any:
    """((loss, aux), gradient) where the first layer's kernel is left out: its gradient is that of z.

    The model gets z as its kernel and the identity as its input, so no model need know of this.

    Args:
      name: path of the kernel in `params`.
      z: x @ kernel of the batch, [B, h].
    """
    seen: Mapping[str, Array] = {**batch, "x": jnp.eye(z.shape[0], dtype=z.dtype)}
    return jax.value_and_grad(lambda p: loss(p, seen, key), has_aux=True)(replaced(params, name, z))


def flat_input(batch: Batch, like: Array) -> Array:
    """The batch's input as the first layer meets it, [B, d]."""
    x = batch["x"]
    return x.reshape(x.shape[0], -1).astype(like.dtype)


def at(values: Tree, name: str) -> Any:
    """The sub-tree of a nested dict at a path."""
    for key in name.split("/"):
        values = values[key]
    return values


def replaced(values: Tree, name: str, new: Any) -> Tree:
    """The nested dict with another sub-tree at a path."""
    key, _, rest = name.partition("/")
    return {**values, key: replaced(values[key], rest, new) if rest else new}


def map_state(
    chain: optax.GradientTransformation, params: Tree, state: Tree, function: Callable[[Any, str], Any]
) -> Tree:
    """The optimiser's state with function(leaf, path of its parameter) for what it holds per parameter."""
    names = tree.map_paths(lambda path, x: path, params)
    return optax.tree.map_params(chain, function, state, names)
