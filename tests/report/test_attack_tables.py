"""What a report says of membership attacks: n/a where there is none, inverted ones in words, ceilings and canaries."""

import csv
import math

import numpy as np
import pytest
from privacy_runs import CEILING, carded, final, run, texts

from fedjax_seg.attacks import one_run
from fedjax_seg.report import attack_tables, method_table, privacy_report, sweep_report


def test_an_inverted_attack_is_told_in_words_and_missing_rates_are_not_zero(tmp_path):
    made = privacy_report.sections(run(finals=[final(0.25), final(0.6, attack="loss")]), tmp_path)
    (section,) = made
    assert section.title == "Membership inference"
    assert "INVERTED ATTACK (shadow classifier, fold holdout, seed 0): found 0.25" in section.text
    assert section.text.count("INVERTED") == 1
    texts = [c.text for c in section.tables[0].cells[0]]
    assert texts == ["0.250", "0.150", "0.350", "0.250", "n/a", "n/a", "n/a", "50", "50", "n/a"]
    assert [p.name for p, _ in section.figures] == ["roc.png", "attack_auc.png"] and all(
        p.exists() for p, _ in section.figures
    )


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


@pytest.mark.parametrize(
    "row, above, limit",
    [
        (final(0.72, attack="rmia"), False, "0.638"),  # the interval reaches below the ceiling
        (final(0.75, attack="rmia"), True, "0.638"),
        (final(0.75, attack="rmia", above_ceiling=False, auc_ceiling=0.7), False, "0.700"),  # the row knows better
        (final(0.60, attack="rmia", above_ceiling=True, above=["curve"]), True, "0.638"),
    ],
    ids=["chance", "above", "row says no", "row says yes"],
)
def test_an_attack_above_its_ceiling_is_flagged(row, above, limit):
    attack = {"final": [row], "ceiling": CEILING}
    cells = texts(attack_tables.attack_table(attack))[0]
    assert cells[-3:] == [limit, "0.030", "ABOVE ITS CEILING" if above else "-"]
    words = " ".join(attack_tables.attack_alarms(attack))
    assert words.startswith(f"ATTACK ABOVE ITS CEILING (RMIA, fold holdout, seed 0): AUC {row['auc']:.3f}") is above


def test_a_ceiling_is_drawn_and_its_alarm_is_at_the_top(tmp_path):
    roc = {"rmia": {"fpr": [0, 1], "tpr": [0, 1]}}
    section, parts, _ = carded(tmp_path, [final(0.8, attack="rmia")], {"ceiling": CEILING, "roc": roc, "curve": []})
    assert "- **ALARM: ATTACK ABOVE ITS CEILING (RMIA" in section.text
    assert "ATTACK ABOVE ITS CEILING" in parts["Membership inference"].text
    assert "ceiling of the guarantee,0.01,0.03" in (tmp_path / "roc.csv").read_text()


def test_attacks_have_names_and_other_readings_their_lines(tmp_path):
    kinds = {"lira_online": "LiRA, online", "update_cosine": "cosine with the update", "new_one": "new one"}
    source = {"accuracy": 0.4, "low": 0.3, "high": 0.5, "chance": 0.2, "confusion": [[1]], "words": "hospitals differ"}
    more = {
        "source": source,
        "one_run": {"epsilon_low": 0.3, "words": "epsilon is at least 0.30"},  # a row alone
        "roc": {},
        "curve": [],
    }
    _, parts, words = carded(tmp_path, [final(0.6, attack=kind) for kind in kinds], more)
    attacks, audit, sources = parts["Membership inference"].tables
    assert [label.removesuffix(", holdout, seed 0") for label in attacks.labels] == list(kinds.values())
    assert texts(sources) == [["0.4", "0.3", "0.5", "0.2"]]
    assert "Which hospital: hospitals differ." in words and "One-run audit" in words
    assert texts(audit) == [["-", "-", "0.3", "-", "-", "no claim", "epsilon is at least 0.30"]]
    assert "ceiling" not in attacks.caption.lower()


def test_the_cards_own_attack_rows_are_shown_where_the_summary_has_none(tmp_path):
    _, parts, _ = carded(tmp_path, attacks={"rows": [final(0.6)], "text": "Later."})
    part = parts["Membership inference"]
    assert (
        part.text == "Later." and part.tables[0].labels == ("shadow classifier, holdout, seed 0",) and not part.figures
    )


def test_canaries_have_a_row_per_attack_fold_and_seed_and_refute_a_claim_below_them(tmp_path):
    """A list of what attacks.one_run makes, with what the verdict adds."""
    inside, outside = np.arange(40) + 100.0, np.arange(40) - 100.0
    tag = {"fold": "f0", "seed": 3}
    low = one_run.one_run(inside, outside, delta=1e-6)
    rows = [
        {**tag, "attack": "loss", **low, "epsilon_claimed": 0.5},
        {**tag, "attack": "rmia", **low, "epsilon_claimed": None},
        {**tag, "attack": "loss", **one_run.one_run(inside[:0], outside, delta=1e-6), "epsilon_claimed": 0.5},
    ]
    section, parts, _ = carded(tmp_path, [final(0.6)], {"one_run": rows})
    table = parts["Membership inference"].tables[1]
    assert table.corner == "Attack" and table.labels == ("loss threshold", "RMIA", "loss threshold")
    names = [name for _, name in table.columns]
    assert names == ["fold", "seed", "epsilon low", "f-DP low", "cap", "claimed", "in words"]
    shown = texts(table)
    assert shown[0][:2] == ["f0", "3"] and float(shown[0][2]) == pytest.approx(low["epsilon_low"], rel=1e-3)
    assert [row[5] for row in shown] == ["0.5", "no claim", "0.5"] and shown[2][2:5] == ["-"] * 3
    assert shown[0][6].startswith("epsilon is at least") and shown[2][6].startswith("no reading")
    assert section.text.count("CANARIES ABOVE THE CLAIM (loss threshold, f0, seed 3)") == 1


NOT_COVERED = {"auc_ceiling": None, "tpr_at_1_percent_fpr_ceiling": None, "above_ceiling": None}


def test_an_attack_that_the_guarantee_does_not_cover_is_above_nothing():
    rows = [final(0.99, attack="update_cosine", **NOT_COVERED), final(0.5, attack="rmia")]
    attack = {"final": rows, "ceiling": CEILING}
    table = attack_tables.attack_table(attack)
    assert texts(table)[0][-3:] == ["not covered", "not covered", "-"] and texts(table)[1][-3] == "0.638"
    assert attack_tables.attack_alarms(attack) == []


def test_without_a_guarantee_no_ceiling_is_drawn_and_the_caption_says_why(tmp_path):
    roc = {"rmia": {"fpr": [0, 1], "tpr": [0, 1]}}
    more = {"ceiling": {"source": "no ceiling: the run guarantees nothing"}, "roc": roc, "curve": []}
    part = carded(tmp_path, [final(0.6, attack="rmia", **NOT_COVERED)], more)[1]["Membership inference"]
    ((_, words),) = part.figures
    assert "Dashed" not in words and "ceiling" not in (tmp_path / "roc.csv").read_text()
    (table,) = part.tables
    assert "No ceiling: the run guarantees nothing." in table.caption and len(table.columns) == 10
    limited = carded(tmp_path, [final(0.6, attack="rmia")], more | {"ceiling": CEILING})[1]["Membership inference"]
    assert "Dashed" in limited.figures[0][1] and "(0.5-GDP)" in limited.tables[0].caption


def test_rates_have_intervals_and_rows_their_shadows():
    rate = {f"tpr_at_1_percent_fpr{end}": value for end, value in (("", 0.31), ("_low", 0.22), ("_high", 1.0))}
    table = attack_tables.attack_table({"final": [final(0.6, balanced_advantage=0.25, shadows=8, **rate)]})
    cells = dict(zip([name for _, name in table.columns], texts(table)[0]))
    assert cells["TPR at 1% FPR"] == ".310 [.220-1.000]" and cells["TPR at 0.1% FPR"] == "n/a"
    assert (cells["max |TPR - FPR|"], cells["shadows"]) == ("0.250", "8")


def test_no_reading_is_no_number_in_the_curve(tmp_path):
    """The evidence of a model was not finite: its AUC is null in the summary."""
    lost = final(0.5) | dict.fromkeys(("auc", "auc_low", "auc_high", "advantage")) | {"words": "no reading"}
    made = run(finals=[lost, final(0.8, seed=1)])
    made.summary["attack"]["roc"]["shadow"] = {"fpr": [], "tpr": []}
    (section,) = privacy_report.sections(made, tmp_path)
    assert section.tables[0].cells[0][0].text == "n/a"
    with open(tmp_path / "attack_auc.csv", newline="") as file:
        assert [(float(r["mean"]), r["replicas"]) for r in csv.DictReader(file)] == [(0.8, "1")] * 2
    privacy_report.sections(run(finals=[lost]), tmp_path)
    with open(tmp_path / "attack_auc.csv", newline="") as file:
        assert [(r["mean"], r["replicas"]) for r in csv.DictReader(file)] == [("", "0")] * 2


def test_the_strongest_attack_is_the_one_farthest_from_guessing(tmp_path):
    """An inverted one counts as much; one that looks at the updates is of another attacker."""
    kinds = {"loss": 0.55, "shadow": 0.52, "rmia": 0.3, "lira_online": 0.66, "update_cosine": 0.9}
    attacked = run(finals=[final(auc + d, attack=kind, seed=seed) for kind, auc in kinds.items() for seed, d in DRIFT])
    kind, values = privacy_report.strongest(attacked.summary)
    assert kind == "rmia" and values == pytest.approx([0.3, 0.32])
    plain = run("plain", finals=[final(0.6, attack="loss")])
    table = method_table.method_table([attacked, plain])
    names = [name for _, name in table.columns]
    assert names == ["dice", "cross_entropy", "attack_auc", "strongest_attack"]
    assert [row[3] for row in texts(table)] == ["0.310 ± 0.014 (RMIA)", "0.600 (loss threshold)"]
    assert [row[2] for row in texts(table)] == ["0.530 ± 0.014", "0.600 (n=1)"]
    assert "strongest_attack: of all" in table.caption and "by the loss threshold where none" in table.caption
    assert method_table.points([attacked, plain])["FedAvg"][0] == pytest.approx(0.31)
    assert method_table.attacks_of_points([attacked, plain]) == "FedAvg: RMIA; plain: loss threshold"
    assert privacy_report.strongest(run().summary) == ("", [])
    ((path, words),) = sweep_report._trade_off(tmp_path, "x", [attacked, plain], "dice")
    assert "(FedAvg: RMIA; plain: loss threshold)" in words
    assert path.with_suffix(".csv").read_text().startswith("method,AUC of the strongest membership attack,")


DRIFT = ((0, 0.0), (1, 0.02))
