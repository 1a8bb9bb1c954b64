import math
import re

import pytest

from fedjax_seg.core import checks
from fedjax_seg.data import phenotypic


def _read(pcp, text=None):
    pcp.write(text=text)
    return phenotypic.read_phenotypic(pcp.root / "Phenotypic_toy.csv")


@pytest.mark.parametrize(
    "site_id, merged",
    [
        ("UM_1", "UM"),
        ("UCLA_2", "UCLA"),
        ("LEUVEN_12", "LEUVEN"),
        ("MAX_MUN", "MAX_MUN"),
        ("NYU", "NYU"),
        ("A_1_2", "A_1"),
    ],
)
def test_only_a_numeric_suffix_is_a_sub_site(site_id, merged):
    assert phenotypic.merged_site(site_id) == merged


def test_dx_group_2_is_the_control_and_the_site_is_never_the_file_prefix(pcp):
    pcp.subject("MAX_MUN", "1", prefix="MaxMun_a")
    pcp.subject("CMU", "2", prefix="CMU_b")
    first, second = _read(pcp).subjects
    assert (first.site, first.diagnosis, first.file_id) == ("MAX_MUN", phenotypic.ASD, "MaxMun_a_0090001")
    assert (second.site, second.diagnosis, second.mean_fd) == ("CMU", phenotypic.CONTROL, 0.05)
    assert not first.faults and not second.faults  # SUB_ID 90001 is file number 0090001


@pytest.mark.parametrize("missing", ["", "-9999", "-9999.0", "NaN"])
def test_missing_values(pcp, missing):
    pcp.subject(fd=missing)
    pcp.subject(dx=missing)
    no_motion, no_diagnosis = _read(pcp).subjects
    assert math.isnan(no_motion.mean_fd) and no_diagnosis.diagnosis == phenotypic.UNKNOWN
    assert not no_motion.faults and not no_diagnosis.faults


def test_bom_semicolons_crlf_spaces_leading_zeros_and_decimal_commas(pcp):
    pcp.subject(sub_id="0000012", fd="0.15")
    for cells in (pcp.header, *pcp.rows):
        cells.insert(0, cells.pop(2))  # SUB_ID comes first: it is the cell that a byte-order mark would hide
    plain = _read(pcp).subjects
    text = pcp.csv_text(";", "\r\n").replace(";NYU;", "; NYU ;").replace("SITE_ID", " SITE_ID ").replace("0.15", "0,15")
    table = _read(pcp, "\ufeff" + text)
    assert table.subjects == plain and table.delimiter == ";"
    assert plain[0][1:6] == ("NYU_0000012", "12", "NYU", phenotypic.CONTROL, 0.15)


def test_numbers_resaved_as_floats_are_read(pcp):
    file_id = pcp.subject(dx="1.0")
    pcp.set(file_id, "SUB_ID", "90001.0")
    assert _read(pcp).subjects[0][2:5] == ("90001", "NYU", phenotypic.ASD)


@pytest.mark.parametrize("column", ["SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP", "func_mean_fd"])
def test_a_missing_column_is_one_line_that_names_it(pcp, column):
    pcp.subject()
    pcp.header[pcp.header.index(column)] = "other"
    with pytest.raises(
        checks.UserError, match=rf"Phenotypic_toy\.csv: no column {column} among its 9 columns"
    ) as error:
        _read(pcp)
    assert "\n" not in str(error.value)


def test_a_column_of_another_case_is_suggested(pcp):
    pcp.subject()
    pcp.header[3] = "Site_Id"
    with pytest.raises(checks.UserError, match="nearest is 'Site_Id': rename it"):
        _read(pcp)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t.replace(",", "|"), "one single column found"),
        (lambda t: t.partition("\n")[0], "a header but no row"),
        (lambda t: "", "one single column found"),
        (lambda t: t.replace("FIQ", "SITE_ID"), "2 columns named SITE_ID"),
    ],
)
def test_something_that_is_not_the_table_says_so(pcp, change, says):
    pcp.subject()
    with pytest.raises(checks.UserError, match=says):
        _read(pcp, change(pcp.csv_text()))


def test_another_encoding_says_so(pcp):
    pcp.subject()
    pcp.write()
    path = pcp.root / "Phenotypic_toy.csv"
    path.write_text(pcp.csv_text(), encoding="utf-16")
    with pytest.raises(checks.UserError, match="not UTF-8"):
        phenotypic.read_phenotypic(path)


@pytest.mark.parametrize(
    "column, text, says",
    [
        ("DX_GROUP", "0", "DX_GROUP '0'; 1 \\(ASD\\) or 2 \\(control\\) expected"),
        ("func_mean_fd", "low", "func_mean_fd 'low'"),
        ("func_mean_fd", "-0.1", "func_mean_fd '-0.1'"),
        ("SUB_ID", "-9999", "SUB_ID missing"),
        ("SITE_ID", "", "SITE_ID missing"),
        ("SUB_ID", "90077", "FILE_ID NYU_0090001 beside SUB_ID 90077"),
    ],
)
def test_a_bad_cell_is_a_fault_of_its_row(pcp, column, text, says):
    file_id = pcp.subject()
    pcp.subject()
    pcp.set(file_id, column, text)
    bad, good = _read(pcp).subjects
    assert len(bad.faults) == 1 and re.search(says, bad.faults[0])
    assert bad.line == 2 and not good.faults
    assert bad in phenotypic.cohort([bad, good]).kept  # so that it is reported


def test_repeats_and_shifted_rows_are_faults(pcp):
    first = pcp.subject()
    pcp.subject(file_id=first, sub_id=90001)
    pcp.subject("UM", sub_id=90001, prefix="NYU_again")
    pcp.subject()
    pcp.rows[-1].insert(3, "unquoted")
    _, twice, elsewhere, shifted = _read(pcp).subjects
    assert "FILE_ID already in line 2" in twice.faults[0]
    assert "another site or diagnosis in line 2" in elsewhere.faults[0]
    assert "10 cells, 9 in the header" in shifted.faults[0]


def test_the_rule_counts_every_step(pcp):
    pcp.subject(file_id="no_filename")
    pcp.subject(dx="")
    pcp.subject(fd="")
    pcp.subject(fd="0.1501")
    pcp.subject(fd="0.15")  # the limit itself is in
    pcp.subject("UM_1", "1")
    pcp.subject("UM_2", "1")
    pcp.subject("CALTECH")
    selection = phenotypic.cohort(_read(pcp).subjects, sites=("UM", "NYU"))
    assert [(s.name, len(s.subjects)) for s in selection.steps] == [
        ("rows in the table", 8),
        ("with a file id", 7),
        ("diagnosis known", 6),
        ("func_mean_fd <= 0.15", 4),
        ("in the chosen sites", 3),
    ]
    assert selection.sites == ("UM", "NYU")
    assert [reason for _, reason in selection.excluded] == [
        "no_filename",
        "DX_GROUP missing",
        "func_mean_fd missing",
        "func_mean_fd > 0.15",
        "site not chosen",
    ]


def test_all_sites_come_largest_first_and_ties_by_name(pcp):
    for site, n in (("B", 2), ("C", 3), ("A", 2), ("D", 1)):
        for _ in range(n):
            pcp.subject(site)
    pcp.subject("D", fd="0.5")
    pcp.subject("D", fd="0.5")  # 3 rows, but a cohort of 1
    assert phenotypic.cohort(_read(pcp).subjects).sites == ("C", "A", "B", "D")


def test_without_a_limit_rows_without_motion_stay(pcp):
    pcp.subject(fd="")
    pcp.subject(fd="3.0")
    assert len(phenotypic.cohort(_read(pcp).subjects, max_fd=math.inf).kept) == 2


@pytest.mark.parametrize(
    "options, says",
    [
        ({"sites": ("UM", "NYUU")}, "unknown site 'NYUU'; did you mean 'NYU'"),
        ({"sites": ("nyu",)}, "unknown site 'nyu'; did you mean 'NYU'"),
        ({"sites": ("UM_1",)}, "sub-sites are merged: write 'UM'"),
        ({"sites": ("UM", "UM")}, "'UM' given twice"),
        ({"sites": "NYU"}, "a tuple of names expected"),
        ({"max_fd": math.nan}, "data.max_fd: nan given"),
        ({"max_fd": 0}, "data.max_fd: 0 given"),
    ],
)
def test_bad_options_are_one_line(pcp, options, says):
    pcp.subject()
    pcp.subject("UM_1")
    with pytest.raises(checks.UserError, match=says) as error:
        phenotypic.cohort(_read(pcp).subjects, **options)
    assert "\n" not in str(error.value)
