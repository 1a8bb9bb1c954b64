"""The parts of the lazy first layer that test_wide_layers does not see: row counts, absent clients, foreign cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_federation as tiny

from fedjax_seg import tasks
from fedjax_seg.clients import lazy_linear, local_sgd
from fedjax_seg.federation import local_batches


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 11, 12])
@pytest.mark.parametrize("lanes", [False, True])
def test_products_of_the_first_rows(count, lanes):
    rng = np.random.default_rng(count)
    x, w = rng.integers(-4, 5, (12, 5)).astype(np.float32), rng.integers(-4, 5, (5, 3)).astype(np.float32)
    a = rng.integers(-4, 5, (12, 3)).astype(np.float32)
    x[count:], a[count:] = 0, 0

    def products(n, x, a):
        first = lazy_linear._first_rows
        on_rows = first(lazy_linear._times, n, x, w), first(lazy_linear._gram, n, x, x)
        return *on_rows, first(lazy_linear._transposed_times, n, x, a)

    if lanes:  # another client in the other lane
        both = jax.jit(jax.vmap(products))(jnp.array([count, 12]), np.stack([x, x[::-1]]), np.stack([a, a]))
        got = [value[0] for value in both]
    else:
        got = jax.jit(products)(jnp.int32(count), x, a)
    for value, expected in zip(got, (x @ w, x @ x.T, x.T @ a)):
        np.testing.assert_array_equal(value, expected)  # small integers: no rounding


def update_of(x, size, task, dtype, **options):
    """The update of one client that owns the first `size` of the cases x [10, d], in two epochs of batches of 4."""
    client = local_sgd(task, lr=0.05, momentum=0.9, weight_decay=0.1, **options)

    def train(x, y, size):
        start = task.init(jax.random.key(1), {"x": x[:1]})
        start = jax.tree.map(lambda leaf: leaf.astype(dtype), start)
        local = local_batches.in_memory({"x": x, "y": y}, 4, 2)(jnp.arange(10), size, 0, jax.random.key(2))
        return client.train(start, client.init(start), local, jax.random.key(3), round=0, broadcast={})

    return tiny.quick_jit(train)(jnp.asarray(x, dtype), jnp.arange(10) % 2, jnp.int32(size))


@pytest.mark.parametrize(("double_softmax", "keep"), [(False, False), (True, True)], ids=["paper", "released"])
def test_the_paper_s_network_in_float64(double_softmax, keep):
    x = np.random.default_rng(0).normal(size=(10, 120))
    with jax.enable_x64(True):
        task = tasks.make("classification", {"name": "mlp", "hidden": (6,)}, double_softmax=double_softmax)
        assert task.linear_input == "params/Dense_0/kernel"
        options = {"nesterov": keep, "keep_optimizer": keep}
        lazy = update_of(x, 10, task, np.float64, **options)
        plain = update_of(x, 10, task._replace(linear_input=""), np.float64, **options)
    assert tiny.distance(plain[0].delta, lazy[0].delta) < 1e-9
    assert tiny.distance(plain[1], lazy[1]) < 1e-9 if keep else lazy[1] == {}


def test_no_steps_no_update_and_no_foreign_case():
    task = tasks.make("classification", {"name": "mlp", "hidden": (6,)})
    x = np.random.default_rng(0).normal(size=(10, 120))
    x[7:] = np.nan  # cases of others
    absent, _ = update_of(x, 0, task, np.float32)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(absent.delta))
    mine, _ = update_of(x, 7, task, np.float32)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(mine.delta))
    assert np.any(mine.delta["params"]["Dense_0"]["kernel"] != 0)
