"""The partitioning CSV: every way people save it, every fault with its line; the split inside each institution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data import partition_table
from fedjax_seg.data.partition_table import Row, read, split

ROWS = [Row("00012", "1", ""), Row("00003", "2", ""), Row("00004", "10", ""), Row("00005", "10", "")]
TEXT = "Partition_ID,Subject_ID\n1,00012\n2,00003\n10,00004\n10,00005\n"


def table(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "partitioning.csv"
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    "text, encoding",
    [
        (TEXT, "utf-8"),
        (TEXT.replace("\n", "\r\n"), "utf-8"),
        (TEXT.replace("\n", "\r\n"), "utf-8-sig"),
        (TEXT.replace(",", ";"), "utf-8-sig"),
        (TEXT.replace(",", "\t"), "utf-8"),
        (TEXT.replace(",", " , "), "utf-8"),
        (TEXT.replace(",", ", "), "utf-8"),
        (TEXT.replace("Partition_ID", "InstitutionName"), "utf-8"),
        (TEXT.lower(), "utf-8"),
        (TEXT.upper(), "utf-8"),
        ("Subject_ID,Notes,Partition_ID\n00012,,1\n00003,x,2\n00004,,10\n00005,,10", "utf-8"),
        ('"Partition_ID","Subject_ID"\n"1","00012"\n2,00003\n10,00004\n10,00005\n\n , \n', "utf-8"),
    ],
)
def test_every_way_it_is_saved(tmp_path, text, encoding):
    assert read(table(tmp_path, text, encoding)) == (ROWS, [])


def test_who_trains_stands_in_the_table(tmp_path):
    text = "Partition_ID,Subject_ID,TrainOrVal\nA,a,train\nA,b, Val\nA,c,TRAIN\n"
    assert read(table(tmp_path, text))[0] == [Row("a", "A", "train"), Row("b", "A", "val"), Row("c", "A", "train")]


def test_rows_without_an_institution_are_left_out(tmp_path):
    rows, notes = read(table(tmp_path, TEXT + "-1,FeTS2022_01741\n-1,FeTS2022_01742\n"))
    assert rows == ROWS and notes == ["2 row(s) with Partition_ID -1 (no institution) left out"]
    with pytest.raises(
        UserError, match=r"2 row\(s\), all with InstitutionName -1 \(no institution\); a row per subject"
    ):
        read(table(tmp_path, "InstitutionName,Subject_ID\n-1,a\n-1,b\n"))


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "columns none found"),
        ("Site,Subject_ID\n1,a\n", "columns Site, Subject_ID found"),
        ("Partition_ID,Subject\n1,a\n", "columns Partition_ID, Subject found"),
        ("Partition_ID|Subject_ID\n1|a\n", r"columns Partition_ID\|Subject_ID found"),
        ("Partition_ID,InstitutionName,Subject_ID\n1,1,a\n", "columns Partition_ID, InstitutionName, Subject_ID found"),
        ("Partition_ID,Subject_ID,Subject_ID\n1,a,a\n", "columns Partition_ID, Subject_ID, Subject_ID found"),
    ],
)
def test_a_wrong_header_names_the_columns_found(tmp_path, text, found):
    expected = r"one Partition_ID \(or InstitutionName\) and one Subject_ID expected"
    with pytest.raises(UserError, match=rf"partitioning.csv: {found}; {expected}") as error:
        read(table(tmp_path, text))
    assert "\n" not in str(error.value)


def test_what_is_no_table(tmp_path):
    with pytest.raises(UserError, match="no row; a row per subject"):
        read(table(tmp_path, "Partition_ID,Subject_ID\n"))
    with pytest.raises(UserError, match="not UTF-8 text"):
        read(table(tmp_path, TEXT, "utf-16"))
    with pytest.raises(UserError, match=r"none.csv: cannot be read \(No such file"):
        read(tmp_path / "none.csv")


def test_all_faults_at_once_with_their_lines(tmp_path):
    text = (
        "Partition_ID,Subject_ID,TrainOrVal\r\n1,a,train\r\n,b,train\r\n2,,val\r\n1,a,val\r\n2,c,\r\n\r\n2,d,test\r\n"
        "3,e\r\n-1,c,val\r\n3,f,g,h\r\n"
    )
    with pytest.raises(DataFaults) as error:
        read(table(tmp_path, text))
    assert list(error.value.faults) == [
        "line 3: no Partition_ID; fill the cell in",
        "line 4: no Subject_ID; fill the cell in",
        "line 5: a is already in line 2; delete one, a subject has one site",
        "line 6: no TrainOrVal; fill the cell in",
        "line 8: TrainOrVal 'test' found, train or val expected",
        "line 9: 2 cells, 3 in the header; one row per subject expected",
        "line 10: c is already in line 6; delete one, a subject has one site",
        "line 11: 4 cells, 3 in the header; one row per subject expected",
    ]
    assert "partitioning.csv: 8 fault(s)" in str(error.value)
    own, notes, faults = partition_table.scan(tmp_path / "partitioning.csv")
    assert [(row.subject, row.site) for row in own] == [("a", "1"), ("c", "2"), ("d", "2")]
    assert faults == list(error.value.faults) and notes == []


def rows(sizes, use=lambda site, i: ""):
    return [Row(f"{site}_{i:03d}", site, use(site, i)) for site, n in sizes.items() for i in range(n)]


def test_sites_in_order():
    assert partition_table.sites(rows({"10": 1, "9": 1, "1": 2})) == ["1", "9", "10"]
    assert partition_table.sites(rows({"b": 1, "10": 1, "9": 1})) == ["10", "9", "b"]
    assert partition_table.sizes(rows({"10": 3, "9": 1})) == {"9": 1, "10": 3}


@pytest.mark.parametrize(
    "n, share, train",
    # int(share * n), as the FeTS code has it: 4 -> 3/1 (the smallest institution), 511 -> 408/103 (the largest one)
    [(2, 0.8, 1), (4, 0.8, 3), (5, 0.8, 4), (6, 0.8, 4), (9, 0.8, 7), (511, 0.8, 408), (3, 0.5, 1), (10, 0.7, 7)],
)
def test_the_cut(n, share, train):
    parts, notes = split(rows({"1": n}), share)
    own = parts["1"]
    assert [len(side) for side in own] == [train, n - train] and notes == []
    assert sorted(own[0] + own[1]) == [f"1_{i:03d}" for i in range(n)]
    assert own[0] == sorted(own[0]) and own[1] == sorted(own[1])


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.text("abc123", min_size=1, max_size=3), st.integers(2, 12), min_size=2, max_size=5),
    st.integers(0, 2**31),
    st.randoms(use_true_random=False),
)
def test_a_draw_depends_on_the_seed_and_the_site_alone(sizes, seed, random):
    everyone = rows(sizes)
    parts, _ = split(everyone, seed=seed)
    assert list(parts) == partition_table.sites(everyone)
    random.shuffle(everyone)
    assert split(everyone, seed=seed)[0] == parts
    one = random.choice(list(sizes))
    assert split([row for row in everyone if row.site == one], seed=seed)[0] == {one: parts[one]}


def test_seeds_and_sites_differ():
    sizes = {"1": 40, "2": 40}
    draws = [{i[2:] for i in split(rows(sizes), seed=seed)[0][site][1]} for seed in (0, 1) for site in "12"]
    assert len({frozenset(d) for d in draws}) == 4
    # Everybody is drawn for validation at about 20%: 400 draws of 40 subjects, 8 of them each; sd of a share 0.02.
    counts = np.zeros(40)
    for seed in range(400):
        counts[[int(i[2:]) for i in split(rows({"1": 40}), seed=seed)[0]["1"][1]]] += 1
    assert abs(counts / 400 - 0.2).max() < 0.09


def test_the_word_of_the_table_wins():
    own = rows({"A": 5}, lambda site, i: "val" if i in (1, 4) else "train")
    assert split(own)[0] == {"A": (["A_000", "A_002", "A_003"], ["A_001", "A_004"])}
    assert split(own, seed=9, share=0.1)[0] == split(own)[0]


def test_sites_with_an_empty_side():
    own = rows({"1": 1, "2": 5, "3": 3}, lambda site, i: "" if site != "3" else "train")
    with pytest.raises(DataFaults) as error:
        split(own)
    assert list(error.value.faults) == [
        "site 1: 1 subject(s), at least 2 expected; add subjects, or let small sites be dropped",
        "site 3: 3 subject(s), 3 train and 0 val; write val for at least one in the table, or let small sites be"
        " dropped",
    ]
    with pytest.raises(DataFaults, match="0 train and 2 val; write train for at least one in the table"):
        split(rows({"4": 2}, lambda site, i: "val"))
    parts, notes = split(own, drop_small=True)
    assert list(parts) == ["2"] and notes == ["2 small site(s) dropped, with 4 subject(s): 1 (1), 3 (3)"]
    parts, notes = split(own, drop_small=True, min_site=5)
    assert list(parts) == ["2"]
    with pytest.raises(UserError, match="no site can be split, 3 found; site 1: 1 subject"):
        split(own, drop_small=True, min_site=6)
    with pytest.raises(DataFaults, match=r"site 2: 5 subject\(s\), at least 6 expected"):
        split(own, min_site=6)
    with pytest.raises(DataFaults, match=r"site 1: 1 subject\(s\), 0 train and 1 val"):  # what int(0.8 * 1) gives
        split(own, min_site=1)


@pytest.mark.parametrize(
    "options, text", [({"share": 0.0}, "train_share"), ({"share": 1.5}, "train_share"), ({"seed": -1}, "split_seed")]
)
def test_options_out_of_range(options, text):
    with pytest.raises(UserError, match=text):
        split(ROWS, **options)
