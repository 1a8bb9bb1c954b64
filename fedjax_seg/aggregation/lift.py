"""From plain maths on clients to an Aggregator: the one place where rules meet pytrees.

Two shapes of rule exist. `lift` takes a rule on rows, `(x [C, D], w [C], present [C]) -> [D]`, for the rules that must
see every client (median, Krum, gyro mean). `lift_sum` takes a map in and a map out around a sum, for the rules whose
clients need never be seen one by one (means, extrinsic mean); memory then does not grow with the number of clients.

What holds for every aggregator built here:
  * only 'params' go through the rule; other collections (batch statistics) are averaged apart, weighted by examples;
  * absence is `cohort.present`; the values of absent rows do not matter;
  * nobody present, or no examples at all: the delta is exactly 0.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, ClientUpdate, Cohort, ProvenBound, Tree, Variables

Rule = Callable[[Array, Array, Array], Array]
Metrics = Mapping[str, Array]


class About(NamedTuple):
    """What a rule may know of the round beside the rows.

    Attributes:
      clients: int32 [C], client ids.
      round: int32 scalar, from 0.
      server: [D], the server's values of these coordinates before the round.
    """

    clients: Array
    round: Array
    server: Array


_JOIN_BELOW = 1 << 16  # per='coordinate': tensors with fewer entries share one call of the rule
_BLOCK = 1 << 15  # columns per block of a Gram matrix: a few clients' worth stays in the cache


def lift(
    rule: Rule,
    *,
    per: str = "tensor",
    of: str = "updates",
    metrics: Callable[[Array, Array, Array], Metrics] | None = None,
    weighted: bool = False,
    properties: frozenset[str] = frozenset(),
) -> Aggregator:
    """An Aggregator with reads='each' from a rule on rows. A rule of one's own takes three lines:

        def largest(x, w, present):
            return x[jnp.argmax(jnp.where(present, jnp.sum(x**2, axis=1), -1))]
        aggregator = lift(largest, per="model")

    Args:
      rule: (x float [C, D], w float32 [C], present bool [C]) -> [D]. Rows of absent clients are zero and must not
        matter; w is 0 there. Shapes are static, the number of present clients is not. It must be jit and vmap safe.
      per: 'tensor' flattens every tensor on its own, 'model' joins all of them into one vector (one copy);
        'coordinate' is for rules that treat every coordinate alone: tensors are grouped as is cheapest.
      of: 'updates': rows are local - server. 'weights': rows are server + delta, and the returned delta is the
        aggregate - server.
      metrics: (x, w, present) -> {name: scalar}, reported as the mean over tensors.
      weighted: w is the examples per client; otherwise 1 for every present client.
      properties: contracts that the rule keeps, see core.types.Aggregator; 'weighted' is added where asked.

    Raises: UserError for an unknown `per` or `of`.
    """

    def with_round(x: Array, w: Array, present: Array, about: About) -> tuple[Array, Metrics]:
        del about
        return rule(x, w, present), metrics(x, w, present) if metrics else {}

    return lift_with_round(with_round, per=per, of=of, weighted=weighted, properties=properties)


def lift_with_round(
    rule: Callable[[Array, Array, Array, About], tuple[Array, Metrics]],
    *,
    per: str = "tensor",
    of: str = "updates",
    weighted: bool = False,
    properties: frozenset[str] = frozenset(),
) -> Aggregator:
    """As `lift`, for a rule (x, w, present, about) -> ([D], {metric: scalar}) that needs more of the round."""
    checks.one_of("aggregation: per", per, ("tensor", "model", "coordinate"))
    checks.one_of("aggregation: of", of, ("updates", "weights"))

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        del broadcast, variables, key
        params, statistics = _split(update.delta)
        return {"value": params, "statistics": statistics, "examples": update.weight}

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        del key
        present = cohort.present
        examples = jnp.where(present, total["examples"], 0)
        w = examples if weighted else present.astype(jnp.float32)
        alive = jnp.any(present) & (jnp.sum(examples) > 0)
        server, structure = jax.tree.flatten(variables["params"])
        stacked = jax.tree.leaves(total["value"])
        out: list[Array] = [jnp.zeros(())] * len(server)
        noted: list[Metrics] = []
        for group in _groups([leaf.size for leaf in server], per):
            x = _rows([stacked[i] for i in group], [server[i] for i in group], present, of)
            flat = [server[i].reshape(-1) for i in group]
            about = About(cohort.clients, round, flat[0] if len(flat) == 1 else jnp.concatenate(flat))
            y, metrics = rule(x, w, present, about)
            noted.append(metrics)
            start = 0
            for i in group:
                part = y[start : start + server[i].size].reshape(server[i].shape)
                out[i] = _delta(part, server[i], alive, of)
                start += server[i].size
        share = examples / jnp.where(alive, jnp.sum(examples), 1)
        statistics = jax.tree.map(
            lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1, precision=jax.lax.Precision.HIGHEST),
            total["statistics"],
        )
        delta = _join(variables, jax.tree.unflatten(structure, out), statistics)
        return delta, state, {k: jnp.mean(jnp.stack([m[k] for m in noted])) for k in (noted[0] if noted else {})}

    properties = properties | ({"weighted"} if weighted else frozenset())
    return Aggregator(_nothing, _nothing, encode, decode, reads="each", properties=properties)


def lift_sum(
    inward: Callable[[Tree], tuple[Tree, Metrics]],
    outward: Callable[[Tree], tuple[Tree, Metrics]],
    *,
    of: str = "updates",
    weighted: bool = False,
    bare: bool = False,
    divisor: float | None = None,
    bound: ProvenBound | None = None,
    properties: frozenset[str] = frozenset(),
) -> Aggregator:
    """An Aggregator with reads='sum': outward(sum w inward(x) / sum w), a quasi-arithmetic mean.

    The message of a client is {'value': w * inward(x), 'weight': w, 'examples', 'statistics': examples * statistics,
    'noted': metrics of inward}; the count travels in it, so a sum over present clients is all the server needs.

    Args:
      inward: params -> (tree of the same structure, {name: scalar}); runs at the client. The scalars are reported as
        means over the present clients.
      outward: mean of the inward trees -> (params, {name: scalar}); runs once, on the server. Must be finite at 0.
      of: as in `lift`.
      weighted: w is the client's examples; otherwise 1.
      bare: the message is {'value'} alone, and the mean is over the (public) number of present clients. For sums that
        are to be made private: nothing unbounded leaves the client. Needs weighted=False and a model with parameters
        only; `encode` raises a UserError where there are batch statistics.
      divisor: with bare=True, a public constant that the sum is divided by instead of the number of present clients.
      bound: of the norm of the message.
      properties: as in `lift`.
    """
    checks.one_of("aggregation: of", of, ("updates", "weights"))
    if divisor is not None and not bare:
        raise checks.UserError(f"aggregation: divisor={divisor} given with bare=False, bare=True expected")
    if bare and weighted:
        raise checks.UserError(
            "aggregation: bare=True given with weighted=True, one of them expected; the weight leaks"
        )

    def encode(update: ClientUpdate, broadcast: Tree, *, variables: Variables, key: Array) -> Tree:
        del broadcast, key
        params, statistics = _split(update.delta)
        value, noted = inward(tree.add(variables["params"], params) if of == "weights" else params)
        if bare:
            if statistics:
                raise checks.UserError(
                    f"aggregation: collections {', '.join(sorted(statistics))} found, only 'params' expected, because "
                    "unclipped batch statistics void the bound; use a model without them (LayerNorm, GroupNorm)"
                )
            return {"value": value}
        examples = update.weight
        return {
            "value": _times(value, examples) if weighted else value,
            "weight": examples if weighted else jnp.ones_like(examples),
            "examples": examples,
            "statistics": _times(statistics, examples),
            "noted": dict(noted),
        }

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        del round, key
        count = jnp.sum(cohort.present.astype(jnp.float32))
        weight, examples = (count, count) if bare else (total["weight"], total["examples"])
        alive = (count > 0) & (weight > 0) & (examples > 0)
        if divisor is not None:  # public, and so is that the sum is used: of an empty round as well
            weight, alive = jnp.float32(divisor), jnp.ones((), bool)
        mean, metrics = outward(_over(total["value"], jnp.where(alive, weight, 1)))
        params = jax.tree.map(lambda y, s: _delta(y, s, alive, of), mean, variables["params"])
        statistics = {} if bare else _over(total["statistics"], jnp.where(alive, examples, 1))
        noted = {} if bare else _over(total["noted"], jnp.maximum(count, 1))
        return _join(variables, params, statistics), state, {**noted, **metrics}

    properties = properties | ({"weighted"} if weighted else frozenset())
    return Aggregator(_nothing, _nothing, encode, decode, reads="sum", bound=bound, properties=properties)


def gram(x: Array, centre: Array | None = None) -> Array:
    """Inner products of rows, float [C, D] -> [C, C], symmetric to the bit; of x - centre [D] where given.

    Block by block: a matrix product over a very long axis leaves the cache, and the centred rows are never stored.
    """
    size = x.shape[1]
    blocks = size // _BLOCK if size > 2 * _BLOCK else 0

    def products(rows: Array, middle: Array | None) -> Array:
        rows = rows if middle is None else rows - middle
        return jnp.dot(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    def add_block(i: Array, total: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, i * _BLOCK, _BLOCK, axis=1)
        middle = None if centre is None else jax.lax.dynamic_slice_in_dim(centre, i * _BLOCK, _BLOCK)
        return total + products(rows, middle)

    rest = blocks * _BLOCK
    total = products(x[:, rest:], None if centre is None else centre[rest:])
    if blocks:
        total = jax.lax.fori_loop(0, blocks, add_block, total)
    return (total + total.T) / 2


def combine(coefficients: Array, x: Array) -> Array:
    """sum_i coefficients[i] x[i]: [C], [C, D] -> [D], in full float32 on every backend."""
    return jnp.dot(coefficients.astype(x.dtype), x, precision=jax.lax.Precision.HIGHEST)


def _nothing(_: Any) -> Tree:
    return {}


def _split(variables: Variables) -> tuple[Tree, dict[str, Tree]]:
    return variables["params"], {k: v for k, v in variables.items() if k != "params"}


def _join(variables: Variables, params: Tree, statistics: Mapping[str, Tree]) -> Variables:
    return {k: params if k == "params" else statistics[k] for k in variables}


def _times(values: Tree, factor: Array) -> Tree:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), values)


def _over(values: Tree, divisor: Array) -> Tree:
    return jax.tree.map(lambda x: x / divisor.astype(x.dtype), values)


def _delta(aggregate: Array, server: Array, alive: Array, of: str) -> Array:
    moved = aggregate - server if of == "weights" else aggregate
    return jnp.where(alive, moved, 0).astype(server.dtype)


def _groups(sizes: list[int], per: str) -> list[list[int]]:
    """Which leaves share one call of the rule."""
    if per == "tensor":
        return [[i] for i in range(len(sizes))]
    joined = [i for i, size in enumerate(sizes) if per == "model" or size < _JOIN_BELOW]
    alone = [[i] for i in range(len(sizes)) if i not in joined]
    return ([joined] if joined else []) + alone


def _rows(stacked: list[Array], server: list[Array], present: Array, of: str) -> Array:
    """[C, D]; rows of absent clients stay zero also where the server's weights are added."""
    if of == "weights":
        flags = [present.reshape((-1,) + (1,) * s.ndim) for s in server]
        stacked = [jnp.where(p, x + s, 0) for p, x, s in zip(flags, stacked, server)]
    flat = [x.reshape(x.shape[0], -1) for x in stacked]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)
