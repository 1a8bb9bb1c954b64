"""One federated training step of a task on given batches, by the engine's own client axis and client."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec

from fedjax_seg.clients import local_sgd
from fedjax_seg.core.types import Batches, Cohort, Task
from fedjax_seg.federation import client_axis

LR, MOMENTUM = 0.01, 0.9


def engine(task: Task, x: np.ndarray, y: np.ndarray, lanes: int = 1) -> tuple[Callable[[Any], Any], Any]:
    """(variables -> the sum of the clients' changes, variables): client_axis and local_sgd as in a round.

    x, y: [C, S, B, ...], the batches of C clients and S steps.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    clients, length, batch = x.shape[:3]
    client, shards = local_sgd(task, lr=LR, momentum=MOMENTUM), len(jax.devices())
    variables = jax.jit(task.init)(jax.random.key(0), {"x": x[0, 0, :1]})
    how = client_axis.Lanes(lanes, shards, "replica")
    steps = jnp.full((clients,), length, jnp.int32)

    def step(variables: Any, x: Any, y: Any) -> Any:
        def train_one(number: Any, present: Any, personal: Any) -> Any:
            at = lambda s: {"x": x[number, s], "y": y[number, s], "mask": jnp.ones(batch)}
            local = Batches(at, steps[number], jnp.float32(batch * length), number)
            update, _ = client.train(variables, {}, local, jax.random.key(0), round=jnp.int32(0), broadcast={})
            return update.delta, {}, {"ok": present}

        cohort = Cohort(jnp.arange(clients, dtype=jnp.int32), jnp.ones(clients, bool))
        return client_axis.run(train_one, cohort, steps, {}, how, True)[0]

    mesh = jax.sharding.Mesh(jax.devices(), ("replica",))
    everywhere = PartitionSpec()
    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    held = jax.device_put((variables, x, y), jax.NamedSharding(mesh, everywhere))
    return lambda variables: program(variables, *held[1:]), held[0]


def torch_batches(x: np.ndarray, y: np.ndarray) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The same batches, channels first, for a sequential loop."""
    pair = lambda k, s: (torch.tensor(np.moveaxis(x[k, s], -1, 1)).contiguous(), torch.tensor(y[k, s]).long())
    return [[pair(k, s) for s in range(x.shape[1])] for k in range(x.shape[0])]
