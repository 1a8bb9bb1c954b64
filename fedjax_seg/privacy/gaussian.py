"""The Gaussian mechanism around an aggregator: noise once per round, calibrated by a proven bound and nothing else."""

import math
from typing import Any

import jax

from fedjax_seg.core import checks, noise
from fedjax_seg.core.types import Aggregator, Array, Cohort, Mechanism, ProvenBound, Tree, Variables

NOISE = 0x6E01  # stream of a round's aggregator key


def privatize(aggregator: Aggregator, *, noise_multiplier: float) -> Aggregator:
    """The aggregator with N(0, (noise_multiplier * bound)^2) in every coordinate, once per round.

    reads='sum': the noise is added to the finished total of the messages, before `decode`, which then is
    post-processing; the bound is that of one message's norm, over all of its leaves. reads='each': the noise is added
    to the decoded delta; the bound is that of its change. Metrics of an aggregator that reads every client are computed
    without noise, so they are records of the simulation that the guarantee does not cover.

    Noise comes from the round's aggregator key alone and does not depend on who is present: a round without clients
    releases noise as well. It is float32 with long tails (core.noise): attacks on its rounding are outside the
    guarantee.

    Args:
      noise_multiplier: standard deviation / bound, >= 0; 0 changes nothing and promises nothing.
    Returns: the aggregator with `mechanism` set (formal where there is noise).
    Raises: UserError unless the aggregator has a ProvenBound: a number that an auditor found calibrates nothing.
    """
    checks.number("noise_multiplier", noise_multiplier, low=0.0)
    bound = aggregator.bound
    if not isinstance(bound, ProvenBound):
        found = "none" if bound is None else type(bound).__name__
        raise checks.UserError(
            f"privatize: bound {found} found, a ProvenBound expected; use a rule that clips what leaves a client (with"
            " clipped_mean: statistics='refuse')"
        )
    if aggregator.mechanism is not None:
        raise checks.UserError(
            "privatize: an aggregator with a mechanism found, one without expected; noise once is enough"
        )
    stddev = float(noise_multiplier) * bound.value

    def decode(total: Tree, cohort: Cohort, state: Tree, *, variables: Variables, round: Array, key: Array) -> Any:
        rest, own = jax.random.fold_in(key, 0), jax.random.fold_in(key, NOISE)
        if aggregator.reads == "sum":
            total = noise.add(total, own, stddev)
        delta, state, metrics = aggregator.decode(total, cohort, state, variables=variables, round=round, key=rest)
        if aggregator.reads == "each":
            delta = noise.add(delta, own, stddev)
        return delta, state, metrics

    mechanism = mechanism_of(bound.unit, bound.value, noise_multiplier, bound.adjacency, bound.proof)
    kept = aggregator.properties & {"permutation", "weighted"} if noise_multiplier else aggregator.properties
    return aggregator._replace(decode=decode, mechanism=mechanism, properties=kept)


def mechanism_of(unit: str, sensitivity: float, noise_multiplier: float, adjacency: str, proof: str = "") -> Mechanism:
    """The mechanism as data; without noise, or with too little for its claim, not a formal one."""
    z = float(noise_multiplier)
    reasons = noise.objections(z)
    return Mechanism(unit, float(sensitivity), z, adjacency, not reasons, reasons=reasons, proof=proof)


def rounded(mechanism: Mechanism, step: float, entries: int) -> Mechanism:
    """The mechanism on a sum whose messages were rounded first, each entry to one of its two neighbours `step` apart.

    A rounded message is longer by at most step sqrt(entries), and one of zeros stays one; so a sum moves by that much
    more where a client's message becomes 0 (zero-out) and by twice that where it is replaced. The noise is what it was.
    Noise that was added before the rounding (local) is not touched by it: rounding is post-processing.
    """
    if mechanism.local or not mechanism.formal:
        return mechanism
    more = step * math.sqrt(entries) * (2 if mechanism.adjacency == "replace-one" else 1)
    if mechanism.span:  # one release of all rounds: a client's columns are orthogonal, of norm 1 each (matrix_noise)
        more *= math.sqrt(mechanism.participations)
    sensitivity = mechanism.sensitivity + more
    z = mechanism.noise_multiplier * mechanism.sensitivity / sensitivity
    made = mechanism_of(mechanism.unit, sensitivity, z, mechanism.adjacency, mechanism.proof)
    same = ("per", "span", "separation", "participations")
    return made._replace(**{name: getattr(mechanism, name) for name in same})


def multiplier(what: str, noise_multiplier: float | None, epsilon: float | None, delta: float) -> float:
    """The noise multiplier: as given, or the least one for (epsilon, delta) PER ROUND.

    Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy" (2018), Theorem 8. The classical
    sqrt(2 ln(1.25/delta))/epsilon is proven below epsilon = 1 only: at delta = 1e-5 it is 30 % too much for epsilon = 1
    and 3 % too little for epsilon = 10.

    Args:
      what: for messages, e.g. 'aggregator dp_fedavg'.
      noise_multiplier, epsilon: exactly one of them is a number.
    """
    if noise_multiplier is not None:
        checks.number(f"{what}: noise_multiplier", noise_multiplier, low=0.0)
    if epsilon is not None:
        checks.number(f"{what}: epsilon", epsilon, low=0.0, above=0.0)
    checks.number(f"{what}: delta", delta, low=0.0, above=0.0, high=0.5)
    if (noise_multiplier is None) == (epsilon is None):
        found = "neither" if epsilon is None else "both"
        raise checks.UserError(
            f"{what}: {found} of noise_multiplier and epsilon (per round) given, exactly one of them expected"
        )
    if noise_multiplier is not None:
        return float(noise_multiplier)
    from fedjax_seg.privacy import accounting  # here: its library is slow to load

    assert epsilon is not None
    return accounting.gaussian_sigma(epsilon, delta)
