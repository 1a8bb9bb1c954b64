"""Histology tiles: one clear line per fault, all at once, and warnings that are told."""

import numpy as np
import pytest
from image_folder import line
from tile_folder import Tiles, slides

from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data.image_faults import kind

HEADER = "image,label,group,site"


@pytest.fixture
def tiles(tmp_path):
    return Tiles(tmp_path)


def test_all_faults_of_folders_in_one_list(tiles):
    for site in "AB":
        tiles.put(*(f"{site}/{c}/{i}.png" for c in ("benign", "tumour") for i in range(2)))
    tiles.put("A/tumour/cut.jpg", pixels=np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    cut = (tiles.root / "A/tumour/cut.jpg").read_bytes()
    tiles.put("A/tumour/cut.jpg", pixels=cut[:-1500])
    tiles.put("B/benign/empty.png", pixels=b"").put("B/benign/text.png", pixels=b"hello world").put("C/Tumour/0.png")
    tiles.put("B/benign/Thumbs.db", pixels=b"x")
    expected = [
        "A/tumour/cut.jpg: cut short or damaged (image file is truncated",
        "B/benign/empty.png: an empty file (0 bytes); copy it again",
        "B/benign/text.png: no image that can be read",
        "labels 'Tumour' (1 images at C) and 'tumour' (5 images at A, B) differ in case or separators only; rename one",
        "client C: 1 group(s), 2 needed for training, test",
    ]
    found = tiles.faults()
    assert len(found) == len(expected), found
    for text in expected:
        assert sum(f.startswith(text) for f in found) == 1, (text, found)
    assert not any("\n" in f for f in found)


def test_all_faults_of_a_table_in_one_list(tiles):
    rows = slides()
    rows[0] = ("t/A0_0.png", "", "A0", "A")
    rows[3] = ("t/A1_1.png", "tumour", "", "A")
    rows[5] = ("t/A2_1.png", "benign", "A2", "")
    rows[7] = ("t/A3_1.png", "tumour", "B0", "A")
    tiles.rows(HEADER, rows)
    (tiles.root / "t/B3_1.png").unlink()
    found = tiles.faults()
    expected = [
        "line 2: t/A0_0.png: no label; fill the cell in",
        "line 5: t/A1_1.png: no group; fill the cell in, it names the group",
        "line 7: t/A2_1.png: no site; fill the cell in, it names the client",
        "t/B3_1.png (line 17): no such file",
        "group B0: at A and B; one client per group expected; set data.groups_per_site if ids start again",
    ]
    assert len(found) == len(expected), found
    for text in expected:
        assert sum(f.startswith(text) for f in found) == 1, (text, found)
    # cells of sites that nobody asks for may be empty
    assert not [f for f in tiles.faults(partition="iid", clients=2) if "site" in f]


def test_a_class_folder_missing_at_a_site_is_one_line(tiles):
    tiles.put(*(f"{s}/{c}/{i}.png" for s in "AB" for c in ("aca", "scc") for i in range(3)))
    for i in range(3):
        (tiles.root / f"B/scc/{i}.png").unlink()
    data = tiles.load()
    assert line(data, "WARNING: site B has no image of class scc (an empty folder), which other sites have")
    assert [row["scc"] for row in data.about["table1"]] == [3, 0] and len(data.about["warnings"]) == 2


def test_copies_across_split_and_clients_are_counted(tiles):
    tiles.rows(f"{HEADER},split", [(*row, "test" if row[2] == "A3" else "train") for row in slides()])
    same = np.random.default_rng(9).integers(0, 256, (8, 8, 3), np.uint8)
    tiles.put("t/A0_0.png", "t/A3_0.png", "t/B1_0.png", pixels=same)  # train and test at A, train at B
    data = tiles.load()
    assert data.about["copies"] == {"images": 2, "across_patients": 1, "across_clients": 1, "test": 1, "aside": 0}
    found = line(data, "WARNING: 2 images are exact copies of others")
    assert "1 pictures under several groups, 1 at several clients); 1 test images have a copy in training" in found


@pytest.mark.parametrize(
    "partition, word", [("dirichlet", "dirichlet"), ("quantity", "quantity"), ("auto", "dirichlet")]
)
def test_too_few_groups_for_the_clients(tiles, partition, word):
    rows = [row[:3] for row in slides(sites="A", groups=30, tiles=1, labels=("a", "b", "c"))]
    message = rf"data.partition: {word} over 30 groups, 10 clients, alpha 0.05: in 100 draws .* client \d, has 0; raise"
    with pytest.raises(UserError, match=message):
        tiles.rows("image,label,group", rows).load(partition=partition, clients=10, alpha=0.05)
    with pytest.raises(UserError, match=r"30 groups for 16 clients of at least 2; .* would have 1; lower data.clients"):
        tiles.load(partition=partition, clients=16)


def test_a_hospital_of_one_group(tiles):
    tiles.rows(HEADER, [*slides(), ("t/C.png", "benign", "C0", "C")])
    (fault,) = tiles.faults()
    assert fault == "client C: 1 group(s), 2 needed for training, test; set data.min_site_size=2 to drop such clients"
    assert "1 group(s)" in line(tiles.load(min_site_size=2), "note: client C dropped")


def test_a_hospital_of_one_group_is_told_with_all_other_faults(tiles):
    rows = [
        *slides(),
        ("t/C.png", "benign", "C0", "C"),
        ("t/D.png", "benign", "", "D"),
        ("t/E.png", "benign", "E", "E"),
    ]
    rows[0] = ("t/A0_0.png", "", "A0", "A")
    told = tiles.rows(HEADER, rows).faults(external=("E",))  # of D nobody knows, E only tests
    assert [f for f in told if f.startswith("client")] == [
        "client C: 1 group(s), 2 needed for training, test; set data.min_site_size=2 to drop such clients"
    ]
    assert len(told) == 3 and not [f for f in tiles.faults(external=("E",), min_site_size=2) if f.startswith("client")]
    assert not [f for f in tiles.faults(external=("E",), test_share=0.0) if f.startswith("client")]


@pytest.mark.parametrize("kind", ["absolute", "folder", "split", "names with spaces"])
def test_many_faults_of_one_kind_are_counted(tiles, kind):
    rows = [(*row, "") for row in slides(groups=15)]  # 60 tiles
    tiles.rows(f"{HEADER},split", rows)
    bad = {
        "absolute": lambda name, rest: (f"/mnt/disk{name}", *rest),
        "folder": lambda name, rest: (name.replace("t/", "T/"), *rest),
        "split": lambda name, rest: (name, *rest[:-1], "Training" if "_0" in name else "test"),
        "names with spaces": lambda name, rest: (
            f"u v/{name[2]} tile {chr(97 + int(rest[1][1:]))} x{name[-5:]}",
            *rest,
        ),
    }[kind]
    changed = [bad(name, rest) for name, *rest in rows[:54:2]] if kind != "split" else []
    rest = [bad(name, rest) for name, *rest in rows] if kind == "split" else rows[1::2]
    text = "\n".join([f"{HEADER},split", *(",".join(row) for row in (*changed, *rest))])
    with pytest.raises(DataFaults) as error:
        tiles.table(text).load()
    found, lines = error.value.faults, str(error.value).splitlines()
    cause = [f for f in found if "already" not in f]
    assert len(cause) == (30 if kind == "split" else 27), found
    more = [text for text in lines if "more of this kind" in text]
    assert len(more) == (2 if len(found) > len(cause) + 20 else 1) and f"and {len(cause) - 20} more" in more[0], lines
    assert lines[0].endswith(f": {len(found)} fault(s)") and len(lines) < len(found)
    assert error.value.files["faults.txt"].splitlines() == list(found)  # check_data writes it into its folder
    assert not any("one split per" in f for f in found)


def test_few_faults_are_all_printed(tiles):
    rows = slides()
    with pytest.raises(DataFaults) as error:
        tiles.rows(HEADER, [(name, "", *rest) for name, _, *rest in rows]).load()
    assert str(error.value).count("no label") == 16 and "more of this kind" not in str(error.value)
    assert not error.value.files and len(error.value.faults) == 16  # and no word of one class


@pytest.mark.parametrize(
    "text, other, alike",
    [
        ("line 5: t/a.png: no label; fill the cell in", "line 5: t/a.png: no label; fill the cell in", True),
        ("line 5: t/a.png: no label; fill the cell in", "line 6: t/b.png: no site; fill the cell in", False),
        ("a/b c d.png (line 3): no such file", "a/e f.png (line 44): no such file", True),
        ("a.png (line 3): no such file; a.tif is there", "b.png (line 3): no such file; b.tif is there", True),
        ("a.png (line 3): no such file", "a.png (line 3): an empty file (0 bytes); copy it again", False),
        ("line 2: image /x y/1.png is an absolute path; a", "line 3: image /x z w/1.png is an absolute path; a", True),
        ("a.png: label 'u' found, one of x expected", "b.png: label 'v w' found, one of x expected", True),
    ],
    ids=["same", "cell", "spaces", "near", "file", "absolute", "quoted"],
)
def test_kinds_of_faults(text, other, alike):
    assert (kind(text) == kind(other)) == alike


def test_absolute_paths_below_the_root_are_good(tiles, tmp_path):
    rows = slides()
    plain = tiles.rows(HEADER, rows).load()
    (tmp_path.parent / f"{tmp_path.name}_link").symlink_to(tmp_path)
    for root in (tmp_path, tmp_path.parent / f"{tmp_path.name}_link"):
        tiles.rows(HEADER, [(f"{tmp_path}/x/../{name}", *rest) for name, *rest in rows])
        found = tiles.load(root=str(root))
        assert found.case_ids == plain.case_ids and found.about["files_not_named"]["total"] == 0
    tiles.table("\n".join([HEADER, *(",".join((f"{tmp_path}_link/{r[0]}", *r[1:])) for r in rows)]))
    assert tiles.load(root=f"{tmp_path}_link").case_ids == plain.case_ids
    assert "is an absolute path" in tiles.table(f"{HEADER}\n{tmp_path}2/t/A0_0.png,a,g,A\n").faults()[0]


@pytest.mark.parametrize("at", [2, 9, 17])
def test_a_quote_that_is_not_closed(tiles, at):
    tiles.rows(HEADER, slides())
    lines = (tiles.root / "metadata.csv").read_text().splitlines()
    lines[at - 1] = '"' + lines[at - 1]
    with pytest.raises(UserError) as error:
        tiles.table("\n".join(lines) + "\n" * (at == 9)).load()
    assert str(error.value) == (
        f"{tiles.root}/metadata.csv: line {at}: a quote is not closed, all that follows is one cell; close it"
    )


def test_a_quote_that_is_closed_in_another_row(tiles):
    tiles.rows(HEADER, slides())
    lines = (tiles.root / "metadata.csv").read_text().splitlines()
    lines[3], lines[6] = '"' + lines[3], lines[6].replace(".png", '.png"')
    for end in ("\n", "\r\n"):  # lines 4 to 7 are one row, of four cells
        found = tiles.table(end.join(lines)).faults()
        assert found == ("line 4: a cell runs over several lines: a quote is not closed",)


def test_the_first_line_of_a_row_is_told(tiles):
    tiles.rows(HEADER, slides())
    lines = (tiles.root / "metadata.csv").read_text().splitlines()
    noted = [f"{lines[0]},note", *(f'{text},"two\nlines"' for text in lines[1:])]
    assert len(tiles.table("\n".join(noted)).load().case_ids) == 16
    noted[3] = noted[3].replace(",tumour,", ",")
    (fault,) = tiles.table("\n".join(noted)).faults()
    assert fault == (
        "line 6: 4 cells, 5 in the header; quote cells with ',', or a cell runs over several lines: a quote is not"
        " closed"
    )


def test_a_picture_with_two_labels(tiles):
    tiles.rows(HEADER, slides())
    same = np.random.default_rng(9).integers(0, 256, (8, 8, 3), np.uint8)
    tiles.put("t/A0_0.png", "t/A1_0.png", "t/B1_0.png", pixels=same)
    tiles.put("t/A0_1.png", "t/A2_0.png", pixels=same + 1)  # of one label
    data = tiles.load()
    text = "WARNING: 1 pictures have different labels, e.g. t/A0_0.png (benign) and t/A1_0.png (tumour)"
    assert line(data, "WARNING: 1 pictures") == text and data.about["warnings"] == [text]


def test_links_to_nothing(tiles):
    tiles.rows(HEADER, slides())
    (tiles.root / "t/A0_0.png").unlink()
    (tiles.root / "t/A0_0.png").symlink_to("/nowhere/x.png")
    assert tiles.faults() == ("t/A0_0.png (line 2): a link to a file that is not there",)


def test_enlarged_tiles_are_told(tiles):
    tiles.rows(HEADER, slides()).put("t/A0_0.png", pixels=np.zeros((32, 32, 3), np.uint8))
    assert "scaled to 16x16 (area, bilinear for the 15 that were smaller);" in line(tiles.load(size=(16, 16)), "input:")
    assert "scaled to 8x8 (area);" in line(tiles.load(), "input:")
    assert "(nearest);" in line(tiles.load(size=(16, 16), resize="nearest"), "input:")


def test_one_class_only(tiles):
    tiles.put("A/tumour/1.png", "A/tumour/2.png", "B/tumour/1.png", "B/tumour/2.png")
    assert tiles.faults() == ("one class only (tumour); at least two expected",)


def test_labels_outside_the_classes(tiles):
    tiles.put(*(f"{c}/{i}.png" for c in ("aca", "n", "scc") for i in range(4)))
    found = tiles.faults(classes=("n", "aca"))
    assert found == ("scc: label 'scc' found, one of n, aca expected (data.classes)",)  # one line for the folder
    assert (
        tiles.load(classes=("scc", "n", "aca"), clients=2, alpha=9.0).arrays["y"].tolist()
        == [2] * 4 + [1] * 4 + [0] * 4
    )


@pytest.mark.parametrize(
    "header, options, message",
    [
        ("image,diagnosis,group", {}, "no column 'label', .*or change data.label_column"),
        ("image,label,slide_id", {}, "no column 'group', .*; rename 'slide_id', or change data.group_column"),
        ("image,label,Group", {}, "no column 'group', .*; rename 'Group', or change data.group_column"),
        ("image,label,group,Site", {}, "no column 'site', .*; rename 'Site', or change data.site_column"),
        ("image,label,group", {"site_column": "hospital"}, "no column 'hospital', .*or change data.site_column"),
        ("image,label,group", {"partition": "site"}, "data.partition: 'site' given, but no column 'site' or folder of"),
        ("image,label,group", {"partition": "column:lab"}, "no column 'lab', .*or change data.partition"),
        ("image,label,group", {"groups_per_site": True}, "data.groups_per_site: needs sites"),
        ("image,label,group", {"group_from": "prefix"}, "data.group_from: 'prefix' given, but the groups are told by"),
        ("image,label,group", {"folders": "class"}, "data.folders: 'class' given, but metadata.csv is there"),
        ("image,label,group", {"table": "tiles.csv"}, r"data.table: no tiles.csv in .* \(found: metadata.csv, t/\)"),
    ],
)
def test_a_wrong_table(tiles, header, options, message):
    with pytest.raises(UserError, match=message):
        tiles.rows(header, [row[: header.count(",") + 1] for row in slides()]).load(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": (8,)}, r"data.size: \(8,\) given, \(rows, columns\) expected"),
        ({"stain": -0.1}, "data.stain: -0.1 given"),
        ({"stain": float("nan")}, "data.stain: nan given"),
        ({"normalise": "pooled"}, "data.normalise: 'pooled' given, one of 'fixed', 'imagenet', 'none' expected"),
        ({"partition": "lesion_size"}, "data.partition: 'lesion_size' given, one of 'auto', 'site', 'column:NAME'"),
        ({"group_from": "name"}, "data.group_from: 'name' given"),
        ({"folders": "site"}, "data.folders: 'site' given"),
        ({"partition": "iid", "clients": 0}, "data.clients: 0 given"),
        ({"partition": "iid", "alpha": 0.0, "clients": 2, "seed": -1}, "data.seed: -1 given"),
        ({"partition": "dirichlet", "clients": 2, "alpha": 0.0}, "data.alpha: 0.0 given"),
        ({"external": ("Z",)}, "data.external: unknown name 'Z'"),
        ({"root": ""}, "data.root: no folder given; name a folder with metadata.csv"),
    ],
)
def test_wrong_options(tiles, options, message):
    with pytest.raises(UserError, match=message):
        tiles.rows(HEADER, slides()).load(**options)
