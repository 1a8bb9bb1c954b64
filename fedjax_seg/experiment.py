"""One run: from a config and a folder to numbers, figures and a report. Importable without absl.

config -> data -> Task -> Client -> round(sampler, aggregator, server) x replicas -> evaluation -> report
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_seg import aggregation, clients, data, synthesis, tasks
from fedjax_seg import config as configuration
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Client, FederatedState, Task
from fedjax_seg.data import federated
from fedjax_seg.federation import baselines, evaluate, flags, local_batches, replicas, round, sampling, server
from fedjax_seg.report import checkpoint, continuation, manifest, rows, run_report, tables
from fedjax_seg.report.progress import Progress
from fedjax_seg.report.writer import RunFolder
from fedjax_seg.tasks import input_span

CHECKPOINT_SECONDS = 300.0
SPAN_PAYS = 2  # inputs per case from which the change of basis is worth its set-up
LONGEST_CHUNK = 64  # rounds in one device call: bounds the record buffer and the wait after SIGTERM


class Preempted(Exception):
    """The run was asked to stop; its state is saved and the same command continues it."""


class Replica(NamedTuple):
    """One fold under one seed."""

    split: int
    fold: str
    seed: int


class Experiment(NamedTuple):
    """A run, ready to go. Leaves of `plan` have the leading axis R of `replicas`."""

    config: ml_collections.ConfigDict
    data: federated.FederatedData
    task: Task
    client: Client
    parts: round.Parts
    replicas: tuple[Replica, ...]
    plan: round.Plan
    how: replicas.Layout
    initial: Callable[[], FederatedState]
    rounds: Callable[..., Any]  # (state, plan, stop) -> (state, records, done)
    outputs: Callable[..., Any]  # (state, plan) -> {name: [R, K, T, ...]}


def load_data(config: ml_collections.ConfigDict, scratch: Path) -> federated.FederatedData:
    """The data set of a config, all its faults found; generated into `scratch` first where the config says so."""
    slot = dict(config.data)
    if config.synthesis.name and not slot.get("root"):
        slot["root"] = str(synthesis.make(folder=scratch / "synthetic", **config.synthesis))
    name = slot.pop("name")
    loaded = data.make(name, **slot)
    federated.validate(loaded)
    return baselines.arrange(loaded, config.protocol)


def build(config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> Experiment:
    """Makes every part of the run; all option errors come from here, before anything compiles."""
    count = len(loaded.sites)
    sampler = sampling.make(clients=count, **config.sampler)
    task = tasks.make(model=dict(config.model), **config.task)
    client = _corrupted(clients.make(task=task, **config.client), config, loaded)
    which = _replicas(config, loaded)
    how = replicas.layout(
        len(which), sampler.capacity, config.lanes, config.devices, {"map": False, "vmap": True}.get(config.replicas)
    )
    aggregator = aggregation.make(**config.aggregator)
    task, features, about = _in_span(config, task, client, aggregator, loaded)
    how = how._replace(text=how.text + about)
    arrays = replicas.share(how, {**loaded.arrays, "x": features})
    parts = round.Parts(
        client,
        aggregator,
        sampler,
        server.make(**config.server),
        local_batches.in_memory(arrays, config.batch_size, config.local_epochs),
        config.on_nonfinite == "skip",
        config.on_empty == "skip",
    )
    train, train_sizes = federated.padded_plan(tuple(loaded.splits[r.split] for r in which), "train")
    test, test_sizes = federated.padded_plan(tuple(loaded.splits[r.split] for r in which), "test")
    plan = round.Plan(train, train_sizes, test, test_sizes)
    return Experiment(
        config,
        loaded,
        task,
        client,
        parts,
        which,
        plan,
        how,
        *_functions(config, task, parts, how, arrays, which, count),
    )


def _functions(config, task, parts, how, arrays, which, count) -> tuple[Callable, Callable, Callable]:
    """The three jitted functions of a run. `arrays` is an argument of each, so that no data is baked into a program."""
    capacity = min(config.eval_every, LONGEST_CHUNK)

    def with_data(shared: Any) -> round.Parts:
        return parts._replace(batches_of=local_batches.in_memory(shared, config.batch_size, config.local_epochs))

    def initialise(pair: Any, unused: Any, shared: Any) -> FederatedState:
        key = round.stream(jax.random.key(pair["seed"]), pair["split"])
        example = {name: x[:1] for name, x in shared.items()} | {"mask": jnp.ones((1,))}
        variables = dict(task.init(round.stream(key, round.INIT), example))
        return round.initial_state(parts, variables, key, count)

    def many(state: FederatedState, plan: Any, shared: Any, stop: Any) -> Any:
        return round.many_rounds(with_data(shared), how.lanes, capacity)(state, plan, stop)

    def outputs(state: FederatedState, plan: round.Plan, shared: Any) -> Any:
        return evaluate.case_outputs(task, parts.client, shared, state, plan.test, config.eval_batch)

    start = replicas.over_replicas(how, initialise)
    go = replicas.over_replicas(how, many, donate=True)
    score = replicas.over_replicas(how, outputs)
    seeds = {
        "seed": np.array([r.seed for r in which], np.uint32),
        "split": np.array([r.split for r in which], np.uint32),
    }
    return (
        lambda: start(seeds, np.zeros(len(which), np.int32), arrays),
        lambda state, plan, stop: go(state, plan, arrays, jnp.asarray(stop, jnp.int32)),
        lambda state, plan: score(state, plan, arrays),
    )


def _replicas(config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> tuple[Replica, ...]:
    numbers = config.folds or range(len(loaded.splits))
    for number in numbers:
        if number >= len(loaded.splits):
            raise checks.UserError(f"config.folds: {number} given, the data has splits 0..{len(loaded.splits) - 1}")
    return tuple(Replica(f, loaded.splits[f].name, s) for s in config.seeds for f in numbers)


def _in_span(
    config: ml_collections.ConfigDict, task: Task, client: Client, aggregator: Aggregator, loaded: Any
) -> tuple[Task, np.ndarray, str]:
    """The task and its features in the span of the cases where every part allows it and it pays."""
    x = loaded.arrays["x"]
    width = int(np.prod(x.shape[1:]))
    server_rotates = frozenset({"orthogonal"} if config.server.name == "sgd" else ())
    if config.input_span == "off" or width < SPAN_PAYS * len(x):
        return task, x, ""
    if not input_span.applies(task, client.properties, aggregator.properties, server_rotates):
        return task, x, ""
    reduced = input_span.in_span(task, x)
    return reduced.task, reduced.x, f", first layer in the span of the cases ({width} -> {reduced.x.shape[1]} inputs)"


def _corrupted(client: Client, config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> Client:
    wrong = config.corruption
    if wrong.kind == "none":
        return client
    if wrong.site not in loaded.sites:
        raise checks.UserError(
            f"config.corruption.site: unknown site {wrong.site!r};{checks.suggestion(wrong.site, loaded.sites)}"
        )
    which = loaded.sites.index(wrong.site)
    return clients.corrupt(client, kind=wrong.kind, which=which, factor=wrong.factor, classes=len(loaded.classes))


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
    load: Callable[[ml_collections.ConfigDict, Path], federated.FederatedData] = load_data,
) -> dict[str, Any]:
    """Trains, evaluates and reports; continues what the folder holds.

    Args:
      config: see fedjax_seg.config.base.
      workdir: the run's folder; locked while the run lasts.
      stop: polled between device calls; True saves the state and raises Preempted.
      quiet: no line on stderr.
      argv: recorded in manifest.json.
      load: reads the data; a sweep passes one that remembers them.

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
        experiment = build(config, load(config, folder.path))
        for line in (experiment.how.text, *experiment.data.summary):
            folder.log(line)
        # What the folder holds is looked at before anything in it changes.
        state, position = _state(experiment, folder.path / "checkpoints")
        folder.rewind(position)
        folder.start()
        folder.write_json("config.json", configuration.plain(config))
        folder.write_json("manifest.json", _manifest(experiment, argv))
        for name, text in experiment.data.files.items():
            folder.write_text(name, text)
        return _train(experiment, folder, state, stop)


def _state(experiment: Experiment, saves: Path) -> tuple[FederatedState, dict[str, int]]:
    """The state to go on from, and the position of the metrics files there: of the last checkpoint, or new."""
    state = experiment.initial()
    if checkpoint.latest(saves) is None:
        return state, {}
    state, meta = checkpoint.restore(saves, state)
    if meta["data"] != federated.digest(experiment.data):
        raise checks.UserError(f"{saves}: the data has changed since the checkpoint; use another --workdir")
    return state, meta["position"]


def _manifest(experiment: Experiment, argv: Sequence[str]) -> dict[str, Any]:
    facts = {
        "layout": experiment.how.text,
        "seeds": list(experiment.config.seeds),
        "data_sha256": federated.digest(experiment.data),
        "client_order": list(experiment.data.sites),
        "data": dict(experiment.data.about),
    }
    return manifest.of_process(argv) | facts


def _train(
    experiment: Experiment, folder: RunFolder, state: FederatedState, stop: Callable[[], bool]
) -> dict[str, Any]:
    config, saves, digest = experiment.config, folder.path / "checkpoints", federated.digest(experiment.data)
    began = time.monotonic()
    state = replicas.place(experiment.how, state)
    plan = replicas.place(experiment.how, experiment.plan)
    reached, saved = int(np.max(np.asarray(state.round))), time.monotonic()
    progress = Progress(folder, reached, config.rounds)
    if reached:
        folder.log(f"continuing at round {reached} of {config.rounds}")
    else:
        folder.add_rows(_score(experiment, state, plan, 0)[0])
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
                scored = _score(experiment, state, plan, reached)[0]
                folder.add_rows(scored)
            progress.show(reached, scored, experiment.task.metrics)
            asked, every = stop(), config.checkpoint.every_rounds
            due = reached % every == 0 if every else time.monotonic() - saved > CHECKPOINT_SECONDS
            if asked or due or reached == config.rounds:
                meta = {"position": folder.position(), "data": digest}
                checkpoint.save(saves, jax.tree.map(np.asarray, state), meta, keep=config.checkpoint.keep)
                saved = time.monotonic()
            if asked and reached < config.rounds:
                folder.log(f"preempted at round {reached} of {config.rounds}; the same command continues")
                raise Preempted(f"preempted at round {reached}")
    folder.add_timing({"event": "trained", "seconds": time.monotonic() - began})
    return _finish(experiment, folder, state, plan)


def _target(config: ml_collections.ConfigDict, reached: int) -> int:
    """Where the next device call ends: at the next evaluation or checkpoint, or after the longest chunk."""
    steps = [every for every in (config.eval_every, config.checkpoint.every_rounds) if every]
    return min(config.rounds, reached + LONGEST_CHUNK, *((reached // every + 1) * every for every in steps))


def _score(
    experiment: Experiment, state: FederatedState, plan: Any, reached: int, with_cases: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metric rows and, where asked, per-case rows of all replicas."""
    outputs = jax.tree.map(np.asarray, experiment.outputs(state, plan))
    scored: list[dict[str, Any]] = []
    cases: list[dict[str, Any]] = []
    for r, replica in enumerate(experiment.replicas):
        mine, sizes = tree.rows(outputs, r), experiment.plan.test_sizes[r]
        tag = {"fold": replica.fold, "seed": replica.seed}
        for row in evaluate.scores(experiment.task, mine, sizes, experiment.data.sites):
            place = {"site": row["site"], "split": "test"}
            scored.append({"round": reached, **tag, **place} | {k: row[k] for k in ("metric", "value", "n")})
        if with_cases:
            cases += rows.cases(mine, sizes, experiment.plan.test[r], experiment.data, tag)
    return scored, cases


def _finish(experiment: Experiment, folder: RunFolder, state: FederatedState, plan: Any) -> dict[str, Any]:
    config = experiment.config
    scored, cases = _score(experiment, state, plan, config.rounds, with_cases=True)
    written = tables.read_rows(folder.path / "metrics.jsonl")
    folder.write_cases(cases)
    result = {
        "label": config.label or config.aggregator.name,
        "group": config.group,
        "round": config.rounds,
        "protocol": config.protocol,
        "sites": list(experiment.data.sites),
        "classes": list(experiment.data.classes),
        "metrics": {name: list(rule) for name, rule in experiment.task.metrics.items()},
        "cohort": experiment.data.about.get("table1", []),
        "participation": rows.participation(written, experiment.data.sites),
        "results": scored,
        "config": configuration.flat(configuration.plain(config)),
    }
    run_report.write(folder, result, written, experiment.data.about, experiment.data.summary)
    folder.finish(result)
    folder.log(f"done: {folder.path / 'report.html'}")
    return result
