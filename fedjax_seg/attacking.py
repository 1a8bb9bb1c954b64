"""Drives a membership attack on a run: what is watched while it trains, shadow federations, canaries, the verdict.

The attacker holds cases of their own (FederatedData.aside). On half of them a shadow federation trains, with the very
functions that trained the target: the same jitted program, other cases, another start. The evidence that the shadow
model gives on its members and on the rest teaches a classifier, which is then asked about the target's members and
non-members. These are matched by site, and a site's cases meet that site's own model. Stronger attackers know of most
cases whether they are candidates, and train many federations on random halves of them (shadows), or sit at the server.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg import shadows
from fedjax_seg.assembly import Experiment
from fedjax_seg.attacks import candidates, one_run
from fedjax_seg.core import checks
from fedjax_seg.data import federated
from fedjax_seg.federation import replicas, round
from fedjax_seg.report.writer import write_arrays

SHADOW = 1 << 20  # stream of the shadow models' starts


class Asked(NamedTuple):
    """Cases whose membership is asked. All [R, K, A]; what `valid` leaves out is padding, or population: cases that no
    model trains on, looked at for comparison."""

    cases: np.ndarray
    member: np.ndarray
    valid: np.ndarray
    population: np.ndarray


class Watch(NamedTuple):
    """What an attack needs of a run.

    Attributes:
      target: the cases that are asked about.
      shadow, shadow_plan: cases and plan of the shadow federation on the attacker's cases, where one is trained.
      many: the shadow federations on random halves, where there are any.
    """

    target: Asked
    shadow: Asked | None
    shadow_plan: round.Plan | None
    many: shadows.Halves | None = None


def without_canaries(config: Any, data: federated.FederatedData) -> federated.FederatedData:
    """The data of a run with canaries: patients whose coin said so are left out of training, in each split on its own.

    `about['canaries']` tells of every split which cases are canaries and which of them are in.
    """
    count = config.attack.get("canaries", 0)
    if not count:
        return data
    patients, splits, told = np.asarray(data.patient_ids), [], {}
    for split in data.splits:
        drawn = one_run.choose(np.concatenate(split.train), data.patient_ids, count, config.attack.seed)
        out = np.unique(patients[drawn.cases[~drawn.inside]])
        splits.append(split._replace(train=tuple(cases[~np.isin(patients[cases], out)] for cases in split.train)))
        told[split.name] = {"cases": drawn.cases.tolist(), "inside": drawn.inside.tolist()}
    left = max(len({patients[c] for c, i in zip(t["cases"], t["inside"]) if not i}) for t in told.values())
    warning = f"canaries: the coins left {left} patients at most out of the training cases that are listed"
    about = {**data.about, "canaries": told, "warnings": (*data.about.get("warnings", ()), warning)}
    made = dataclasses.replace(data, splits=tuple(splits), about=about)
    federated.validate(made)
    return made


def _chosen(experiment: Experiment, split: federated.Split) -> candidates.Candidates:
    """Members and non-members of a split: the canaries where there are any."""
    data = experiment.data
    if not experiment.attack.canaries:
        return experiment.attack.choose(split.train, split.test, data.site_of)
    told = data.about["canaries"][split.name]
    cases, inside = np.array(told["cases"], np.int64), np.array(told["inside"], bool)
    return candidates.Candidates(cases[inside], cases[~inside])


def prepare(experiment: Experiment) -> Watch:
    """Picks the cases. Raises: UserError where an attack has nothing to work with."""
    attack, data = experiment.attack, experiment.data
    if experiment.evidence is None:
        raise checks.UserError("config.attack: this task shows an attacker nothing; set config.attack.name=none")
    splits = [data.splits[replica.split] for replica in experiment.replicas]
    found = [_chosen(experiment, split) for split in splits]
    targets, many = [[_by_site(data, side) for side in c] for c in found], None
    if attack.models:
        first = experiment.replicas[0].split
        many = shadows.halves(data, first, found[0].non_members, attack.models, attack.seed)
        for sides, split, c in zip(targets, splits, found):
            z = candidates.population(data.aside, split.test, c, data.site_of, data.patient_ids, seed=attack.seed)
            sides.append(_by_site(data, z))
    if not attack.shadow:
        return Watch(_asked(targets, _width(targets)), None, None, many)
    asked, plan = _shadow_of(experiment, splits)
    width = max(_width(targets), _width(asked))  # one shape: the same compiled program looks at both
    return Watch(_asked(targets, width), _asked(asked, width), plan, many)


def _by_site(data: federated.FederatedData, cases: np.ndarray) -> list[np.ndarray]:
    return [cases[data.site_of[cases] == k] for k in range(len(data.sites))]


def _shadow_of(experiment: Experiment, splits: Sequence[federated.Split]) -> tuple[list[Any], round.Plan]:
    """Per replica the shadow's (members, others) by site, and its plan."""
    attack, data = experiment.attack, experiment.data
    if not len(data.aside):
        raise checks.UserError(
            "config.attack: a shadow federation needs cases of the attacker's own, and this data has none aside; set"
            " config.data.aside_share (a data set may bring a split 'shadow'), or config.attack.shadow=false"
        )
    shadow = attack.plan_shadow(data.aside, data.site_of, data.patient_ids, len(data.sites))
    asked, plans = [], []
    for split in splits:  # the shadow of a client trains on the attacker's cases of the client's site(s)
        origin = [np.unique(data.site_of[cases]) for cases in split.train]
        plans.append([np.concatenate([data.aside[:0], *(shadow.train[s] for s in sites)]) for sites in origin])
        seen = {int(s) for sites in origin for s in sites}
        asked.append([[p if k in seen else p[:0] for k, p in enumerate(side)] for side in (shadow.train, shadow.out)])
    # In the shape of the target's plan: the same compiled program runs the shadow federation.
    train, sizes = federated.padded(plans, least=experiment.plan.train.shape[2])
    return asked, experiment.plan._replace(train=train, train_sizes=sizes)


def _width(replicas_: Sequence[Any]) -> int:
    return max(sum(map(len, row)) for sides in replicas_ for row in zip(*sides))


def _asked(replicas_: Sequence[Any], width: int) -> Asked:
    """replicas_: of each (members per site, non-members per site) and, if any, (population per site)."""
    shape = (len(replicas_), len(replicas_[0][0]), width)
    index, kinds = np.zeros(shape, np.int32), np.full(shape, -1)
    for r, sides in enumerate(replicas_):
        for k, row in enumerate(zip(*sides)):
            cases = np.concatenate(row)
            index[r, k, : len(cases)] = cases
            kinds[r, k, : len(cases)] = np.repeat(np.arange(len(row)), [len(side) for side in row])
    return Asked(index, kinds == 0, (kinds == 0) | (kinds == 1), kinds == 2)


def observe(experiment: Experiment, state: Any, asked: Asked, train_sizes: Any) -> dict[str, np.ndarray]:
    """{feature: float32 [R, K, A]} of the asked cases under the model of now."""
    return shadows.look(experiment, state, asked.cases, train_sizes)


def remember(folder: Path, reached: int, found: Mapping[str, np.ndarray]) -> None:
    """Keeps what was seen in a round in attack/round_<n>.npz; a run that continues needs it."""
    write_arrays(folder / "attack" / f"round_{reached:06d}.npz", found)


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
    """Trains the shadow federation and watches it in the wanted rounds.

    Evidence is NaN of replicas whose shadow diverged, from the round on in which it did: an attack without a reading.
    """
    assert watch.shadow is not None and watch.shadow_plan is not None
    plan = replicas.place(experiment.how, watch.shadow_plan)
    state = replicas.place(experiment.how, experiment.initial(SHADOW))
    say(f"attack: training the shadow federation on {int(watch.shadow_plan.train_sizes[0].sum())} cases")
    found, lost = shadows.watched(experiment, state, plan, watch.shadow.cases, wanted, next_stop, stop)
    for r in np.flatnonzero(lost):
        replica = experiment.replicas[r]
        say(f"attack: the shadow federation of fold {replica.fold}, seed {replica.seed} {shadows.DIVERGED}")
    return found


def many_evidence(
    experiment: Experiment,
    watch: Watch,
    folder: Path,
    wanted: Sequence[int],
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> dict[int, dict[str, np.ndarray]]:
    """{round: {feature: [M, K, A]}} of the shadow federations on random halves; {} where none are wanted."""
    if watch.many is None:
        return {}
    cases = watch.target.cases[0]  # of the first replica, whose split they are of
    return shadows.evidence(experiment, watch.many, cases, wanted, folder, stop, say)


def update_evidence(experiment: Experiment, watch: Watch, state: Any, plan: Any) -> dict[str, np.ndarray]:
    """What the updates of one more round from this state tell about the candidates; {} where that is not wanted."""
    if not experiment.attack.updates or experiment.updates is None:
        return {}
    found = experiment.updates(state, plan, replicas.place(experiment.how, watch.target.cases))
    return {name: np.asarray(x) for name, x in found.items()}
