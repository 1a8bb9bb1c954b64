"""Real volumes: the hippocampi of the Decathlon, and brain tumours of BraTS and TCGA."""

import os
import time

import numpy as np
import pytest

from fedjax_seg.core.checks import DataFaults
from fedjax_seg.data import nifti
from fedjax_seg.data.fets import fets
from fedjax_seg.data.msd import msd

SITES = {"1": 58, "2": 46, "3": 36, "4": 28, "5": 22, "6": 18, "7": 14, "8": 12, "9": 9, "10": 7, "11": 6, "12": 4}
GLI, DU, FG = "BraTS-GLI-00000-000", "TCGA-DU-7294", "TCGA-FG-6692"


@pytest.fixture(scope="module")
def hippocampi(real, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("hippocampi"))
    begun = time.perf_counter()
    options = {"label_scheme": "plain", "patch": (32, 32, 32)}
    load = lambda **more: msd(str(real / "hippocampus"), "partitioning_12.csv", cache=cache, **options, **more)
    loaded = load()
    seconds = time.perf_counter() - begun
    yield loaded, load, seconds
    loaded.store.close()


@pytest.fixture(scope="module")
def tumours(real, tmp_path_factory):
    """A tree of links, in which the one BraTS case is there twice: a site needs two subjects."""
    path = tmp_path_factory.mktemp("tumours")
    (path / "tree").mkdir()
    for name in (GLI, DU, FG):
        os.symlink(real / "brats" / name, path / "tree" / name)
    os.symlink(real / "brats" / GLI, path / "tree" / "GLI-again")

    def load(*rows, **options):
        table = path / "table.csv"
        table.write_text("\r\n".join(["Partition_ID,Subject_ID,TrainOrVal", *rows]))
        return fets(str(path / "tree"), str(table), cache=str(path / "cache"), **options)

    return load


def test_twelve_sites(hippocampi):
    loaded, load, seconds = hippocampi
    assert dict(zip(loaded.sites, np.bincount(loaded.site_of).tolist())) == SITES and len(loaded.case_ids) == 260
    assert loaded.classes == ("background", "1", "2") and not [t for t in loaded.summary if t.startswith("WARNING")]
    assert loaded.about["orientation"] == "RAS"
    for k, n in enumerate(SITES.values()):
        assert len(loaded.splits[0].train[k]) == int(0.8 * n)
    assert seconds < 60  # about 2 on two idle cores
    again = load()
    assert "0 of 260 subjects read now" in "\n".join(again.summary)
    np.testing.assert_array_equal(again.arrays["content"], loaded.arrays["content"])


def test_hippocampi_are_their_files(real, hippocampi, tmp_path):
    loaded, _, _ = hippocampi
    for n in (0, 131, 259):
        case, name = loaded.store.whole(n), loaded.case_ids[n]
        inside = tuple(slice(0, s) for s in case["shape"])
        image = nifti.read_image(real / "hippocampus" / "imagesTr" / f"{name}.nii.gz")
        label, _ = nifti.read_labels(real / "hippocampus" / "labelsTr" / f"{name}.nii.gz")
        assert case["full"].tolist() == list(label.data.shape)
        np.testing.assert_array_equal(np.bincount(case["y"].ravel())[1:], np.bincount(label.data.ravel())[1:])
        z = (image.data - image.data.mean(dtype=float)) / image.data.std(dtype=float)
        assert float(case["x"][inside].max()) == pytest.approx(z.max(), rel=1e-3)
        path = loaded.store.save(n, case["y"][inside], tmp_path)
        got, _ = nifti.read_labels(path)
        np.testing.assert_array_equal(got.data, label.data)
        np.testing.assert_array_equal(got.geometry.affine, image.geometry.affine)


def test_patches_of_a_site(hippocampi):
    loaded, _, _ = hippocampi
    rows = loaded.splits[0].train[11]
    key = np.array([3, 4], np.uint32)
    batches = [loaded.store.patches(rows, len(rows), key, step, 16, 1) for step in range(9)]
    assert sum(b["mask"].sum() for b in batches) == 3 * 40 and not batches[8]["mask"].any()
    real_ones = np.concatenate([b["y"][b["mask"] == 1] for b in batches])
    assert real_ones.any((1, 2, 3)).all() and real_ones.max() == 2


def test_two_schemes_are_refused_together_and_read_apart(real, tumours, tmp_path):
    with pytest.raises(DataFaults) as error:
        tumours(f"1,{GLI},train", f"1,{DU},val", f"1,{FG},train")
    (fault,) = error.value.faults
    assert "two schemes in one data set" in fault and GLI in fault and FG in fault
    rows = error.value.files["labels.csv"].splitlines()
    assert rows[0] == "Subject_ID,voxels_0,voxels_1,voxels_2,voxels_3,voxels_4" and len(rows) == 4
    assert f"{DU},8903812,9281,14907,0,0" in rows
    for own, scheme, last in ((("GLI-again", GLI), "brats2023", 3), ((DU, FG), "brats2021", 4)):
        loaded = tumours(f"1,{own[0]},train", f"1,{own[1]},val")
        assert loaded.about["label_scheme"] == scheme and loaded.about["label_values"][3] == last
        fresh = 1 if "GLI-again" in own else 0  # the others were read with the faults
        assert f"{fresh} of 2 subjects read now" in "\n".join(loaded.summary)
        assert (loaded.arrays["full"] == (240, 240, 155)).all() and (loaded.arrays["spacing"] == 1).all()
        assert (loaded.arrays["shape"] < 200).all()
        assert loaded.about["orientation"] == "LPS"
        twice = [text for text in loaded.summary if text.startswith("WARNING: THE SAME SCAN TRAINS AND TESTS")]
        assert len(twice) == ("GLI-again" in own)
        case = loaded.store.whole(0)
        path = loaded.store.save(0, case["y"][tuple(slice(0, s) for s in case["shape"])], tmp_path)
        want, got = (nifti.read_labels(p)[0] for p in (labels_of(real, loaded.case_ids[0]), path))
        np.testing.assert_array_equal(got.data, want.data)
        np.testing.assert_array_equal(got.geometry.affine, want.geometry.affine)
        loaded.store.close()


def labels_of(real, subject):
    name = GLI if subject == "GLI-again" else subject
    return real / "brats" / name / f"{name}{'-seg' if name == GLI else '_seg_fused'}.nii.gz"


def test_a_case_without_enhancing_tumour_needs_its_scheme_named(tumours):
    rows = (f"1,{DU},train", "1,GLI-again,val")
    assert tumours(*rows, label_scheme="brats2024_post").classes[-1] == "RC"
