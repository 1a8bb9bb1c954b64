"""TFDS data sets of slices: written without TensorFlow, read into FederatedData, and what is said of broken ones."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import records
from fedjax_seg.data.federated import validate

ABOUT = {"generator": "made up", "seed": 3, "profiles": {"a": "large"}}


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("tensorflow_datasets", reason="the extra `tfds` is not installed")
    pytest.importorskip("array_record", reason="the extra `tfds` is not installed")


def columns(split, n, *, site=None, size=8, patients=None, start=0):
    random = np.random.default_rng([n, len(split), start])
    return {
        "image": random.integers(-1024, 3072, (n, size, size)).astype(np.int16),
        "mask": (random.random((n, size, size)) < 0.3).astype(np.uint8),
        "case": [f"{split}_{start + i}" for i in range(n)],
        "patient": [f"{split}_p{(start + i) % (patients or n)}" for i in range(n)],
        "site": [site or split] * n,
        "spacing": np.full((n, 2), 1.5, np.float32),
    }


def written(folder, splits=None, **options):
    splits = splits or {
        "a": columns("a", 10),
        "b": columns("b", 6, patients=3),
        "test": columns("test", 3, site="a"),
        "shadow": columns("shadow", 4, site="b"),
    }
    return records.write(folder, splits, name="slices", about=options.get("about", ABOUT))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return written(tmp_path_factory.mktemp("records") / "set")


def test_round_trip(root):
    splits, about = records.read(root)
    assert about == ABOUT and list(splits) == ["a", "b", "test", "shadow"]
    for name, given in (("a", columns("a", 10)), ("shadow", columns("shadow", 4, site="b"))):
        for feature, values in given.items():
            np.testing.assert_array_equal(splits[name][feature], values, err_msg=feature)
        assert splits[name]["image"].dtype == np.int16 and splits[name]["mask"].dtype == np.uint8


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32])
def test_types_and_channels_are_kept(tmp_path, dtype):
    given = columns("a", 2) | {"image": np.arange(2 * 8 * 8).reshape(2, 8, 8, 1).astype(dtype)}
    back, _ = records.read(written(tmp_path / "x", {"a": given}))
    np.testing.assert_array_equal(back["a"]["image"], given["image"])
    assert back["a"]["image"].dtype == dtype


def test_splits_may_come_in_parts(tmp_path, root):
    parts = (columns("a", 2, start=2 * i) for i in range(3))
    back, _ = records.read(written(tmp_path / "parts", {"a": parts, "b": [columns("b", 1)]}))
    assert back["a"]["case"] == [f"a_{i}" for i in range(6)] and len(back["b"]["image"]) == 1
    np.testing.assert_array_equal(back["a"]["image"][2:4], columns("a", 2, start=2)["image"])


def test_clients_test_site_and_the_slices_set_aside(root):
    data = records.tfds(root=str(root))
    validate(data)
    assert data.sites == ("a", "b", "test") and data.external == ("test",) and data.classes == ("background", "tumour")
    split = data.splits[0]
    assert [len(p) for p in split.train] == [8, 4, 0]  # 10 patients, 3 patients of two slices each
    assert [len(p) for p in split.test] == [2, 2, 3]
    own = [data.patient_ids[i] for i in split.test[1]]
    assert len(set(own)) == 1 and set(own).isdisjoint(data.patient_ids[i] for i in split.train[1])
    assert data.aside.tolist() == [19, 20, 21, 22] and data.site_of.tolist() == [0] * 10 + [1] * 6 + [2] * 3 + [1] * 4
    used = np.concatenate([*split.train, *split.test])
    assert sorted([*used, *data.aside]) == list(range(23))
    assert data.about["generator"] == "made up" and data.about["generated"] == ABOUT
    assert data.about["table1"] == [
        {"site": "a", "total": 10, "train": 8, "test": 2},
        {"site": "b", "total": 6, "train": 4, "test": 2},
        {"site": "test", "total": 3, "train": 0, "test": 3},
    ]
    assert "made up" in "\n".join(data.summary) and data.summary[1].split()[:4] == ["a", "10", "8", "2"]


def test_window_in_hounsfield_units():
    hu = np.array([[[[-1000]], [[-160]], [[40]], [[140]], [[240]], [[3000]]]], np.int16)
    np.testing.assert_allclose(records._scaled(hu, (40.0, 400.0)).ravel(), [0, 0, 0.5, 0.75, 1, 1])
    np.testing.assert_allclose(records._scaled(hu, (-500.0, 1500.0)).ravel()[:2], [0.5 - 500 / 1500, 0.5 + 340 / 1500])
    np.testing.assert_array_equal(records._scaled(hu, ()).ravel(), hu.ravel())
    grey = np.array([[[[0]], [[51]], [[255]]]], np.uint8)
    np.testing.assert_allclose(records._scaled(grey, (40.0, 400.0)).ravel(), [0, 0.2, 1])
    assert records._scaled(hu, (40.0, 400.0)).dtype == np.float32


def test_smaller_pictures_are_means_of_blocks(root):
    whole, half = records.tfds(root=str(root)), records.tfds(root=str(root), size=4)
    blocks = whole.arrays["x"][3, :2, 2:4, 0]
    assert half.arrays["x"].shape == (23, 4, 4, 1) and half.arrays["x"][3, 0, 1, 0] == pytest.approx(blocks.mean())
    marked = whole.arrays["y"][:, :2, 2:4].sum((1, 2))
    np.testing.assert_array_equal(half.arrays["y"][:, 0, 1], marked >= 2)
    np.testing.assert_allclose(half.arrays["spacing"], 3.0)


def test_share_and_seed_of_the_held_out_patients(root):
    def held_out(**options):
        return records.tfds(root=str(root), **options).splits[0].test

    assert len(held_out(test_share=0.5)[0]) == 5 and len(held_out(test_share=0.0)[0]) == 0
    assert len(held_out(test_share=0.01)[0]) == 1 and len(held_out(test_share=0.95)[1]) == 4  # one patient must train
    np.testing.assert_array_equal(held_out(seed=4)[0], held_out(seed=4)[0])
    assert len({tuple(held_out(seed=s)[0]) for s in range(6)}) > 2


def test_shadow_slices_without_a_site_are_dealt_out_in_turn(tmp_path):
    splits = {name: columns(name, n) for name, n in (("a", 3), ("b", 3), ("shadow", 5))}
    for given in splits.values():
        del given["site"]
    data = records.tfds(root=str(written(tmp_path / "x", splits)))
    assert data.site_of[data.aside].tolist() == [0, 1, 0, 1, 0]


def test_the_folder_above_will_do(root):
    assert records.find(root.parent) == root


def edited(folder, name, change):
    path = folder / name
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def cut_record(folder):
    path = next(folder.glob("slices-b.array_record*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def foreign(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "slices.zip").write_text("x")


@pytest.mark.parametrize(
    "damage, message",
    [
        (foreign, "is no TFDS data set: dataset_info.json, features.json and *.array_record-* files, in it or below"),
        (foreign, "expected, found slices.zip"),
        (cut_record, "split 'b' of"),
        (lambda f: next(f.glob("slices-b.array_record*")).unlink(), "split 'b' of"),
        (lambda f: (f / "features.json").unlink(), "has no features.json; fetch it"),
        (lambda f: (f / "dataset_info.json").write_text("{"), "cannot be opened by TFDS"),
        (lambda f: edited(f, "dataset_info.json", lambda d: d["splits"][1].update(shardLengths=[])), "'b' of"),
        (lambda f: edited(f, "dataset_info.json", lambda d: d.pop("splits")), "has no splits; it was not written"),
        (
            lambda f: edited(f, "features.json", lambda d: d["featuresDict"]["features"].pop("mask")),
            "has no feature 'mask'; it has case, image, patient, site, spacing; image and mask expected",
        ),
    ],
)
def test_broken_folders(tmp_path, damage, message):
    root = written(tmp_path / "set", {"a": columns("a", 2), "b": columns("b", 2)})
    damage(root)
    with pytest.raises(UserError) as error:
        records.tfds(root=str(root))
    assert message in str(error.value) and str(root) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"root": ""}, "data.root: no folder given; name one with dataset_info.json"),
        ({"root": "nowhere"}, "data.root: nowhere does not exist; a folder with dataset_info.json"),
        ({"window": (40.0,)}, "data.window: (40.0,) given, (centre, width)"),
        ({"window": (40.0, 0.0)}, "data.window: width: 0.0 given"),
        ({"test_share": 1.0}, "data.test_share: 1.0 given"),
        ({"seed": -1}, "data.seed: -1 given"),
        ({"size": 3}, "data.size: 3 given, images are 8 x 8; a divisor of a square's side expected"),
        ({"size": 9}, "data.size: 9 given"),
    ],
)
def test_wrong_options(root, options, message):
    with pytest.raises(UserError) as error:
        records.tfds(**{"root": str(root)} | options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"test": columns("test", 2)}, "has splits test; one split per client expected"),
        (
            {"a": columns("a", 2), "shadow": columns("shadow", 2, site="c")},
            "feature 'site' of split 'shadow' names 'c'; one of a expected",
        ),
        (
            {"a": columns("a", 2) | {"mask": np.zeros((2, 4, 4), np.uint8)}},
            "split 'a' has images (8, 8) and masks (4, 4)",
        ),
        ({"a": columns("a", 4, patients=2), "test": columns("a", 1)}, "patient 'a_p0' is in training and test"),
    ],
)
def test_data_that_is_no_federation(tmp_path, splits, message):
    with pytest.raises(UserError) as error:
        records.tfds(root=str(written(tmp_path / "set", splits)), test_share=0.0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_foreign_folders_are_not_written_into(tmp_path, root):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other files; name a new or empty folder"):
        written(tmp_path)
    with pytest.raises(UserError, match="holds a data set of other options"):
        written(root, about=ABOUT | {"seed": 4})
    assert (tmp_path / "thesis.txt").exists() and records.read(root)[1] == ABOUT


def test_columns_of_unequal_length(tmp_path):
    with pytest.raises(UserError, match="unequal length"):
        written(tmp_path / "x", {"a": columns("a", 3) | {"case": ["a"]}})


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"data.tfds: tensorflow_datasets cannot .*pip install 'fedjax-seg\[tfds\]'"):
        written(tmp_path / "x")


def test_importing_loads_neither_tfds_nor_tensorflow():
    code = "import sys; from fedjax_seg.data import records; print([m for m in sys.modules if 'tensor' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
