import csv
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread
from synthetic_run import result

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import canvas, figures


def numbers(path):
    with open(path.with_suffix(".csv"), newline="") as file:
        return list(csv.DictReader(file))


def is_drawn(path, least_width=400):
    """A PNG of some width with several colours; every third pixel is enough to see them."""
    image = np.round(imread(path)[::3, ::3, :3] * 255).astype(int)
    return path.suffix == ".png" and 3 * image.shape[1] >= least_width and len(np.unique(image @ [65536, 256, 1])) > 10


def test_convergence_draws_the_mean_and_std_over_folds_and_seeds(tmp_path):
    values = {("fold0", 0): (0.5, 0.7), ("fold0", 1): (0.6, 0.8), ("fold1", 0): (0.7, 0.6)}
    rows = [result(f, s, site, "accuracy", v, round=t)
            for t in (1, 2) for (f, s), pair in values.items() for site, v in zip(("A", "B"), pair)]  # fmt: skip
    path = figures.convergence({"FedAvg": rows}, "accuracy", tmp_path)
    assert is_drawn(path)
    by_panel = {row["panel"]: row for row in numbers(path) if row["round"] == "2"}
    assert list(by_panel) == ["Mean over 2 sites", "A", "B"]
    # by hand: A is .5 .6 .7; the means over sites are .6 .7 .65
    assert float(by_panel["A"]["mean"]) == pytest.approx(0.6) and float(by_panel["A"]["std"]) == pytest.approx(0.1)
    assert float(by_panel["Mean over 2 sites"]["std"]) == pytest.approx(0.05) and by_panel["A"]["n"] == "3"


def test_every_figure_is_drawn_with_its_numbers(tmp_path, noisy_rows):
    rows = noisy_rows(rounds=4)
    last = [r for r in rows if r["round"] == 4 and r["split"] == "test"]
    boxes = figures.site_boxes({"FedAvg": last, "Median": last}, "accuracy", tmp_path)
    assert is_drawn(boxes) and len(numbers(boxes)) == 2 * 4 * 6
    matrix = [[np.nan, 0.606], [0.663, np.nan]]
    cross = figures.cross_site_matrix(matrix, ("NYU", "UM"), tmp_path)
    assert is_drawn(cross)
    assert [tuple(row.values()) for row in numbers(cross)] == [
        ("NYU", "NYU", ""),
        ("NYU", "UM", "0.606"),
        ("UM", "NYU", "0.663"),
        ("UM", "UM", ""),
    ]
    sweep = figures.sweep_map([1, 2], [0.5, 1, 100], np.arange(6).reshape(2, 3) / 10, tmp_path)
    assert is_drawn(sweep) and numbers(sweep)[5] == {"c": "2", "gamma": "100", "accuracy": "0.5"}
    curve = figures.sweep_curve([1, 2], {"gamma=1": [0.6, 0.7]}, tmp_path, spreads={"gamma=1": [0.1, 0.2]})
    assert is_drawn(curve) and numbers(curve)[1] == {"line": "gamma=1", "c": "2", "accuracy": "0.7", "std": "0.2"}
    assert is_drawn(figures.update_norms(rows, tmp_path))


def test_update_norms_are_per_site_and_round(tmp_path):
    rows = [result("fold0", s, "A", "update_norm", v, split="train", round=1) for s, v in ((0, 1.0), (1, 3.0))]
    rows += [result("fold0", 0, "B", "update_norm", 100.0, split="train", round=1)]
    found = {row["site"]: row for row in numbers(figures.update_norms(rows, tmp_path))}
    assert (found["A"]["mean"], found["A"]["n"], found["B"]["std"]) == ("2.0", "2", "")
    assert float(found["A"]["std"]) == pytest.approx(2**0.5)


def test_participation_is_the_share_of_replicas(tmp_path):
    # A trains in rounds 1 and 3 of both seeds, B in round 1 of one of them, C never
    rows = [result("fold0", s, "A", "update_norm", 1.0, split="train", round=t) for s in (0, 1) for t in (1, 3)]
    rows += [result("fold0", 1, "B", "update_norm", None, split="train", round=1)]
    path = figures.participation(rows, tmp_path, sites=("A", "B", "C"))
    shares = {}
    for row in numbers(path):
        shares.setdefault(row["site"], []).append(float(row["share"]))
    assert shares == {"A": [1, 0, 1], "B": [0.5, 0, 0], "C": [0, 0, 0]}
    assert is_drawn(path)


@pytest.mark.parametrize(
    "name, most, text",
    [
        ("A", 18, "A"),
        ("exactly eighteen l", 18, "exactly eighteen l"),
        ("exactly nineteen le", 18, "exactly n…eteen le"),
        ("Hospital Valencia Nord", 9, "Hosp…Nord"),
        ("Hospital Valencia Nord", 10, "Hospi…Nord"),
    ],
    ids=str,
)
def test_long_names_keep_both_ends(name, most, text):
    assert canvas.short(name, most) == text and len(text) <= most


def test_long_names_of_sites_do_not_overlap(tmp_path, monkeypatch):
    found = []

    def save(chart, *rest):
        chart.canvas.draw()
        found.append(chart.axes[0].get_xticklabels())
        return original(chart, *rest)

    original = canvas.save
    monkeypatch.setattr(canvas, "save", save)
    long = [f"University Hospital of the City Number {i}" for i in range(6)]
    for sites in (long, ["A", "B"]):
        figures.site_boxes({"m": [result("f", 0, s, "accuracy", 0.5) for s in sites]}, "accuracy", tmp_path)
    turned, flat = found
    assert {t.get_rotation() for t in turned} == {35.0} and {t.get_rotation() for t in flat} == {0.0}
    assert len({t.get_text() for t in turned}) == 6 and max(len(t.get_text()) for t in turned) <= 24


def test_nothing_to_draw_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="no row with metric 'auc' in split 'test'"):
        figures.convergence({"FedAvg": [result("fold0", 0, "A", "accuracy", 0.5)]}, "auc", tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_nan_values_are_drawn_as_gaps(tmp_path):
    rows = [result("fold0", 0, "A", "auc", float("nan"), round=t) for t in (1, 2)]
    assert numbers(figures.convergence({"FedAvg": rows}, "auc", tmp_path))[0]["mean"] == ""
    assert numbers(figures.site_boxes({"FedAvg": rows[-1:]}, "auc", tmp_path)) == []


def test_same_numbers_give_the_same_bytes(tmp_path, noisy_rows):
    rows = noisy_rows(rounds=2)
    pair = [figures.update_norms(rows, tmp_path, name).read_bytes() for name in ("a", "b")]
    assert pair[0] == pair[1]


def test_no_global_state_of_matplotlib_is_touched():
    code = "import sys, fedjax_seg.report.figures; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
