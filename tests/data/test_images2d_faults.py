"""A folder of images with a table: one clear line per fault, and warnings that are told."""

import numpy as np
import pytest
from image_folder import HEADER, Folder, line

from fedjax_seg.core.checks import UserError
from fedjax_seg.data.images2d import images2d


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


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
