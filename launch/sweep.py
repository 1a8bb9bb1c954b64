"""python -m launch.sweep --config=configs/x.py[:words] --workdir=runs/x [--config.key=value ...]

Runs the grid that the config declares (`grid`: strings for get_config), one sub-folder a run, and ends with tables
(CSV, Markdown, LaTeX) and figures over all of them. The same command resumes: finished runs are kept. Overrides apply
to every run. A run that fails is named at the end (exit code 1); the others go on.
"""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_seg import main
from fedjax_seg.core import checks


class Job(NamedTuple):
    """One run of a sweep: the words for get_config, its folder, and the overrides it shares with the others."""

    words: str
    workdir: Path
    overrides: tuple[str, ...]

    def argv(self, config: str) -> list[str]:
        return ["main", f"--config={config}:{self.words}", f"--workdir={self.workdir}", *self.overrides]


def jobs_of(config: Any, workdir: Path, argv: Sequence[str]) -> list[Job]:
    """The jobs of a config's grid."""
    overrides = tuple(word for word in argv if word.startswith("--config."))
    return [Job(words, workdir / re.sub(r"[^A-Za-z0-9.=-]+", "_", words), overrides) for words in config.grid]


def run_here(config: str, jobs: Sequence[Job], stop: Callable[[], bool], check_only: bool) -> list[str]:
    """Runs the jobs one after another in this process; the data is read once. Returns one line per failed job."""
    import jax

    from fedjax_seg import config as configuration
    from fedjax_seg import experiment

    loaded: dict[str, Any] = {}

    def load(settings: Any, scratch: Path) -> Any:
        key = repr(
            sorted(
                (k, v)
                for k, v in configuration.flat(settings).items()
                if k.split(".")[0] in ("data", "synthesis", "protocol")
            )
        )
        if key not in loaded:
            loaded.clear()
            loaded[key] = experiment.load_data(settings, scratch)
        return loaded[key]

    failed = []
    for number, job in enumerate(jobs):
        print(f"[{number + 1}/{len(jobs)}] {job.words}", file=sys.stderr, flush=True)
        try:
            settings = main.parse(job.argv(config), __doc__ or "").config
            configuration.validate(settings)
            if check_only:
                print("\n".join(load(settings, job.workdir).summary))
                continue
            experiment.run(settings, job.workdir, stop, argv=job.argv(Path(config).name), load=load)
        except checks.UserError as error:
            failed.append(f"{job.words}: {error}")
            print(f"error: {failed[-1]}", file=sys.stderr, flush=True)
        jax.clear_caches()  # every job compiles its own programs; none of the last one's is needed again
        gc.collect()
    return failed


def command(argv: Sequence[str]) -> int:
    values = main.parse(argv, __doc__ or "")
    if not values.config.get("grid"):
        raise checks.UserError("--config: this config declares no grid; run it with fedjax_seg.main")
    path = next(w.split("=", 1)[1] for w in argv if w.startswith("--config=")).partition(":")[0]
    workdir = Path(os.path.abspath(values.workdir))
    jobs, began = jobs_of(values.config, workdir, argv), time.monotonic()
    stop = main.stop_on_signals()
    main.prepare_jax(values.config.get("devices", 0))
    from fedjax_seg.experiment import Preempted
    from fedjax_seg.report import sweep_report, tables

    try:
        failed = run_here(path, jobs, stop, values.check_data)
    except Preempted:
        return main.PREEMPTED
    if not values.check_data:
        done = [tables.read_run(job.workdir) for job in jobs if (job.workdir / "DONE").exists()]
        if done:
            print(f"report: {sweep_report.write(workdir, done)}", file=sys.stderr)
        print(f"{len(done)} of {len(jobs)} runs, {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    if failed:
        raise checks.UserError(f"{len(failed)} run(s) failed: " + " | ".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main.guarded(command, sys.argv))
