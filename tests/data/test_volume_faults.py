"""Subjects that cannot be used: all their faults at once, and the options that let some pass."""

import numpy as np
import pytest
from cached_site import Site, arrays, raw
from volume_folder import AFFINE, SHAPE

from fedjax_seg.data import volume_cache


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_all_faults_of_all_subjects_at_once(tmp_path):
    site = Site(tmp_path, subjects=6)
    whole = site.file("t1ce", 0).read_bytes()
    site.file("t1ce", 0).write_bytes(whole[: len(whole) // 2])
    site.file("seg", 0).write_bytes(b"no NIfTI at all")
    site.write("seg", raw(1)[1][:, :, :10], subject=1)
    moved = AFFINE.copy()
    moved[2, 3] = 5
    site.write("seg", raw(2)[1], subject=2, affine=moved)
    site.write("t2", np.full(SHAPE, np.nan, np.float32), subject=3)
    site.write("seg", raw(4)[1].astype(np.int16) + 254, subject=4)
    found = site.prepare()
    assert [e is None for e in found.entries] == [True] * 5 + [False]
    ids = [f"FeTS2022_0000{n}" for n in range(6)]
    assert set(found.voxels) == set(ids[1:])
    starts = [
        f"{ids[0]}: {ids[0]}_t1ce.nii.gz: cut short or damaged",
        f"{ids[0]}: {ids[0]}_seg.nii.gz: no NIfTI file",
        f"{ids[1]}: {ids[1]}_seg.nii.gz: 16 x 16 x 10 voxels, {ids[1]}_t1.nii.gz has 16 x 16 x 12; resample",
        f"{ids[2]}: {ids[2]}_seg.nii.gz: lies elsewhere in space than {ids[2]}_t1.nii.gz (corner voxels lie up to 5",
        f"{ids[3]}: {ids[3]}_t2.nii.gz: 3072 NaN or infinite voxels; mend the file, or set data.nonfinite='background'",
        f"{ids[4]}: {ids[4]}_seg.nii.gz: label values 256, 258 found, 0 to 255 expected",
    ]
    assert len(found.faults) == 6
    for fault, start in zip(found.faults, starts):
        assert fault.startswith(start) and "\n" not in fault and str(tmp_path) not in fault
    assert "data.check_affine=False" in found.faults[3]
    rows = volume_cache.labels_csv(found.voxels).splitlines()
    assert rows[0].startswith("Subject_ID,voxels_0,voxels_1,voxels_2,voxels_4,voxels_254") and len(rows) == 6
    assert rows[-1].startswith(f"{ids[5]},{found.voxels[ids[5]][0]},")


def test_a_label_elsewhere_in_space_by_option(site):
    moved = AFFINE.copy()
    moved[0, 3] = 3
    site.write("seg", raw()[1], affine=moved)
    assert len(site.prepare().faults) == 1
    allowed = site.prepare(check_affine=False)
    assert not allowed.faults and allowed.entries[0].facts["geometry"].startswith("FeTS2022_00000_seg.nii.gz: lies")
    assert len(site.prepare().faults) == 1 and site.prepare().entries[0] is None  # cached, and refused all the same


def test_nan_as_background_by_option(site):
    x = raw()[0][1].astype(np.float32)
    x[4, 5, 6:8], x[0, 0, 0] = np.nan, np.inf
    site.write("t1ce", x)
    assert len(site.prepare().faults) == 1
    entry = site.prepare(nonfinite="background").entries[0]
    assert entry.facts["nonfinite"] == {"FeTS2022_00000_t1ce.nii.gz": 3}
    x[~np.isfinite(x)] = 0
    want = (x - x.mean(dtype=float)) / x.std(dtype=float)
    np.testing.assert_allclose(arrays(entry)[0][..., 1], want[1:15, 1:15, 1:11], rtol=1e-3, atol=1e-4)
    assert len(site.prepare().faults) == 1  # cached, and refused all the same


def test_values_beyond_float16_are_refused(site):
    site.write("flair", (raw()[0][3] * 100).astype(np.float32))
    found = site.prepare(normalise="none")
    assert len(found.faults) == 1
    assert "flair.nii.gz: values up to" in found.faults[0] and "data.normalise='image'" in found.faults[0]
    assert not site.prepare().faults
