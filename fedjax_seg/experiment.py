"""One run: from a config and a folder to numbers, figures and a report. Importable without absl.

config -> data -> Task -> Client -> round(sampler, aggregator, server) x replicas -> evaluation -> report
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_seg import attacking, data, guarantee, synthesis
from fedjax_seg import config as configuration
from fedjax_seg.assembly import LONGEST_CHUNK, Experiment, Preempted, build
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import FederatedState
from fedjax_seg.data import federated
from fedjax_seg.federation import baselines, evaluate, flags, replicas
from fedjax_seg.report import checkpoint, continuation, manifest, pictures, rows, run_report, runs
from fedjax_seg.report.progress import Progress
from fedjax_seg.report.writer import RunFolder

__all__ = ["Experiment", "Preempted", "build", "check_data", "load_data", "read_data", "run"]

CHECKPOINT_SECONDS = 300.0


def read_data(config: ml_collections.ConfigDict, scratch: Path) -> federated.FederatedData:
    """The data set of a config, all its faults found; generated into `scratch` first where the config says so."""
    slot = dict(config.data)
    if config.synthesis.name and not slot.get("root"):
        slot["root"] = str(synthesis.make(folder=scratch / "synthetic", **config.synthesis))
    name = slot.pop("name")
    loaded = data.make(name, **slot)
    federated.validate(loaded)
    return loaded


def load_data(config: ml_collections.ConfigDict, scratch: Path) -> federated.FederatedData:
    """The data set of a config as its protocol deals it out."""
    return baselines.arrange(read_data(config, scratch), config.protocol)


def check_data(config: ml_collections.ConfigDict, workdir: str | Path) -> tuple[str, ...]:
    """Only reads and checks the data; the lines to print."""
    configuration.validate(config)
    return load_data(config, Path(workdir).resolve()).summary


def run(
    config: ml_collections.ConfigDict,
    workdir: str | Path,
    stop: Callable[[], bool] = lambda: False,
    quiet: bool = False,
    argv: Sequence[str] = (),
    load: Callable[[ml_collections.ConfigDict, Path], federated.FederatedData] = read_data,
) -> dict[str, Any]:
    """Trains, evaluates and reports; continues what the folder holds.

    Args:
      config: see fedjax_seg.config.base.
      workdir: the run's folder; locked while the run lasts.
      stop: polled between device calls; True saves the state and raises Preempted.
      quiet: no line on stderr.
      argv: recorded in manifest.json.
      load: reads the data, before the protocol deals them out; a sweep passes one that remembers them.

    Returns: the content of summary.json.

    Raises: UserError for bad input; Preempted after `stop`.
    """
    configuration.validate(config)
    if config.require_gpu and jax.default_backend() == "cpu":
        raise checks.UserError("require_gpu: no accelerator found, backend is 'cpu'; install a GPU build of jax")
    with RunFolder(workdir, quiet=quiet) as folder:
        before = folder.read_json("config.json")
        if before is not None:
            difference = configuration.first_difference(before, configuration.plain(config))
            if difference:
                raise checks.UserError(f"{folder.path}: holds another run: {difference}; use another --workdir")
            finished = continuation.finished(folder, config.rounds)
            if finished is not None:
                return finished
        loaded = baselines.arrange(load(config, folder.path), config.protocol)
        experiment = build(guarantee.calibrated(config, loaded), loaded)
        promised = guarantee.of_run(experiment)
        watch = attacking.prepare(experiment) if experiment.attack else None
        for line in (experiment.how.text, *experiment.data.summary, *promised.get("lines", ())):
            folder.log(line)
        # What the folder holds is looked at before anything in it changes.
        digest = federated.digest(experiment.data)  # once: it reads every pixel
        state, position = _state(experiment, folder.path / "checkpoints", digest)
        folder.rewind(position)
        folder.start()
        folder.write_json("config.json", configuration.plain(config))
        folder.write_json("manifest.json", _manifest(experiment, argv, digest))
        for name, text in experiment.data.files.items():
            folder.write_text(name, text)
        if promised:
            folder.write_json("privacy.json", promised)
        return _train(Going(experiment, folder, stop, watch, promised, digest), state)


def _state(experiment: Experiment, saves: Path, digest: str) -> tuple[FederatedState, dict[str, int]]:
    """The state to go on from, and the position of the metrics files there: of the last checkpoint, or new."""
    state = experiment.initial()
    if checkpoint.latest(saves) is None:
        return state, {}
    state, meta = checkpoint.restore(saves, state)
    if meta["data"] != digest:
        raise checks.UserError(f"{saves}: the data has changed since the checkpoint; use another --workdir")
    return state, meta["position"]


def _manifest(experiment: Experiment, argv: Sequence[str], digest: str) -> dict[str, Any]:
    facts = {
        "layout": experiment.how.text,
        "seeds": list(experiment.config.seeds),
        "data_sha256": digest,
        "client_order": list(experiment.data.sites),
        "data": dict(experiment.data.about),
    }
    return manifest.of_process(argv) | facts


class Going(NamedTuple):
    """A run that is under way."""

    experiment: Experiment
    folder: RunFolder
    stop: Callable[[], bool]
    watch: attacking.Watch | None
    promised: dict[str, Any]
    digest: str  # of the data


def _train(going: Going, state: FederatedState) -> dict[str, Any]:
    experiment, folder = going.experiment, going.folder
    config, saves = experiment.config, folder.path / "checkpoints"
    began = time.monotonic()
    state = replicas.place(experiment.how, state)
    plan = replicas.place(experiment.how, experiment.plan)
    reached, saved = int(np.max(np.asarray(state.round))), time.monotonic()
    progress = Progress(folder, reached, config.rounds)
    if reached:
        folder.log(f"continuing at round {reached} of {config.rounds}")
    else:
        folder.add_rows(_look(going, state, plan, 0))
    with progress:
        while reached < config.rounds:
            target = _target(config, reached)
            clock = time.monotonic()
            state, records, done = experiment.rounds(state, plan, target)
            records, done = jax.tree.map(np.asarray, (records, done))
            folder.add_rows(rows.training(records, done, experiment.replicas, experiment.data.sites))
            folder.add_timing(rows.timing(records, done, reached, time.monotonic() - clock))
            for line in flags.check(records, done, experiment.replicas, experiment.data.sites):
                folder.log(line)
            reached, scored = target, []
            if reached % config.eval_every == 0 or reached == config.rounds:
                scored = _look(going, state, plan, reached)
                folder.add_rows(scored)
            progress.show(reached, scored, experiment.task.metrics)
            asked, every = going.stop(), config.checkpoint.every_rounds
            due = reached % every == 0 if every else time.monotonic() - saved > CHECKPOINT_SECONDS
            if asked or due or reached == config.rounds:
                meta = {"position": folder.position(), "data": going.digest}
                checkpoint.save(saves, jax.tree.map(np.asarray, state), meta, keep=config.checkpoint.keep)
                saved = time.monotonic()
            if asked and reached < config.rounds:
                folder.log(f"preempted at round {reached} of {config.rounds}; the same command continues")
                raise Preempted(f"preempted at round {reached}")
    folder.add_timing({"event": "trained", "seconds": time.monotonic() - began})
    return _finish(going, state, plan)


def _look(going: Going, state: FederatedState, plan: Any, reached: int) -> list[dict[str, Any]]:
    """Scores the model of a round; an attacker who is asked for looks at it as well."""
    if going.watch:
        seen = attacking.observe(going.experiment, state, going.watch.target, plan.train_sizes)
        attacking.remember(going.folder.path, reached, seen)
    return _score(going.experiment, _outputs(going.experiment, state, plan), reached)


def _target(config: ml_collections.ConfigDict, reached: int) -> int:
    """Where the next device call ends: at the next evaluation or checkpoint, or after the longest chunk."""
    steps = [every for every in (config.eval_every, config.checkpoint.every_rounds) if every]
    return min(config.rounds, reached + LONGEST_CHUNK, *((reached // every + 1) * every for every in steps))


def _outputs(experiment: Experiment, state: FederatedState, plan: Any) -> dict[str, np.ndarray]:
    """What the model gives for every test case, {name: [R, K, T, ...]} on the host."""
    return jax.tree.map(np.asarray, experiment.outputs(state, plan.test, plan.train_sizes))


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


def _cases(experiment: Experiment, outputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of per_case.csv of all replicas."""
    found: list[dict[str, Any]] = []
    for r, replica in enumerate(experiment.replicas):
        mine, plan, tag = (
            tree.rows(outputs, r),
            tree.rows(experiment.plan, r),
            {"fold": replica.fold, "seed": replica.seed},
        )
        found += rows.cases(experiment.task, mine, plan.test_sizes, plan.test, experiment.data, tag)
    return found


def _attack(going: Going) -> dict[str, Any]:
    """The attack's verdict; its AUC of every round goes to the metrics."""
    experiment, folder = going.experiment, going.folder
    if going.watch is None:
        return {}
    target, shadow = attacking.recall(folder.path, experiment.config.rounds), {}
    if going.watch.shadow is not None:
        clock = time.monotonic()
        shadow = attacking.shadow_evidence(
            experiment, going.watch, tuple(target), going.stop, folder.log, lambda at: _target(experiment.config, at)
        )
        folder.add_timing({"event": "shadow", "seconds": time.monotonic() - clock})
    found = attacking.verdict(experiment, going.watch, target, shadow)
    place = {"site": "all", "split": "attack"}
    folder.add_rows(
        {"round": row["round"], "fold": row["fold"], "seed": row["seed"], **place}
        | {"metric": f"auc_{row['attack']}", "value": row["auc"], "n": row["n"]}
        for row in found["curve"]
    )
    return found


def _finish(going: Going, state: FederatedState, plan: Any) -> dict[str, Any]:
    experiment, folder, config = going.experiment, going.folder, going.experiment.config
    task, loaded, outputs = experiment.task, experiment.data, _outputs(experiment, state, plan)
    folder.write_cases(_cases(experiment, outputs))
    attack = _attack(going)
    written = runs.read_rows(folder.path / "metrics.jsonl")
    result = {
        "label": config.label or config.aggregator.name,
        "group": config.group,
        "round": config.rounds,
        "protocol": config.protocol,
        "sites": list(loaded.sites),
        "external": list(loaded.external),
        "classes": list(loaded.classes),
        "metrics": {name: list(rule) for name, rule in task.metrics.items()},
        "headline": list(task.headline),
        "paired": task.paired,
        "cohort": loaded.about.get("table1", []),
        "participation": rows.participation(written, loaded.sites),
        "results": _score(experiment, outputs, config.rounds),
        "privacy": going.promised,
        "attack": attack,
        "config": configuration.flat(configuration.plain(config)),
    }
    shown = None
    if task.masks and pictures.allowed(config.show_scans, loaded.about, loaded.arrays):
        one = tree.rows(experiment.plan, 0)
        shown = pictures.choose(loaded, one, tree.rows(outputs, 0), task.masks, task.case_values, task.paired)
    run_report.write(folder, result, written, loaded.about, loaded.summary, shown)
    folder.finish(result)
    folder.log(f"done: {folder.path / 'report.html'}")
    return result
