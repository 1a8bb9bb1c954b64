"""Runs on volumes by command line: the check before, the end by simulated time, a kill midway, what is predicted."""

import csv
import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import tiny_volumes
from tiny_runs import ROOT, assert_same_run, call, finish, one_line, round_of, rows, stamps, start
from tiny_runs import words as pcp_words

from fedjax_seg import experiment, outcome
from fedjax_seg.data import nifti, volumes

sys.path.append(str(ROOT / "tests" / "data"))
from volume_folder import AFFINE, VolumeFolder

THREE = ("--config.rounds=3", "--config.checkpoint.every_rounds=1", "--config.predictions=true", "--config.seeds=2")
STEPS = 4  # of a round: two sites of one training case with two patches
REGIONS = {"ET": (4,), "TC": (1, 4), "WT": (1, 2, 4)}
# A config file that ends its process: it is read by a process of its own, which has nothing of this one.
FILE = """
import sys

sys.path[:0] = {paths!r}
import tiny_volumes
from fedjax_seg import config as configuration
from fedjax_seg.data import volumes

tiny_volumes.register()
volumes.volume_store = tiny_volumes.signalling({step}, {number})


def get_config(words):
    return configuration.load(tiny_volumes.CONFIG, words)
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compile):
    """For all runs of this module; nothing is drawn, and the model is that of single voxels."""
    with pytest.MonkeyPatch.context() as patch:
        tiny_volumes.register(patch)
        patch.setattr(outcome, "_pictures", lambda *unused: None)
        patch.setattr(outcome.run_report, "write", lambda *unused: None)
        yield


@pytest.fixture(scope="module")
def whole(mri_root, compiled_quickly, tmp_path_factory):
    """An uninterrupted run of three rounds, and its command for another folder; the cache is shared."""
    base = tmp_path_factory.mktemp("volumes")

    def command(workdir, *overrides, **options):
        return tiny_volumes.words(mri_root, base / "cache", workdir, *THREE, *overrides, **options)

    assert call(command(base / "run")) == 0
    return SimpleNamespace(folder=base / "run", cache=base / "cache", command=command, root=Path(mri_root))


def predictions(folder):
    return {p.name: p.read_bytes() for p in (folder / "predictions").iterdir()}


def test_predictions_are_files_of_the_test_subjects(whole):
    cases = {row["case"]: row for row in csv.DictReader((whole.folder / "per_case.csv").read_text().splitlines())}
    assert len(cases) == 4 and set(predictions(whole.folder)) == {f"{case}.nii.gz" for case in cases}
    found = set()
    for case, row in cases.items():
        old = nibabel.load(whole.root / case / f"{case}_seg.nii.gz")
        new = nibabel.load(whole.folder / "predictions" / f"{case}.nii.gz")
        assert new.shape == old.shape == (24, 24, 24) and new.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(new.affine, old.affine)
        assert [int(new.header[k]) for k in ("qform_code", "sform_code")] == [
            int(old.header[k]) for k in ("qform_code", "sform_code")
        ]
        truth, guess = np.asanyarray(old.dataobj), np.asanyarray(new.dataobj)
        found |= set(np.unique(guess).tolist())
        for name, labels in REGIONS.items():  # what was scored is what was written
            p, t = np.isin(guess, labels), np.isin(truth, labels)
            assert (p.sum(), t.sum()) == (float(row[f"predicted_voxels_{name}"]), float(row[f"truth_voxels_{name}"]))
            assert float(row[f"dice_{name}"]) == pytest.approx(2 * (p & t).sum() / (p.sum() + t.sum()))
    assert found <= {0, 1, 2, 4} and 4 in found


def damage(cache, dead):
    """As processes that were killed while they wrote, and people who made room, leave a cache; returns a leftover."""
    subjects = sorted(p.parent for p in cache.rglob("meta.json"))
    assert len(subjects) == 8
    (subjects[0] / "image.npy").unlink()
    (subjects[1] / "meta.json").unlink()
    (subjects[2] / "label.npy").write_bytes((subjects[2] / "label.npy").read_bytes()[:-100])
    shutil.rmtree(subjects[3])
    left = subjects[4] / f".image.npy.{socket.gethostname()}.{dead}.tmp"
    left.write_bytes((subjects[4] / "image.npy").read_bytes()[:1000])
    for name in ("image.npy", "meta.json"):
        (subjects[4] / name).unlink()
    return left


@pytest.mark.slow
def test_killed_in_a_round_with_half_a_cache_is_the_same_run(whole, tmp_path):
    """kill -9 in the second round, and a cache half gone."""
    shutil.rmtree(whole.cache)
    file, run = tmp_path / "killing.py", tmp_path / "run"
    paths = [str(ROOT), str(ROOT / "tests")]
    file.write_text(FILE.format(paths=paths, step=STEPS + 3, number=int(signal.SIGKILL)))
    process = start(whole.command(run, config=file))
    status, _, err = finish(process)
    assert status == -signal.SIGKILL, err
    assert round_of(run) == 1 and not (run / "DONE").exists()
    left = damage(whole.cache, process.pid)
    with open(run / "metrics.jsonl", "a") as file:  # as where the round was over, but not yet saved
        file.write('{"round": 2, "fold": "split0", "se')
    assert call(whole.command(run)) == 0
    assert not left.exists()
    log = (run / "train.log").read_text()
    assert "8 of 8 subjects read now" in log and "5 of 8 subjects read now" in log
    assert "continuing at round 1 of 3" in log
    assert_same_run(whole.folder, run)
    assert predictions(run) == predictions(whole.folder)


def test_a_run_ends_with_its_simulated_time(whole, tmp_path, monkeypatch, capsys):
    """SIGTERM in the first round; the time that is spent is known to the process that goes on; then more of it."""
    seconds = [r["value"] for r in rows(whole.folder) if r["metric"] == "simulated_seconds"]
    assert len(seconds) == 3
    run, budget = tmp_path / "run", f"--config.max_sim_hours={(seconds[0] + seconds[1] / 2) / 3600}"
    with monkeypatch.context() as patch:
        patch.setattr(volumes, "volume_store", tiny_volumes.signalling(2, signal.SIGTERM))
        assert call(whole.command(run, budget)) == 75
    assert round_of(run) == 1 and not (run / "DONE").exists()
    assert "preempted at round 1 of 3; the same command continues" in (run / "train.log").read_text()
    assert call(whole.command(run, budget)) == 0
    assert (run / "DONE").exists() and round_of(run) == 2  # the round that crossed it is finished
    summary = json.loads((run / "summary.json").read_text())
    reason = f"simulated time {(seconds[0] + seconds[1]) / 3600:.2f} h is beyond max_sim_hours="
    assert summary["round"] == 2 and summary["stopped"].startswith(reason)
    assert f"stopped at round 2 of 3: {reason}" in (run / "train.log").read_text()
    (simulated,) = summary["simulated"]
    assert simulated["minutes"] == pytest.approx(sum(seconds[:2]) / 60) and simulated["projected_score"] is not None
    scored = {r["round"] for r in rows(run) if r["metric"] == "round_score"}
    assert scored == {0, 1, 2} and (run / "per_case.csv").exists() and len(predictions(run)) == 4
    capsys.readouterr()
    before = stamps(run)
    assert call(whole.command(run, budget)) == 0
    assert "stopped at round 2: simulated time" in (err := capsys.readouterr().err) and err.endswith("nothing to do\n")
    assert len(err.splitlines()) == 1 and stamps(run) == before
    assert call(whole.command(run)) == 0  # without a budget it goes on
    assert round_of(run) == 3 and json.loads((run / "summary.json").read_text())["stopped"] == ""
    assert_same_run(whole.folder, run)


def test_a_finished_run_has_nothing_to_do(whole, capsys):
    before = stamps(whole.folder)
    assert call(whole.command(whole.folder)) == 0
    assert capsys.readouterr().err == "already at round 3 of 3: nothing to do\n"
    assert call(whole.command(whole.folder, "--config.rounds=2")) == 0
    assert stamps(whole.folder) == before


def test_predictions_are_for_volumes(pcp_root, tmp_path, capsys):
    assert call(pcp_words(pcp_root, tmp_path / "run", "--config.predictions=true", "--config.rounds=1")) == 1
    assert "config.predictions" in one_line(capsys.readouterr().err)


def check(root, folder, *overrides):
    argv = tiny_volumes.words(root, folder / "cache", folder / "run", *overrides)
    return call([*argv, "--check_data", "--config.data.sites="])


def test_check_data_of_a_good_tree(whole, tmp_path, capsys):
    assert check(whole.root, tmp_path) == 0
    out = capsys.readouterr().out
    assert "label scheme: brats2021 (0 background, 1 NCR, 2 ED, 4 ET)" in out and re.search(
        r"^all +24 +12 +12$", out, re.M
    )
    found = list(csv.DictReader((tmp_path / "run" / "labels.csv").read_text().splitlines()))
    assert len(found) == 24
    for row in found:
        case = row.pop("Subject_ID")
        values = np.asanyarray(nibabel.load(whole.root / case / f"{case}_seg.nii.gz").dataobj)
        assert {int(k.removeprefix("voxels_")): int(n) for k, n in row.items()} == {
            label: int((values == label).sum()) for label in (0, 1, 2, 4)
        }
    assert not (tmp_path / "run" / "config.json").exists()


def test_check_data_of_a_tree_with_many_faults(tmp_path, capsys, monkeypatch):
    """All of them in one list, before a model is made; where the good subjects' labels are told all the same."""
    monkeypatch.setattr(experiment, "build", lambda *unused: pytest.fail("built"))
    made = VolumeFolder(tmp_path / "tree").sites((4, 3))
    made.table(more=("2,FeTS2022_77777",))
    file = lambda n, kind: made.root / f"FeTS2022_{n:05d}" / f"FeTS2022_{n:05d}_{kind}.nii.gz"
    cut = file(0, "t1ce").read_bytes()
    file(0, "t1ce").write_bytes(cut[: len(cut) // 2])
    file(1, "flair").unlink()
    label = np.asanyarray(nibabel.load(file(2, "seg")).dataobj)
    nifti.write_volume(file(2, "seg"), label[:, :, :10].copy(), AFFINE)
    moved = AFFINE.copy()
    moved[2, 3] = 5
    nifti.write_volume(file(3, "seg"), np.asanyarray(nibabel.load(file(3, "seg")).dataobj), moved)
    strange = np.asanyarray(nibabel.load(file(4, "seg")).dataobj).copy()
    strange[8, 8, 8] = 7
    nifti.write_volume(file(4, "seg"), strange, AFFINE)
    assert check(made.root, tmp_path) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("error: ") == 1
    told = {
        "FeTS2022_00000_t1ce.nii.gz: cut short or damaged",
        "FeTS2022_00001",
        "FeTS2022_00002_seg.nii.gz: 16 x 16 x 10 voxels",
        "FeTS2022_00003_seg.nii.gz: lies elsewhere in space",
        "FeTS2022_00004: label values 0, 1, 2, 4, 7 found",
        "FeTS2022_77777",
    }
    lines = err.splitlines()
    assert re.match(r"error: data\.fets: .*: \d fault\(s\)$", lines[0])
    assert all(line.startswith("  - ") for line in lines[1:])
    for text in told:
        assert sum(text in line for line in lines) == 1, text
    found = {r["Subject_ID"]: r for r in csv.DictReader((tmp_path / "run" / "labels.csv").read_text().splitlines())}
    assert found["FeTS2022_00004"]["voxels_7"] == "1" and "FeTS2022_00005" in found
    assert not (tmp_path / "run" / "config.json").exists()
