"""Local batches of in-memory data, gathered on the device from an index plan."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batches

BatchesOf = Callable[[Array, Array, Array, Array], Batches]


def in_memory(arrays: Mapping[str, Array], batch_size: int, epochs: int) -> BatchesOf:
    """Shuffled epochs over a client's own cases; the last batch of an epoch is masked, never padded with repeats.

    Args:
      arrays: {'x': [N, ...], 'y': [N, ...]} on the device.
      batch_size: B.
      epochs: local epochs per round, each with a shuffle of its own.

    Returns: (plan [M], size, client, key) -> Batches of ceil(size/B) * epochs steps. The order of a client's cases
      depends on its key alone: not on M, nor on who else takes part.
    """
    checks.number("batch_size", batch_size, low=1, integer=True)
    checks.number("local_epochs", epochs, low=1, integer=True)

    def batches_of(plan: Array, size: Array, client: Array, key: Array) -> Batches:
        capacity = plan.shape[0]
        per_epoch = (size + batch_size - 1) // batch_size

        def shuffled(epoch: Array) -> Array:
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, epoch), i))(jnp.arange(capacity))
            draw = jax.vmap(jax.random.uniform)(keys)
            order = jnp.argsort(jnp.where(jnp.arange(capacity) < size, draw, 2.0))
            return jnp.concatenate([plan[order], jnp.zeros((batch_size,), plan.dtype)])  # the last slice stays inside

        orders = jax.vmap(shuffled)(jnp.arange(epochs))

        def at(step: Array) -> dict[str, Array]:
            epoch, first = step // jnp.maximum(per_epoch, 1), (step % jnp.maximum(per_epoch, 1)) * batch_size
            index = jax.lax.dynamic_slice(orders, (epoch, first), (1, batch_size))[0]
            real = first + jnp.arange(batch_size) < size
            index = jnp.where(real, index, index[0])  # masked, but NaN * 0 is NaN: no other client's case comes near
            mask = real.astype(jnp.float32)
            return {**{name: x[index] for name, x in arrays.items()}, "mask": mask}

        longest = -(-capacity // batch_size) * epochs
        return Batches(at, per_epoch * epochs, size.astype(jnp.float32), client, longest)

    return batches_of
