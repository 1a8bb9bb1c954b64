"""A folder of slide features: one clear line per fault."""

import sys

import numpy as np
import pytest
from slide_folder import WIDTH, Slides

from fedjax_seg.core.checks import UserError
from fedjax_seg.data.slide_bags import slide_bags


@pytest.fixture
def slides(tmp_path):
    return Slides(tmp_path)


def test_all_faults_in_one_list(slides):
    slides.header += ",split"
    for n in range(6):
        slides.slide(f"p{n}", "A", "")
    bad = np.ones((2, WIDTH))
    bad[1, 2] = np.nan
    huge = np.full((2, WIDTH), 1e300)
    slides.slide("q6", "A", "", name="cut.npz")
    slides.put("cut.npz", (slides.root / "cut.npz").read_bytes()[:-40])
    slides.slide("q7", "A", "", name="empty.npz", features=b"")
    slides.slide("q8", "A", "", features=bad)
    slides.slide("q9", "A", "", features=huge, dtype=np.float64)
    slides.slide("q10", "A", "", features=np.ones(4))
    slides.slide("q11", "A", "", features=np.ones((2, WIDTH + 1)))
    slides.slide("q12", "A", "", features=np.zeros((0, WIDTH)))
    slides.slide("q13", "A", "", features=np.ones((2, WIDTH)), dtype=np.int64)
    slides.slide("q14", "A", "", features={"a": bad, "b": bad})
    slides.slide("q15", "A", "", features={"features": np.array([{}], object)})
    slides.slide("q16", "A", "", name="slide.pt", features=b"PK")
    slides.slide("q17", "A", "dev")
    slides.slide(" ", "A", "")
    slides.slide("q19", " ", "")
    slides.rows.append(["missing.npz", "a", "r0", "A", ""])
    slides.rows.append(["s00.h5", "a", "r1", "A", ""])
    slides.rows.append(["s01.npz", "a", "r2", "A", ""])
    slides.rows.append(["/etc/x.npz", "a", "r3", "A", ""])
    slides.rows.append(["../x.npz", "", "r4", "A", ""])
    slides.rows.append(["missing", "b", "r5", "A", ""])
    slides.rows.append(["s02.npz", "b", "r5"])
    found = slides.faults()
    expected = [
        "line 19: s17.npz: split 'dev' found, one of train, test, val, aside (or empty) expected",
        "line 20: s18.npz: no patient; fill the cell in",
        "line 21: s19.npz: no site; fill the cell in",
        "line 25: bag /etc/x.npz is an absolute path; a path relative to the folder of the data expected",
        "line 26: bag ../x.npz leads out of the folder of the data",
        "line 26: ../x.npz: no label; fill the cell in",
        "line 28: 3 cells, 5 in the header; quote cells with separators",
        "line 24: s01.npz is already in line 3; delete one of the two rows",
        "cut.npz (line 8): cut short or damaged (File is not a zip file); copy it again",
        "empty.npz (line 9): an empty file (0 bytes); copy it again",
        "s08.npz (line 10): 1 of 6 numbers are NaN, infinite or beyond float32; extract them again",
        "s09.npz (line 11): 6 of 6 numbers are NaN, infinite or beyond float32; extract them again",
        "s10.npz (line 12): features of shape [4] found, [instances, features] expected",
        "s11.npz (line 13): 4 features per instance, 3 in 10 other bags; all of one encoder expected",
        "s12.npz (line 14): no instance (features of shape [0, 3]); leave the slide out",
        "s13.npz (line 15): features of type int64 found, floating point numbers expected",
        "s14.npz (line 16): no array 'features' (found: a, b)",
        "s15.npz (line 17): cut short or damaged (Object arrays cannot be loaded when allow_pickle=False)",
        "slide.pt (line 18): .npz, .h5, .hdf5 expected; PyTorch files are not read, the same program writes h5_files/",
        "missing.npz (line 22): no such file",
        "missing (line 27): no such file, nor with .npz or .h5 or .hdf5 at its end",
    ]
    for text in expected:
        assert sum(fault.startswith(text) for fault in found) == 1, (text, found)
    assert len(found) == len(expected) + 1, set(found)  # and s00.h5, below


def test_faults_of_hdf5_files(slides):
    pytest.importorskip("h5py")
    slides.two_sites(1, 1)
    bag = np.ones((2, WIDTH), np.float32)
    slides.slide("q", "A", name="cut.h5", features=np.ones((2000, WIDTH)))
    slides.put("cut.h5", (slides.root / "cut.h5").read_bytes()[:3000])
    slides.slide("r", "A", name="none.h5", features={"feats": bag, "coords": bag})
    slides.slide("s", "A", name="short.h5", features={"features": bag, "coords": np.zeros((5, 2), np.int64)})
    slides.slide("t", "A", name="text.h5", features=b"hello world")
    slides.slide("u", "A", name="group.h5", features={"features/a": bag})
    slides.rows.append(["s00.h5", "a", "r1", "A"])
    found = slides.faults()
    for text in (
        "cut.h5 (line 4): cut short or damaged (Unable to synchronously open file (truncated file",
        "none.h5 (line 5): no data set 'features' (found: coords, feats)",
        "short.h5 (line 6): 2 rows of features, 5 of coords; the extraction did not end",
        "text.h5 (line 7): cut short or damaged (Unable to synchronously open file (file signature not found)",
        "group.h5 (line 8): no data set 'features' (found: features)",
        "s00.h5 (line 9): no such file; s00.npz is there",
        "client B: 1 patient(s), 2 needed for training, test",
    ):
        assert sum(fault.startswith(text) for fault in found) == 1, (text, found)
    assert len(found) == 7


def test_without_h5py_it_says_what_to_install(slides, monkeypatch):
    slides.two_sites()
    assert len(slides.load().case_ids) == 20
    slides.rows[0][0] = "s00.h5"
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError) as error:
        slides.load()
    assert str(error.value) == (
        "data.slide_bags: h5py cannot be imported, .h5 files need it; pip install 'fedjax-seg[histopathology]'"
    )


def test_words_that_are_no_split_tear_nobody(slides):
    slides.two_sites().header += ",split"
    for n, row in enumerate(slides.rows):
        row.append("training" if n % 2 else "test")
    found = slides.faults()
    assert len(found) == 10 and all("split 'training' found" in fault for fault in found)


def test_a_quote_that_is_closed_in_another_row(slides):
    slides.two_sites()
    slides.rows[3][0], slides.rows[6][0] = '"s03.npz', 's06.npz"'
    assert slides.faults() == ("line 5: a cell runs over several lines: a quote is not closed",)
    slides.rows[6][0] = "s06.npz"
    with pytest.raises(UserError, match="line 5: a quote is not closed, all that follows is one cell; close it"):
        slides.load()


def test_links_and_absolute_paths(slides):
    slides.two_sites()
    slides.rows[0][0] = f"{slides.root}/s00"
    assert slides.load().case_ids[0] == "s00.npz"
    (slides.root / "s03.npz").unlink()
    (slides.root / "s03.npz").symlink_to("/nowhere/s03.npz")
    assert slides.faults() == ("s03.npz (line 5): a link to a file that is not there",)


def test_labels_that_are_none_of_the_classes(slides):
    slides.two_sites()
    assert slides.load(classes=("b", "a")).arrays["y"].tolist() == [1, 0] * 10
    found = slides.faults(classes=("a", "c"))
    assert len(found) == 10 and found[0] == "line 3: s01.npz: label 'b' found, one of a, c expected (data.classes)"


@pytest.mark.parametrize(
    "header, message",
    [
        (
            "slide_id,label,patient,site",
            "columns found: slide_id, label, patient, site; rename 'slide_id'",
        ),
        ("bag,Label,patient,site", "no column 'label', columns found: bag, Label, patient, site; rename 'Label'"),
        ("bag,label,patient,label", "2 columns named 'label'; one expected"),
        ("bag,label,patient,Sites", "data.partition: no column 'site' in metadata.csv"),
    ],
    ids=["bag", "label", "twice", "site"],
)
def test_tables_without_a_column(slides, header, message):
    slides.two_sites().header = header
    with pytest.raises(UserError) as error:
        slides.load()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"root": ""}, "data.root: no folder given; name a folder with metadata.csv (columns bag,label,patient,site)"),
        ({"root": "nowhere"}, "data.root: nowhere does not exist; a folder with metadata.csv"),
        ({"table": "other.csv"}, "data.table: no other.csv in "),
        ({"most_instances": -1}, "data.most_instances: -1 given"),
        ({"memory_gb": 0}, "data.memory_gb: 0 given"),
        (
            {"partition": "lesion_size"},
            "data.partition: 'lesion_size' given, one of 'auto', 'site', 'column:NAME',",
        ),
        ({"partition": "column:x"}, "no column 'x'"),
        ({"patient_column": "id"}, "no column 'id'"),
        ({"sites": ("C",)}, "data.sites: unknown name 'C'; known: A, B"),
        ({"val": "aside"}, "data.val: 'aside' given"),
        ({"partition": "iid", "patients_per_site": True}, "data.patients_per_site: needs data.partition='site'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options(slides, options, message):
    slides.two_sites()
    with pytest.raises(UserError) as error:
        slides.load(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_nothing(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"no metadata.csv in .* \(found: thesis.txt\); a folder with metadata"):
        slide_bags(root=str(tmp_path))
