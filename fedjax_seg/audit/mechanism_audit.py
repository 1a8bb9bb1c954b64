"""One mechanism against what is proven and claimed of it: the search for a large change, then canaries."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.audit.audited import Audited, of_aggregator
from fedjax_seg.audit.mechanisms import MECHANISMS
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator
from fedjax_seg.privacy import audit, canaries

TRIALS, MOST_TRIALS = 20_000, 1_000_000
ROUNDING = 1e-6  # relative: proofs are about real numbers, and smooth denominators add 1e-8


class Findings(NamedTuple):
    """What an audit found.

    Attributes:
      sensitivity: {'name', 'n', 'dim', 'found', 'proven' (None = nothing is), 'share' (found/proven), 'start'}.
      canaries: {'name', 'statistic', 'epsilon_low', 'mu_low', 'epsilon_claimed', 'trials', 'confidence', 'above',
        'words'}; None where there is no noise or no claim.
      violations: what contradicts a proof, a sentence each: bugs of ours.
      witness: audit.Witness of the largest change.
      text: a small table for people.
    """

    sensitivity: dict[str, Any]
    canaries: dict[str, Any] | None
    violations: tuple[str, ...]
    witness: audit.Witness
    text: str

    def as_json(self) -> dict[str, Any]:
        """{'sensitivity': [row], 'canaries': [row or nothing], 'violations', 'text'}."""
        rows = [self.canaries] if self.canaries else []
        return {
            "sensitivity": [self.sensitivity],
            "canaries": rows,
            "violations": list(self.violations),
            "text": self.text,
        }


def audit_mechanism(
    mechanism: str | Aggregator | Audited,
    *,
    n: int = 6,
    dim: int = 50,
    clip: float = 1.0,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    trials: int | None = None,
    restarts: int = 48,
    steps: int = 400,
    seed: int = 0,
) -> Findings:
    """Searches for the largest change by one client, and releases the worst pair of inputs many times.

    A user's own aggregator is audited in five lines:

        from fedjax_seg import audit
        from fedjax_seg.aggregation import lift
        def shortest(x, w, present):
            return x[jnp.argmin(jnp.where(present, jnp.sum(x**2, axis=1), jnp.inf))]
        print(audit.audit_mechanism(lift(shortest, per="model"), n=6, dim=50).text)

    Args:
      mechanism: a name of mechanisms.MECHANISMS, an Aggregator, or an Audited.
      n, dim: clients and parameters.
      clip: C, the length of updates (also tau of Ref-SimAgg); mechanisms without one of their own are searched on the
        ball of this radius.
      epsilon, delta: of one release, what a registered mechanism's noise is made for. An Aggregator brings its own.
      trials: releases of each input; 0 = no canaries; None = 20,000, or as many as can refute a claim without a proof:
        what counting shows ends near ln(trials/2) - 1.3.
      restarts, steps, seed: of privacy.audit.sensitivity.
    Raises: UserError for bad options.
    """
    checks.number("n", n, low=1, integer=True)
    checks.number("seed", seed, low=0, high=2**31 - 1, integer=True)
    checks.number("dim", dim, low=1, high=100_000, integer=True)
    checks.number("clip", clip, low=0.0, above=0.0)
    checks.number("epsilon", epsilon, low=0.0, above=0.0, high=1e3)
    checks.number("delta", delta, low=0.0, above=0.0, high=0.5)
    if trials is not None:
        checks.number("trials", trials, low=0, integer=True)
    if isinstance(mechanism, str):
        made = checks.lookup(MECHANISMS, mechanism, "--mechanism")(n, dim, clip, epsilon, delta)
        made = made._replace(name=mechanism)
    elif isinstance(mechanism, Aggregator):
        made = of_aggregator(mechanism, n, clip)
    else:
        made = mechanism
    found = audit.sensitivity(
        made.rule,
        n,
        dim,
        radius=made.radius,
        adjacency=made.adjacency,
        changed=made.changed,
        restarts=restarts,
        steps=steps,
        seed=seed,
        smooth=made.smooth,
        scales=made.scales or None,
    )
    proven = made.bound.value if made.bound else None
    share = found.value / proven if proven else None
    row = {
        "name": made.name,
        "n": n,
        "dim": dim,
        "found": found.value,
        "proven": proven,
        "share": share,
        "start": found.witness.start,
    }
    violations = []
    if share is not None and not share <= 1 + ROUNDING:
        violations.append(f"a change of {found.value:.6g} found, above the proven bound of {proven:.6g}")
    noisy = made.release is not None and made.claimed is not None and trials != 0
    count = _enough(made) if trials is None else trials
    released = _canaries(made, made.canary or found.witness, count, seed) if noisy else None
    if released and released["above"] and made.formal:
        violations.append(f"canaries: {released['words']}")
    text = _told(made, row, released, violations)
    return Findings(row, released, tuple(violations), found.witness, text)


def _enough(made: Audited) -> int:
    """Releases that can tell a false claim: the bound of a Gaussian mechanism does not end with their number."""
    if made.formal or made.claimed is None:
        return TRIALS
    return max(TRIALS, min(MOST_TRIALS, round(2 * math.exp(min(made.claimed[0] + 1.8, 20.0)))))


def _canaries(made: Audited, pair: audit.Witness, trials: int, seed: int) -> dict[str, Any]:
    assert made.release is not None and made.claimed is not None
    claimed, delta = made.claimed
    here, there = ((jnp.asarray(x, jnp.float32), jnp.asarray(present)) for x, present in (pair.here, pair.there))
    quick = {"xla_backend_optimization_level": 0}  # runs twice
    quiet = jax.jit(made.quiet, compiler_options=quick) if made.quiet else None
    means = (np.asarray(quiet(here)), np.asarray(quiet(there))) if quiet else None
    found = canaries.audit_releases(
        made.release, here, there, trials=trials, delta=delta, seed=seed, gaussian=made.formal, means=means
    )
    low = found.epsilon_low
    above = low > claimed
    words = f"epsilon is at least {low:.3g}, {'above' if above else 'below'} the {claimed:.3g} that is claimed"
    if above and not made.formal:
        words += " and has no proof"
    return {
        "name": made.name,
        "statistic": found.statistic,
        "epsilon_low": low,
        "mu_low": found.mu,
        "epsilon_claimed": claimed,
        "trials": trials,
        "confidence": found.confidence,
        "above": bool(above),
        "words": words,
    }


def _told(made: Audited, row: dict[str, Any], released: dict[str, Any] | None, violations: list[str]) -> str:
    adjacency = made.bound.adjacency if made.bound else made.adjacency
    lines = [f"{made.name}: n = {row['n']} clients, d = {row['dim']} parameters"]
    if row["proven"] is None:
        lines.append(f"  change by one client ({adjacency}): at least {row['found']:.5g}; no bound is proven")
    else:
        lines.append(
            f"  change by one client ({adjacency}): at least {row['found']:.5g}, at most {row['proven']:.5g} (proven);"
            f" {100 * row['share']:.1f} % of the bound found"
        )
    if math.isinf(row["found"]):
        lines.append("  the rule is not finite there")
    lines.append(f"  found at: {row['start']}")
    if made.bound:
        lines.append(f"  proof: {made.bound.proof}")
    if released:
        lines.append(f"  canaries: {released['words']} ({100 * released['confidence']:g} % confidence,")
        lines[-1] += f" {released['trials']} releases of two inputs, statistic: {released['statistic']})"
    elif made.release is None:
        lines.append("  canaries: none, there is no noise")
    if made.note:
        lines.append(f"  note: {made.note}")
    lines += [f"  VIOLATION: {one}" for one in violations] or ["  nothing contradicts what is proven"]
    return "\n".join(lines)
