"""Which value is which tumour: the scheme that data allow, one clear line where they do not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_folder import VolumeFolder, msd_folder

from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data import label_schemes, nifti, volume_tree
from fedjax_seg.data.label_schemes import SCHEMES, find, plain, to_classes, to_values


@pytest.mark.parametrize(
    "found, name",
    [
        ({"a": {0, 1, 2, 4}, "b": {0, 1, 2}}, "brats2021"),  # b has no enhancing tumour
        ({"a": {0, 4}}, "brats2021"),
        ({"a": {0, 1, 2, 3}, "b": {0, 1, 2}, "c": {0}}, "brats2023"),
    ],
)
def test_the_scheme_that_the_data_tell(found, name):
    assert find(found) == SCHEMES[name]
    assert find({k: np.array(sorted(v)) for k, v in found.items()}, name).name == name


def test_a_stray_3_does_not_change_what_all_values_mean():
    found = {f"FeTS2022_{n:05d}": {0, 1, 2, 4} for n in range(6)}
    found["FeTS2022_00002"] = {0, 1, 2, 3, 4}
    with pytest.raises(UserError) as error:
        find(found)
    assert str(error.value) == (
        "data.label_scheme: 3 and 4 together in 1 of 6 files (FeTS2022_00002): mend them, or set"
        " data.label_scheme=brats2024_post"
    )
    assert find(found, "brats2024_post").name == "brats2024_post"
    with pytest.raises(UserError, match=r"3 and 4 together in 5 of 5 files \(a, b, c, d, ...\)"):
        find({name: {0, 3, 4} for name in "abcde"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=5))
def test_auto_finds_a_scheme_only_where_the_other_one_is_impossible(values):
    found = {str(n): own for n, own in enumerate(values)}
    everything = set().union(*values)
    if (3 in everything) != (4 in everything):
        assert find(found).name == ("brats2021" if 4 in everything else "brats2023")
    else:
        with pytest.raises(UserError):
            find(found)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scheme_asked_for(name):
    values = SCHEMES[name].values
    assert find({"a": values, "b": {0}}, name) == SCHEMES[name]
    assert find({"a": values}, name, layout="msd") == SCHEMES[name]


def test_nothing_tells_the_scheme():
    with pytest.raises(UserError) as error:
        find({"a": {0, 1, 2}, "b": {0}})
    assert str(error.value) == (
        "data.label_scheme: only the values 0, 1, 2 found, neither 3 nor 4: 'auto' cannot tell how enhancing tumour is"
        " written; set one of brats2021, brats2023, brats2024_post, msd_brats, or plain where these are no BraTS labels"
    )


@pytest.mark.parametrize("values", [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 4}])
def test_an_msd_folder_must_say_what_its_values_mean(values):
    with pytest.raises(
        UserError, match=r"'auto' cannot tell .* set msd_brats .*1 = oedema.* brats2023 .* plain"
    ) as error:
        find({"a": values}, layout="msd")
    assert "\n" not in str(error.value)


def test_two_schemes_in_one_federation():
    found = {"s1": {0, 1, 2, 4}, "s2": {0, 1, 2}, "s3": {0, 3}, "s4": {0, 1, 2, 3}, "s5": {0, 4}}
    with pytest.raises(UserError) as error:
        find(found, site_of={"s1": "7", "s2": "7", "s3": "12", "s4": "12", "s5": "9"})
    assert str(error.value) == (
        "data.label_scheme: two schemes in one data set: value 3 without 4 (brats2023) in site(s) 12 (2 file(s): s3,"
        " s4); value 4 without 3 (brats2021) in site(s) 7, 9 (2 file(s): s1, s5); rewrite one side, or set"
        " brats2024_post if 4 is the resection cavity"
    )
    with pytest.raises(UserError, match=r"in 2 file\(s\) \(s3, s4\); .* in 2 file\(s\) \(s1, s5\);"):
        find(found)
    assert find(found, "brats2024_post").name == "brats2024_post"  # said by the user: then they fit


@pytest.mark.parametrize(
    "found, asked, faults",
    [
        (
            {"a": {0, 1, 2, 4}, "b": {0, 1}},
            "brats2023",
            [
                "a: label values 0, 1, 2, 4 found, 0, 1, 2, 3 allowed (brats2023); all files fit brats2021,"
                " brats2024_post"
            ],
        ),
        (
            {"a": {0, 2, 3, 4, 5}, "b": {0, 100, 200}, "c": {0, 1}},
            "brats2021",
            [
                "a: label values 0, 2, 3, 4, 5 found, 0, 1, 2, 4 allowed (brats2021)",
                "b: label values 0, 100, 200 found, 0, 1, 2, 4 allowed (brats2021)",
            ],
        ),
        ({"a": {0, 9}}, "auto", ["a: label values 0, 9 found, 0, 1, 2, 3, 4 allowed (auto)"]),
        ({"a": {0, -1}}, "auto", ["a: label values -1, 0 found, 0, 1, 2, 3, 4 allowed (auto)"]),
        (
            {"a": {0, 1, 9}, "b": {0, 1, 3}, "c": {0, 1}},
            "auto",
            ["a: label values 0, 1, 9 found, 0, 1, 2, 3 allowed (brats2023); the other 2 file(s) fit it"],
        ),
        (
            {"a": {0, 9}, "b": {0, 3, 4}},
            "auto",
            [
                "a: label values 0, 9 found, 0, 1, 2, 3, 4 allowed (auto); beside that, data.label_scheme: 3 and 4"
                " together in 1 of 1 files (b): mend them, or set data.label_scheme=brats2024_post"
            ],
        ),
        ({"a": {0, 205, 420, 850}}, "plain", ["a: label values 0, 205, 420, 850 found, 0 to 255 allowed (plain)"]),
        (
            {"a": range(300)},
            "msd_brats",
            ["a: label values 0, 1, 2, 3, 4, 5, 6, 7, ... (300 values) found, 0, 1, 2, 3 allowed (msd_brats)"],
        ),
    ],
)
def test_values_that_a_scheme_does_not_have(found, asked, faults):
    with pytest.raises(DataFaults) as error:
        find(found, asked)
    assert list(error.value.faults) == faults
    assert str(error.value).startswith("data.label_scheme=")


def test_an_unknown_scheme():
    with pytest.raises(UserError, match=r"data.label_scheme: 'brats' given, one of 'auto', 'brats2021', .* expected"):
        find({"a": {0, 1}}, "brats")


def test_plain_classes():
    scheme = plain([2, 1, 5])
    assert scheme == ("plain", (0, 1, 2, 5), ("background", "1", "2", "5"), ())
    assert find({"a": {0, 2}, "b": {1, 5}}, "plain") == scheme
    assert find({"a": {0, 1, 2}}, "plain", layout="msd").classes == ("background", "1", "2")
    for values, text in (
        ((-1, 1), "0 to 255 allowed"),
        ((256,), "0 to 255 allowed"),
        ((0,), "no label but 0"),
        ((), "no label"),
    ):
        with pytest.raises(UserError, match=text):
            plain(values)


def test_the_meaning_of_the_tumour_schemes():
    """BraTS papers: ET is the enhancing class, TC = ET + NCR, WT = TC + ED; the cavity is none of them."""
    enhancing = {"brats2021": 4, "brats2023": 3, "brats2024_post": 3, "msd_brats": 3}
    oedema = {"brats2021": 2, "brats2023": 2, "brats2024_post": 2, "msd_brats": 1}
    for name, scheme in SCHEMES.items():
        assert scheme.name == name and scheme.classes[:4] == ("background", "NCR", "ED", "ET")
        assert len(scheme.classes) == len(scheme.values) == len(set(scheme.values)) and scheme.values[0] == 0
        assert scheme.values[3] == enhancing[name] and scheme.values[2] == oedema[name]
        regions = {r: {scheme.classes[c] for c in ids} for r, ids in scheme.regions}
        assert {r: regions[r] for r in ("ET", "TC", "WT")} == {
            "ET": {"ET"}, "TC": {"NCR", "ET"}, "WT": {"NCR", "ED", "ET"}
        }  # fmt: skip
    assert dict(SCHEMES["brats2024_post"].regions)["RC"] == (4,)
    assert label_schemes.NAMES == ("auto", "brats2021", "brats2023", "brats2024_post", "msd_brats", "plain")


def test_classes_by_hand():
    labels = np.array([[0, 1], [2, 4]], np.int32)
    assert to_classes(labels, SCHEMES["brats2021"]).tolist() == [[0, 1], [2, 3]]
    assert to_classes(np.array([0, 1, 2, 3]), SCHEMES["msd_brats"]).tolist() == [0, 2, 1, 3]
    assert to_values(np.array([0, 1, 2, 3], np.uint8), SCHEMES["msd_brats"]).tolist() == [0, 2, 1, 3]
    assert to_values(np.array([3, 0]), SCHEMES["brats2021"]).tolist() == [4, 0]
    for wrong in ([3], [5], [-1], [-2], [70000]):
        with pytest.raises(UserError, match=rf"label values {wrong[0]} found, 0, 1, 2, 4 allowed"):
            to_classes(np.array(wrong, np.int32), SCHEMES["brats2021"])


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 255), min_size=1), st.integers(0, 2**32 - 1))
def test_there_and_back(values, seed):
    scheme = plain(values | {7})
    labels = np.random.default_rng(seed).choice(scheme.values, (3, 4, 5)).astype(np.int32)
    classes = to_classes(labels, scheme)
    assert classes.dtype == np.uint8 and classes.max(initial=0) < len(scheme.classes)
    back = to_values(classes, scheme)
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, labels)


def test_the_same_tumour_written_in_two_schemes(tmp_path):
    """Files on disk: the enhancing part that is 4 in one and 3 in the other, oedema 2 and 1."""
    names = ("brats2021", "brats2023", "msd_brats")
    for name in names:
        VolumeFolder(tmp_path).subject(name, scheme=name)
    maps = {s.id: nifti.read_labels(s.label)[0].data for s in volume_tree.fets_tree(tmp_path).subjects}
    one, two, three = (to_classes(maps[name], SCHEMES[name]) for name in names)
    assert set(np.unique(one)) == {0, 1, 2, 3} and not np.array_equal(maps["brats2023"], maps["msd_brats"])
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, three)
    np.testing.assert_array_equal(one == 3, maps["brats2021"] == 4)
    assert {find({n: np.unique(maps[n])}).name for n in names[:2]} == {"brats2021", "brats2023"}


def test_a_hippocampus_like_folder(tmp_path):
    msd_folder(tmp_path, subjects=2)
    subjects = volume_tree.msd_tree(tmp_path).subjects
    found = {s.id: np.unique(nifti.read_labels(s.label)[0].data) for s in subjects}
    assert find(found, "plain", layout="msd").values == (0, 1, 2)
