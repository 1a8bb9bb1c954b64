"""Histology tiles: what is read, which tiles belong together, and who gets them."""

import json

import numpy as np
import pytest
from image_folder import line, roles
from tile_folder import Tiles, slides

from fedjax_seg.data import make
from fedjax_seg.data.histopathology import SCALES
from fedjax_seg.data.image_cohort import site_columns
from fedjax_seg.data.image_table import Row
from fedjax_seg.data.stain import draw

HEADER = "image,label,group,site"


@pytest.fixture
def tiles(tmp_path):
    return Tiles(tmp_path)


def parts_of(data):
    """{group: (clients, parts)} of all cases"""
    role, found = roles(data), {}
    for case, group, k in zip(data.case_ids, data.patient_ids, data.site_of):
        own = found.setdefault(group, (set(), set()))
        own[0].add(int(k))
        own[1].add(role[case])
    return found


def test_a_table_with_sites(tiles):
    data = tiles.rows(HEADER, slides()).load()
    assert data.arrays["x"].shape == (16, 8, 8, 3) and data.arrays["x"].dtype == np.float32
    assert data.arrays["y"].dtype == np.int32 and data.arrays["y"].tolist() == [0, 0, 1, 1] * 4
    assert data.classes == ("benign", "tumour") and data.sites == ("A", "B")
    assert data.patient_ids[:3] == ("A0", "A0", "A1") and data.site_of.tolist() == [0] * 8 + [1] * 8
    assert all(len(clients) == len(parts) == 1 for clients, parts in parts_of(data).values())
    assert [len(p) for p in data.splits[0].test] == [2, 2]  # a fifth of four groups, rounded
    assert data.about["table1"][0] == {"site": "A", "total": 8, "benign": 4, "tumour": 4}
    assert data.about["patients"] == "column 'group'" and data.about["warnings"] == []
    assert "WARNING" not in " ".join(data.summary) and "groups" in data.summary[0]
    json.dumps(data.about)
    assert str(tiles.root) not in json.dumps(data.about)


def test_folders_give_the_rows_of_the_table(tiles):
    names = [f"{s}/{c}/{i}.png" for s in "AB" for c in ("benign", "tumour") for i in range(3)]
    data = tiles.put(*names).load()
    assert data.case_ids == tuple(sorted(names)) and data.sites == ("A", "B")
    assert data.about["partition"] == "by the column 'site' (folders)"
    table = tiles.rows("image,label,site", [(n, n.split("/")[1], n[0]) for n in sorted(names)]).load()
    assert np.array_equal(data.arrays["x"], table.arrays["x"]) and np.array_equal(data.arrays["y"], table.arrays["y"])
    assert roles(data) == roles(table)
    again = tiles.load(table="")
    assert again.case_ids == data.case_ids and "(.png" not in line(again, "note: files that are no images")


def test_pictures_as_users_have_them(tiles):
    grey = np.full((8, 8), 100, np.uint8)
    half = np.full((8, 8), 128, np.uint8)
    tiles.put("a/0.png", pixels=np.dstack([grey, grey + 20, grey, half]))
    tiles.put("a/1.png", pixels=np.full((8, 8), 50000, np.uint16))
    tiles.put("a/2.jpg", pixels=np.dstack([grey] * 3))
    tiles.put("a/3.png", pixels=np.dstack([np.full((24, 16), v, np.uint8) for v in (10, 20, 30)]))
    tiles.put("b/4.tif", pixels=grey).put("b/5.bmp").put("b/6.png").put("b/7.png")
    tiles.put("a/Thumbs.db", "b/.ipynb_checkpoints/6.png", "b/desktop.ini", "b/.DS_Store", "readme.txt", pixels=b"x")
    data = tiles.load(partition="iid", clients=2)
    x = data.arrays["x"]
    assert len(x) == 8 and data.arrays["y"].tolist() == [0] * 4 + [1] * 4
    white = [(v * 128 + 255 * 127) / 255 / 255 for v in (100, 120, 100)]
    np.testing.assert_allclose(x[0], np.broadcast_to(white, (8, 8, 3)), atol=1e-5)
    np.testing.assert_allclose(x[1], 50000 / 65535, atol=1e-6)
    np.testing.assert_allclose(x[3], np.broadcast_to(np.array([10, 20, 30]) / 255, (8, 8, 3)), atol=1e-6)
    np.testing.assert_allclose(x[4], 100 / 255, atol=1e-6)
    assert data.about["files_not_named"]["total"] == 5 and data.about["files_not_named"]["junk"] == 4
    assert ": 5 (" in line(data, "note: files that are no images, or in no class folder, are not read")
    assert line(data, "note: 1 images are transparent: composited on white")
    assert line(data, "note: 1 images are stretched")
    padded = tiles.load(partition="iid", clients=2, unify="pad").arrays["x"][3]
    assert padded[:, 0].min() == 1 and padded[4, 4].tolist() == pytest.approx([10 / 255, 20 / 255, 30 / 255])


def test_without_groups_a_loud_warning(tiles):
    rows = [row[:2] for row in slides()]
    data = tiles.rows("image,label", rows).load(partition="iid", clients=2)
    warning = line(data, "WARNING: NO GROUPS")
    assert "SCORES ARE TOO HIGH" in warning and "data.group_from='prefix'" in warning and "8 groups of 16" in warning
    assert data.about["warnings"] == [warning] and "scores are too high" in data.about["patients"]
    assert data.patient_ids == data.case_ids
    prefix = tiles.load(partition="iid", clients=2, group_from="prefix")
    assert set(prefix.patient_ids) == {f"{s}{g}" for s in "AB" for g in range(4)}
    assert all(len(clients) == len(parts) == 1 for clients, parts in parts_of(prefix).values())
    assert "NO GROUPS" not in " ".join(prefix.summary)


def test_tcga_names_tell_patient_and_hospital(tiles):
    ids = [f"TCGA-{s}-{p}-01Z-00-DX{d}" for s in ("05", "A2") for p in ("4244", "4245", "A0CM") for d in (1, 2)]
    tiles.put(*(f"{'ab'[n // 2 % 2]}/{name}_{i}.png" for n, name in enumerate(ids) for i in range(2)))
    data = tiles.load()
    assert data.sites == ("05", "A2") and np.bincount(data.site_of).tolist() == [12, 12]
    assert set(data.patient_ids) == {f"TCGA-{s}-{p}" for s in ("05", "A2") for p in ("4244", "4245", "A0CM")}
    assert all(len(clients) == len(parts) == 1 for clients, parts in parts_of(data).values())
    note = "note: ids are TCGA barcodes: 6 patients (first three fields), hospitals are the tissue source sites"
    assert line(data, note) and "NO GROUPS" not in " ".join(data.summary)
    assert data.about["partition"] == "by the column 'site' (tissue source sites of TCGA barcodes)"
    assert tiles.load(partition="iid", clients=2).about["patients"].startswith("patients of TCGA barcodes")
    tiles.put("a/other.png")
    mixed = tiles.load(partition="iid", clients=2)
    assert line(mixed, "note: 24 of 25 ids are TCGA barcodes: not used") and line(mixed, "WARNING: NO GROUPS")
    assert "NO GROUPS" in " ".join(tiles.load(partition="iid", clients=2, group_from="none").summary)


def test_slides_of_one_tcga_patient_are_one_group(tiles):
    rows = [(f"{n}.png", "ab"[n % 2], f"TCGA-05-{4000 + n // 4}-01Z-00-DX{n % 4}", "XY"[n // 8]) for n in range(16)]
    data = tiles.rows(HEADER, rows).load()
    assert data.patient_ids == tuple(f"TCGA-05-{4000 + n // 4}" for n in range(16))
    assert data.sites == ("X", "Y")  # a column of sites wins


@pytest.mark.parametrize("partition", ["dirichlet", "quantity", "iid", "column:region"])
def test_no_group_is_divided(tiles, partition):
    rows = [(*row, "NSE"[n // 2 % 3]) for n, row in enumerate(slides(groups=15))]
    data = tiles.rows(f"{HEADER},region", rows).load(partition=partition, clients=3, alpha=1.0, aside_share=0.2)
    assert len(data.sites) == 3 and np.bincount(data.site_of).min() >= 6
    assert all(len(clients) == len(parts) == 1 for clients, parts in parts_of(data).values())
    assert {part for _, parts in parts_of(data).values() for part in parts} == {"train", "test", "aside"}


def test_auto_draws_where_no_site_is_told(tiles):
    data = tiles.rows("image,label,group", [row[:3] for row in slides(groups=10)]).load(clients=2, alpha=5.0)
    assert data.sites == ("client_0", "client_1") and data.about["partition"].startswith("drawn: Dirichlet, alpha 5")


def test_groups_that_start_again_at_every_site(tiles):
    rows = [(name, label, group[1:], site) for name, label, group, site in slides()]
    assert len(tiles.rows(HEADER, rows).faults()) == 4
    assert "set data.groups_per_site" in tiles.faults()[0]
    assert set(tiles.load(groups_per_site=True).patient_ids) == {f"{s}/{g}" for s in "AB" for g in range(4)}


def test_the_split_column_and_external_sites(tiles):
    rows = [(*row, "test" if row[2] == "A1" else "train" if row[3] == "A" else "") for row in slides()]
    data = tiles.rows(f"{HEADER},split", rows).load(external=("B",))
    found = parts_of(data)
    assert found["A1"] == ({0}, {"test"}) and found["A0"] == ({0}, {"train"}) and found["B2"] == ({1}, {"test"})
    assert data.external == ("B",)


def test_standardised_inputs(tiles):
    tiles.rows(HEADER, slides())
    plain = tiles.load().arrays["x"]
    for name in ("fixed", "imagenet"):
        data = tiles.load(normalise=name)
        scale = data.about["normalise"]
        np.testing.assert_allclose(data.arrays["x"] * scale["std"] + scale["mean"], plain, atol=1e-6)
        np.testing.assert_allclose(
            data.arrays["x"][3, 2, 1], (plain[3, 2, 1] - scale["mean"]) / scale["std"], atol=1e-5
        )
        assert data.arrays["x"].dtype == np.float32 and scale["source"] in line(data, "input:")
    assert SCALES["imagenet"].mean == (0.485, 0.456, 0.406) and SCALES["imagenet"].std == (0.229, 0.224, 0.225)
    assert tiles.load().about["normalise"]["std"] == [1, 1, 1]


def test_a_stain_shift_per_hospital(tiles):
    tiles.rows(HEADER, slides())
    plain, data = tiles.load(), tiles.load(stain=0.2, seed=5)
    matrix = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
    for n in (0, 15):  # in the logarithm a shift is linear
        jitter = draw(0.2, seed=5, client="AB"[n // 8])
        stains = -np.log(np.maximum(plain.arrays["x"][n].astype(float), 1e-6)) @ np.linalg.inv(matrix)
        expected = np.minimum(np.exp(-((stains * jitter.alpha + jitter.beta) @ matrix)), 1)
        np.testing.assert_allclose(data.arrays["x"][n], expected, atol=1e-4)
        assert np.abs(data.arrays["x"][n] - plain.arrays["x"][n]).max() > 0.01
    assert list(data.about["stain"]["clients"]) == ["A", "B"] and "stain shift per client: 0.2" in line(data, "input:")
    alone = tiles.load(stain=0.2, seed=5, sites=("B",))  # whoever else takes part
    np.testing.assert_array_equal(alone.arrays["x"], data.arrays["x"][8:])
    assert roles(data) == roles(tiles.load(seed=5)) and tiles.load().about["stain"]["clients"] == {}


def test_facts_of_the_sites(tiles):
    rows = [(*row, {"A": "north", "B": "south"}[row[3]], f"s{n % 3}", "") for n, row in enumerate(slides())]
    data = tiles.rows(f"{HEADER},region,scanner,empty", rows).load(sites=("B", "A"))
    assert data.about["site_columns"] == {"region": ["south", "north"]}
    cells = [{"site": "A", "m": "1"}, {"site": "B", "m": "1"}, {"site": "B", "m": "2"}]
    made = [Row(0, "x", "", "", "p", "", None, c) for c in cells]
    assert site_columns(made, np.array([0, 1, 1]), 2, ()) == {"site": ["A", "B"]}
    assert site_columns(made[:2], np.array([0, 1]), 2, ("site",)) == {"m": ["1", "1"]}


def test_by_its_name(tiles):
    tiles.rows(HEADER, slides())
    assert make("histopathology", root=str(tiles.root), size=(4, 4)).arrays["x"].shape == (16, 4, 4, 3)
