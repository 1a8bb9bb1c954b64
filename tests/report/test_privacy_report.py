"""What a report says of attacks and guarantees: numbers, n/a where there is none, inverted attacks in words."""

import csv
import math

import pytest

from fedjax_seg.report import method_table, privacy_figures, privacy_report
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import cell_text

METRICS = {"dice": ["max", "overlap"], "cross_entropy": ["min", "loss"]}


def final(auc, fold="holdout", seed=0, attack="shadow", **other):
    row = {"fold": fold, "seed": seed, "attack": attack, "auc": auc, "auc_low": auc - 0.1, "auc_high": auc + 0.1}
    row |= {"advantage": abs(auc - 0.5), "inverted": auc < 0.4, "words": f"found {auc}", "members": 50}
    return row | {"non_members": 50, "tpr_at_1_percent_fpr": None, "tpr_at_0.1_percent_fpr": None} | other


def run(label="FedAvg", dice=0.8, finals=(), epsilon=None, published=None, protocol="federated", results=None):
    place = {"fold": "holdout", "split": "test", "round": 3, "n": 9}
    sites = {"a": dice - 0.3, "b": dice - 0.2, "test": dice}
    results = results or [
        {**place, "seed": seed, "site": site, "metric": m, "value": v + seed * 0.02}
        for seed in (0, 1)
        for site, v in sites.items()
        for m in METRICS
    ]
    curve = [{"round": t, "attack": r["attack"], "auc": r["auc"], "n": 100} for r in finals for t in (0, 3)]
    roc = {"shadow": {"fpr": [0, 0.5, 1], "tpr": [0, 0.7, 1]}}
    attack = {"final": list(finals), "curve": curve, "roc": roc, "unit": "case", "text": "An attack."}
    summary = {
        "label": label,
        "round": 3,
        "protocol": protocol,
        "sites": list(sites),
        "external": ["test"],
        "metrics": METRICS,
        "headline": list(METRICS),
        "results": results,
        "attack": attack if finals else {},
        "privacy": {"epsilon": epsilon, "text": "DP-SGD.", "rows": [{"client": "a", "epsilon_pld": epsilon}]}
        if epsilon
        else {},
        "config": {f"published.{k}": v for k, v in (published or {}).items()},
    }
    return Run("", label, "", summary, [], {})


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


def test_an_inverted_attack_is_told_in_words_and_missing_rates_are_not_zero(tmp_path):
    made = privacy_report.sections(run(finals=[final(0.25), final(0.6, attack="loss")]), tmp_path)
    (section,) = made
    assert section.title == "Membership inference"
    assert "INVERTED ATTACK (shadow classifier, fold holdout, seed 0): found 0.25" in section.text
    assert section.text.count("INVERTED") == 1
    texts = [c.text for c in section.tables[0].cells[0]]
    assert texts == ["0.250", "0.150", "0.350", "0.250", "n/a", "n/a", "50", "50"]
    assert [p.name for p, _ in section.figures] == ["roc.png", "attack_auc.png"] and all(
        p.exists() for p, _ in section.figures
    )


def test_a_guarantee_has_a_row_per_client(tmp_path):
    (section,) = privacy_report.sections(run(epsilon=6.764), tmp_path)
    assert section.title == "Privacy guarantee" and section.tables[0].labels == ("a",)
    assert section.tables[0].cells[0][0].text == "6.764"


def test_the_curve_is_a_mean_over_replicas(tmp_path):
    rows = [final(0.6), final(0.8, seed=1)]
    privacy_report.sections(run(finals=rows), tmp_path)
    with open(tmp_path / "attack_auc.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [(r["round"], float(r["mean"]), r["replicas"]) for r in read] == [
        ("0", pytest.approx(0.7), "2"),
        ("3", pytest.approx(0.7), "2"),
    ]
    assert float(read[0]["std"]) == pytest.approx(0.2 / math.sqrt(2))


def test_the_trade_off_has_a_point_per_attacked_method(tmp_path):
    runs = [run(finals=[final(0.6)]), run("DP", 0.5, [final(0.5)]), run("none")]
    points = method_table.points(runs)
    assert points.keys() == {"FedAvg", "DP"} and points["DP"][0] == 0.5 and math.isnan(points["DP"][1])
    path = privacy_figures.privacy_utility(points, tmp_path)
    assert path.exists() and len(path.with_suffix(".csv").read_text().splitlines()) == 3
