import hashlib

import numpy as np
import pytest

from fedjax_seg.core import checks
from fedjax_seg.data import pcp_series


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "text, names",
    [
        ("#11\t#12\n1\t2\n3\t4\n5\t6\n", ("#11", "#12")),
        ("# made by hand\n1 2\n3 4\n5 6", ()),
        ("1 2\r\n3   4\r\n\r\n5\t6\r\n", ()),
        ("  1 2  \n3e0 4.0\n#a comment inside\n5 6\n", ()),
    ],
)
def test_reads_tabs_blanks_crlf_with_and_without_a_header(tmp_path, text, names):
    path = _write(tmp_path / "a.1D", text)
    series = pcp_series.read_series(path)
    np.testing.assert_array_equal(series.values, [[1, 2], [3, 4], [5, 6]])
    assert series.names == names and series.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_agrees_with_numpy_loadtxt(tmp_path):
    values = np.random.default_rng(0).normal(size=(20, 9)) * 100
    np.savetxt(tmp_path / "a.1D", values, fmt="%.6f", delimiter="\t", header="made up")
    np.testing.assert_array_equal(pcp_series.read_series(tmp_path / "a.1D").values, np.loadtxt(tmp_path / "a.1D"))


def test_nan_cells_are_numbers_for_the_reader(tmp_path):
    values = pcp_series.read_series(_write(tmp_path / "a.1D", "1 nan\nNaN 4\n")).values
    np.testing.assert_array_equal(values, [[1, np.nan], [np.nan, 4]])


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "no line of numbers"),
        ("#1\t#2\n", "no line of numbers"),
        ("#1\t#2\n1 2\n3 4\n5", "line 4 has 1 cells, line 2 has 2"),  # cut off
        ("1 2\n3\n4 5 6\n", "line 2 has 1 cells"),  # the number of cells is right in total
        ("1 2\n3 x4\n", "line 2: 'x4' is not a number"),
        ("a b\n3 4\n", "line 1: 'a' is not a number.*must begin with '#'"),
        ("1,2\n3,4\n", "line 1: '1,2' is not a number"),
        (b"\x1f\x8b\x08\x00 \x00\xff\n", "is not a number"),
    ],
)
def test_a_damaged_file_is_one_line_with_the_first_bad_place(tmp_path, text, says):
    with pytest.raises(checks.UserError, match=says) as error:
        pcp_series.read_series(_write(tmp_path / "a.1D", text))
    assert "\n" not in str(error.value)


def test_series_are_found_at_any_depth_and_hidden_files_are_not(tmp_path):
    deep = _write(tmp_path / "Outputs/cpac/filt/A_0090001_rois_toy.1D", "1")
    _write(tmp_path / "Outputs/cpac/filt/._A_0090001_rois_toy.1D", "1")
    top = _write(tmp_path / "B_rois_C_0090002_rois_toy.1D", "1")
    (tmp_path / "Outputs/loop").symlink_to(tmp_path)
    assert pcp_series.find_series(tmp_path) == ("toy", {"A_0090001": deep, "B_rois_C_0090002": top})


def test_one_of_several_atlases_must_be_named(tmp_path):
    for name in ("a_rois_aal.1D", "b_rois_aal.1D", "a_rois_ho.1D"):
        _write(tmp_path / name, "1")
    with pytest.raises(checks.UserError, match=r"aal \(2 files\), ho \(1 files\); name one"):
        pcp_series.find_series(tmp_path)
    assert set(pcp_series.find_series(tmp_path, "aal")[1]) == {"a", "b"}
    with pytest.raises(checks.UserError, match="unknown name 'all'; did you mean 'aal'"):
        pcp_series.find_series(tmp_path, "all")


@pytest.mark.parametrize(
    "name, says", [("notes.txt", "no .1D file at all"), ("a.1D", "1 .1D files but none named so.*'a.1D'")]
)
def test_a_folder_without_series_says_what_was_expected(tmp_path, name, says):
    _write(tmp_path / name, "1")
    with pytest.raises(checks.UserError, match=says) as error:
        pcp_series.find_series(tmp_path)
    assert "<FILE_ID>_rois_<atlas>.1D" in str(error.value) and str(tmp_path) in str(error.value)


def test_two_copies_of_one_file_are_ambiguous(tmp_path):
    _write(tmp_path / "filt/a_rois_ho.1D", "1")
    _write(tmp_path / "nofilt/a_rois_ho.1D", "1")
    with pytest.raises(checks.UserError, match=r"a has two files, .*filt.* and .*nofilt"):
        pcp_series.find_series(tmp_path)


def _tables(tmp_path, tables):
    paths = {}
    for name, table in tables.items():
        text = "\n".join("\t".join(map(str, row)) for row in table)
        paths[name] = _write(tmp_path / f"{name}_rois_toy.1D", text)
    return paths


def test_lengths_may_differ_but_widths_may_not(tmp_path):
    random = np.random.default_rng(0)
    good = {f"g{i}": random.normal(size=(8 + i, 5)) for i in range(3)}
    read = pcp_series.read_connectomes(_tables(tmp_path, good))
    assert read.faults == () and read.rois == 5 and read.lengths == {"g0": 8, "g1": 9, "g2": 10}
    assert all(f.shape == (10,) for f in read.features.values())
    wider, turned = random.normal(size=(9, 6)), random.normal(size=(5, 8))
    faults = pcp_series.read_connectomes(_tables(tmp_path, {**good, "w": wider, "t": turned})).faults
    assert len(faults) == 2
    assert "w_rois_toy.1D: 6 columns, 5 in 3 of the 5 files; is it of another atlas" in faults[0]
    assert "t_rois_toy.1D: 8 columns, 5 in 3 of the 5 files; it looks transposed (5 rows)" in faults[1]


def test_column_names_that_do_not_fit_are_faults(tmp_path):
    rows = "\n".join("\t".join(f"{v:.3f}" for v in row) for row in np.random.default_rng(0).normal(size=(4, 3)))
    heads = {"a": "#1\t#2\t#3", "b": "#1\t#2\t#3", "swapped": "#1\t#3\t#2", "short": "#1\t#2", "free": "# by hand"}
    paths = {k: _write(tmp_path / f"{k}_rois_toy.1D", f"{head}\n{rows}\n") for k, head in heads.items()}
    turned = "\n".join(["#1\t#2\t#3\t#4", rows])  # four names above three columns in four rows
    paths["turned"] = _write(tmp_path / "turned_rois_toy.1D", turned)
    swapped, short, turned_fault = pcp_series.read_connectomes(paths).faults
    assert "swapped" in swapped and "column 2 is #3, #2 in the other files" in swapped
    assert "2 ROI names above 3 columns" in short
    assert "4 ROI names above 3 columns; it looks transposed" in turned_fault


@pytest.mark.parametrize(
    "table, says",
    [
        (np.zeros((9, 4)), "4 of 4 ROIs are constant or hold NaN"),
        (np.full((9, 4), np.nan), "4 of 4 ROIs are constant or hold NaN"),
        (np.eye(9, 4) * [1, 0, 0, 0], "3 of 4 ROIs"),  # no pair is left
        (np.eye(2, 4), "2 time points, at least 3"),
    ],
)
def test_a_file_without_any_edge_is_a_fault(tmp_path, table, says):
    fine = np.random.default_rng(0).normal(size=(9, 4))
    faults = pcp_series.read_connectomes(_tables(tmp_path, {"fine": fine, "empty": table})).faults
    assert len(faults) == 1 and says in faults[0] and faults[0].startswith("empty: ")


def test_the_combined_hash_follows_the_content_not_the_order(tmp_path):
    tables = {name: np.random.default_rng(i).normal(size=(5, 3)) for i, name in enumerate("ab")}
    paths = _tables(tmp_path, tables)
    lines = [f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in paths.values()]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert pcp_series.read_connectomes(paths).sha256 == expected
    assert pcp_series.read_connectomes(dict(reversed(paths.items()))).sha256 == expected
