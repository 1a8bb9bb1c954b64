"""One run: from a config and a folder to numbers, figures and a report. Importable without absl.

config -> data -> Task -> Client -> round(sampler, aggregator, server) x replicas -> evaluation -> report
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from fedjax_seg import (
    attacking,
    data,
    guarantee,
    hospital_time,
    inverting,
    outcome,
    privacy_budget,
    privacy_card,
    same_run,
    secrecy,
    synthesis,
    training,
)
from fedjax_seg import config as configuration
from fedjax_seg.assembly import Experiment, Preempted, build
from fedjax_seg.attacks.membership import Membership
from fedjax_seg.core import checks
from fedjax_seg.core.types import FederatedState
from fedjax_seg.data import federated
from fedjax_seg.federation import baselines
from fedjax_seg.rehearsal import rehearse
from fedjax_seg.report import checkpoint, continuation, manifest, resources
from fedjax_seg.report.writer import RunFolder, write_atomic

__all__ = ["Experiment", "Preempted", "build", "check_data", "load_data", "read_data", "run"]


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


def prepared(
    config: ml_collections.ConfigDict,
    folder: Path,
    load: Callable[[ml_collections.ConfigDict, Path], federated.FederatedData] = read_data,
) -> tuple[Experiment, str]:
    """The experiment of a config and the digest of its data; nothing is compiled."""
    loaded = attacking.without_canaries(config, baselines.arrange(load(config, folder), config.protocol))
    digest = federated.digest(loaded)  # once: it reads every pixel
    salt = same_run.salt(config, digest)
    made = build(privacy_budget.calibrated(config, loaded), loaded, salt)
    again = privacy_budget.for_rounding(made)
    return (build(again, loaded, salt) if again else made), digest


def check_data(config: ml_collections.ConfigDict, workdir: str | Path) -> tuple[str, ...]:
    """Only reads and checks the data, and whether the parts of the run go with them; the lines to print.

    Nothing is compiled. Of volumes, what there is to look up (voxels per label, the split) is written into the folder,
    where there are faults as well.
    """
    configuration.validate(config)
    folder = Path(workdir).resolve()
    try:
        loaded = attacking.without_canaries(config, load_data(config, folder))
    except checks.DataFaults as error:
        _keep(folder, error.files)
        raise
    if loaded.store is not None:
        _keep(folder, loaded.files)
    experiment = build(privacy_budget.calibrated(config, loaded), loaded)
    secrecy.ledger(experiment)
    inverting.check(experiment)
    if isinstance(experiment.attack, Membership):
        attacking.prepare(experiment)
    privacy_budget.rounds_allowed(experiment)
    if loaded.store is not None:
        rehearse(experiment)
        loaded.store.close()
    return (*loaded.summary, *secrecy.lines(experiment))


def _keep(folder: Path, files: Mapping[str, str]) -> None:
    if files:
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(folder / name, text.encode())


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
    meter = _meter()
    with RunFolder(workdir, quiet=quiet) as folder:
        before = folder.read_json("config.json")
        if before is not None:
            difference = same_run.first_difference(before, config)
            if difference:
                raise checks.UserError(f"{folder.path}: holds another run: {difference}; use another --workdir")
            finished = continuation.finished(folder, config.rounds, config.max_sim_hours, config.privacy.budget)
            if finished is not None:
                return finished
        experiment, digest = prepared(config, folder.path, load)
        loaded = experiment.data
        inverting.check(experiment)
        promised, allowed = guarantee.of_run(experiment), privacy_budget.rounds_allowed(experiment)
        watch = attacking.prepare(experiment) if isinstance(experiment.attack, Membership) else None
        clocks, ledger = hospital_time.clocks(experiment), secrecy.ledger(experiment)
        for line in (
            experiment.how.text,
            *experiment.data.summary,
            *promised.get("lines", ()),
            *secrecy.lines(experiment),
        ):
            folder.log(line)
        # What the folder holds is looked at before anything in it changes.
        state, position = _state(experiment, folder.path / "checkpoints", digest)
        if loaded.store is not None or experiment.parts.aggregator.mechanism or experiment.parts.secure:
            # Traced, not run: what a rule refuses is told before an evaluation of many volumes.
            jax.eval_shape(lambda s, p: experiment.rounds(s, p, 1), state, experiment.plan)
        folder.rewind(position)
        folder.start()
        folder.write_json("config.json", configuration.plain(config))
        folder.write_json("manifest.json", _manifest(experiment, argv, digest))
        for name, text in experiment.data.files.items():
            folder.write_text(name, text)
        folder.write_json("privacy.json", privacy_card.card(experiment, promised))
        going = training.Going(experiment, folder, stop, watch, promised, digest, clocks, ledger, meter, allowed)
        try:
            return outcome.finish(going, training.train(going, state))
        finally:
            if loaded.store is not None:
                loaded.store.close()


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


def _meter() -> Callable[[], dict[str, Any]]:
    """() -> what this process has used since now. Energy counters wrap: every call counts what was used until then."""
    held = [resources.start()]

    def read() -> dict[str, Any]:
        held[0] = resources.advance(held[0])
        stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
        return resources.read(held[0], sum(s.get("peak_bytes_in_use", 0) for s in stats) if stats else None)

    return read
