"""Tables of finished runs: methods by site and metric, cross-site accuracy, the cohort; as CSV, Markdown and LaTeX."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.runs import Run, replicas_of, values_of
from fedjax_seg.report.writer import csv_text

_ABBREVIATIONS = ("asd", "hc")
SUMMARIES = {"mean_of_sites": "mean of sites", "worst_site": "worst site", "pooled": "pooled cases"}


class Cell(NamedTuple):
    """mean and sample standard deviation (None where not defined) of n values; `text` replaces the printed numbers."""

    mean: float
    std: float | None = None
    n: int | None = None
    text: str | None = None


class Table(NamedTuple):
    """A table of R rows and M columns.

    Attributes:
      caption: says what the numbers are, what +/- is, and n.
      corner: the heading of the column of labels.
      columns: M pairs (group, name); equal neighbouring groups share a heading, '' is no group.
      labels: R row labels.
      cells: R rows of M Cells.
      directions: M times 'max', 'min' or '' (no best is marked).
      digits: decimals printed; the best is found among the printed values, so that equal prints are equal.
    """

    caption: str
    corner: str
    columns: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    directions: tuple[str, ...]
    digits: int = 3


def summarise(values: Iterable[float]) -> Cell:
    """Mean, sample standard deviation (n - 1; None for one value) and n of the values that are not NaN."""
    kept = np.array([v for v in values if not math.isnan(v)], float)
    if len(kept) == 0:
        return Cell(math.nan, None, 0)
    return Cell(float(kept.mean()), float(kept.std(ddof=1)) if len(kept) > 1 else None, len(kept))


def sites_mean(by_site: Mapping[str, float], sites: Iterable[str]) -> float:
    """Unweighted mean over the sites that have a value; NaN where none has."""
    kept = [by_site[s] for s in sites if s in by_site and not math.isnan(by_site[s])]
    return float(np.mean(kept)) if kept else math.nan


def site_table(
    runs: Sequence[Run], metrics: Sequence[str] = ("accuracy", "f1", "auc"), sites: Sequence[str] | None = None
) -> Table:
    """Methods by (site, metric), and the mean over sites last.

    Source: FedHAvg, Table 3. Deviation: the standard deviation and the mean over sites are added; the paper gives
    neither.

    Args:
      runs: one row each.
      metrics: names as in the results; all must be in the runs' 'metrics'.
      sites: default the sites of the first run.

    Returns: a Table whose cells are over folds and seeds. A NaN (e.g. the AUC of a one-class test fold) is left out of
      its site's cell, and out of the mean over sites of that fold and seed.
    """
    if not runs:
        raise UserError("table: no finished run given")
    sites = tuple(sites or runs[0].summary["sites"])
    inside = [s for s in sites if s not in runs[0].summary.get("external", ())]
    for run in runs:
        unknown = [m for m in metrics if m not in run.summary["metrics"]]
        if unknown:
            known = ", ".join(sorted(run.summary["metrics"]))
            raise UserError(f"table: run {run.folder} has no metric {unknown[0]!r}; it has {known}")
    cells = []
    for run in runs:
        values = {m: replicas_of(run, m) for m in metrics}
        row = [summarise(v.get(s, math.nan) for v in values[m]) for s in sites for m in metrics]
        row += [summarise(sites_mean(v, inside) for v in values[m]) for m in metrics]
        cells.append(tuple(row))
    definitions = [f"{m}: {runs[0].summary['metrics'][m][1]}" for m in metrics]
    caption = (
        f"Test results per site and their unweighted mean over {len(inside)} sites. {_spread(cells)}"
        f" Best in bold, second best underlined. {'; '.join(definitions)}."
    )
    directions = [runs[0].summary["metrics"][m][0] for m in metrics] * (len(sites) + 1)
    columns = [(group, m) for group in (*sites, "Mean over sites") for m in metrics]
    labels = tuple(run.label for run in runs)
    return Table(caption, "Method", tuple(columns), labels, tuple(cells), tuple(directions))


def run_table(run: Run, metrics: Sequence[str], sites: Sequence[str]) -> Table:
    """One run: sites, external ones last, then their mean, the worst and the pooled cases, by metric.

    Beside the metrics stand the counts that the task keeps (such as n_missed, lesions not found at all), as means over
    replicas, and how many cases a replica has there.
    """
    counts = [m for m, (direction, _) in run.summary["metrics"].items() if not direction]
    results = [r for r in run.summary["results"] if r["split"] == "test"]
    names = {s: f"{s} (external)" if s in run.summary.get("external", ()) else s for s in sites} | SUMMARIES
    found = {s: [r for r in results if r["site"] == s] for s in names}
    cells = []
    for site in (s for s in names if found[s]):
        row = [summarise(r["value"] for r in found[site] if r["metric"] == m) for m in metrics]
        for m in counts:
            mean = summarise(r["value"] for r in found[site] if r["metric"] == m).mean
            row.append(Cell(mean, text="-" if site in ("mean_of_sites", "worst_site") else f"{mean:g}"))
        n = max((r["n"] for r in found[site]), default=0)
        row.append(Cell(n, text=f"{n} sites" if site in ("mean_of_sites", "worst_site") else str(n)))
        cells.append(tuple(row))
    labels = tuple(names[s] for s in names if found[s])
    caption = (
        f"Test results of the last round. {_spread(cells)} The last three rows leave external sites out; definitions:"
        " at the end."
    )
    columns = tuple(("", m) for m in (*metrics, *counts, "cases"))
    return Table(caption, "Site", columns, labels, tuple(cells), ("",) * len(columns))


def _spread(cells: Sequence[Sequence[Cell]]) -> str:
    n = max((c.n or 0 for row in cells for c in row), default=0)
    return (
        f"Mean ± sample standard deviation over folds and seeds; n = {n} (fold, seed) pairs, or as given in the cell"
        " where some have no value."
    )


def cross_site_table(run: Run, metric: str = "accuracy", prefix: str = "train_") -> Table:
    """Trained on one site (rows), tested on each of the others (columns).

    Source: FedHAvg, Table 2. Deviation: none; cells are over seeds.

    Args:
      run: its folds are named `<prefix><site>`; a site it was trained on has no value and prints as '-'.
    """
    sites = tuple(run.summary["sites"])
    values = values_of(run.summary["results"], metric)
    rows = []
    for trained in sites:
        seeds = [v for (fold, _), v in values.items() if fold == prefix + trained]
        cells = [summarise(v.get(s, math.nan) for v in seeds) for s in sites]
        rows.append(tuple(Cell(c.mean, c.std, c.n, "-") if s == trained else c for s, c in zip(sites, cells)))
    others = [c for t, row in zip(sites, rows) for s, c in zip(sites, row) if s != t]
    if not any(c.n for c in others):
        raise UserError(f"cross-site table: run {run.folder} has no fold named {prefix}<site> with {metric}")
    n = max(c.n or 0 for c in others)
    caption = (
        f"{metric} of models trained on one site (rows) and tested on all cases of another (columns); n = {n} seed(s)"
    )
    caption += ", mean ± sample standard deviation." if n > 1 else "."
    labels = tuple(f"{s}-trained" for s in sites)
    return Table(caption, "Site", tuple(("", s) for s in sites), labels, tuple(rows), ("",) * len(sites))


def cohort_table(counts: Mapping[str, Mapping[str, int]], classes: Sequence[str]) -> Table:
    """Cases per site and kind (class, role, ...), with the share of each kind, and the total.

    Source: FedHAvg, Table 1.

    Args:
      counts: {site: {kind: cases}} in the order of the rows.
      classes: the kinds in the order of the columns.
    """
    table = {site: [row.get(c, 0) for c in classes] for site, row in counts.items()}
    if len(table) > 1:
        table["Total"] = [sum(column) for column in zip(*table.values())]
    rows = []
    for numbers in table.values():
        total = sum(numbers)
        shares = [f" ({100 * k / total:.1f} %)" if total else "" for k in numbers]
        texts = [f"{k}{share}" for k, share in zip(numbers, shares)]
        rows.append((Cell(total, text=str(total)), *(Cell(k, text=t) for k, t in zip(numbers, texts))))
    columns = tuple(("", name) for name in ("Total", *classes))
    caption = "Cases per site and kind, with the kind's share of the site."
    return Table(caption, "Site", columns, tuple(table), tuple(rows), ("",) * len(columns))


def cohort_tables(rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """The cohort table of rows {'site', 'total', class: cases, ...}; none where there are no rows."""
    named = lambda kind: kind.upper() if kind in _ABBREVIATIONS else kind
    counts = {row["site"]: {named(k): n for k, n in row.items() if k not in ("site", "total")} for row in rows}
    return [cohort_table(counts, list(next(iter(counts.values()))))] if counts else []


def cell_text(cell: Cell, table: Table) -> str:
    """'0.700 ± 0.034', with ' (n=4)' where n is below the table's largest n, 'n/a' where there is no value."""
    if cell.text is not None:
        return cell.text
    if math.isnan(cell.mean):
        return "n/a"
    usual = max((c.n or 0 for row in table.cells for c in row), default=0)
    spread = "" if cell.std is None else f" ± {cell.std:.{table.digits}f}"
    count = "" if cell.n is None or cell.n == usual else f" (n={cell.n})"
    return f"{cell.mean:.{table.digits}f}{spread}{count}"


def marks(table: Table) -> list[list[str]]:
    """'best', 'second' or '' per cell; ties share a mark, and a column without differences has none."""
    out = [["" for _ in table.columns] for _ in table.labels]
    for j, direction in enumerate(table.directions):
        printed = [round(row[j].mean, table.digits) for row in table.cells]
        ranked = sorted({v for v in printed if not math.isnan(v)}, reverse=direction == "max")
        if not direction or len(ranked) < 2:
            continue
        for i, value in enumerate(printed):
            out[i][j] = "best" if value == ranked[0] else "second" if value == ranked[1] else ""
    return out


def to_csv(table: Table) -> str:
    """All digits; a column of means is followed by its std and n where it has them."""
    header, getters = [table.corner], []
    for j, (group, name) in enumerate(table.columns):
        title = f"{group} {name}".strip()
        column = [row[j] for row in table.cells]
        header.append(title)
        getters.append((j, "mean"))
        for part in ("std", "n"):
            if any(getattr(cell, part) is not None for cell in column):
                header.append(f"{title} {part}")
                getters.append((j, part))
    rows = ([label, *(getattr(row[j], part) for j, part in getters)] for label, row in zip(table.labels, table.cells))
    return csv_text(header, rows)


def to_markdown(table: Table) -> str:
    """A pipe table: best **bold**, second <u>underlined</u>; the caption below."""
    style = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    header = [table.corner, *(f"{group} {name}".strip() for group, name in table.columns)]
    lines = [header, ["---", *("---:" for _ in table.columns)]]
    for label, row, mark in zip(table.labels, table.cells, marks(table)):
        lines.append([label, *(style[m].format(cell_text(c, table)) for c, m in zip(row, mark))])
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{body}\n\n{table.caption}\n"


def to_latex(table: Table) -> str:
    """A booktabs table environment: best \\textbf, second \\underline. Needs \\usepackage{booktabs}."""
    style = {"best": "\\textbf{{{}}}", "second": "\\underline{{{}}}", "": "{}"}
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{_tex(table.caption)}}}"]
    lines += [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", "\\toprule"]
    spans = column_groups(table)
    if any(group for group, _ in spans):
        lines.append(" & ".join(["", *(f"\\multicolumn{{{n}}}{{c}}{{{_tex(g)}}}" for g, n in spans)]) + " \\\\")
        start = 2
        for group, n in spans:
            lines += [f"\\cmidrule(lr){{{start}-{start + n - 1}}}"] if group else []
            start += n
    lines += [" & ".join(_tex(h) for h in (table.corner, *(name for _, name in table.columns))) + " \\\\", "\\midrule"]
    for label, row, mark in zip(table.labels, table.cells, marks(table)):
        cells = (style[m].format(_tex(cell_text(c, table))) for c, m in zip(row, mark))
        lines.append(" & ".join([_tex(label), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]) + "\n"


def column_groups(table: Table) -> list[tuple[str, int]]:
    """[(group, number of neighbouring columns in it)]."""
    spans: list[tuple[str, int]] = []
    for group, _ in table.columns:
        if spans and spans[-1][0] == group:
            spans[-1] = (group, spans[-1][1] + 1)
        else:
            spans.append((group, 1))
    return spans


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    special |= {"Δ": r"$\Delta$", "γ": r"$\gamma$", "≤": r"$\leq$", "<": r"$<$", ">": r"$>$"}
    special |= {c: "\\" + c for c in "&%$#_{}"}
    return "".join(special.get(c, c) for c in text)
