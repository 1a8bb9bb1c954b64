"""One round on a plain matrix, without the federation room."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fedjax_seg.core import tree
from fedjax_seg.core.types import ClientUpdate, Cohort


def _aggregate(aggregator, deltas, *, weights=None, server=None, present=None, clients=None):
    leaf = jax.tree.leaves(deltas)[0]
    rows = leaf.shape[0]
    weights = jnp.ones(rows, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    server = jax.tree.map(lambda x: jnp.zeros_like(x[0]), deltas) if server is None else server
    present = jnp.ones(rows, bool) if present is None else jnp.asarray(present)
    clients = jnp.arange(rows) if clients is None else jnp.asarray(clients)
    variables, key = {"params": server}, jax.random.key(0)

    def encode(delta, weight):
        update = ClientUpdate({"params": delta}, weight, jnp.int32(1), {}, {})
        return aggregator.encode(update, {}, variables=variables, key=key)

    messages = jax.vmap(encode)(deltas, weights)
    messages = tree.where(present, messages, tree.zeros_like(messages))
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), messages) if aggregator.reads == "sum" else messages
    delta, _, metrics = aggregator.decode(
        total, Cohort(clients, present), {}, variables=variables, round=jnp.int32(0), key=key
    )
    return delta["params"], metrics


quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def _program(aggregator):
    return quick_jit(functools.partial(_aggregate, aggregator))


def _compiled(aggregator, deltas, **given):
    return _program(aggregator)(jax.tree.map(jnp.asarray, deltas), **jax.tree.map(jnp.asarray, given))


@pytest.fixture
def aggregate():
    """(aggregator, deltas: params with a leading client axis) -> (delta of params, metrics); a zero server model."""
    return _compiled


@pytest.fixture
def aggregate_inside():
    """The same, not jitted: for use inside other transformations."""
    return _aggregate


@pytest.fixture
def compiled():
    """jit for programs that run a few times only."""
    return quick_jit
