"""What a secure sum costs, as tables and words: by protocol, and round by round. Takes plain rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.report.tables import Cell, Table
from fedjax_seg.report.writer import csv_text

Row = Mapping[str, Any]

LEDGER = (
    "messages", "bytes_up", "bytes_peer", "bytes_down", "hops", "seconds", "repeated", "aborted", "dropped",
    "saturated",
)  # fmt: skip
_WHERE = ("round", "fold", "seed")
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def size_text(size: float) -> str:
    """Bytes with four digits in decimal units: 158879622 -> '158.9 MB'."""
    unit, name = next((u for u in _UNITS if abs(size) >= u[0] * 0.99995), _UNITS[-1])
    return f"{_digits(size / unit)} {name}"


def time_text(seconds: float) -> str:
    """'0.82 s', '15 s', '6.2 min', '2.4 h'."""
    for most, unit, name in ((99.5, 1, "s"), (59.5 * 60, 60, "min")):
        if seconds < most:
            value = seconds / unit
            return f"{value:.2g} {name}" if value < 9.95 else f"{value:.0f} {name}"
    return f"{seconds / 3600:.2g} h" if seconds < 9.95 * 3600 else f"{seconds / 3600:.0f} h"


def counted(number: float, what: str) -> str:
    """'1 round', '2 rounds', '1,200 rounds'."""
    return f"{number:,.0f} {what}{'' if number == 1 else 's'}"


def label(row: Row, own: str = "") -> str:
    """Its name, and whether it is the run's own protocol or computed only."""
    notes = [text for said, text in ((row["key"] == own, "this run"), (row["computed"], "computed")) if said]
    return f"{row['name']} ({', '.join(notes)})" if notes else str(row["name"])


def told_of(rows: Sequence[Row], own: str, protocol: str) -> list[Row]:
    """The rows, the run's own one in the words of its protocol: the comparison has one row for scalar portions and
    additive shares, which cost the same and do not hide the same.

    Args:
      rows: of privacy.cost_comparison.comparison.
      own: key of the run's own row, '' = none of them.
      protocol: of the run, as in its config; '' = not known, the rows stay.

    Raises: UserError for an own key that is not among the rows.
    """
    if own:
        checks.one_of("communication: own", own, [row["key"] for row in rows])
    told: list[Row] = []
    for row in rows:
        words: dict[str, str] = {}
        if row["key"] == own and protocol == "smc_scalar":
            words = {"name": f"scalar portions {row['name'].removeprefix('shares ')}", "hides": "nobody"}
        elif row["key"] == own and protocol == "additive":
            words = {"hides": row["hides"].partition("; with scalar")[0]}
        elif row["key"] == own and protocol == "none":
            words = {"name": "no secure sum"}
        elif row["key"] == own and protocol == "assumed":
            words = {"name": "a secure sum, assumed", "hides": "server, by assumption"}
        told.append({**row, **words})
    return told


def comparison_table(rows: Sequence[Row], own: str = "", protocol: str = "") -> Table:
    """A row per protocol, the run's own and what is only computed named as such.

    Args: as told_of.  Raises: as told_of.
    """
    rows = told_of(rows, own, protocol)
    columns = ("sent in a round", "times plain", "messages", "steps in a row", "time of a round", "model download")
    cells = []
    for row in rows:
        cells.append(
            (
                Cell(row["bytes"], text=size_text(row["bytes"])),
                Cell(row["ratio"], text=_ratio_text(row["ratio"])),
                Cell(row["messages"], text=f"{row['messages']:,}"),
                Cell(row["hops"], text=f"{row['hops']:,}"),
                Cell(row["seconds"], text=time_text(row["seconds"])),
                Cell(row["bytes_down"], text=size_text(row["bytes_down"])),
                Cell(math.nan, text=row["hides"]),
            )
        )
    caption = (
        "What one round costs by every protocol if nobody is lost. Sent: uploads, and what hospitals exchange, directly"
        " or through the server; the model's download is apart. Times plain: of a round without a secure sum. Steps in"
        " a row: each waits for the one before. Time: of the communication alone, by the latency model (round trips,"
        " and bytes over bandwidth of the slowest site)."
    )
    sources = "".join(f" Computed, not run: {row['name']}. {row['source']}." for row in rows if row["computed"])
    headings = (*(("", name) for name in columns), ("", "a single update is hidden from"))
    labels = tuple(label(row, own) for row in rows)
    return Table(caption + sources, "Protocol", headings, labels, tuple(cells), ("",) * len(headings))


def lines(rows: Sequence[Row], own: str, places: int, entries: int, protocol: str = "") -> str:
    """Two sentences on the run's own protocol, for a report's text."""
    table = {row["key"]: row for row in told_of(rows, own, protocol)}
    mine, plain = checks.lookup(table, own, "communication: own"), table["none"]
    first = (
        f"A round of {places} hospitals, {entries:,} numbers each. {mine['name']}: {size_text(mine['bytes'])} sent in"
    )
    first += f" {mine['messages']:,} messages and {_steps(mine['hops'])}, about {time_text(mine['seconds'])}."
    if protocol == "assumed":
        return first + " What the assumed sum would send on top is not in this."
    if own == "none":
        return first + " The server sees every single update."
    second = f" That is {_ratio_text(mine['ratio'])} times what a round without a secure sum sends"
    second += f" ({size_text(plain['bytes'])}, {_steps(plain['hops'])}, {time_text(plain['seconds'])})."
    return first + second


def ledger_csv(rows: Iterable[Row]) -> str:
    """The ledger as CSV: a line per round (and replica, where rows have fold and seed), with all digits."""
    rows = list(rows)
    where = [name for name in _WHERE if any(name in row for row in rows)]
    return csv_text((*where, *LEDGER), ([row.get(name) for name in (*where, *LEDGER)] for row in rows))


def ledger_table(rows: Sequence[Row]) -> Table:
    """The ledger of a run in three rows: a round on average, the most of a round, all rounds together.

    Args:
      rows: one per round and replica, with the fields of LEDGER.

    Raises: UserError where there is none.
    """
    if not rows:
        raise checks.UserError("communication: no round in the ledger, at least one expected: was the run finished?")
    values = {name: [row[name] for row in rows] for name in LEDGER}
    summaries = (
        ("a round, on average", lambda v: sum(v) / len(v)),
        ("the most of a round", max),
        ("all together", sum),
    )
    cells = tuple(tuple(_ledger_cell(name, take(values[name])) for name in LEDGER) for _, take in summaries)
    replicas = len({tuple(row.get(name) for name in _WHERE[1:]) for row in rows})
    whole = f" of {replicas} folds and seeds" if replicas > 1 else ""
    caption = (
        f"Communication of {counted(len(rows), 'round')}{whole}, as counted from who was there. Up: to the server."
        " Peer: between hospitals, directly or through the server. Down: the model. Hops: steps that wait for each"
        " other. Repeated: exchanges of a group done again because somebody was lost. Aborted: rounds without a sum."
        " Saturated: numbers cut at the end of the encoding's range."
    )
    columns = tuple(("", name.replace("bytes_", "")) for name in LEDGER)
    labels = tuple(name for name, _ in summaries)
    return Table(caption, "Rounds", columns, labels, cells, ("",) * len(columns))


def _ledger_cell(name: str, value: float) -> Cell:
    if name.startswith("bytes_"):
        return Cell(float(value), text=size_text(value))
    if name == "seconds":
        return Cell(float(value), text=time_text(value))
    return Cell(float(value), text=f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}")


def _steps(hops: int) -> str:
    return "1 step" if hops == 1 else f"{hops:,} steps in a row"


def _ratio_text(ratio: float) -> str:
    """Three decimals close to 1, where they matter."""
    return f"{ratio:.3f}" if ratio < 2 else _digits(ratio)


def _digits(value: float) -> str:
    """Four significant digits, no exponent."""
    if value == 0:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(float(f"{value:.4g}")))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
