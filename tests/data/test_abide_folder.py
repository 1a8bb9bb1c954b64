import csv
import io
import json
import subprocess
import sys

import numpy as np
import pytest

from fedjax_seg import data
from fedjax_seg.core import checks
from fedjax_seg.data import federated


def _load(pcp, **options):
    options = {"root": str(pcp.root), "sites": ("NYU", "UM"), "folds": 3, **options}
    return data.make("abide", **options)


def _two_sites(pcp):
    return pcp.site("NYU", 4, 5), pcp.site("UM_1", 2, 2, points=9) + pcp.site("UM_2", 1, 1, points=11)


def _rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def _faults(pcp, **options):
    with pytest.raises(checks.DataFaults) as error:
        _load(pcp, **options)
    return error.value.faults


def test_arrays_labels_sites_and_order(pcp):
    nyu, um = _two_sites(pcp)
    pcp.rows.reverse()  # the order of the table does not matter
    pcp.write()
    loaded = _load(pcp, sites=("UM", "NYU"))
    assert loaded.sites == ("UM", "NYU") and loaded.classes == ("control", "ASD")
    assert loaded.case_ids == (*sorted(um), *sorted(nyu))
    assert loaded.patient_ids == tuple(str(int(c[-7:])) for c in loaded.case_ids)
    assert loaded.site_of.tolist() == [0] * 6 + [1] * 9 and loaded.site_of.dtype == np.int32
    x, y = loaded.arrays["x"], loaded.arrays["y"]
    assert x.shape == (15, 15) and x.dtype == np.float32 and y.dtype == np.int32
    dx = {row[4]: row[5] for row in pcp.rows}
    assert y.tolist() == [{"1": 1, "2": 0}[dx[c]] for c in loaded.case_ids]
    table = np.loadtxt(io.StringIO(pcp.tables[loaded.case_ids[3]]))
    np.testing.assert_allclose(x[3], np.corrcoef(table.T)[np.triu_indices(6, 1)], atol=1e-6)
    assert loaded.about["features"] == "Pearson r"
    fisher = _load(pcp, sites=("UM", "NYU"), fisher_z=True)
    np.testing.assert_allclose(fisher.arrays["x"], np.arctanh(x.astype(np.float64)), rtol=1e-4)
    assert fisher.about["features"] == "Fisher z" and any("Fisher z" in line for line in fisher.summary)


def test_splits_are_disjoint_stratified_and_synchronised(pcp):
    _two_sites(pcp)
    pcp.write()
    loaded = _load(pcp)
    federated.validate(loaded)
    patients, y = np.array(loaded.patient_ids), loaded.arrays["y"]
    for split in loaded.splits:
        for k in range(2):
            assert not set(patients[split.train[k]]) & set(patients[split.test[k]])
            together = np.sort(np.concatenate([split.train[k], split.test[k]]))
            np.testing.assert_array_equal(together, np.flatnonzero(loaded.site_of == k))
    # 4 ASD and 5 controls in 3 folds: 3 subjects each, 1 or 2 of each class
    assert sorted(y[s.test[0]].sum() for s in loaded.splits) == [1, 1, 2]
    assert [len(s.test[0]) for s in loaded.splits] == [3, 3, 3]
    assert [s.name for s in loaded.splits] == ["fold0", "fold1", "fold2"]
    tested = np.concatenate([np.concatenate(s.test) for s in loaded.splits])
    assert sorted(tested) == list(range(15))


def test_the_flow_is_counted_printed_and_saved(pcp):
    _two_sites(pcp)
    pcp.subject(file_id="no_filename")
    pcp.subject(dx="1", fd="0.2")
    pcp.subject(fd="")
    absent = [pcp.subject("UM_2", dx="1", file=False), pcp.subject("NYU", file=False)]
    pcp.subject("CALTECH")
    pcp.write()
    loaded = _load(pcp)
    steps = {row["step"]: (row["total"], row["asd"], row["hc"]) for row in loaded.about["flow"]}
    assert steps == {
        "rows in the table": (21, 9, 12),
        "with a file id": (20, 9, 11),
        "diagnosis known": (20, 9, 11),
        "func_mean_fd <= 0.15": (18, 8, 10),
        "in the chosen sites": (17, 8, 9),
        "series found": (15, 7, 8),
        "usable": (15, 7, 8),
    }
    assert loaded.about["table1"] == [
        {"site": "NYU", "total": 9, "asd": 4, "hc": 5},
        {"site": "UM", "total": 6, "asd": 3, "hc": 3},
    ]
    flow = {(r["step"], r["site"]): r["subjects"] for r in _rows(loaded.files["cohort_flow.csv"])}
    assert flow["usable", "all"] == "15" and flow["in the chosen sites", "UM"] == "7"
    assert flow["rows in the table", "CALTECH"] == "1" and flow["usable", "CALTECH"] == "0"
    reasons = {r["file_id"]: r["reason"] for r in _rows(loaded.files["cohort_excluded.csv"])}
    assert [reasons[i] for i in absent] == ["no series file"] * 2 and len(reasons) == 6
    assert loaded.about["missing_series"] == {"NYU": [absent[1]], "UM": [absent[0]]}
    printed = "\n".join(loaded.summary)
    assert f"1 subjects of UM have no series file: {absent[0]}" in printed
    assert "func_mean_fd > 0.15 1, func_mean_fd missing 1" in printed
    assert json.loads(json.dumps(loaded.about)) == loaded.about
    subjects = _rows(loaded.files["cohort.csv"])
    assert [r["file_id"] for r in subjects] == list(loaded.case_ids)
    first = {k: subjects[0][k] for k in ("site", "dx", "y", "mean_fd", "time_points", "bad_rois")}
    assert first == {"site": "NYU", "dx": "ASD", "y": "1", "mean_fd": "0.05", "time_points": "12", "bad_rois": "0"}
    for i, split in enumerate(loaded.splits):
        assert [n for n, r in enumerate(subjects) if r["fold"] == str(i)] == sorted(np.concatenate(split.test))


def test_strict_makes_missing_series_faults(pcp):
    _two_sites(pcp)
    absent = pcp.subject(file=False)
    pcp.write()
    assert _faults(pcp, strict=True) == (f"{absent}: no {absent}_rois_toy.1D; fetch it, or unset data.strict",)


@pytest.mark.parametrize("damage", ["zero", "nan"])
def test_a_bad_roi_is_zeroed_and_counted_or_drops_the_subject(pcp, damage):
    (first, *_), _ = _two_sites(pcp)
    values = np.random.default_rng(1).normal(size=(12, 6))
    values[:, 0] = 0.0
    if damage == "nan":
        values[3, 0] = np.nan
    pcp.table(first, values)
    pcp.write()
    zeroed = _load(pcp, keep_edge_mask=True)
    assert np.isfinite(zeroed.arrays["x"]).all()
    expected = np.ones((15, 15), bool)
    expected[0, :5] = False  # edges (0, 1) ... (0, 5) of the first subject
    np.testing.assert_array_equal(zeroed.arrays["edge_mask"], expected)
    np.testing.assert_array_equal(zeroed.arrays["x"][0, :5], 0.0)
    assert zeroed.about["edges"] == {"total": 225, "edge_ok": 220, "zeroed": 5}
    assert zeroed.about["bad_rois"] == {first: 1}
    assert any("1 subjects, 5 of 225 edges set to 0" in line for line in zeroed.summary)
    dropped = _load(pcp, bad_roi="drop")
    assert first not in dropped.case_ids and len(dropped.case_ids) == 14 and "edge_mask" not in dropped.arrays
    assert "constant or NaN ROI 1" in "\n".join(dropped.summary) and dropped.about["flow"][-1]["total"] == 14


def test_all_faults_of_the_tree_come_at_once(pcp):
    nyu, um = _two_sites(pcp)
    random = np.random.default_rng(2)
    pcp.table(nyu[0], random.normal(size=(12, 7)), header=False)
    pcp.table(nyu[1], random.normal(size=(6, 12)), header=False)
    pcp.tables[um[0]] = pcp.tables[um[0]][:-30]
    pcp.tables[um[1]] = pcp.tables[um[1]].replace(".", "..", 1)
    pcp.table(um[2], np.full((9, 6), np.nan))
    pcp.set(um[3], "DX_GROUP", "3")
    pcp.write()
    faults = _faults(pcp)
    causes = {nyu[0]: "7 columns, 6 in", nyu[1]: "looks transposed", um[0]: "cells, line 2 has 6"}
    causes |= {um[1]: "is not a number", um[2]: "6 of 6 ROIs", um[3]: "DX_GROUP '3'"}
    assert len(faults) == 6
    for file_id, cause in causes.items():
        (own,) = (f for f in faults if f.startswith(f"{file_id}: "))
        assert cause in own and (".1D" in own or "Phenotypic_toy.csv line" in own)


def test_117_columns_among_116_files(tmp_path, pcp):
    pcp.rois = 116
    nyu = pcp.site("NYU", 3, 3)
    pcp.table(nyu[2], np.random.default_rng(0).normal(size=(12, 117)))
    pcp.write("aal")
    (fault,) = _faults(pcp, sites=("NYU",))
    assert f"{nyu[2]}_rois_aal.1D: 117 columns, 116 in 5 of the 6 files" in fault


def test_faults_of_sites_that_are_not_chosen_do_not_stop_a_run(pcp):
    _two_sites(pcp)
    pcp.subject("PITT", dx="7")
    pcp.tables[pcp.subject("PITT")] = "broken"
    pcp.write()
    assert _load(pcp).about["files_outside_cohort"] == 2


def test_an_empty_site_and_a_small_site_name_the_way_out(pcp):
    _two_sites(pcp)
    for fd in ("0.3", "0.4"):
        pcp.subject("CMU", fd=fd)
    pcp.site("KKI", 1, 1)
    pcp.write()
    faults = _faults(pcp, sites=("NYU", "CMU", "KKI"))
    assert len(faults) == 2 and "data.min_site_size" in faults[0] and "data.min_site_size" in faults[1]
    assert faults[0].startswith("site CMU: no subject left (func_mean_fd > 0.15 2)")
    assert faults[1].startswith("site KKI: 2 subjects for 3 folds")
    loaded = _load(pcp, sites=(), min_site_size=3)
    assert loaded.sites == ("NYU", "UM") and loaded.about["dropped_sites"] == {"KKI": 2, "CMU": 0}
    assert "note: site KKI dropped, 2 usable subjects" in loaded.summary
    with pytest.raises(checks.UserError, match="no site has 100 usable subjects"):
        _load(pcp, min_site_size=100)


@pytest.mark.parametrize("asd, hc, first", [(1, 8, 1), (8, 1, 0)])
def test_a_one_class_test_fold_is_allowed_and_noted(pcp, asd, hc, first):
    pcp.site("NYU", asd, hc)
    pcp.site("UM", 3, 3)
    pcp.write()
    loaded = _load(pcp)
    assert sum(len(set(loaded.arrays["y"][s.test[0]])) == 1 for s in loaded.splits) == 2
    assert "test folds of one class, AUC is not defined there: " in loaded.summary[-1]
    # the classes are dealt one after the other, ASD first: the single control of 8/1 falls into the last fold
    assert f"NYU fold{first}, NYU fold{first + 1}" in loaded.summary[-1]


def test_scans_of_one_person_stay_together(pcp):
    for person in range(90101, 90107):
        for run in "ab":
            file_id = f"NYU_run{run}{person}"
            pcp.subject(dx=str(1 + person % 2), sub_id=person, file_id=file_id)
    pcp.write()
    loaded = _load(pcp, sites=("NYU",))
    patients = np.array(loaded.patient_ids)
    for split in loaded.splits:
        assert len(split.test[0]) == 4 and not set(patients[split.train[0]]) & set(patients[split.test[0]])


def test_the_saved_folds_are_an_accepted_fold_file(pcp, tmp_path):
    _two_sites(pcp)
    pcp.write()
    drawn = _load(pcp, fold_seed=4)
    saved = tmp_path / "mine.json"
    saved.write_text(drawn.files["folds.json"])
    assert set(json.loads(saved.read_text())) == {"NYU", "UM"}
    given = _load(pcp, fold_file=str(saved), fold_seed=99)
    for a, b in zip(drawn.splits, given.splits):
        for k in range(2):
            np.testing.assert_array_equal(a.test[k], b.test[k])
            np.testing.assert_array_equal(a.train[k], b.train[k])
    folds = json.loads(saved.read_text())
    folds["NYU"][0].append("NYU_0099999")
    gone = folds["UM"][1].pop()
    saved.write_text(json.dumps(folds))
    faults = _faults(pcp, fold_file=str(saved))
    assert len(faults) == 2 and faults[0].startswith("NYU_0099999: in fold 0 of NYU, but not in the cohort")
    assert faults[1] == f"{gone}: in the cohort, but in no fold of UM; add it"


def test_semicolons_bom_and_crlf_give_the_same_data(pcp):
    _two_sites(pcp)
    pcp.write()
    plain = _load(pcp)
    pcp.write(text="\ufeff" + pcp.csv_text(";", "\r\n"))
    odd = _load(pcp)
    np.testing.assert_array_equal(plain.arrays["x"], odd.arrays["x"])
    assert plain.case_ids == odd.case_ids and "note: Phenotypic_toy.csv is separated by ';'" in odd.summary


def test_parts_of_the_tree_can_be_named(pcp, tmp_path, monkeypatch):
    _two_sites(pcp)
    pcp.write("a", below="one")
    pcp.write("b", below="two")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(checks.UserError, match="several atlases"):
        _load(pcp)
    by_atlas = _load(pcp, root="pcp", atlas="b")
    by_folder = _load(pcp, root="pcp", series="two", phenotypic="Phenotypic_toy.csv")
    assert by_atlas.about["atlas"] == by_folder.about["atlas"] == "b"
    (pcp.root / "two/phenotypic_old.CSV").write_text("x")
    with pytest.raises(checks.UserError, match=r"several below .*Phenotypic_toy\.csv.*phenotypic_old\.CSV.*name one"):
        _load(pcp, atlas="b")


def _no_table(pcp):
    (pcp.root / "Phenotypic_toy.csv").unlink()


def _no_series(pcp):
    for path in pcp.root.rglob("*.1D"):
        path.unlink()


def _foreign_series(pcp):
    for path in list(pcp.root.rglob("*.1D")):
        path.rename(path.with_name("sub-" + path.name))


@pytest.mark.parametrize(
    "damage, options, says",
    [
        (_no_table, {}, "data.phenotypic: no Phenotypic.*csv below .*pcp"),
        (_no_series, {}, "no .1D file at all"),
        (_foreign_series, {}, "none of the 15 subjects of the cohort has a series file; 15 files found"),
        (None, {"root": ""}, "data.root: no folder given"),
        (None, {"root": "/nowhere/at/all"}, "data.root: /nowhere/at/all does not exist"),
        (None, {"phenotypic": "other.csv"}, "data.phenotypic: other.csv is not a file"),
        (None, {"series": "other"}, "data.series: other does not exist"),
        (None, {"folds": 1}, "data.folds: 1 given"),
        (None, {"folds": 2.5}, "data.folds: 2.5 given"),
        (None, {"fold_seed": -1}, "data.fold_seed: -1 given"),
        (None, {"bad_roi": "keep"}, "data.bad_roi: 'keep' given"),
        (None, {"min_site_size": -1}, "data.min_site_size"),
        (None, {"sites": ("NYU", "UMM")}, "unknown site 'UMM'; did you mean 'UM'"),
        (None, {"maxfd": 1}, "unknown option 'maxfd'; did you mean 'max_fd'"),
    ],
)
def test_every_wrong_call_is_one_line(pcp, damage, options, says):
    _two_sites(pcp)
    pcp.write()
    if damage:
        damage(pcp)
    with pytest.raises(checks.UserError, match=says) as error:
        _load(pcp, **options)
    assert "\n" not in str(error.value)


def test_an_unknown_data_set_is_suggested():
    with pytest.raises(checks.UserError, match="unknown name 'abid'; did you mean 'abide'"):
        data.make("abid", root="x")


def test_reading_data_does_not_import_jax():
    code = "import sys; import fedjax_seg.data; sys.exit('jax' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
