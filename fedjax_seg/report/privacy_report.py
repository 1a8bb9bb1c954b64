"""What a run says about privacy: the guarantee that was accounted, and what attacks found."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.report import privacy_figures, tables
from fedjax_seg.report.html import Section
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import Cell, Table

ATTACK_NAMES = {"shadow": "shadow classifier", "loss": "loss threshold"}


def sections(run: Run, figures: Path) -> list[Section]:
    """'Privacy guarantee' and 'Membership inference' of a run, as far as it has them. Draws into `figures`."""
    made = []
    guarantee = run.summary.get("privacy")
    if guarantee:
        tables_of = [t for g in (guarantee, guarantee.get("clients")) if g for t in _ledger(g)]
        made.append(Section("Privacy guarantee", guarantee["text"], tables_of))
    attack = run.summary.get("attack")
    if attack:
        drawn = [
            (_roc(attack, figures), "True against false positives of the attack on the last model."),
            (_curve(attack, figures), "The attack on the model of every evaluated round."),
        ]
        made.append(Section("Membership inference", _attack_text(attack), [_attack_table(attack)], drawn))
    return made


def attack_values(summary: Mapping[str, Any], kind: str = "shadow", field: str = "auc") -> list[float]:
    """A number of the attack on the last model, one per fold and seed; models that each saw one site alone ('local')
    are averaged over sites first."""
    found: dict[Any, list[float]] = {}
    for row in (summary.get("attack") or {}).get("final", ()):
        if row["attack"] == kind and row[field] is not None:
            fold = next(
                (row["fold"].removesuffix(f"_{s}") for s in summary["sites"] if row["fold"].endswith(f"_{s}")), ""
            )
            local = summary.get("protocol") == "local"
            found.setdefault((fold if local else row["fold"], row["seed"]), []).append(row[field])
    return [float(np.mean(values)) for values in found.values()]


def _ledger(guarantee: Mapping[str, Any]) -> list[Table]:
    rows = guarantee["rows"]
    if not rows:
        return []
    names = [key for key in rows[0] if key != "client"]
    cells = [tuple(_cell(row[key]) for key in names) for row in rows]
    caption = guarantee.get("caption", "One row per client: what its own units are promised over the whole run.")
    labels, corner = tuple(str(row["client"]) for row in rows), guarantee.get("corner", "Client")
    return [Table(caption, corner, tuple(("", n) for n in names), labels, tuple(cells), ("",) * len(names))]


def _cell(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(float(value), text=f"{value:.4g}")
    return Cell(math.nan, text="-" if value is None else str(value))


def _attack_text(attack: Mapping[str, Any]) -> str:
    text = attack["text"]
    flagged = [row for row in attack["final"] if row["inverted"]]
    for row in flagged:
        where = f"{ATTACK_NAMES[row['attack']]}, fold {row['fold']}, seed {row['seed']}"
        text += f"\n\nINVERTED ATTACK ({where}): {row['words']}"
    return text


def _attack_table(attack: Mapping[str, Any]) -> Table:
    names = ("AUC", "95% low", "95% high", "|AUC - 1/2|", "TPR at 1% FPR", "TPR at 0.1% FPR", "members", "non-members")
    rates = ("tpr_at_1_percent_fpr", "tpr_at_0.1_percent_fpr")
    keys = ("auc", "auc_low", "auc_high", "advantage", *rates, "members", "non_members")
    cells, labels = [], []
    for row in attack["final"]:
        labels.append(f"{ATTACK_NAMES[row['attack']]}, {row['fold']}, seed {row['seed']}")
        texts = [
            "n/a" if row[k] is None else f"{row[k]:.3f}" if isinstance(row[k], float) else str(row[k]) for k in keys
        ]
        cells.append(tuple(Cell(math.nan, text=text) for text in texts))
    caption = (
        f"Membership inference on the last model; AUC is the Mann-Whitney statistic with a percentile bootstrap over"
        f" {attack['unit']}s; 0.5 is guessing, and as far below 0.5 is as much of a leak as above. A true positive rate"
        f" is n/a where the non-members are too few for its false positive rate."
    )
    return Table(caption, "Attack", tuple(("", n) for n in names), tuple(labels), tuple(cells), ("",) * len(names))


def _roc(attack: Mapping[str, Any], folder: Path) -> Path:
    first = attack["roc"]
    curves = {ATTACK_NAMES[name]: (points["fpr"], points["tpr"]) for name, points in first.items()}
    row = attack["final"][0]
    note = f"Fold {row['fold']}, seed {row['seed']}: {row['members']} members, {row['non_members']} non-members"
    return privacy_figures.roc(curves, folder, note=note)


def _curve(attack: Mapping[str, Any], folder: Path) -> Path:
    curves: dict[str, list[tuple[int, float, float, int]]] = {}
    for kind in dict.fromkeys(row["attack"] for row in attack["curve"]):
        mine = [row for row in attack["curve"] if row["attack"] == kind]
        for at in sorted({row["round"] for row in mine}):
            cell = tables.summarise(row["auc"] for row in mine if row["round"] == at)
            std = math.nan if cell.std is None else cell.std
            curves.setdefault(ATTACK_NAMES[kind], []).append((at, cell.mean, std, cell.n or 0))
    return privacy_figures.auc_by_round(curves, folder)
