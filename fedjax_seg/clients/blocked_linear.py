"""Optimisers that treat every coordinate alone, on a wide first linear layer cut into blocks of rows.

To optax a block is a parameter of its own. A block's gradient and the intermediate values of its update stay in the
cache, so the matrix [d, h] and the optimiser's state are read and written about once a step, instead of once per
operation of the optimiser. The numbers are the same up to rounding, for every optimiser without a norm over a tensor.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.clients import forms
from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Batch, Tree

BLOCK = 1 << 19  # entries of a block
MOST = 16  # blocks: each has operations of its own in the program


class Blocks(NamedTuple):
    """The rows of a matrix [d, h], in order; as a leaf's stand-in, a sub-tree of what an optimiser works on."""

    parts: tuple[Array, ...]


def pays(kernel: Array) -> bool:
    """Whether the kernel is so large that its update leaves the cache (static)."""
    return bool(kernel.size >= 4 * BLOCK)


def form(optimizer: forms.Optimizer, params: Tree, state: Tree, name: str) -> forms.Form:
    """The parameters with the kernel at the path `name` as Blocks."""
    kernel = forms.at(params, name)
    width = kernel.shape[0]
    count = min(MOST, -(-kernel.size // BLOCK))
    edges = [width * i // count for i in range(count + 1)]
    cut = lambda x: tuple(x[a:b] for a, b in itertools.pairwise(edges))
    began = forms.replaced(params, name, Blocks(cut(kernel)))
    state = forms.map_state(
        optimizer.chain, params, state, lambda leaf, path: Blocks(cut(leaf)) if path == name else leaf
    )

    def step(loss: forms.Loss, now: Tree, state: Tree, batch: Batch, key: Array, number: Array) -> Any:
        del number
        x = cut(forms.flat_input(batch, kernel).T)
        z = sum(a.T @ w for a, w in zip(x, forms.at(now, name).parts))
        value, gradient = forms.through_preactivations(loss, now, name, z, batch, key)
        dz = forms.at(gradient, name)
        gradient = forms.replaced(gradient, name, Blocks(tuple(a @ dz for a in x)))
        return value, *optimizer.apply(gradient, state, now, began)

    def matrix(leaf: Any) -> Any:
        return jnp.concatenate(leaf.parts) if isinstance(leaf, Blocks) else leaf

    whole = lambda values: jax.tree.map(matrix, values, is_leaf=lambda leaf: isinstance(leaf, Blocks))
    return forms.Form(began, state, step, whole, lambda now: tree.subtract(whole(now), params))
