"""Evaluation: per-case values on the device, scores per site, over sites and pooled on the host.

A site predicts with its own variables: the server's, and what it keeps at home (FedBN: its statistics and norms). A
site that does not train in the split at hand (an external test set, a new hospital) has kept nothing: it predicts with
the mean of what the training sites keep, weighted by their training cases.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Client, FederatedState, Task, Tree

MEAN, WORST, POOLED = "mean_of_sites", "worst_site", "pooled"


def case_outputs(
    function: Callable[..., Tree],
    client: Client,
    arrays: Mapping[str, Array],
    state: FederatedState,
    index: Array,
    train_sizes: Array,
    chunk: int,
) -> Tree:
    """`function` of every client's cases under that client's variables.

    Args:
      function: (variables, batch) -> {name: [B, ...]}, e.g. a task's outputs or evidence.
      arrays: {'x': [N, ...], 'y': [N, ...]}.
      state: of one replica.
      index: int32 [K, T], case indices; padding is evaluated and must be dropped by the caller.
      train_sizes: int32 [K]; 0 = the client keeps nothing of its own.
      chunk: cases per step, bounds the memory.

    Returns: {name: [K, T, ...]}.
    """
    clients, length = index.shape
    chunk = min(chunk, length)
    pieces = -(-length // chunk)
    padded = jnp.pad(index, ((0, 0), (0, pieces * chunk - length))).reshape(clients, pieces, chunk)
    share = train_sizes / jnp.maximum(jnp.sum(train_sizes), 1)
    newcomer = jax.tree.map(lambda x: jnp.tensordot(share, x, axes=1).astype(x.dtype), state.personal)

    def of_client(k: Array) -> Tree:
        own = tree.where(train_sizes[k] > 0, tree.row(state.personal, k), newcomer)
        variables = client.personalise(state.variables, own)

        def piece(cases: Array) -> Tree:
            batch = {name: x[cases] for name, x in arrays.items()} | {"mask": jnp.ones((chunk,))}
            return function(variables, batch)

        out = jax.lax.map(piece, padded[k])
        return jax.tree.map(lambda x: x.reshape(pieces * chunk, *x.shape[2:])[:length], out)

    return jax.lax.map(of_client, jnp.arange(clients))


def scores(
    task: Task,
    outputs: Mapping[str, np.ndarray],
    sizes: Sequence[int],
    sites: Sequence[str],
    external: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Metric rows of one replica: one per site, and 'mean_of_sites', 'worst_site', 'pooled'.

    Args:
      outputs: {name: [K, T, ...]} on the host.
      sizes: K, real cases of every site; sites without any have no row.
      sites: K names.
      external: sites that only test: they have rows of their own and are left out of the last three.

    Returns: rows {'site', 'metric', 'value', 'n'}; n counts cases, for mean_of_sites and worst_site the sites whose
      value is defined (a one-class fold has no AUC: it is left out, and n says so).
    """
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in outputs.items()}
    length = next(iter(outputs.values())).shape[1]
    where = [k * length + np.arange(n) for k, n in enumerate(sizes)]
    rows: list[dict[str, Any]] = []
    by_metric: dict[str, list[float]] = {}
    for site, cases in zip(sites, where):
        for row in task.score(flat, cases):
            rows.append({"site": site, **row})
            if site not in external:
                by_metric.setdefault(row["metric"], []).append(row["value"])
    for metric, values in by_metric.items():
        defined = [v for v in values if np.isfinite(v)]
        worst = min if task.metrics[metric][0] == "max" else max
        for site, value in ((MEAN, np.mean), (WORST, worst)):
            result = float(value(defined)) if defined else float("nan")
            rows.append({"site": site, "metric": metric, "value": result, "n": len(defined)})
    inside = [cases for site, cases in zip(sites, where) if site not in external]
    rows += [{"site": POOLED, **row} for row in task.score(flat, np.concatenate(inside))]
    return rows
