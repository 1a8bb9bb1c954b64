"""What a run leaves in its folder, and when."""

import csv
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import jax
import pytest
from tiny_runs import METRICS, QUICKSTART, ROOT, call, config, rows, words

from fedjax_seg import config as configuration
from fedjax_seg import experiment
from fedjax_seg.data import federated
from fedjax_seg.report.writer import CASE_KEYS, ROW_KEYS, RunFolder

pytestmark = pytest.mark.usefixtures("quick_compile")
WINDOW = ("--config.sampler.name=sliding_window", "--config.sampler.size=2", "--config.rounds=3")


@pytest.fixture(scope="module")
def run(pcp_root, quick_compile, tmp_path_factory):
    """A finished run of the command; read only."""
    workdir = tmp_path_factory.mktemp("folder") / "run"
    assert call(words(pcp_root, workdir, *WINDOW)) == 0
    return workdir


def test_everything_is_there(run):
    names = {p.relative_to(run).as_posix() for p in run.rglob("*") if "checkpoints/3/" not in p.as_posix()}
    figures = {
        f"figures/{n}.{s}"
        for n in ("confusion", "convergence", "site_boxes", "update_norms", "participation")
        for s in ("png", "csv")
    }
    expected = {
        *("config.json", "manifest.json", "metrics.jsonl", "metrics.csv", "per_case.csv", "summary.json"),
        *("checkpoints", "checkpoints/3", "figures", "report.md", "report.html", "train.log", "DONE", "timing.jsonl"),
        *("LOCK", "privacy.json", "cohort.csv", "cohort_flow.csv", "cohort_excluded.csv", "folds.json"),
    }
    assert names == expected | figures
    for path in run.glob("figures/*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_config_and_manifest(run, pcp_root):
    written = json.loads((run / "config.json").read_text())
    assert written == configuration.plain(config(pcp_root, *WINDOW))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["argv"] == words(pcp_root, run, *WINDOW)
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"[0-9a-f]{40}\+?|", manifest["git_revision"])
    assert manifest["seeds"] == [0] and manifest["backend"] == "cpu" and manifest["devices"]
    loaded = experiment.load_data(config(pcp_root), run)
    assert manifest["data_sha256"] == federated.digest(loaded)
    assert re.fullmatch(r"[0-9a-f]{64}", manifest["data"]["phenotypic"]["sha256"])
    assert manifest["data"]["series_sha256"] == loaded.about["series_sha256"]
    assert manifest["client_order"] == ["NYU", "UM", "UCLA"]


def test_rows(run):
    found = rows(run)
    assert all(tuple(row) == ROW_KEYS for row in found)
    with open(run / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found)
    for row, cells in zip(found, table):
        assert {k: "" if v is None else str(v) for k, v in row.items()} == cells
    tested = {(r["round"], r["fold"]) for r in found if r["split"] == "test"}
    assert tested == {(t, f) for t in (0, 2, 3) for f in ("fold0", "fold1")}  # first, every second, last
    assert len({tuple(r[k] for k in ROW_KEYS[:6]) for r in found}) == len(found)  # nothing twice
    # every round's participants: a short window of one after each of two
    trained = [(r["round"], r["site"]) for r in found if r["metric"] == "update_norm" and r["fold"] == "fold1"]
    assert [sum(t == round for t, _ in trained) for round in (1, 2, 3)] == [2, 1, 2]
    summary = json.loads((run / "summary.json").read_text())
    both = [r["site"] for r in found if r["metric"] == "update_norm"]
    assert summary["participation"] == {site: both.count(site) for site in ("NYU", "UM", "UCLA")}


def test_cases(run):
    with open(run / "per_case.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == (*CASE_KEYS, "label", "probability", "predicted", "correct", "loss")
    assert len(table) == len({row["case"] for row in table}) == 33  # two folds: every subject is tested once
    accuracy = {}
    for row in table:
        accuracy.setdefault((row["fold"], row["site"]), []).append(int(row["label"] == row["predicted"]))
    summary = json.loads((run / "summary.json").read_text())
    for r in summary["results"]:
        if r["metric"] == "accuracy" and (r["fold"], r["site"]) in accuracy:
            own = accuracy[r["fold"], r["site"]]
            assert r["n"] == len(own) and r["value"] == pytest.approx(sum(own) / len(own))


def test_no_clock_but_in_timing(run):
    for name in METRICS:
        assert not re.search(r"second|\d\d:\d\d", (run / name).read_text()), name
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    rounds = [t for t in timing if t["event"] == "rounds"]
    assert [(t["from"], t["to"]) for t in rounds] == [(0, 1), (1, 2), (2, 3)]
    assert all(t["wall_seconds" if t["event"] == "resources" else "seconds"] > 0 for t in timing)
    assert all(t["executed_steps"] == t["real_steps"] > 0 for t in rounds)  # one lane: nothing is run for nobody


class Loads(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "poster")]


def test_report_needs_nothing_else(run):
    page = (run / "report.html").read_text()
    loads = Loads()
    loads.feed(page)
    assert len(loads.found) == 5
    assert all(link.startswith("data:image/png;base64,") for link in loads.found)
    assert "http" not in page and "@import" not in page and "url(" not in page and "<script" not in page
    text = (run / "report.md").read_text()
    pictures = re.findall(r"!\[.*\]\(<(.+)>\)", text)
    assert len(pictures) == 5 and all((run / path).is_file() for path in pictures)
    assert "FedHAvg-ext" in text and "not for clinical use" in text


def test_log(run):
    lines = (run / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", line) for line in lines)
    assert "backend cpu, 1 of 4 device(s)" in lines[0] and "1 lane(s)" in lines[0]
    assert sum("flow of subjects" in line for line in lines) == 1
    assert [line.split()[2] for line in lines if " round " in line] == ["2/3", "3/3"]  # one line per evaluation
    assert lines[-1].endswith("report.html")


def test_config_and_manifest_are_written_before_the_first_row(pcp_root, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def add_rows(folder, found):
        assert list(found)
        raise Enough

    monkeypatch.setattr(RunFolder, "add_rows", add_rows)
    with pytest.raises(Enough):
        experiment.run(config(pcp_root), tmp_path / "run", quiet=True)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.json", "manifest.json", "train.log", "folds.json", "cohort.csv"} <= names
    assert not {"DONE", "summary.json", "metrics.jsonl"} & names


def test_run_without_flags_in_a_bare_interpreter_with_a_relative_workdir(pcp_root, tmp_path):
    """As in a notebook: absl is blocked from parsing anything, and the working directory changes during the run."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from absl import flags
flags.FlagValues.__call__ = flags.FlagValues.__getattr__ = None
from fedjax_seg import config, experiment
c = config.load({QUICKSTART!r})
c.data.root, c.data.sites, c.data.folds, c.folds = {pcp_root!r}, ("NYU", "UM", "UCLA"), 2, (0,)
c.rounds, c.model.hidden, c.devices = 1, (8,), 1
def load(c, scratch):
    data = experiment.load_data(c, scratch)
    os.chdir("/")
    return data
summary = experiment.run(c, "runs/a", load=load, quiet=True)
assert summary["round"] == 1
print(len(summary["results"]))
"""
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout) > 0 and (tmp_path / "runs" / "a" / "report.html").is_file()
    assert json.loads((tmp_path / "runs" / "a" / "manifest.json").read_text())["argv"][0] == "-c"


def test_relative_workdir_of_the_command(run, pcp_root, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    assert call(words(pcp_root, run.name, *WINDOW)) == 0
    assert capsys.readouterr().err == "already at round 3 of 3: nothing to do\n"
    assert call(words(pcp_root, "new/run", "--check_data")) == 0
    assert call(words(pcp_root, "new/run", "--config.data.bad_roi=none")) == 1
    assert not (run.parent / "new").exists() or [p.name for p in (run.parent / "new" / "run").iterdir()] == ["LOCK"]
