"""A folder of images with a table: what is read and how it is divided."""

import json

import numpy as np
import pytest
from image_folder import Folder, line, roles

from fedjax_seg.core.checks import UserError


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_arrays_in_the_order_of_the_table(folder):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    folder.two_sites().image("A", "A0", name="images/deep/last.tif", pixels=pixels)
    data = folder.load()
    assert data.arrays["x"].shape == (21, 8, 8, 1) and data.arrays["x"].dtype == np.float32
    np.testing.assert_allclose(data.arrays["x"][20, ..., 0], pixels / 255, atol=1e-6)
    assert data.arrays["y"].dtype == np.uint8 and set(data.arrays) == {"x", "y"}
    assert data.arrays["y"].sum((1, 2)).tolist() == [(1 + n % 4) ** 2 for n in range(21)]
    assert data.sites == ("A", "B") and data.site_of.tolist() == [0] * 10 + [1] * 10 + [0]
    assert data.case_ids[20] == "images/deep/last.tif" and data.patient_ids[20] == "A0"
    assert data.classes == ("background", "lesion")


def test_the_split_is_by_patient_per_site(folder):
    data = folder.two_sites().load(test_share=0.4, aside_share=0.2)
    split = data.splits[0]
    assert split.name == "split0"
    for k, site in enumerate("AB"):
        patients = [{data.patient_ids[i] for i in own} for own in (split.train[k], split.test[k])]
        assert [len(p) for p in patients] == [2, 2] and all(p[0] == site for p in patients[0] | patients[1])
    of = np.array(data.patient_ids)
    sides = [set(of[np.concatenate(s)]) for s in (split.train, split.test)] + [set(of[data.aside])]
    assert len(set.union(*sides)) == sum(map(len, sides)) == 10 and len(data.aside) == 4
    assert roles(data) == roles(folder.load(test_share=0.4, aside_share=0.2))
    assert roles(data) != roles(folder.load(test_share=0.4, aside_share=0.2, seed=1))


def test_the_split_column_wins(folder):
    folder.header += ",split"
    for n, split in enumerate(["train", "Test", "aside", "val", "train", "test"]):
        folder.image("AB"[n // 4], more=split)
    assert list(roles(folder.load()).values()).count("train") == 2
    assert roles(folder.load()) == dict(
        zip([f"images/{n:02d}.png" for n in (0, 4, 1, 5, 2)], ["train", "train", "test", "test", "aside"])
    )
    assert roles(folder.load(val="test"))["images/03.png"] == "test"
    assert "note: 1 rows are in no part" in line(folder.load(), "note: 1 rows")
    assert "column 'split' (val: unused)" in line(folder.load(), "split:")


def test_empty_cells_of_the_split_column_are_drawn(folder):
    folder.header += ",split"
    folder.image(more="test", patient="q")
    for _ in range(10):
        folder.image(more=" ")
    found = roles(folder.load())
    assert found["images/00.png"] == "test" and sorted(found.values()).count("test") == 3


def test_external_clients_only_test_and_come_last(folder):
    folder.two_sites().image("C", "C0")
    data = folder.load(external=("A",), min_site_size=2)
    assert data.sites == ("B", "A") and data.external == ("A",)
    assert [len(p) for p in data.splits[0].train] == [8, 0] and len(data.splits[0].test[1]) == 10
    assert "1 patient(s)" in line(data, "note: client C dropped")


def test_sites_choose_and_order_the_clients(folder):
    folder.two_sites().image("C", "C0")
    data = folder.load(sites=("B", "A"))
    assert data.sites == ("B", "A") and len(data.case_ids) == 20
    with pytest.raises(UserError, match=r"data.sites: unknown name 'D'; known: A, B, C"):
        folder.load(sites=("A", "D"))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "quantity", "lesion_size", "column:scanner"])
def test_no_client_shares_a_patient(folder, partition):
    folder.header += ",scanner"
    for n in range(48):
        folder.image("A", f"p{n // 2}", more=f"s{n // 2 % 3}")
    data = folder.load(partition=partition, clients=3, alpha=1.0)
    assert len(data.sites) == 3 and min(np.bincount(data.site_of)) >= 4
    of = {}
    for patient, k in zip(data.patient_ids, data.site_of):
        assert of.setdefault(patient, k) == k
    if partition == "lesion_size":
        lesion = data.arrays["y"].sum((1, 2))
        means = [lesion[data.site_of == k].mean() for k in range(3)]
        assert means == sorted(means) and means[0] < means[2]
    if partition == "column:scanner":
        assert data.sites == ("s0", "s1", "s2")


def test_labels_of_images(folder):
    folder.header = "image,label,site,patient"
    for n in range(12):
        folder.image("AB"[n % 2], label=["normal", "tumour", "other"][n % 3])
    data = folder.load(target="label", channels="rgb")
    assert data.classes == ("normal", "other", "tumour") and data.arrays["x"].shape == (12, 8, 8, 3)
    assert data.arrays["y"].dtype == np.int32 and data.arrays["y"].tolist() == [0, 2, 1] * 4
    assert data.about["table1"][0] == {"site": "A", "total": 6, "normal": 2, "other": 2, "tumour": 2}
    assert folder.load(target="label", classes=("tumour", "other", "normal")).arrays["y"].tolist() == [2, 0, 1] * 4
    found = folder.faults(target="label", classes=("tumour", "normal"))
    assert len(found) == 4 and "label 'other' found, one of tumour, normal expected" in found[0]


def test_spacing_follows_the_scale(folder):
    folder.header += ",spacing"
    for text in ("0.5", "0.5 0.75", "1x2", "2"):
        folder.image(more=text)
    found = folder.load(size=(4, 8)).arrays["spacing"]
    assert found.dtype == np.float32 and found.tolist() == [[1, 0.5], [1, 0.75], [2, 2], [4, 2]]
    assert folder.load(size=(4, 4), unify="crop").arrays["spacing"][1].tolist() == [0.5, 0.75]
    folder.rows[3][-1] = ""
    assert "spacing" not in folder.load().arrays and line(folder.load(), "note: spacing is known of 3 of 4")
    assert folder.load(spacing=(3.0,)).arrays["spacing"][3].tolist() == [3, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", ", "),
        lambda text: text.replace("/", "\\").replace(",", "\t"),
        lambda text: text + ",,,\n\n",
    ],
)
def test_tables_as_people_save_them(folder, change):
    folder.two_sites(3, 1)
    data, plain = folder.load(change(folder.text())), folder.load()
    assert roles(data) == roles(plain) and np.array_equal(data.arrays["x"], plain.arrays["x"])


def test_histopathology_folder_of_users(folder):
    """RGBA, 16-bit, LA, JPEG, TIFF, BMP; Thumbs.db and notebook check points lie about, and one of them is named."""
    grey = np.full((8, 8), 100, np.uint8)
    kinds = [
        ("a/s1_0.png", np.dstack([grey] * 3 + [np.full((8, 8), 128, np.uint8)])),
        ("a/s1_1.png", np.full((8, 8), 50000, np.uint16)),
        ("a/s2_0.jpg", np.dstack([grey] * 3)),
        ("b/s3_0.tif", np.full((8, 8), 60000, ">u2")),
        ("b/s4_0.png", np.dstack([grey, grey])),
        ("b/s4_1.png", np.eye(8) < 1),
        ("b/s5_0.bmp", grey + 1),
        ("a/s6_0.png", np.dstack([grey + 2] * 3)),
    ]
    folder.header = "image,label,site,patient"
    for name, pixels in kinds:
        folder.image(name[0], name[2:4], name=name, pixels=pixels, label=name[0])
    folder.put("a/Thumbs.db", b"x")
    folder.put("a/.ipynb_checkpoints/s1_0-checkpoint.png", grey)
    folder.rows.append(["a/Thumbs.db", "a", "a", "s1"])
    data = folder.load(target="label", channels="rgb")
    assert len(data.case_ids) == 8 and data.arrays["x"].shape == (8, 8, 8, 3)
    white = (100 * 128 + 255 * 127) / 255 / 255
    np.testing.assert_allclose(data.arrays["x"][0], white, atol=1e-5)
    np.testing.assert_allclose(data.arrays["x"][[1, 3], 0, 0, 0], [50000 / 65535, 60000 / 65535], atol=1e-6)
    assert "WARNING" not in " ".join(data.summary)
    assert line(data, "note: 2 images are transparent: composited on white")
    assert line(data, "note: bit depths 8, 16 are mixed")
    assert line(data, "note: 1 rows name files that are no images (Thumbs.db and such): skipped")
    assert ": 2 (a/.ipynb_checkpoints/" in line(data, "note: files that metadata.csv does not name are not read")


def test_the_report_of_the_clients(folder):
    folder.two_sites().image("B", "B9", mask=np.zeros((8, 8), np.uint8))
    data = folder.load()
    assert data.about["table1"] == [
        {"site": "A", "total": 10, "with lesion": 10, "empty mask": 0},
        {"site": "B", "total": 11, "with lesion": 10, "empty mask": 1},
    ]
    lines = [text.split() for text in data.summary[1:4]]
    assert lines[0] == ["A", "10", "5", "8", "2", "0", "4", "0"]  # lesions 1 1 1 4 4 4 9 9 16 16
    assert lines[1][:3] == ["B", "11", "6"] and lines[1][-1] == "1" and lines[2][:3] == ["all", "21", "11"]
    assert data.files["cohort.csv"].splitlines()[1].startswith("images/00.png,A,A0,")
    json.dumps(data.about)
    assert str(folder.root) not in json.dumps(data.about)


def test_facts_of_the_sites(folder):
    folder.header += ",scanner"
    for n in range(8):
        folder.image("AB"[n % 2], more=["GE", "Siemens"][n % 2])
    assert folder.load().about["site_columns"] == {"scanner": ["GE", "Siemens"]}
    assert folder.load(partition="column:scanner").about["site_columns"] == {"site": ["A", "B"]}
    assert folder.load(partition="iid", clients=2).about["site_columns"] == {}


def test_the_generator_is_named(folder):
    folder.two_sites()
    assert folder.load().about["generator"].startswith("none named")
    (folder.root / "generator.json").write_text('{"generator": "ct_phantoms", "seed": 3}')
    data = folder.load()
    assert data.about["generator"] == "ct_phantoms" and data.about["generator_facts"]["seed"] == 3
    assert line(data, "generator: ct_phantoms") and "generator.json" not in " ".join(data.summary)
    (folder.root / "generator.json").write_text("{")
    with pytest.raises(UserError, match=r"generator.json: not JSON"):
        folder.load()
