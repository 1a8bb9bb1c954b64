"""A folder of images with a table: what is read, how it is divided, and one clear line per fault."""

import json

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data.images2d import images2d

HEADER = "image,mask,site,patient"


class Folder:
    """Images of 8x8 in memory order: image i is noise, its mask a square of side 1 + i % 4."""

    def __init__(self, root):
        self.root, self.rows, self.header = root, [], HEADER
        self._random = np.random.default_rng(1)

    def image(self, site="A", patient=None, name=None, pixels=None, mask=None, more="", label=None):
        n = len(self.rows)
        name = name or f"images/{n:02d}.png"
        square = np.zeros((8, 8), np.uint8)
        square[: 1 + n % 4, : 1 + n % 4] = 255
        self.put(name, self._random.integers(0, 256, (8, 8), np.uint8) if pixels is None else pixels)
        if label is None:
            self.put(f"masks/{n:02d}.png", square if mask is None else mask)
        second = f"masks/{n:02d}.png" if label is None else label
        self.rows.append([name, second, site, patient or f"p{n}", *([more] if more else [])])
        return name

    def put(self, name, pixels):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(pixels, bytes):
            path.write_bytes(pixels)
        else:
            Image.fromarray(pixels).save(path)

    def two_sites(self, patients=5, slices=2):
        for site in "AB":
            for p in range(patients):
                for _ in range(slices):
                    self.image(site, f"{site}{p}")
        return self

    def text(self, delimiter=",", end="\n"):
        lines = [self.header.split(","), *self.rows]
        return "".join(delimiter.join(line) + end for line in lines)

    def load(self, text=None, **options):
        (self.root / "metadata.csv").write_bytes((self.text() if text is None else text).encode())
        return images2d(**{"root": str(self.root), "size": (8, 8)} | options)

    def faults(self, **options):
        with pytest.raises(DataFaults) as error:
            self.load(**options)
        return error.value.faults


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def roles(data):
    """{case id: its part}"""
    split = data.splits[0]
    parts = {"train": np.concatenate(split.train), "test": np.concatenate(split.test), "aside": data.aside}
    return {data.case_ids[i]: role for role, own in parts.items() for i in own}


def line(data, start):
    found = [text for text in data.summary if text.startswith(start)]
    assert len(found) == 1, data.summary
    return found[0]


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


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "lesion_size", "column:scanner"])
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


def test_all_faults_in_one_list(folder):
    folder.header += ",split"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    folder.two_sites(3, 1)
    for row in folder.rows:
        row.append("")
    folder.image(name="images/cut.jpg", pixels=noise, more=" ")
    cut = (folder.root / "images/cut.jpg").read_bytes()
    folder.put("images/cut.jpg", cut[:-1500])
    folder.image(name="images/empty.png", pixels=b"", more=" ")
    folder.image(name="images/text.png", pixels=b"hello world", more=" ")
    folder.image(mask=np.zeros((4, 4), np.uint8), more=" ")
    folder.image(mask=np.full((8, 8), 7, np.uint8), more=" ")
    folder.image(more="dev")
    folder.image(patient=" ", more=" ")
    folder.image(site=" ", more=" ")
    folder.rows.append(["images/missing.png", "masks/00.png", "A", "m", ""])
    folder.rows.append(["images/00.jpg", "masks/00.png", "A", "m", ""])
    folder.rows.append(["images/01.png", "masks/01.png", "A", "A1", ""])
    folder.rows.append(["../x.png", "/etc/x.png", "A", "m", ""])
    folder.rows.append(["images/02.png", "masks/02.png", "A"])
    folder.rows.append(["images/./03.png", "", "B", "A1", ""])
    found = folder.faults()
    expected = [
        r"line 13: images/11.png: split 'dev' found, one of train, test, val, aside (or empty) expected",
        r"line 14: images/12.png: no patient; fill the cell in, it names the patient",
        r"line 15: images/13.png: no site; fill the cell in, it names the client",
        r"line 19: image ../x.png leads out of the folder of the data",
        r"line 19: mask /etc/x.png is an absolute path; a path relative to the folder of the data expected",
        r"line 20: 3 cells, 5 in the header; quote cells with ','",
        r"line 21: no mask; fill the cell in",
        r"line 18: images/01.png is already in line 3; delete one of the two rows",
        r"line 21: images/03.png is already in line 5; delete one of the two rows",
        r"images/cut.jpg (line 8): cut short or damaged (image file is truncated",
        r"images/empty.png (line 9): an empty file (0 bytes); copy it again",
        r"images/text.png (line 10): no image that can be read (it starts with b'hello wo'); PNG, TIFF or JPEG",
        r"masks/09.png (line 11): the mask is 4x4, its image images/09.png 8x8",
        r"masks/10.png (line 12): mask values 7 found, 0 and 1 or 0 and 255 allowed (data.mask_values)",
        r"images/missing.png (line 16): no such file",
        r"images/00.jpg (line 17): no such file; 00.png is there",
        r"patient A1: at A and B; one client per patient expected; set data.patients_per_site",
    ]
    for text in expected:
        assert sum(f.startswith(text) for f in found) == 1, (text, found)
    # the mask of the cut image is whole, its size is not compared
    assert len(found) == len(expected), set(found)


def test_ids_that_start_again_at_every_site(folder):
    for site in "AB":
        for p in range(4):
            folder.image(site, f"{p}")
    assert len(folder.faults()) == 4
    data = folder.load(patients_per_site=True)
    assert set(data.patient_ids) == {f"{s}/{p}" for s in "AB" for p in range(4)}


def test_a_patient_in_two_parts_of_the_column(folder):
    folder.header += ",split"
    folder.image(patient="p", more="train")
    folder.image(patient="p", more="test")
    assert folder.faults() == ("line 3: patient p is in split test here and in train in line 2; one split per patient",)


def test_a_client_of_one_patient(folder):
    folder.two_sites().image("C", "C0")
    (fault,) = folder.faults()
    assert fault == "client C: 1 patient(s), 2 needed for training, test; set data.min_site_size=2 to drop such clients"
    assert folder.load(min_site_size=2).sites == ("A", "B")
    with pytest.raises(UserError, match=r"no client of 9 patients \(A 5, B 5, C 1\)"):
        folder.load(min_site_size=9)


def test_dirichlet_with_too_few_patients(folder):
    for _ in range(30):
        folder.image()
    with pytest.raises(
        UserError, match=r"data.partition: dirichlet over 30 patients, 10 clients, alpha 0.05: .* has 0"
    ):
        folder.load(partition="dirichlet", clients=10, alpha=0.05)


def test_without_patients_a_warning_everywhere(folder):
    folder.two_sites()
    text = "".join(",".join(r.split(",")[:3]) + "\n" for r in folder.text().splitlines())
    data = folder.load(text)
    assert data.patient_ids == data.case_ids and data.about["patients"].startswith("none named")
    assert "in training and test, and scores too good" in line(data, "WARNING: metadata.csv has no column of patients")
    assert "column of patients" not in " ".join(folder.load().summary)


def test_copies_across_the_split_are_counted(folder):
    folder.header += ",split"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    for site, patient, split in [("A", "1", "train"), ("A", "2", "test"), ("B", "3", "test"), ("B", "4", "aside")]:
        folder.image(site, patient, name=f"{patient}.{'tif' if patient == '2' else 'png'}", pixels=pixels, more=split)
    folder.image("A", "1", more="train")
    for patient in "56":  # tests that copy each other, not a training image
        folder.image("A", patient, pixels=pixels.T, more="test")
    data = folder.load()
    assert data.about["copies"] == {"images": 4, "across_patients": 2, "across_clients": 1, "test": 2, "aside": 1}
    assert line(data, "WARNING: 4 images are exact copies of others (2 pictures under several patients, 1 at several")
    assert "2 test images have a copy in training, 1 set aside" in line(data, "WARNING: 4")


def test_lesions_lost_by_scaling_are_counted(folder):
    small = np.zeros((8, 8), np.uint8)
    small[0, 0] = 255
    folder.two_sites().image(mask=small)
    found = line(folder.load(size=(2, 2)), "WARNING:")
    lost = int(found.split()[1])
    empty = folder.load(size=(2, 2)).arrays["y"].sum((1, 2)) == 0
    assert lost == empty.sum() >= 1 and found.startswith(f"WARNING: {lost} masks lost their lesion")
    assert not [text for text in folder.load().summary if "lost" in text]


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


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "img,mask,site,patient\n",
            "no column 'image', columns found: img, mask, site, patient; rename 'img'|; add it",
        ),
        (
            "image,site,patient\n",
            "no column 'mask', columns found: image, site, patient; add it, or change data.target",
        ),
        ("image,mask,patient\n", "no column 'site', .*; add it, or change data.partition"),
        ("image,mask,site,Patient\n", "no column 'patient', .*; rename 'Patient', or change data.patient_column"),
        ("image,mask,site,site,patient\n", "2 columns named 'site'; one expected"),
        (HEADER + "\n", "a header but no row"),
        ("", "columns found: none"),
    ],
)
def test_a_wrong_table(folder, text, message):
    with pytest.raises(UserError, match=message):
        folder.load(text)


def test_wrong_places(tmp_path):
    for root, message in [("", "data.root: no folder given"), (str(tmp_path / "x"), "x does not exist; a folder with")]:
        with pytest.raises(UserError, match=message):
            images2d(root=root)
    (tmp_path / "scan.png").touch()
    with pytest.raises(UserError, match=r"data.table: no metadata.csv in .* \(found: scan.png\); a folder with"):
        images2d(root=str(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": "masks"}, "data.target: 'masks' given"),
        ({"size": (8,)}, r"data.size: \(8,\) given, \(rows, columns\) expected"),
        ({"size": (8, 0)}, "data.size: 0 given"),
        ({"window": (40.0,)}, r"data.window: \(40.0,\) given, \(centre, width\)"),
        ({"window": (40.0, 0.0)}, "data.window width: 0.0 given"),
        ({"window": (40.0, 400.0), "channels": "rgb"}, "does not apply to channels='rgb'"),
        ({"hu_offset": -1024.0}, "without data.window"),
        ({"mask_values": (3,)}, "2 to 256 distinct values"),
        ({"mask_values": (0, 1, 2), "classes": ("a", "b")}, "data.classes: 2 names for 3 mask values"),
        ({"target": "label", "partition": "lesion_size"}, "needs masks"),
        ({"partition": "random"}, "data.partition: 'random' given, one of 'site', 'column:NAME', 'dirichlet'"),
        ({"test_share": 0.6, "aside_share": 0.4}, "less than 1 expected"),
        ({"val": "validate"}, "data.val"),
        ({"partition": "iid", "patients_per_site": True}, "data.patients_per_site: needs"),
        ({"sites": ("A", "A")}, "data.sites: .* distinct names expected"),
        ({"external": ("Z",)}, "data.external: unknown name 'Z'"),
        ({"patient_column": "group"}, "no column 'group'"),
    ],
)
def test_wrong_options(folder, options, message):
    folder.two_sites(2, 1)
    with pytest.raises(UserError, match=message):
        folder.load(**options)
