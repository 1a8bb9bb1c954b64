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


def write(
    folder: Any,
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    flow: Sequence[str],
) -> None:
    """Writes figures/, report.md and report.html into a run's folder.

    Args:
      folder: the RunFolder.
      result: what summary.json will hold.
      rows: all rows of metrics.jsonl.
      about: FederatedData.about.
      flow: the lines that tell how the cases were chosen.
    """
    run = Run(folder.path, result["label"], result["group"], result, rows, {})
    sites, shown = tested_sites(result), headline(result)
    title = f"{result['label']}{' (' + result['group'] + ')' if result['group'] else ''}"
    sections = [
        Section("Result", _result_text(result, sites), _result_tables(run, sites, shown)),
        Section("Course of the run", _course_text(result), (), _course(run, folder.path / "figures", sites, shown)),
        Section("Cases", _cases_text(about), tables.cohort_tables(result["cohort"]), listing="\n".join(flow)),
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
    drawn: list[tuple[Path, str]] = []
    if run.summary["protocol"] == "cross_site":
        table = tables.cross_site_table(run)
        matrix = [[cell.mean for cell in row] for row in table.cells]
        path = figures.cross_site_matrix(matrix, run.summary["sites"], folder)
        drawn.append((path, "Trained on one site, tested on another."))
    else:
        curves = figures.convergence({run.label: run.rows}, shown[0], folder, "convergence", sites)
        boxes = figures.site_boxes({run.label: run.summary["results"]}, shown[0], folder, "site_boxes", sites)
        drawn += [(curves, "Test folds over rounds."), (boxes, "Last round.")]
    trained = [r for r in run.rows if r["split"] == "train" and r["metric"] == "update_norm"]
    if trained:
        drawn.append((figures.update_norms(trained, folder), "Norm of what every client sent."))
        if run.summary["config"]["sampler.name"] != "full":
            path = figures.participation(trained, folder, sites=run.summary["sites"])
            drawn.append((path, "Who trained in which round."))
    return drawn


def _course_text(result: Mapping[str, Any]) -> str:
    text = "Curves are means over folds and seeds of the held-out test cases; no curve is of training patches."
    times = ", ".join(f"{site} {count}" for site, count in result["participation"].items())
    text += f"\n\nRounds in which a site trained, summed over folds and seeds: {times}."
    if result["config"].get("aggregator.name") == "gyro_mean":
        text += f"\n\nThe gyro mean depends on the order of its fold; here: {', '.join(result['sites'])}."
    return text


def _cases_text(about: Mapping[str, Any]) -> str:
    facts = [f"- {k}: {v}" for k, v in about.items() if isinstance(v, str | int | float) and not isinstance(v, bool)]
    return "\n".join(facts)
