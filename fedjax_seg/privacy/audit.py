"""How far one client can really move an aggregate: a search for the worst pair of neighbouring inputs.

What it finds is a lower bound of the sensitivity and calibrates nothing (`AuditedLowerBound`); its use is to refute a
`ProvenBound` that is too small, a clip that was forgotten or a reference that depends on the data.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, AuditedLowerBound, ClientUpdate, Cohort, Tree
from fedjax_seg.privacy import audit_starts

Rule = Callable[[Array, Array], Array]  # (x float [n, dim], present bool [n]) -> an array of any shape
ADJACENCIES = ("replace-one", "zero-out", "add-remove")
SCALES = (0.1, 1.0, 10.0, 1e3)  # of the starts where inputs have no bound
_RATE = 0.05  # of Adam, in units of the starts' length
_SMOOTHEST, _SHARPEST = 1e-1, 1e-8
_LITTLE = 3e6  # numbers touched; below it, compiling well takes longer than running badly
_LANES, _ENTRIES = 64, 1 << 22  # starts at a time, and numbers of them


class Witness(NamedTuple):
    """Two neighbouring inputs: `rows`, and `rows` with row `changed` replaced by `other` (zero-out: by 0; add-remove:
    left out; `other` is 0 for both)."""

    rows: np.ndarray  # float64 [n, dim]
    changed: int
    other: np.ndarray  # float64 [dim]
    start: str
    adjacency: str

    @property
    def here(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, present) of the first input."""
        return self.rows, np.ones(len(self.rows), bool)

    @property
    def there(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, present) of the second one."""
        rows, present = np.array(self.rows), np.ones(len(self.rows), bool)
        rows[self.changed] = self.other
        present[self.changed] = self.adjacency != "add-remove"
        return rows, present


def sensitivity(
    rule: Rule,
    clients: int,
    dim: int,
    *,
    radius: float = 1.0,
    adjacency: str = "replace-one",
    changed: Sequence[int] = (0,),
    restarts: int = 48,
    steps: int = 400,
    seed: int = 0,
    smooth: Callable[[Array], Rule] | None = None,
    scales: Sequence[float] | None = None,
    extra_starts: Sequence[audit_starts.Start] = (),
) -> AuditedLowerBound:
    """The largest ||A(T) - A(T')|| over neighbouring inputs that projected gradient ascent finds. In float64.

    All structured starts (audit_starts) are evaluated; the best of them and random ones are climbed from, by Adam with
    a cosine decay, projected to the ball. The value is that of the true rule at the best input ever seen.

    Args:
      rule: (x float64 [n, dim], present bool [n]) -> array; pure jax. An Aggregator becomes one by `rule_of`.
      clients, dim: n >= 1 and dim >= 1.
      radius: rows stay in this ball; math.inf: the rule limits its clients itself, and the search starts at `scales`.
      adjacency: 'replace-one' (row k becomes any other point of the ball), 'zero-out' (it becomes 0 and stays present)
        or 'add-remove' (present[k] becomes False).
      changed: the rows k that are tried. One is enough for a rule that treats clients alike; list all of them for one
        that depends on their order or on weights.
      restarts: climbs, shared out over `changed` (two each at least).
      steps: of every climb; 0 = the structured starts alone.
      seed: of the random starts.
      smooth: (eps) -> a smoothed rule, used for gradients only, eps from 1e-1 to 1e-8 of the scale; for rules whose
        gradient is singular.
      scales: lengths of starts, in the units of x; None = the radius, or SCALES where that is infinite.
      extra_starts: in units of the scale, tried at every scale.

    Returns: AuditedLowerBound(value, Witness). A rule that is not finite somewhere has value inf there.
    Raises: UserError for bad options.
    """
    _checked(clients, dim, radius, adjacency, changed, restarts, steps)
    scales = tuple(scales or ((radius,) if math.isfinite(radius) else SCALES))
    per_row = max(2, restarts // len(changed)) if steps else 0
    with jax.enable_x64(True):
        value = _many(lambda point, k: _length(_change(rule, point, k, adjacency)), clients, dim)
        found: list[tuple[float, Witness]] = []
        climbed: list[Any] = []
        for k in changed:
            starts = [*extra_starts, *audit_starts.structured(clients, dim, k)]
            points = np.stack([s * np.concatenate([p.rows, p.other[None]]) for s in scales for p in starts])
            points = _inside(points, radius)
            lengths = np.repeat(np.asarray(scales, np.float64), len(starts))
            reached = value(points, np.full(len(points), k))
            order = np.argsort(-reached, kind="stable")
            best = int(order[0])
            names = [p.name for p in starts] * len(scales)
            found.append((float(reached[best]), _witness(points[best], k, names[best], adjacency)))
            chosen = _distinct(order, reached, (per_row + 1) // 2)
            drawn = audit_starts.random(clients, dim, per_row - len(chosen), seed + k)
            for i in chosen:
                climbed.append((points[i] / lengths[i], lengths[i], k, names[i]))
            for i, p in enumerate(drawn):
                climbed.append((np.concatenate([p.rows, p.other[None]]), scales[i % len(scales)], k, p.name))
        if climbed:
            work = len(climbed) * steps * clients * dim
            climb = _many(_climber(rule, smooth, radius, adjacency, steps), clients, dim, work)
            begin, lengths, rows = (np.stack([np.asarray(c[i]) for c in climbed]) for i in range(3))
            reached, points = climb(begin, lengths, rows)
            best = int(np.argmax(reached))
            name = f"climbed from: {climbed[best][3]}"
            found.append((float(reached[best]), _witness(points[best], int(rows[best]), name, adjacency)))
    value_found, witness = max(found, key=lambda pair: pair[0])
    return AuditedLowerBound(value_found, witness)


def rule_of(aggregator: Aggregator, *, examples: Sequence[float] | None = None, decoded: bool | None = None) -> Rule:
    """What a bound of this aggregator speaks of, as a rule: its own encode and decode, driven as a round drives them.

    reads='sum' with a bound: the sum of the messages of those present, flattened and before any noise; leaving a client
    out and a message of zeros are the same there, so audit 'zero-out' as 'add-remove'. A local mechanism: the messages,
    stacked. Otherwise the decoded delta. Noise in `encode` or `decode` has the same key for both inputs of a pair:
    where its standard deviation is fixed it cancels, up to rounding in float64; where that depends on the data, hand
    over the aggregator without noise.

    Args:
      examples: per client, public; None = 1 each.
      decoded: True: always the delta.
    """
    local = _is_local(aggregator)
    whole = not decoded and (local or (aggregator.reads == "sum" and aggregator.bound is not None))

    def rule(x: Array, present: Array) -> Array:
        messages, total, delta, _ = _driven(aggregator, x, present, examples, jax.random.key(0))
        return tree.flat((messages if local else total) if whole else delta)

    return rule


def release_of(
    aggregator: Aggregator, *, examples: Sequence[float] | None = None
) -> Callable[[Array, tuple[Array, Array]], Array]:
    """(key, (x [n, dim], present [n])) -> all that round 0 gives away, with its noise, flattened.

    The decoded delta and what clients are told next; of a local mechanism the messages, which is where its claim is.
    """
    local = _is_local(aggregator)

    def release(key: Array, given: tuple[Array, Array]) -> Array:
        messages, _, delta, told = _driven(aggregator, *given, examples, key)
        return tree.flat(messages if local else (delta, told))

    return release


def _is_local(aggregator: Aggregator) -> bool:
    return aggregator.mechanism is not None and aggregator.mechanism.local


def _driven(
    aggregator: Aggregator, x: Array, present: Array, examples: Sequence[float] | None, key: Array
) -> tuple[Tree, Tree, Tree, Tree]:
    """(messages, their total, decoded delta, the next broadcast) of round 0 with one parameter vector."""
    clients, dim = x.shape
    variables = {"params": {"w": jnp.zeros(dim, x.dtype)}}
    state = aggregator.init(variables)
    broadcast = aggregator.broadcast(state)
    weights = jnp.ones(clients, jnp.float32) if examples is None else jnp.asarray(examples, jnp.float32)
    own, server = jax.random.split(key)

    def encode(row: Array, weight: Array, one: Array) -> Tree:
        update = ClientUpdate({"params": {"w": row}}, weight, jnp.int32(1), {}, {})
        return aggregator.encode(update, broadcast, variables=variables, key=one)

    messages = jax.vmap(encode)(x, weights, jax.random.split(own, clients))
    messages = tree.where(present, messages, tree.zeros_like(messages))
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages) if aggregator.reads == "sum" else messages
    cohort = Cohort(jnp.arange(clients), present)
    delta, state, _ = aggregator.decode(total, cohort, state, variables=variables, round=jnp.int32(0), key=server)
    return messages, total, delta, aggregator.broadcast(state)


def _change(rule: Rule, point: Array, k: Array, adjacency: str) -> Array:
    """A(T) - A(T'), flattened; point [n + 1, dim] is the rows and the other row."""
    rows, everybody = point[:-1], jnp.ones(point.shape[0] - 1, bool)
    other, present = rows, everybody
    if adjacency == "add-remove":
        present = everybody.at[k].set(False)
    else:
        other = rows.at[k].set(point[-1] if adjacency == "replace-one" else jnp.zeros_like(point[-1]))
    # One call for both: compiling the rule is most of a short search.
    both = jax.vmap(rule)(jnp.stack([rows, other]), jnp.stack([everybody, present]))
    return (both[0] - both[1]).reshape(-1)


def _length(moved: Array) -> Array:
    """Infinite where a rule is not finite: whoever sees that knows more than any noise hides."""
    return jnp.where(jnp.all(jnp.isfinite(moved)), jnp.linalg.norm(moved), jnp.inf)


def _climber(
    rule: Rule, smooth: Callable[[Array], Rule] | None, radius: float, adjacency: str, steps: int
) -> Callable[..., tuple[Array, Array]]:
    """(start, its length, k) -> (the largest value seen, where); the start is in units of its length."""
    optimiser = optax.adam(optax.cosine_decay_schedule(_RATE, steps))

    def climb(start: Array, length: Array, k: Array) -> tuple[Array, Array]:
        def lowered(point: Array, eps: Array) -> tuple[Array, Array]:
            moved = _change(smooth(eps) if smooth else rule, length * point, k, adjacency)
            # A root with a gradient at 0, where many starts are.
            return -jnp.sqrt(jnp.sum(jnp.square(moved / length)) + 1e-24), _length(moved)

        def step(carry: Any, i: Array) -> tuple[Any, None]:
            point, memory, best, where = carry
            eps = length * _SMOOTHEST * (_SHARPEST / _SMOOTHEST) ** (i / steps)
            (_, now), slope = jax.value_and_grad(lowered, has_aux=True)(point, eps)
            if smooth:
                now = _length(_change(rule, length * point, k, adjacency))
            best, where = jnp.maximum(now, best), jnp.where(now > best, point, where)
            slope = _along_the_rim(jnp.nan_to_num(slope, posinf=0.0, neginf=0.0), point, radius / length)
            move, memory = optimiser.update(slope, memory)
            return (_inside(optax.apply_updates(point, move), radius / length), memory, best, where), None

        point = _inside(start, radius / length)
        carry = (point, optimiser.init(point), -jnp.ones((), point.dtype), point)
        (_, _, best, where), _ = jax.lax.scan(step, carry, jnp.arange(steps + 1))
        return best, length * where

    return climb


def _along_the_rim(slope: Array, point: Array, radius: Array) -> Array:
    """The slope without what leads out of the ball: Adam scales coordinates, so projection alone ends elsewhere."""
    square = jnp.sum(jnp.square(point), axis=-1, keepdims=True)
    outward = -jnp.sum(slope * point, axis=-1, keepdims=True)
    held = (square >= (radius * (1 - 1e-9)) ** 2) & (outward > 0)
    return slope + jnp.where(held, outward / jnp.where(held, square, 1), 0) * point


def _inside(points: Any, radius: Any) -> Any:
    """Rows (last axis) moved back to the ball; numpy stays numpy."""
    xp = np if isinstance(points, np.ndarray) else jnp
    norms = xp.sqrt(xp.sum(points**2, axis=-1, keepdims=True))
    over = norms > radius
    return xp.where(over, points * (xp.where(over, radius, 1.0) / xp.where(over, norms, 1.0)), points)


def _many(function: Callable[..., Any], clients: int, dim: int, work: float = 0) -> Callable[..., Any]:
    """function over the leading axis of numpy arrays, jitted; so many at a time that memory stays small."""
    size = max(1, min(_LANES, _ENTRIES // ((clients + 1) * dim)))
    quick = {"xla_backend_optimization_level": 0} if work < _LITTLE else None
    mapped = jax.jit(
        lambda *blocks: jax.lax.map(lambda block: jax.vmap(function)(*block), blocks), compiler_options=quick
    )

    def run(*arrays: np.ndarray) -> Any:
        count = len(arrays[0])
        lanes = min(size, count)
        index = np.arange(-(-count // lanes) * lanes) % count  # whole blocks, so that one program does
        out = mapped(*(a[index].reshape(-1, lanes, *a.shape[1:]) for a in arrays))
        return jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[2:])[:count], out)

    return run


def _witness(point: np.ndarray, changed: int, start: str, adjacency: str) -> Witness:
    other = point[-1] if adjacency == "replace-one" else np.zeros_like(point[-1])
    return Witness(np.array(point[:-1]), changed, np.array(other), start, adjacency)


def _distinct(order: np.ndarray, reached: np.ndarray, count: int) -> list[int]:
    """The best `count` starts, one of each value: by symmetry many are the same."""
    chosen: list[int] = []
    for i in order:
        if len(chosen) == count:
            break
        if not chosen or not math.isclose(reached[i], reached[chosen[-1]], rel_tol=1e-6, abs_tol=1e-12):
            chosen.append(int(i))
    return chosen


def _checked(
    clients: int, dim: int, radius: float, adjacency: str, changed: Sequence[int], restarts: int, steps: int
) -> None:
    checks.number("sensitivity: clients", clients, low=1, integer=True)
    checks.number("sensitivity: dim", dim, low=1, integer=True)
    if not radius > 0:
        raise checks.UserError(f"sensitivity: radius: {radius!r} given, a number above 0 expected (math.inf: no limit)")
    checks.one_of("sensitivity: adjacency", adjacency, ADJACENCIES)
    checks.number("sensitivity: restarts", restarts, low=1, integer=True)
    checks.number("sensitivity: steps", steps, low=0, integer=True)
    if not changed:
        raise checks.UserError("sensitivity: changed: no row given, at least one expected")
    for k in changed:
        checks.number("sensitivity: changed", k, low=0, high=clients - 1, integer=True)
