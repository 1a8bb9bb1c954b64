"""What a report says of guarantees, and of methods beside a paper: numbers, n/a where there is none."""

import csv
import math

import pytest
from privacy_runs import AUDIT, METRICS, card, carded, final, run, texts

from fedjax_seg.report import method_table, privacy_figures, privacy_report
from fedjax_seg.report.tables import cell_text


def test_a_local_attack_is_averaged_over_its_sites_models_before_seeds():
    finals = [final(0.6, "holdout_a"), final(0.8, "holdout_b"), final(0.5, "holdout_a", 1), final(0.7, "holdout_b", 1)]
    assert privacy_report.attack_values(run(finals=finals, protocol="local").summary) == pytest.approx([0.7, 0.6])
    assert len(privacy_report.attack_values(run(finals=finals).summary)) == 4
    assert privacy_report.attack_values(run().summary) == []


def test_the_method_table_holds_ours_and_the_papers():
    ours = run(finals=[final(0.62), final(0.66, seed=1)], published={"dice": 0.85, "attack_auc": 0.72})
    private = run("DP", 0.6, [final(0.5), final(0.5, seed=1)], epsilon=6.764, published={"dice": 0.79})
    table = method_table.method_table([ours, private])
    assert table.columns == (
        *(("ours", name) for name in ("dice", "cross_entropy", "attack_auc", "epsilon")),
        *(("paper", name) for name in ("dice", "attack_auc")),
    )
    text = [[cell_text(c, table) for c in row] for row in table.cells]
    std = 0.02 / math.sqrt(2)  # of two seeds that are 0.02 apart
    assert text[0] == [
        f"0.810 ± {std:.3f}",
        f"0.810 ± {std:.3f}",
        f"0.640 ± {0.04 / math.sqrt(2):.3f}",
        "∞",
        "0.85",
        "0.72",
    ]
    assert text[1][0].startswith("0.610") and text[1][2:] == ["0.500 ± 0.000", "6.76", "0.79", "-"]


def test_the_table_is_of_the_external_site_and_of_all_local_models():
    place = {"split": "test", "round": 3, "n": 9, "seed": 0}
    results = [
        {**place, "fold": f"holdout_{site}", "site": where, "metric": m, "value": v}
        for site, v in (("a", 0.2), ("b", 0.6))
        for where in (site, "test")
        for m in METRICS
    ]
    table = method_table.method_table([run(protocol="local", results=results)])
    assert table.cells[0][0].mean == pytest.approx(0.4) and table.cells[0][0].n == 1


@pytest.mark.parametrize(
    "runs, names, words, silent",
    [
        ([run(published={"dice": 0.8}), run()], ["dice", "cross_entropy", "dice"], (), ("shadow", "epsilon")),
        ([run(finals=[final(0.6)]), run()], ["dice", "cross_entropy", "attack_auc"], ("shadow",), ("epsilon",)),
        ([run(epsilon=3.0), run()], ["dice", "cross_entropy", "epsilon"], ("epsilon",), ("shadow",)),
        (
            [run(published={"attack_auc": 0.7})],
            ["dice", "cross_entropy", "attack_auc", "attack_auc"],  # beside a paper's number n/a tells something
            ("shadow",),
            ("epsilon",),
        ),
    ],
    ids=["plain", "attacked", "private", "paper"],
)
def test_columns_that_no_run_has_are_left_out(runs, names, words, silent):
    table = method_table.method_table(runs)
    assert [name for _, name in table.columns] == names
    assert all(len(row) == len(names) == len(table.directions) for row in table.cells)
    assert all(word in table.caption for word in words) and not any(word in table.caption for word in silent)


def test_a_second_metric_that_no_run_has_is_left_out():
    place = {"fold": "f", "split": "test", "round": 3, "n": 9, "seed": 0, "site": "test"}
    results = [{**place, "metric": "dice", "value": 0.5}, {**place, "metric": "cross_entropy", "value": math.nan}]
    table = method_table.method_table([run(results=results, epsilon=1.0)])
    assert [name for _, name in table.columns] == ["dice", "epsilon"] and table.caption.startswith("dice: ")


def test_no_attack_no_guarantee_no_paper_no_table():
    assert not method_table.applies([run(), run()])
    assert method_table.applies([run(), run(published={"dice": 0.8})])


def test_a_guarantee_has_a_row_per_client(tmp_path):
    (section,) = privacy_report.sections(run(epsilon=6.764), tmp_path)
    assert section.title == "Privacy guarantee" and section.tables[0].labels == ("a",)
    assert section.tables[0].cells[0][0].text == "6.764"


def test_the_trade_off_has_a_point_per_attacked_method(tmp_path):
    runs = [run(finals=[final(0.6)]), run("DP", 0.5, [final(0.5)]), run("none")]
    points = method_table.points(runs)
    assert points.keys() == {"FedAvg", "DP"} and points["DP"][0] == 0.5 and math.isnan(points["DP"][1])
    path = privacy_figures.privacy_utility(points, tmp_path)
    assert path.exists() and len(path.with_suffix(".csv").read_text().splitlines()) == 3


def test_a_card_becomes_one_section_of_parts(tmp_path):
    section, parts, words = carded(tmp_path, audit=AUDIT)
    assert section.text.startswith("**Differential privacy of every client: epsilon 4 at delta 1e-05.**")
    assert "- WARNING: delta is large" in section.text
    assert list(parts) == ["Threat model", "Mechanisms", "Ledger", "Audit", "Secure sum", "Utility beside epsilon"]
    assert parts["Threat model"].text.splitlines()[3:] == ["- Released: models; scores", "- Not protected: losses"]
    assert "clips the update. Proof: a ball. Sampling as executed: full." in parts["Mechanisms"].text
    assert texts(parts["Mechanisms"].tables[0]) == [
        ["client", "zero-out", "0.5", "4.84", "2.42", "20", "19 to 20", "yes"],
    ]
    assert [t.corner for t in parts["Ledger"].tables] == ["Releases", "Event"]
    assert "μ = 0.925" in words and "- other runs" in words and "none: the server sees" in words
    assert texts(parts["Utility beside epsilon"].tables[0]) == [[f"0.650 ± {0.1 / math.sqrt(2):.3f}", "4"]]
    assert "n / (z √d) = 0.05" in words and "unit=patient" in words  # what to do instead


def test_the_ledgers_figure_has_both_curves(tmp_path):
    grown = [{"round": t, "epsilon": 4.0 * math.sqrt(t / 20)} for t in range(1, 21)]
    curve = [{"delta": 10.0**-k, "epsilon": 0.8 * k} for k in range(2, 8)]
    ((path, _),) = carded(tmp_path, ledger__per_round=grown, ledger__curve=curve)[1]["Ledger"].figures
    with open(path.with_suffix(".csv"), newline="") as file:
        read = list(csv.DictReader(file))
    assert [r["x_is"] for r in read] == ["round"] * 20 + ["delta"] * 6
    assert float(read[19]["epsilon"]) == 4.0 and float(read[20]["x"]) == 1e-7
    assert not carded(tmp_path, ledger__per_round=[{"round": 1, "epsilon": None}])[1]["Ledger"].figures


@pytest.mark.parametrize(
    "sentence, start",
    [
        (
            "No differential-privacy guarantee (epsilon is infinite): no noise.",
            "**No differential-privacy guarantee (e",
        ),
        ("Noise depends on the data.", "**No differential-privacy guarantee (epsilon is infinite). Noise depends"),
        ("", "**No differential-privacy guarantee (epsilon is infinite).**"),
    ],
)
def test_no_guarantee_is_said_first_and_in_words(tmp_path, sentence, start):
    section, parts, _ = carded(tmp_path, epsilon=None, sentence=sentence, mechanisms=[], warnings=[])
    assert section.text.startswith(start)
    assert list(parts) == ["Threat model", "Secure sum"]  # short: there is nothing to account


def test_a_mechanism_without_a_guarantee_has_its_reasons_and_an_infinite_epsilon(tmp_path):
    literal = card()["mechanisms"][0] | {
        "formal": False,
        "sensitivity": None,
        "stddev": None,
        "reasons": ["scale is data"],
    }
    rows = [{"client": "all rounds", "epsilon": None, "status": "claimed, not proven"}]
    _, parts, words = carded(tmp_path, epsilon=None, mechanisms=[literal], ledger__rows=rows)
    assert "- NO guarantee from dp_fedavg: scale is data" in words and "Proof: a ball" not in words
    assert texts(parts["Mechanisms"].tables[0])[0][2:5] == ["-", "4.84", "-"]
    assert texts(parts["Ledger"].tables[0]) == [["∞", "claimed, not proven"]]
    assert texts(parts["Utility beside epsilon"].tables[0])[0][1] == "∞"


def test_what_an_audit_refutes_is_an_alarm_at_the_top(tmp_path):
    section, parts, _ = carded(tmp_path, audit=AUDIT)
    assert "**ALARM: literal: epsilon is at least 6.25.**" in section.text
    assert "**ALARM: mutant: a sensitivity of 7.9 was found and the bound says 2, which is wrong.**" in section.text
    assert section.text.count("ALARM") == 2
    found, canaries = parts["Audit"].tables
    assert [row[-1] for row in texts(found)] == ["holds", "ABOVE ITS BOUND"]
    assert [(row[2], row[-1]) for row in texts(canaries)] == [("1", "ABOVE THE CLAIM"), ("∞", "below the claim")]
    assert [p.name for p, _ in parts["Audit"].figures] == ["privacy_audit.png"]


def test_a_site_that_came_more_often_than_accounted_is_an_alarm(tmp_path):
    often = card()["mechanisms"][0] | {"realised": {"a": 21, "b": 20}}
    assert "ALARM: dp_fedavg: a took part in more than the 20 rounds" in carded(tmp_path, mechanisms=[often])[0].text
