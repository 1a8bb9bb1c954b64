"""Replicas: folds x seeds of one method in one process and one compile, as a leading axis R on state and plans.

Mapped on a CPU (a replica's working set is the cache's), vmapped on a GPU; shared out over devices first, because
replicas never talk to each other, and what devices are left over share the clients of a replica.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Tree
from fedjax_seg.federation.client_axis import Lanes


class Layout(NamedTuple):
    """How a run is laid out over devices. `text` says it in words for the first log line."""

    mesh: Mesh
    lanes: Lanes
    vmap: bool
    text: str


def layout(replicas: int, cohort: int, lanes: int, devices: int, vmap: bool | None) -> Layout:
    """The mesh and lanes of a run.

    Args:
      replicas: R.
      cohort: C.
      lanes: clients at once on a device; 0 = auto: 1 on a CPU, all of the cohort elsewhere.
      devices: 0 = auto: as many of the visible ones as have work.
      vmap: replicas vmapped (True), mapped (False), or by backend (None: vmapped unless on a CPU).
    """
    visible, backend = jax.devices(), jax.default_backend()
    checks.number("devices", devices, low=0, integer=True)
    checks.number("lanes", lanes, low=0, high=max(cohort, 1), integer=True)
    if devices > len(visible):
        raise checks.UserError(f"devices: {devices} given, {len(visible)} {backend} device(s) visible; 0 picks")
    count = devices or max(n for n in range(1, len(visible) + 1) if _useful(n, replicas, cohort))
    over_replicas = math.gcd(replicas, count)
    shards = count // over_replicas
    picked = lanes or (1 if backend == "cpu" else -(-cohort // shards))
    mesh = Mesh(np.array(visible[:count]).reshape(over_replicas, shards), ("replica", "client"))
    vmapped = backend != "cpu" if vmap is None else vmap
    text = (
        f"backend {backend}, {count} of {len(visible)} device(s) ({visible[0].device_kind}): {replicas} replica(s) over"
        f" {over_replicas}, clients over {shards}, {picked} lane(s) each, replicas {'vmapped' if vmapped else 'mapped'}"
    )
    return Layout(mesh, Lanes(picked, shards, "client" if shards > 1 else None), vmapped, text)


def _useful(devices: int, replicas: int, cohort: int) -> bool:
    return devices // math.gcd(replicas, devices) <= cohort


def over_replicas(
    how: Layout, function: Callable[..., Tree], donate: bool = False, once: bool = False
) -> Callable[..., Tree]:
    """jit of function(replica-th rows of the first argument's leaves and the second's, *shared), stacked again.

    The first two arguments have a leading axis R; the others are shared by all replicas. With `donate` the first
    argument's buffers are reused for the first output, which must have its structure. With `once` the program runs a
    single time and need not be fast: on a CPU it is compiled without the optimiser. (Random numbers are short to draw
    and long to compile: 2 s a tensor, half a minute for a 3D network.)
    """

    def local(state: Tree, plan: Tree, *shared: Tree) -> Tree:
        if how.vmap:
            return jax.vmap(lambda s, p: function(s, p, *shared))(state, plan)
        return _mapped(lambda s, p: function(s, p, *shared), state, plan, donate)

    def spread(state: Tree, plan: Tree, *shared: Tree) -> Tree:
        specs = (P("replica"), P("replica"), *(P() for _ in shared))
        inside = jax.shard_map(local, mesh=how.mesh, in_specs=specs, out_specs=P("replica"), check_vma=False)
        return inside(state, plan, *shared)

    plain = jax.jit(spread, donate_argnums=(0,) if donate else ())
    if not once or how.mesh.devices.flat[0].platform != "cpu":
        return plain
    quick = jax.jit(spread, compiler_options={"xla_backend_optimization_level": 0})

    def call(*args: Tree) -> Tree:
        try:
            return quick(*args)
        except ValueError as error:  # inside another trace such options are refused, and nothing is compiled yet
            if "compiler_options" not in str(error):
                raise
            return plain(*args)

    return call


def over_cases(how: Layout, function: Callable[..., Tree]) -> Callable[..., Tree]:
    """jit of function(state, pairs, *shared) per replica, whose cases are shared out over the devices of its clients.

    State leaves [R, ...]; the leaves of `pairs` are [R, devices * n, ...], as are those of the result.
    """

    def local(state: Tree, pairs: Tree, train_sizes: Tree) -> Tree:
        return jax.lax.map(lambda a: function(*a), (state, pairs, train_sizes))

    cases = P("replica", "client")
    specs = (P("replica"), cases, P("replica"))
    return jax.jit(jax.shard_map(local, mesh=how.mesh, in_specs=specs, out_specs=cases, check_vma=False))


def _mapped(function: Callable[[Tree, Tree], Tree], state: Tree, plan: Tree, in_place: bool) -> Tree:
    """A loop over the leading axis; in place, the state is carried and a donated buffer is written where it lies."""
    if not in_place:
        return jax.lax.map(lambda a: function(*a), (state, plan))

    def one(carry: Tree, r: Any) -> tuple[Tree, Tree]:
        first, *rest = function(tree.row(carry, r), tree.row(plan, r))
        return tree.set_row(carry, r, first), tuple(rest)

    state, rest = jax.lax.scan(one, state, jnp.arange(jax.tree.leaves(plan)[0].shape[0]))
    return (state, *rest)


def place(how: Layout, rows: Tree) -> Tree:
    """Leaves [R, ...] onto the mesh."""
    return jax.device_put(rows, NamedSharding(how.mesh, P("replica")))


def share(how: Layout, value: Tree) -> Tree:
    """The same value on every device."""
    return jax.device_put(value, NamedSharding(how.mesh, P()))
