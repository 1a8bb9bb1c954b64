"""Fewer input features without another result: an orthogonal change of basis of a linear first layer.

With N cases of d > N features, every gradient of a first layer W [d, h] lies in the span of the cases. In an
orthonormal basis that starts with that span, x = Q z with z [r], r <= N: the layer becomes U = Q^T W [r, h], and the
part of W outside the span is never seen by a case. SGD (momentum, weight decay, a proximal term) treats that part as
one multiple of its start W_perp at every client, so one extra row, e [1, h] with the norms of W_perp's columns, stands
for it: norms and inner products of the layers of two clients are those of [U; e]. Hence whatever commutes with
orthogonal maps (means, hyperbolic means, geometric median, Krum, norm clipping) gives the same model, up to rounding,
at r + 1 instead of d rows. It does not hold for coordinate-wise rules (median, Adam) nor for isotropic noise.

The basis is made of all cases, test ones included; it is a change of coordinates, and no learned number depends on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Batch, Task, Variables

SMALLEST = 1e-6  # singular values below this share of the largest are rounding


class InSpan(NamedTuple):
    """A task in the coordinates of its cases.

    Attributes:
      task: the same task on the new features.
      x: float [N, r + 1], the cases; the last feature is 0. float64 only where the given cases are.
      expand: (variables, initial variables of the original task) -> variables of the original task.
    """

    task: Task
    x: np.ndarray
    expand: Callable[[Variables, Variables], Variables]


def basis(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [N, d] = z [N, r] @ q [r, d] with orthonormal rows of q; computed in float64, returned as float32.

    Cases that are given in float64 keep it.
    """
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    left, values, q = np.linalg.svd(np.asarray(x, np.float64).reshape(len(x), -1), full_matrices=False)
    rank = int(np.sum(values > SMALLEST * values[0])) if values[0] > 0 else 1
    return (left[:, :rank] * values[:rank]).astype(dtype), q[:rank].astype(dtype)


def in_span(task: Task, x: np.ndarray) -> InSpan:
    """The task in the span of its cases x [N, ...]. `task.linear_input` names the kernel [d, h] that meets them."""
    z, q = basis(x)
    features = np.concatenate([z, np.zeros((len(z), 1), z.dtype)], 1)
    shape = x.shape[1:]
    path = task.linear_input

    def outside(kernel: Array) -> Array:
        return jnp.asarray(kernel - q.T @ (q @ kernel))

    def init(key: Array, batch: Batch) -> Variables:
        original = task.init(key, {**batch, "x": jnp.zeros((batch["x"].shape[0], *shape), batch["x"].dtype)})

        def reduce(name: str, leaf: Array) -> Array:
            if name != path:
                return leaf
            return jnp.concatenate([q @ leaf, jnp.linalg.norm(outside(leaf), axis=0)[None]])

        return tree.map_paths(reduce, dict(original))

    def expand(variables: Variables, initial: Variables) -> Variables:
        start = tree.paths(initial)[path]

        def full(name: str, leaf: Array) -> Array:
            if name != path:
                return leaf
            norms = jnp.linalg.norm(outside(start), axis=0)
            share = jnp.sum(leaf[-1] * norms) / jnp.maximum(jnp.sum(norms**2), 1e-30)
            return jnp.asarray(q.T @ leaf[:-1] + share * outside(start))

        return tree.map_paths(full, dict(variables))

    return InSpan(task._replace(init=init), features, expand)


def applies(task: Task, *properties: Any) -> bool:
    """Whether every part declares that it commutes with orthogonal maps, and the task's first layer is linear."""
    return bool(task.linear_input) and all("orthogonal" in p for p in properties)
