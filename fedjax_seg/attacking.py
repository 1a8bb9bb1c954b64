"""Drives a membership attack on a run: what is watched while it trains, the shadow federation, the verdict.

The attacker holds cases of their own (FederatedData.aside). On half of them a shadow federation trains, with the very
functions that trained the target: the same jitted program, other cases, another start. The evidence that the shadow
model gives on its members and on the rest teaches a classifier, which is then asked about the target's members and
non-members. These are matched by site, and a site's cases meet that site's own model.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.assembly import Experiment, Preempted
from fedjax_seg.attacks.membership import summary
from fedjax_seg.core import checks
from fedjax_seg.data import federated
from fedjax_seg.federation import replicas, round
from fedjax_seg.report.writer import storage_errors, write_atomic

SHADOW = 1 << 20  # stream of the shadow models' starts


class Asked(NamedTuple):
    """Cases whose membership is asked. All [R, K, A]; what `valid` leaves out is padding."""

    cases: np.ndarray
    member: np.ndarray
    valid: np.ndarray


class Watch(NamedTuple):
    """What an attack needs of a run: the target's cases and, where a shadow is trained, its plan and cases."""

    target: Asked
    shadow: Asked | None
    shadow_plan: round.Plan | None


def prepare(experiment: Experiment) -> Watch:
    """Picks the cases. Raises: UserError where an attack has nothing to work with."""
    attack, data = experiment.attack, experiment.data
    if experiment.evidence is None:
        raise checks.UserError("config.attack: this task shows an attacker nothing; set config.attack.name=none")
    count = len(data.sites)
    by_site = lambda cases: [cases[data.site_of[cases] == k] for k in range(count)]
    splits = [data.splits[replica.split] for replica in experiment.replicas]
    found = [attack.choose(split.train, split.test, data.site_of) for split in splits]
    targets = [(by_site(c.members), by_site(c.non_members)) for c in found]
    if not attack.shadow:
        return Watch(_asked(targets, _width(targets)), None, None)
    if not len(data.aside):
        raise checks.UserError(
            "config.attack: a shadow federation needs cases of the attacker's own, and this data has none aside; set"
            " config.data.aside_share (a data set may bring a split 'shadow'), or config.attack.shadow=false"
        )
    shadow = attack.plan_shadow(data.aside, data.site_of, data.patient_ids, count)
    asked, plans = [], []
    for split in splits:  # the shadow of a client trains on the attacker's cases of the client's site(s)
        origin = [np.unique(data.site_of[cases]) for cases in split.train]
        plans.append([np.concatenate([data.aside[:0], *(shadow.train[s] for s in sites)]) for sites in origin])
        seen = {int(s) for sites in origin for s in sites}
        asked.append([[p if k in seen else p[:0] for k, p in enumerate(side)] for side in (shadow.train, shadow.out)])
    width = max(_width(targets), _width(asked))
    # In the shape of the target's plan: the same compiled program runs the shadow federation.
    train, sizes = federated.padded(plans, least=experiment.plan.train.shape[2])
    return Watch(_asked(targets, width), _asked(asked, width), experiment.plan._replace(train=train, train_sizes=sizes))


def _width(pairs: Sequence[Any]) -> int:
    return max(len(a) + len(b) for members, others in pairs for a, b in zip(members, others))


def _asked(pairs: Sequence[Any], width: int) -> Asked:
    """pairs: per replica (members per site, non-members per site)."""
    shape = (len(pairs), len(pairs[0][0]), width)
    index, member, valid = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for r, (members, others) in enumerate(pairs):
        for k, (ins, outs) in enumerate(zip(members, others)):
            index[r, k, : len(ins) + len(outs)] = np.concatenate([ins, outs])
            member[r, k, : len(ins)] = True
            valid[r, k, : len(ins) + len(outs)] = True
    return Asked(index, member, valid)


def observe(experiment: Experiment, state: Any, asked: Asked, train_sizes: Any) -> dict[str, np.ndarray]:
    """{feature: float32 [R, K, A]} of the asked cases under the model of now."""
    index = replicas.place(experiment.how, asked.cases)
    found = experiment.evidence(state, index, train_sizes)  # type: ignore[misc]
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def remember(folder: Path, reached: int, found: Mapping[str, np.ndarray]) -> None:
    """Keeps what was seen in a round in attack/round_<n>.npz; a run that continues needs it."""
    path = folder / "attack" / f"round_{reached:06d}.npz"
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **dict(found))  # type: ignore[arg-type]
    write_atomic(path, buffer.getvalue())


def recall(folder: Path, rounds: int) -> dict[int, dict[str, np.ndarray]]:
    """{round: what was seen} up to a round, in order."""
    seen = {}
    for path in sorted((folder / "attack").glob("round_*.npz")):
        reached = int(path.stem.removeprefix("round_"))
        if reached <= rounds:
            with np.load(path) as arrays:
                seen[reached] = {name: arrays[name] for name in arrays.files}
    return seen


def shadow_evidence(
    experiment: Experiment,
    watch: Watch,
    wanted: Sequence[int],
    stop: Callable[[], bool],
    say: Callable[[str], None],
    next_stop: Callable[[int], int],
) -> dict[int, dict[str, np.ndarray]]:
    """Trains the shadow federation and watches it in the wanted rounds."""
    assert watch.shadow is not None and watch.shadow_plan is not None
    plan = replicas.place(experiment.how, watch.shadow_plan)
    state = replicas.place(experiment.how, experiment.initial(SHADOW))
    reached, found = 0, {}
    say(f"attack: training the shadow federation on {int(watch.shadow_plan.train_sizes[0].sum())} cases")
    while True:
        if reached in wanted:
            found[reached] = observe(experiment, state, watch.shadow, plan.train_sizes)
        if reached >= max(wanted):
            return found
        if stop():
            raise Preempted("preempted while the shadow federation trained; the same command trains it again")
        reached = next_stop(reached)
        state, records, _ = experiment.rounds(state, plan, reached)
        if np.any(np.asarray(records["halt"])):
            raise checks.UserError("attack: the shadow federation diverged (non-finite values); lower config.client.lr")


def verdict(
    experiment: Experiment, watch: Watch, target: Mapping[int, Any], shadow: Mapping[int, Any]
) -> dict[str, Any]:
    """The attack's part of summary.json.

    Args:
      target, shadow: {round: {feature: [R, K, A]}}; `shadow` is {} where none was trained.

    Returns: 'final' rows of the last round (attacks.membership.summary), 'curve' rows of every round, 'roc' of the
      first replica {attack: {'fpr', 'tpr'}}, 'unit', 'text'.
    """
    final, curve, roc = [], [], {}
    for r, replica in enumerate(experiment.replicas):
        tag = {"fold": replica.fold, "seed": replica.seed}
        for reached, seen in target.items():
            last = reached == max(target)
            sides = (*_sides(seen, watch.target, r), *(_sides(shadow[reached], watch.shadow, r) if shadow else ()))
            cheap = {} if last else {"resamples": 1}  # intervals are for the last model alone
            read = experiment.attack.read(*sides, patients=_patients(experiment, watch.target, r), **cheap)
            for reading in read:
                curve.append({"round": reached, **tag, "attack": reading.attack, "auc": reading.auc.value})
                curve[-1]["n"] = reading.members + reading.non_members
                if last:
                    final.append({**tag, **summary(reading)})
                if last and r == 0:
                    roc[reading.attack] = {"fpr": reading.roc.fpr.tolist(), "tpr": reading.roc.tpr.tolist()}
    return {"final": final, "curve": curve, "roc": roc, "unit": final[0]["unit"], "text": _text(final[0], watch)}


def _sides(seen: Mapping[str, np.ndarray], asked: Any, r: int) -> tuple[dict[str, np.ndarray], ...]:
    """Evidence on the members and on the others of a replica."""
    kinds = (asked.valid[r] & asked.member[r], asked.valid[r] & ~asked.member[r])
    return tuple({name: x[r][kind] for name, x in seen.items()} for kind in kinds)


def _patients(experiment: Experiment, asked: Asked, r: int) -> tuple[list[str], list[str]]:
    ids, inside = np.asarray(experiment.data.patient_ids), asked.member[r]
    members, others = (ids[asked.cases[r][asked.valid[r] & kind]].tolist() for kind in (inside, ~inside))
    return members, others


def _text(first: Mapping[str, Any], watch: Watch) -> str:
    unit = first["unit"]
    text = (
        f"Black-box attack on {first['members']} training and {first['non_members']} held-out {unit}s, matched by site;"
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
    return text + " An attack that finds nothing is no proof of privacy: stronger ones exist."
