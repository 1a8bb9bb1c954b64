"""Rows of stacked pytrees against numpy's indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import equal

from fedjax_seg.core import tree
from fedjax_seg.core.types import Cohort

A = {"w": jnp.arange(12.0).reshape(3, 2, 2), "n": jnp.array([1, 2, 3])}
B = {"w": -jnp.ones((3, 2, 2)), "n": jnp.array([7, 8, 9])}


def numpy_rows(t, index):
    return jax.tree.map(lambda x: np.asarray(x)[index], t)


@pytest.mark.parametrize("index", [1, slice(0, 2), np.array([2, 0, 0])])
def test_rows(index):
    equal(tree.rows(A, index), numpy_rows(A, index))


def test_row_and_set_row_take_a_traced_index():
    equal(jax.jit(tree.row)(A, 2), numpy_rows(A, 2))
    new = {"w": jnp.full((2, 2), 5.0), "n": jnp.array(4)}
    changed = jax.jit(tree.set_row)(A, 1, new)
    equal(numpy_rows(changed, [0, 2]), numpy_rows(A, [0, 2]))
    equal(numpy_rows(changed, 1), jax.tree.map(np.asarray, new))


def test_stack_then_rows_is_the_identity():
    equal(tree.stack([tree.rows(A, i) for i in range(3)]), A)


def test_where_selects_by_a_scalar_or_by_rows():
    equal(tree.where(jnp.array(True), A, B), A)
    equal(tree.where(jnp.array(False), A, B), B)
    mixed = tree.where(jnp.array([True, False, True]), A, B)
    equal(numpy_rows(mixed, [0, 2]), numpy_rows(A, [0, 2]))
    equal(numpy_rows(mixed, 1), numpy_rows(B, 1))
    # unlike a product with 0 or 1, a NaN that is not selected does not leak
    bad = jax.tree.map(lambda x: x * jnp.nan, {"w": A["w"]})
    equal(tree.where(jnp.zeros(3, bool), bad, {"w": B["w"]}), {"w": B["w"]})


def test_arithmetic():
    equal(tree.add(A, B), jax.tree.map(lambda a, b: np.asarray(a) + np.asarray(b), A, B))
    equal(tree.subtract(A, B), jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), A, B))
    equal(tree.scale(A, 2), jax.tree.map(lambda a: np.asarray(a) * 2, A))
    equal(tree.zeros_like(A), jax.tree.map(lambda a: np.zeros_like(np.asarray(a)), A))


def test_squared_norm():
    assert tree.squared_norm({}) == 0
    assert tree.squared_norm({"a": jnp.array([3.0, 4.0]), "b": jnp.array(12.0)}) == 169
    narrow = tree.squared_norm({"a": jnp.full(1000, 64, jnp.bfloat16)})
    assert narrow.dtype == jnp.float32 and narrow == 1000 * 64**2  # bfloat16 would overflow its 8 bits of precision
    with jax.enable_x64(True):
        assert tree.squared_norm({"a": jnp.full(1, 1e-3, jnp.float64)}).dtype == jnp.float64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad):
    assert tree.all_finite(A) and tree.all_finite({})
    assert not tree.all_finite({"a": jnp.ones(3), "b": jnp.array([[0.0, bad]])})


def test_paths_name_every_leaf_in_the_order_of_the_leaves():
    mixed = {"params": {"Dense_1": {"bias": 2, "kernel": 3}, "Dense_0": [0, 1]}, "cohort": Cohort(4, 5)}
    found = tree.paths(mixed)
    assert list(found) == [
        "cohort/clients",
        "cohort/present",
        "params/Dense_0/0",
        "params/Dense_0/1",
        "params/Dense_1/bias",
        "params/Dense_1/kernel",
    ]
    assert list(found.values()) == jax.tree.leaves(mixed)
    doubled = tree.map_paths(lambda path, x: f"{path}={x}", mixed)
    assert doubled["cohort"] == Cohort("cohort/clients=4", "cohort/present=5")
    assert doubled["params"]["Dense_0"] == ["params/Dense_0/0=0", "params/Dense_0/1=1"]
