"""Cases that stay on disk, brought to the device by a callback: training patches and whole volumes.

The host function is pure in (cases, key, step), so a callback inside the jitted round needs no order, no state and no
lock: the same client code and the same round run as for data in memory. On the device nothing but one batch is held.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batches, CaseStore
from fedjax_seg.federation.local_batches import BatchesOf


def patches(store: CaseStore, batch_size: int, epochs: int) -> BatchesOf:
    """Epochs of patches of a client's own cases, drawn anew in every epoch.

    Args:
      store: gives the patches of a step.
      batch_size: B, patches per step.
      epochs: local epochs per round; one is `store.per_case` patches of every case.

    Returns: (plan [M], size, client, key) -> Batches of ceil(size * per_case / B) * epochs steps; `x` is float32. What
      a step holds depends on the client's cases, its key and the step alone.
    """
    checks.number("batch_size", batch_size, low=1, integer=True)
    checks.number("local_epochs", epochs, low=1, integer=True)
    spec = _spec(store.patch_spec, batch_size) | {"mask": jax.ShapeDtypeStruct((batch_size,), np.float32)}

    def fetch(rows: Any, size: Any, key: Any, step: Any) -> dict[str, np.ndarray]:
        rows, size, key, step = (np.asarray(x) for x in (rows, size, key, step))
        lead = step.shape  # of lanes and replicas that run side by side
        asked = zip(rows.reshape(-1, rows.shape[-1]), size.ravel(), key.reshape(-1, key.shape[-1]), step.ravel())
        found = [store.patches(r, int(n), k, int(s), batch_size, epochs) for r, n, k, s in asked]
        return {name: _stacked([f[name] for f in found], lead, spec[name]) for name in spec}

    def batches_of(plan: Array, size: Array, client: Array, key: Array) -> Batches:
        words = jax.random.key_data(key)

        def at(step: Array) -> Mapping[str, Array]:
            batch = jax.pure_callback(fetch, spec, plan, size, words, step, vmap_method="broadcast_all")
            return _wide(batch)

        steps = lambda cases: -(-cases * store.per_case // batch_size) * epochs
        return Batches(at, steps(size), size.astype(jnp.float32), client, steps(plan.shape[0]))

    return batches_of


def whole(store: CaseStore) -> Callable[[Array], Mapping[str, Array]]:
    """(cases int32 [B]) -> a batch of whole cases, `x` float32, 'mask' ones."""

    def cases_of(index: Array) -> Mapping[str, Array]:
        spec = _spec(store.whole_spec, index.shape[0])

        def fetch(asked: Any) -> dict[str, np.ndarray]:
            asked = np.asarray(asked)
            found = [store.whole(int(case)) for case in asked.ravel()]
            return {name: _stacked([f[name] for f in found], asked.shape[:-1], s) for name, s in spec.items()}

        batch = jax.pure_callback(fetch, spec, index, vmap_method="broadcast_all")
        return _wide(batch) | {"mask": jnp.ones(index.shape[0])}

    return cases_of


def example(store: CaseStore) -> dict[str, Array]:
    """A batch of one empty patch, for a model's first call."""
    batch = {name: jnp.zeros(s.shape, s.dtype) for name, s in _spec(store.patch_spec, 1).items()}
    return _wide(batch) | {"mask": jnp.ones((1,))}


def _spec(of_one: Mapping[str, Any], count: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((count, *shape), dtype) for name, (shape, dtype) in of_one.items()}


def _stacked(found: list[np.ndarray], lead: tuple[int, ...], spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """The rows of a callback's result, with the axes of its vmaps in front."""
    rows = found[0][None] if len(found) == 1 else np.stack(found)
    return np.asarray(rows, spec.dtype).reshape(*lead, *spec.shape)


def _wide(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Images travel in half precision and are computed with in float32."""
    return {**batch, "x": batch["x"].astype(jnp.float32)}
