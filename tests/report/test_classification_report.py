"""Tables of intervals by hand, and confusion matrices beside the numbers that they show."""

import csv

import numpy as np
import pytest
from matplotlib.image import imread

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import canvas, tables
from fedjax_seg.report.classification_tables import INTERVAL_KEYS, interval_csv, interval_table, interval_text
from fedjax_seg.report.confusion import SITES_SHOWN, confusion_figure

NAN = float("nan")
CLASSES = ("colon_aca", "colon_n", "lung_n")


def row(site, metric, value, low, high, *, n=40, patients=20, resamples=1000):
    return dict(zip(INTERVAL_KEYS, (site, metric, value, low, high, n, patients, resamples)))


ROWS = [
    row("A", "accuracy", 0.9123, 0.875, 0.9449),
    row("A", "auc", 1.0, 0.996, 1.0),
    row("B", "accuracy", 0.5, NAN, NAN, n=3, patients=1, resamples=0),
    row("B", "auc", NAN, NAN, NAN, n=3, patients=1, resamples=0),
    row("pooled", "accuracy", 0.04, 0.0, 0.125, n=43, patients=21),
    row("pooled", "auc", 0.75, 0.5, 0.9, n=43, patients=21, resamples=612),
    row("pooled", "cross_entropy", 1.2345, 0.98, 12.5, n=43, patients=21),
]


def test_cells_are_the_value_and_its_interval():
    table = interval_table(ROWS, ("accuracy", "auc", "cross_entropy"), external=("B",))
    texts = [[tables.cell_text(cell, table) for cell in line] for line in table.cells]
    assert table.labels == ("A", "B (external)", "pooled cases")
    assert [name for _, name in table.columns] == ["accuracy", "auc", "cross_entropy", "patients", "cases"]
    assert texts == [
        [".912 [.88-.94]", "1.000 [1.00-1.00]", "-", "20", "40"],
        [".500 [n/a]", "n/a", "-", "1", "3"],
        [".040 [.00-.12]", ".750 [.50-.90] (612 resamples)", "1.234 [.98-12.50]", "21", "43"],
    ]
    assert "1000 bootstrap resamples" in table.caption
    markdown, latex = tables.to_markdown(table), tables.to_latex(table)
    assert "| A | .912 [.88-.94] | 1.000 [1.00-1.00] | - | 20 | 40 |" in markdown and "**" not in markdown
    assert ".912 [.88-.94] & 1.000" in latex
    assert tables.to_csv(table).splitlines()[1].startswith("A,0.9123,1")  # the CSV has all digits


def test_without_groups_there_are_no_patients():
    table = interval_table(ROWS, ("accuracy",), alone=("tile", "slide"))
    assert [name for _, name in table.columns] == ["accuracy", "tiles"]
    assert [line[-1].text for line in table.cells] == ["40", "3", "43"]
    assert "patient" not in table.caption and "in which single tiles are drawn" in table.caption
    assert "TOO NARROW: nothing tells which tiles are of one slide" in table.caption
    assert "TOO NARROW" not in interval_table(ROWS, ("accuracy",)).caption


def test_the_csv_has_all_digits_and_empty_cells():
    read = list(csv.DictReader(interval_csv(ROWS).splitlines()))
    assert tuple(read[0]) == INTERVAL_KEYS and len(read) == len(ROWS)
    assert read[0]["low"] == "0.875" and read[2]["low"] == "" and read[5]["resamples"] == "612"


def test_two_rows_of_one_metric_are_refused():
    with pytest.raises(UserError, match="site 'A': two rows of 'accuracy' found"):
        interval_table([*ROWS, ROWS[0]], ("accuracy",))


@pytest.mark.parametrize(
    ("given", "text"), [((-0.0512, -0.1, 0.0), "-.051 [-.10-.00]"), ((10.04, 9.0, 10.5), "10.040 [9.00-10.50]")]
)
def test_numbers_lose_only_the_zero_before_the_point(given, text):
    assert interval_text(*given) == text


def matrices(sites, classes=3):
    """The more, the later."""
    counts = np.random.default_rng(0).integers(1, 9, (classes, classes))
    return {f"site {i}": counts + i for i in range(sites)}


def read(path):
    with open(path.with_suffix(".csv"), newline="") as file:
        return list(csv.DictReader(file))


def is_drawn(path):
    image = np.round(imread(path)[::3, ::3, :3] * 255).astype(int)
    return len(np.unique(image @ [65536, 256, 1])) > 10


@pytest.fixture
def texts(monkeypatch):
    """What stands in the axes of the figures that are saved, axis by axis: (title, texts of the cells)."""
    found = []

    def save(chart, folder, name, header, numbers):
        whole = [axis for axis in chart.get_axes() if axis.images]
        found.append((chart.get_suptitle(), {a.get_title(): [t.get_text() for t in a.texts] for a in whole}))
        return original(chart, folder, name, header, numbers)

    original = canvas.save
    monkeypatch.setattr(canvas, "save", save)
    monkeypatch.setattr(canvas, "DPI", 50)  # many panels
    return found


def test_the_large_panel_is_the_sum_and_every_cell_is_in_the_csv(tmp_path, texts):
    given = {"A": np.array([[8, 2, 0], [0, 0, 0], [1, 0, 3]]), "B": np.array([[0, 0, 0], [0, 5, 0], [0, 0, 1]])}
    path = confusion_figure(given, CLASSES, tmp_path)
    assert path.name == "confusion.png" and is_drawn(path)
    rows = read(path)
    assert len(rows) == 3 * 9 and rows[0] == {
        "site": "pooled", "truth": "colon_aca", "predicted": "colon_aca", "cases": "8", "share": "0.8"
    }  # fmt: skip
    empty = [r for r in rows if r["site"] == "A" and r["truth"] == "colon_n"]
    assert {r["cases"] for r in empty} == {"0"} and {r["share"] for r in empty} == {""}
    title, panels = texts[0]
    assert title == "Cases by true and predicted class"
    assert panels == {
        "All sites (20 cases)": [
            *("8\n80 %", "2\n20 %", "0\n0 %"),
            *("0\n0 %", "5\n100 %", "0\n0 %"),
            *("1\n20 %", "0\n0 %", "4\n80 %"),
        ],
        "A\n14 cases": ["8", "2", "1", "3"],
        "B\n6 cases": ["5", "1"],
    }


def test_a_pooled_matrix_is_taken_as_it_is_given(tmp_path, texts):
    pooled = np.diag([7, 8, 9])  # of more folds than the sites' matrices
    path = confusion_figure({"A": np.eye(3, dtype=int), "pooled": pooled}, CLASSES, tmp_path)
    assert [r["cases"] for r in read(path) if r["site"] == "pooled" and r["truth"] == r["predicted"]] == ["7", "8", "9"]
    assert list(texts[0][1]) == ["All sites (24 cases)"]  # one site needs no panel of its own


def test_the_largest_sites_are_drawn_and_the_title_says_so(tmp_path, texts):
    path = confusion_figure(matrices(15), CLASSES, tmp_path)
    title, panels = texts[0]
    assert title.endswith("the 12 largest of 15 sites") and len(panels) == 1 + SITES_SHOWN
    shown = [name.split("\n")[0] for name in panels if not name.startswith("All sites")]
    assert shown == [f"site {i}" for i in range(3, 15)]  # in the order of the sites
    assert len({r["site"] for r in read(path)}) == 16


def test_many_classes_have_colours_only(tmp_path, texts):
    path = confusion_figure(matrices(2, 30), [f"class {i}" for i in range(30)], tmp_path)
    assert is_drawn(path) and not any(texts[0][1].values())


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match="no confusion matrix given"):
        confusion_figure({}, CLASSES, tmp_path)
    with pytest.raises(ValueError, match="for 3 classes"):
        confusion_figure({"A": np.eye(2)}, CLASSES, tmp_path)
