"""The report of a sweep: the tables and figures of many finished runs, grouped (e.g. by profile)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.report import (
    fets_figures,
    figures,
    method_table,
    privacy_figures,
    secrecy_report,
    statistics,
    system_table,
    tables,
    trade_off,
)
from fedjax_seg.report.html import Section, write_report
from fedjax_seg.report.runs import Run, headline, inside_sites, replicas_of, tested_sites
from fedjax_seg.report.tables import Table
from fedjax_seg.report.writer import write_atomic


def write(folder: Path, runs: Sequence[Run], reference: str = "FedAvg") -> Path:
    """Writes tables/ (CSV, Markdown, LaTeX), figures/, report.md and report.html; returns the path of the last.

    Args:
      folder: where to.
      runs: finished runs; those of one group are compared with each other.
      reference: the label of the method that the paired tests compare against.
    """
    groups = {group: [r for r in runs if r.group == group] for group in dict.fromkeys(run.group for run in runs)}
    made = [("cohort", table) for table in tables.cohort_tables(runs[0].summary["cohort"])]
    if len(groups) > 1 and all(run.summary["protocol"] != "cross_site" for run in runs):
        made.append(("overview", overview(groups)))
    for file, table in made:
        save(folder / "tables", file, table)
    sections = [Section("Overview", "", [table for _, table in made])] if made else []
    sections += _privacy(folder, runs)
    sections += [_group(folder, group, members, reference) for group, members in groups.items()]
    title = "Sweep: " + "; ".join(group or "runs" for group in groups)
    return write_report(folder, title, sections)[1]


def overview(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Methods by group (a profile, a kind of corruption): the first metric, as mean over sites of every replica."""
    first = next(iter(groups.values()))[0].summary
    metric, labels = headline(first)[0], list(dict.fromkeys(r.label for runs in groups.values() for r in runs))
    cells = []
    for label in labels:
        row = []
        for runs in groups.values():
            found = [r for r in runs if r.label == label]
            values = replicas_of(found[0], metric) if found else ()
            row.append(tables.summarise(tables.sites_mean(v, inside_sites(found[0].summary)) for v in values))
        cells.append(tuple(row))
    caption = f"{metric}, unweighted mean over sites: mean ± sample standard deviation over folds and seeds."
    columns = tuple(("", group or "runs") for group in groups)
    return Table(caption, "Method", columns, tuple(labels), tuple(cells), (first["metrics"][metric][0],) * len(columns))


def _privacy(folder: Path, runs: Sequence[Run]) -> list[Section]:
    """Utility against epsilon, of sweeps with several budgets."""
    if not trade_off.applies(runs):
        return []
    groups, text, made = trade_off.groups(runs), [], []
    for group, members in groups.items():
        table = trade_off.trade_off_table(members)
        save(folder / "tables", f"{_slug(group)}_trade_off", table)
        made.append(table._replace(caption=f"{group}. {table.caption}"))
        text.append(trade_off.cannot_learn(members))
    path = trade_off.figure(groups, folder / "figures")
    drawn = [(path, "Utility over the epsilon of the whole run, a panel per group; further right is less private.")]
    return [Section("Privacy against utility", "", made, drawn, remarks="\n\n".join(t for t in text if t))]


def _group(folder: Path, group: str, runs: Sequence[Run], reference: str) -> Section:
    name, made, drawn = _slug(group), [], []
    crossed = [run for run in runs if run.summary["protocol"] == "cross_site"]
    plain = [run for run in runs if run.summary["protocol"] != "cross_site"]
    for run in crossed:
        table = tables.cross_site_table(run)
        made.append((f"{name}_cross_site", table))
        matrix = [[cell.mean for cell in row] for row in table.cells]
        where = figures.cross_site_matrix(matrix, run.summary["sites"], folder / "figures", f"{name}_cross_site")
        drawn.append((where, "Trained on one site, tested on another."))
    if plain:
        sites, shown = tested_sites(plain[0].summary), headline(plain[0].summary)
        if method_table.applies(plain):
            made.append((f"{name}_methods", method_table.method_table(plain)))
            drawn += _trade_off(folder / "figures", name, plain, shown[0])
        if secrecy_report.applies(plain):
            made.append((f"{name}_side_by_side", secrecy_report.side_by_side(plain, shown)))
            drawn += secrecy_report.leakage_of_runs(plain, folder / "figures", f"{name}_leakage")
        if system_table.applies(plain):
            made.append((f"{name}_system", system_table.system_table(plain)))
            drawn += _labels(folder / "figures", name, plain) + _budgets(folder / "figures", name, plain, shown[0])
        made.append((f"{name}_sites", tables.site_table(plain, shown, sites)))
        if any(run.label == reference for run in plain) and len(plain) > 1:
            made.append((f"{name}_paired_test", statistics.comparison_table(plain, reference)))
        drawn += _methods(folder / "figures", name, plain, sites, shown[0])
        drawn += _curvature(folder / "figures", name, plain, shown[0], inside_sites(plain[0].summary))
    for file, table in made:
        save(folder / "tables", file, table)
    text = f"{len(runs)} run(s): " + "; ".join(f"{run.label} (round {run.summary['round']})" for run in runs)
    return Section(group or "Runs", text, [table for _, table in made], drawn)


def _trade_off(folder: Path, name: str, runs: Sequence[Run], metric: str) -> list[Any]:
    points = method_table.points(runs)
    if len(points) < 2:
        return []
    look = {"x_label": "AUC of the strongest membership attack", "y_label": metric}
    path = privacy_figures.privacy_utility(points, folder, f"{name}_privacy_utility", **look)
    which = f"Every method's strongest attack on its last model ({method_table.attacks_of_points(runs)})"
    return [(path, f"What every method leaks against what it achieves. {which}: the one farthest from 0.5.")]


def _labels(folder: Path, name: str, runs: Sequence[Run]) -> list[Any]:
    """DP-SimAgg's Figure 4: the soft Dice of every label over the rounds."""
    metrics = [m for m in runs[0].summary["metrics"] if m.startswith(system_table.PER_LABEL)]
    if not metrics or len(runs) > 12:
        return []
    rows = {run.label: run.rows for run in runs}
    path = fets_figures.metric_panels(rows, metrics, folder, f"{name}_labels", site="pooled")
    return [(path, "Soft Dice of every label over the rounds, all held-out cases pooled.")]


def _budgets(folder: Path, name: str, runs: Sequence[Run], metric: str) -> list[Any]:
    """Utility over the privacy budget of the whole run, for every private rule; the line is the first run without."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    without, delta = None, None
    for run in runs:
        cell, guarantee = method_table.utility(run, metric), run.summary.get("privacy") or {}
        std = float("nan") if cell.std is None else cell.std
        if guarantee.get("epsilon") is not None:
            delta = guarantee["delta"]
            curves.setdefault(run.label.partition(", eps")[0], []).append((guarantee["epsilon"], cell.mean, std))
        elif not guarantee and without is None:
            without = (cell.mean, std)
    if not curves:
        return []
    path = fets_figures.epsilon_utility(
        curves, folder, f"{name}_epsilon_utility", without=without, y_label=metric, delta=delta
    )  # fmt: skip
    return [(path, "What a privacy budget costs. Rows without a guarantee have no place here.")]


def _methods(folder: Path, name: str, runs: Sequence[Run], sites: Sequence[str], metric: str) -> list[Any]:
    unique = {run.label: run for run in runs}
    if len(unique) > 12:  # a grid of settings: lines would cover each other
        return []
    external, rows = runs[0].summary.get("external", ()), {k: r.rows for k, r in unique.items()}
    curves = figures.convergence(rows, metric, folder, f"{name}_convergence", sites, external=external)
    last = {k: r.summary["results"] for k, r in unique.items()}
    boxes = figures.site_boxes(last, metric, folder, f"{name}_boxes", sites)
    drawn = [(curves, "Test folds over rounds; band: one standard deviation."), (boxes, "Last round.")]
    for run in runs[:1]:
        trained = [r for r in run.rows if r["split"] == "train" and r["metric"] == "update_norm"]
        if trained:
            title = f"Norm of the clients’ updates, {run.label}"
            path = figures.update_norms(trained, folder, f"{name}_update_norms", title)
            drawn.append((path, "The spread of update norms between sites that the paper's discussion names."))
    return drawn


def _curvature(folder: Path, name: str, runs: Sequence[Run], metric: str, sites: Sequence[str]) -> list[Any]:
    """A map over c and gamma for every hyperbolic method with several settings."""
    drawn = []
    by_method: dict[str, dict[tuple[float, float], float]] = {}
    for run in runs:
        options = run.summary["config"]
        if "aggregator.c" not in options:
            continue
        method = f"{options['aggregator.name']} on {options['aggregator.of']}"
        mean = tables.summarise(tables.sites_mean(v, sites) for v in replicas_of(run, metric)).mean
        by_method.setdefault(method, {})[options["aggregator.c"], options["aggregator.gamma"]] = mean
    for method, found in by_method.items():
        if len(found) < 3:
            continue
        c, gamma = sorted({k[0] for k in found}), sorted({k[1] for k in found})
        values = np.array([[found.get((a, b), np.nan) for b in gamma] for a in c])
        file, title = f"{name}_{_slug(method)}_map", f"{method}: curvature c and scale gamma"
        path = figures.sweep_map(c, gamma, values, folder, file, metric, title)
        drawn.append((path, "Mean over sites, folds and seeds."))
    return drawn


def save(folder: Path, name: str, table: Table) -> None:
    """The table as CSV, Markdown and LaTeX (booktabs)."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("csv", tables.to_csv), ("md", tables.to_markdown), ("tex", tables.to_latex)):
        write_atomic(folder / f"{name}.{suffix}", text(table).encode())


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text).strip("_") or "runs"
