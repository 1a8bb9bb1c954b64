"""The course of a run: rounds, evaluations and checkpoints until it is done, told to stop, or out of simulated time."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_seg import attacking, hospital_time, secrecy, volume_outputs
from fedjax_seg.assembly import LONGEST_CHUNK, Experiment, Preempted
from fedjax_seg.core import tree
from fedjax_seg.core.types import FederatedState
from fedjax_seg.federation import evaluate, flags, replicas
from fedjax_seg.report import checkpoint, rows, runs
from fedjax_seg.report.progress import Progress
from fedjax_seg.report.writer import RunFolder

CHECKPOINT_SECONDS = 300.0


class Going(NamedTuple):
    """A run that is under way."""

    experiment: Experiment
    folder: RunFolder
    stop: Callable[[], bool]
    watch: attacking.Watch | None
    promised: dict[str, Any]
    digest: str  # of the data
    clocks: tuple[Any, ...]  # of the replicas: simulated hospital time; () = none
    ledger: secrecy.Ledger | None  # of what is exchanged; None = nobody asks
    meter: Any  # what the run has used of the machine so far: () -> {'wall_seconds', ...}
    allowed: int  # rounds that the privacy budget allows, at most config.rounds


class Trained(NamedTuple):
    """Where the rounds have led.

    Attributes:
      state, plan: on the device, of all replicas.
      outputs: of the last model's test cases, on the host.
      scored: metric rows of them.
      reached: finished rounds.
      stopped: why that is fewer than asked for; '' where it is not.
    """

    state: FederatedState
    plan: Any
    outputs: dict[str, np.ndarray]
    scored: list[dict[str, Any]]
    reached: int
    stopped: str


def train(going: Going, state: FederatedState) -> Trained:
    """Runs the rounds that are left. Raises: Preempted once `stop` says so, with the state saved."""
    experiment, folder, config = going.experiment, going.folder, going.experiment.config
    began = saved = time.monotonic()
    state = replicas.place(experiment.how, state)
    plan = replicas.place(experiment.how, experiment.plan)
    reached = int(np.max(np.asarray(state.round)))
    progress = Progress(folder, reached, config.rounds)
    found: tuple[list[dict[str, Any]], dict[str, np.ndarray]] | None = None  # of the last evaluation
    if reached:
        folder.log(f"continuing at round {reached} of {config.rounds}")
    else:
        folder.add_rows(_look(going, state, plan, 0, False)[0])
    simulated = hospital_time.spent(runs.read_rows(folder.path / "metrics.jsonl"), {}) if going.clocks else {}
    stopped = _over(going, reached, simulated)
    with progress:
        while reached < config.rounds and not stopped:
            goal = min(target(config, reached), going.allowed)
            state, records, done = _rounds(going, state, plan, reached, goal)
            times = hospital_time.rows(going.clocks, records, done, experiment.replicas)
            folder.add_rows(times)
            reached = goal
            stopped = _over(going, reached, hospital_time.spent(times, simulated))
            last = reached == config.rounds or bool(stopped)
            looked = reached % config.eval_every == 0 or last
            if looked:
                found = _look(going, state, plan, reached, last)
                folder.add_rows(found[0])
            progress.show(reached, found[0] if looked and found else (), experiment.task)
            asked, every = going.stop(), config.checkpoint.every_rounds
            due = reached % every == 0 if every else time.monotonic() - saved > CHECKPOINT_SECONDS
            if asked or due or last:
                meta = {"position": folder.position(), "data": going.digest}
                saves = folder.path / "checkpoints"
                checkpoint.save(saves, jax.tree.map(np.asarray, state), meta, keep=config.checkpoint.keep)
                saved = time.monotonic()
            if asked and not last:
                folder.log(f"preempted at round {reached} of {config.rounds}; the same command continues")
                folder.add_timing({"event": "resources", **going.meter()})
                raise Preempted(f"preempted at round {reached}")
    if stopped:
        folder.log(f"stopped at round {reached} of {config.rounds}: {stopped}")
    folder.add_timing({"event": "trained", "seconds": time.monotonic() - began})
    if found is None:  # a run that is continued after its last round
        last_outputs = _outputs(going, state, plan, True)
        found = _score(experiment, last_outputs, reached), last_outputs
    scored, outputs = found
    return Trained(state, plan, outputs, scored, reached, stopped)


def _over(going: Going, reached: int, simulated: Any) -> str:
    """Why the run ends before its last round; '' where it goes on."""
    config = going.experiment.config
    if going.allowed <= reached < config.rounds:
        return (
            f"the privacy budget: one more round would take epsilon beyond {config.privacy.budget:g} at delta"
            f" {config.privacy.delta:g}"
        )
    return hospital_time.over(config, simulated)


def _rounds(
    going: Going, state: FederatedState, plan: Any, reached: int, goal: int
) -> tuple[FederatedState, Any, np.ndarray]:
    """One device call, and what is written about it."""
    experiment, folder = going.experiment, going.folder
    clock, waited = time.monotonic(), volume_outputs.waited(experiment)
    state, records, done = experiment.rounds(state, plan, goal)
    records, done = jax.tree.map(np.asarray, (records, done))
    folder.add_rows(rows.training(records, done, experiment.replicas, experiment.data.sites))
    if going.ledger:
        folder.add_rows(secrecy.rows(going.ledger, records, done, experiment.replicas))
    seconds = time.monotonic() - clock
    waits = volume_outputs.waits(experiment, waited, seconds)
    folder.add_timing(rows.timing(records, done, reached, seconds) | waits)
    for line in flags.check(records, done, experiment.replicas, experiment.data.sites):
        folder.log(line)
    return state, records, done


def _look(going: Going, state: FederatedState, plan: Any, reached: int, last: bool) -> tuple[list[dict[str, Any]], Any]:
    """Scores the model of a round, and its outputs; an attacker who is asked for looks at it as well."""
    if going.watch:
        seen = attacking.observe(going.experiment, state, going.watch.target, plan.train_sizes)
        attacking.remember(going.folder.path, reached, seen)
    going.meter()
    outputs = _outputs(going, state, plan, last)
    return _score(going.experiment, outputs, reached), outputs


def target(config: ml_collections.ConfigDict, reached: int) -> int:
    """Where the next device call ends: at the next evaluation or checkpoint, or after the longest chunk; after one
    round where a budget of simulated time may end the run there."""
    if config.max_sim_hours:
        return reached + 1
    steps = [every for every in (config.eval_every, config.checkpoint.every_rounds) if every]
    return min(config.rounds, reached + LONGEST_CHUNK, *((reached // every + 1) * every for every in steps))


def _outputs(going: Going, state: FederatedState, plan: Any, last: bool) -> dict[str, np.ndarray]:
    """What the model gives for every test case, {name: [R, K, T, ...]} on the host; predictions of the last model are
    saved where they are asked for."""
    experiment = going.experiment
    if experiment.data.store is None:
        return jax.tree.map(np.asarray, experiment.outputs(state, plan.test, plan.train_sizes))
    save = None
    if experiment.config.predictions and last:
        save = volume_outputs.saver(experiment, going.folder.path / "predictions")
    return experiment.outputs(state, plan.test, plan.train_sizes, each=save)


def _score(experiment: Experiment, outputs: dict[str, np.ndarray], reached: int) -> list[dict[str, Any]]:
    """Metric rows of all replicas."""
    scored: list[dict[str, Any]] = []
    for r, replica in enumerate(experiment.replicas):
        mine, sizes = tree.rows(outputs, r), experiment.plan.test_sizes[r]
        tag = {"round": reached, "fold": replica.fold, "seed": replica.seed}
        for row in evaluate.scores(experiment.task, mine, sizes, experiment.data.sites, experiment.data.external):
            place = {"site": row["site"], "split": "test"}
            scored.append({**tag, **place} | {k: row[k] for k in ("metric", "value", "n")})
    return scored
