"""Small federations for the tests of the engine: uneven clients, tasks of a few parameters, and a log of every step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.aggregation import make as aggregator_of
from fedjax_seg.clients import local_sgd
from fedjax_seg.core.types import Batches, Client, FederatedState, Task
from fedjax_seg.federation import client_axis, local_batches, round, sampling, server

SIZES = (7, 4, 10, 1)  # batches of 4: two full sizes, three remainders, three to one steps
CLIENTS, BATCH = len(SIZES), 4


def cases(sizes=SIZES, features=3, seed=0):
    """{'x' [N + 1, features], 'y' [N + 1], 'id' [N + 1]}; case 0 belongs to nobody."""
    rng = np.random.default_rng(seed)
    total = 1 + sum(sizes)
    y = rng.integers(0, 2, total).astype(np.int32)
    x = rng.normal(size=(total, features)) + y[:, None] * np.linspace(-1, 1, features)
    return {"x": x.astype(np.float32), "y": y, "id": np.arange(total, dtype=np.int32)}


def plan(sizes=SIZES, longest=None):
    """The Plan of one replica: clients' cases one after the other, from case 1 on; test = train."""
    longest = longest or max(sizes)
    index, first = np.zeros((len(sizes), longest), np.int32), 1
    for k, n in enumerate(sizes):
        index[k, :n] = first + np.arange(n)
        first += n
    counts = np.asarray(sizes, np.int32)
    return round.Plan(index, counts, index, counts)


def owner(sizes=SIZES):
    """int [N + 1]: whose case it is; -1 for case 0."""
    return np.concatenate([[-1], np.repeat(np.arange(len(sizes)), sizes)])


def quadratic(features=3):
    """loss = mean over the batch of ||w - x||^2 / 2: its gradient is w - mean(x), so everything has a closed form."""

    def loss(variables: Any, batch: Any, key: Any) -> Any:
        squares = jnp.sum((variables["params"]["w"] - batch["x"]) ** 2, axis=1) / 2
        return jnp.sum(squares * batch["mask"]) / jnp.sum(batch["mask"]), {}

    def outputs(variables: Any, batch: Any) -> Any:
        return {"distance": jnp.sum((variables["params"]["w"] - batch["x"]) ** 2, axis=1)}

    start = {"params": {"w": jnp.linspace(0.5, -0.25, features, dtype=jnp.float32)}}
    return Task(lambda key, batch: start, loss, outputs, lambda outputs, rows: [], {})


def network(dtype=jnp.float32):
    """Logistic loss of tanh(x W) v, parameters in `dtype`: the smallest thing that is not linear."""

    def init(key: Any, batch: Any) -> Any:
        width = int(np.prod(batch["x"].shape[1:]))
        kernel = jax.random.normal(key, (width, 3), dtype) / np.sqrt(width)
        return {"params": {"v": jnp.array([1.0, -0.5, 0.25], dtype), "w": kernel}}

    def loss(variables: Any, batch: Any, key: Any) -> Any:
        w, v = variables["params"]["w"], variables["params"]["v"]
        logits = jnp.tanh(batch["x"].reshape(batch["x"].shape[0], -1) @ w) @ v
        losses = jax.nn.softplus(logits) - batch["y"] * logits
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"]), {}

    return Task(init, loss, lambda variables, batch: {}, lambda outputs, rows: [], {}, linear_input="params/w")


def logged(task: Task, log: list) -> Task:
    """The same task; every evaluation of its loss appends (ids, mask) to `log`, from the running program."""

    def loss(variables: Any, batch: Any, key: Any) -> Any:
        note = lambda ids, mask: log.append((np.array(ids), np.array(mask)))
        jax.debug.callback(note, batch["id"], batch["mask"])
        return task.loss(variables, batch, key)

    return task._replace(loss=loss)


def in_order(arrays, batch_size, epochs=1):
    """As local_batches.in_memory without the shuffle: its random numbers are most of a tiny program's compile time."""

    def batches_of(plan: Any, size: Any, client: Any, key: Any) -> Batches:
        per_epoch = (size + batch_size - 1) // batch_size
        padded = jnp.concatenate([plan, jnp.zeros((batch_size,), plan.dtype)])

        def at(step: Any) -> dict[str, Any]:
            first = (step % jnp.maximum(per_epoch, 1)) * batch_size
            index = jax.lax.dynamic_slice(padded, (first,), (batch_size,))
            mask = (first + jnp.arange(batch_size) < size).astype(jnp.float32)
            return {**{name: x[index] for name, x in arrays.items()}, "mask": mask}

        return Batches(at, per_epoch * epochs, size.astype(jnp.float32), client)

    return batches_of


def parts(
    task_or_client,
    arrays,
    *,
    aggregator="mean",
    sampler=None,
    clients=CLIENTS,
    batch=BATCH,
    epochs=1,
    shuffled=False,
    **rest,
):
    """round.Parts: everyone every round, an SGD server, a stop on every fault, unless told otherwise."""
    client = task_or_client if isinstance(task_or_client, Client) else local_sgd(task_or_client, lr=0.1)
    options = {"server": server.make(), "skip_nonfinite": False, "skip_empty": False} | rest
    if isinstance(aggregator, str):
        aggregator = aggregator_of(aggregator)
    make_batches = local_batches.in_memory if shuffled else in_order
    batches = make_batches({k: jnp.asarray(v) for k, v in arrays.items()}, batch, epochs)
    return round.Parts(client, aggregator, sampler or sampling.make("full", clients), batches_of=batches, **options)


def start(made: round.Parts, task: Task, arrays, seed=0, clients=CLIENTS) -> FederatedState:
    key = jax.random.key(seed)
    example = {name: x[:1] for name, x in arrays.items()} | {"mask": np.ones(1, np.float32)}
    variables = quick_jit(lambda key: dict(task.init(key, example)))(key)
    return round.initial_state(made, variables, key, clients)


def quick_jit(function, **options):
    """jit without the compiler's optimiser: these programs run for milliseconds and would compile for seconds."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def runner(made: round.Parts, lanes=1, capacity=16):
    """(state, plan, stop) -> (state, records, done), jitted."""
    many = quick_jit(round.many_rounds(made, client_axis.Lanes(lanes), capacity))
    return lambda state, plan, stop: many(state, plan, jnp.int32(stop))


def equal(a, b):
    """Bitwise, leaf by leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def distance(a, b):
    """Largest difference of two trees relative to their largest entry."""
    one, two = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.max(np.abs(one - two)) / max(np.max(np.abs(one)), np.max(np.abs(two)), 1e-300)
