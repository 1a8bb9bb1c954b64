"""Membership inference from what a model says about a case whose label is known: was the case trained on?

Two black-box attacks live here. 'loss': a case of low loss is called a member (Yeom et al. 2018). 'shadow': the
attacker trains a federation of its own on cases set aside, the same way as the attacked one, and a logistic regression
learns there to tell that federation's members by their evidence (Shokri et al. 2017; FedOnco-Bench with features log
loss, Dice, boundary loss, confidence). A failure of these two proves nothing: the scores of stronger attacks (many
shadow federations: lira, rmia; the updates of the clients) are read by the same `report`.

This module never trains a segmentation model: the experiment does, and passes the evidence, {name: [cases]}.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedjax_seg.attacks import candidates, membership_scores
from fedjax_seg.attacks.membership_scores import Interval, Roc
from fedjax_seg.core import checks

FPRS = (0.01, 0.001)
Evidence = Mapping[str, np.ndarray]
Score = Callable[[Evidence], np.ndarray]


class Reading(NamedTuple):
    """What one attack found.

    Attributes:
      attack: 'loss', 'shadow', or the name of scores that were handed over.
      auc: Mann-Whitney AUC with its bootstrap interval; NaN where evidence is not finite.
      words: what the interval says, in words.
      inverted: the whole interval lies below 0.5.
      advantage: |AUC - 1/2|.
      balanced_advantage: max |TPR - FPR|.
      tpr: {FPR: TPR with its interval, None where there are too few non-members}.
      unit: 'case' or 'patient', what was scored; members, non_members: their numbers.
      null: standard deviation of the AUC of a blind attack on as many units.
      roc: the curve.
    """

    attack: str
    auc: Interval
    words: str
    inverted: bool
    advantage: float
    balanced_advantage: float
    tpr: Mapping[float, Interval | None]
    unit: str
    members: int
    non_members: int
    null: float
    roc: Roc


class Scored(NamedTuple):
    """Scores of candidates that were computed elsewhere: the higher, the more a member.

    Attributes:
      members, non_members: float [n], [m].
      patients: ids of both sides' patients, None where there are none.
    """

    members: np.ndarray
    non_members: np.ndarray
    patients: tuple[Sequence[str], Sequence[str]] | None


class Membership(NamedTuple):
    """The attack, ready to be run by an experiment.

    Attributes:
      shadow: whether a shadow federation on cases set aside is wanted.
      choose: (train, test, site_of) -> Candidates, see candidates.choose_cases.
      plan_shadow: (aside, site_of, patient_ids, sites) -> ShadowPlan, see candidates.shadow_plan.
      read: (members, non_members, shadow_in=None, shadow_out=None, patients=None, scored={}) -> readings, see `report`.
      models: shadow federations on random halves, 0 = none.
      updates: whether the clients' updates are attacked.
      canaries: training cases of which a fair coin leaves out a half, 0 = none.
      seed: of every choice.
    """

    shadow: bool
    choose: Callable[..., candidates.Candidates]
    plan_shadow: Callable[..., candidates.ShadowPlan]
    read: Callable[..., tuple[Reading, ...]]
    models: int = 0
    updates: bool = False
    canaries: int = 0
    seed: int = 0


def membership(
    *,
    count: int = 1000,
    shadow: bool = True,
    share: float = 0.5,
    unit: str = "auto",
    resamples: int = 1000,
    seed: int = 0,
    models: int = 0,
    updates: bool = False,
    canaries: int = 0,
) -> Membership:
    """Options of the attack.

    Args:
      count: members and non-members together, at most; the paper takes 500 of each.
      shadow: whether the shadow attack is run beside the loss threshold; needs cases set aside.
      share: of the cases set aside, how many shadow models train on; the others are their non-members.
      unit: whose membership is guessed, see `report`.
      resamples: of the bootstrap.
      seed: of the choice of cases and of the bootstrap.
      models: shadow federations for LiRA and RMIA, even; each costs a run. 0 = none.
      updates: whether what the server sees of a round is attacked: is a case's gradient in its client's update, and
        whose case is it.
      canaries: training cases whose membership a fair coin decides: those that lose it are left out of training, and
        these cases are the attack's members and non-members (a one-run audit). 0 = none.
    """
    checks.number("attack.count", count, low=2, integer=True)
    checks.one_of("attack.shadow", shadow, (True, False))
    checks.number("attack.share", share, low=0.01, high=0.99)
    checks.one_of("attack.unit", unit, ("auto", "case", "patient"))
    checks.number("attack.resamples", resamples, low=1, integer=True)
    checks.number("attack.seed", seed, low=0, integer=True)
    checks.number("attack.models", models, low=0, integer=True)
    if models % 2 or models == 2:
        raise checks.UserError(
            f"attack.models: {models} given, 0 or an even number from 4 on expected: a case is in half of the models"
        )
    checks.one_of("attack.updates", updates, (True, False))
    checks.number("attack.canaries", canaries, low=0, integer=True)
    return Membership(
        shadow,
        partial(candidates.choose_cases, count=count, seed=seed),
        partial(candidates.shadow_plan, share=share, seed=seed),
        partial(report, unit=unit, resamples=resamples, seed=seed),
        models,
        updates,
        canaries,
        seed,
    )


def loss_threshold(evidence: Evidence) -> np.ndarray:
    """The lower the loss, the more a member."""
    return -np.asarray(evidence["log_loss"], np.float64)


def attack_classifier(shadow_in: Evidence, shadow_out: Evidence) -> Score:
    """Learns on a shadow model's members and non-members to score cases of another model.

    A logistic regression (L2, C = 1, both kinds weighted alike) on features standardised over the shadow cases.

    Args:
      shadow_in, shadow_out: finite evidence on cases that the shadow model trained on, and on others; the same names.

    Returns: evidence -> float64 [n], the log odds of membership.
    """
    names = sorted(shadow_in)
    sides = [_columns(side, names) for side in (shadow_in, shadow_out)]
    label = np.repeat([1, 0], [len(side) for side in sides])
    fitted = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, class_weight="balanced", max_iter=1000))
    fitted.fit(np.concatenate(sides), label)
    return lambda evidence: fitted.decision_function(_columns(evidence, names))


def _columns(evidence: Evidence, names: Sequence[str]) -> np.ndarray:
    return np.stack([np.asarray(evidence[name], np.float64) for name in names], 1)


def report(
    members: Evidence,
    non_members: Evidence,
    shadow_in: Evidence | None = None,
    shadow_out: Evidence | None = None,
    patients: tuple[Sequence[str], Sequence[str]] | None = None,
    scored: Mapping[str, Scored] | None = None,
    *,
    unit: str = "auto",
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[Reading, ...]:
    """All attacks on one model; only the loss threshold without shadow evidence and without scores.

    Args:
      members, non_members: evidence of the attacked model on its candidates, {name: [n]} and {name: [m]}.
      shadow_in, shadow_out: evidence of the shadow model on its own training cases and on the others it never saw.
      patients: ids of the members' and of the non-members' patients.
      scored: {attack: scores} of further attacks.
      unit: 'patient': the scores of a patient's cases are averaged and patients are counted; 'case': cases are counted,
        and the bootstrap draws patients where they are known; 'auto': 'patient' where one has several candidates.
      resamples, seed: of the bootstrap.

    Returns: Readings, 'loss' first.
    Raises: UserError for unit 'patient' without patients.
    """
    if unit == "patient" and patients is None:
        raise checks.UserError(
            "attack.unit: 'patient' given, but the data has no patient ids; 'case' or 'auto' expected"
        )
    if unit == "auto":
        several = patients is not None and any(len(set(side)) < len(side) for side in patients)
        unit = "patient" if several else "case"
    attacks: dict[str, Score] = {"loss": loss_threshold}
    if shadow_in is not None and shadow_out is not None:
        if all(map(_finite, (shadow_in, shadow_out))):
            attacks["shadow"] = attack_classifier(shadow_in, shadow_out)
        else:
            attacks["shadow"] = lambda side: np.full(len(side["log_loss"]), np.nan)
    of = lambda score, side: score(side) if _finite(side) else np.full(len(side["log_loss"]), np.nan)
    found = {name: Scored(of(a, members), of(a, non_members), patients) for name, a in attacks.items()}
    return tuple(_reading(name, one, unit, resamples, seed) for name, one in {**found, **(scored or {})}.items())


def _finite(evidence: Evidence) -> bool:
    return all(np.all(np.isfinite(x)) for x in evidence.values())


def _reading(name: str, scored: Scored, unit: str, resamples: int, seed: int) -> Reading:
    inside, outside, patients = scored
    units = patients
    if patients is not None and unit == "patient":
        inside, outside, units = average(inside, patients[0]), average(outside, patients[1]), None
    n, m = len(inside), len(outside)
    if not (np.all(np.isfinite(inside)) and np.all(np.isfinite(outside))):
        nothing, nowhere = Interval(np.nan, np.nan, np.nan), Roc(np.zeros(0), np.zeros(0))
        words = "no reading: the evidence of a model is not finite"
        return Reading(name, nothing, words, False, np.nan, np.nan, dict.fromkeys(FPRS), unit, n, m, np.nan, nowhere)
    auc = membership_scores.bootstrap_interval(inside, outside, units, resamples, seed)
    return Reading(
        attack=name,
        auc=auc,
        words=in_words(auc),
        inverted=auc.high < 0.5,
        advantage=membership_scores.advantage(auc.value),
        balanced_advantage=membership_scores.balanced_advantage(inside, outside),
        tpr={fpr: membership_scores.tpr_at_fpr(inside, outside, fpr) for fpr in FPRS},
        unit=unit,
        members=n,
        non_members=m,
        null=membership_scores.null_deviation(n, m),
        roc=membership_scores.roc(inside, outside),
    )


def average(scores: np.ndarray, patients: Sequence[str]) -> np.ndarray:
    """Mean score of every patient, in the order of their ids."""
    _, which = np.unique(np.asarray(patients), return_inverse=True)
    return np.bincount(which, scores) / np.bincount(which)


def in_words(auc: Interval) -> str:
    """What an AUC and its interval say."""
    span = f"the interval [{auc.low:.3f}, {auc.high:.3f}]"
    if auc.high < 0.5:
        return (
            f"an inverted attack: {span} lies below 0.5; negate the score and the AUC is {1 - auc.value:.3f}: "
            "a leak, not safety"
        )
    if auc.low > 0.5:
        return f"members are told apart: {span} lies above 0.5"
    return f"members are not told apart by this attack: 0.5 lies in {span}"


def summary(reading: Reading) -> dict[str, Any]:
    """A reading without its curve as plain values for JSON and tables; None where there is no value."""
    plain = {
        "attack": reading.attack,
        "auc": reading.auc.value,
        "auc_low": reading.auc.low,
        "auc_high": reading.auc.high,
        "advantage": reading.advantage,
        "balanced_advantage": reading.balanced_advantage,
        "inverted": bool(reading.inverted),
        "words": reading.words,
        "unit": reading.unit,
        "members": reading.members,
        "non_members": reading.non_members,
        "null_deviation": reading.null,
    }
    for fpr, tpr in reading.tpr.items():
        name = f"tpr_at_{100 * fpr:g}_percent_fpr"
        low, high = (tpr.low, tpr.high) if tpr else (None, None)
        plain |= {name: tpr.value if tpr else None, f"{name}_low": low, f"{name}_high": high}
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in plain.items()}
