"""SGD on a wide first linear layer without touching its matrix in every step: exact, up to rounding.

Within one round a client sees n rows x_1 .. x_n (its epochs, in order), and every gradient of a first layer W [d, h] is
X^T D with X [n, d], where D [n, h] holds the gradients of the pre-activations of the batch's rows and is zero
elsewhere. SGD (momentum, Nesterov, weight decay, a proximal term) only ever adds multiples of what it has, so weights
and momentum stay combinations
    a W_0 + b M_0 + X^T A
of the kernel W_0 and the momentum M_0 that the round began with. The steps carry (a, b, A) in place of [d, h]; the same
optax chain acts on them, and the pre-activations are a X W_0 + b X M_0 + (X X^T) A. So a round reads and writes the
matrices a few times, not a dozen times a step, and its products have n rows, not a batch's.

Nothing is asked of the aggregation: the update is formed in full at the end of the round. It does not hold for
optimisers that treat coordinates one by one (Adam), nor under a clipped gradient norm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.clients import forms
from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Batch, Batches, Tree

PAYS = 4  # inputs per row of a round from which the detour is shorter
SIZES = 6  # row counts that a product is compiled for


class Combination(NamedTuple):
    """a W_0 + b M_0 + X^T A, a matrix [d, h]; as a leaf's stand-in, a sub-tree of what an optimiser works on."""

    start: Array  # a
    kept: Array | None  # b; None where no momentum came from earlier rounds
    rows: Array  # A [n, h]


def pays(kernel: Array, batches: Batches) -> bool:
    """Whether the kernel is so much wider than a round has rows that the detour is shorter (static)."""
    size = jax.eval_shape(batches.at, jnp.zeros((), jnp.int32))["mask"].shape[0]
    return 0 < PAYS * batches.longest * size <= kernel.shape[0]


def form(
    optimizer: forms.Optimizer, params: Tree, state: Tree, batches: Batches, name: str, state_is_kept: bool
) -> forms.Form:
    """The parameters with the kernel at the path `name` as a Combination.

    Args:
      state: the optimiser's, at the start of the round.
      state_is_kept: whether it comes from earlier rounds; otherwise its momentum is taken to be 0.
    """
    kernel, momentum = forms.at(params, name), None
    if state_is_kept:
        momentum = _momentum(optimizer, params, state, name)
    x, count = _rows(batches, kernel)
    on_start = _first_rows(_times, count, x, kernel)
    on_momentum = None if momentum is None else _first_rows(_times, count, x, momentum)
    gram = _first_rows(_gram, count, x, x)

    one, zero = jnp.ones((), kernel.dtype), jnp.zeros((), kernel.dtype)
    start = Combination(one, None if momentum is None else zero, jnp.zeros_like(on_start))
    began = forms.replaced(params, name, start)
    if momentum is None:
        state = optimizer.chain.init(began)
    else:
        held = Combination(zero, one, jnp.zeros_like(on_start))
        state = forms.map_state(optimizer.chain, params, state, lambda leaf, path: held if path == name else leaf)

    def step(loss: forms.Loss, now: Tree, state: Tree, batch: Batch, key: Array, number: Array) -> Any:
        w: Combination = forms.at(now, name)
        size = batch["mask"].shape[0]
        mine = lambda values: jax.lax.dynamic_slice_in_dim(values, number * size, size)
        z = w.start * mine(on_start) + mine(gram) @ w.rows
        if w.kept is not None:
            z = z + w.kept * mine(on_momentum)
        value, gradient = forms.through_preactivations(loss, now, name, z, batch, key)
        nothing = jax.tree.map(jnp.zeros_like, w)
        rows = jax.lax.dynamic_update_slice_in_dim(nothing.rows, forms.at(gradient, name), number * size, 0)
        gradient = forms.replaced(gradient, name, nothing._replace(rows=rows))
        return value, *optimizer.apply(gradient, state, now, began)

    def matrix(leaf: Any) -> Any:
        if not _is_combination(leaf):
            return leaf
        total = leaf.start * kernel + _first_rows(_transposed_times, count, x, leaf.rows)
        return total if momentum is None else total + leaf.kept * momentum

    whole = lambda values: jax.tree.map(matrix, values, is_leaf=_is_combination)
    return forms.Form(began, state, step, whole, lambda now: whole(tree.subtract(now, began)))


def _is_combination(leaf: Any) -> bool:
    return isinstance(leaf, Combination)


def _momentum(optimizer: forms.Optimizer, params: Tree, state: Tree, name: str) -> Array | None:
    found: list[Array] = []
    forms.map_state(optimizer.chain, params, state, lambda leaf, path: found.append(leaf) if path == name else None)
    return found[0] if found else None


def _rows(batches: Batches, kernel: Array) -> tuple[Array, Array]:
    """(x [n, d], the rows in the order of the steps, zeros where there is none; the number of rows up to the last)."""

    def of_step(step: Array) -> Array:
        batch = batches.at(step)
        real = (batch["mask"] > 0) & (step < batches.steps)
        return jnp.where(real[:, None], forms.flat_input(batch, kernel), 0)

    x = jax.vmap(of_step)(jnp.arange(batches.longest))
    return x.reshape(-1, kernel.shape[0]), batches.steps * x.shape[1]


def _times(n: int, x: Array, w: Array) -> Array:
    """The first n rows of x [N, d] times w [d, h]; zeros behind them."""
    return jnp.zeros((x.shape[0], w.shape[1]), w.dtype).at[:n].set(x[:n] @ w)


def _gram(n: int, x: Array, again: Array) -> Array:
    """The inner products of the first n rows of x [N, d], [N, N]; zeros behind them."""
    return jnp.zeros((x.shape[0], x.shape[0]), x.dtype).at[:n, :n].set(x[:n] @ again[:n].T)


def _transposed_times(n: int, x: Array, a: Array) -> Array:
    """x^T a, [d, h], where only the first n rows of both, [N, d] and [N, h], are not zero."""
    return x[:n].T @ a[:n]


def _first_rows(product: Callable[[int, Array, Array], Array], count: Array, x: Array, y: Array) -> Array:
    """product(n, x, y) with the smallest compiled n >= count: a client of few cases does not pay for the largest.

    Lanes that run together take the largest: a branch per lane would run them all.
    """
    total = x.shape[0]
    sizes = sorted({-(-total * i // SIZES) for i in range(1, SIZES + 1)})

    @jax.custom_batching.custom_vmap
    def choose(count: Array, x: Array, y: Array) -> Array:
        branch = jnp.sum(count > jnp.array(sizes[:-1], count.dtype)) if len(sizes) > 1 else 0
        return jax.lax.switch(branch, [partial(product, n) for n in sizes], x, y)

    @choose.def_vmap
    def together(axis_size: int, batched: Any, count: Array, x: Array, y: Array) -> tuple[Array, bool]:
        del axis_size, count
        return jax.vmap(partial(product, total), [0 if b else None for b in batched[1:]])(x, y), True

    return choose(count, x, y)
