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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_seg import config as configuration
from fedjax_seg import main
from fedjax_seg.core import checks


class Job(NamedTuple):
    """One run of a sweep: its config file with the words for get_config, its folder, and the shared overrides."""

    file: str
    words: str
    workdir: Path
    overrides: tuple[str, ...]

    def argv(self) -> list[str]:
        """The command that runs this job alone."""
        return ["main.py", f"--config={self.file}:{self.words}", f"--workdir={self.workdir}", *self.overrides]

    def config(self) -> Any:
        return main.configured(f"{self.file}:{self.words}", self.overrides)


def jobs_of(asked: main.Command, workdir: Path) -> list[Job]:
    """The jobs of a config's grid.

    Raises: UserError where there is none, or where two would share a folder.
    """
    if not asked.config.get("grid"):
        raise checks.UserError(f"--config: {asked.file} declares no grid; run it with fedjax_seg.main")
    folders: dict[str, str] = {}
    for words in asked.config.grid:
        name = re.sub(r"[^A-Za-z0-9.=-]+", "_", words).strip(".")
        if not name or name in folders:
            raise checks.UserError(f"config.grid: {words!r} {'is listed twice' if name else 'names no folder'}")
        folders[name] = words
    return [Job(asked.file, words, workdir / name, asked.overrides) for name, words in folders.items()]


def remembering(load: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
    """`load`, but runs in a row whose data are the same share them in memory."""
    kept: dict[str, Any] = {}

    def loaded(config: Any, scratch: Path) -> Any:
        parts = ("data", "synthesis")
        key = repr([(k, v) for k, v in configuration.flat(config).items() if k.split(".")[0] in parts])
        if key not in kept:
            kept.clear()
            kept[key] = load(config, scratch)
        return kept[key]

    return loaded


def run_here(jobs: Sequence[Job], stop: Callable[[], bool], check_only: bool) -> list[str]:
    """Runs the jobs one after another in this process. Returns a line per failed job.

    Raises: Preempted after `stop`.
    """
    import jax

    from fedjax_seg import experiment

    load, failed = remembering(experiment.read_data), []
    for number, job in enumerate(jobs):
        if stop():
            raise experiment.Preempted(f"preempted before {job.words}")
        print(f"[{number + 1}/{len(jobs)}] {job.words}", file=sys.stderr, flush=True)
        try:
            config = job.config()
            configuration.validate(config)
            if check_only:
                print("\n".join(load(config, job.workdir).summary))
            else:
                experiment.run(config, job.workdir, stop, argv=job.argv(), load=load)
        except experiment.Preempted:
            raise
        except Exception as error:  # one bad run must not cost the others, not even by a bug
            if not isinstance(error, checks.UserError | OSError):
                traceback.print_exc()
            failed.append(f"{job.words}: {main.told(error)}")
            print(f"error: {failed[-1]}", file=sys.stderr, flush=True)
        jax.clear_caches()  # every job compiles its own programs; none of the last one's is needed again
        gc.collect()
    return failed


def command(argv: Sequence[str]) -> int:
    asked = main.parse(argv, __doc__ or "")
    workdir, began = Path(os.path.abspath(os.path.expanduser(asked.workdir))), time.monotonic()
    jobs = jobs_of(asked, workdir)
    configuration.validate(asked.config)
    stop = main.stop_on_signals()
    main.prepare_jax(asked.config.devices)
    from fedjax_seg.experiment import Preempted
    from fedjax_seg.report import runs, sweep_report
    from fedjax_seg.report.writer import RunFolder

    try:
        with RunFolder(workdir):  # for its lock: one sweep at a time
            failed = run_here(jobs, stop, asked.check_data)
            if not asked.check_data:
                done = [runs.read_run(job.workdir) for job in jobs if (job.workdir / "DONE").exists()]
                if done:
                    print(f"report: {sweep_report.write(workdir, done)}", file=sys.stderr)
                print(
                    f"{len(done)} of {len(jobs)} runs, {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr
                )
    except Preempted as error:
        print(f"{error}; the same command continues", file=sys.stderr)
        return main.PREEMPTED
    if failed:
        raise checks.UserError(f"{len(failed)} run(s) failed: " + " | ".join(line.splitlines()[0] for line in failed))
    return 0


if __name__ == "__main__":
    sys.exit(main.guarded(command, sys.argv))
