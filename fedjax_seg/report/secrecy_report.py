"""What a run says about its exchange: who could read what, and what it cost; and that of many runs side by side."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.report import communication_figures, communication_table, leakage_figures, tables
from fedjax_seg.report.html import Section
from fedjax_seg.report.runs import Run, replicas_of
from fedjax_seg.report.tables import Cell, Table

SPLIT = "communication"  # of the ledger's rows in the metrics
_AS_SENT = 1e-3  # relative error of what the server reads: rounding, no noise


def ledger_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics rows of split 'communication', a dict per round and replica: round, fold, seed, and the numbers."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["split"] == SPLIT:
            key = (row["round"], row["fold"], row["seed"])
            found.setdefault(key, dict(zip(("round", "fold", "seed"), key)))[row["metric"]] = row["value"]
    return list(found.values())


def sections(run: Run, figures: Path) -> list[Section]:
    """'What single hospitals give away' and 'Communication' of a run, as far as it has them. Draws into `figures`."""
    told = run.summary.get("secrecy")
    if not told:
        return []
    made = []
    if told.get("rows"):
        table, drawn = leakage_figures.leakage_table({name_of(run): told["rows"]}), []
        if told["picture"]:
            path = leakage_figures.leakage([_exchange(run)], {name_of(run): _cosines(run)}, figures)
            drawn = [(path, _picture_text(told))]
        made.append(Section("What single hospitals give away", _hiding(told), [table], drawn))
    elif told["facts"]:
        made.append(Section("What single hospitals give away", _hiding(told)))
    ledger, drawn, text = ledger_rows(run.rows), [], _losses(told)
    costs = [communication_table.ledger_table(ledger)] if ledger else []
    if told["comparison"]:
        rows, own, protocol = told["comparison"], told["own"], told["protocol"]
        costs.append(communication_table.comparison_table(rows, own, protocol))
        path = communication_figures.protocol_costs(rows, figures, own=own, protocol=protocol)
        drawn.append((path, "One round by every protocol, for the hospitals and the model of this run."))
        line = communication_table.lines(rows, own, told["places"], told["entries"], protocol)
        text = "\n\n".join(part for part in (line, text) if part)
    return [*made, Section("Communication", text, costs, drawn)]


def leakage_of_runs(runs: Sequence[Run], folder: Path, name: str) -> list[tuple[Path, str]]:
    """The figure of what leaks under every protocol: pictures of three of them, dots of all."""
    shown: dict[str, Run] = {}
    for run in runs:
        if (run.summary.get("secrecy") or {}).get("picture"):
            shown.setdefault(run.summary["secrecy"]["protocol"], run)
    if len(shown) < 2:
        return []
    first = [shown[p] for p in ("none", "smc_scalar", "additive", "secagg") if p in shown and p != "none"][:3]
    cosines = {name_of(run): _cosines(run) for run in shown.values()}
    path = leakage_figures.leakage([_exchange(run) for run in first or [*shown.values()][:3]], cosines, folder, name)
    text = "One hospital's update under each protocol, what another one received of it, and what can be made of that."
    return [(path, text if first else _picture_text(next(iter(shown.values())).summary["secrecy"]))]


def name_of(run: Run) -> str:
    """Of the run's protocol, for readers."""
    told = run.summary["secrecy"]
    names = {"none": "no secure sum", "smc_scalar": "scalar shares", "additive": "additive shares"}
    names |= {"chained": "chain", "secagg": "SecAgg", "secagg_plus": "SecAgg+", "assumed": "assumed secure sum"}
    return names.get(told["protocol"], told["protocol"])


def _cosines(run: Run) -> dict[str, float | None]:
    return leakage_figures.mean_cosines(run.summary["secrecy"]["rows"])


def _exchange(run: Run) -> leakage_figures.Exchange:
    """Of the neighbour; without a secure sum of the server, which receives the true update (or one with noise, of which
    the picture of a neighbour has no numbers)."""
    told = run.summary["secrecy"]
    seen, row = told["picture"], told["rows"][0]
    if told["protocol"] == "none":
        read = next(r for r in told["rows"] if (r["site"], r["viewer"]) == (seen["site"], "server"))
        plain = np.asarray(seen["true"]) if read["error"] is not None and read["error"] < _AS_SENT else None
        site, true = seen["site"], np.asarray(seen["true"])
        return leakage_figures.Exchange(
            name_of(run), site, true, plain, plain, read["cosine"], row["of"], row["hides"], "server"
        )
    made = None if seen["reconstructed"] is None else np.asarray(seen["reconstructed"])
    return leakage_figures.Exchange(
        protocol=name_of(run),
        site=seen["site"],
        true=np.asarray(seen["true"]),
        received=np.asarray(seen["received"]),
        reconstructed=made,
        cosine=seen["cosine"],
        of=row["of"],
        hides=row["hides"],
    )


def _picture_text(told: Mapping[str, Any]) -> str:
    """What the picture of a run shows, in words that fit its protocol."""
    if told["protocol"] == "none":
        return "One hospital's update, and what the server receives of it: there is no secure sum."
    if not np.any(told["picture"]["received"]):
        return "One hospital's update, of which other hospitals receive nothing; below: what every party recovers."
    who = "the next hospital of the chain" if told["protocol"] == "chained" else "another hospital"
    who = "a neighbour of its cluster" if told["own"] == "clusters" else who
    return f"One hospital's update, what {who} received of it, and what can be made of that."


def _hiding(told: Mapping[str, Any]) -> str:
    facts = told["facts"]
    if not facts:
        who = {
            "none": "No secure sum: the server reads every hospital's message.",
            "assumed": "A secure sum is assumed, not run: the server is taken to see the sum alone.",
        }[told["protocol"]]
        return who
    head = f"{facts['protocol']} (source: {facts['source']}). "
    if not told["hides"]:
        head += "IT HIDES NOTHING. "
    lines = [head + f"Random numbers: {facts['grade']}.", "", "Who sees what:"]
    return "\n".join([*lines, *(f"- {line}" for line in facts["threat"])])


def _losses(told: Mapping[str, Any]) -> str:
    """What was lost on the way, over the whole run."""
    total = told["totals"]
    parts = []
    if total.get("dropped"):
        parts.append(f"{_were(total['dropped'], 'update')} lost to dropouts or failures.")
    if total.get("aborted"):
        parts.append(f"{_were(total['aborted'], 'round')} aborted: too few uploads came to open the sum.")
    if total.get("saturated"):
        clip = told["facts"].get("clip")
        entries = "entry" if total["saturated"] == 1 else "entries"
        parts.append(
            f"WARNING: {total['saturated']:,.0f} {entries} beyond the range of the encoding (clip {clip:g})"
            f" {'was' if entries == 'entry' else 'were'} cut; raise --config.secure_sum.clip."
        )
    return " ".join(parts)


def _were(number: float, what: str) -> str:
    """'1 round was', '2 rounds were'."""
    return f"{communication_table.counted(number, what)} {'was' if number == 1 else 'were'}"


def applies(runs: Sequence[Run]) -> bool:
    """Whether runs have a ledger."""
    return any(run.summary.get("secrecy") for run in runs)


def side_by_side(runs: Sequence[Run], metrics: Sequence[str]) -> Table:
    """Rows: runs. Columns: metrics (means over sites), what a round costs, and what each party recovers."""
    cells = []
    for run in runs:
        told = run.summary.get("secrecy") or {}
        row = [_metric(run, metric) for metric in metrics]
        cells.append((*row, *_costs(told.get("per_round", {})), *_findings(told.get("rows", ()))))
    found = runs[0].summary["metrics"]
    columns = [("mean of sites", m) for m in metrics] + [("a round", c) for c in ("bytes", "messages", "hops", "time")]
    columns += [("recovered", c) for c in ("a neighbour", "all others of a cluster", "the server")]
    caption = (
        "Metrics: unweighted means over sites; mean ± sample standard deviation over folds and seeds. A round: what is"
        " sent up and between hospitals, sequential steps, and the time of the latency model. Recovered: the worst case"
        " over hospitals, and the cosine of the recovered with the true update, mean over hospitals; n/a where the run"
        " shows no leak."
    )
    directions = [found[m][0] for m in metrics] + [""] * 7
    rows = tuple(run.label for run in runs)
    return Table(caption, "Method", tuple(columns), rows, tuple(cells), tuple(directions), 4)


def _metric(run: Run, metric: str) -> Cell:
    return tables.summarise(values.get("mean_of_sites", math.nan) for values in replicas_of(run, metric))


def _costs(round_: Mapping[str, float]) -> list[Cell]:
    if not round_:
        return [Cell(math.nan)] * 4
    size = round_["bytes_up"] + round_["bytes_peer"]
    return [
        Cell(size, text=communication_table.size_text(size)),
        Cell(round_["messages"], text=f"{round_['messages']:,.0f}"),
        Cell(round_["hops"], text=f"{round_['hops']:.0f}"),
        Cell(round_["seconds"], text=communication_table.time_text(round_["seconds"])),
    ]


def _findings(rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    means = {row["viewer"]: row for row in rows if row["site"] == "mean"}
    cells = []
    for viewer in ("neighbour", "colluders", "server"):
        row = means.get(viewer)
        if row is None:
            cells.append(Cell(math.nan))
            continue
        cosine = "" if row["cosine"] is None else f" ({row['cosine']:.3f})"
        cells.append(Cell(math.nan if row["cosine"] is None else row["cosine"], text=row["verdict"] + cosine))
    return cells
