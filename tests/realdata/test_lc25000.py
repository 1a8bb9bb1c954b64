"""LC25000: real lung histology; tiles are augmented copies of sources, which the groups name."""

import csv
import time
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.data.histopathology import histopathology
from fedjax_seg.data.stain import hed2rgb, rgb2hed


@pytest.fixture(scope="module")
def table(real):
    with open(real / "lc25000" / "metadata.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def loaded(real):
    start = time.process_time()
    data = histopathology(root=str(real / "lc25000"), partition="dirichlet", clients=8, alpha=0.5, normalise="none")
    return data, time.process_time() - start


def test_tiles_and_groups_of_the_table(table, loaded):
    data, seconds = loaded
    groups = {row["group"] for row in table}
    assert len(table) == 2959 and len(groups) == 740
    assert data.case_ids == tuple(row["image"] for row in table)
    assert data.patient_ids == tuple(row["group"] for row in table)
    assert data.classes == ("lung_aca", "lung_n", "lung_scc")
    assert np.bincount(data.arrays["y"]).tolist() == [Counter(row["label"] for row in table)[c] for c in data.classes]
    assert data.arrays["x"].shape == (2959, 64, 64, 3) and data.about["warnings"] == []
    assert sum(row["total"] for row in data.about["table1"]) == 2959
    assert seconds < 20  # about 3 on an idle core


def test_no_group_is_divided(loaded):
    data, _ = loaded
    split, groups = data.splits[0], np.array(data.patient_ids)
    sides = [set(groups[np.concatenate(side)]) for side in (split.train, split.test)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(groups)
    own = [set(groups[data.site_of == k]) for k in range(8)]
    assert sum(map(len, own)) == len(set(groups)) and min(map(len, own)) >= 2
    for k in range(8):
        assert len(set(groups[split.test[k]])) == pytest.approx(0.2 * len(own[k]), abs=0.5)
    # label skew: some client has a class at more than twice its share
    counts = np.array([np.bincount(data.arrays["y"][data.site_of == k], minlength=3) for k in range(8)])
    assert (counts / counts.sum(1, keepdims=True)).max() > 0.67


def test_copies_stay_on_one_side_by_group_but_not_without(real, loaded):
    data, _ = loaded
    digests = Counter(data.arrays["x"][n].tobytes() for n in range(2959))
    repeats = sum(n - 1 for n in digests.values())
    assert data.about["copies"] == {"images": repeats, "across_patients": 0, "across_clients": 0, "test": 0, "aside": 0}
    folders = histopathology(root=str(real / "lc25000"), table="", partition="iid", clients=8, normalise="none")
    assert set(folders.case_ids) == set(data.case_ids) and folders.classes == data.classes
    assert folders.about["copies"]["images"] == repeats and folders.about["copies"]["test"] > 0
    assert [text for text in folders.about["warnings"] if "NO GROUPS" in text]


def test_a_case_is_its_file(real, loaded):
    data, _ = loaded
    for n in (0, 1500, 2958):
        stored = np.asarray(Image.open(real / "lc25000" / data.case_ids[n]))
        np.testing.assert_allclose(data.arrays["x"][n], stored / 255, atol=1e-6)


def test_stains_of_real_tiles(loaded):
    x = loaded[0].arrays["x"][::50]
    np.testing.assert_allclose(hed2rgb(rgb2hed(x)), x, atol=1e-5)
    haematoxylin, eosin, _ = np.moveaxis(rgb2hed(x), -1, 0)
    assert haematoxylin.mean() > 0.1 and eosin.mean() > 0.1
