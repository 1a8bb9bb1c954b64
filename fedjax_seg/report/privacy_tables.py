"""The parts of a run's privacy card as tables and words: threat model, mechanisms, ledger, audit, attacks, utility."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.report.tables import Cell, Table, summarise

ATTACK_NAMES = {
    "shadow": "shadow classifier",
    "loss": "loss threshold",
    "lira_online": "LiRA, online",
    "lira_offline": "LiRA, offline",
    "rmia": "RMIA",
    "trajectory": "loss over the rounds",
    "update_cosine": "cosine with the update",
}
_INFINITE = ("epsilon", "epsilon_pld", "epsilon_claimed")  # null is infinite there, elsewhere it is 'does not apply'
_RATES = ("tpr_at_1_percent_fpr", "tpr_at_0.1_percent_fpr")


def attack_name(kind: str) -> str:
    return ATTACK_NAMES.get(kind, kind.replace("_", " "))


def number(value: Any, none: str = "-") -> str:
    """A value as a cell prints it: four digits, `none` where there is none, ∞ where it is infinite."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return none
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return ("∞" if value > 0 else "-∞") if math.isinf(value) else f"{value:.4g}"
    return str(value)


def rows_table(rows: Sequence[Mapping[str, Any]], caption: str, corner: str, label: str = "") -> list[Table]:
    """Any rows as one table, a column per key; none where there are no rows.

    Args:
      label: the key that names a row; '' = the first one.
    """
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    label = label if label in keys else keys[0]
    names = [key for key in keys if key != label]
    cells = [tuple(cell(row.get(key), "∞" if key in _INFINITE else "-") for key in names) for row in rows]
    labels = tuple(number(row.get(label)) for row in rows)
    columns = tuple(("", name.replace("_", " ")) for name in names)
    return [Table(caption, corner, columns, labels, tuple(cells), ("",) * len(names))]


def cell(value: Any, none: str = "-") -> Cell:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(float(value) if plain else math.nan, text=number(value, none))


def _words(value: Any) -> str:
    """Text as it is, a list joined by semicolons."""
    return value if isinstance(value, str) else "; ".join(str(v) for v in value)


def threat_model(card: Mapping[str, Any]) -> str:
    """Part 1 as a list: unit, adjacency, who is trusted, what is released, what is not protected."""
    told = card.get("threat_model") or {}
    names = ("unit", "adjacency", "trusted", "released", "not_protected")
    named = {"unit": "Unit", "adjacency": "Neighbouring data", "trusted": "Trusted", "released": "Released"}
    named |= {"not_protected": "Not protected"}
    return "\n".join(f"- {named[k]}: {_words(told[k])}" for k in names if told.get(k))


def mechanism_text(mechanisms: Sequence[Mapping[str, Any]]) -> str:
    """Part 2 in words: what each one clips, why its sensitivity holds, how it was sampled, and why nothing follows."""
    lines = []
    for m in mechanisms:
        line = f"- **{m['name']}** ({m['where']}): "
        line += f"clips {m['clips']}. " if m.get("clips") else "clips nothing. "
        proven = m.get("formal") and m.get("proof")
        line += f"Proof: {m['proof']}. " if proven else "NO proof of its sensitivity. "
        line += f"Sampling as executed: {m['sampling']}. " if m.get("sampling") else ""
        line += f"Random numbers: {m['numbers']}." if m.get("numbers") else ""
        lines.append(line.replace("..", ".").strip())
        if not m.get("formal"):
            lines += [f"- NO guarantee from {m['name']}: {reason}" for reason in m.get("reasons") or ("no proof",)]
    return "\n".join(lines)


def mechanism_table(mechanisms: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Part 2 in numbers, a row per mechanism."""
    rows = []
    for m in mechanisms:
        done = list((m.get("realised") or {}).values())
        rows.append(
            {
                "mechanism": f"{m['name']} ({m['where']})",
                "unit": m.get("unit"),
                "adjacency": m.get("adjacency"),
                "sensitivity": m.get("sensitivity"),
                "noise multiplier z": m.get("noise_multiplier"),
                "noise std": m.get("stddev"),
                "rounds of one client, at most": m.get("participations"),
                "rounds as executed": f"{min(done)} to {max(done)}" if done else None,
                "guarantee": bool(m.get("formal")),
            }
        )
    caption = (
        "Mechanisms as executed. noise std = z x sensitivity, in the units of what is noised; '-' = depends on the data"
        " or does not apply."
    )
    return rows_table(rows, caption, "Mechanism")


def over_schedule(mechanisms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sites that took part more often than the ledger counted."""
    found = []
    for m in mechanisms:
        most, done = m.get("participations"), m.get("realised") or {}
        more = [site for site, times in done.items() if most is not None and times > most]
        if more:
            found.append(
                f"{m['name']}: {', '.join(more)} took part in more than the {most} rounds that the ledger counts"
            )
    return found


def ledger_tables(card: Mapping[str, Any]) -> list[Table]:
    """Part 3: the ways to compose, and the events as executed."""
    ledger = card.get("ledger") or {}
    rows = list(ledger.get("rows", ()))
    corner = ledger.get("corner") or card.get("corner") or "Client"
    usual = "What one unit is promised, by the releases that count and how they are composed."
    caption = ledger.get("caption") or card.get("caption") or usual
    events = [{k: v for k, v in event.items() if k != "sentence"} for event in ledger.get("events", ())]
    made = rows_table(rows, caption, corner, "client" if rows and "client" in rows[0] else "")
    return made + rows_table(events, "Events as executed: what the accountant composed.", "Event", "event")


def ledger_text(card: Mapping[str, Any]) -> str:
    ledger = card.get("ledger") or {}
    parts = [ledger["text"]] if ledger.get("text") else []
    if ledger.get("gdp_mu") is not None:
        at = "" if card.get("delta") is None else f" ({card['delta']:g})"
        same = "has the same (epsilon, delta) at the run's delta"
        parts.append(f"Gaussian differential privacy with μ = {ledger['gdp_mu']:.4g} {same}{at}.")
    sentences = [f"- {event['sentence']}" for event in ledger.get("events", ()) if event.get("sentence")]
    if sentences:
        parts.append("Composed:\n" + "\n".join(sentences))
    told = (card.get("threat_model") or {}).get("not_protected")
    if ledger.get("not_accounted") and ledger["not_accounted"] != told:
        parts.append("Not accounted for:\n" + "\n".join(f"- {line}" for line in ledger["not_accounted"]))
    return "\n\n".join(parts)


def audit_tables(audit: Mapping[str, Any]) -> list[Table]:
    """Part 4: sensitivities that were found against proven ones, and what canaries show."""
    found = []
    for row in audit.get("sensitivity", ()):
        beyond = is_beyond(row)
        rest = {"found": row.get("found"), "proven": row.get("proven"), "share": _percent(row.get("share"))}
        verdict = "ABOVE ITS BOUND" if beyond else "no proof to check" if row.get("proven") is None else "holds"
        place = {k: row.get(k) for k in ("n", "dim", "start") if k in row}
        found.append({"name": row["name"], **place, **rest, "verdict": verdict})
    caption = (
        "Sensitivity, by ascent over neighbouring inputs. found: a lower bound, with a witness; share of the proven"
        " bound; start: the input from which it was reached."
    )
    made = rows_table(found, caption, "Mechanism")
    shown = []
    for row in audit.get("canaries", ()):
        line = {k: row.get(k) for k in ("name", "statistic", "epsilon_low", "epsilon_claimed", "mu_low", "trials")}
        line["confidence"] = _percent(row.get("confidence"))
        shown.append(line | {"verdict": "ABOVE THE CLAIM" if row.get("above") else "below the claim"})
    caption = (
        "Canaries: epsilon low is a lower bound of the true epsilon that many releases on neighbouring inputs show, at"
        " that confidence. It refutes a claim below it; it proves none."
    )
    return made + rows_table(shown, caption, "Audit")


def is_beyond(row: Mapping[str, Any]) -> bool:
    """Whether an audited sensitivity is above its proven bound, beyond rounding."""
    found, proven = row.get("found"), row.get("proven")
    return found is not None and proven is not None and found > proven * (1 + 1e-6)


def audit_alarms(audit: Mapping[str, Any]) -> list[str]:
    """Loud lines: what the audit refuted."""
    lines = [
        f"{row['name']}: a sensitivity of {row['found']:.4g} was found and the bound says {row['proven']:.4g}, which is"
        " wrong"
        for row in audit.get("sensitivity", ())
        if is_beyond(row)
    ]
    for row in audit.get("canaries", ()):
        if row.get("above"):
            claim = number(row.get("epsilon_claimed"), "∞")
            words = row.get("words") or f"canaries show epsilon of at least {row['epsilon_low']:.4g}, claimed: {claim}"
            lines.append(f"{row['name']}: {words}")
    return lines


def _percent(value: Any) -> str | None:
    return None if value is None else f"{100 * float(value):.3g} %"


def limits(row: Mapping[str, Any], ceiling: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """The largest AUC and the largest TPR at 1 % FPR that the guarantee allows; None where there is no ceiling.

    Read from the row where it has them (attacks.ceilings.marked), else from the run's ceiling {'fpr', 'tpr', 'auc'}.
    """
    auc, rate = row.get("auc_ceiling"), row.get(f"{_RATES[0]}_ceiling")
    if ceiling:
        auc = ceiling.get("auc") if auc is None else auc
        if rate is None and ceiling.get("fpr"):
            rate = float(np.interp(0.01, ceiling["fpr"], ceiling["tpr"]))
    return auc, rate


def above_ceiling(row: Mapping[str, Any], ceiling: Mapping[str, Any] | None) -> bool:
    """Whether an attack does more than the guarantee allows, beyond chance: as the row says, else by the lower end of
    its AUC's interval."""
    if row.get("above_ceiling") is not None:
        return bool(row["above_ceiling"])
    most, low = limits(row, ceiling)[0], row.get("auc_low")
    return most is not None and low is not None and low > most


def attack_table(attack: Mapping[str, Any]) -> Table:
    """Part 5: attacks on the last model, a row per attack, fold and seed."""
    ceiling = attack.get("ceiling") or None
    limited = any(limits(row, ceiling)[0] is not None for row in attack["final"])
    names = ["AUC", "95% low", "95% high", "|AUC - 1/2|", "TPR at 1% FPR", "TPR at 0.1% FPR", "members", "non-members"]
    keys = ("auc", "auc_low", "auc_high", "advantage", *_RATES, "members", "non_members")
    cells, labels = [], []
    for row in attack["final"]:
        labels.append(f"{attack_name(row['attack'])}, {row['fold']}, seed {row['seed']}")
        texts = [_rate(row.get(k)) for k in keys]
        if limited:
            flag = "ABOVE ITS CEILING" if above_ceiling(row, ceiling) else "INVERTED" if row["inverted"] else "-"
            texts += [*map(_rate, limits(row, ceiling)), flag]
        cells.append(tuple(Cell(math.nan, text=text) for text in texts))
    names += ["ceiling of AUC", "ceiling of TPR at 1%", "flag"] if limited else []
    caption = (
        f"Membership inference on the last model; AUC is the Mann-Whitney statistic with a percentile bootstrap over"
        f" {attack.get('unit', 'case')}s; 0.5 is guessing, and as far below 0.5 is as much of a leak as above. A true"
        f" positive rate is n/a where the non-members are too few for its false positive rate."
    )
    if limited:
        source = (ceiling or {}).get("source") or "from the ledger"
        caption += f" Ceilings: the most that the guarantee allows ({source}); n/a = it allows anything."
    return Table(caption, "Attack", tuple(("", n) for n in names), tuple(labels), tuple(cells), ("",) * len(names))


def _rate(value: Any) -> str:
    return "n/a" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def attack_alarms(attack: Mapping[str, Any]) -> list[str]:
    """Loud lines: inverted attacks, and attacks above what the guarantee allows."""
    lines = []
    for row in attack.get("final") or ():
        where = f"{attack_name(row['attack'])}, fold {row['fold']}, seed {row['seed']}"
        if above_ceiling(row, attack.get("ceiling")):
            most, parts = limits(row, attack.get("ceiling"))[0], row.get("above")
            what = f" ({', '.join(parts)})" if parts else ""
            lines.append(
                f"ATTACK ABOVE ITS CEILING ({where}): AUC {row['auc']:.3f} where at most {number(most)} is possible"
                f"{what}: an accounting bug, or the evidence is not what the ledger covers"
            )
        if row.get("inverted"):
            lines.append(f"INVERTED ATTACK ({where}): {row['words']}")
    return lines


def _readings(attack: Mapping[str, Any]) -> list[dict[str, Any]]:
    """attack['source'] as a list: one reading of attacks.source.attribution, or several."""
    source = attack.get("source") or ()
    return [dict(row) for row in ([source] if isinstance(source, Mapping) else source)]


def source_tables(attack: Mapping[str, Any]) -> list[Table]:
    """Which hospital a case came from, as far as an attacker can tell; a row per reading."""
    rows = []
    for at, reading in enumerate(_readings(attack)):
        plain = {k: v for k, v in reading.items() if not isinstance(v, list | dict) and k != "words"}
        named = {k: plain.pop(k) for k in ("attack", "fold", "seed") if k in plain}
        text = ", ".join(f"seed {v}" if k == "seed" else str(v) for k, v in named.items())
        rows.append({"reading": text or f"reading {at + 1}"} | plain)
    caption = (
        "Which hospital: every case is attributed to the hospital whose model has the least loss on it. accuracy with"
        " its 95 % interval over cases; chance: of always naming the hospital with the most cases."
    )
    return rows_table(rows, caption, "Source", "reading")


def source_words(attack: Mapping[str, Any]) -> str:
    """What the first attribution found, in a line."""
    found = [str(row["words"]) for row in _readings(attack) if row.get("words")]
    return f"Which hospital: {found[0]}." if found else ""


def one_run(attack: Mapping[str, Any]) -> str:
    """What canaries inside this very run show, in a line."""
    found = attack.get("one_run") or {}
    if not found:
        return ""
    if found.get("words") or found.get("text"):
        return f"One-run audit: {found.get('words') or found['text']}"
    facts = ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in found.items() if not isinstance(v, list | dict))
    return f"One-run audit: {facts}."


def secure_sum_text(told: Mapping[str, Any]) -> str:
    """Part 6: which secure sum, and where its numbers are."""
    if not told:
        return ""
    if told.get("text"):
        return f"{told['text']}"
    facts = [f"{k.replace('_', ' ')}: {number(v)}" for k, v in told.items() if isinstance(v, str | int | float)]
    return "\n".join(f"- {fact}" for fact in facts)


def utility_table(card: Mapping[str, Any]) -> list[Table]:
    """Part 7: what the model achieves, beside its epsilon: over folds and seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in (card.get("utility") or {}).get("rows", ()):
        value = math.nan if row["value"] is None else float(row["value"])
        found.setdefault((row["metric"], str(row.get("site", ""))), []).append(value)
    if not found:
        return []
    epsilon = number(card.get("epsilon"), "∞")
    cells = tuple((summarise(values), Cell(math.nan, text=epsilon)) for values in found.values())
    labels = tuple(f"{metric}, {site.replace('_', ' ')}" if site else metric for metric, site in found)
    caption = "What the run achieves at its epsilon: mean ± sample standard deviation over folds and seeds."
    return [Table(caption, "Metric", (("", "value"), ("", "epsilon of the run")), labels, cells, ("", ""))]
