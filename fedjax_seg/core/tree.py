"""Rows of stacked pytrees: leaves [N, ...] where N is clients or replicas. Pure, jit-safe."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def rows(tree: Tree, index: Any) -> Tree:
    """leaf[index] of every leaf; index is an int, a slice or an int array."""
    return jax.tree.map(lambda x: x[index], tree)


def row(tree: Tree, index: Any) -> Tree:
    """leaf[index] of every leaf for one in-range index: a slice, which a CPU copies far faster than it gathers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def set_row(tree: Tree, index: Any, new: Tree) -> Tree:
    """leaf with row `index` (in range) replaced: written in place inside a loop."""
    return jax.tree.map(lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, index, 0), tree, new)


def stack(trees: list[Tree]) -> Tree:
    """Leaves [len(trees), ...]."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Leaf-wise select by a scalar, or by [N] on leaves [N, ...]."""

    def select(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (jnp.ndim(a) - condition.ndim)), a, b)

    return jax.tree.map(select, yes, no)


def add(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.subtract, a, b)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def scale(tree: Tree, factor: Any) -> Tree:
    return jax.tree.map(lambda x: x * factor, tree)


def size(tree: Tree) -> int:
    """D, the entries of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def flat(tree: Tree) -> jax.Array:
    """[D], all leaves one after the other, in the order of jax.tree.leaves."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def unflat(vector: jax.Array, like: Tree) -> Tree:
    """The vector [D] as a tree of the structure, shapes and types of `like`: the way back from `flat`."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        parts.append(vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        start += leaf.size
    return jax.tree.unflatten(structure, parts)


def squared_norm(tree: Tree) -> jax.Array:
    """Sum of squares over all leaves, a scalar of at least float32 (0 for an empty tree)."""
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(x)) for x in wide), jnp.zeros(()))


def all_finite(tree: Tree) -> jax.Array:
    """Bool scalar: no leaf has a NaN or an infinity."""
    good = jnp.ones((), bool)
    for leaf in jax.tree.leaves(tree):
        good = good & jnp.all(jnp.isfinite(leaf))
    return good


def paths(tree: Tree) -> dict[str, Any]:
    """{'params/Dense_0/kernel': leaf, ...} in the order of jax.tree.leaves."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(_name(k) for k in path): leaf for path, leaf in flat}


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def map_paths(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """tree.map with the path of every leaf as first argument."""
    return jax.tree_util.tree_map_with_path(lambda p, x: function("/".join(_name(k) for k in p), x), tree)
