"""The official ABIDE table and the Harvard-Oxford series of the four sites of the FedHAvg paper."""

import hashlib
import time

import numpy as np
import pytest

from fedjax_seg import data
from fedjax_seg.data import federated, phenotypic

TABLE1 = {"NYU": (163, 66, 97), "UM": (104, 41, 63), "UCLA": (72, 33, 39), "USM": (50, 31, 19)}  # FedHAvg, Table 1


@pytest.fixture(scope="module")
def table(real):
    return phenotypic.read_phenotypic(real / "abide" / "Phenotypic_V1_0b_preprocessed1.csv")


@pytest.fixture(scope="module")
def loaded(real):
    start = time.process_time()
    cohort = data.make("abide", root=str(real / "abide"))
    return cohort, time.process_time() - start


def test_the_table_alone_gives_the_cohort_of_the_paper(table):
    selection = phenotypic.cohort(table.subjects, sites=tuple(TABLE1))
    assert not any(s.faults for s in table.subjects)
    assert [len(s.subjects) for s in selection.steps[:2]] == [1112, 1112 - 77]
    for site, (total, asd, controls) in TABLE1.items():
        own = [s.diagnosis for s in selection.kept if s.site == site]
        assert (len(own), own.count(phenotypic.ASD), own.count(phenotypic.CONTROL)) == (total, asd, controls)
    assert len(selection.kept) == 389


def test_without_a_motion_limit_1035_subjects_have_files(table):
    assert len(phenotypic.cohort(table.subjects, max_fd=float("inf")).kept) == 1035


def test_twenty_site_names_are_seventeen_sites(table):
    selection = phenotypic.cohort(table.subjects)
    assert len(selection.sites) == 17 and selection.sites[:2] == ("NYU", "UM")
    assert {"MAX_MUN", "LEUVEN", "CMU"} < set(selection.sites)
    assert sum(s.site == "CMU" for s in selection.kept) == 2
    sizes = [sum(s.site == site for s in selection.kept) for site in selection.sites]
    assert sizes == sorted(sizes, reverse=True)
    dropped = [(s.file_id, why) for s, why in selection.excluded if why == "func_mean_fd missing"]
    assert dropped == [("Yale_0050610", "func_mean_fd missing")]  # the one row with a file and no motion value


def test_cohort_and_features_from_the_series(loaded):
    cohort, seconds = loaded
    assert {r["site"]: (r["total"], r["asd"], r["hc"]) for r in cohort.about["table1"]} == TABLE1
    assert cohort.arrays["x"].shape == (389, 6105) and cohort.about["n_rois"] == 111
    assert np.isfinite(cohort.arrays["x"]).all() and np.abs(cohort.arrays["x"]).max() <= 1
    assert np.bincount(cohort.site_of).tolist() == [163, 104, 72, 50]
    assert cohort.arrays["y"].sum() == 66 + 41 + 33 + 31
    assert seconds < 30  # about 4 on an idle core


def test_features_are_numpy_correlations(loaded, real):
    cohort, _ = loaded
    upper = np.triu_indices(111, 1)
    good = [i for i, case in enumerate(cohort.case_ids) if case not in cohort.about["bad_rois"]]
    for i in (good[0], good[180], good[-1]):
        series = np.loadtxt(real / "abide" / "rois_ho" / f"{cohort.case_ids[i]}_rois_ho.1D")
        np.testing.assert_allclose(cohort.arrays["x"][i], np.corrcoef(series.T)[upper], atol=2e-6)


def test_zeroed_edges_are_those_of_the_constant_columns(loaded, real):
    cohort, _ = loaded
    zeroed = 0
    for case, count in cohort.about["bad_rois"].items():
        series = np.loadtxt(real / "abide" / "rois_ho" / f"{case}_rois_ho.1D")
        constant = int((series.max(axis=0) == series.min(axis=0)).sum())
        assert count == constant
        zeroed += constant * (111 - constant) + constant * (constant - 1) // 2
    assert cohort.about["edges"]["zeroed"] == zeroed > 0


def test_folds_are_disjoint_and_stratified(loaded):
    cohort, _ = loaded
    federated.validate(cohort)
    y = cohort.arrays["y"]
    tested = np.concatenate([np.concatenate(s.test) for s in cohort.splits])
    assert len(cohort.splits) == 5 and sorted(tested) == list(range(389))
    for k, (total, asd, _) in enumerate(TABLE1.values()):
        sizes = [len(s.test[k]) for s in cohort.splits]
        positive = [y[s.test[k]].sum() for s in cohort.splits]
        assert set(sizes) <= {total // 5, -(-total // 5)} and set(positive) <= {asd // 5, -(-asd // 5)}


def test_the_table_is_identified_by_its_hash(loaded, real):
    cohort, _ = loaded
    content = (real / "abide" / "Phenotypic_V1_0b_preprocessed1.csv").read_bytes()
    assert cohort.about["phenotypic"]["sha256"] == hashlib.sha256(content).hexdigest()
