"""A mechanism at one size, ready for an audit; an aggregator becomes one by what it says of itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_seg.core.types import Aggregator, Array, ProvenBound
from fedjax_seg.privacy import audit

LENGTHS = (0.1, 1.0, 10.0, 1e3)  # of updates where the mechanism itself limits them, in units of the clip


class Audited(NamedTuple):
    """One mechanism at one size, ready for an audit.

    Attributes:
      name: of the mechanism.
      rule: (x [n, dim], present [n]) -> what the bound speaks of, without noise.
      radius: updates are searched in this ball; math.inf: the mechanism has to limit them itself.
      bound: proven, for `rule`; None = none is.
      adjacency: of the search: that of the bound, but 'add-remove' for a zero-out bound of a sum (audit.rule_of).
      changed: rows that are tried as the changed one.
      release: (key, (x, present)) -> what a round gives away, with noise; None = there is no noise.
      quiet: (x, present) -> the same without noise, where it is known.
      claimed: (epsilon, delta) of one release; None = no claim.
      formal: whether the claim is proven, for Gaussian noise of a fixed standard deviation.
      smooth: (eps) -> a smoothed rule, for gradients only.
      scales: lengths of the first inputs of the search; () = the radius.
      canary: two inputs to release; None = those of the search.
      note: said with the result.
    """

    name: str
    rule: audit.Rule
    radius: float
    bound: ProvenBound | None
    adjacency: str
    changed: tuple[int, ...] = (0,)
    release: Callable[[Array, Any], Array] | None = None
    quiet: Callable[[Any], Array] | None = None
    claimed: tuple[float, float] | None = None
    formal: bool = False
    smooth: Callable[[Array], audit.Rule] | None = None
    scales: tuple[float, ...] = ()
    canary: audit.Witness | None = None
    note: str = ""


def of_aggregator(
    aggregator: Aggregator,
    n: int,
    clip: float,
    *,
    name: str = "aggregator",
    quiet: Aggregator | None = None,
    claimed: tuple[float, float] | None = None,
    examples: Sequence[float] | None = None,
    note: str = "",
) -> Audited:
    """An aggregator as it is: its bound, its clip, its mechanism's claim.

    Args:
      clip: the length of updates. Without a bound of its own the aggregator is searched on the ball of this radius;
        with one, on updates of any length.
      quiet: the same without noise, for noise whose standard deviation depends on the data, or to guide canaries.
      claimed: (epsilon, delta) of one release; None = what a formal mechanism has at delta = 1e-5.
      examples: per client, public.
    """
    mechanism, bound, silent = aggregator.mechanism, aggregator.bound, quiet or aggregator
    if bound is None and mechanism is not None and mechanism.formal:
        bound = ProvenBound(mechanism.sensitivity, mechanism.adjacency, mechanism.unit, mechanism.proof)
    adjacency = bound.adjacency if bound else mechanism.adjacency if mechanism else "replace-one"
    summed = aggregator.reads == "sum" and aggregator.bound is not None and not (mechanism and mechanism.local)
    if adjacency == "zero-out" and summed:
        adjacency = "add-remove"
    alike = examples is None and "permutation" in silent.properties
    noisy = mechanism is not None and mechanism.noise_multiplier > 0
    if noisy and claimed is None and mechanism is not None and mechanism.formal:
        from fedjax_seg.privacy import accounting  # here: its library is slow to load

        claimed = (accounting.gaussian_epsilon(mechanism.noise_multiplier, 1e-5), 1e-5)
    still = audit.release_of(quiet, examples=examples) if quiet else None
    return Audited(
        name,
        # The sum of messages has no noise yet, unless it is theirs; then the mechanism tells that it is local.
        audit.rule_of(silent._replace(mechanism=mechanism) if noisy and not summed else aggregator, examples=examples),
        math.inf if bound else clip,
        bound,
        adjacency,
        (0,) if alike else tuple(range(n)),
        release=audit.release_of(aggregator, examples=examples) if noisy else None,
        quiet=(lambda given: still(jax.random.key(0), given)) if still else None,
        claimed=claimed if noisy else None,
        formal=bool(mechanism and mechanism.formal),
        scales=tuple(s * clip for s in LENGTHS) if bound else (),
        note=note,
    )
