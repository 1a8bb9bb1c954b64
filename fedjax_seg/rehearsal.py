"""What can be known of a run by tracing it: shapes and sizes, without compiling or running anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.assembly import Experiment
from fedjax_seg.core.types import ClientUpdate


def rehearse(experiment: Experiment) -> None:
    """Traces a model's start and a prediction, and compiles nothing: sizes that do not fit are UserErrors."""
    store = experiment.data.store
    assert store is not None
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in store.whole_spec.items()}
    jax.eval_shape(
        experiment.task.outputs, variable_shapes(experiment), batch | {"mask": jax.ShapeDtypeStruct((1,), np.float32)}
    )


def variable_shapes(experiment: Experiment) -> Any:
    """The model's variables of one replica, shapes and types only."""
    start = jax.eval_shape(experiment.initial).variables
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), start)


def message_entries(experiment: Experiment) -> int:
    """The numbers in what one client sends in a round: model, weights, counts, and what else its rule asks for."""
    variables = variable_shapes(experiment)
    number: Any = jax.ShapeDtypeStruct((), jnp.float32)
    steps: Any = jax.ShapeDtypeStruct((), jnp.int32)
    extra = {"control": variables["params"]}  # of SCAFFOLD; other rules ask for nothing
    update = ClientUpdate(variables, number, steps, extra, {})
    aggregator, key = experiment.parts.aggregator, jax.eval_shape(lambda: jax.random.key(0))

    def message(update: Any, variables: Any, key: Any) -> Any:
        return aggregator.encode(update, aggregator.broadcast(aggregator.init(variables)), variables=variables, key=key)

    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(jax.eval_shape(message, update, variables, key)))
