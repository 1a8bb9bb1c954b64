"""LIDC-IDRI: real CT slices of lung nodules, the scanner's vendor as the client."""

import time

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.data.images2d import images2d

SLICES = {"GE": 1029, "Philips": 164, "Siemens": 420, "Toshiba": 134}  # as described with the data


@pytest.fixture(scope="module")
def loaded(real):
    start = time.process_time()
    data = images2d(root=str(real / "lidc"), aside_share=0.1)
    return data, time.process_time() - start


def test_four_vendors(loaded):
    data, seconds = loaded
    assert dict(zip(data.sites, np.bincount(data.site_of).tolist())) == SLICES
    assert len(set(data.patient_ids)) == 772
    assert data.arrays["x"].shape == (1747, 64, 64, 1) and data.arrays["y"].shape == (1747, 64, 64)
    assert 0 <= data.arrays["x"].min() < 0.1 and 0.9 < data.arrays["x"].max() <= 1
    assert set(np.unique(data.arrays["y"])) == {0, 1} and data.arrays["y"].any((1, 2)).all()
    assert data.about["copies"]["images"] == 0 and not [text for text in data.summary if text.startswith("WARNING")]
    assert seconds < 15  # about 2 on an idle core


def test_the_split_is_by_patient(loaded):
    data, _ = loaded
    split, patients = data.splits[0], np.array(data.patient_ids)
    sides = [np.concatenate(split.train), np.concatenate(split.test), data.aside]
    assert sorted(np.concatenate(sides)) == list(range(1747))
    ids = [set(patients[side]) for side in sides]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 772
    for k, site in enumerate(data.sites):
        own = [len(set(patients[part[k]])) for part in (split.train, split.test)]
        everyone = len(set(patients[data.site_of == k]))
        assert own[1] == pytest.approx(0.2 * everyone, abs=0.5), site
        assert (data.site_of[split.train[k]] == k).all() and (data.site_of[split.test[k]] == k).all()


def test_a_case_is_its_file(real, loaded):
    data, _ = loaded
    for n in (0, 900, 1746):
        path = real / "lidc" / data.case_ids[n]
        stored = np.asarray(Image.open(path)).astype(float)
        means = stored.reshape(64, 2, 64, 2).mean((1, 3)) / 255
        np.testing.assert_allclose(data.arrays["x"][n, ..., 0], means, atol=1e-5)
        mask = np.asarray(Image.open(str(path).replace("images", "masks")))
        inside = data.arrays["y"][n] == 1
        share = (mask > 0).reshape(64, 2, 64, 2).mean((1, 3))
        assert (share[inside] > 0).all() and (share[~inside] < 1).all()


def test_by_lesion_size(real):
    data = images2d(root=str(real / "lidc"), partition="lesion_size", clients=4, mask_resize="majority")
    lesion = data.arrays["y"].sum((1, 2))
    medians = [np.median(lesion[data.site_of == k]) for k in range(4)]
    assert medians == sorted(medians) and medians[3] > 2 * medians[0]
