"""The report of one run: figures, tables, and report.md / report.html, from what the run's folder holds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_seg.report import (
    classification_tables,
    confusion,
    fets_figures,
    figures,
    inversion_report,
    privacy_report,
    scans,
    secrecy_report,
    system_table,
    tables,
)
from fedjax_seg.report.html import Section, write_report
from fedjax_seg.report.pictures import Pictures, VolumePictures
from fedjax_seg.report.runs import Run, headline, tested_sites
from fedjax_seg.report.tables import Table


def write(
    folder: Any,
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    flow: Sequence[str],
    pictures: Pictures | VolumePictures | None = None,
) -> None:
    """Writes figures/, report.md and report.html into a run's folder.

    Args:
      folder: the RunFolder.
      result: what summary.json will hold.
      rows: all rows of metrics.jsonl.
      about: FederatedData.about.
      flow: the lines that tell how the cases were chosen.
      pictures: of cases, where they may be shown.
    """
    run = Run(folder.path, result["label"], result["group"], result, rows, {})
    sites, shown = tested_sites(result), headline(result)
    title = f"{result['label']}{' (' + result['group'] + ')' if result['group'] else ''}"
    drawn = folder.path / "figures"
    sections = [
        Section(
            "Result",
            _result_text(result, rows, sites),
            _result_tables(run, sites, shown),
            _overlays(pictures, drawn),
            remarks=_warnings(about),
        ),
        *_classified(result, about, drawn),
        *privacy_report.sections(run, drawn),
        *inversion_report.sections(run, drawn),
        *secrecy_report.sections(run, drawn),
        *([Section("Cost", "", [system_table.system_table([run])])] if system_table.applies([run]) else []),
        Section("Course of the run", _course_text(result), (), _course(run, drawn, sites, shown)),
        Section(
            "Cases",
            _cases_text(about),
            tables.cohort_tables(result["cohort"]),
            _institutions(result, about, drawn) + _examples(pictures, drawn),
            "\n".join(flow),
        ),
        Section("Definitions", "\n".join(f"- `{m}`: {rule[1]}" for m, rule in result["metrics"].items())),
    ]
    write_report(folder.path, title, sections)


INTERVALS = ("accuracy", "f1", "auc", "balanced_accuracy", "ece")


def _classified(result: Mapping[str, Any], about: Mapping[str, Any], folder: Path) -> list[Section]:
    """Intervals and confusion matrices of classifiers."""
    if not result.get("intervals"):
        return []
    alone = _alone(about)
    table = classification_tables.interval_table(result["intervals"], INTERVALS, result["external"], alone=alone)
    path = confusion.confusion_figure(result["confusion"], result["classes"], folder)
    drawn = [(path, "Truth by prediction, the last model's test cases of all folds and seeds.")]
    replicas = {(row["fold"], row["seed"]) for row in result["results"]}
    text = "" if len(replicas) == 1 else "The table is of the first fold and seed."
    return [Section("Classes", text, [table], drawn)]


def _alone(about: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a case is, and of what it is a part, where the data do not tell which ones belong together."""
    text = str(about.get("patients", ""))
    if not text.startswith("none"):
        return None
    return ("tile", "slide") if "tiles" in text else ("slide", "patient") if "slide" in text else ("image", "patient")


def _warnings(about: Mapping[str, Any]) -> str:
    """What readers of the result must know of the data: all warnings, and where nobody tells the patients that."""
    lines = [*about.get("warnings", ())]
    if _alone(about):
        lines.append(f"Patients: {about['patients']}.")
    return "\n\n".join(lines)


def _overlays(pictures: Pictures | VolumePictures | None, folder: Path) -> list[tuple[Path, str]]:
    if isinstance(pictures, VolumePictures):
        if not pictures.cases:
            return []
        path = fets_figures.segmentations(
            pictures.cases, pictures.classes, folder, orientation=pictures.orientation
        )  # fmt: skip
        return [(path, "Test cases: the worst, the middle and the best ones; truth, then prediction.")]
    if not pictures or not pictures.overlays:
        return []
    path = scans.overlays(pictures.overlays, folder)
    return [(path, "Test cases: the worst, the middle and the best ones by the metric that is printed above each.")]


def _examples(pictures: Pictures | VolumePictures | None, folder: Path) -> list[tuple[Path, str]]:
    if isinstance(pictures, VolumePictures):
        if pictures.example is None:
            return []
        one, side = pictures.example, pictures.orientation
        names = pictures.channels, pictures.classes
        path = fets_figures.modalities(
            one.image, one.truth, *names, folder, title=one.title, spacing=one.spacing, orientation=side
        )
        return [(path, "A training case: its channels, and its annotation.")]
    if not pictures or not pictures.examples:
        return []
    return [(scans.examples(pictures.examples, folder), "What the sites train on.")]


def _institutions(result: Mapping[str, Any], about: Mapping[str, Any], folder: Path) -> list[tuple[Path, str]]:
    """Patients per institution, of federations of volumes."""
    if "channels" not in about or not result["cohort"]:
        return []
    sizes = {str(row["site"]): (row["train"], row["test"]) for row in result["cohort"]}
    return [(fets_figures.institutions(sizes, folder), "Patients per institution.")]


def changed(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many rounds changed the model, and how many there were, of all folds and seeds.

    A round without an update does not, nor one whose secure sum was aborted. Under central differential privacy a round
    without an update gets its noise all the same.
    """
    place = lambda row: (row["round"], str(row["fold"]), str(row["seed"]))
    replicas = {(str(row["fold"]), str(row["seed"])) for row in result["results"]}
    every = {(t + 1, *replica) for t in range(result["round"]) for replica in replicas}
    of = lambda split, metric: [row for row in rows if row["split"] == split and row["metric"] == metric]
    moved = every
    if not (result.get("privacy") or {}).get("formal"):
        moved = {place(row) for row in of("train", "update_norm") if math.isfinite(row["value"])}
    aborted = {place(row) for row in of(secrecy_report.SPLIT, "aborted") if row["value"] > 0}
    return len((every & moved) - aborted), len(every)


def _result_text(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], sites: Sequence[str]) -> str:
    replicas = {(row["fold"], row["seed"]) for row in result["results"]}
    text = (
        f"Model after round {result['round']}, scored on the test cases of {len(sites)} site(s),"
        f" {len(replicas)} replica(s) (folds x seeds). The last round is reported, not the best one."
    )
    some, every = changed(result, rows)
    if some < every:
        whole = " of all folds and seeds" if len(replicas) > 1 else ""
        text += f" {some} of {every} rounds{whole} changed the model."
    wrong = result["config"].get("corruption.kind", "none")
    if wrong != "none":
        text += f" Corrupted client: {result['config']['corruption.site']} ({wrong})."
    return text + " Research software; not for clinical use."


def _result_tables(run: Run, sites: Sequence[str], shown: Sequence[str]) -> list[Table]:
    if run.summary["protocol"] == "cross_site":
        return [tables.cross_site_table(run)]
    return [tables.run_table(run, shown, sites)]


def _course(run: Run, folder: Path, sites: Sequence[str], shown: Sequence[str]) -> list[tuple[Path, str]]:
    drawn: list[tuple[Path, str]] = []
    if run.summary["protocol"] == "cross_site":
        table = tables.cross_site_table(run)
        matrix = [[cell.mean for cell in row] for row in table.cells]
        path = figures.cross_site_matrix(matrix, run.summary["sites"], folder)
        drawn.append((path, "Trained on one site, tested on another."))
    else:
        external = run.summary.get("external", ())
        curves = figures.convergence({run.label: run.rows}, shown[0], folder, "convergence", sites, external=external)
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
