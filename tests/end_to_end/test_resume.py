"""The same command continues a run, bit for bit; and nothing of anybody is lost on the way."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from tiny_runs import (
    METRICS,
    arrays,
    assert_same_run,
    call,
    config,
    finish,
    one_line,
    round_of,
    rows,
    stamps,
    start,
    wait_for,
    words,
)

from fedjax_seg import experiment
from fedjax_seg.core.checks import UserError
from fedjax_seg.report.writer import RunFolder

pytestmark = pytest.mark.usefixtures("quick_compile", "no_figures")

WINDOW = ("--config.sampler.name=sliding_window", "--config.sampler.size=2", "--config.rounds=10")
# An optimiser state on the server, one kept per client, a learning rate that follows the global round, empty rounds.
POISSON = (
    *("--config.sampler.name=poisson", "--config.sampler.q=0.4", "--config.rounds=6", "--config.folds=0"),
    *("--config.server.name=adam", "--config.server.lr=0.01", "--config.aggregator.name=median"),
    *("--config.client.schedule=exponential", "--config.client.schedule_decay=0.5"),
)


def stop_at(workdir, round):
    """A `stop` that asks once the checkpoint of `round` is there."""
    return lambda: round_of(workdir) >= round


@pytest.fixture(scope="module")
def whole(pcp_root, quick_compile, tmp_path_factory):
    """An uninterrupted run of the default four rounds; read only."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    experiment.run(config(pcp_root), workdir, quiet=True)
    return workdir


@pytest.fixture(scope="module")
def six(pcp_root, quick_compile, tmp_path_factory):
    """The same with six rounds."""
    workdir = tmp_path_factory.mktemp("six") / "run"
    experiment.run(config(pcp_root, "--config.rounds=6"), workdir, quiet=True)
    return workdir


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of `whole` to work on."""
    return Path(shutil.copytree(whole, tmp_path / "copied" / "run"))


def test_two_runs_are_the_same(whole, pcp_root, tmp_path):
    experiment.run(config(pcp_root), tmp_path / "again", quiet=True)
    assert_same_run(whole, tmp_path / "again")
    assert {r["round"] for r in rows(whole)} == {0, 1, 2, 3, 4}


def test_killed_twice_equals_uninterrupted(pcp_root, tmp_path):
    """kill -9 as soon as a checkpoint is there, and again some checkpoints later."""
    killed = words(pcp_root, tmp_path / "killed", *WINDOW)
    for at in (1, 4):
        process = start(killed)
        wait_for(lambda at=at: round_of(tmp_path / "killed") >= at, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed" / "DONE").exists()
        assert at <= round_of(tmp_path / "killed") < 10
    status, _, err = finish(start(killed))
    assert status == 0, err
    assert call(words(pcp_root, tmp_path / "whole", *WINDOW)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    saved = arrays(tmp_path / "whole")[0]
    assert any("personal/optimizer" in name for name in saved)  # the clients' momentum was part of it
    trained = [(r["round"], r["fold"]) for r in rows(tmp_path / "whole") if r["metric"] == "update_norm"]
    assert [trained.count((t, "fold0")) for t in range(1, 11)] == [2, 1] * 5  # windows of two over three clients


def test_sigterm_saves_and_exits_75(pcp_root, whole, tmp_path):
    command = words(pcp_root, tmp_path / "run")
    process = start(command)
    # While it still compiles: one device call is done, saved, and left.
    wait_for(lambda: (tmp_path / "run" / "manifest.json").exists(), process)
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 75 and "Traceback" not in err
    assert "preempted at round 1 of 4; the same command continues" in err.splitlines()
    assert round_of(tmp_path / "run") == 1 and not (tmp_path / "run" / "DONE").exists()
    assert call(command) == 0
    assert "continuing at round 1 of 4" in (tmp_path / "run" / "train.log").read_text()
    assert_same_run(tmp_path / "run", whole)


def test_stopped_again_and_again_with_poisson_and_server_adam(pcp_root, tmp_path):
    settings, parts = config(pcp_root, *POISSON), tmp_path / "parts"
    experiment.run(settings, tmp_path / "whole", quiet=True)
    for stop, reached in ((lambda: True, 1), (stop_at(parts, 3), 4)):
        with pytest.raises(experiment.Preempted):
            experiment.run(settings, parts, stop, quiet=True)
        assert round_of(parts) == reached
    experiment.run(settings, parts, stop_at(parts, 6), quiet=True)  # after the last round nothing is left to stop
    assert_same_run(tmp_path / "whole", parts)
    trained = {r["round"] for r in rows(parts) if r["metric"] == "update_norm"}
    assert trained < set(range(1, 7))  # a round of nobody was among them
    rates = {r["round"]: r["value"] for r in rows(parts) if r["metric"] == "lr"}
    assert rates == pytest.approx({t: 0.003 * 0.5 ** (t - 1) for t in trained})


def test_more_rounds_continue_beside_foreign_things(pcp_root, copy, six):
    saves = copy / "checkpoints"
    for name in ("1", "3000", "notes", "4.bak"):
        (saves / name).mkdir()
        (saves / name / "mine").write_text(name)
    (saves / "readme").write_text("mine")
    assert call(words(pcp_root, copy, "--config.rounds=6")) == 0
    for name in ("1", "3000", "notes", "4.bak"):
        assert (saves / name / "mine").read_text() == name
    assert (saves / "readme").read_text() == "mine"
    assert {p.name for p in saves.iterdir()} == {"1", "3000", "notes", "4.bak", "readme", "6"}
    assert round_of(copy) == 6
    assert_same_run(copy, six)


def test_a_copy_continues_elsewhere_with_other_lanes_and_devices(pcp_root, copy, six):
    """The data has moved, too. None of it changes the numbers, but for the last bits of a sum."""
    elsewhere = Path(shutil.copytree(pcp_root, copy.parent / "moved"))
    assert call(words(elsewhere, copy, "--config.rounds=6", "--config.lanes=3", "--config.devices=4")) == 0
    assert "4 of 4 device(s)" in (copy / "train.log").read_text() and "3 lane(s)" in (copy / "train.log").read_text()
    one, two = arrays(copy)[0], arrays(six)[0]
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-6), name


def test_fewer_rounds_say_so_and_touch_nothing(pcp_root, copy, capsys):
    before = stamps(copy)
    assert call(words(pcp_root, copy, "--config.rounds=2")) == 0
    assert capsys.readouterr().err == "already at round 4 of 2: nothing to do\n"
    assert stamps(copy) == before


def test_a_finished_run_has_nothing_to_do(pcp_root, copy, capsys):
    before = stamps(copy)
    assert call(words(pcp_root, copy)) == 0
    assert capsys.readouterr().err == "already at round 4 of 4: nothing to do\n"
    shutil.rmtree(copy / "checkpoints")  # not needed by a finished run
    assert call(words(pcp_root, copy)) == 0
    assert stamps(copy) == {k: v for k, v in before.items() if not k.startswith("checkpoints")}
    capsys.readouterr()
    assert call(words(pcp_root, copy, "--config.rounds=6")) == 1  # but to go on it is; the results stay
    assert "finished at round 4, its checkpoint is gone" in one_line(capsys.readouterr().err)
    assert stamps(copy) == {k: v for k, v in before.items() if not k.startswith("checkpoints")}


def test_fewer_rounds_than_an_unfinished_run_has(pcp_root, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(experiment.Preempted):
        experiment.run(config(pcp_root), run, stop_at(run, 2), quiet=True)
    before = stamps(run)
    assert call(words(pcp_root, run, "--config.rounds=2")) == 0
    assert capsys.readouterr().err == "already at round 3 of 2: nothing to do\n"
    assert stamps(run) == before


OTHERS = {
    "--config.model.hidden=(9,)": "config.model.hidden was [8] and is now [9]",
    "--config.client.lr=0.5": "config.client.lr was 0.003 and is now 0.5",
    "--config.seeds=0,1": "config.seeds was [0] and is now [0, 1]",
    "--config.data.folds=3": "config.data.folds was 2 and is now 3",
    "--config.aggregator.name=mean": "config.aggregator.c was 2.0 and is now None",
}


@pytest.mark.parametrize("override, said", OTHERS.items())
def test_another_config_is_refused(override, said, pcp_root, copy, capsys):
    before = stamps(copy)
    assert call(words(pcp_root, copy, override, "--config.rounds=9")) == 1
    assert said in one_line(capsys.readouterr().err)
    assert stamps(copy) == before


def test_a_checkpoint_of_another_shape_names_the_leaf(pcp_root, copy, capsys):
    """As where somebody edits config.json: the first path that differs is told, and both shapes."""
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("8\n    ]", "9\n    ]"))
    before = stamps(copy)
    assert call(words(pcp_root, copy, "--config.model.hidden=(9,)", "--config.rounds=6")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "params/Dense_0/bias is float32 [2, 8] in the checkpoint and float32 [2, 9]" in lines[-1]
    assert lines[-1].startswith("error: ")
    changed = {k for k, v in stamps(copy).items() if before.get(k) != v}
    assert changed == {"train.log"}


def test_changed_data_are_refused(pcp_root, copy, tmp_path, capsys):
    changed = Path(shutil.copytree(pcp_root, tmp_path / "changed"))
    series = sorted(changed.rglob("UM_*.1D"))[0]
    lines = series.read_text().splitlines(keepends=True)
    series.write_text("".join([lines[0], *lines[2:]]))  # one time point less
    before = stamps(copy)
    assert call(words(str(changed), copy, "--config.rounds=6")) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and "the data has changed" in err.splitlines()[-1]
    assert {k for k, v in stamps(copy).items() if before.get(k) != v} == {"train.log"}


def test_a_workdir_in_use_is_one_line(pcp_root, copy, capsys):
    before = stamps(copy)
    with RunFolder(copy):
        assert call(words(pcp_root, copy)) == 1
        line = one_line(capsys.readouterr().err)
        assert f"in use by pid {os.getpid()}" in line and str(copy) in line
    assert stamps(copy) == before
    assert call(words(pcp_root, copy)) == 0


def test_a_damaged_metrics_file_is_told(pcp_root, copy, capsys):
    (copy / "metrics.jsonl").write_text("")
    assert call(words(pcp_root, copy, "--config.rounds=6")) == 1
    assert "metrics.jsonl: 0 bytes found" in capsys.readouterr().err.splitlines()[-1]
    (copy / "config.json").write_text("{")
    assert call(words(pcp_root, copy, "--config.rounds=6")) == 1
    assert "config.json: not readable as JSON" in one_line(capsys.readouterr().err)


def test_a_run_that_diverges_may_go_on_by_skipping(pcp_root, tmp_path):
    """The message says to set on_nonfinite=skip: the same folder must accept it, and keep what it has."""
    broken = (
        "--config.client.lr=1e30",
        "--config.client.keep_optimizer=false",
        "--config.model.norm=false",
        "--config.folds=0",
    )
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"non-finite values from NYU, UM, UCLA.*--config\.on_nonfinite=skip"):
        experiment.run(config(pcp_root, *broken), run, quiet=True)
    assert any(r["metric"] == "update_norm" and r["value"] is None for r in rows(run))  # the curve up to the end
    summary = experiment.run(config(pcp_root, *broken, "--config.on_nonfinite=skip"), run, quiet=True)
    assert summary["round"] == 4
    assert "skipped" in (run / "train.log").read_text()


def test_metrics_hold_no_clock(whole):
    for name in METRICS:
        text = (whole / name).read_text()
        assert "second" not in text and "time" not in text.replace("time_points", "")
