"""Cached volumes as a store: patches are what lies in the file, memory stays flat, predictions go back."""

import os
from pathlib import Path

import numpy as np
import pytest
from volume_folder import AFFINE, SHAPE, VolumeFolder, classes

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import label_schemes, nifti, patches, volume_cache
from fedjax_seg.data.volume_preparation import grouped
from fedjax_seg.data.volume_store import volume_store
from fedjax_seg.data.volume_tree import fets_tree

SCHEME = label_schemes.SCHEMES["brats2021"]
KEY = np.array([5, 6], np.uint32)
ROWS = np.array([2, 0, 1, 1, 1], np.int32)  # padded with repeats, size 2 or 3 counts


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    folder = VolumeFolder(path / "data")
    tilted = AFFINE.copy()
    tilted[:3, :3] = [[-0.9, 0.3, 0], [0.3, 1.1, 0.2], [0, 0.2, -2]]
    for affine in (AFFINE, tilted, AFFINE):
        folder.subject(affine=affine)
    rules = volume_cache.Rules("image", True, False)
    subjects = fets_tree(folder.root, labels=True).subjects
    return volume_cache.prepare(subjects, rules, path / "cache", workers=2).entries


@pytest.fixture
def opened(entries):
    stores = []

    def make(size=(5, 5, 5), per_case=6, sampling="foreground", cases=entries, **options):
        stores.append(volume_store(cases, SCHEME, patches.Drawing(size, per_case, sampling), **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def made(path, image, label, background=0.0):
    """An entry written by hand."""
    path.mkdir(parents=True)
    index, values, offsets = grouped(label)
    for name, array in (("image", image), ("label", label), ("index", index)):
        np.save(path / f"{name}.npy", array)
    shape = label.shape
    return volume_cache.Entry(
        subject=path.name, folder=path, sources=(), native=shape, start=(0, 0, 0), shape=shape, spacing=(1, 1, 1),
        orientation="LPS", background=(background,) * image.shape[-1], values=values, offsets=offsets, voxels={},
        content="", facts={}, bytes=0, fresh=True,
    )  # fmt: skip


@pytest.mark.parametrize("sampling", patches.SAMPLINGS)
def test_a_patch_is_what_lies_there(opened, tmp_path, sampling):
    """Every voxel has a value of its own, so a patch tells where it was cut."""
    cases = []
    for n in range(2):
        image = np.arange(12 * 11 * 10, dtype=np.float16).reshape(12, 11, 10)
        label = np.random.default_rng(n).choice(np.array([0, 0, 0, 1, 2, 4], np.uint8), image.shape)
        cases.append(made(tmp_path / f"c{n}", np.stack([image, -image * (n + 1)], axis=-1), label))
    store = opened((4, 3, 2), 20, sampling, cases)
    for step in range(5):
        batch = store.patches(np.array([0, 1]), 2, KEY, step, 8, 1)
        assert set(batch) == {"x", "y", "mask"} and batch["mask"].all()
        for x, y in zip(batch["x"], batch["y"]):
            n = 0 if x[1, 1, 1, 1] == -x[1, 1, 1, 0] else 1
            first = np.unravel_index(int(x[0, 0, 0, 0]), (12, 11, 10))
            where = tuple(slice(f, f + s) for f, s in zip(first, (4, 3, 2)))
            np.testing.assert_array_equal(x, np.load(cases[n].folder / "image.npy")[where])
            label = np.load(cases[n].folder / "label.npy")[where]
            np.testing.assert_array_equal(np.array([0, 1, 2, 4])[y], label)
            assert sampling == "uniform" or label.any()


def test_specs_are_kept(opened):
    store = opened((5, 20, 5))
    batch = store.patches(ROWS, 3, KEY, 0, 4, 1)
    for name, (shape, dtype) in store.patch_spec.items():
        assert batch[name].shape == (4, *shape) and batch[name].dtype == dtype
    assert batch["mask"].shape == (4,) and batch["mask"].dtype == np.float32 and store.per_case == 6
    case = store.whole(1)
    assert set(case) == set(store.whole_spec) == {"x", "y", "shape", "full", "spacing", "background"}
    for name, (shape, dtype) in store.whole_spec.items():
        assert case[name].shape == shape and case[name].dtype == dtype
    assert store.whole_spec["x"][0] == (16, 16, 16, 4)  # 14 x 14 x 10, multiples of 8
    assert opened(multiple=4).whole_spec["y"][0] == (16, 16, 12)


def test_outside_of_a_volume_is_background(opened, entries):
    store = opened((20, 5, 5))
    batch = store.patches(ROWS, 1, KEY, 0, 6, 1)  # only case 2
    fill = np.array(entries[2].background, np.float16)
    assert (fill != 0).all()
    assert (batch["x"][:, :3] == fill).all() and (batch["x"][:, 17:] == fill).all()
    assert not batch["y"][:, :3].any() and not batch["y"][:, 17:].any() and batch["y"][:, 3:17].any()
    case = store.whole(2)
    image = np.load(entries[2].folder / "image.npy")
    np.testing.assert_array_equal(case["x"][:14, :14, :10], image)
    assert (case["x"][14:] == fill).all() and (case["x"][:, :, 10:] == fill).all() and not case["y"][14:].any()
    assert case["shape"].tolist() == [14, 14, 10] and case["full"].tolist() == list(SHAPE)


def test_the_spacing_follows_the_array_axes(opened):
    np.testing.assert_allclose(
        opened().whole(1)["spacing"], np.sqrt([0.9**2 + 0.3**2, 0.3**2 + 1.1**2 + 0.2**2, 0.2**2 + 4]), rtol=1e-6
    )


def test_the_same_bits_with_and_without_reading_ahead(opened):
    requests = [(size, KEY + k, step) for step in range(7) for k in range(2) for size in (2, 3)]
    want = [opened(depth=0).patches(ROWS, size, key, step, 4, 2) for size, key, step in requests]
    for depth, threads in ((1, 1), (4, 3)):
        store = opened(depth=depth, threads=threads)
        got = [store.patches(ROWS, size, key, step, 4, 2) for size, key, step in requests]
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(got, want) for name in a)
        assert store.waited()[1] == len(requests)


def test_padded_rows_and_idle_lanes(opened):
    store = opened()
    one = store.patches(ROWS, 2, KEY, 1, 8, 1)
    other = store.patches(np.array([2, 0, 0]), np.int32(2), KEY, np.int32(1), 8, 1)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert one["mask"].tolist() == [1] * 4 + [0] * 4  # 12 patches: 8 and 4
    idle = store.patches(ROWS, 2, KEY, 2, 8, 1)
    assert not any(v.any() for v in idle.values()) and set(idle) == set(one)
    assert store.patches(ROWS, 2, KEY, 2, 8, 2)["mask"].all()


def resident():
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_memory_stays_flat(opened, tmp_path):
    """72 MB of volumes are read all over; a map that stays open would keep them resident."""
    label = np.zeros((96, 96, 96), np.uint8)
    label[::3, ::3, ::3] = 1
    image = np.ones((*label.shape, 4), np.float16)
    cases = [made(tmp_path / f"c{n}", image, label) for n in range(9)]
    del image
    store = opened((32, 32, 32), 30, cases=cases, depth=2, threads=2)
    rows = np.arange(9)
    step = lambda n: store.patches(rows, 9, KEY, n, 2, 1)
    for n in range(8):
        step(n)
    before = resident()
    for n in range(8, 135):
        step(n)
    assert resident() - before < 16e6


def test_a_saved_prediction_is_the_label_again(opened, entries, tmp_path):
    for n, entry in enumerate(entries):
        store = opened()
        case = store.whole(n)
        part = tuple(slice(0, s) for s in case["shape"])
        path = store.save(n, case["y"][part], tmp_path / "new" / "folder")
        assert path == tmp_path / "new" / "folder" / f"{entry.subject}.nii.gz"
        got, rounded = nifti.read_labels(path)
        label, _ = nifti.read_labels(entry.sources[-1])
        image = nifti.read_image(entry.sources[0])
        np.testing.assert_array_equal(got.data, label.data)
        np.testing.assert_array_equal(got.data, np.array([0, 1, 2, 4])[classes(n, 4)])
        np.testing.assert_array_equal(got.geometry.affine, image.geometry.affine)
        assert rounded == 0


def test_a_value_without_a_class_never_becomes_background(opened, entries, tmp_path):
    label = np.zeros((6, 6, 6), np.uint8)
    label[1, 1, 1] = 3
    entry = made(tmp_path / "c", np.ones((6, 6, 6, 1), np.float16), label)
    with pytest.raises(UserError, match=r"c: label values \(3,\) found, \(0, 1, 2, 4\) \(brats2021\) expected"):
        opened(cases=[entry])
    assert opened().whole(0)["y"].max() == 3  # of 0, 1, 2, 4


def test_a_prediction_of_another_size_is_a_bug(opened, tmp_path):
    with pytest.raises(ValueError, match="expected"):
        opened().save(0, np.zeros(SHAPE, np.uint8), tmp_path)
    with pytest.raises(ValueError, match="int64"):
        opened().save(0, np.zeros((14, 14, 10), np.int64), tmp_path)


def test_a_folder_that_cannot_be_written(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        opened().save(0, np.zeros((14, 14, 10), np.uint8), tmp_path / "file" / "below")


def test_a_deleted_cache_is_told(opened, tmp_path):
    entry = made(tmp_path / "c", np.ones((6, 6, 6, 1), np.float16), np.ones((6, 6, 6), np.uint8))
    store = opened((3, 3, 3), cases=[entry], depth=0)
    (entry.folder / "image.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"data.cache: .*image.npy cannot be read"):
        store.patches(np.array([0]), 1, KEY, 0, 2, 1)
    (entry.folder / "image.npy").unlink()
    with pytest.raises(UserError, match="do not delete the cache"):
        store.whole(0)
