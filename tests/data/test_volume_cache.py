"""Subjects read once: what is written, when it is read again, what a kill leaves, and all the faults."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cached_site import RULES, Site, arrays, everything, raw
from volume_folder import SHAPE, VolumeFolder, classes, image, msd_folder

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import volume_cache
from fedjax_seg.data.volume_preparation import grouped
from fedjax_seg.data.volume_tree import fets_tree, msd_tree


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_z_scores_of_the_whole_image_cropped_to_the_brain(site):
    entry = site.prepare().entries[1]
    x, y = raw(1)
    want = (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True)
    got, label, index = arrays(entry)
    inside = (slice(1, 15), slice(1, 15), slice(1, 11))  # the head of the fixture
    assert entry.native == SHAPE and entry.start == (1, 1, 1) and entry.shape == (14, 14, 10)
    assert got.dtype == np.float16 and got.flags.c_contiguous and label.dtype == np.uint8
    np.testing.assert_allclose(got, np.moveaxis(want, 0, -1)[inside], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(entry.background, want[:, 0, 0, 0], rtol=1e-3)
    np.testing.assert_array_equal(label, y[inside])
    assert entry.voxels == {v: int((y == v).sum()) for v in (0, 1, 2, 4)} and entry.values == (1, 2, 4)
    assert entry.spacing == (1, 1, 1) and entry.fresh
    for value, first, end in zip(entry.values, entry.offsets, entry.offsets[1:]):
        np.testing.assert_array_equal(index[first:end], np.flatnonzero(label == value))


def test_z_scores_of_the_brain(site):
    entry = site.prepare(normalise="brain").entries[0]
    x, _ = raw()
    got = np.moveaxis(arrays(entry)[0], -1, 0)
    for c in range(4):
        own = x[c][1:15, 1:15, 1:11]
        assert (got[c][own == 0] == 0).all()
        some = x[c][x[c] != 0]
        np.testing.assert_allclose(got[c][own != 0], (own[own != 0] - some.mean()) / some.std(), rtol=1e-3, atol=1e-4)
    assert entry.background == (0, 0, 0, 0)


def test_as_stored_and_uncropped(site):
    entry = site.prepare(normalise="none", crop=False).entries[0]
    x, y = raw()
    got, label, _ = arrays(entry)
    np.testing.assert_array_equal(got, np.moveaxis(x, 0, -1))  # whole numbers below 2048 are exact
    np.testing.assert_array_equal(label, y)
    assert entry.start == (0, 0, 0) and entry.shape == SHAPE


def test_the_box_holds_every_label_voxel(site):
    y = raw()[1]
    y[0, 15, 3], y[15, 0, 0] = 2, 1
    site.write("seg", y)
    entry = site.prepare().entries[0]
    assert entry.shape == (16, 16, 11) and entry.start == (0, 0, 0) and entry.facts["outside"] == 2
    np.testing.assert_array_equal(arrays(entry)[1], y[:, :, :11])


def test_an_all_zero_subject_is_kept_whole(site):
    for kind in ("t1", "t1ce", "t2", "flair", "seg"):
        site.write(kind, np.zeros(SHAPE, np.uint8))
    entry = site.prepare().entries[0]
    assert entry.shape == SHAPE and entry.values == () and entry.offsets == (0,)
    assert len(entry.facts["constant"]) == 4 and not arrays(entry)[0].any()


def test_grouped_by_hand():
    label = np.array([[[0, 4], [1, 0]], [[4, 1], [0, 2]]], np.uint8)
    index, values, offsets = grouped(label)
    assert index.tolist() == [2, 5, 7, 1, 4] and values == (1, 2, 4) and offsets == (0, 2, 3, 5)
    assert index.dtype == np.int32


def test_only_changed_subjects_are_read_again(site):
    first = site.prepare()
    before = everything(site.place)
    second = site.prepare()
    assert [e.fresh for e in first.entries] == [True, True] and [e.fresh for e in second.entries] == [False, False]
    assert [e._replace(fresh=True) for e in second.entries] == list(first.entries)
    assert everything(site.place) == before and second.voxels == first.voxels
    os.utime(site.file("t1"), ns=(1, 1))  # copied again: another time, the same bytes
    assert not site.prepare().entries[0].fresh
    meta = json.loads((first.entries[0].folder / "meta.json").read_text())
    assert meta["sources"][0]["mtime_ns"] == 1  # need not be hashed next time
    x, y = raw()
    site.write("t1", (x[0] + 1).astype(np.int16))
    third = site.prepare()
    assert [e.fresh for e in third.entries] == [True, False]
    assert third.entries[0].content != first.entries[0].content
    assert third.entries[1].content == first.entries[1].content
    y[y == 4] = 2
    site.write("seg", y)
    assert site.prepare().entries[0].values == (1, 2)
    before = site.file("seg").stat()
    y[y == 2] = 1
    site.write("seg", y)
    assert site.file("seg").stat().st_size != before.st_size
    os.utime(site.file("seg"), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert site.prepare().entries[0].values == (1,)  # the same time, another size


@pytest.mark.parametrize("how", ["overwritten", "replaced"])
def test_other_content_of_the_same_size_and_time(tmp_path, how):
    """As `cp -p` and `rsync -t` leave it: the change time or the inode tells. Unpacked files are of one size."""
    path = VolumeFolder(tmp_path / "data").subject(naming="kaggle") / "FeTS2022_00000_seg.nii"
    prepare = lambda: volume_cache.prepare(
        fets_tree(tmp_path / "data", labels=True).subjects, RULES, tmp_path / "cache", workers=1
    ).entries[0]
    assert prepare().values == (1, 2, 4)
    stat, content = path.stat(), path.read_bytes()
    place = path if how == "overwritten" else path.with_name("new")
    place.write_bytes(content[:352] + content[352:].replace(b"\2", b"\1"))
    place.replace(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert prepare().values == (1, 4)
    path.chmod(0o600)
    assert not prepare().fresh  # another change time, the same bytes


def test_a_run_keeps_what_it_began_with(site):
    """Another run reads the changed files meanwhile; and back again, without reading."""
    first = site.prepare().entries[0]
    want, kept = arrays(first), site.file("t1").read_bytes()
    site.write("t1", np.full(SHAPE, 50, np.int16))  # the box grows as well
    second = site.prepare().entries[0]
    assert second.fresh and second.folder != first.folder and second.shape != first.shape
    for was, now in zip(want, arrays(first)):
        np.testing.assert_array_equal(was, now)
    site.file("t1").write_bytes(kept)
    third = site.prepare().entries[0]
    assert not third.fresh and third.folder == first.folder and third.content == first.content


def test_a_shared_cache_that_cannot_be_written(site, monkeypatch):
    site.prepare()
    os.utime(site.file("t1"), ns=(1, 1))

    def read_only(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(volume_cache, "_write_json", read_only)
    assert [e.fresh for e in site.prepare().entries] == [False, False]


def test_a_source_that_cannot_be_read_is_no_fault_of_the_cache(site, monkeypatch):
    site.prepare()
    site.file("t1").unlink()
    site.file("t1").symlink_to("nowhere")
    (fault,) = site.prepare().faults
    name = site.file("t1").name
    assert fault == f"FeTS2022_00000: {name}: cannot be read (No such file or directory); mend the file"


def test_a_long_first_start_is_told(tmp_path, capsys):
    site = Site(tmp_path, subjects=21)
    found = site.prepare()
    lines = capsys.readouterr().err.splitlines()
    size = sum(e.bytes for e in found.entries) / 1e9
    assert re.match(rf"reading 21 subjects, about {size:.1f} GB, into {site.place} \([\d.]+ GB free\)$", lines[0])
    assert [int(line.split()[0]) for line in lines[1:]] == [3, 5, 7, 9, 11, 13, 15, 17, 19, 21]
    assert all(re.match(r"\d+ of 21 subjects read, about [\d.]+ min left$", line) for line in lines[1:])
    assert len(found.entries) == 21 and all(e is not None and e.fresh for e in found.entries)
    site.prepare()
    shutil.rmtree(site.place / "FeTS2022_00003")
    assert [e.fresh for e in site.prepare().entries].count(True) == 1
    assert capsys.readouterr().err == ""  # little to read


def test_other_preprocessing_and_other_trees_have_their_own_cache(site, tmp_path):
    places = {volume_cache.folder(str(site.cache), root, rules) for root in (tmp_path / "a", tmp_path / "b")
              for rules in (RULES, RULES._replace(normalise="brain"), RULES._replace(crop=False))}  # fmt: skip
    assert len(places) == 6
    for rules in (RULES._replace(nonfinite="background"), RULES._replace(check_affine=False)):
        assert volume_cache.folder("c", site.root, rules) == volume_cache.folder("c", site.root, RULES)


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert volume_cache.folder("", tmp_path, RULES).parent == tmp_path / "x" / "fedjax_seg" / "volumes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert volume_cache.folder("", tmp_path, RULES).parent == tmp_path / ".cache" / "fedjax_seg" / "volumes"


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "index.npy", "meta.json"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_damaged_entry_is_made_again(site, name, how):
    path = site.prepare().entries[0].folder / name
    before = everything(site.place)
    content = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[:-7])
    assert [e.fresh for e in site.prepare().entries] == [True, False]
    assert everything(site.place) == before


def test_the_number_of_threads_changes_nothing(tmp_path):
    site = Site(tmp_path, subjects=5)
    site.prepare(workers=1)
    one = everything(site.place)
    site.cache = tmp_path / "other"
    site.prepare(workers=4)
    assert everything(site.place) == one and len(one) == 20


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from fedjax_seg.data import volume_cache
from fedjax_seg.data.volume_tree import fets_tree

root, caches = Path(sys.argv[1]), Path(sys.argv[2])
subjects, rules = fets_tree(root, labels=True).subjects, volume_cache.Rules("image", True, False)
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)

def at_rename(number, after):
    plain, count = Path.replace, [0]
    def replace(self, target):
        count[0] += 1
        if count[0] == number and not after:
            kill()
        plain(self, target)
        if count[0] == number:
            kill()
    Path.replace = replace

def at_writing(number):
    plain, count = np.save, [0]
    def save(file, array):
        count[0] += 1
        if count[0] == number:
            file.write(b"half"); file.flush(); kill()
        plain(file, array)
    np.save = save

ways = [lambda n=n, a=a: at_rename(n, a) for n, a in [*((n, False) for n in range(1, 9)), (4, True), (7, True)]]
ways += [lambda n=n: at_writing(n) for n in range(1, 7)]
for number, way in enumerate(ways):
    child = os.fork()
    if child == 0:
        way()
        volume_cache.prepare(subjects, rules, caches / str(number), workers=1)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), number
print(len(ways))
"""


def test_a_kill_at_any_moment_and_the_same_cache_in_the_end(site, tmp_path):
    site.prepare(workers=1)
    want = everything(site.place)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(site.root), str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.strip() == "16", done.stderr
    subjects = fets_tree(site.root, labels=True).subjects
    left = set()
    for number in range(16):
        place = tmp_path / "killed" / str(number)
        before = everything(place)
        left.add(len(before))
        assert all(content == want[n] for n, content in before.items() if not n.endswith(".tmp"))  # whole files
        for name in [n for n in before if n.endswith("meta.json")]:  # a described subject is a whole one
            assert {n for n in want if n.startswith(name.removesuffix("meta.json"))} <= set(before)
        found = volume_cache.prepare(subjects, RULES, place, workers=1)
        described = {name.split("/")[0] for name in before if name.endswith("meta.json")}
        assert [e.fresh for e in found.entries] == [s.id not in described for s in subjects]
        assert everything(place) == want, number
    assert len(left) > 5  # the kills did hit different moments


def test_a_full_disk_is_told(site, monkeypatch):
    def save(file, array):
        file.write(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        with pytest.raises(UserError) as error:
            site.prepare()
    assert str(error.value).startswith(f"data.cache: {site.place}: No space left on device; name another folder")
    assert not everything(site.place)
    assert not site.prepare().faults


def test_the_content_is_the_voxels(site):
    entry = site.prepare().entries[0]
    got, label, _ = arrays(entry)
    want = hashlib.sha256(str(got.shape).encode() + got.tobytes() + label.tobytes()).hexdigest()
    assert entry.content == want


def test_nearly_whole_labels_are_rounded_and_counted(site):
    y = raw()[1]
    site.write("seg", (y * 1.00001526).astype(np.float32))
    entry = site.prepare().entries[0]
    assert entry.facts["rounded"] == np.count_nonzero(y)
    np.testing.assert_array_equal(arrays(entry)[1], y[1:15, 1:15, 1:11])


def test_constant_images_become_zero(site):
    site.write("t2", np.full(SHAPE, 7, np.int16))
    found = site.prepare()
    entry = found.entries[0]
    assert not found.faults and entry.facts["constant"] == ["FeTS2022_00000_t2.nii.gz"]
    assert not arrays(entry)[0][..., 2].any() and arrays(entry)[0][..., 1].any() and entry.background[2] == 0


def test_a_subject_of_many_channels_in_one_file(tmp_path):
    msd_folder(tmp_path / "msd", subjects=1, channels=3)
    rules = RULES._replace(channels=True, normalise="none")
    found = volume_cache.prepare(msd_tree(tmp_path / "msd").subjects, rules, tmp_path / "cache", workers=1)
    got = arrays(found.entries[0])[0]
    own = classes(0, 3)
    want = np.stack([image(0, own, c) for c in range(3)], axis=-1)[1:15, 1:15, 1:11]
    np.testing.assert_array_equal(got, want)
    assert Path(found.entries[0].sources[0]).name == "case_000.nii.gz"
