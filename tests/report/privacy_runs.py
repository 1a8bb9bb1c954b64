"""Made-up runs with attacks, guarantees and privacy cards, for tests of their reports."""

from fedjax_seg.report import privacy_report
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
