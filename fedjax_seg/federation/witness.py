"""What a round would show to whoever looks: the clients' messages, and the pieces of them that a secure sum hands out.

For demonstrations of what leaks; nothing of it enters a run's state or numbers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, ClientUpdate, FederatedState, Tree, Variables
from fedjax_seg.federation import client_axis, round

MODEL = "value"  # of a message: the model; the rest are weights, counts and statistics


def witness(
    parts: round.Parts, state: FederatedState, plan: round.Plan, how: client_axis.Lanes, entries: int
) -> dict[str, Array]:
    """Trains the cohort of the next round once more, and shows `entries` evenly spaced numbers of every model.

    All clients send with weight 1, so that a message is the model (or update) itself.

    Returns: 'message' [C, D], what the aggregation rule has the clients send; 'clean' [C, D], their updates before any
      noise of theirs; 'model' [D], the server's; 'clients' [C], 'counts' bool [C]; with a secure sum also 'group' [C],
      'joined', and the views 'neighbour', 'colluders', 'server' [C, D] of core.types.SecureSum. D = min(entries, all).
    """
    there = round.gather(parts, state, plan, round.WITNESS)  # no masks of a round that may still come
    columns = _columns(state.variables["params"], entries)

    def encode(update: ClientUpdate, told: Tree, *, variables: Variables, key: Array) -> Tree:
        alone = update._replace(weight=jnp.ones_like(update.weight))
        message = parts.aggregator.encode(alone, told, variables=variables, key=key)
        model = message[MODEL] if isinstance(message, dict) and MODEL in message else message
        return {"message": _picked(model, columns), "clean": _picked(update.delta["params"], columns)}

    bare = parts._replace(aggregator=parts.aggregator._replace(encode=encode), secure=None)
    steps = round.steps_of(bare, state, plan, there.cohort)
    train_one = round.local_round(bare, state, plan, None)
    seen, _, info, _ = client_axis.run(train_one, there.cohort, steps, state.personal, how, False)
    found: dict[str, Any] = {
        **seen,
        "model": _picked(state.variables["params"], columns),
        "clients": there.cohort.clients,
        "counts": info["ok"],
    }
    if parts.secure is not None and there.meeting is not None:
        met = there.meeting
        found |= {**parts.secure.views(seen["message"], met), "group": met.group, "joined": met.joined}
    return found


def _columns(params: Tree, entries: int) -> np.ndarray:
    """int [D], evenly spaced positions in the flattened parameters."""
    size = tree.size(params)
    return np.linspace(0, size - 1, min(entries, size)).round().astype(np.int64)


def _picked(model: Tree, columns: np.ndarray) -> Array:
    return tree.flat(model).astype(jnp.float32)[columns]
