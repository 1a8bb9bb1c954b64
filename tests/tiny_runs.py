"""Whole runs in a second or two: a synthetic PCP folder, a command line, and what two equal runs must share."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from fedjax_seg import main
from fedjax_seg.synthesis.connectomes import connectomes

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "fedhavg_quickstart.py")
SITES = (("NYU", 12), ("UM", 11), ("UCLA", 10))
ROIS = 8  # 28 features
METRICS = ("metrics.jsonl", "metrics.csv", "per_case.csv", "summary.json")


def folder(path, **options):
    """A PCP folder of three sites; returns it as text."""
    return str(connectomes(path, **{"sites": SITES, "rois": ROIS, "length": 24} | options))


def words(root, workdir, *overrides, config=QUICKSTART):
    """A command line: two folds on one device, four rounds, a checkpoint every round, kept momentum."""
    settings = {
        "data.root": root,
        "data.sites": "NYU,UM,UCLA",
        "data.folds": 2,
        "model.hidden": "(8,)",
        "client.keep_optimizer": "true",
        "rounds": 4,
        "eval_every": 2,
        "checkpoint.every_rounds": 1,
        "devices": 1,
    }
    tiny = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["main.py", f"--config={config}", f"--workdir={workdir}", *tiny, *overrides]


def config(root, *overrides):
    """The config of `words`, for experiment.run."""
    file, rest = main._config_file(words(root, "unused", *overrides)[1:])
    return main.configured(file, [word for word in rest if not word.startswith("--workdir")])


def call(argv, command=main.command):
    """The exit status of a command in this process. Signal handlers are put back."""
    jax.devices()  # the backend has started: the command takes its devices as they are
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        return main.guarded(command, argv)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def start(argv, module="fedjax_seg.main", **options):
    """The command as a process of its own, from the checkout."""
    command = [sys.executable, "-m", module, *argv[1:]]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams | options)


def finish(process, seconds=300):
    """(exit status, stdout, stderr) of a process."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def wait_for(condition, process, seconds=300):
    """Polls until condition() holds; fails where the process ends before."""
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.002)


def round_of(workdir):
    """The newest checkpoint's round, 0 where there is none."""
    saves = Path(workdir) / "checkpoints"
    names = [p.parent.name for p in saves.glob("*/fedjax_seg.json")] if saves.is_dir() else []
    return max((int(n) for n in names if n.isdecimal()), default=0)


def arrays(workdir):
    """{path: array} and the marker of the last checkpoint, read by orbax alone."""
    import orbax.checkpoint as ocp

    saved = Path(workdir).resolve() / "checkpoints" / str(round_of(workdir))
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(saved / "arrays")
    return {k: np.asarray(v) for k, v in found.items()}, json.loads((saved / "fedjax_seg.json").read_text())


def assert_same_run(one, two):
    """Bitwise the same metrics, cases, summary and checkpoint."""
    for name in METRICS:
        assert (Path(one) / name).read_bytes() == (Path(two) / name).read_bytes(), name
    (a, about_a), (b, about_b) = arrays(one), arrays(two)
    assert about_a == about_b and a.keys() == b.keys() and a
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


def rows(workdir):
    return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def stamps(workdir):
    """{file: (time of change, size)} of all but LOCK, which names the last process that looked."""
    files = [p for p in Path(workdir).rglob("*") if p.name != "LOCK" and p.is_file()]
    return {str(p.relative_to(workdir)): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}


def one_line(err):
    """The only line on stderr, without 'error: '."""
    assert "Traceback" not in err, err
    (line,) = err.splitlines()
    assert re.match(r"error: \S", line), err
    return line.removeprefix("error: ")
