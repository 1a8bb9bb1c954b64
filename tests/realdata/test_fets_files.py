"""FeTS, BraTS and MSD files as they are published: names, labels, geometry, institutions."""

import time

import nibabel
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import label_schemes, nifti, partition_table
from fedjax_seg.data.volume_tree import fets_tree, msd_tree

# Sizes of the institutions 1, 2, ... as published with the FeTS 2022 challenge.
SIZES = {
    1: [511, 6, 15, 47, 22, 34, 12, 8, 4, 8, 14, 11, 35, 6, 13, 30, 9, 382, 4, 33, 35, 7, 5],
    2: [
        170, 170, 171, 6, 15, 16, 15, 16, 22, 34, 12, 8, 4, 8, 14, 11, 12, 11, 12, 6, 13, 30, 9, 127, 127, 128, 4, 33,
        12, 11, 12, 7, 5,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def read(real):
    """{subject: (images, labels, rounded voxels)} of all three cases, and the seconds of the fastest one."""
    cases, seconds = {}, []
    for subject in fets_tree(real / "brats").subjects:
        start = time.process_time()
        images = [nifti.read_image(path) for path in subject.images]
        labels, rounded = nifti.read_labels(subject.label)
        seconds.append(time.process_time() - start)
        cases[subject.id] = images, labels, rounded
    return cases, min(seconds)


def test_three_cases_in_two_namings(real):
    tree = fets_tree(real / "brats", labels=True)
    assert tree.faults == tree.notes == () and tree.channels == ("t1", "t1ce", "t2", "flair")
    assert [[p.name for p in (*s.images, s.label)] for s in tree.subjects] == [
        [f"BraTS-GLI-00000-000-{m}.nii.gz" for m in ("t1n", "t1c", "t2w", "t2f", "seg")],
        [f"TCGA-DU-7294_{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair", "seg_fused")],
        [f"TCGA-FG-6692_{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair", "seg_fused")],
    ]


def test_the_voxels(read):
    cases, seconds = read
    values = {"BraTS-GLI-00000-000": [0, 1, 2, 3], "TCGA-DU-7294": [0, 1, 2], "TCGA-FG-6692": [0, 1, 2, 4]}
    assert list(cases) == list(values)
    for name, (images, labels, rounded) in cases.items():
        assert rounded == 0 and np.unique(labels.data).tolist() == values[name]
        for image in images:
            assert image.data.shape == (240, 240, 155) and image.data.dtype == np.float32
            assert nifti.same_geometry(image.geometry, labels.geometry) == ""
            assert image.geometry.spacing.tolist() == [1, 1, 1] and np.isfinite(image.data).all()
    assert seconds < 4  # about 0.3 on an idle core


def test_the_scheme_of_each_case(read):
    cases, _ = read
    found = {name: np.unique(labels.data) for name, (_, labels, _) in cases.items()}
    with pytest.raises(UserError, match=r"\(brats2023\) in .*GLI-00000.*\(brats2021\) in .*FG-6692"):
        label_schemes.find(found)
    new = found.pop("BraTS-GLI-00000-000")
    assert label_schemes.find(found).name == "brats2021"
    assert label_schemes.find({"new": new}).name == "brats2023"


def test_as_nibabel_reads_them(real, read):
    path = real / "brats" / "TCGA-FG-6692" / "TCGA-FG-6692_flair.nii.gz"
    own, other = read[0]["TCGA-FG-6692"][0][3], nibabel.load(path)
    np.testing.assert_array_equal(own.data, np.asanyarray(other.dataobj))
    np.testing.assert_array_equal(own.geometry.affine, other.affine)


def test_a_prediction_in_the_frame_of_a_case(real, read, tmp_path):
    scheme = label_schemes.SCHEMES["brats2023"]
    folder = real / "brats" / "BraTS-GLI-00000-000"
    labels = read[0]["BraTS-GLI-00000-000"][1].data
    reference = folder / "BraTS-GLI-00000-000-seg.nii.gz"  # qform only: its sform code is 0
    classes = label_schemes.to_classes(labels, scheme)
    nifti.write_labels(tmp_path / "out.nii.gz", label_schemes.to_values(classes, scheme), reference)
    old, new = nibabel.load(reference), nibabel.load(tmp_path / "out.nii.gz")
    np.testing.assert_array_equal(np.asanyarray(new.dataobj), np.asanyarray(old.dataobj))
    np.testing.assert_array_equal(new.affine, old.affine)
    assert (new.header["qform_code"], new.header["sform_code"]) == (1, 0) and new.get_data_dtype() == np.uint8


@pytest.mark.parametrize("which", SIZES)
def test_the_institutions(real, which):
    rows, notes = partition_table.read(real / "fets" / f"partitioning_{which}.csv")
    assert notes == [] and len(rows) == 1251
    sizes = partition_table.sizes(rows)
    assert sizes == {str(i): n for i, n in enumerate(SIZES[which], start=1)} and list(sizes)[9] == "10"
    assert rows[0] == ("FeTS2022_01341", "1", "")
    parts, notes = partition_table.split(rows)
    # int(.8 n) of every institution train: 4 -> 3/1
    assert [(len(a), len(b)) for a, b in parts.values()] == [(8 * n // 10, n - 8 * n // 10) for n in SIZES[which]]
    assert notes == [] and min(len(b) for _, b in parts.values()) == 1


def test_the_other_tables(real):
    with pytest.raises(UserError, match=r"validation.csv: 219 row\(s\), all with Partition_ID -1"):
        partition_table.read(real / "fets" / "validation.csv")
    rows, _ = partition_table.read(real / "fets" / "small_split.csv")
    assert list(partition_table.sizes(rows).values()) == [4, 3, 3]
    rows, _ = partition_table.read(real / "hippocampus" / "partitioning_12.csv")
    sizes = partition_table.sizes(rows)
    assert len(rows) == 260 and len(sizes) == 12 and (min(sizes.values()), max(sizes.values())) == (4, 58)


def test_the_hippocampus(real):
    rows, _ = partition_table.read(real / "hippocampus" / "partitioning_12.csv")
    tree = msd_tree(real / "hippocampus", wanted={row.subject for row in rows})
    assert len(tree.subjects) == 260 and tree.channels == ("image",) and tree.faults == tree.notes == ()
    values = {}
    for subject in tree.subjects[::20]:
        image, (labels, rounded) = nifti.read_image(subject.images[0], channels=True), nifti.read_labels(subject.label)
        assert rounded == 0 and nifti.same_geometry(image.geometry, labels.geometry) == ""
        values[subject.id] = np.unique(labels.data)
    assert label_schemes.find(values, "plain", layout="msd").classes == ("background", "1", "2")
