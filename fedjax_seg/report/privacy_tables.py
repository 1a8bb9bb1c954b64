"""The parts of a run's privacy card as tables and words: threat model, mechanisms, ledger, audit, utility."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_seg.report.tables import Cell, Table, summarise

_INFINITE = ("epsilon", "epsilon_pld", "epsilon_claimed")  # null is infinite there, elsewhere it is 'does not apply'


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
        rest = {"found": row.get("found"), "proven": row.get("proven"), "share": percent(row.get("share"))}
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
        line["confidence"] = percent(row.get("confidence"))
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


def percent(value: Any) -> str | None:
    return None if value is None else f"{100 * float(value):.3g} %"


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
