"""Utility against epsilon of many runs: what the tables and the figure hold, and the feasibility law in words."""

import csv
import math

import pytest

from fedjax_seg.report import sweep_report, trade_off
from fedjax_seg.report.html import Section
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import cell_text

METRICS = {"accuracy": ["max", "share of right cases"]}


def run(label, group="n = 6", values=(0.6, 0.7), epsilon=None, snr=None, unit="client", **summary):
    """A finished run of two sites; `values`: one per seed."""
    place = {"fold": "f", "split": "test", "round": 2, "n": 9, "metric": "accuracy"}
    results = [
        {**place, "seed": seed, "site": site, "value": v} for seed, v in enumerate(values) for site in ("a", "b")
    ]
    private = epsilon is not None or snr is not None
    card = {
        "epsilon": epsilon,
        "delta": 1e-5,
        "unit": unit if private else None,
        "adjacency": "zero-out",
        "mechanisms": [{"name": label}] if private else [],
        "utility": {"snr": snr, "rows": []},
    }
    found = {"label": label, "group": group, "round": 2, "protocol": "federated", "sites": ["a", "b"]}
    found |= {"external": [], "metrics": METRICS, "headline": ["accuracy"], "results": results, "config": {}}
    found |= {"privacy_card": card, "cohort": [], "privacy": {}, "attack": {}, "secrecy": {}} | summary
    return Run("", label, group, found, [], {})


def study():
    return [
        run("FedAvg", values=(0.9, 0.9)),
        run("DP-FedAvg, eps 4", values=(0.6, 0.7), epsilon=3.98, snr=0.16),
        run("DP-FedAvg, eps 1", values=(0.5, 0.5), epsilon=0.99, snr=0.05),
        run("patients, eps 4", values=(0.8, 0.8), epsilon=3.97, unit="patient"),
        run("literal", values=(0.4, 0.4), snr=None, epsilon=None, privacy_card={"epsilon": None, "mechanisms": [{}]}),
    ]


@pytest.mark.parametrize(
    "snr, unit, words, silent",
    [
        (None, "client", (), ("Signal",)),
        (math.inf, "client", (), ("Signal",)),
        (2.0, "client", ("n / (z √d) = 2.", "can say more"), ("instead", "dp_sgd")),
        (1.0, "client", ("= 1.",), ("instead",)),
        (0.05, "client", ("= 0.05", "20 times", "unit=patient", "d ≤ 0.003 times", "more clients"), ()),
        (0.5, "patient", ("= 0.5", "more patients"), ("dp_sgd",)),  # who has it already is not told to take it
    ],
)
def test_the_law_in_words(snr, unit, words, silent):
    text = trade_off.law(snr, unit)
    assert all(word in text for word in words) and not any(word in text for word in silent)


@pytest.mark.parametrize(
    "label, method",
    [
        ("DP-FedAvg, eps 4", "DP-FedAvg"),
        ("Ref-SimAgg, reference 0, eps 0.5", "Ref-SimAgg, reference 0"),
        ("x ε=2", "x"),
        ("step 4", "step 4"),
    ],
)
def test_a_method_is_its_label_without_the_budget(label, method):
    assert trade_off.point(run(label), "accuracy").method == method


def test_the_table_is_sorted_by_method_then_epsilon():
    table = trade_off.trade_off_table(study())
    assert table.labels == ("FedAvg", "DP-FedAvg", "DP-FedAvg", "patients", "literal")
    text = [[cell_text(c, table) for c in row] for row in table.cells]
    std = 0.1 / math.sqrt(2)  # of two seeds that are 0.1 apart
    assert text[0] == ["∞", "0.900 ± 0.000", "-", "-", "-"]
    assert text[1] == ["0.99", "0.500 ± 0.000", "-0.400", "0.05 !", "client, zero-out"]
    assert text[2] == ["3.98", f"0.650 ± {std:.3f}", "-0.250", "0.16 !", "client, zero-out"]
    assert text[3] == ["3.97", "0.800 ± 0.000", "-0.100", "-", "patient, zero-out"]
    assert text[4][0] == "∞" and text[4][4] == "-"  # a mechanism without a guarantee has no epsilon, and is no baseline


def test_runs_that_cannot_learn_are_named_with_what_to_do():
    text = trade_off.cannot_learn(study())
    assert "- DP-FedAvg, epsilon 0.99: n / (z √d) = 0.05" in text and "- DP-FedAvg, epsilon 3.98" in text
    assert "patients, epsilon" not in text and "unit=patient" in text and "fewer trainable parameters" in text
    assert trade_off.cannot_learn(study()[:1]) == ""


@pytest.mark.parametrize("chosen, there", [((0, 1, 2), True), ((0, 1), False), ((0, 4), False), ((1, 3), True)])
def test_it_applies_where_there_are_two_budgets(chosen, there):
    runs = study()
    assert trade_off.applies([runs[i] for i in chosen]) is there


def test_runs_of_older_versions_have_their_ledgers_epsilon():
    old = run("DP, eps 2", privacy={"epsilon": 1.5, "delta": 1e-5, "unit": "client"}, privacy_card=None)
    found = trade_off.point(old, "accuracy")
    assert (found.epsilon, found.private, found.unit) == (1.5, True, "client") and math.isnan(found.snr)
    assert not trade_off.point(run("x", privacy_card=None), "accuracy").private


def test_the_figure_has_a_panel_per_group_and_no_infinite_epsilon(tmp_path):
    more = [run("FedAvg", "n = 33"), run("DP-FedAvg, eps 4", "n = 33", epsilon=3.9), run("x", protocol="cross_site")]
    groups = trade_off.groups([*study(), *more])
    assert list(groups) == ["n = 6", "n = 33"] and len(groups["n = 33"]) == 2
    path = trade_off.figure(groups, tmp_path)
    assert path.stat().st_size > 5000
    with open(path.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["group"], r["method"], r["epsilon"], f"{float(r['accuracy']):g}") for r in rows] == [
        ("n = 6", "FedAvg", "", "0.9"),
        ("n = 6", "DP-FedAvg", "0.99", "0.5"),
        ("n = 6", "DP-FedAvg", "3.98", "0.65"),
        ("n = 6", "patients", "3.97", "0.8"),
        ("n = 33", "FedAvg", "", "0.65"),
        ("n = 33", "DP-FedAvg", "3.9", "0.65"),
    ]


def test_a_sweep_report_has_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_report, "_group", lambda folder, group, runs, reference: Section(group))
    path = sweep_report.write(tmp_path, study())
    text = path.with_suffix(".md").read_text()
    assert text.index("## Privacy against utility") < text.index("## n = 6")
    assert (tmp_path / "figures" / "trade_off.png").exists() and "0.05 !" in text and "feasibility law" in text
    assert (tmp_path / "tables" / "n_=_6_trade_off.csv").exists()
    text = sweep_report.write(tmp_path / "plain", study()[:2]).with_suffix(".md").read_text()
    assert "Privacy against utility" not in text
