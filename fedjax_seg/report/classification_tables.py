"""Classification metrics with their intervals, site by site."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.tables import SUMMARIES, Cell, Table
from fedjax_seg.report.writer import csv_text

INTERVAL_KEYS = ("site", "metric", "value", "low", "high", "n", "patients", "resamples")


def interval_table(
    rows: Iterable[Mapping[str, Any]],
    metrics: Sequence[str],
    external: Collection[str] = (),
    resamples: int = 1000,
    alone: tuple[str, str] | None = None,
) -> Table:
    """Sites by metric, '.912 [.88-.94]', then how many patients and cases a site tests on.

    Args:
      rows: INTERVAL_KEYS each, of one fold and seed, as in Task.intervals with the site; 'pooled' is a site of its own.
      metrics: the columns; a metric that a site has no row of prints as '-'.
      external: sites that did not train; marked.
      resamples: how many were drawn; where a metric was defined in fewer of them the cell says in how many.
      alone: where nothing tells which cases belong together: what a case is, and what it is a part of, such as
        ('tile', 'slide'). There is one column of counts then, and the caption says that the intervals are too narrow.

    Raises: UserError where a site has two rows of a metric.
    """
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        of_site = found.setdefault(row["site"], {})
        if row["metric"] in of_site:
            raise UserError(
                f"intervals: site {row['site']!r}: two rows of {row['metric']!r} found, one expected; give the rows of"
                " one fold and seed"
            )
        of_site[row["metric"]] = row
    cells = []
    for of_site in found.values():
        line = [_cell(of_site.get(metric), resamples) for metric in metrics]
        for what in ("n",) if alone else ("patients", "n"):
            most = max(row[what] for row in of_site.values())
            line.append(Cell(most, text=str(most)))
        cells.append(tuple(line))
    named = {site: SUMMARIES.get(site, f"{site} (external)" if site in external else site) for site in found}
    one, whole = alone or ("patient", "")
    columns = tuple(("", name) for name in (*metrics, f"{one}s", *(() if alone else ("cases",))))
    drawn = f"single {one}s" if alone else "patients with all of their cases"
    narrow = (
        f" THE INTERVALS ARE TOO NARROW: nothing tells which {one}s are of one {whole}, and {one}s of one {whole} are"
        " not independent."
    )
    caption = (
        f"Value and 95 % interval: percentiles over {resamples} bootstrap resamples, in which {drawn} are drawn with"
        f" replacement.{narrow if alone else ''} It tells how much the choice of test {one}s decides, not how much"
        " another training run would change. Where a metric is not defined in some resamples (one class only), their"
        f" number is in brackets; one {one} has no interval."
    )
    return Table(caption, "Site", columns, tuple(named.values()), tuple(cells), ("",) * len(columns))


def interval_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """All digits of the rows of `interval_table`, as CSV with the columns INTERVAL_KEYS."""
    return csv_text(INTERVAL_KEYS, ([row[key] for key in INTERVAL_KEYS] for row in rows))


def interval_text(value: float, low: float, high: float) -> str:
    """'.912 [.88-.94]'; 'n/a' without a value, '.912 [n/a]' without an interval."""
    if math.isnan(value):
        return "n/a"
    if math.isnan(low) or math.isnan(high):
        return f"{_bare(value, 3)} [n/a]"
    return f"{_bare(value, 3)} [{_bare(low, 2)}-{_bare(high, 2)}]"


def _cell(row: Mapping[str, Any] | None, resamples: int) -> Cell:
    if row is None:
        return Cell(math.nan, text="-")
    text = interval_text(row["value"], row["low"], row["high"])
    if 0 < row["resamples"] < resamples:
        text += f" ({row['resamples']} resamples)"
    return Cell(row["value"], text=text)


def _bare(value: float, digits: int) -> str:
    """Without the 0 before the point: '.91', '1.00', '-.05'."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
