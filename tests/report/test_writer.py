import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import writer
from fedjax_seg.report.writer import RunFolder

ROW = {"round": 1, "fold": "fold0", "seed": 0, "site": "NYU", "split": "test", "metric": "auc", "value": 0.5, "n": 33}
CASE = {
    "fold": "fold0",
    "seed": 0,
    "site": "a,b",
    "case": "x",
    "patient": "x",
    "label": 1,
    "probability": 0.5,
    "predicted": 1,
}


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", quiet=True) as run:
        yield run


def test_a_second_process_gets_one_line_with_pid_and_host(folder):
    code = "import sys; from fedjax_seg.report.writer import RunFolder; RunFolder(sys.argv[1])"
    second = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True)
    assert second.returncode == 1
    last = second.stderr.splitlines()[-1]
    assert f"workdir {folder.path} is in use by pid {os.getpid()} on {os.uname().nodename};" in last


def test_the_lock_is_free_after_close_and_after_a_refused_attempt(tmp_path):
    first = RunFolder(tmp_path, quiet=True)
    with pytest.raises(UserError, match="in use"):
        RunFolder(tmp_path, quiet=True)
    assert (tmp_path / "LOCK").read_text() == f"{os.getpid()} {os.uname().nodename}\n"
    first.close()
    RunFolder(tmp_path, quiet=True).close()


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(writer.fcntl, "flock", no_locks)
    RunFolder(tmp_path).close()
    assert "has no locks" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"workdir .*file/run cannot be created") as caught:
        RunFolder(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writer.os, "open", read_only)
    with pytest.raises(UserError, match="Read-only"):
        RunFolder(tmp_path)


def test_the_path_is_absolute_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder("runs/a", quiet=True) as run:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.write_text("x.txt", "x")
    assert (tmp_path / "runs/a/x.txt").read_text() == "x"


def test_log_goes_to_the_file_and_to_stderr_unless_quiet(tmp_path, capsys):
    with RunFolder(tmp_path) as run:
        run.log("round 1")
        run.quiet = True
        run.log("round 2")
    assert capsys.readouterr().err == "round 1\n"
    stamped = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in stamped] == ["round 1", "round 2"]


def test_json_is_sorted_strict_and_in_subfolders(folder):
    path = folder.write_json("sub/a.json", {"b": np.float32("nan"), "a": [np.int64(1), float("inf"), np.arange(2)]})
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
    assert json.loads(path.read_text()) == {"a": [1, None, [0, 1]], "b": None}
    assert folder.read_json("sub/a.json") == {"a": [1, None, [0, 1]], "b": None}
    assert folder.read_json("missing.json") is None
    path.write_text("{")
    with pytest.raises(UserError, match=r"a\.json: not readable as JSON"):
        folder.read_json("sub/a.json")


@pytest.mark.parametrize("name", ["../a", "/etc/a", "sub/../../a"])
def test_a_name_outside_the_folder_is_refused(folder, name):
    with pytest.raises(ValueError, match="not a name inside"):
        folder.write_text(name, "")


def test_rows_are_exact_bytes_without_a_clock(folder):
    folder.add_rows([ROW, ROW | {"site": 'U,"M', "value": float("nan"), "n": np.int32(4)}])
    folder.add_rows([ROW | {"value": None, "n": None}])
    first = '{"round": 1, "fold": "fold0", "seed": 0, "site": "NYU", "split": "test", "metric": "auc", '
    assert (folder.path / "metrics.jsonl").read_text() == (
        first + '"value": 0.5, "n": 33}\n'
        '{"round": 1, "fold": "fold0", "seed": 0, "site": "U,\\"M", "split": "test", "metric": "auc", '
        '"value": null, "n": 4}\n' + first + '"value": null, "n": null}\n'
    )
    assert (folder.path / "metrics.csv").read_text() == (
        "round,fold,seed,site,split,metric,value,n\n"
        "1,fold0,0,NYU,test,auc,0.5,33\n"
        '1,fold0,0,"U,""M",test,auc,,4\n'
        "1,fold0,0,NYU,test,auc,,\n"
    )


def test_a_row_with_another_key_is_a_bug(folder):
    with pytest.raises(ValueError, match="keys"):
        folder.add_rows([ROW | {"time": 1.0}])


def test_rewind_leaves_every_round_once(folder):
    folder.add_rows([ROW])
    position = folder.position()
    folder.add_rows([ROW | {"round": 2}])
    whole = [(folder.path / name).read_bytes() for name in writer.METRICS_FILES]
    folder.rewind(json.loads(json.dumps(position)))
    folder.add_rows([ROW | {"round": 2}])
    assert [(folder.path / name).read_bytes() for name in writer.METRICS_FILES] == whole
    folder.rewind({})
    assert folder.position() == {"metrics.jsonl": 0, "metrics.csv": 0}
    folder.add_rows([ROW])
    assert folder.position() == position  # the header is back


@pytest.mark.parametrize("lose", ["cut", "remove"])
def test_rewind_of_a_file_that_lost_rows_is_an_error_and_cuts_nothing(folder, lose):
    folder.add_rows([ROW])
    position = folder.position()
    folder.add_rows([ROW])
    path = folder.path / "metrics.csv"
    os.truncate(path, 10) if lose == "cut" else path.unlink()
    size = (folder.path / "metrics.jsonl").stat().st_size
    with pytest.raises(UserError, match=r"metrics\.csv: (10|0) bytes found, 72 expected .* edited or lost"):
        folder.rewind(position)
    assert (folder.path / "metrics.jsonl").stat().st_size == size


def test_cases_and_finish(folder):
    folder.write_cases([CASE | {"correct": 1, "loss": np.float32(0.5)}])
    assert (folder.path / "per_case.csv").read_text() == (
        'fold,seed,site,case,patient,label,probability,predicted,correct,loss\nfold0,0,"a,b",x,x,1,0.5,1,1,0.5\n'
    )
    (folder.path / "mine.txt").write_text("the user's")
    folder.finish({"round": 2})
    assert (folder.path / "DONE").exists() and json.loads((folder.path / "summary.json").read_text()) == {"round": 2}
    folder.start()
    assert not (folder.path / "DONE").exists()
    assert (folder.path / "mine.txt").exists() and (folder.path / "summary.json").exists()
    folder.add_timing({"round": 1, "seconds": 0.25})
    assert (folder.path / "timing.jsonl").read_text() == '{"round": 1, "seconds": 0.25}\n'


def test_a_full_disk_keeps_the_old_file_and_says_so(folder, monkeypatch):
    folder.finish({"round": 1})
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", full_disk)
        with pytest.raises(UserError, match=r"summary\.json: no space left.*free some space"):
            folder.finish({"round": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == {"round": 1}
    assert not list(folder.path.glob(".*.tmp"))


def test_a_disk_that_fills_within_a_row_leaves_whole_rows_in_both_files(folder, monkeypatch):
    folder.add_rows([ROW])
    before = [(folder.path / name).read_bytes() for name in writer.METRICS_FILES]
    write, calls = os.write, []

    def half(fd, data):
        calls.append(fd)
        if len(calls) == 1:  # metrics.jsonl still fits
            return write(fd, data)
        if len(calls) == 2:  # half of the line of metrics.csv fits
            return write(fd, bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "write", half)
        with pytest.raises(UserError, match=r"metrics\.csv: no space left"):
            folder.add_rows([ROW | {"round": 2}])
    assert len(calls) == 3
    assert [(folder.path / name).read_bytes() for name in writer.METRICS_FILES] == before
