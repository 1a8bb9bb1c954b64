"""Names of labels that were probably meant to be one."""

import pytest

from fedjax_seg.data.image_labels import twins
from fedjax_seg.data.image_table import Row


def rows(labels):
    """{site: labels}"""
    return [Row(0, "x", "", label, "p", "", None, {"site": s}) for s, own in labels.items() for label in own]


@pytest.mark.parametrize(
    "labels, fault",
    [
        ({"A": ["tumor", "benign"], "B": ["Tumor", "benign"]}, "in case or separators only"),
        ({"A": ["lung_aca", "lung aca"]}, "in case or separators only"),
        ({"A": ["tumour"], "B": ["tumour"], "C": ["tumuor"]}, "by one letter, and no site has both"),
        ({"A": ["tumour"], "B": ["tumor"]}, "by one letter, and no site has both"),
        ({"A": ["tumour", "tumor"], "B": ["tumour"]}, ""),  # one site has both: two labels
        ({"A": ["grade1"], "B": ["grade2"]}, ""),
        ({"A": ["MSS"], "B": ["MSI"]}, ""),
        ({"A": ["benign"], "B": ["malignant"]}, ""),
        ({"A": ["aca", "scc"], "B": ["aca"]}, ""),
    ],
)
def test_twins(labels, fault):
    found = twins(rows(labels), "site", ())
    assert [fault in text for text in found] == ([True] if fault else [])
    assert not twins(rows(labels), "site", sorted({label for own in labels.values() for label in own}))


def test_a_fault_names_the_places():
    (text,) = twins(rows({"A": ["tumor"] * 3, "C": ["tumor"], "B": ["Tumor"]}), "site", ())
    assert text == (
        "labels 'Tumor' (1 images at B) and 'tumor' (4 images at A, C) differ in case or separators only;"
        " rename one, or name both in data.classes"
    )


def test_without_sites_letters_are_not_compared():
    assert not twins(rows({"A": ["tumour"], "B": ["tumor"]}), "", ())
    assert len(twins(rows({"A": ["tumor"], "B": ["Tumor"]}), "", ())) == 1
