"""Which hospitals exchange secrets with each other: clusters, dealt before training or anew in every round."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Cohort, Meeting

_DEAL, _ORDER = 0x0DEA, 0x04DE  # streams of a meeting's key
LONE = "a cluster of 1 hides nothing: its sum is its message"


class Clusters(NamedTuple):
    """How rows of a cohort get their cluster.

    Attributes:
      of: int32 [K], the cluster of every client where clusters are fixed.
      sizes: of the clusters with everybody there.
      redraw: whether those who are there are dealt anew in every round.
      size: N, the least size of a redrawn cluster (as long as so many are there); 0 = by number.
      dealing: how, in words.
    """

    of: np.ndarray
    sizes: tuple[int, ...]
    redraw: bool
    size: int
    dealing: str

    @property
    def facts(self) -> dict[str, Any]:
        """JSON-able."""
        return {"clusters": len(self.sizes), "cluster_sizes": list(self.sizes), "dealing": self.dealing}


def mesh(clients: int) -> Clusters:
    """Everybody in one cluster."""
    return Clusters(np.zeros(clients, np.int32), (clients,), False, 0, "one cluster of all")


def chosen(
    what: str,
    clients: int,
    places: int,
    site_columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    clusters: int = 0,
    size: int = 0,
    sizes: tuple[int, ...] = (),
    column: str = "",
    redraw: bool = False,
    seed: int = 0,
) -> Clusters:
    """The clusters of a run.

    Source: "Cluster based secure multi-party computation in federated learning for histopathology images", section on
    the framework: K hospitals, dealt at random to M clusters of N = K/M before training; or by distance, hardware or
    network (here a site column), or of different sizes. Deviations: K need not be a multiple of M (sizes then differ by
    one); clusters can be dealt anew among those who take part in a round, for cohorts that are a sample.

    Args:
      what: for messages, e.g. "secure_sum 'additive'".
      clients: K.
      places: C, the most clients of one round.
      site_columns: {column: K values}.
      clusters: M; 0 = not by number.
      size: N, every cluster has at least so many: M = K // N; 0 = not by size. With `clusters` both must agree.
      sizes: of all clusters, adding up to K; () = not given.
      column: a cluster for every value of this column of the sites; '' = none. With none of the four: one cluster.
      redraw: deal those who are there anew in every round; M and N are then of a round with all C places taken. M is
        lowered to half of those who are there, so that nobody is left alone.
      seed: of the fixed dealing.
    Raises: UserError where numbers do not fit, or a cluster would have one member.
    """
    total = places if redraw else clients
    checks.number(f"{what}: clusters", clusters, low=0, integer=True)
    checks.number(f"{what}: size", size, low=0, integer=True)
    checks.number(f"{what}: seed", seed, low=0, integer=True)
    checks.one_of(f"{what}: redraw", redraw, (False, True))
    ways = {"clusters, size": clusters or size, "sizes": sizes, "column": column}
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise checks.UserError(
            f"{what}: {' and '.join(given)} given, one way to form clusters expected: drop the others"
        )
    if redraw and given != ["clusters, size"]:
        raise checks.UserError(
            f"{what}: redraw given with {given[0] if given else 'one cluster of all'}, with clusters or size expected"
        )
    if column:
        return _by_column(what, clients, site_columns or {}, column)
    if sizes:
        return _dealt(_explicit(what, tuple(sizes), clients), seed, 0, False)
    if not given:
        return mesh(clients)
    number = _number(what, total, clusters, size, "places of a round" if redraw else "clients")
    fair = tuple(total // number + (i < total % number) for i in range(number))
    return _dealt(fair, seed, size, redraw)


def _number(what: str, total: int, clusters: int, size: int, of: str) -> int:
    """M, from M or N of `total`."""
    if size == 1:
        raise checks.UserError(f"{what}: size: 1 given, at least 2 expected: {LONE}")
    if size > total:
        raise checks.UserError(f"{what}: size: N = {size} given for {total} {of}, at most {total} expected: lower size")
    by_size = max(1, total // size) if size else clusters
    if clusters and clusters != by_size:
        raise checks.UserError(
            f"{what}: clusters: M = {clusters} and size N = {size} given for {total} {of}, which make M ="
            f" {total} // {size} = {by_size}: drop one of the two"
        )
    if by_size > total // 2:
        raise checks.UserError(
            f"{what}: clusters: M = {by_size} given for {total} {of}, at most {total // 2} expected: {LONE}"
        )
    return by_size


def _explicit(what: str, sizes: tuple[int, ...], clients: int) -> tuple[int, ...]:
    for size in sizes:
        checks.number(f"{what}: sizes", size, low=0, integer=True)
    if min(sizes) < 2:
        raise checks.UserError(f"{what}: sizes: {min(sizes)} given, at least 2 members each expected: {LONE}")
    if sum(sizes) != clients:
        raise checks.UserError(
            f"{what}: sizes: {sizes} given, which add up to {sum(sizes)}, {clients} expected (all clients)"
        )
    return tuple(int(size) for size in sizes)


def _dealt(sizes: tuple[int, ...], seed: int, size: int, redraw: bool) -> Clusters:
    if redraw:
        return Clusters(np.zeros(0, np.int32), sizes, True, size, "anew in every round among those who are there")
    of = np.zeros(sum(sizes), np.int32)
    of[np.random.default_rng(seed).permutation(len(of))] = np.repeat(np.arange(len(sizes)), sizes)
    return Clusters(of, sizes, False, size, f"at random before training, seed {seed}")


def _by_column(what: str, clients: int, columns: Mapping[str, Sequence[Any]], column: str) -> Clusters:
    values = list(checks.lookup(columns, column, f"{what}: column"))
    if len(values) != clients:
        raise checks.UserError(f"{what}: column {column!r}: {len(values)} values found for {clients} clients")
    missing = [k for k, v in enumerate(values) if v is None or v != v or str(v).strip() == ""]
    if missing:
        raise checks.UserError(
            f"{what}: column {column!r}: no value found for client {missing[0]}, one for every client expected"
        )
    names = [str(v).strip() for v in values]
    count = Counter(names)  # in the order of the clients
    alone = [name for name, n in count.items() if n == 1]
    if alone:
        raise checks.UserError(
            f"{what}: column {column!r}: {alone[0]!r} has client {names.index(alone[0])} only, at least 2 clients of"
            f" every value expected: {LONE}"
        )
    number = {name: i for i, name in enumerate(count)}
    of = np.asarray([number[name] for name in names], np.int32)
    return Clusters(of, tuple(count.values()), False, 0, f"by the site column {column!r}")


def meet(clusters: Clusters, cohort: Cohort, stays: Array, key: Array) -> Meeting:
    """The exchange of one round: everybody with everybody of its cluster who is there. As SecureSum.meet.

    Whoever finds nobody of its cluster does not join; whoever is left alone by those who leave does not count. The
    group is named by its first row, so that it is below C whatever the number of clusters.
    """
    of = _anew(clusters, cohort, key) if clusters.redraw else jnp.asarray(clusters.of)[cohort.clients]
    same = (of[:, None] == of[None, :]) & cohort.present[:, None] & cohort.present[None, :]
    rows = jnp.arange(same.shape[0], dtype=jnp.int32)
    links = same & (rows[:, None] != rows[None, :])
    joined = jnp.any(links, axis=1)
    group = jnp.where(joined, jnp.argmax(same, axis=1).astype(jnp.int32), rows)
    left = joined & stays
    counts = left & jnp.any(links & left[None, :], axis=1)
    return Meeting(cohort.clients, joined, counts, group, links, key)


def _anew(clusters: Clusters, cohort: Cohort, key: Array) -> Array:
    """int32 [C]: those present dealt one by one in random order to as many clusters as they can fill."""
    there = jnp.sum(cohort.present, dtype=jnp.int32)
    number = there // clusters.size if clusters.size else jnp.minimum(len(clusters.sizes), there // 2)
    return ranks(jax.random.fold_in(key, _DEAL), cohort.clients, cohort.present) % jnp.maximum(number, 1)


def ranks(key: Array, clients: Array, among: Array) -> Array:
    """int32 [C]: the place of every row in a random order of the rows `among`, from 0; it follows the client, not the
    row. Means nothing elsewhere."""
    draw = jax.vmap(lambda client: jax.random.bits(jax.random.fold_in(key, client)))(clients)
    lower = (draw[:, None] > draw[None, :]) | ((draw[:, None] == draw[None, :]) & (clients[:, None] > clients[None, :]))
    return jnp.sum(lower & among[None, :], axis=1, dtype=jnp.int32)


def partners(meeting: Meeting, among: Array) -> Array:
    """bool [C, C], symmetric, without diagonal: two rows of one group that are both in `among`."""
    rows = jnp.arange(among.shape[0])
    same = (meeting.group[:, None] == meeting.group[None, :]) & (rows[:, None] != rows[None, :])
    return same & among[:, None] & among[None, :]


def alone(meeting: Meeting, arrived: Array) -> Array:
    """Bool scalar: of some group exactly one member arrived, whose message the sum of the group would be."""
    return jnp.any(arrived & ~jnp.any(partners(meeting, arrived), axis=1))


def chain(meeting: Meeting, among: Array) -> Array:
    """int32 [C]: the place of every row in this round's random order of `among`."""
    return ranks(jax.random.fold_in(meeting.key, _ORDER), meeting.clients, among)
