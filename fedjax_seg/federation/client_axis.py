"""How clients run: the one home of lanes and devices, which are performance flags and change no result.

    shard_map over devices( scan over groups of L clients( vmap over the L lanes( the client's own dynamic loop )))

Numbers behind this: on a CPU one lane per device is fastest, because every client then runs exactly its own number of
steps (executed/real = 1.00) and kernels are not batched; on a GPU all clients of the cohort fit in lanes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.core import tree
from fedjax_seg.core.types import Array, Cohort, Tree


class Lanes(NamedTuple):
    """The shape of execution: `lanes` clients at once on each of `shards` devices of the mesh axis `axis`."""

    lanes: int = 1
    shards: int = 1
    axis: str | None = None


def schedule(steps: Array, lanes: int, shards: int) -> Array:
    """Which cohort row runs where: int32 [shards, groups, lanes]; the value C stands for 'nobody'.

    Rows are sorted by steps, longest first, so that lanes of a group have similar lengths; groups go to the devices
    in a snake (0 1 1 0 0 1 ...), which evens out their sums.

    Args:
      steps: int32 [C], real local steps of every row (0 = absent).
    """
    size = steps.shape[0]
    groups = -(-size // (lanes * shards))
    row = jnp.arange(size) if lanes * shards == 1 else jnp.argsort(-steps, stable=True)
    row = jnp.concatenate([row, jnp.full((groups * shards * lanes - size,), size, row.dtype)])
    row = row.reshape(groups, shards, lanes)
    odd = (jnp.arange(groups) % 2 == 1)[:, None, None]
    return jnp.swapaxes(jnp.where(odd, row[:, ::-1], row), 0, 1).astype(jnp.int32)


def run(
    train_one: Callable[[Array, Array, Tree], tuple[Tree, Tree, Mapping[str, Array]]],
    cohort: Cohort,
    steps: Array,
    personal: Tree,
    how: Lanes,
    accumulate: bool,
) -> tuple[Tree, Tree, Mapping[str, Array], Array]:
    """Trains every client of the cohort once.

    Args:
      train_one: (client id, present, personal row) -> (message, personal row, info); info holds scalars, among them
        'ok' (bool): whether the message counts. Messages and personal rows of clients that are not ok are discarded.
      cohort: C rows.
      steps: int32 [C], the real number of local steps of every row.
      personal: leaves [K, ...].
      accumulate: True: the messages are summed group by group, memory does not grow with C. False: stacked.

    Returns: (total, personal, info [C], executed); total is the sum, or the stack [C, ...] with zeros where not ok;
      executed counts the local steps the hardware ran, idle lanes included.
    """
    size = cohort.clients.shape[0]
    plan = schedule(steps, how.lanes, how.shards)
    mine = plan[jax.lax.axis_index(how.axis)] if how.shards > 1 else plan[0]
    # Row C is nobody: an absent client 0, whose results are dropped.
    clients = jnp.concatenate([cohort.clients, jnp.zeros((1,), cohort.clients.dtype)])
    present = jnp.concatenate([cohort.present, jnp.zeros((1,), bool)])
    length = jnp.concatenate([steps, jnp.zeros((1,), steps.dtype)])

    def one(row: Array, personal: Tree) -> tuple[Tree, Tree, Mapping[str, Array]]:
        held = tree.row(personal, clients[row])
        message, kept, info = train_one(clients[row], present[row], held)
        message, kept = tree.where(info["ok"], (message, kept), (tree.zeros_like(message), held))
        return message, kept, info

    def lanes_of(rows: Array, personal: Tree) -> tuple[Tree, Tree, Mapping[str, Array]]:
        if how.lanes > 1:
            return jax.vmap(one, in_axes=(0, None))(rows, personal)
        return jax.tree.map(lambda x: x[None], one(rows[0], personal))

    def group(carry: tuple[Tree, Tree], rows: Array) -> tuple[tuple[Tree, Tree], Any]:
        total, personal = carry
        message, kept, info = lanes_of(rows, personal)
        executed = how.lanes * jnp.max(length[rows])
        if accumulate:
            total = jax.tree.map(lambda t, m: t + jnp.sum(m, 0) if how.lanes > 1 else t + m[0], total, message)
            message = {}
        if how.lanes * how.shards == 1:  # nobody is never scheduled
            personal, kept = tree.set_row(personal, clients[rows[0]], tree.row(kept, 0)), {}
        elif how.shards == 1:  # written where they lie: no stack of what all clients keep
            personal, kept = _write_back(personal, kept, clients[rows], rows < size), {}
        return (total, personal), (message, kept, info, executed)

    shape = jax.eval_shape(lambda r: one(r, personal)[0], jax.ShapeDtypeStruct((), jnp.int32)) if accumulate else {}
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    (total, personal), (messages, kept, info, executed) = jax.lax.scan(group, (zero, personal), mine)
    rows, executed = mine, jnp.sum(executed)
    if how.shards > 1:
        gather = lambda x: jax.lax.all_gather(x, how.axis, tiled=True)
        total, executed = jax.lax.psum((total, executed), how.axis)
        messages, kept, info, rows = jax.tree.map(gather, (messages, kept, info, rows))
        kept, rows = _flat((kept, rows))
        personal = _write_back(personal, kept, clients[rows], rows < size)
    messages, info = _in_cohort_order((messages, info), rows.reshape(-1), size, how)
    return (total if accumulate else messages), personal, info, executed


def _flat(stacked: Tree) -> Tree:
    """Leaves [groups, lanes, ...] -> [groups * lanes, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


def _in_cohort_order(stacked: Tree, rows: Array, size: int, how: Lanes) -> Tree:
    """Leaves [groups, lanes, ...] in the order of execution -> [C, ...] in the order of the cohort."""
    flat = _flat(stacked)
    if how.lanes * how.shards == 1:
        return flat  # never reordered: no copy of a stack of models
    place = jnp.zeros((size,), rows.dtype).at[rows].set(jnp.arange(rows.shape[0], dtype=rows.dtype), mode="drop")
    return tree.rows(flat, place)


def _write_back(personal: Tree, kept: Tree, clients: Array, real: Array) -> Tree:
    """personal [K, ...] with the rows of `clients` [n] replaced by kept [n, ...], one slice at a time; `real` False:
    nobody, nothing is written."""
    if not jax.tree.leaves(personal):
        return personal

    def write(i: Array, personal: Tree) -> Tree:
        old = tree.row(personal, clients[i])  # of nobody: what an earlier lane may have written
        return tree.set_row(personal, clients[i], tree.where(real[i], tree.row(kept, i), old))

    return jax.lax.fori_loop(0, clients.shape[0], write, personal)
