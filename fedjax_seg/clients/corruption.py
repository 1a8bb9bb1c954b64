"""One corrupted client, to measure how robust an aggregation rule is: flipped labels, a scaled or a random update."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Batches, Client, ClientUpdate

CORRUPTIONS = ("none", "label_flip", "scale", "random")
NOISE_STREAM = 2**31 - 1  # no local step has this number


def corrupt(client: Client, *, kind: str, which: int, factor: float, classes: int) -> Client:
    """The same client algorithm, but the client with id `which` misbehaves in every round it takes part in.

    Args:
      kind: 'label_flip' (label y becomes classes - 1 - y), 'scale' (its update times `factor`; negative = sign flip),
        'random' (a Gaussian update of `factor` times the norm of its true one, drawn per round), 'none'.
      which: client id.
    """
    checks.one_of("corruption.kind", kind, CORRUPTIONS)
    checks.number("corruption.factor", factor)
    if kind == "none":
        return client

    def train(variables: Any, personal: Any, batches: Batches, key: Any, **rest: Any) -> tuple[ClientUpdate, Any]:
        bad = batches.client == which
        if kind == "label_flip":
            clean = batches.at

            def flipped(step: Any) -> Any:
                batch = clean(step)
                return {**batch, "y": jnp.where(bad, classes - 1 - batch["y"], batch["y"])}

            return client.train(variables, personal, batches._replace(at=flipped), key, **rest)
        update, personal = client.train(variables, personal, batches, key, **rest)
        if kind == "scale":
            wrong = tree.scale(update.delta, factor)
        else:
            leaves, structure = jax.tree.flatten(update.delta)
            keys = jax.random.split(jax.random.fold_in(key, NOISE_STREAM), len(leaves))
            noise = jax.tree.unflatten(
                structure, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)]
            )
            ratio = jnp.sqrt(tree.squared_norm(update.delta) / tree.squared_norm(noise))
            wrong = tree.scale(noise, factor * ratio)
        return update._replace(delta=tree.where(bad, wrong, update.delta)), personal

    kept = client.properties - ({"orthogonal"} if kind == "random" else set())
    return client._replace(train=train, properties=kept)
