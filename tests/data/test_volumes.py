"""From a tree of volumes and a table to FederatedData: who is where, what is told, what is refused."""

import csv
import inspect
import io
import json
import shutil

import numpy as np
import pytest
from volume_folder import NAMINGS, SHAPE, VolumeFolder, classes, msd_folder

from fedjax_seg import data
from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data import nifti
from fedjax_seg.data.federated import digest
from fedjax_seg.data.fets import fets
from fedjax_seg.data.msd import msd
from fedjax_seg.data.volumes import Options

SMALL = {"patch": (4, 4, 4), "patches": 3, "workers": 2}


class Study:
    def __init__(self, path):
        self.path, self.folder = path, VolumeFolder(path / "tree")

    def load(self, **options):
        known = {"root": str(self.folder.root), "partition": "partitioning.csv", "cache": str(self.path / "cache")}
        loaded = data.make("fets", **(known | SMALL | options))
        loaded.store.close()
        return loaded

    def faults(self, **options):
        with pytest.raises(DataFaults) as error:
            self.load(**options)
        assert all("\n" not in fault for fault in error.value.faults)
        return error.value


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four sites of 2, 3, 5 and 2 subjects, in every naming; what is read only by tests that write nothing."""
    made = Study(tmp_path_factory.mktemp("four"))
    namings = list(NAMINGS)
    for site, size in (("10", 2), ("2", 3), ("1", 5), ("3", 2)):
        for _ in range(size):
            made.folder.subject(site=site, naming=namings[len(made.folder.rows) % len(namings)])
    made.folder.table()
    return made


def line(loaded, start):
    found = [text for text in loaded.summary if text.startswith(start)]
    assert len(found) == 1, loaded.summary
    return found[0]


def test_sites_and_splits(four):
    loaded = four.load()
    assert loaded.sites == ("1", "2", "3", "10")
    assert np.bincount(loaded.site_of).tolist() == [5, 3, 2, 2] and loaded.site_of.dtype == np.int32
    (split,) = loaded.splits
    assert split.name == "split0"
    assert [len(p) for p in split.train] == [4, 2, 1, 1] and [len(p) for p in split.test] == [1, 1, 1, 1]
    assert sorted(np.concatenate([*split.train, *split.test])) == list(range(12))
    table = {subject: site for site, subject in four.folder.rows}
    for k, site in enumerate(loaded.sites):
        assert {table[loaded.case_ids[i]] for i in (*split.train[k], *split.test[k])} == {site}
    assert loaded.patient_ids == loaded.case_ids and loaded.classes == ("background", "NCR", "ED", "ET")


def test_arrays_are_small_facts(four):
    loaded = four.load()
    found = {name: (v.dtype, v.shape) for name, v in loaded.arrays.items()}
    assert found == {
        "content": (np.uint8, (12, 32)),
        "shape": (np.int32, (12, 3)),
        "full": (np.int32, (12, 3)),
        "spacing": (np.float32, (12, 3)),
    }
    assert (loaded.arrays["full"] == SHAPE).all() and (loaded.arrays["shape"] == (14, 14, 10)).all()
    assert len({c.tobytes() for c in loaded.arrays["content"]}) == 12


def test_the_store_has_the_cases_in_this_order(four):
    loaded = four.load()
    for n in (0, 7, 11):
        number = int(loaded.case_ids[n].removeprefix("FeTS2022_"))
        case = loaded.store.whole(n)
        np.testing.assert_array_equal(case["y"][:14, :14, :10], classes(number, 4)[1:15, 1:15, 1:11])
    batch = loaded.store.patches(np.array([3, 4]), 2, np.array([0, 1], np.uint32), 0, 8, 1)
    assert batch["x"].shape == (8, 4, 4, 4, 4) and batch["mask"].sum() == 6
    loaded.store.close()


def test_the_order_of_table_and_files_does_not_matter(four, tmp_path):
    text = (four.folder.root / "partitioning.csv").read_text().splitlines()
    table = tmp_path / "other.csv"
    table.write_text("\n".join([text[0], *text[:0:-1]]))
    one, other = four.load(), four.load(partition=str(table), cache=str(tmp_path / "cache"), workers=1)
    assert digest(one) == digest(other) and one.about == other.about and one.files == other.files
    assert digest(four.load(split_seed=1)) != digest(one)
    assert digest(four.load(normalise="brain")) != digest(one)


def test_split_csv_gives_the_same_split_again(four, tmp_path):
    one = four.load(split_seed=3)
    (tmp_path / "split.csv").write_text(one.files["split.csv"])
    other = four.load(partition=str(tmp_path / "split.csv"))
    assert digest(one) == digest(other)
    rows = list(csv.DictReader(io.StringIO(one.files["split.csv"])))
    assert sum(row["TrainOrVal"] == "train" for row in rows) == 8 and len(rows) == 12


def test_some_sites_in_an_order_of_ones_own(four, tmp_path):
    loaded = four.load(sites=("10", "1"), cache=str(tmp_path / "cache"))
    assert loaded.sites == ("10", "1") and np.bincount(loaded.site_of).tolist() == [2, 5]
    assert len(list((tmp_path / "cache").rglob("meta.json"))) == 7  # the others are not read
    whole = four.load()
    sides = [{d.case_ids[i] for i in d.splits[0].test[d.sites.index("1")]} for d in (loaded, whole)]
    assert sides[0] == sides[1]
    with pytest.raises(UserError, match=r"data.sites: unknown name '4'; known: 1, 10, 2, 3"):
        four.load(sites=("4",))


def test_what_is_told(four):
    loaded = four.load()
    about = loaded.about
    assert about["table1"] == [
        {"site": "1", "total": 5, "train": 4, "test": 1},
        {"site": "2", "total": 3, "train": 2, "test": 1},
        {"site": "3", "total": 2, "train": 1, "test": 1},
        {"site": "10", "total": 2, "train": 1, "test": 1},
    ]
    assert about["channels"] == ["t1", "t1ce", "t2", "flair"] and about["subjects"] == 12
    assert about["label_scheme"] == "brats2021" and about["label_values"] == [0, 1, 2, 4]
    assert about["regions"] == [["ET", [3]], ["TC", [1, 3]], ["WT", [1, 2, 3]]]
    assert about["orientation"] == "LPS"  # of the fixture's affine: -x, -y, +z
    assert about["synthetic"] is False and about["patch"] == [4, 4, 4] and about["sampling"] == "foreground"
    assert str(four.path) not in json.dumps(about)
    assert line(loaded, "label scheme:") == "label scheme: brats2021 (0 background, 1 NCR, 2 ED, 4 ET)"
    assert str(four.path / "cache") in line(loaded, "cache:")
    assert "0 of 12 subjects read now" in line(four.load(), "cache:")
    rows = list(csv.DictReader(io.StringIO(loaded.files["labels.csv"])))
    for row in rows:
        own = classes(int(row["Subject_ID"][-5:]), 4)
        assert [int(row[f"voxels_{v}"]) for v in (0, 1, 2, 4)] == np.bincount(own.ravel(), minlength=4).tolist()
    assert len(list(csv.DictReader(io.StringIO(loaded.files["cohort.csv"])))) == len(rows) == 12


def test_the_generator_says_so_itself(study):
    study.folder.sites([2]).table()
    facts = {"generator": "phantoms", "synthetic": True, "seed": 3}
    (study.folder.root / "generator.json").write_text(json.dumps(facts))
    loaded = study.load()
    assert loaded.about["synthetic"] is True and loaded.about["generator"] == "phantoms"
    (study.folder.root / "generator.json").write_text("{")
    with pytest.raises(UserError, match=r"generator.json: not JSON"):
        study.load()


def test_notes(study):
    study.folder.sites([3, 1])
    study.folder.table(more=["-1,FeTS2022_99999"])  # no institution, no folder, no label: not missed
    study.folder.subject()
    first = study.folder.root / "FeTS2022_00000"
    y = np.array((0, 1, 2, 4))[classes(0, 4)]
    nifti.write_volume(first / "FeTS2022_00000_seg.nii.gz", (y * 1.001).astype(np.float32), affine_of(first))
    nifti.write_volume(first / "FeTS2022_00000_t2.nii.gz", np.zeros(SHAPE, np.uint8), affine_of(first))
    assert study.load(sites=("1",)).sites == ("1",)  # a small site that is not asked for is no fault
    assert len(study.faults().faults) == 1
    loaded = study.load(drop_small=True)
    assert loaded.sites == ("1",)
    found = "\n".join(loaded.summary)
    assert f"note: {np.count_nonzero(y)} label voxels of 1 subject(s) (FeTS2022_00000) were not quite whole" in found
    assert "WARNING: 1 constant images of 1 subject(s) (FeTS2022_00000)" in found
    assert "note: 1 row(s) with Partition_ID -1" in found and "note: 1 small site(s) dropped" in found


def affine_of(folder):
    return nifti.read_image(folder / f"{folder.name}_t1.nii.gz").geometry.affine


def test_all_faults_in_one_list(study):
    root = study.folder.sites([3, 3, 1]).root
    study.folder.table(more=["2,FeTS2022_77777"])
    shutil.rmtree(root / "FeTS2022_00001")
    (root / "FeTS2022_00002" / "FeTS2022_00002_seg.nii.gz").unlink()
    (root / "FeTS2022_00003" / "FeTS2022_00003_t1.nii.gz").write_bytes(b"\x1f\x8bcut")
    nifti.write_volume(root / "FeTS2022_00004" / "FeTS2022_00004_seg.nii.gz", np.full(SHAPE, 9, np.uint8), np.eye(4))
    error = study.faults()
    found = "\n".join(error.faults)
    for part in (
        "partitioning.csv: site 3: 1 subject(s), at least 2 expected; add subjects, or let small sites be dropped"
        " (data.drop_small=True)",
        "2 subject(s) wanted but not found",
        "FeTS2022_00001, FeTS2022_77777",
        "FeTS2022_00002: no seg",
        "FeTS2022_00003: FeTS2022_00003_t1.nii.gz: cut short or damaged",
        "FeTS2022_00004: FeTS2022_00004_seg.nii.gz: lies elsewhere in space",
        "FeTS2022_00004: label values 9 found",
    ):
        assert part in found, (part, found)
    labels = error.files["labels.csv"].splitlines()
    assert labels[0] == "Subject_ID,voxels_0,voxels_1,voxels_2,voxels_4,voxels_9"
    assert [row.split(",")[0][-1] for row in labels[1:]] == ["0", "3", "4", "5", "6"]
    assert "FeTS2022_00004,0,0,0,0,3072" in labels
    assert len(error.faults) == 6  # the two missing ones are one, and no headline is among them


def test_faults_of_the_table_and_of_the_volumes_together(study):
    root = study.folder.sites([2, 2]).root
    study.folder.table(more=["2,FeTS2022_00000", ",FeTS2022_00003"])
    (root / "FeTS2022_00002" / "FeTS2022_00002_t1ce.nii.gz").write_bytes(b"")
    found = study.faults().faults
    assert [f for f in found if f.startswith("partitioning.csv: line 6: FeTS2022_00000 is already in line 2")]
    assert [f for f in found if f.startswith("FeTS2022_00002: FeTS2022_00002_t1ce.nii.gz: an empty file")]


def test_all_sites_too_small(study):
    study.folder.sites([1, 1]).table()
    (fault,) = study.faults(drop_small=True).faults
    assert fault.startswith("partitioning.csv: ") and "1 subject(s), at least 2 expected" in fault


def test_two_schemes_in_one_federation(study):
    study.folder.subject(site=1)
    study.folder.subject(site=1)
    study.folder.subject(site=2, scheme="brats2023")
    study.folder.subject(site=2, scheme="brats2023")
    study.folder.table()
    (fault,) = study.faults().faults
    assert "two schemes in one data set" in fault and "site(s) 2" in fault
    assert study.load(sites=("1",)).about["label_scheme"] == "brats2021"
    assert study.load(sites=("2",)).about["label_values"] == [0, 1, 2, 3]
    assert "FeTS2022_00002: label values 0, 1, 2, 3 found" in "\n".join(study.faults(label_scheme="brats2021").faults)
    loaded = study.load(label_scheme="plain")  # the same cache: labels are kept as the files have them
    assert loaded.classes == ("background", "1", "2", "3", "4") and "0 of 4" in line(loaded, "cache:")


def test_a_decathlon_folder(tmp_path):
    ids = msd_folder(tmp_path / "task", subjects=6, shapes=(SHAPE, (18, 12, 14)))
    rows = [f"{1 + n // 3},{name}" for n, name in enumerate(ids)][:5]
    (tmp_path / "task" / "table.csv").write_text("\n".join(["Partition_ID,Subject_ID", *rows]))
    load = lambda **more: msd(str(tmp_path / "task"), "table.csv", cache=str(tmp_path / "c"), **(SMALL | more))
    loaded = load(label_scheme="plain")
    assert (
        loaded.sites == ("1", "2") and loaded.case_ids == tuple(ids[:5]) and loaded.classes == ("background", "1", "2")
    )
    assert loaded.arrays["full"].tolist() == [[16, 16, 12], [18, 12, 14]] * 2 + [[16, 16, 12]]
    assert "note: 1 subject(s) ignored: not wanted" in loaded.summary
    assert loaded.store.whole_spec["x"][0] == (16, 16, 16, 1)
    case = loaded.store.whole(1)
    assert case["shape"].tolist() == [16, 10, 12]
    np.testing.assert_array_equal(case["y"][:16, :10, :12], classes(1, 3, (18, 12, 14))[1:17, 1:11, 1:13])
    path = loaded.store.save(1, case["y"][:16, :10, :12], tmp_path / "out")
    np.testing.assert_array_equal(nifti.read_labels(path)[0].data, classes(1, 3, (18, 12, 14)))
    with pytest.raises(DataFaults, match=r"'auto' cannot tell .* or plain"):
        load()
    (tmp_path / "task" / "labelsTr" / "case_001.nii.gz").unlink()
    (tmp_path / "task" / "table.csv").write_text("\n".join(["Partition_ID,Subject_ID", *rows, "2,case_9"]))
    with pytest.raises(DataFaults) as error:
        load(label_scheme="plain")
    found = "\n".join(error.value.faults)
    assert "case_001: imagesTr/case_001.nii.gz has no label in labelsTr/" in found
    assert "1 subject(s) wanted but not found in" in found and "case_9" in found and len(error.value.faults) == 2


def test_several_channels_in_one_file(tmp_path):
    ids = msd_folder(tmp_path / "task", subjects=2, channels=2, dataset='{"modality": {"0": "MR", "1": "CT"}}')
    (tmp_path / "task" / "t.csv").write_text("\n".join(["Partition_ID,Subject_ID", *(f"1,{i}" for i in ids)]))
    load = lambda: msd(str(tmp_path / "task"), "t.csv", cache=str(tmp_path / "c"), label_scheme="plain", **SMALL)
    assert load().about["channels"] == ["MR", "CT"] and load().store.whole_spec["x"][0][-1] == 2
    (tmp_path / "task" / "dataset.json").write_text('{"modality": {"0": "MR"}}')
    with pytest.raises(DataFaults, match=r"case_000: 2 channel\(s\), 1 expected \(MR\)"):
        load()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch": (4, 4)}, "data.patch: (4, 4) given, voxels along three axes"),
        ({"patch": 4}, "data.patch: 4 given"),
        ({"patch": (4, -1, 4)}, "data.patch: -1 given"),
        ({"patch": (4, 4.5, 4)}, "data.patch: 4.5 given"),
        ({"patches": 0}, "data.patches: 0 given"),
        ({"sampling": "label"}, "data.sampling: 'label' given"),
        ({"share": 1.0}, "data.share: 1 given"),
        ({"share": 0}, "data.share: 0 given"),
        ({"share": float("nan")}, "data.share: nan given"),
        ({"split_seed": -1}, "data.split_seed: -1 given"),
        ({"normalise": "zscore"}, "data.normalise: 'zscore' given, one of 'image', 'brain', 'none'"),
        ({"nonfinite": "zero"}, "data.nonfinite: 'zero' given"),
        ({"label_scheme": "brats"}, "data.label_scheme: 'brats' given"),
        ({"workers": -1}, "data.workers: -1 given"),
        ({"ahead": 1.5}, "data.ahead: 1.5 given"),
        ({"crop": "no"}, "data.crop: 'no' given"),
        ({"sites": "12"}, "data.sites: '12' given, a tuple"),
        ({"sites": ("1", "1")}, "data.sites: ('1', '1') given, a tuple of distinct names"),
        ({"partition": "none.csv"}, "data.partition: no file none.csv"),
        ({"partition": ""}, "data.partition: no table given"),
        ({"root": ""}, "data.root: no folder given"),
        ({"root": "/no/such", "partition": "none.csv"}, "/no/such: no such folder; one with the volumes expected"),
        ({"colour": 1}, "data.fets: unknown option 'colour'"),
    ],
)
def test_an_impossible_option_is_one_line(four, change, message):
    with pytest.raises(UserError) as error:
        four.load(**change)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_both_makers_have_the_same_options():
    for maker in (fets, msd):
        assert tuple(inspect.signature(maker).parameters) == ("root", "partition", *Options._fields)
    assert data.DATASETS["fets"] is fets and data.DATASETS["msd"] is msd
