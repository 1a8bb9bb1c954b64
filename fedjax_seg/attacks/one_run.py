"""Lower bounds on epsilon from ONE training run, into which many canaries were put or not by fair coins.

Sources: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023); Mahloujifar, Melis and
Chaudhuri, "Auditing f-differential privacy in one run" (2024), for Gaussian trade-off curves; both as in
jax_privacy.auditing.

Of that library only the two bounds for a threshold that is given are used. Its own choice of the threshold looks at who
was in and corrects for as many thresholds as its hull has corners, not for all that it chose from, which no theorem
covers (null scores of 256 canaries exceed 0 in 4.9% of 3000 draws at 95% confidence; 2.8% here). Here the numbers of
guesses are fixed beforehand. Its `epsilon_from_gdp` is no lower bound at all (null scores: 8.5 with 100 canaries) and
its `attack_auroc` is the hull's area, never below 0.5: neither is called.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of the canaries that are guessed to be in, highest scores first


class Canaries(NamedTuple):
    """Training cases whose membership coins decide; whoever has a False coin is to be taken out of training.

    Attributes:
      cases: int [c], ascending; inside: bool [c], the coin of the case's canary.
      canary: int [c], which canary a case belongs to: the cases of a patient are one canary, with one coin.
    """

    cases: np.ndarray
    inside: np.ndarray
    canary: np.ndarray


def choose(train_cases: np.ndarray, patient_ids: Sequence[str] | None, count: int, seed: int) -> Canaries:
    """Draws the canaries, and a fair coin for each of them.

    Args:
      train_cases: int [t], cases of the training sets of all clients.
      patient_ids: of ALL cases of the data, [N]; a canary is a patient with all training cases. None: it is a case.
      count: m, how many canaries.
      seed: of the draw and of the coins; two streams, so that who is a canary tells nothing about the coins.

    Returns: Canaries.
    Raises: UserError where there are fewer patients (or cases) than m.
    """
    checks.number("canaries: count", count, low=2, integer=True)
    checks.number("canaries: seed", seed, low=0, integer=True)
    cases = np.unique(np.asarray(train_cases, np.int64))
    owner = cases if patient_ids is None else np.asarray(patient_ids)[cases]
    names = np.unique(owner)
    if len(names) < count:
        kind = "cases" if patient_ids is None else "patients"
        raise checks.UserError(
            f"canaries: count {count} given, at most {len(names)} expected, the number of training {kind}; lower it"
        )
    draw, coin = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    chosen = np.sort(draw.choice(len(names), count, replace=False))
    heads = coin.random(count) < 0.5
    kept = np.isin(owner, names[chosen])
    canary = np.searchsorted(names[chosen], owner[kept])
    return Canaries(cases[kept], heads[canary], canary)


def one_run(in_scores: np.ndarray, out_scores: np.ndarray, *, delta: float, confidence: float = 0.95) -> dict[str, Any]:
    """What the scores of canaries prove about epsilon.

    The m / 2, m / 4, m / 8 and m / 16 canaries of the highest scores are guessed to be in, and each bound is the
    largest of four, each at a quarter of the error allowed. Which canaries these are depends on the scores alone, as
    the theorems ask. Only high scores are read as membership: an inverted attack shows nothing here.

    Args:
      in_scores, out_scores: one score of every canary that was in, or out; a higher one claims membership. Patients as
        canaries: one score of a patient. All canaries, as the coins fell; and no score may have been computed with
        knowledge of any canary's coin (an attack that compares with known non-members must not take them from here).
      delta: > 0, of the claim that is tested. A large one costs much: 2 m delta is to be far below 1.
      confidence: of each bound.

    Returns:
      epsilon_low: a lower bound for any (epsilon, delta) mechanism (Steinke et al.), 0 where nothing is shown.
      epsilon_low_fdp: a lower bound for mechanisms whose trade-off curve is a Gaussian's, as those of clipped sums with
        Gaussian noise nearly are (Mahloujifar et al.); not valid for others.
      canaries: m; inside: how many of them were in.
      cap, cap_fdp: the largest values that so many canaries can show: m / 2 guesses, all right.
      delta, confidence; words: one sentence.
      Bounds and caps are None where a score is not finite or there are no canaries of a kind.
    """
    checks.number("delta", delta, low=0.0, above=0.0, high=1.0)
    checks.number("confidence", confidence, low=0.5, above=0.5, high=1 - 1e-9)
    inside, outside = (np.asarray(side, np.float64).ravel() for side in (in_scores, out_scores))
    found: dict[str, Any] = dict.fromkeys(("epsilon_low", "epsilon_low_fdp"))
    found |= {"canaries": len(inside) + len(outside), "inside": len(inside), "cap": None, "cap_fdp": None}
    found |= {"delta": float(delta), "confidence": float(confidence)}
    if not len(inside) or not len(outside):
        return found | {"words": "no reading: canaries that were in and canaries that were out are both needed"}
    scores = np.concatenate([inside, outside])
    if not np.isfinite(scores).all():
        return found | {"words": "no reading: the score of a canary is not finite"}
    error, half = 1 - confidence, -(-len(scores) // 2)
    at_best = np.arange(half) + half, np.arange(len(scores) - half)  # as many guesses as there may be, all right
    for name, cap, gaussian in (("epsilon_low", "cap", False), ("epsilon_low_fdp", "cap_fdp", True)):
        found[name] = lower_bound(inside, outside, delta, error, gaussian=gaussian)
        found[cap] = lower_bound(*at_best, delta, error, gaussian=gaussian)
    return found | {"words": _words(found)}


def lower_bound(
    inside: np.ndarray, outside: np.ndarray, delta: float, error: float, *, gaussian: bool = False
) -> float:
    """The largest of the bounds of all numbers of guesses; false with probability `error` at most.

    Args:
      inside, outside: finite scores of canaries; gaussian: Mahloujifar et al.'s bound, else Steinke et al.'s.
    """
    from jax_privacy import auditing  # slow to load

    auditor = auditing.CanaryScoreAuditor(inside, outside)
    bound = auditor.epsilon_one_run_fdp if gaussian else auditor.epsilon_one_run
    scores = np.sort(np.concatenate([inside, outside]))[::-1]
    guesses = sorted({max(1, math.ceil(share * len(scores))) for share in SHARES})
    found = [0.0]
    for threshold in {float(scores[k - 1]) for k in guesses}:
        right, wrong = int(np.sum(inside >= threshold)), int(np.sum(outside >= threshold))
        if right > wrong:  # else nothing is shown, and that would be slow to find out
            found.append(float(bound(error / len(guesses), delta, threshold_strategy=auditing.Explicit(threshold))))
    return max(found)


def _words(found: dict[str, Any]) -> str:
    sure = f"with confidence {100 * found['confidence']:g}%"
    size = f"{found['canaries']} canaries, which can show {found['cap']:.2f} at most"
    if found["epsilon_low"] > 0:
        return f"epsilon is at least {found['epsilon_low']:.2f} at delta {found['delta']:g} {sure} ({size})"
    if found["epsilon_low_fdp"] > 0:
        return (
            f"epsilon is at least {found['epsilon_low_fdp']:.2f} at delta {found['delta']:g} {sure} if the trade-off"
            f" curve is a Gaussian's; without that nothing is shown ({size})"
        )
    return f"no lower bound on epsilon {sure} ({size}); this proves no privacy"
