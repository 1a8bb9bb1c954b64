"""Subjects that cannot be used: all their faults at once, and the options that let some pass."""

import csv
import io
import os
import shutil

import numpy as np
import pytest
from cached_site import Site, arrays, raw
from volume_folder import AFFINE, SHAPE, VolumeFolder, classes

from fedjax_seg import data
from fedjax_seg.core.checks import DataFaults
from fedjax_seg.data import nifti, volume_report


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
    rows = volume_report.labels_csv(found.voxels).splitlines()
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


@pytest.fixture
def tree(tmp_path):
    """Two sites of three subjects."""
    return VolumeFolder(tmp_path / "tree").sites([3, 3])


def load(tree, **options):
    places = {"root": str(tree.root), "partition": "partitioning.csv", "cache": str(tree.root.parent / "cache")}
    loaded = data.make("fets", **({"patch": (4, 4, 4), "workers": 2} | places | options))
    loaded.store.close()
    return loaded


def refused(tree, **options):
    with pytest.raises(DataFaults) as error:
        load(tree, **options)
    return error.value


def warnings(loaded):
    return [line for line in loaded.summary if line.startswith("WARNING")]


def test_a_fault_of_the_table_hides_no_missing_subject(tree):
    tree.table(more=["2,FeTS2022_00000", "3,FeTS2022_99999", ",FeTS2022_88888"])
    assert list(refused(tree).faults) == [
        "partitioning.csv: line 8: FeTS2022_00000 is already in line 2; delete one, a subject has one site",
        "partitioning.csv: line 10: no Partition_ID; fill the cell in",
        f"1 subject(s) wanted but not found in {tree.root}: FeTS2022_99999; close to FeTS2022_99999: FeTS2022_00005",
    ]
    assert len(refused(tree, sites=("1",)).faults) == 2  # who is wanted of site 1 is there


def test_labels_of_a_subject_that_lacks_a_file_are_counted(tree):
    (tree.root / "FeTS2022_00001" / "FeTS2022_00001_t1.nii.gz").unlink()
    tree.table()
    error = refused(tree)
    rows = {row["Subject_ID"]: row for row in csv.DictReader(io.StringIO(error.files["labels.csv"]))}
    assert list(rows) == [f"FeTS2022_0000{n}" for n in range(6)] and len(error.faults) == 1
    want = np.bincount(classes(1, 4).ravel(), minlength=4).tolist()
    assert [int(rows["FeTS2022_00001"][f"voxels_{v}"]) for v in (0, 1, 2, 4)] == want


def test_a_foreign_value_is_one_fault_that_names_the_scheme_of_the_rest(tree):
    label = raw(1)[1].astype(np.uint8)
    label[8, 8, 6] = 9
    nifti.write_volume(tree.root / "FeTS2022_00001" / "FeTS2022_00001_seg.nii.gz", label, AFFINE)
    tree.table()
    assert list(refused(tree).faults) == [
        "FeTS2022_00001: label values 0, 1, 2, 4, 9 found, 0, 1, 2, 4 allowed (brats2021); the other 5 file(s) fit it"
    ]


def test_the_same_scan_under_two_ids(tree):
    def again(of, name, site):
        shutil.copytree(tree.root / of, tree.root / name)
        for path in (tree.root / name).iterdir():
            path.rename(path.with_name(path.name.replace(of, name)))
        tree.rows.append((site, name))

    uses = ("train", "train", "val") * 2
    tree.rows = [(f"{site}", f"{name},{use}") for (site, name), use in zip(tree.rows, uses)]
    tree.table(header="Partition_ID,Subject_ID,TrainOrVal")
    assert not warnings(load(tree))
    again("FeTS2022_00000", "copy", "2")
    tree.rows[-1] = ("2", "copy,train")
    tree.table(header="Partition_ID,Subject_ID,TrainOrVal")
    (told,) = warnings(load(tree))
    assert told == (
        "WARNING: the same scan: 1 under more than one id (FeTS2022_00000 of 1, train = copy of 2, train); keep one"
        " id of each"
    )
    again("FeTS2022_00002", "other", "2")
    tree.rows[-1] = ("2", "other,train")
    tree.table(header="Partition_ID,Subject_ID,TrainOrVal")
    loud, told = warnings(load(tree))
    assert loud.startswith("WARNING: THE SAME SCAN TRAINS AND TESTS") and "FeTS2022_00002 of 1, test = other" in loud
    assert "copy" in told and "other" not in told


def test_orientations_that_differ(tmp_path):
    tree = VolumeFolder(tmp_path / "tree")
    for n in range(4):
        tree.subject(site=1, affine=np.diag([1.0, 1, 1, 1]) if n != 2 else AFFINE)
    tree.table()
    loaded = load(tree)
    assert loaded.about["orientation"] == "RAS"
    assert [line for line in loaded.summary if "otherwise" in line] == [
        "note: 1 subject(s) (FeTS2022_00002: LPS) lie otherwise than the first (RAS): arrays and pictures are not"
        " turned"
    ]


def test_relative_paths_outlive_a_change_of_the_folder(tree, monkeypatch, tmp_path):
    tree.table()
    monkeypatch.chdir(tmp_path)
    loaded = load(tree, root="tree", cache="cache")
    want = loaded.store.whole(0)["x"]
    os.chdir("/")
    case = loaded.store.whole(0)
    np.testing.assert_array_equal(case["x"], want)
    inside = case["y"][tuple(slice(0, n) for n in case["shape"])]
    path = loaded.store.save(0, inside, tmp_path / "out")
    np.testing.assert_array_equal(nifti.read_labels(path)[0].data, raw()[1])
