"""Folders in the place of a table."""

import pytest
from tile_folder import Tiles

from fedjax_seg.core.checks import UserError
from fedjax_seg.data.class_folders import read_class_folders


@pytest.fixture
def tiles(tmp_path):
    return Tiles(tmp_path)


def read(tiles, template="auto"):
    found = read_class_folders(tiles.root, template, ("hospital", "slide"))
    return [(r.image, r.label, r.patient, dict(r.cells)) for r in found.table.rows], found


@pytest.mark.parametrize(
    "template, name, label, patient, cells",
    [
        ("auto", "aca/1.png", "aca", "aca/1.png", {}),
        ("auto", "X/aca/1.png", "aca", "X/aca/1.png", {"hospital": "X"}),
        ("auto", "X/aca/s7/1.png", "aca", "s7", {"hospital": "X", "slide": "s7"}),
        ("class/group", "aca/s7/1.png", "aca", "s7", {"slide": "s7"}),
        ("site/class", "X/aca/1.png", "aca", "X/aca/1.png", {"hospital": "X"}),
    ],
)
def test_what_folders_mean(tiles, template, name, label, patient, cells):
    rows, found = read(tiles.put(name), template)
    assert rows == [(name, label, patient, cells)]
    assert found.table.patients == ("slide" in cells) and found.table.path is None and not found.notes


def test_files_that_are_no_images_are_left(tiles):
    tiles.put("a/1.png", "a/2.JPG", "b/3.tif", "loose.png")
    for name in ("a/Thumbs.db", "b/notes.txt", "a/.ipynb_checkpoints/1.png", "__MACOSX/a/._1.png", "b/desktop.ini"):
        tiles.put(name, pixels=b"x")
    rows, found = read(tiles)
    assert [r[0] for r in rows] == ["a/1.png", "a/2.JPG", "b/3.tif"] and not found.notes


def test_linked_folders_are_followed_once(tiles):
    tiles.put("store/aca/1.png", "data/scc/1.png")
    (tiles.root / "data/aca").symlink_to(tiles.root / "store/aca")
    (tiles.root / "data/scc/loop").symlink_to(tiles.root / "data")
    (tiles.root / "data/zca").symlink_to(tiles.root / "store/aca")
    found = read_class_folders(tiles.root / "data", "auto", ("site", "group"))
    assert [r.image for r in found.table.rows] == ["aca/1.png", "scc/1.png"]
    assert found.notes == ("WARNING: scc/loop is a link to the whole, zca is a link to aca: not read",)


def test_a_link_to_a_folder_of_the_tree_is_told(tiles):
    tiles.put("B/aca/1.png", "B/scc/1.png", "D/aca/1.png", "D/scc/1.png")
    (tiles.root / "C").symlink_to("B")  # before and after what it links to
    (tiles.root / "A").symlink_to(tiles.root / "B")
    (tiles.root / "D/more").symlink_to("../B/aca")
    rows, found = read(tiles)
    assert [r[0] for r in rows] == ["B/aca/1.png", "B/scc/1.png", "D/aca/1.png", "D/scc/1.png"]
    told = "A is a link to B, C is a link to B, D/more is a link to B/aca"
    assert found.notes == (f"WARNING: {told}: not read",)
    (tiles.root / "E").symlink_to("B")
    assert read(tiles)[1].notes[0].endswith(" and 1 more: not read")


def test_a_hospital_without_an_image_is_told(tiles):
    tiles.put("A/aca/1.png", "A/scc/1.png", "B/aca/1.png", "B/scc/1.png").put("D/notes.txt", pixels=b"x")
    for name in ("C", "E/aca", "B/n"):
        (tiles.root / name).mkdir(parents=True)
    assert read(tiles)[1].notes == (
        "WARNING: 3 site folder(s) without an image: C, D, E",
        "WARNING: 1 class folder(s) without an image: B/n",
    )


def test_a_class_folder_missing_at_a_site_is_told(tiles):
    tiles.put("A/aca/1.png", "A/n/1.png", "A/scc/1.png", "B/aca/1.png", "B/n/1.png", "C/n/1.png")
    (tiles.root / "B/scc").mkdir()
    assert read(tiles)[1].notes == (
        "WARNING: site B has no image of class scc (an empty folder), which other sites have",
        "WARNING: site C has no image of class aca, scc, which other sites have",
    )


def test_an_empty_class_folder_is_told(tiles):
    tiles.put("aca/1.png")
    (tiles.root / "scc").mkdir()
    assert read(tiles)[1].notes == ("WARNING: 1 class folder(s) without an image: scc",)


@pytest.mark.parametrize(
    "names, template, message",
    [
        (["a.png"], "auto", r" \(found: a.png\); a metadata.csv, or <class>/\*.png or <site>/<class>/\*.png expected"),
        (["a/slide.svs"], "auto", "expected; cut whole-slide files into tiles first"),
        (
            ["aca/1.png", "X/aca/1.png", "X/aca/2.png"],
            "auto",
            r"1 in 1 folder\(s\), e.g. aca/1.png; 2 in 2 folder\(s\), e.g. X/aca/1.png; all as",
        ),
        (["a/b/c/d/1.png"], "auto", r"1 in 4 folder\(s\)"),
        (["aca/1.png"], "site/class", r"all as <site>/<class>/\*.png expected"),
    ],
)
def test_other_trees_are_an_error(tiles, names, template, message):
    for name in names:
        tiles.put(name, pixels=b"x")
    with pytest.raises(UserError, match=message):
        read(tiles, template)
