"""Image classification sets of TFDS in a tree as TFDS prepares it: read without TensorFlow, or one clear line."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedjax_seg import data as rooms
from fedjax_seg.core.checks import UserError
from fedjax_seg.data import prepared_tfds, records
from fedjax_seg.data.histopathology import SCALES
from fedjax_seg.data.tfds_images import tfds_images

TILES = "colorectal_histology"
SLIDES = "CRC-Prim-HE-[0-9]+"


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("tensorflow_datasets", reason="the extra `tfds` is not installed")
    pytest.importorskip("array_record", reason="the extra `tfds` is not installed")


def picture(n, size=6):
    return np.random.default_rng(n).integers(0, 256, (size, size, 3)).astype(np.uint8)


def tile(n, classes=3):
    """Case n: its slide is n % 10, the name as those of the real tiles."""
    name = f"{n:X}_CRC-Prim-HE-{1 + n % 10:02d}_{n:03d}.tif_Row_1_Col_151.tif"
    return {"image": picture(n), "label": n % classes, "filename": name}


def prepared(data_dir, splits, name=TILES, version="2.0.0", names=("tumor", "stroma", "complex"), **more):
    """A data set in the tree <data_dir>/<name>/<version>/, as download_and_prepare leaves it."""
    library = records.tfds_library()
    folder = data_dir / name / version
    folder.mkdir(parents=True)
    feature = library.features
    known = {
        "image": feature.Image(shape=(None, None, 3)),
        "label": feature.ClassLabel(names=list(names)),
        "filename": feature.Text(),
        "id": feature.Text(),
    } | more
    first = next(iter(splits.values()))[0]
    info = library.core.DatasetInfo(
        builder=library.core.DatasetIdentity(
            name=name, version=library.core.Version(version), data_dir=str(folder), module_name=""
        ),
        features=feature.FeaturesDict({key: known[key] for key in first}),
    )
    writer = library.core.SequentialWriter(info, max_examples_per_shard=1000, file_format="array_record")
    writer.initialize_splits(list(splits))
    for split, cases in splits.items():
        writer.add_examples({split: [case | {"image": encoded(case["image"])} for case in cases]})
    writer.close_splits(list(splits))
    return folder


def encoded(pixels):
    """PNG bytes: from arrays, TFDS would encode by TensorFlow."""
    if not isinstance(pixels, np.ndarray):
        return pixels
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    prepared(root, {"train": [tile(n) for n in range(60)]})
    patch = lambda split, n, start: {"id": f"{split}_{n}", "image": picture(start + n), "label": (n // 3) % 2}
    splits = {split: [patch(split, n, at) for n in range(size)] for split, size, at in SPLITS}
    prepared(root, splits, "patch_camelyon", names=("0", "1"))
    return root


SPLITS = (("test", 8, 200), ("train", 40, 300), ("validation", 8, 400))


def load(data_dir, dataset=TILES, **options):
    return tfds_images(**{"dataset": dataset, "data_dir": str(data_dir), "clients": 2, "partition": "iid"} | options)


def line(found, start):
    (text,) = [text for text in found.summary if text.startswith(start)]
    return text


def test_images_labels_and_names(data_dir):
    found = load(data_dir, normalise="none")
    assert found.arrays["x"].shape == (60, 6, 6, 3) and found.arrays["x"].dtype == np.float32
    for n in range(60):
        np.testing.assert_allclose(found.arrays["x"][n], picture(n) / 255, atol=1e-6)
    assert found.arrays["y"].dtype == np.int32 and found.arrays["y"].tolist() == [n % 3 for n in range(60)]
    assert found.classes == ("tumor", "stroma", "complex")
    assert found.case_ids[11] == "train/B_CRC-Prim-HE-02_011.tif_Row_1_Col_151.tif"
    assert found.about["generator"] == "TFDS colorectal_histology 2.0.0" and found.about["synthetic"] is False
    assert sum(row["total"] for row in found.about["table1"]) == 60 and found.about["table1"][0]["site"] == "client_0"
    assert found.files["cohort.csv"].count("\n") == 61
    same = rooms.make("tfds_images", dataset=TILES, data_dir=str(data_dir), clients=2, partition="iid")
    assert same.splits[0].train[0].tolist() == found.splits[0].train[0].tolist()


def test_standardised_as_other_tiles(data_dir):
    plain, found = load(data_dir, normalise="none"), load(data_dir)
    scale = SCALES["fixed"]
    np.testing.assert_allclose(
        found.arrays["x"] * np.array(scale.std) + scale.mean, plain.arrays["x"], rtol=1e-5, atol=1e-6
    )
    assert found.about["normalise"]["mean"] == list(scale.mean)


def test_sizes_and_colours(data_dir):
    whole, half = load(data_dir, normalise="none"), load(data_dir, normalise="none", size=(3, 2))
    blocks = whole.arrays["x"].reshape(60, 3, 2, 2, 3, 3).mean((2, 4))
    np.testing.assert_allclose(half.arrays["x"], blocks, atol=1e-5)
    grey = load(data_dir, normalise="none", channels="gray").arrays["x"]
    np.testing.assert_allclose(grey[..., 0], whole.arrays["x"] @ np.array([0.299, 0.587, 0.114]), atol=1e-5)


def test_without_groups_the_warning_is_loud(data_dir):
    found = load(data_dir)
    assert found.patient_ids == found.case_ids and found.about["patients"].startswith("none named")
    text = line(found, "WARNING: NO PATIENTS OR SLIDES in colorectal_histology")
    assert "10 slides only" in text and f"data.group_pattern='{SLIDES}'" in text and "SCORES ARE TOO HIGH" in text
    assert found.about["warnings"] == [text]
    assert "data.external=('test',)" in line(load(data_dir, "patch_camelyon"), "WARNING: NO PATIENTS")


def test_tiles_of_a_slide_stay_together(data_dir):
    found = load(data_dir, group_pattern=SLIDES, clients=3)
    slides = np.array(found.patient_ids)
    assert set(slides) == {f"CRC-Prim-HE-{n:02d}" for n in range(1, 11)} and not found.about["warnings"]
    split = found.splits[0]
    sides = [set(slides[own]) for own in (*split.train, *split.test)]
    assert sum(map(len, sides)) == 10 and set.union(*sides) == set(slides)
    with pytest.raises(UserError, match=r"data.group_pattern: 'slide' is not in the id 'train/0_CRC"):
        load(data_dir, group_pattern="slide")
    with pytest.raises(UserError, match="iid: 10 groups for 8 clients of at least 2"):
        load(data_dir, group_pattern=SLIDES, clients=8)


def test_external_splits_only_test_and_come_last(data_dir):
    found = load(data_dir, "patch_camelyon", external=("test", "validation"), test_share=0.0, aside_share=0.1)
    assert found.sites == ("client_0", "client_1", "test", "validation") and found.external == ("test", "validation")
    split = found.splits[0]
    assert [len(own) for own in split.train] == [18, 18, 0, 0] and [len(own) for own in split.test] == [0, 0, 8, 8]
    assert len(found.aside) == 4 and all(found.case_ids[n].startswith("train/") for n in found.aside)
    assert {found.case_ids[n] for n in split.test[2]} == {f"test/test_{n}" for n in range(8)}
    with pytest.raises(UserError, match=r"data.external: group '\d' is in data.splits too \(8 such groups\)"):
        load(data_dir, "patch_camelyon", external=("test",), group_pattern="[0-9]+")
    assert load(data_dir, "patch_camelyon", splits=("train", "validation")).arrays["y"].shape == (48,)


def test_auto_is_dirichlet(data_dir):
    auto, drawn = (load(data_dir, partition=name, alpha=0.5) for name in ("auto", "dirichlet"))
    assert auto.site_of.tolist() == drawn.site_of.tolist() and auto.about["partition"] == drawn.about["partition"]


@pytest.mark.parametrize("partition", ["dirichlet", "quantity"])
def test_skewed_clients(data_dir, partition):
    found = load(data_dir, partition=partition, alpha=0.3, clients=3)
    sizes = np.bincount(found.site_of, minlength=3)
    assert sizes.sum() == 60 and sizes.min() >= 2
    assert partition in found.about["partition"].lower() or "sizes by Dirichlet" in found.about["partition"]


def test_a_part_of_the_cases_is_drawn_evenly_by_class(data_dir):
    found = load(data_dir, most=20)
    assert np.bincount(found.arrays["y"]).tolist() == [7, 7, 6]
    assert line(found, "note: 20 of the 60") == (
        "note: 20 of the 60 cases of split 'train' are read, drawn evenly by class (data.most=20)"
    )
    whole = load(data_dir)
    for name, x in zip(found.case_ids, found.arrays["x"]):
        np.testing.assert_array_equal(x, whole.arrays["x"][whole.case_ids.index(name)])
    assert load(data_dir, most=20).case_ids == found.case_ids != load(data_dir, most=20, seed=1).case_ids


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=4), most=st.integers(0, 40), seed=st.integers(0, 99))
def test_classes_differ_by_one_unless_they_are_used_up(counts, most, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    at = prepared_tfds.evenly(labels, most, seed)
    assert len(at) == (min(most, len(labels)) if most else len(labels)) and np.all(np.diff(at) > 0)
    taken = np.bincount(labels[at], minlength=len(counts))
    fullest = taken.max(initial=0)
    assert all(n >= fullest - 1 or n == count for n, count in zip(taken, counts))


def test_memory_is_told_before_images_are_read(data_dir):
    with pytest.raises(UserError) as error:  # 60 images of 6 * 6 * 3 * 4 = 432 bytes; 1e-5 GiB are 10,737 bytes
        load(data_dir, memory_gb=1e-5)
    assert "all given; 60 images of 6x6 take 2.41e-05 GiB, 1e-05 allowed; set data.most so that 24 are" in str(
        error.value
    )
    assert load(data_dir, memory_gb=1e-5, most=24).arrays["x"].shape[0] == 24


def test_nothing_prepared_says_what_to_run_and_where(tmp_path, monkeypatch):
    with pytest.raises(UserError) as error:
        load(tmp_path / "sets")
    text = str(error.value)
    assert (
        f"no prepared colorectal_histology in {tmp_path}/sets; {tmp_path}/sets/colorectal_histology/2.0.0/ with" in text
    )
    assert "features.json and colorectal_histology-train.array_record-* expected (splits: train (5,000" in text
    assert f"{tmp_path}/sets does not exist" in text and "\n" not in text
    command = text[text.index("python -c ") :]
    assert command == (
        "python -c \"import tensorflow_datasets as tfds; tfds.builder('colorectal_histology',"
        f" data_dir='{tmp_path}/sets', file_format='array_record').download_and_prepare()\""
    )
    compile(command.removeprefix('python -c "').removesuffix('"'), "command", "exec")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    with pytest.raises(UserError, match=rf"did you mean 'patch_camelyon'\? {tmp_path}/patch_camelyn/.*holds mnist/"):
        tfds_images(dataset="patch_camelyn")


def test_an_interrupted_preparation_is_none(tmp_path):
    (tmp_path / TILES / "2.0.0.incomplete_x").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"{tmp_path}/{TILES} holds 2.0.0.incomplete_x/"):
        load(tmp_path)


def test_tfrecord_files_say_how_to_convert(tmp_path):
    folder = prepared(tmp_path, {"train": [tile(0)]})
    (record,) = folder.glob("*.array_record*")
    record.rename(folder / f"{TILES}-train.tfrecord-00000-of-00001")
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(UserError) as error:
        load(tmp_path)
    text = str(error.value)
    assert f"{folder} holds tfrecord files, which cannot be read without TensorFlow" in text and "\n" not in text
    assert f"tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record" in text


def test_the_newest_version_is_read(tmp_path):
    prepared(tmp_path, {"train": [tile(n) for n in range(8)]}, version="2.0.0")
    prepared(tmp_path, {"train": [tile(n) for n in range(12)]}, version="10.0.0")
    assert len(load(tmp_path).case_ids) == 12


def test_sets_of_other_things(tmp_path):
    library = records.tfds_library()
    scalar = {"label": library.features.Scalar(np.int64)}
    prepared(tmp_path / "a", {"train": [tile(0)]}, **scalar)
    with pytest.raises(UserError, match=r"has Scalar as feature 'label' \(features: filename, image, label\)"):
        load(tmp_path / "a")
    prepared(tmp_path / "b", {"train": [tile(0), tile(1) | {"label": -1}]})
    with pytest.raises(UserError, match="1 of 2 cases of split 'train' have no label; leave it out"):
        load(tmp_path / "b")
    prepared(tmp_path / "c", {"train": [tile(0), tile(1) | {"image": picture(1, 4)}]})
    with pytest.raises(UserError, match=r"data.size: images of \(6, 6\) and \(4, 4\) found \(train/1_CRC"):
        load(tmp_path / "c")


def test_damaged_files(tmp_path):
    folder = prepared(tmp_path, {"train": [tile(n) for n in range(8)]})
    (record,) = folder.glob("*.array_record*")
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 3])
    with pytest.raises(
        UserError, match=rf"split 'train' of {folder} cannot be read \(.*copy or prepare it again"
    ) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    record.write_bytes(content)
    (folder / "features.json").unlink()
    with pytest.raises(UserError, match=r"cannot be opened by TFDS \(.*prepare it again"):
        load(tmp_path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dataset": "../x"}, "data.dataset: '../x' given, a TFDS name such as 'colorectal_histology' expected"),
        ({"splits": ("train", "dev")}, "data.splits: unknown name 'dev'; known: train"),
        ({"splits": "train"}, "data.splits: 'train' and () given, tuples of names expected"),
        ({"external": ("train",)}, "data.splits, data.external: ('train', 'train') given, distinct names expected"),
        ({"size": (6,)}, "data.size: (6,) given, (rows, columns) or () expected"),
        ({"size": (6, 0)}, "data.size: 0 given"),
        ({"channels": "hsv"}, "data.channels: 'hsv' given"),
        ({"channels": "gray"}, "data.normalise: 'fixed' is of three colours; channels='gray' needs 'none'"),
        ({"group_pattern": "("}, "data.group_pattern: '(' is no regular expression"),
        ({"most": -1}, "data.most: -1 given"),
        ({"memory_gb": -1}, "data.memory_gb: -1 given"),
        ({"partition": "site"}, "data.partition: 'site' given, one of 'auto', 'dirichlet', 'quantity', 'iid' expected"),
        ({"test_share": 1.0}, "data.test_share: 1.0 given"),
        ({"clients": 0}, "data.clients: 0 given"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options(data_dir, options, message):
    with pytest.raises(UserError) as error:
        load(data_dir, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_without_the_extra_it_says_what_to_install(data_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'fedjax-seg\[tfds\]'"):
        load(data_dir)


def test_reading_does_not_load_tensorflow(data_dir):
    code = (
        "import sys; from fedjax_seg.data import make;"
        f"make('tfds_images', dataset='{TILES}', data_dir={str(data_dir)!r}, clients=2);"
        "print([m for m in sys.modules if m.partition('.')[0] == 'tensorflow'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
