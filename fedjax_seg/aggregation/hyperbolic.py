"""Means in the Poincare ball (FedHAvg): maps at the origin, Moebius operations, extrinsic and gyro-barycentric mean.

Source: "Hyperbolic model aggregation for federated learning in fMRI", section 3.2. The ball of curvature -c is
{x : sqrt(c) ||x|| < 1}; gamma scales norms before they enter it.

Deviations from the printed text, both for float32: the 1e-12 added to all denominators is replaced by the power series
around 0 (values agree to rounding, gradients are finite), and 1 - c ||x||^2 is never formed by subtraction where it can
be carried along.

Norm ceiling: points at or beyond the margin are moved back to it before artanh, so no result is longer than
artanh(limit) / (sqrt(c) gamma). For c = 2 and margin 1e-5 that is 4.31549/gamma where the paper's text puts the margin,
on the argument of artanh (limit = 1 - margin), and 4.19296/gamma where the released code puts it, on the radius
(limit = 1 - sqrt(c) margin). On weights with gamma = 1 this is a hard cap on the norm of every aggregated tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.aggregation.lift import About, Metrics, lift_sum, lift_with_round
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, Tree

_SERIES_BELOW = 1e-4  # squared argument; the neglected terms are below 1e-13 there


def extrinsic_mean(
    *,
    c: float = 2.0,
    gamma: float = 1.0,
    of: str = "weights",
    per: str = "tensor",
    weighted: bool = False,
    margin: float = 1e-5,
    margin_on: str = "argument",
) -> Aggregator:
    """log0(mean_k exp0(gamma x_k)) / gamma, a Euclidean mean inside the ball.

    Source: FedHAvg, section 3.2.1. A sum of ball points, so the clients need not be seen one by one. Consensus holds
    only below the norm ceiling (see the module). In float32 tanh is 1 from sqrt(c) gamma ||x|| of about 9 on: such
    clients are unit directions, and the length of the result then tells how much these directions agree.

    Args:
      c: curvature, > 0 (paper: 2).
      gamma: norm scale, > 0 (paper: 1 on weights, 100 on updates).
      of: 'weights' or 'updates' ("on Delta").
      per: 'tensor' (released code: every weight, bias and scale is a point of its own) or 'model'.
      weighted: mean in the ball by examples; the paper's is uniform.
      margin: distance kept from the boundary, > 0.
      margin_on: 'argument' (the paper's text) or 'radius' (the released code).
    Returns: an Aggregator with reads='sum'; metric clamped_fraction: the fraction of tensors moved back to the margin.
    """
    limit = _checked("extrinsic_mean", c, gamma, per, margin, margin_on)
    checks.one_of("aggregator extrinsic_mean: weighted", weighted, (False, True))

    def inward(params: Tree) -> tuple[Tree, Metrics]:
        points, _ = _by_norm(params, per, lambda square: (gamma * _tanh_ratio(c * gamma**2 * square), ()))
        return points, {}

    def outward(params: Tree) -> tuple[Tree, Metrics]:
        def factor(square: Array) -> tuple[Array, Array]:
            ratio, clamped = _log0_ratio(c * square, limit)
            return ratio / gamma, clamped

        vectors, clamped = _by_norm(params, per, factor)
        return vectors, _fractions(clamped_fraction=clamped)

    kept = frozenset({"permutation", "orthogonal"})
    return lift_sum(inward, outward, of=of, weighted=weighted, properties=kept)


def gyro_mean(
    *,
    c: float = 2.0,
    gamma: float = 1.0,
    of: str = "weights",
    per: str = "tensor",
    margin: float = 1e-5,
    margin_on: str = "argument",
    order: str | Sequence[int] = "ascending",
) -> Aggregator:
    """log0(0 (+) (1/K (x) y_1) (+) ... (+) (1/K (x) y_K)) / gamma with y_k = exp0(gamma x_k), folded from the left.

    Source: FedHAvg, section 3.2.2; the paper leaves out the maps around the sum and its order, both are the released
    code's. 1/K (x) exp0(v) is formed as exp0(v / K), its exact value, so clients that float32 would put on the boundary
    stay inside: in float32 the released code is on the boundary from sqrt(c) gamma ||x|| of about 9 on, this one from K
    times that. Sums of nearly opposite points near the boundary are ill-conditioned: finite, below the ceiling, and no
    more exact than the points are.

    The result DEPENDS ON THE ORDER of the clients, more so the longer the vectors. Shares of four nearly equal clients
    for c = 2, gamma = 1, first to last (sum 1):

      norm 0     .250 .250 .250 .250        norm 1.0   .446 .293 .170 .091
      norm 0.22  .262 .256 .247 .235        norm 2.0   .718 .214 .055 .014
      norm 0.805 .388 .291 .197 .124        norm 4.19  .946 .051 .003 .000

    From norm 9 on the first client's direction is the result. There is no weighted form, and it is no plain mean:
    exchanging two clients changes the result.

    Args:
      c, gamma, of, per, margin, margin_on: as in `extrinsic_mean`.
      order: order of the fold. 'ascending' client id, whatever the rows of the cohort; a tuple of client ids, which
        come first in that order (the others follow by id), e.g. the released code's NYU, UM, USM, UCLA; or 'cohort',
        the rows as sampled. Absent clients are skipped and K counts those present.
    Returns: an Aggregator with reads='each'; metrics clamped_fraction (of tensors) and saturated_fraction (of client
      points whose own norm is at or beyond the ceiling).
    """
    limit = _checked("gyro_mean", c, gamma, per, margin, margin_on)
    listed = _checked_order(order)
    reach = math.atanh(limit)

    def rule(x: Array, w: Array, present: Array, about: About) -> tuple[Array, Metrics]:
        del w
        count = jnp.maximum(jnp.sum(present), 1)
        scale = gamma / count.astype(x.dtype)
        squares = jnp.sum(jnp.square(x), axis=1)
        arguments = c * scale**2 * squares
        rows = _fold_order(about.clients, order, listed)
        m, gap = _fold(x, scale * _tanh_ratio(arguments), _gap(arguments), c, present, rows)
        ratio, clamped = _log0_ratio(c * jnp.sum(jnp.square(m)), limit, gap)
        beyond = present & (c * gamma**2 * squares >= reach**2)
        metrics = {"clamped_fraction": clamped.astype(jnp.float32), "saturated_fraction": jnp.sum(beyond) / count}
        return m * (ratio / gamma), metrics

    return lift_with_round(rule, per=per, of=of, properties=frozenset({"orthogonal"}))


def exp0(v: Array, c: float) -> Array:
    """Exponential map at the origin: tanh(sqrt(c) ||v||) v / (sqrt(c) ||v||), over the last axis. 0 goes to 0."""
    return v * _tanh_ratio(c * _square(v))


def log0(y: Array, c: float, *, margin: float = 1e-5, margin_on: str = "argument") -> Array:
    """Logarithm at the origin: artanh(sqrt(c) ||y||) y / (sqrt(c) ||y||), over the last axis. 0 goes to 0.

    Points at or beyond the margin (see the module) get the norm artanh(limit) / sqrt(c) exactly.
    """
    return y * _log0_ratio(c * _square(y), _checked("log0", c, 1.0, "tensor", margin, margin_on))[0]


def mobius_add(x: Array, y: Array, c: float) -> Array:
    """Moebius addition x (+) y in the ball of curvature -c, over the last axis.

    Source: FedHAvg, section 3.2.2. With n = ||x + y||^2 the printed numerator's first coefficient is
    c n + (1 - c ||x||^2) and its denominator c n + (1 - c ||x||^2)(1 - c ||y||^2): the same numbers, as sums of
    terms that are never negative in the ball.
    """
    n = c * _square(x + y)
    gap_x, gap_y = jnp.maximum(1 - c * _square(x), 0), jnp.maximum(1 - c * _square(y), 0)
    below = n + gap_x * gap_y
    return (n * x + gap_x * (x + y)) / jnp.where(below > 0, below, 1)


def mobius_scalar(r: Array | float, x: Array, c: float) -> Array:
    """Moebius scalar product r (x) x = tanh(r artanh(sqrt(c) ||x||)) x / (sqrt(c) ||x||), over the last axis.

    Points on or outside the boundary are taken as the nearest representable ones inside.
    """
    square = jnp.minimum(c * _square(x), 1 - jnp.finfo(jnp.asarray(x).dtype).eps)
    along = _artanh_ratio(square)
    return r * along * _tanh_ratio(square * (r * along) ** 2) * x


def _square(x: Array) -> Array:
    return jnp.sum(jnp.square(x), axis=-1, keepdims=True)


def _tanh_ratio(square: Array) -> Array:
    """tanh(a)/a as a smooth function of a^2 >= 0, so that no root is taken at 0."""
    small = square < _SERIES_BELOW
    a = jnp.sqrt(jnp.where(small, 1, square))
    return jnp.where(small, 1 - square / 3 + 2 * square**2 / 15, jnp.tanh(a) / a)


def _artanh_ratio(square: Array) -> Array:
    """artanh(s)/s as a smooth function of s^2 in [0, 1)."""
    small = square < _SERIES_BELOW
    s = jnp.sqrt(jnp.where(small, 0.25, square))
    return jnp.where(small, 1 + square / 3 + square**2 / 5, jnp.arctanh(s) / s)


def _gap(square: Array) -> Array:
    """1 - tanh(a)^2 as a function of a^2, without subtraction and without overflow."""
    small = square < _SERIES_BELOW
    decay = jnp.exp(-2 * jnp.sqrt(jnp.where(small, 1, square)))
    return jnp.where(small, 1 - square + 2 * square**2 / 3, 4 * decay / (1 + decay) ** 2)


def _log0_ratio(square: Array, limit: float, gap: Array | None = None) -> tuple[Array, Array]:
    """(artanh(s)/s with s moved back to limit, whether it was) from s^2, and 1 - s^2 where known more exactly."""
    gap = 1 - square if gap is None else gap
    s = jnp.sqrt(jnp.where(square > _SERIES_BELOW, square, 1))
    # s >= limit, written for the distance from the boundary
    clamped = (square > _SERIES_BELOW) & (gap <= (1 - limit) * (1 + s))
    far = (square > 0.25) & ~clamped
    near_rim = jnp.log1p(s) - 0.5 * jnp.log(jnp.where(far, gap, 1))
    near_rim = jnp.minimum(near_rim, math.atanh(limit)) / s  # the ceiling holds also where rounding left s above 1
    inside = _artanh_ratio(jnp.where(far | clamped, 0, square))
    return jnp.where(clamped, math.atanh(limit) / s, jnp.where(far, near_rim, inside)), clamped


def _fold(x: Array, lengths: Array, gaps: Array, c: float, present: Array, order: Array) -> tuple[Array, Array]:
    """The left fold m = m (+) lengths[i] x[i], from 0, without the absent.

    Args:
      x: [C, D].
      lengths: [C], factors that put the rows into the ball.
      gaps: [C], 1 - c ||y||^2 of the points y = lengths x.
      order: int [C], rows in the order of the fold.
    Returns: m [D], and 1 - c ||m||^2, carried along by
      1 - c ||m (+) y||^2 = (1 - c ||m||^2)(1 - c ||y||^2) / (c ||m + y||^2 + (1 - c ||m||^2)(1 - c ||y||^2)).
    """

    def add(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], None]:
        m, gap = carry
        y = x[i] * jnp.where(present[i], lengths[i], 0)  # adding 0 changes nothing
        own = jnp.where(present[i], gaps[i], 1)
        n = c * jnp.sum(jnp.square(m + y))
        below = n + gap * own
        some = below > 0  # else two opposite points so near the boundary that their gaps underflow: their sum is 0
        safe = jnp.where(some, below, 1)
        return (m * ((n + gap) / safe) + y * (gap / safe), jnp.where(some, gap * own / safe, 1)), None

    (m, gap), _ = jax.lax.scan(add, (jnp.zeros_like(x[0]), jnp.ones((), x.dtype)), order)
    return m, gap


def _fold_order(clients: Array, order: str | Sequence[int], listed: tuple[int, ...]) -> Array:
    """Rows in the order of the fold, int [C]."""
    if order == "cohort":
        return jnp.arange(clients.shape[0])
    rank = clients + len(listed)
    for position, client in enumerate(listed):
        rank = jnp.where(clients == client, position, rank)
    return jnp.argsort(rank)


def _by_norm(params: Tree, per: str, factor: Callable[[Array], tuple[Array, Any]]) -> tuple[Tree, list[Any]]:
    """params times a factor of their squared norm, per tensor or jointly, and what else the factors return."""
    leaves, structure = jax.tree.flatten(params)
    if per == "tensor":
        factors = [factor(tree.squared_norm(leaf)) for leaf in leaves]
    else:
        factors = [factor(tree.squared_norm(leaves))]
    scaled = [x * factors[i if per == "tensor" else 0][0].astype(x.dtype) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, scaled), [noted for _, noted in factors]


def _fractions(**flags: list[Array]) -> Metrics:
    return {name: jnp.mean(jnp.stack(values).astype(jnp.float32)) for name, values in flags.items() if values}


def _checked(name: str, c: float, gamma: float, per: str, margin: float, margin_on: str) -> float:
    """The largest argument that artanh may get; raises a UserError for bad options."""
    what = f"aggregator {name}"
    checks.number(f"{what}: c", c, low=0.0, above=0.0)
    checks.number(f"{what}: gamma", gamma, low=0.0, above=0.0)
    checks.one_of(f"{what}: per", per, ("tensor", "model"))
    checks.one_of(f"{what}: margin_on", margin_on, ("argument", "radius"))
    widest = 0.5 if margin_on == "argument" else 0.5 / math.sqrt(c)
    checks.number(f"{what}: margin", margin, low=1e-7, high=widest)  # below 1e-7 float32 cannot tell it from 0
    return 1 - margin * (math.sqrt(c) if margin_on == "radius" else 1.0)


def _checked_order(order: str | Sequence[int]) -> tuple[int, ...]:
    """The client ids that come first in the fold."""
    what = "aggregator gyro_mean: order"
    if isinstance(order, str):
        checks.one_of(what, order, ("ascending", "cohort"))
        return ()
    if not isinstance(order, Sequence):
        raise checks.UserError(f"{what}: {order!r} given, 'ascending', 'cohort' or a tuple of client ids expected")
    for client in order:
        checks.number(what, client, low=0, integer=True)
    if len(set(order)) != len(order):
        raise checks.UserError(f"{what}: {tuple(order)} given, every client id at most once expected")
    return tuple(int(client) for client in order)
