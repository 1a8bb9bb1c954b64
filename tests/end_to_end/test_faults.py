"""Bad input of every kind through the command: told before anything compiles, without a traceback, exit status 1."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import call, config, folder, one_line, rows, words

from fedjax_seg import experiment
from fedjax_seg.core.checks import UserError

TABLE = "Phenotypic_V1_0b_preprocessed1.csv"


@pytest.fixture(scope="module")
def aal(tmp_path_factory):
    """A folder with the 116 columns of AAL; read only."""
    return Path(folder(tmp_path_factory.mktemp("aal") / "pcp", rois=116))


@pytest.fixture
def broken(aal, tmp_path):
    return Path(shutil.copytree(aal, tmp_path / "pcp"))


def series(root, site="UM", number=0):
    return sorted(root.rglob(f"{site}_*.1D"))[number]


def table(path):
    return np.loadtxt(path, comments="#")


def write(path, values):
    header = "\t".join(f"#{i + 1}" for i in range(values.shape[1]))
    np.savetxt(path, values, "%.6f", "\t", header=header, comments="")


def without_table(root):
    (root / TABLE).unlink()


def without_site_id(root):
    text = (root / TABLE).read_text()
    (root / TABLE).write_text(text.replace(",SITE_ID,", ",SITE,"))


def without_series(root):
    shutil.rmtree(root / "rois_synthetic")


def only_other_names(root):
    for path in root.rglob("*.1D"):
        path.rename(path.with_name(path.name.replace("_rois_", "_")))


def empty_site(root):
    for path in root.rglob("UM_*.1D"):
        path.unlink()


def one_column_more(root):
    values = table(series(root))
    write(series(root), np.hstack([values, values[:, :1]]))


def transposed(root):
    write(series(root), table(series(root)).T)


def cut_off(root):
    text = series(root).read_text()
    series(root).write_text(text[: len(text) // 2])


def no_number(root):
    series(root).write_text(series(root).read_text().replace("\t", "\tx", 200))


# name: (damage, what stderr must say)
DAMAGES = {
    "no table": (without_table, ["no Phenotypic*.csv below", TABLE]),
    "no SITE_ID": (without_site_id, [TABLE, "SITE_ID"]),
    "no series": (without_series, ["no .1D file at all", "<FILE_ID>_rois_<atlas>.1D"]),
    "series of other names": (only_other_names, ["33 .1D files but none named so"]),
    "empty site": (empty_site, ["site UM: no subject left", "no series file 11", "data.sites"]),
    "117 columns": (one_column_more, ["117 columns, 116 in 32 of the 33 files", "UM_"]),
    "transposed": (transposed, ["25 columns, 116 in 32 of the 33 files", "transposed (116 rows)", "UM_"]),
    "cut off": (cut_off, ["cut off", "UM_"]),
    "no number": (no_number, ["is not a number", "UM_"]),
}


@pytest.mark.parametrize("check_only", [(), ("--check_data",)], ids=["run", "check_data"])
@pytest.mark.parametrize("damage, said", DAMAGES.values(), ids=DAMAGES)
def test_damaged_folder(damage, said, check_only, broken, tmp_path, capsys):
    damage(broken)
    assert call(words(broken, tmp_path / "run", *check_only)) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in err and out == ""
    first, *faults = err.splitlines()
    assert first.startswith("error: ")
    assert all(text in err for text in said), err
    if faults:  # a tree can have many faults: all of them are told, a line each
        assert first.endswith(f"{len(faults)} fault(s)") and all(line.startswith("  - ") for line in faults)
    left = {p.name for p in (tmp_path / "run").rglob("*")} if (tmp_path / "run").exists() else set()
    assert left <= {"LOCK"}


def test_all_faults_of_a_tree_at_once(broken, tmp_path, capsys):
    one_column_more(broken)
    write(series(broken, "NYU", 3), table(series(broken, "NYU", 3)).T)
    empty_site_of_ucla = list(broken.rglob("UCLA_*.1D"))
    for path in empty_site_of_ucla:
        path.unlink()
    assert call(words(broken, tmp_path / "run")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("3 fault(s)") and len(lines) == 4


def test_nan_cells_zero_their_edges_and_the_run_goes_on(broken, tmp_path):
    """data.bad_roi = 'zero': a ROI with a NaN cell has no correlation; its 115 edges are 0 and counted."""
    values = table(series(broken))
    values[4, 7] = np.nan
    write(series(broken), values)
    loaded = experiment.load_data(config(str(broken)), tmp_path)
    assert loaded.about["edges"]["zeroed"] == 115
    assert "1 subjects, 115 of" in "\n".join(loaded.summary)
    assert np.isfinite(loaded.arrays["x"]).all()
    dropped = experiment.load_data(config(str(broken), "--config.data.bad_roi=drop"), tmp_path)
    assert len(dropped.case_ids) == len(loaded.case_ids) - 1


def test_one_class_test_fold_is_not_available_and_the_run_goes_on(pcp_root, tmp_path, quick_compile):
    """UCLA's first fold holds controls only: no AUC there, and the mean over sites says that it is one of two."""
    loaded = experiment.load_data(config(pcp_root), tmp_path)
    label = dict(zip(loaded.case_ids, loaded.arrays["y"].tolist()))
    folds = {}
    for k, site in enumerate(loaded.sites):
        own = [c for c, s in zip(loaded.case_ids, loaded.site_of) if s == k]
        if site == "UCLA":
            first = [c for c in own if label[c] == 0][:3]
        else:
            first = own[: len(own) // 2]
        folds[site] = [first, [c for c in own if c not in first]]
    (tmp_path / "folds.json").write_text(json.dumps(folds))
    override = f"--config.data.fold_file={tmp_path / 'folds.json'}"
    run = tmp_path / "run"
    assert call(words(pcp_root, run, override, "--config.rounds=1", "--config.folds=0")) == 0
    summary = json.loads((run / "summary.json").read_text())
    auc = {r["site"]: r for r in summary["results"] if r["metric"] == "auc"}
    assert auc["UCLA"]["value"] is None and auc["UCLA"]["n"] == 3
    assert auc["NYU"]["value"] is not None and auc["UM"]["value"] is not None
    assert auc["mean_of_sites"]["n"] == 2
    assert auc["mean_of_sites"]["value"] == pytest.approx((auc["NYU"]["value"] + auc["UM"]["value"]) / 2)
    assert "test folds of one class, AUC is not defined there: UCLA fold0" in (run / "train.log").read_text()
    assert all(r["value"] is None for r in rows(run) if r["metric"] == "auc" and r["site"] == "UCLA")


OPTIONS = {
    "lanes": (["--config.lanes=4"], ["lanes: 4 given", "[0, 3]"]),
    "devices": (["--config.devices=99"], ["devices: 99 given", "visible"]),
    "folds": (["--config.folds=0,2"], ["config.folds: 2 given", "0..1"]),
    "corrupted site": (
        ["--config.corruption.kind=scale", "--config.corruption.site=NUY"],
        ["'NUY'", "did you mean 'NYU'"],
    ),
    "cohort": (["--config.sampler.name=uniform", "--config.sampler.size=4"], ["size: 4 given", "[1, 3]"]),
    "sampler without size": (["--config.sampler.name=uniform"], ["neither of size and rho"]),
    "poisson without q": (["--config.sampler.name=poisson"], ["q: None given"]),
    "site": (["--config.data.sites=NYU,UCAL"], ["unknown site 'UCAL'", "did you mean 'UCLA'"]),
    "no folder": (["--config.data.root=nowhere/at/all"], ["data.root: nowhere/at/all does not exist"]),
    "width": (["--config.model.hidden=8.5"], ["model.hidden: 8.5 given"]),
    "momentum": (["--config.client.momentum=2"], ["client.momentum: 2.0 given", "[0, 1]"]),
    "schedule": (["--config.client.schedule=cosine"], ["client.schedule_rounds: 0 given"]),
    "optimizer": (["--config.client.optimizer=sdg"], ["client.optimizer: 'sdg' given", "'sgd'"]),
    "margin": (["--config.aggregator.margin_on=edge"], ["'edge' given", "'radius'"]),
    "gpu": (["--config.require_gpu"], ["require_gpu: no accelerator found"]),
}


@pytest.mark.parametrize("given, said", OPTIONS.values(), ids=OPTIONS)
def test_option_that_does_not_fit(given, said, pcp_root, tmp_path, capsys):
    assert call(words(pcp_root, tmp_path / "run", *given)) == 1
    line = one_line(capsys.readouterr().err)
    assert all(text in line for text in said), line


def test_workdir_that_cannot_be_written(pcp_root, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file" / "run", tmp_path / "file", "/proc/run"):
        assert call(words(pcp_root, workdir)) == 1
        assert f"workdir {workdir}" in one_line(capsys.readouterr().err)


def test_bad_values_from_python_are_told_too(pcp_root, tmp_path):
    c = config(pcp_root)
    c.rounds = 0
    with pytest.raises(UserError, match=r"config\.rounds: 0"):
        experiment.run(c, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_check_data_only_checks(pcp_root, tmp_path, capsys):
    assert call(words(pcp_root, tmp_path / "run", "--check_data")) == 0
    out = capsys.readouterr().out
    assert "flow of subjects" in out and "func_mean_fd <= 0.15     33   16  17" in out
    assert not (tmp_path / "run").exists()


def test_check_data_of_generated_data_writes_them(tmp_path, capsys):
    sites = "--config.synthesis.sites=(('NYU',12),('UM',11),('UCLA',10))"
    run = tmp_path / "run"
    assert call(words("", run, sites, "--config.synthesis.rois=8", "--check_data")) == 0
    assert [p.name for p in run.iterdir()] == ["synthetic"]
    assert len(list((run / "synthetic").rglob("*.1D"))) == 33
    assert "NYU                     12" in capsys.readouterr().out
