"""The report of one run: figures, tables, and report.md / report.html, from what the run's folder holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_seg.report import figures, tables
from fedjax_seg.report.html import Section, write_report
from fedjax_seg.report.tables import Run, Table

HEADLINE = ("accuracy", "f1", "auc")  # of the first metrics a task has, these come first in tables and figures


def tested_sites(result: Mapping[str, Any]) -> list[str]:
    """Sites that have test results, in client order (a pooled training client has none)."""
    found = {row["site"] for row in result["results"]}
    return [site for site in result["sites"] if site in found]


def headline(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that tables and figures show."""
    return tuple(m for m in HEADLINE if m in result["metrics"]) or tuple(result["metrics"])[:3]


def write(folder: Any, result: Mapping[str, Any], about: Mapping[str, Any], flow: Sequence[str]) -> None:
    """Writes figures/, report.md and report.html into a run's folder.

    Args:
      folder: the RunFolder, with metrics.jsonl and per_case.csv complete.
      result: what summary.json will hold.
      about: FederatedData.about.
      flow: the lines that tell how the cases were chosen.
    """
    rows = tables.read_rows(folder.path / "metrics.jsonl")
    run = Run(folder.path, result["label"], result["group"], result, rows, {})
    sites, shown = tested_sites(result), headline(result)
    title = f"{result['label']}{' (' + result['group'] + ')' if result['group'] else ''}"
    sections = [
        Section("Result", _result_text(result, sites), _result_tables(run, sites, shown)),
        Section("Course of the run", _course_text(result), (), _course(run, folder.path / "figures", sites, shown)),
        Section("Cases", _cases_text(about, flow), _cohort(about)),
        Section("Definitions", "\n".join(f"- `{m}`: {rule[1]}" for m, rule in result["metrics"].items())),
    ]
    write_report(folder.path, title, sections)


def _result_text(result: Mapping[str, Any], sites: Sequence[str]) -> str:
    replicas = {(row["fold"], row["seed"]) for row in result["results"]}
    text = (
        f"Model after round {result['round']}, scored on the test cases of {len(sites)} site(s),"
        f" {len(replicas)} replica(s) (folds x seeds). The last round is reported, not the best one."
    )
    wrong = result["config"].get("corruption.kind", "none")
    if wrong != "none":
        text += f" Corrupted client: {result['config']['corruption.site']} ({wrong})."
    return text + " Research software; not for clinical use."


def _result_tables(run: Run, sites: Sequence[str], shown: Sequence[str]) -> list[Table]:
    if run.summary["protocol"] == "cross_site":
        return [tables.cross_site_table(run)]
    return [tables.site_table([run], shown, sites)]


def _course(run: Run, folder: Path, sites: Sequence[str], shown: Sequence[str]) -> list[tuple[Path, str]]:
    drawn = [
        (figures.convergence({run.label: run.rows}, shown[0], folder, "convergence", sites), "Test folds over rounds."),
        (figures.site_boxes({run.label: run.summary["results"]}, shown[0], folder, "site_boxes", sites), "Last round."),
    ]
    trained = [r for r in run.rows if r["split"] == "train" and r["metric"] == "update_norm"]
    if trained:
        everyone = run.summary["sites"]
        drawn.append((figures.update_norms(trained, folder), "Norm of what every client sent."))
        drawn.append((figures.participation(trained, folder, sites=everyone), "Who trained."))
    if run.summary["protocol"] == "cross_site":
        table = tables.cross_site_table(run)
        matrix = [[cell.mean for cell in row] for row in table.cells]
        path = figures.cross_site_matrix(matrix, run.summary["sites"], folder)
        drawn.append((path, "Trained on one site, tested on another."))
    return drawn


def _course_text(result: Mapping[str, Any]) -> str:
    text = "Curves are means over folds and seeds of the held-out test cases; no curve is of training patches."
    if result["config"].get("aggregator.name") == "gyro_mean":
        text += f"\n\nThe gyro mean depends on the order of its fold; here: {', '.join(result['sites'])}."
    return text


def _cases_text(about: Mapping[str, Any], flow: Sequence[str]) -> str:
    facts = [f"- {k}: {v}" for k, v in about.items() if isinstance(v, str | int | float) and not isinstance(v, bool)]
    return "\n".join([*(f"- {line.strip()}" for line in flow if line.strip()), "", *facts])


def _cohort(about: Mapping[str, Any]) -> list[Table]:
    rows = about.get("table1", ())
    counts = {row["site"]: {k.upper(): n for k, n in row.items() if k not in ("site", "total")} for row in rows}
    return [tables.cohort_table(counts, list(next(iter(counts.values()))))] if counts else []
