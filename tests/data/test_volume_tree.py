"""Folders of volumes: every naming is read, every fault is one line, and all of them come at once."""

import os
import re

import numpy as np
import pytest
from volume_folder import KINDS, NAMINGS, VolumeFolder, msd_folder

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import nifti, volume_tree
from fedjax_seg.data.volume_tree import fets_tree, msd_tree


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")  # no file is opened for its names
    return path


def named(root, subject, *names):
    for name in names:
        touch(root / subject / name)


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming(tmp_path, naming):
    VolumeFolder(tmp_path).subject("BraTS-GLI-00000-000", naming=naming)
    tree = fets_tree(tmp_path, labels=True)
    assert tree.faults == tree.notes == () and tree.channels == ("t1", "t1ce", "t2", "flair")
    (subject,) = tree.subjects
    assert subject.id == "BraTS-GLI-00000-000"
    expected = [pattern.format(subject.id) for pattern in NAMINGS[naming]]
    assert [p.name for p in (*subject.images, subject.label)] == expected
    # the brightness of channel c outside the tumour is 400 + 150 c: the files are in the channels' order
    means = [nifti.read_image(p).data[1, 1, 1] for p in subject.images]
    assert np.abs(np.array(means) - [400, 550, 700, 850]).max() < 100


@pytest.mark.parametrize("alias, kind", volume_tree.ALIASES.items())
@pytest.mark.parametrize("form", ["{i}_{a}.nii.gz", "{i}-{a}.nii", "{i}_brain_{a}.nii.gz", "{i}_{A}.NII.GZ", "{a}.nii"])
def test_every_alias_in_every_form(tmp_path, alias, kind, form):
    plain = {k: f"S-1_{k}.nii.gz" for k in KINDS}
    plain[kind] = form.format(i="S-1", a=alias, A=alias.upper())
    named(tmp_path, "S-1", *plain.values())
    tree = fets_tree(tmp_path, labels=True)
    (subject,) = tree.subjects
    assert [p.name for p in (*subject.images, subject.label)] == [plain[k] for k in KINDS] and tree.notes == ()


def test_sites_may_name_one_modality_differently(tmp_path):
    folder = VolumeFolder(tmp_path)
    for site, naming in (("A", "fets2022"), ("B", "capitals"), ("C", "brats2023")):
        folder.subject(f"{site}1", naming=naming, below=site)
    tree = fets_tree(tmp_path, labels=True)
    assert [s.id for s in tree.subjects] == ["A1", "B1", "C1"] and tree.faults == ()
    assert [s.images[1].name for s in tree.subjects] == ["A1_t1ce.nii.gz", "B1_T1Gd.NII.GZ", "C1-t1c.nii.gz"]


def test_all_faults_at_once(tmp_path):
    full = [f"{k}.nii.gz" for k in KINDS]
    named(tmp_path, "P1", *(f"P1_{n}" for n in full))
    named(tmp_path, "P2", *(f"P2_{n}" for n in full), "P2_t1Gd.nii.gz")
    named(tmp_path, "P3", *(f"P3_{n}" for n in full[2:]))
    named(tmp_path, "P4", "P4_seg.nii.gz", "P4_final_seg.nii", *(f"P4_{n}" for n in full[:4]))
    named(tmp_path, "P5", *(f"P5_{n}" for n in full[:4]), "W39_1998.09.19_Mask.nii")
    named(tmp_path, "A/P6", *(f"P6_{n}" for n in full))
    named(tmp_path, "B/P6", *(f"P6_{n}" for n in full))
    tree = fets_tree(tmp_path, labels=True)
    assert [s.id for s in tree.subjects] == ["P1"]
    assert list(tree.faults) == [
        "P2: P2_t1Gd.nii.gz and P2_t1ce.nii.gz are both t1ce; delete or rename one",
        "P3: no t1 (t1|t1n), t1ce (t1ce|t1c|t1gd); found: P3_flair.nii.gz, P3_seg.nii.gz, P3_t2.nii.gz",
        "P4: P4_final_seg.nii and P4_seg.nii.gz are both seg; delete or rename one",
        "P5: no seg (seg|final_seg|seg_fused|segm); found: P5_flair.nii.gz, P5_t1.nii.gz, P5_t1ce.nii.gz,"
        " P5_t2.nii.gz, W39_1998.09.19_Mask.nii",
        f"P6: two folders of that name, A{os.sep}P6 and B{os.sep}P6; one folder per subject expected",
    ]
    assert {name: path.name for name, path in tree.labels.items()} == {"P2": "P2_seg.nii.gz", "P3": "P3_seg.nii.gz"}
    without = fets_tree(tmp_path)  # labels are not asked for
    assert [(s.id, s.label) for s in without.subjects][1:] == [("P5", None)]


def test_the_segmentation_of_another_name_in_brats_2020(tmp_path):
    """BraTS20_Training_355 as the challenge gave it out."""
    name = "BraTS20_Training_355"
    named(tmp_path, name, *(f"{name}_{k}.nii" for k in KINDS[:4]), "W39_1998.09.19_Segm.nii")
    (subject,) = fets_tree(tmp_path, labels=True).subjects
    assert subject.label.name == "W39_1998.09.19_Segm.nii"
    touch(tmp_path / name / f"{name}_seg.nii")
    (fault,) = fets_tree(tmp_path, labels=True).faults
    assert fault.endswith("BraTS20_Training_355_seg.nii and W39_1998.09.19_Segm.nii are both seg; delete or rename one")


def linked(root):
    """P1 is whole, P2 a link into nowhere, P3 one in a circle, P4 an empty folder, P5 lacks a file."""
    files = [f"{k}.nii" for k in KINDS]
    named(root, "P1", *files)
    (root / "P2").symlink_to("nowhere")
    (root / "P3").symlink_to("P3")
    touch(root / "P4" / "notes.txt")
    named(root, "P5", *files[1:])


def test_broken_links_hide_no_other_fault(tmp_path):
    linked(tmp_path)
    tree = fets_tree(tmp_path, wanted={f"P{n}" for n in range(1, 7)}, labels=True)
    assert [s.id for s in tree.subjects] == ["P1"]
    assert list(tree.faults) == [
        "P2: is a broken link (to nowhere); mend it",
        "P3: is a broken link (to P3); mend it",
        "P5: no t1 (t1|t1n); found: flair.nii, seg.nii, t1ce.nii, t2.nii",
        "P4: no NIfTI file in its folder; found: notes.txt",
        f"1 subject(s) wanted but not found in {tmp_path}: P6",
    ]
    assert fets_tree(tmp_path, wanted={"P1"}, labels=True).faults == ()  # nobody asked for the others
    assert [f[:2] for f in fets_tree(tmp_path, wanted={"P1", "P2"}).faults] == ["P2"]
    assert [f[:2] for f in fets_tree(tmp_path, labels=True).faults] == ["P2", "P3", "P5"]


def test_a_locked_folder_hides_no_other_fault(tmp_path, monkeypatch):
    """Root may read everything: the system's answer is played."""
    linked(tmp_path)
    named(tmp_path, "site/P7", "t1.nii")
    scan = os.scandir

    def locked(path):
        if os.path.basename(path) in ("P1", "site"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    shut = "cannot be read (Permission denied); mend its permissions"
    tree = fets_tree(tmp_path, wanted={"P1", "P5"}, labels=True)
    assert list(tree.faults) == [f"P1: {shut}", "P5: no t1 (t1|t1n); found: flair.nii, seg.nii, t1ce.nii, t2.nii"]
    faults = fets_tree(tmp_path, wanted={"P7"}).faults  # it may lie in any of these
    assert f"site: {shut}" in faults and "P7" in faults[-1]
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        fets_tree(tmp_path)


def test_extra_files_are_told_in_one_line(tmp_path):
    folder = VolumeFolder(tmp_path)
    for name in ("P1", "P2"):
        folder.subject(name)
        touch(tmp_path / name / f"{name}_swi.nii.gz")
    touch(tmp_path / "P2" / "P2_brain_mask.nii.gz")
    for junk in ("._P2_t1.nii.gz", "P2_t1.json", "notes.txt", ".t1.nii.gz"):
        touch(tmp_path / "P2" / junk)
    tree = fets_tree(tmp_path)
    assert len(tree.subjects) == 2 and tree.faults == ()
    assert tree.notes == ("files that are none of t1, t1ce, t2, flair, seg ignored (subjects): mask (1), swi (2)",)


def test_only_the_wanted_subjects(tmp_path):
    folder = VolumeFolder(tmp_path)
    for name in ("00012", "00013"):
        folder.subject(name, below="site")
    folder.subject("00014", skip=("t1",))  # its fault is nobody's business
    tree = fets_tree(tmp_path, wanted={"00012"})
    assert [s.id for s in tree.subjects] == ["00012"] and tree.faults == ()
    assert tree.notes == ("2 subject(s) ignored: not wanted",)
    tree = fets_tree(tmp_path, wanted=["00013", "12", *(f"x{i}" for i in range(9))])
    assert [s.id for s in tree.subjects] == ["00013"]
    assert tree.faults == (
        f"10 subject(s) wanted but not found in {tmp_path}: 12, x0, x1, x2, x3, x4, x5, x6, x7, x8; close to 12: 00012",
    )
    for many, text in (
        (["SITE"], "SITE$"),
        (["0001"], "0001; close to 0001: 0001[234]$"),
        ([f"x{i}" for i in range(11)], "x8, ...$"),
    ):
        assert re.search(text, fets_tree(tmp_path, wanted=many).faults[0])
    assert [s.id for s in fets_tree(tmp_path, wanted=[]).subjects] == []


def test_a_name_that_starts_like_another(tmp_path):
    """The folder's name is cut off whole parts only: FeTS_1 is no prefix of FeTS_12."""
    named(tmp_path, "FeTS_1", *(f"FeTS_12_{k}.nii" for k in KINDS))
    named(tmp_path, "patient_t1", *(f"patient_t1_{k}.nii" for k in KINDS))
    named(tmp_path, "s", *(f"{k}.nii" for k in KINDS))  # seg.nii is not the 'eg' of s
    tree = fets_tree(tmp_path, labels=True)
    assert [s.id for s in tree.subjects] == ["FeTS_1", "patient_t1", "s"] and tree.notes == ()


def test_no_folder_of_subjects(tmp_path):
    with pytest.raises(
        UserError, match=r"nowhere: no such folder; one with subject folders such as .* expected \(.* holds"
    ) as error:
        fets_tree(tmp_path / "nowhere")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is not there either"):
        fets_tree(tmp_path / "no" / "where")
    with pytest.raises(UserError, match=r"no folder with NIfTI files; SUBJECT/.* expected, found: nothing"):
        fets_tree(tmp_path)
    named(tmp_path, "docs", "a.txt")
    named(tmp_path, ".", "FeTS2022_00000_t1.nii.gz", "readme.txt")
    with pytest.raises(UserError, match=r"found: FeTS2022_00000_t1.nii.gz, docs/, readme.txt$"):
        fets_tree(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        fets_tree(tmp_path / "readme.txt")
    for i in range(9):
        named(tmp_path, f"d{i}", "a.txt")
    with pytest.raises(UserError, match=r"d3/, d4/, ... \(12\)$"):
        fets_tree(tmp_path)


def test_depth(tmp_path):
    files = [f"{k}.nii" for k in KINDS]
    named(tmp_path, "release/site/P1", *files)
    named(tmp_path, "too/deep/by/one", *files)
    named(tmp_path, "site", "atlas.nii.gz")  # beside the subjects of a site
    named(tmp_path, "site/P2", *files)
    named(tmp_path, "site/P2/steps", "P2_t1.nii")  # what a tool leaves in a subject's folder
    tree = fets_tree(tmp_path)
    assert [s.id for s in tree.subjects] == ["P1", "P2"] and tree.faults == ()


@pytest.mark.parametrize("end", [".nii.gz", ".nii", ".NII.GZ"])
def test_an_msd_folder(tmp_path, end):
    ids = msd_folder(tmp_path, subjects=3, end=end)
    for name in ("imagesTr/._case_000.nii.gz", "labelsTr/._case_000.nii.gz", "imagesTs/case_900.nii.gz", ".DS_Store"):
        touch(tmp_path / name)
    tree = msd_tree(tmp_path)
    assert [s.id for s in tree.subjects] == ids and tree.channels == ("image",) and tree.faults == tree.notes == ()
    assert [(s.images[0].name, s.label.name) for s in tree.subjects] == [(i + end, i + end) for i in ids]
    assert all(len(s.images) == 1 and s.images[0].parent.name == "imagesTr" for s in tree.subjects)


MODALITIES = '{"modality": {"0": "FLAIR", "1": "T1w", "10": "T2w", "2": "t1gd"}, "labels": {"0": "background"}}'


def test_the_channels_of_an_msd_folder(tmp_path):
    msd_folder(tmp_path / "a", subjects=1, channels=4)
    assert msd_tree(tmp_path / "a").channels == ("channel0", "channel1", "channel2", "channel3")
    msd_folder(tmp_path / "b", subjects=1, channels=4, dataset=MODALITIES)
    assert msd_tree(tmp_path / "b").channels == ("FLAIR", "T1w", "t1gd", "T2w")  # 10 is after 2
    msd_folder(tmp_path / "c", subjects=1, dataset='{"channel_names": {"0": "MRI"}}')
    assert msd_tree(tmp_path / "c").channels == ("MRI",)
    for text in ("{", "[]", "{}", '{"modality": "MRI"}', '{"modality": {"first": "MRI"}}'):
        (tmp_path / "c" / "dataset.json").write_text(text)
        with pytest.raises(
            UserError, match=r"dataset.json: no 'modality' that can be read .* or no dataset.json at all"
        ) as error:
            msd_tree(tmp_path / "c")
        assert "\n" not in str(error.value)


def test_faults_of_an_msd_folder(tmp_path):
    for name in ("imagesTr/a.nii.gz", "labelsTr/a.nii.gz", "imagesTr/b.nii.gz", "labelsTr/c.nii.gz"):
        touch(tmp_path / name)
    for name in ("imagesTr/d.nii.gz", "imagesTr/d.nii", "labelsTr/d.nii"):
        touch(tmp_path / name)
    (tmp_path / "dataset.json").write_text('{"modality": {"0": "MRI"}}')
    tree = msd_tree(tmp_path)
    assert [s.id for s in tree.subjects] == ["a"]
    assert list(tree.faults) == [
        "b: imagesTr/b.nii.gz has no label in labelsTr/",
        "c: labelsTr/c.nii.gz has no image in imagesTr/",
        "d: d.nii and d.nii.gz in imagesTr/; delete one",
    ]
    assert [(s.id, s.label is None) for s in msd_tree(tmp_path, labels=False).subjects] == [("a", False), ("b", True)]
    tree = msd_tree(tmp_path, wanted=["a", "z", "c"])
    assert [s.id for s in tree.subjects] == ["a"] and tree.notes == ("2 subject(s) ignored: not wanted",)
    assert tree.faults == (f"2 subject(s) wanted but not found in {tmp_path}: c, z",)


def test_no_msd_folder(tmp_path):
    msd_folder(tmp_path / "Task04_Hippocampus", subjects=1)
    with pytest.raises(
        UserError, match=r"no image in imagesTr/; .* found: Task04_Hippocampus/; Task04_Hippocampus in it has one"
    ):
        msd_tree(tmp_path)
    touch(tmp_path / "nn" / "labelsTr" / "case_001.nii.gz")
    touch(tmp_path / "nn" / "imagesTr" / "case_001_0000.nii.gz")
    with pytest.raises(UserError, match=r"a file per channel \(case_001_0000.nii.gz, as nnU-Net has them\)"):
        msd_tree(tmp_path / "nn")
    with pytest.raises(UserError, match="no such folder"):
        msd_tree(tmp_path / "none")
