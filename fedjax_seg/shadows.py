"""Many shadow federations: what an attacker learns about the candidates from models that trained on random halves.

All of them are one more experiment, whose replicas they are: the run's own settings, other cases, other starts, other
noise. A GPU trains a group of them at once (vmapped), a CPU one after the other (mapped, so that memory stays that of
one); the compiled program is the same for all groups.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_seg.assembly import LONGEST_CHUNK, Experiment, Preempted, build
from fedjax_seg.attacks import candidates
from fedjax_seg.attacks.shadow_scores import Losses
from fedjax_seg.core import checks, tree
from fedjax_seg.data import federated
from fedjax_seg.federation import replicas
from fedjax_seg.report.writer import write_arrays

AT_ONCE = 16  # shadows that a device trains together where they are vmapped
LEAST = 2  # usable shadows: of a case one that saw it and one that did not
START = 1 << 21  # stream of their starts, and what sets their noise apart
DIVERGED = "diverged (non-finite values) and tells nothing; a lower config.client.lr may help"
Evidence = Mapping[str, np.ndarray]


class Halves(NamedTuple):
    """Which shadow federation trains on what.

    Attributes:
      split: the number of the attacked split; shadows of one split tell nothing about the models of others.
      splits: M splits, one per shadow.
      inside: bool [M, N], which cases each of them trains on.
    """

    split: int
    splits: tuple[federated.Split, ...]
    inside: np.ndarray


def halves(data: federated.FederatedData, number: int, non_members: np.ndarray, models: int, seed: int) -> Halves:
    """Random halves of the split's training cases and the candidates that are no members, by client and patient."""
    pool = candidates.shadow_pool(data.splits[number].train, non_members, data.site_of)
    drawn = candidates.shadow_halves(pool, data.patient_ids, models, seed)
    nobody = tuple(cases[:0] for cases in data.splits[number].test)
    splits = tuple(federated.Split(f"shadow{m}", train, nobody) for m, train in enumerate(drawn))
    inside = np.zeros((models, len(data.site_of)), bool)
    for row, train in zip(inside, drawn):
        row[np.concatenate(train)] = True
    return Halves(number, splits, inside)


def federation(experiment: Experiment, made: Halves) -> Experiment:
    """The experiment whose replicas are the shadow federations of `made`."""
    config = experiment.config.copy_and_resolve_references()
    config.seeds, config.folds = config.seeds[:1], ()
    data = dataclasses.replace(experiment.data, splits=made.splits)
    return build(config, data, experiment.parts.salt ^ START)


def evidence(
    experiment: Experiment,
    made: Halves,
    cases: np.ndarray,
    wanted: Sequence[int],
    folder: Path,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> dict[int, dict[str, np.ndarray]]:
    """Trains the shadow federations, a group at a time, and looks at the cases in the wanted rounds.

    What a finished one has shown is kept in the run's folder, attack/shadow_<number>.npz: a run that is preempted
    trains only the others.

    Args:
      cases: int [K, A], under the model of every client.

    Returns: {round: {feature: float32 [M, K, A]}}; NaN of a shadow federation that diverged, from then on.
    Raises: Preempted after `stop`; UserError where fewer than two do not.
    """
    models = range(len(made.splits))
    kept = {m: found for m in models if (found := _recall(_path(folder, m), wanted))}
    missing = [m for m in models if m not in kept]
    if missing:
        built = federation(experiment, made)
        starts = jax.tree.map(np.asarray, built.initial(START))
        sizes = [sum(map(len, split.train)) for split in made.splits]
        say(f"attack: training {len(missing)} shadow federations on {min(sizes)} to {max(sizes)} cases each")
        # As many at once as share the devices evenly; the last group is filled up, so that one program runs them all.
        size = min(len(models), built.how.mesh.shape["replica"] * (AT_ONCE if built.how.vmap else 1))
        for first in range(0, len(missing), size):
            group = missing[first : first + size]
            rows = np.array(group + [group[-1]] * (size - len(group)))
            found, lost = _train(built, starts, rows, cases, wanted, stop)
            for i, m in enumerate(group):
                kept[m] = {at: {name: x[i] for name, x in seen.items()} for at, seen in found.items()}
                if lost[i]:
                    say(f"attack: shadow federation {m} {DIVERGED}")
                _remember(_path(folder, m), kept[m])
    left = sum(any(np.isfinite(x).any() for x in found[max(wanted)].values()) for found in kept.values())
    if left < LEAST:
        raise checks.UserError(
            f"attack: {len(models) - left} of {len(models)} shadow federations diverged (non-finite values), at least"
            f" {LEAST} usable ones expected; lower config.client.lr, or set config.attack.models=0"
        )
    return {at: {name: np.stack([kept[m][at][name] for m in models]) for name in kept[0][at]} for at in wanted}


def _train(
    built: Experiment,
    starts: Any,
    rows: np.ndarray,
    cases: np.ndarray,
    wanted: Sequence[int],
    stop: Callable[[], bool],
) -> tuple[dict[int, dict[str, np.ndarray]], np.ndarray]:
    """What these shadows show in the wanted rounds, and which of them diverged, bool [rows]."""
    state = replicas.place(built.how, tree.rows(starts, rows))
    plan = replicas.place(built.how, tree.rows(built.plan, rows))
    index = np.broadcast_to(cases.astype(np.int32), (len(rows), *cases.shape)).copy()
    next_stop = lambda reached: min(min(at for at in wanted if at > reached), reached + LONGEST_CHUNK)
    return watched(built, state, plan, index, wanted, next_stop, stop)


def look(experiment: Experiment, state: Any, cases: np.ndarray, train_sizes: Any) -> dict[str, np.ndarray]:
    """{feature: float32 [R, K, A]} of cases [R, K, A] under the models of a state, on the host."""
    found = experiment.evidence(state, replicas.place(experiment.how, cases), train_sizes)  # type: ignore[misc]
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def watched(
    experiment: Experiment,
    state: Any,
    plan: Any,
    cases: np.ndarray,
    wanted: Sequence[int],
    next_stop: Callable[[int], int],
    stop: Callable[[], bool],
) -> tuple[dict[int, dict[str, np.ndarray]], np.ndarray]:
    """Trains shadow federations, the replicas of an experiment, and looks at the cases in the wanted rounds.

    Returns: {round: evidence}, NaN of replicas from the round on in which they diverged; which did, bool [R].
    Raises: Preempted after `stop`.
    """
    reached, found, lost = 0, {}, np.zeros(len(cases), bool)
    while True:
        if reached in wanted:
            found[reached] = without(look(experiment, state, cases, plan.train_sizes), lost)
        if reached >= max(wanted):
            return found, lost
        if stop():
            raise Preempted("preempted while shadow federations trained; the same command trains those that are left")
        reached = next_stop(reached)
        state, records, _ = experiment.rounds(state, plan, reached)
        lost |= halted(records)


def halted(records: Mapping[str, Any]) -> np.ndarray:
    """Which replicas halted in some round of a call of experiment.rounds: bool [R]. Their model is an earlier one."""
    halt = np.asarray(records["halt"])
    return np.any(halt.reshape(len(halt), -1), axis=1)


def without(seen: Evidence, lost: np.ndarray) -> dict[str, np.ndarray]:
    """Evidence [R, ...] with NaN in the rows of `lost` [R]."""
    return {name: np.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), np.float32(np.nan), x) for name, x in seen.items()}


def _path(folder: Path, number: int) -> Path:
    return folder / "attack" / f"shadow_{number:04d}.npz"


def _remember(path: Path, found: Mapping[int, Evidence]) -> None:
    write_arrays(path, {f"{at}/{name}": x for at, seen in found.items() for name, x in seen.items()})


def _recall(path: Path, wanted: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
    """What a shadow that was trained before has shown; {} where it is not there or was watched in other rounds."""
    found: dict[int, dict[str, np.ndarray]] = {}
    if path.exists():
        with np.load(path) as arrays:
            for key in arrays.files:
                at, name = key.split("/")
                found.setdefault(int(at), {})[name] = arrays[key]
    return found if set(found) == set(wanted) else {}


def losses(
    made: Halves,
    target: Mapping[int, np.ndarray],
    seen: Mapping[int, Evidence],
    cases: np.ndarray,
    member: np.ndarray,
    valid: np.ndarray,
    population: np.ndarray,
    patient_ids: Sequence[str],
) -> Losses:
    """What the scores of one replica are computed from, in all rounds up to the last one of `target`.

    Args:
      target: {round: log_loss [K, A]} of the replica.
      seen: {round: evidence [M, K, A]} of the shadows, of these rounds at least.
      cases, member, valid, population: [K, A], as asked of the target.
    """
    rounds = sorted(target)
    shadow = [seen[at]["log_loss"] for at in rounds]
    others = (target[rounds[-1]][population], shadow[-1][:, population]) if population.any() else None
    return Losses(
        np.stack([target[at][valid] for at in rounds]),
        np.stack([x[:, valid] for x in shadow]),
        made.inside[:, cases[valid]],
        member[valid],
        np.asarray(patient_ids)[cases[valid]].tolist(),
        others,
    )
