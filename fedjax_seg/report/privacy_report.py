"""What a run says about privacy: what it promises and why, what was found against it, and what it costs.

One section of eight parts, made from the run's privacy card (summary["privacy_card"], the content of privacy.json);
runs of older versions have none, and show what their ledger and their attack say.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.report import attack_tables, privacy_figures, privacy_tables, tables, trade_off
from fedjax_seg.report.attack_tables import attack_name
from fedjax_seg.report.html import Section
from fedjax_seg.report.runs import Run

TITLE = "Privacy"
REPLACES = ("Privacy guarantee", "Membership inference")  # sections of reports without a card
ON_THE_LAST_MODEL = ("shadow", "loss", "lira_online", "lira_offline", "rmia", "trajectory")  # not what updates tell
NOTHING = "No differential-privacy guarantee"


def sections(run: Run, figures: Path) -> list[Section]:
    """'Privacy' of a run; 'Privacy guarantee' and 'Membership inference' where it has no card, as far as it has them.
    Draws into `figures`."""
    card = run.summary.get("privacy_card")
    return [_card_section(run, card, figures)] if card else _older(run, figures)


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


def strongest(summary: Mapping[str, Any]) -> tuple[str, list[float]]:
    """The membership attack on the last model whose mean AUC is farthest from 1/2, and its values as `attack_values`;
    ('', []) where no attack has a reading."""
    found = {kind: attack_values(summary, kind) for kind in ON_THE_LAST_MODEL}
    read = {kind: values for kind, values in found.items() if values}
    if not read:
        return "", []
    best = max(read, key=lambda kind: abs(float(np.mean(read[kind])) - 0.5))
    return best, read[best]


def headline(card: Mapping[str, Any]) -> str:
    """The first sentence: what is promised, or in words that nothing is."""
    sentence = str(card.get("sentence") or "").strip()
    if card.get("epsilon") is not None:
        if sentence:
            return sentence
        return f"({card['epsilon']:.3g}, {card['delta']:g})-differential privacy of one {card.get('unit')}."
    if NOTHING.lower() in sentence.lower():
        return sentence
    return f"{NOTHING} (epsilon is infinite). {sentence}".strip()


def _card_section(run: Run, card: Mapping[str, Any], figures: Path) -> Section:
    attack = _attack(run, card)
    alarms = [
        *privacy_tables.over_schedule(card.get("mechanisms") or ()),
        *privacy_tables.audit_alarms(card.get("audit") or {}),
        *attack_tables.attack_alarms(attack),
    ]
    lines = [f"- WARNING: {w}" for w in card.get("warnings") or ()] + [f"- **ALARM: {a}.**" for a in alarms]
    text = f"**{headline(card)}**" + ("\n\n" + "\n".join(lines).replace("..**", ".**") if lines else "")
    parts = [Section("Threat model", privacy_tables.threat_model(card))]
    mechanisms = card.get("mechanisms") or ()
    if mechanisms:
        parts.append(
            Section(
                "Mechanisms",
                privacy_tables.mechanism_text(mechanisms),
                privacy_tables.mechanism_table(mechanisms),
            )
        )
        parts += _ledger_part(card, figures) + _audit_part(card, figures)
    parts += _attack_part(attack, figures)
    secure = privacy_tables.secure_sum_text(card.get("secure_sum") or {})
    if secure:
        where = " Its messages and bytes: section Communication." if run.summary.get("secrecy") else ""
        parts.append(Section("Secure sum", secure + where if "\n" not in secure else secure + "\n\n" + where.strip()))
    if mechanisms:
        parts.append(_utility_part(card))
    return Section(TITLE, text, parts=[part for part in parts if part.text or part.tables or part.figures])


def _ledger_part(card: Mapping[str, Any], figures: Path) -> list[Section]:
    ledger = card.get("ledger") or {}
    infinite = lambda value: math.inf if value is None else float(value)
    grown = [(int(row["round"]), infinite(row["epsilon"])) for row in ledger.get("per_round") or ()]
    curve = [(float(row["delta"]), infinite(row["epsilon"])) for row in ledger.get("curve") or ()]
    claimed = None if card.get("epsilon") is None else (float(card["epsilon"]), float(card["delta"]))
    path = privacy_figures.ledger(grown, curve, figures, claimed=claimed, unit=str(card.get("unit") or "unit"))
    drawn = [(path, "Epsilon over the rounds, and epsilon of the whole run over delta.")] if path else []
    return [Section("Ledger", privacy_tables.ledger_text(card), privacy_tables.ledger_tables(card), drawn)]


def _audit_part(card: Mapping[str, Any], figures: Path) -> list[Section]:
    audit = card.get("audit") or {}
    if not audit:
        return []
    rows = [
        (row["name"], float(row["epsilon_low"] or 0.0), _claim(row.get("epsilon_claimed")))
        for row in audit.get("canaries", ())
    ]
    drawn = [(privacy_figures.audits(rows, figures), "What canaries show against what is claimed.")] if rows else []
    return [Section("Audit", audit.get("text", ""), privacy_tables.audit_tables(audit), drawn)]


def _claim(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _attack(run: Run, card: Mapping[str, Any]) -> dict[str, Any]:
    """The run's attack with its curves where there are some; else the rows that the card keeps."""
    kept = card.get("attacks") or {}
    full = dict(run.summary.get("attack") or {})
    if not full and kept.get("rows"):
        full = {"final": kept["rows"], "text": kept.get("text", "")}
        full["unit"] = kept["rows"][0].get("unit", "case")
    return {**{k: v for k, v in kept.items() if k not in ("rows", "text")}, **full} if full else {}


def _attack_part(attack: Mapping[str, Any], figures: Path) -> list[Section]:
    if not attack.get("final"):
        return []
    made = [attack_tables.attack_table(attack), *attack_tables.one_run_tables(attack)]
    made += attack_tables.source_tables(attack)
    return [Section("Membership inference", _attack_text(attack), made, _attack_figures(attack, figures))]


def _attack_text(attack: Mapping[str, Any]) -> str:
    parts = [attack.get("text", ""), attack_tables.source_words(attack)]
    parts += attack_tables.attack_alarms(attack)
    return "\n\n".join(part for part in parts if part)


def _attack_figures(attack: Mapping[str, Any], figures: Path) -> list[tuple[Path, str]]:
    drawn = []
    if attack.get("roc"):
        words = "True against false positives of the attack on the last model."
        limited = (attack.get("ceiling") or {}).get("fpr")  # without a guarantee it is the reason alone
        drawn.append((_roc(attack, figures), words + (" Dashed: the ceiling." if limited else "")))
    if attack.get("curve"):
        drawn.append((_curve(attack, figures), "The attack on the model of every evaluated round."))
    return drawn


def _utility_part(card: Mapping[str, Any]) -> Section:
    utility, unit = card.get("utility") or {}, card.get("unit") or "client"
    text = utility.get("text") or trade_off.law(utility.get("snr"), unit)
    return Section("Utility beside epsilon", text, privacy_tables.utility_table(card))


def _older(run: Run, figures: Path) -> list[Section]:
    """Of a run whose summary has no card."""
    made = []
    guarantee = run.summary.get("privacy")
    if guarantee:
        tables_of = [t for g in (guarantee, guarantee.get("clients")) if g for t in _older_ledger(g)]
        made.append(Section("Privacy guarantee", guarantee["text"], tables_of))
    return made + _attack_part(run.summary.get("attack") or {}, figures)


def _older_ledger(guarantee: Mapping[str, Any]) -> list[tables.Table]:
    caption = guarantee.get("caption", "One row per client: what its own units are promised over the whole run.")
    return privacy_tables.rows_table(guarantee["rows"], caption, guarantee.get("corner", "Client"), "client")


def _roc(attack: Mapping[str, Any], folder: Path) -> Path:
    curves = {attack_name(name): (points["fpr"], points["tpr"]) for name, points in attack["roc"].items()}
    row, ceiling = attack["final"][0], attack.get("ceiling") or None
    note = f"Fold {row['fold']}, seed {row['seed']}: {row['members']} members, {row['non_members']} non-members"
    limit = (ceiling["fpr"], ceiling["tpr"]) if ceiling and ceiling.get("fpr") else None
    return privacy_figures.roc(curves, folder, note=note, ceiling=limit)


def _curve(attack: Mapping[str, Any], folder: Path) -> Path:
    curves: dict[str, list[tuple[int, float, float, int]]] = {}
    for kind in dict.fromkeys(row["attack"] for row in attack["curve"]):
        mine = [row for row in attack["curve"] if row["attack"] == kind]
        for at in sorted({row["round"] for row in mine}):
            cell = tables.summarise(_reading(row["auc"]) for row in mine if row["round"] == at)
            std = math.nan if cell.std is None else cell.std
            curves.setdefault(attack_name(kind), []).append((at, cell.mean, std, cell.n or 0))
    return privacy_figures.auc_by_round(curves, folder)


def _reading(value: float | None) -> float:
    """NaN where there was no reading, which JSON keeps as null."""
    return math.nan if value is None else float(value)
