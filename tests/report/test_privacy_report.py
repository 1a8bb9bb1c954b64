"""What a report says of attacks and guarantees: numbers, n/a where there is none, inverted attacks in words."""

import csv
import math

import pytest

from fedjax_seg.report import method_table, privacy_figures, privacy_report, privacy_tables
from fedjax_seg.report.html import write_report
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import cell_text

METRICS = {"dice": ["max", "overlap"], "cross_entropy": ["min", "loss"]}


def final(auc, fold="holdout", seed=0, attack="shadow", **other):
    row = {"fold": fold, "seed": seed, "attack": attack, "auc": auc, "auc_low": auc - 0.1, "auc_high": auc + 0.1}
    row |= {"advantage": abs(auc - 0.5), "inverted": auc < 0.4, "words": f"found {auc}", "members": 50}
    return row | {"non_members": 50, "tpr_at_1_percent_fpr": None, "tpr_at_0.1_percent_fpr": None} | other


def card(**changes):
    """A privacy card in the shape of privacy.json; dotted changes reach into its parts."""
    made = {
        "epsilon": 4.0,
        "delta": 1e-5,
        "unit": "client",
        "adjacency": "zero-out",
        "sentence": "Differential privacy of every client: epsilon 4 at delta 1e-05.",
        "threat_model": {"unit": "a hospital", "adjacency": "zero-out", "trusted": "the server"}
        | {"released": ["models", "scores"], "not_protected": ["losses"]},
        "mechanisms": [
            {"where": "server", "name": "dp_fedavg", "clips": "the update", "sensitivity": 0.5, "proof": "a ball."}
            | {"adjacency": "zero-out", "unit": "client", "noise_multiplier": 4.84, "stddev": 2.42, "sampling": "full"}
            | {
                "participations": 20,
                "realised": {"a": 19, "b": 20},
                "numbers": "float32",
                "formal": True,
                "reasons": [],
            }
        ],
        "ledger": {
            "rows": [{"client": "all rounds, exact", "releases": 20, "epsilon": 4.0, "status": "proven"}],
            "events": [{"event": "Gaussian", "count": 20, "noise_multiplier": 4.84}],
            "curve": [],
            "per_round": [],
            "gdp_mu": 0.925,
            "not_accounted": ["other runs"],
            "text": "Composed exactly.",
        },
        "audit": {},
        "attacks": {},
        "secure_sum": {"name": "none", "text": "none: the server sees every message"},
        "utility": {
            "rows": [{"metric": "dice", "site": "pooled", "value": v} for v in (0.6, 0.7)],
            "snr": 0.05,
            "text": "",
        },
        "warnings": ["delta is large"],
        "corner": "Releases",
    }
    for key, value in changes.items():
        part, _, inside = key.partition("__")
        made[part] = made[part] | {inside: value} if inside else value
    return made


AUDIT = {
    "sensitivity": [
        {"name": "mean", "n": 6, "dim": 50, "found": 0.33, "proven": 1 / 3, "share": 0.99, "start": "aligned"},
        {"name": "mutant", "n": 6, "dim": 50, "found": 7.9, "proven": 2.0, "share": 3.95, "start": "ascent"},
    ],
    "canaries": [
        {"name": "literal", "statistic": "norm", "epsilon_low": 6.25, "mu_low": 1.5, "epsilon_claimed": 1.0}
        | {"trials": 20000, "confidence": 0.95, "above": True, "words": "epsilon is at least 6.25"},
        {"name": "sound", "statistic": "LR", "epsilon_low": 0.7, "mu_low": 0.2, "epsilon_claimed": None}
        | {"trials": 20000, "confidence": 0.95, "above": False, "words": ""},
    ],
    "text": "Audited.",
}
CEILING = {"fpr": [0.0, 0.01, 0.5, 1.0], "tpr": [0.0, 0.03, 0.7, 1.0], "auc": 0.638, "source": "0.5-GDP"}


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


def carded(tmp_path, finals=(), attack=None, **changes):
    """The one section of a run with a card, its parts by title, and all of its words."""
    made = run(finals=finals)
    made.summary["privacy_card"] = card(**changes)
    if attack:
        made.summary["attack"] |= attack
    (section,) = privacy_report.sections(made, tmp_path)
    assert section.title == privacy_report.TITLE
    parts = {part.title: part for part in section.parts}
    write_report(tmp_path, "x", [section])
    return section, parts, (tmp_path / "report.md").read_text()


def texts(table):
    return [[cell_text(c, table) for c in row] for row in table.cells]


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
    cells = texts(privacy_tables.attack_table(attack))[0]
    assert cells[-3:] == [limit, "0.030", "ABOVE ITS CEILING" if above else "-"]
    words = " ".join(privacy_tables.attack_alarms(attack))
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
        "one_run": {"epsilon_low": 0.3, "words": "epsilon is at least 0.30"},
        "roc": {},
        "curve": [],
    }
    _, parts, words = carded(tmp_path, [final(0.6, attack=kind) for kind in kinds], more)
    attacks, sources = parts["Membership inference"].tables
    assert [label.removesuffix(", holdout, seed 0") for label in attacks.labels] == list(kinds.values())
    assert texts(sources) == [["0.4", "0.3", "0.5", "0.2"]]
    assert "Which hospital: hospitals differ." in words and "One-run audit: epsilon is at least 0.30" in words
    assert "ceiling" not in attacks.caption.lower()


def test_the_cards_own_attack_rows_are_shown_where_the_summary_has_none(tmp_path):
    _, parts, _ = carded(tmp_path, attacks={"rows": [final(0.6)], "text": "Later."})
    part = parts["Membership inference"]
    assert (
        part.text == "Later." and part.tables[0].labels == ("shadow classifier, holdout, seed 0",) and not part.figures
    )
