"""What membership attacks on a run found, as tables and words: readings, ceilings, sources, canaries in the run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_seg.report.privacy_tables import number, rows_table
from fedjax_seg.report.tables import Cell, Table

ATTACK_NAMES = {
    "shadow": "shadow classifier",
    "loss": "loss threshold",
    "lira_online": "LiRA, online",
    "lira_offline": "LiRA, offline",
    "rmia": "RMIA",
    "trajectory": "loss over the rounds",
    "update_cosine": "cosine with the update",
}
_RATES = ("tpr_at_1_percent_fpr", "tpr_at_0.1_percent_fpr")
_NAMES = (
    "AUC",
    "95% low",
    "95% high",
    "|AUC - 1/2|",
    "max |TPR - FPR|",
    "TPR at 1% FPR",
    "TPR at 0.1% FPR",
    "members",
    "non-members",
    "shadows",
)


def attack_name(kind: str) -> str:
    return ATTACK_NAMES.get(kind, kind.replace("_", " "))


def limits(row: Mapping[str, Any], ceiling: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """The largest AUC and the largest TPR at 1 % FPR that the guarantee allows; None where there is no ceiling.

    Read from the row where it has these columns (attacks.ceilings.marked): there None says that the guarantee does not
    cover this attack. A row without them has the run's ceiling {'fpr', 'tpr', 'auc'}.
    """
    run, name = ceiling or {}, f"{_RATES[0]}_ceiling"
    auc = row["auc_ceiling"] if "auc_ceiling" in row else run.get("auc")
    if name in row:
        return auc, row[name]
    covered = auc is not None and run.get("fpr")
    return auc, float(np.interp(0.01, run["fpr"], run["tpr"])) if covered else None


def above_ceiling(row: Mapping[str, Any], ceiling: Mapping[str, Any] | None) -> bool:
    """Whether an attack does more than the guarantee allows, beyond chance: as the row says, else by the lower end of
    its AUC's interval."""
    if "above_ceiling" in row:
        return bool(row["above_ceiling"])  # None: not covered, or no reading
    most, low = limits(row, ceiling)[0], row.get("auc_low")
    return most is not None and low is not None and low > most


def attack_table(attack: Mapping[str, Any]) -> Table:
    """Attacks on the last model, a row per attack, fold and seed."""
    ceiling = attack.get("ceiling") or {}
    limited = any(limits(row, ceiling)[0] is not None for row in attack["final"])
    none = "not covered" if ceiling.get("auc") is not None else "n/a"
    cells, labels = [], []
    for row in attack["final"]:
        labels.append(f"{attack_name(row['attack'])}, {row['fold']}, seed {row['seed']}")
        texts = [_rate(row.get(k)) for k in ("auc", "auc_low", "auc_high", "advantage", "balanced_advantage")]
        texts += [_with_interval(row, k) for k in _RATES]
        texts += [_rate(row.get(k)) for k in ("members", "non_members", "shadows")]
        if limited:
            flag = "ABOVE ITS CEILING" if above_ceiling(row, ceiling) else "INVERTED" if row["inverted"] else "-"
            texts += [*(none if x is None else _rate(x) for x in limits(row, ceiling)), flag]
        cells.append(tuple(Cell(math.nan, text=text) for text in texts))
    names = [*_NAMES, *(("ceiling of AUC", "ceiling of TPR at 1%", "flag") if limited else ())]
    caption = (
        f"Membership inference on the last model; AUC is the Mann-Whitney statistic with a percentile bootstrap over"
        f" {attack.get('unit', 'case')}s; 0.5 is guessing, and as far below 0.5 is as much of a leak as above. A true"
        f" positive rate has its 95% interval, and is n/a where the non-members are too few for its false positive"
        f" rate. shadows: federations that the attacker trained."
    )
    source = str(ceiling.get("source") or "")
    if limited:
        caption += f" Ceilings: the most that the guarantee allows ({source or 'from the ledger'})."
    elif source:
        caption += f" {source[0].upper()}{source[1:]}."
    return Table(caption, "Attack", tuple(("", n) for n in names), tuple(labels), tuple(cells), ("",) * len(names))


def _rate(value: Any) -> str:
    return "n/a" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    """'.310 [.220-.410]'; n/a where there is no value."""
    found = [row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")]
    if found[0] is None:
        return "n/a"
    value, low, high = (None if x is None else f"{x:.3f}".removeprefix("0") for x in found)
    return f"{value}" if low is None or high is None else f"{value} [{low}-{high}]"


def attack_alarms(attack: Mapping[str, Any]) -> list[str]:
    """Loud lines: inverted attacks, attacks above what the guarantee allows, and canaries that refute it."""
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
    for row in _listed(attack.get("one_run")):
        low, claim = row.get("epsilon_low"), row.get("epsilon_claimed")
        if low is not None and claim is not None and low > claim:
            lines.append(f"CANARIES ABOVE THE CLAIM ({_place(row)}): {row.get('words')}; claimed: {claim:.3g}")
    return lines


def _listed(found: Any) -> list[dict[str, Any]]:
    """A list of rows; one row alone as a list of one, nothing as none."""
    return [dict(row) for row in ([found] if isinstance(found, Mapping) else found or ()) if row]


def _place(row: Mapping[str, Any]) -> str:
    """Attack, fold and seed of a row, as far as it names them."""
    named = [attack_name(row["attack"])] if row.get("attack") else []
    named += [str(row["fold"])] if "fold" in row else []
    return ", ".join(named + ([f"seed {row['seed']}"] if "seed" in row else []))


def source_tables(attack: Mapping[str, Any]) -> list[Table]:
    """Which hospital a case came from, as far as an attacker can tell; a row per reading of attack['source'], which is
    one of attacks.source.attribution, or several."""
    rows = []
    for at, reading in enumerate(_listed(attack.get("source"))):
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
    found = [str(row["words"]) for row in _listed(attack.get("source")) if row.get("words")]
    return f"Which hospital: {found[0]}." if found else ""


def one_run_tables(attack: Mapping[str, Any]) -> list[Table]:
    """What canaries inside this very run show: a row per attack, fold and seed (attacks.one_run, 'epsilon_claimed')."""
    rows = []
    for row in _listed(attack.get("one_run")):
        claim = row.get("epsilon_claimed")
        rows.append(
            {
                "attack": attack_name(row["attack"]) if row.get("attack") else "canaries",
                "fold": row.get("fold"),
                "seed": row.get("seed"),
                "epsilon low": row.get("epsilon_low"),
                "f-DP low": row.get("epsilon_low_fdp"),
                "cap": row.get("cap"),
                "claimed": "no claim" if claim is None else claim,
                "in words": row.get("words"),
            }
        )
    caption = (
        "One-run audit: lower bounds on epsilon from canaries, training cases that fair coins left out or not. epsilon"
        " low holds for every mechanism, f-DP low for a Gaussian's trade-off curve; cap: the most that so many canaries"
        " can show; claimed: what the ledger promises a canary. Each bound holds on its own, not the largest of them."
    )
    return rows_table(rows, caption, "Attack", "attack")
