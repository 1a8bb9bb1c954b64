"""Evaluation: per-case values on the device, scores per site, over sites and pooled on the host.

A site predicts with its own variables: the server's, and what it keeps at home (FedBN: its statistics and norms). A
site that does not train in the split at hand (an external test set, a new hospital) has kept nothing: it predicts with
the mean of what the training sites keep, weighted by their training cases.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

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
    variables_of = _variables_of(client, state, train_sizes)

    def of_client(k: Array) -> Tree:
        variables = variables_of(k)

        def piece(cases: Array) -> Tree:
            batch = {name: x[cases] for name, x in arrays.items()} | {"mask": jnp.ones((chunk,))}
            return function(variables, batch)

        out = jax.lax.map(piece, padded[k])
        return jax.tree.map(lambda x: x.reshape(pieces * chunk, *x.shape[2:])[:length], out)

    return jax.lax.map(of_client, jnp.arange(clients))


def _variables_of(client: Client, state: FederatedState, train_sizes: Array) -> Callable[[Array], Tree]:
    """client id -> the variables it predicts with; who keeps nothing of its own takes the clients' mean of that."""
    share = train_sizes / jnp.maximum(jnp.sum(train_sizes), 1)
    newcomer = jax.tree.map(lambda x: jnp.tensordot(share, x, axes=1).astype(x.dtype), state.personal)

    def of(k: Array) -> Tree:
        own = tree.where(train_sizes[k] > 0, tree.row(state.personal, k), newcomer)
        return client.personalise(state.variables, own)

    return of


class Pairs(NamedTuple):
    """Cases to look at one by one, each under its client's variables; those behind `count` are padding.

    Attributes:
      clients, cases: int32 [P].
      count: int32 [1].
    """

    clients: Any
    cases: Any
    count: Any


def pair_outputs(
    function: Callable[..., Tree],
    client: Client,
    cases_of: Callable[[Array], Mapping[str, Array]],
    state: FederatedState,
    pairs: Pairs,
    train_sizes: Array,
) -> Tree:
    """`function` of single cases that are too large to hold many of: only real ones are fetched and computed.

    Args:
      function, state, train_sizes: as in `case_outputs`.
      cases_of: (cases int32 [1]) -> batch of one (federation.streamed.whole).

    Returns: {name: [P, ...]}, zeros in the padding.
    """
    variables_of = _variables_of(client, state, train_sizes)

    def one(i: Array) -> Tree:
        batch = cases_of(jax.lax.dynamic_slice_in_dim(pairs.cases, i, 1))
        return jax.tree.map(lambda x: x[0], function(variables_of(pairs.clients[i]), batch))

    shape = jax.eval_shape(one, jnp.zeros((), jnp.int32))
    out = jax.tree.map(lambda s: jnp.zeros((len(pairs.cases), *s.shape), s.dtype), shape)
    return jax.lax.fori_loop(0, pairs.count[0], lambda i, out: tree.set_row(out, i, one(i)), out)


def case_by_case(
    call: Callable[[Pairs], Mapping[str, Any]],
    index: np.ndarray,
    sizes: np.ndarray,
    shards: int,
    width: int,
    reduce: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
    each: Callable[..., None] | None = None,
) -> dict[str, np.ndarray]:
    """The reduced outputs of all test cases, a few at a time: what is large never leaves the loop.

    Args:
      call: (Pairs with leaves [R, shards * width], count [R, shards]) -> {name: [R, shards * width, ...]}.
      index: int32 [R, K, T]; sizes: int [R, K], real cases.
      shards: devices that share the cases of a replica.
      width: cases of a device and call.
      reduce: outputs of n cases on the host -> {column: [n]}; runs beside the next call.
      each: (replica, client, position, outputs of one case) of every case, where given; on the host.

    Returns: {column: [R, K, T]}, zeros in the padding.
    """
    work = [[(k, t) for k, n in enumerate(row) for t in range(int(n))] for row in sizes]
    per_call = shards * width
    columns: dict[str, np.ndarray] = {}

    def keep(of: list[list[tuple[int, int, int]]], found: Mapping[str, np.ndarray]) -> None:
        for r, places in enumerate(of):
            if not places:
                continue
            mine = {name: x[r][[p for p, _, _ in places]] for name, x in found.items()}
            for name, values in reduce(mine).items():
                table = columns.setdefault(
                    name, np.zeros((*index.shape, *np.shape(values)[1:]), np.asarray(values).dtype)
                )
                table[r, [k for _, k, _ in places], [t for _, _, t in places]] = values
            if each:
                for i, (_, k, t) in enumerate(places):
                    each(r, k, t, {name: x[i : i + 1] for name, x in mine.items()})

    with ThreadPoolExecutor(1) as behind:
        waiting: list[Future[None]] = []
        for first in range(0, max(map(len, work)), per_call):
            pairs, of = _dealt([row[first : first + per_call] for row in work], index, shards, width)
            found = jax.tree.map(np.asarray, dict(call(pairs)))
            for done in waiting:  # at most one chunk of outputs waits while the next one is computed
                done.result()
            waiting = [behind.submit(keep, of, found)]
        for done in waiting:
            done.result()
    return columns


def _dealt(
    rows: list[list[tuple[int, int]]], index: np.ndarray, shards: int, width: int
) -> tuple[Pairs, list[list[tuple[int, int, int]]]]:
    """(client, position) pairs of every replica dealt out to the shards in turn, and where each of them lies."""
    shape = (len(rows), shards * width)
    clients, cases = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    count = np.zeros((len(rows), shards), np.int32)
    places: list[list[tuple[int, int, int]]] = []
    for r, row in enumerate(rows):
        places.append([])
        for i, (k, t) in enumerate(row):
            place = i % shards * width + i // shards
            clients[r, place], cases[r, place] = k, index[r, k, t]
            count[r, i % shards] += 1
            places[-1].append((place, k, t))
    return Pairs(clients, cases, count), places


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
