import csv
import time

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score

from fedjax_seg import data, synthesis
from fedjax_seg.core import checks
from fedjax_seg.data import phenotypic

SIZES = {"NYU": 40, "UM": 28, "UCLA": 20, "USM": 16}


def _bytes(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("awkward", [False, True])
def test_the_loader_finds_exactly_the_promised_cohort(tmp_path, awkward):
    root = synthesis.make("connectomes", tmp_path / "pcp", awkward=awkward)
    loaded = data.make("abide", root=str(root))
    assert {row["site"]: row["total"] for row in loaded.about["table1"]} == SIZES
    assert all(row["asd"] == row["hc"] for row in loaded.about["table1"])
    assert loaded.about["n_rois"] == 40 and loaded.about["atlas"] == "synthetic"
    assert bool(loaded.about["bad_rois"]) == awkward


def test_the_awkward_folder_holds_every_awkward_case(tmp_path):
    root = synthesis.make("connectomes", tmp_path / "pcp", awkward=True)
    table = root / "Phenotypic_V1_0b_preprocessed1.csv"
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:3] == ["", "Unnamed: 0", "SUB_ID"]
    cells = [dict(zip(rows[0], row)) for row in rows[1:]]
    assert {"UM_1", "UM_2", "UCLA_1", "UCLA_2", "MAX_MUN", "CMU"} <= {c["SITE_ID"] for c in cells}
    assert {"MaxMun_a", "MaxMun_b", "CMU_a"} <= {c["FILE_ID"].rpartition("_")[0] for c in cells}
    assert any(c["FIQ"] == "-9999" for c in cells) and any(c["HANDEDNESS_CATEGORY"] == "-9999" for c in cells)
    assert any("," in c["MEDICATION_NAME"] for c in cells)
    assert all(90001 <= int(c["SUB_ID"]) < 91000 for c in cells)  # no number of a real subject
    selection = phenotypic.cohort(phenotypic.read_phenotypic(table).subjects)
    assert {"MAX_MUN", "CMU"} < set(selection.sites)
    assert sum(s.site == "CMU" for s in selection.kept) == 2
    reasons = [reason for _, reason in selection.excluded]
    assert {r: reasons.count(r) for r in set(reasons)} == {
        "no_filename": 4,
        "func_mean_fd > 0.15": 4,
        "func_mean_fd missing": 2,
    }
    loaded = data.make("abide", root=str(root))
    assert [len(ids) for ids in loaded.about["missing_series"].values()] == [1]
    assert list(loaded.about["bad_rois"].values()) == [1, 1]
    assert len({row["time_points"] for row in csv.DictReader(loaded.files["cohort.csv"].splitlines())}) == 4
    everyone = data.make("abide", root=str(root), sites=(), min_site_size=5)
    assert everyone.sites == ("NYU", "UM", "UCLA", "USM", "MAX_MUN")


def test_the_same_seed_gives_the_same_bytes_in_under_two_seconds(tmp_path):
    start = time.process_time()
    first = synthesis.make("connectomes", tmp_path / "a", seed=3, awkward=True)
    assert time.process_time() - start < 2
    assert _bytes(first) == _bytes(synthesis.make("connectomes", tmp_path / "b", seed=3, awkward=True))
    assert _bytes(first) != _bytes(synthesis.make("connectomes", tmp_path / "c", seed=4, awkward=True))


def _accuracy(root):
    loaded = data.make("abide", root=str(root))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    model = LogisticRegression(max_iter=500)
    return cross_val_score(model, loaded.arrays["x"], loaded.arrays["y"], cv=folds).mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_linear_classifier_finds_the_class_effect(tmp_path, seed):
    assert 0.75 <= _accuracy(synthesis.make("connectomes", tmp_path / "pcp", seed=seed)) <= 0.92


def test_without_a_class_effect_there_is_nothing_to_find(tmp_path):
    # 104 balanced subjects: chance is .5 with a standard deviation of about .05
    assert _accuracy(synthesis.make("connectomes", tmp_path / "pcp", class_effect=0.0)) < 0.65


def test_sites_differ_in_their_series_and_site_effect_zero_removes_that(tmp_path):
    def spread(root):
        sites = {}
        for path in root.rglob("*.1D"):
            sites.setdefault(path.name.split("_")[0], []).append(np.loadtxt(path))
        lengths = {len(t) for tables in sites.values() for t in tables}
        scales = [np.mean([t.std() for t in tables]) for tables in sites.values()]
        return len(lengths), max(scales) / min(scales)

    options = {"sites": (("NYU", 6), ("UM", 6), ("USM", 6)), "rois": 12}
    lengths, ratio = spread(synthesis.make("connectomes", tmp_path / "with", **options))
    assert lengths == 3 and ratio > 1.2
    lengths, ratio = spread(synthesis.make("connectomes", tmp_path / "without", site_effect=0.0, **options))
    assert lengths == 1 and ratio < 1.1


def test_only_a_new_empty_or_equal_folder_is_written(tmp_path):
    root = synthesis.make("connectomes", tmp_path / "pcp", sites=(("NYU", 4),), rois=8)
    before = _bytes(root)
    next(root.rglob("*.1D")).unlink()  # an interrupted output is completed
    assert _bytes(synthesis.make("connectomes", root, sites=(("NYU", 4),), rois=8)) == before
    with pytest.raises(checks.UserError, match="holds an output of other options"):
        synthesis.make("connectomes", root, sites=(("NYU", 5),), rois=8)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep me")
    with pytest.raises(checks.UserError, match="holds other files; name a new or empty folder"):
        synthesis.make("connectomes", tmp_path / "mine")
    with pytest.raises(checks.UserError, match="cannot be written"):
        synthesis.make("connectomes", tmp_path / "mine/notes.txt")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rois": 4}, "synthesis.rois: 4"),
        ({"length": 5}, "synthesis.length: 5"),
        ({"class_effect": 2.0}, "synthesis.class_effect"),
        ({"site_effect": float("nan")}, "synthesis.site_effect"),
        ({"seed": -1}, "synthesis.seed"),
        ({"sites": (("NYU", 0),)}, "synthesis.sites: NYU: 0"),
        ({"sites": ()}, "at least one site"),
        ({"sites": (("NYU", 4), ("NYU", 4))}, "each once"),
        ({"roi": 40}, "unknown option 'roi'; did you mean 'rois'"),
    ],
)
def test_bad_options_are_one_line(tmp_path, options, says):
    with pytest.raises(checks.UserError, match=says) as error:
        synthesis.make("connectomes", tmp_path / "pcp", **options)
    assert "\n" not in str(error.value) and not (tmp_path / "pcp").exists()


def test_an_unknown_generator_is_suggested(tmp_path):
    with pytest.raises(checks.UserError, match="did you mean 'connectomes'"):
        synthesis.make("connectome", tmp_path)
