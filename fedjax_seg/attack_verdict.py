"""What the attacks on a run found: from the evidence of all models to rows, curves and words of summary.json."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg import shadows
from fedjax_seg.assembly import Experiment
from fedjax_seg.attacking import Asked, Watch
from fedjax_seg.attacks import ceilings, one_run, shadow_scores
from fedjax_seg.attacks import source as source_inference
from fedjax_seg.attacks.membership import Scored, average, loss_threshold, summary

BY_MANY = ("lira_online", "lira_offline", "rmia", "trajectory")
KINDS = {"segmentation": "segmentation"}  # of a task's confidence, see attacks.lira; others classify


class Evidence(NamedTuple):
    """What the attacker has seen.

    Attributes:
      target: {round: {feature: [R, K, A]}}.
      shadow: the same of the shadow federation on the attacker's own cases, {} where none was trained.
      many: {round: {feature: [M, K, A]}} of shadow federations on random halves, {} where none were trained.
      updates: of federation.update_evidence, leaves [R, ...]; {} where the updates were not looked at.
    """

    target: Mapping[int, Any]
    shadow: Mapping[int, Any]
    many: Mapping[int, Any]
    updates: Mapping[str, np.ndarray]


def verdict(
    experiment: Experiment, watch: Watch, seen: Evidence, claimed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The attack's part of summary.json.

    Args:
      claimed: the run's ledger ('epsilon', 'delta'), to be set beside what canaries show.

    Returns: 'final' rows of the last round (attacks.membership.summary, and 'shadows': how many were trained for it),
      'curve' rows of every round, 'roc' of the first replica {attack: {'fpr', 'tpr'}}, 'unit', 'text'; with canaries
      'one_run' rows (attacks.one_run of every attack, 'epsilon_claimed'), with updates 'source' rows
      (attacks.source.attribution).
    """
    final, curve, roc = [], [], {}
    audits: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    for r, replica in enumerate(experiment.replicas):
        tag = {"fold": replica.fold, "seed": replica.seed}
        for reached, found in seen.target.items():
            last = reached == max(seen.target)
            sides = _sides(found, watch.target, r)
            shadow = _sides(seen.shadow[reached], watch.shadow, r) if seen.shadow else ()
            patients = _patients(experiment, watch.target, r)
            scored = _many(experiment, watch, seen, r, reached)
            if last:
                scored |= _updates(experiment, watch, seen.updates, r)
            cheap = {} if last else {"resamples": 1}  # intervals are for the last model alone
            for reading in experiment.attack.read(*sides, *shadow, patients=patients, scored=scored, **cheap):
                curve.append({"round": reached, **tag, "attack": reading.attack, "auc": reading.auc.value})
                curve[-1]["n"] = reading.members + reading.non_members
                if last:
                    trained = {"shadow": 1} | dict.fromkeys(BY_MANY, experiment.attack.models)
                    final.append({**tag, **summary(reading), "shadows": trained.get(reading.attack, 0)})
                if last and r == 0:
                    roc[reading.attack] = {"fpr": reading.roc.fpr.tolist(), "tpr": reading.roc.tpr.tolist()}
            if last and experiment.attack.canaries:
                loss = Scored(loss_threshold(sides[0]), loss_threshold(sides[1]), patients)
                told = {"loss": loss, **scored}
                if not watch.target.population[r].any():  # it was compared with the canaries that the coins left out
                    told.pop("rmia", None)
                audits += [{**tag, **row} for row in _audits(experiment, told, claimed or {})]
        sources += [{**tag, **row} for row in _source(watch.target, seen.updates, r)]
    result = {"final": final, "curve": curve, "roc": roc, "unit": final[0]["unit"]}
    result |= {"one_run": audits} if audits else {}
    result |= {"source": sources} if sources else {}
    return result | {"text": _text(experiment, final[0], watch, seen)}


def _sides(seen: Mapping[str, np.ndarray], asked: Any, r: int) -> tuple[dict[str, np.ndarray], ...]:
    """Evidence on the members and on the others of a replica."""
    kinds = (asked.valid[r] & asked.member[r], asked.valid[r] & ~asked.member[r])
    return tuple({name: x[r][kind] for name, x in seen.items()} for kind in kinds)


def _patients(experiment: Experiment, asked: Asked, r: int, of: Any = True) -> tuple[list[str], list[str]]:
    """Ids of the members' and the others' patients, of those in `of` [K, A]."""
    ids, inside, valid = np.asarray(experiment.data.patient_ids), asked.member[r], asked.valid[r] & of
    members, others = (ids[asked.cases[r][valid & kind]].tolist() for kind in (inside, ~inside))
    return members, others


def _many(experiment: Experiment, watch: Watch, seen: Evidence, r: int, reached: int) -> dict[str, Scored]:
    """Scores of the models up to a round by many shadows; {} of other splits than theirs."""
    made, asked, replica = watch.many, watch.target, experiment.replicas[r]
    if made is None or not seen.many or replica.split != made.split:
        return {}
    target = {at: x["log_loss"][r] for at, x in seen.target.items() if at <= reached}
    cases, member, valid = asked.cases[r], asked.member[r], asked.valid[r]
    ids = experiment.data.patient_ids
    losses = shadows.losses(made, target, seen.many, cases, member, valid, asked.population[r], ids)
    kind = KINDS.get(experiment.config.task.name, "classification")
    patients, inside = _patients(experiment, asked, r), losses.member
    return {
        name: Scored(score[inside], score[~inside], patients)
        for name, score in shadow_scores.scores(losses, kind).items()
    }


def _updates(experiment: Experiment, watch: Watch, updates: Mapping[str, np.ndarray], r: int) -> dict[str, Scored]:
    """The update attack on the candidates of the clients that sent something; {} where one kind has none."""
    if not updates:
        return {}
    asked, sent = watch.target, updates["sent"][r][:, None]
    inside, outside = (asked.valid[r] & sent & kind for kind in (asked.member[r], ~asked.member[r]))
    if not inside.any() or not outside.any():
        return {}
    cosine = updates["cosine"][r]
    return {"update_cosine": Scored(cosine[inside], cosine[outside], _patients(experiment, asked, r, sent))}


def _source(asked: Asked, updates: Mapping[str, np.ndarray], r: int) -> list[dict[str, Any]]:
    """Whose case is it: a row for a replica of at least two clients that sent a model; without their models, none."""
    if not updates or np.sum(updates["sent"][r]) < 2:
        return []
    sent, members = updates["sent"][r], asked.valid[r] & asked.member[r]
    if "losses" not in updates:
        words = "no reading: the server sees the sum of the updates alone; nothing tells hospitals apart beyond chance"
        chance = 1 / int(np.sum(sent))
        return [{"accuracy": None, "low": None, "high": None, "chance": None, "chance_uniform": chance, "words": words}]
    return [source_inference.attribution(updates["losses"][r][members], np.nonzero(members)[0], sent)]


def _audits(experiment: Experiment, scored: Mapping[str, Scored], claimed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the canaries prove about epsilon, by every attack; a canary is a patient."""
    delta, rows = experiment.config.privacy.delta, []
    for name, (members, others, patients) in scored.items():
        if patients is not None:
            members, others = average(members, patients[0]), average(others, patients[1])
        found = one_run.one_run(members, others, delta=delta)
        said = claimed.get("epsilon") if _speaks_of_canaries(experiment, name) else None
        rows.append({"attack": name, **found, "epsilon_claimed": said})
    return rows


def _speaks_of_canaries(experiment: Experiment, attack: str) -> bool:
    """Whether the ledger's epsilon is that of leaving a canary out, as the attack saw it."""
    own = experiment.client.mechanism
    return attack != "update_cosine" and own is not None and own.unit in ("example", "patient")


def _text(experiment: Experiment, first: Mapping[str, Any], watch: Watch, seen: Evidence) -> str:
    unit, attack = first["unit"], experiment.attack
    which = "training canaries and {} canaries that coins left out of training" if attack.canaries else ""
    which = which or "training and {} held-out " + unit + "s, matched by site"
    text = (
        f"Black-box attack on {first['members']} {which.format(first['non_members'])};"
        f" the unit that is scored and resampled is the {unit}. Loss threshold: the lower the loss, the more a member."
    )
    if watch.shadow is not None:
        inside = int((watch.shadow.member[0] & watch.shadow.valid[0]).sum())
        outside = int((~watch.shadow.member[0] & watch.shadow.valid[0]).sum())
        text += (
            " Shadow classifier: a logistic regression on what the predictions of a case tell (segmentation: log loss,"
            f" Dice, boundary loss, confidence), taught by a shadow federation that trained on {inside} cases of the"
            f" attacker's own and not on {outside} others; one shadow per fold and seed, with the settings of the run."
        )
    if watch.many is not None:
        text += _text_of_many(experiment, watch)
    if seen.updates:
        view = "the update of the case's own client" if "losses" in seen.updates else "the sum of the updates"
        text += (
            f" Update cosine: the server compares the gradient of a case at the last model with {view} in one more"
            " round, of the clients that took part in it."
        )
    if attack.canaries:
        text += (
            " One-run audit: each bound on epsilon holds with confidence 95 % on its own, not for the largest of them."
        )
    return text + " An attack that finds nothing is no proof of privacy: stronger ones exist."


def _text_of_many(experiment: Experiment, watch: Watch) -> str:
    assert watch.many is not None
    fold = experiment.data.splits[watch.many.split].name
    others = "" if len({replica.split for replica in experiment.replicas}) == 1 else f"; of fold {fold} alone"
    count = int(watch.target.population[0].sum())
    compared = f"{count} cases that no model trained on" if count else "held-out candidates of other patients"
    return (
        f" LiRA, RMIA, trajectory: {experiment.attack.models} shadow federations with the settings of the run, each on"
        " a random half (by client and patient) of the training cases and the candidates, so that half of them saw a"
        f" case{others}. RMIA compares with {compared}; the trajectory is that of every evaluated round."
    )


def with_ceilings(experiment: Experiment, found: dict[str, Any], promised: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict with what the run's ledger allows beside every row: 'ceiling' {'fpr', 'tpr', 'auc', 'source'} and the
    columns of attacks.ceilings.marked; without a guarantee that covers the attack the ceilings are null and 'source'
    says why.

    A held-out case had another one in its place, so that members and non-members are told apart as under replace-one. A
    zero-out or add-remove guarantee says of that what two changes allow: (2 eps, (1 + e^eps) delta), 2 mu (Dong, Roth,
    Su 2022, group privacy). Canaries were left out by coins, each on its own: for them a guarantee of cases or of
    patients holds as it is (with the number of cases public, as in the ledger); under one of a client, whose data are
    then others, two changes count again.
    """
    covered, source = _covered(experiment, promised, found["unit"])
    limit = None
    if covered:
        curve = [(row["epsilon"], row["delta"]) for row in promised["curve"] if row["epsilon"] is not None]
        exact = promised.get("gdp_mu") is not None and promised.get("gdp_meaning", "exact").startswith("exact")
        mu = promised["gdp_mu"] if exact else None
        coins = experiment.attack.canaries and _mechanism(experiment).unit != "client"
        if not coins and _mechanism(experiment).adjacency != "replace-one":
            curve = [(2 * e, min(1.0, (1 + math.exp(min(e, 700.0))) * d)) for e, d in curve]
            mu, source = mu and 2 * mu, f"{source}; a held-out case had another in its place, so two changes count"
        limit = ceilings.ceiling(curve, mu)
    rows = ceilings.marked(found["final"], limit, found["roc"])
    # The update attack sees one more round than was accounted, and messages before central noise.
    plain = ceilings.marked(found["final"], None)
    rows = [bare if bare["attack"] == "update_cosine" else row for bare, row in zip(plain, rows)]
    drawn: dict[str, Any] = {"source": source}
    if limit is not None:
        drawn |= {"fpr": limit.fpr.tolist(), "tpr": limit.tpr.tolist(), "auc": limit.auc}
    return found | {"final": rows, "ceiling": drawn}


def _mechanism(experiment: Experiment) -> Any:
    return experiment.client.mechanism or experiment.parts.aggregator.mechanism


def _covered(experiment: Experiment, promised: Mapping[str, Any], unit: str) -> tuple[bool, str]:
    """Whether the ledger speaks of what was attacked, and why (not)."""
    if promised.get("epsilon") is None:
        return False, "no ceiling: the run guarantees nothing"
    if not experiment.client.mechanism and experiment.config.client.get("local"):
        return False, "no ceiling: a site's cases meet layers that stay at home, without noise"
    repeated = len(set(experiment.data.patient_ids)) < len(experiment.data.patient_ids)
    return ceilings.applies(_mechanism(experiment).unit, unit, repeated)
