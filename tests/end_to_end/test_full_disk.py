"""A disk that runs full at any moment: one line, nothing written before is lost, and the same command goes on."""

import errno
import os

import pytest
from tiny_runs import assert_same_run, call, config, one_line, round_of, rows, words

from fedjax_seg import experiment
from fedjax_seg.report import checkpoint, writer

pytestmark = pytest.mark.usefixtures("quick_compile")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
ONE = ("--config.folds=0", "--config.rounds=3")


@pytest.fixture(scope="module")
def whole(pcp_root, quick_compile, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    experiment.run(config(pcp_root, *ONE), workdir, quiet=True)
    return workdir


def metrics(patch, at):
    """metrics.jsonl takes half of what is appended the `at`-th time."""
    append, count, write = writer.RunFolder._append, [], os.write

    def half(fd, data):
        write(fd, bytes(data)[: len(data) // 2])
        raise FULL

    def limited(folder, name, text):
        count.extend([1] * (name == "metrics.jsonl"))
        with pytest.MonkeyPatch.context() as inner:
            if name == "metrics.jsonl" and len(count) >= at:
                inner.setattr(writer.os, "write", half)
            append(folder, name, text)

    patch.setattr(writer.RunFolder, "_append", limited)


def whole_file(name):
    """(patch, at): the `at`-th file of that name cannot be completed."""

    def limit(patch, at):
        count, replace = [], os.replace

        def limited(source, target):
            count.extend([1] * str(target).endswith(name))
            if str(target).endswith(name) and len(count) >= at:
                raise FULL
            replace(source, target)

        patch.setattr(writer.os, "replace", limited)

    return limit


def arrays_of_checkpoint(patch, at):
    """tensorstore reports a full disk in words of its own, in the middle of the `at`-th checkpoint."""
    original, count = checkpoint.ocp.Checkpointer.save, []

    def save(checkpointer, path, *args, **options):
        count.append(1)
        if len(count) < at:
            return original(checkpointer, path, *args, **options)
        path.mkdir()
        (path / "half").write_bytes(b"x" * 100)
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")

    patch.setattr(checkpoint.ocp.Checkpointer, "save", save)


def little_space(patch, at):
    """Fewer free bytes than the `at`-th checkpoint needs."""
    original, count = checkpoint.shutil.disk_usage, []

    def usage(path):
        count.append(1)
        return original(path)._replace(free=100) if len(count) >= at else original(path)

    patch.setattr(checkpoint.shutil, "disk_usage", usage)


# (what fails, which time, the round of the last whole checkpoint)
MOMENTS = {
    "config.json": (whole_file("config.json"), 1, 0),
    "metrics of round 2": (metrics, 3, 1),
    "arrays of the second checkpoint": (arrays_of_checkpoint, 2, 1),
    "marker of the second checkpoint": (whole_file("fedjax_seg.json"), 2, 1),
    "no room for the third checkpoint": (little_space, 3, 2),
    "a figure": (whole_file("convergence.png"), 1, 3),
}


@pytest.mark.parametrize("what, at, kept", MOMENTS.values(), ids=MOMENTS)
def test_full_disk(what, at, kept, pcp_root, whole, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        what(patch, at)
        assert call(words(pcp_root, run, *ONE)) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and "o space left on" in last
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert not (run / "DONE").exists()
    assert round_of(run) == kept
    if kept:
        assert max(r["round"] for r in rows(run)) >= kept  # whole lines, and all of them
    experiment.run(config(pcp_root, *ONE), run, quiet=True)
    assert_same_run(run, whole)
    left = [p.name for p in run.rglob("*") if "tmp" in p.name]
    assert not left


def test_full_disk_before_there_is_a_folder(pcp_root, tmp_path, monkeypatch, capsys):
    def refuses(*args, **options):
        raise FULL

    monkeypatch.setattr(writer.Path, "mkdir", refuses)
    assert call(words(pcp_root, tmp_path / "run")) == 1
    assert "no space left" in one_line(capsys.readouterr().err)
