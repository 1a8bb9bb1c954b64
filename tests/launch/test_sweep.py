"""A sweep: one sub-folder a run, resumable, failures named, tables and figures at the end."""

import csv
import json
import signal
from pathlib import Path

import pytest
from tiny_runs import QUICKSTART, arrays, call, finish, one_line, stamps, start, wait_for

from fedjax_seg import experiment, main
from fedjax_seg.report import run_report
from fedjax_seg.report.writer import RunFolder
from launch import sweep

GRID = f'''
"""A tiny grid of rules."""
from fedjax_seg import config as configuration


def get_config(words="grid"):
    c = configuration.load({QUICKSTART!r})
    c.grid = ("mean", "median", "trimmed_mean") if words == "grid" else ()
    c.data.sites, c.data.folds, c.model.hidden = ("NYU", "UM", "UCLA"), 2, (8,)
    c.rounds, c.eval_every, c.devices, c.folds = 2, 1, 1, (0, 1)
    if words == "broken":
        raise RuntimeError("out of order")
    if words != "grid":
        configuration.rename(c, "aggregator", words)
        c.label = {{"mean": "FedAvg"}}.get(words, words)
    return c
'''
NAMES = ["mean", "median", "trimmed_mean"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    file = tmp_path_factory.mktemp("grid") / "rules.py"
    file.write_text(GRID)
    return file


def words(grid, root, workdir, *overrides):
    return ["sweep.py", f"--config={grid}", f"--workdir={workdir}", f"--config.data.root={root}", *overrides]


@pytest.fixture(scope="module")
def done(grid, pcp_root, quick_compile, tmp_path_factory):
    """A finished sweep, how often data were read, and the seen figures; read only."""
    workdir, reads = tmp_path_factory.mktemp("sweep") / "all", []
    load = experiment.read_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "read_data", lambda config, scratch: reads.append(1) or load(config, scratch))
        patch.setattr(run_report, "_course", lambda *unused: [])  # the figures of single runs have tests of their own
        assert call(words(grid, pcp_root, workdir), sweep.command) == 0
    return workdir, len(reads)


def test_a_folder_per_run_and_the_data_read_once(done):
    workdir, reads = done
    assert reads == 1
    assert sorted(p.name for p in workdir.iterdir() if p.is_dir()) == sorted([*NAMES, "figures", "tables"])
    for name in NAMES:
        assert (workdir / name / "DONE").is_file()
        written = json.loads((workdir / name / "config.json").read_text())
        assert written["aggregator"]["name"] == name and written["rounds"] == 2
    initial = [arrays(workdir / n)[1]["meta"]["data"] for n in NAMES]
    assert len(set(initial)) == 1


def test_tables_figures_and_report(done):
    workdir, _ = done
    with open(workdir / "tables" / "synthetic_sites.csv", newline="") as file:
        table = list(csv.reader(file))
    text = "\n".join(",".join(row) for row in table)
    for name in ("FedAvg", "median", "trimmed_mean", "NYU", "UM", "UCLA"):
        assert name in text
    for suffix, mark in (("md", "|"), ("tex", "\\toprule")):
        assert mark in (workdir / "tables" / f"synthetic_sites.{suffix}").read_text()
    for suffix in ("csv", "md", "tex"):
        assert "median" in (workdir / "tables" / f"synthetic_paired_test.{suffix}").read_text()
    figures = {p.name for p in (workdir / "figures").iterdir()}
    assert {"synthetic_convergence.png", "synthetic_convergence.csv", "synthetic_boxes.png"} <= figures
    page = (workdir / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len([f for f in figures if f.endswith(".png")])
    assert "trimmed_mean (round 2)" in (workdir / "report.md").read_text()


def test_the_means_in_the_table_are_those_of_the_runs(done):
    workdir, _ = done
    summary = json.loads((workdir / "median" / "summary.json").read_text())
    values = [r["value"] for r in summary["results"] if r["site"] == "UM" and r["metric"] == "accuracy"]
    assert len(values) == 2
    cell = f"{sum(values) / 2:.3f}"
    rows = (workdir / "tables" / "synthetic_sites.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith("| median")]
    assert cell.lstrip("0") in row


def test_the_second_call_makes_the_tables_only(done, grid, pcp_root, monkeypatch, capsys):
    workdir, _ = done
    before = {name: stamps(workdir / name) for name in NAMES}
    (workdir / "report.html").unlink()

    def never(*unused):
        raise AssertionError("data were read again")

    monkeypatch.setattr(experiment, "read_data", never)
    assert call(words(grid, pcp_root, workdir), sweep.command) == 0
    assert {name: stamps(workdir / name) for name in NAMES} == before
    assert (workdir / "report.html").is_file()
    err = capsys.readouterr().err
    assert err.count("already at round 2 of 2: nothing to do") == 3 and "3 of 3 runs" in err


def test_a_failing_run_is_named_and_the_others_go_on(grid, pcp_root, tmp_path, quick_compile, no_figures, capsys):
    chosen = "--config.grid=('mean','medain','broken')"
    assert call(words(grid, pcp_root, tmp_path, chosen, "--config.rounds=1"), sweep.command) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: 2 run(s) failed: medain: ") and " | broken: " in err[-1]
    assert "unknown name 'medain'; did you mean 'median'" in err[-1]
    assert err[-1].endswith("line 12: RuntimeError: out of order")
    assert "Traceback" not in "\n".join(err)
    assert "1 of 3 runs" in err[-2]
    assert (tmp_path / "mean" / "DONE").is_file() and (tmp_path / "report.html").is_file()


def test_a_bug_in_one_run_keeps_its_traceback_and_the_others_go_on(grid, pcp_root, tmp_path, monkeypatch, capsys):
    seen = []

    def run(config, workdir, *unused, **options):
        seen.append(config.aggregator.name)
        if config.aggregator.name == "mean":
            raise RuntimeError("a bug")

    monkeypatch.setattr(experiment, "run", run)
    assert call(words(grid, pcp_root, tmp_path), sweep.command) == 1
    err = capsys.readouterr().err
    assert seen == NAMES
    assert "Traceback" in err and err.splitlines()[-1] == "error: 1 run(s) failed: mean: RuntimeError: a bug"


FORMS = [
    lambda grid, work: [f"--config={grid}", f"--workdir={work}"],
    lambda grid, work: ["--config", str(grid), "--workdir", str(work)],
    lambda grid, work: ["-config", f"{grid}:grid", f"--workdir={work}"],
]


@pytest.mark.parametrize("form", FORMS, ids=["equals", "space", "words"])
def test_forms_of_the_command(form, grid, tmp_path, monkeypatch):
    """Every form reaches every run with every override."""
    ran = []
    monkeypatch.setattr(experiment, "run", lambda config, workdir, *unused, argv, **options: ran.append((config, argv)))
    given = [*form(grid, tmp_path), "--config.rounds", "7", "--noconfig.data.strict", "--config.seeds=1,2"]
    assert call(["sweep.py", *given], sweep.command) == 0
    assert [config.aggregator.name for config, _ in ran] == NAMES
    for (config, argv), name in zip(ran, NAMES):
        assert (config.rounds, config.seeds, config.data.strict) == (7, (1, 2), False)
        alone = main.parse(argv, "")  # manifest.json holds a command that runs this job alone
        assert alone.workdir == str(tmp_path / name) and alone.config == config


def test_flagfile(grid, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(experiment, "run", lambda config, *unused, **options: ran.append(config.rounds))
    (tmp_path / "flags").write_text(f"--config={grid}\n--config.rounds=9\n")
    assert call(["sweep.py", f"--flagfile={tmp_path / 'flags'}", f"--workdir={tmp_path}"], sweep.command) == 0
    assert ran == [9, 9, 9]


MISTAKES = {
    "no grid": ([f"--config={QUICKSTART}"], "declares no grid; run it with fedjax_seg.main"),
    "no config": ([], "--config: missing"),
    "twice": (["GRID", "--config.grid=('mean','mean')"], "'mean' is listed twice"),
    "one folder for two": (["GRID", "--config.grid=('a,b','a_b')"], "'a_b' is listed twice"),
    "no folder": (["GRID", "--config.grid=('..',)"], "'..' names no folder"),
    "typo": (["GRID", "--config.round=1"], "did you mean 'rounds'"),
    "value": (["GRID", "--config.rounds=0"], "config.rounds: 0 given"),
}


@pytest.mark.parametrize("given, said", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(given, said, grid, tmp_path, capsys):
    given = [f"--config={grid}" if word == "GRID" else word for word in given]
    assert call(["sweep.py", *given, f"--workdir={tmp_path / 'all'}"], sweep.command) == 1
    assert said in one_line(capsys.readouterr().err)
    assert not (tmp_path / "all").exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        call(["sweep.py", "--help"], sweep.command)
    assert stopped.value.code == 0
    assert "python -m launch.sweep" in capsys.readouterr().out


def test_one_sweep_at_a_time(grid, pcp_root, tmp_path, capsys):
    with RunFolder(tmp_path):
        assert call(words(grid, pcp_root, tmp_path), sweep.command) == 1
    assert "in use by pid" in one_line(capsys.readouterr().err)


def test_check_data_reads_and_writes_nothing_else(grid, pcp_root, tmp_path, capsys):
    assert call(words(grid, pcp_root, tmp_path, "--check_data"), sweep.command) == 0
    assert capsys.readouterr().out.count("flow of subjects") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["LOCK"]


def test_sigterm_stops_the_sweep_and_the_same_command_goes_on(grid, pcp_root, done, tmp_path, capsys):
    command = words(grid, pcp_root, tmp_path / "all")
    process = start(command, "launch.sweep")
    wait_for(lambda: (tmp_path / "all" / "mean" / "manifest.json").exists(), process)
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 75 and "the same command continues" in err.splitlines()[-1]
    assert not (Path(tmp_path) / "all" / "median").exists()
    asked = main.parse(command, "")
    jobs = sweep.jobs_of(asked, tmp_path / "all")
    assert [job.words for job in jobs] == NAMES
    with pytest.raises(experiment.Preempted):
        sweep.run_here(jobs, lambda: True, check_only=False)
