"""A convolution's three maps, each one's gradient made of the other two, and what vmap does to them.

y = f(x, w), dx = g(dy, w) and dw = h(x, dy) are the three derivatives of one trilinear form. So reverse mode works to
any order, with all of it in the form that the three functions are written in. Forward mode (jvp, linearize) does not.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

Map = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Maps(NamedTuple):
    """(spec, x, w) -> y; (spec, dy, w) -> dx; (spec, x, dy) -> dw."""

    forward: Map
    by_input: Map
    by_kernel: Map


def maps(forward: Map, by_input: Map, by_kernel: Map) -> Maps:
    """The same maps with gradients and batching.

    Args:
      forward, by_input, by_kernel: as they are computed. `spec` is static and hashable; spec.rule says what vmap does:
        'loop' runs a mapped axis one after the other, 'grouped' lets XLA batch. An axis that only the examples have is
        folded into theirs under both: axis 0 of x, dy, y and dx is the example.
    """
    f, g, h = _with_rule(forward, True), _with_rule(by_input, True), _with_rule(by_kernel, False)
    f.defvjp(_keep(f), lambda s, xw, dy: (g(s, dy, xw[1]), h(s, xw[0], dy)))
    g.defvjp(_keep(g), lambda s, yw, dx: (f(s, dx, yw[1]), h(s, dx, yw[0])))
    h.defvjp(_keep(h), lambda s, xy, dw: (g(s, xy[1], dw), f(s, xy[0], dw)))
    return Maps(f, g, h)


def _with_rule(function: Map, folds: bool) -> Any:
    """The function with its vmap, and room for a gradient. folds: whether axis 0 of its first argument is examples."""
    return jax.custom_vjp(lambda spec, a, b: _batchable(function, folds, spec, a, b), nondiff_argnums=(0,))


def _keep(function: Any) -> Any:
    """The forward pass of a bilinear map: its arguments are all that its gradient needs."""
    return lambda spec, a, b: (function(spec, a, b), (a, b))


def _batchable(function: Map, folds: bool, spec: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """function(spec, a, b) whose vmap is the spec's rule; the rule uses itself, so that vmaps may be nested."""

    @jax.custom_batching.custom_vmap
    def call(a: jax.Array, b: jax.Array) -> jax.Array:
        return function(spec, a, b)

    @call.def_vmap
    def rule(count: int, batched: Sequence[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        if batched[0] and not batched[1] and folds:
            y = call(a.reshape(-1, *a.shape[2:]), b)  # one kernel: more examples, nothing else
            return y.reshape(count, -1, *y.shape[1:]), True
        if spec.rule == "grouped":
            return jax.vmap(functools.partial(function, spec), [0 if own else None for own in batched])(a, b), True
        if all(batched):
            return lax.map(lambda pair: call(*pair), (a, b)), True
        return (lax.map(lambda a: call(a, b), a) if batched[0] else lax.map(lambda b: call(a, b), b)), True

    return call(a, b)
