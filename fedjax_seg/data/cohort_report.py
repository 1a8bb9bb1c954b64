"""The flow of subjects of a cohort as text: lines to print, and the CSV and JSON files a run saves."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_seg.data.folds import Folds
from fedjax_seg.data.pcp_series import Connectomes
from fedjax_seg.data.phenotypic import ASD, CONTROL, Selection, Subject

_LISTED = 5  # ids named in one summary line; the rest is in the files


def counts(subjects: Iterable[Subject]) -> dict[str, int]:
    """{'total', 'asd', 'hc'} of the subjects."""
    of = Counter(s.diagnosis for s in subjects)
    return {"total": of.total(), "asd": of[ASD], "hc": of[CONTROL]}


def table1(selection: Selection) -> list[dict[str, Any]]:
    """A row per site in client order: site, total, asd, hc (the form of the FedHAvg paper's Table 1)."""
    return [{"site": site} | counts(s for s in selection.kept if s.site == site) for site in selection.sites]


def files(selection: Selection, connectomes: Connectomes, folds: Folds) -> dict[str, str]:
    """{file name: text}: the flow per step and site, the cohort, the excluded rows with their reasons, the folds."""
    everyone = selection.steps[0].subjects
    sites = [*selection.sites, *sorted({s.site for s in everyone} - set(selection.sites))]
    flow = [
        (step.name, site, *counts(s for s in step.subjects if site in ("all", s.site)).values())
        for step in selection.steps
        for site in ("all", *sites)
    ]
    fold_of = {case: i for lists in folds.values() for i, one in enumerate(lists) for case in one}
    cohort = [
        (
            *(s.file_id, s.sub_id, s.site, "ASD" if s.diagnosis == ASD else "control", s.diagnosis, s.mean_fd),
            *(fold_of[s.file_id], connectomes.lengths[s.file_id], connectomes.bad_rois[s.file_id]),
        )
        for s in selection.kept
    ]
    excluded = [(s.line, s.file_id, s.sub_id, s.site, reason) for s, reason in selection.excluded]
    columns = ["file_id", "sub_id", "site", "dx", "y", "mean_fd", "fold", "time_points", "bad_rois"]
    return {
        "cohort_flow.csv": _csv(["step", "site", "subjects", "asd", "hc"], flow),
        "cohort.csv": _csv(columns, cohort),
        "cohort_excluded.csv": _csv(["line", "file_id", "sub_id", "site", "reason"], excluded),
        "folds.json": json.dumps(folds, indent=1) + "\n",
    }


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def summary(selection: Selection, connectomes: Connectomes, folds: Folds, about: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines to print: the flow, the sites with their test folds, the features, and all that deserves a warning."""
    flow = [("flow of subjects", "total", "ASD", "HC", "dropped because")]
    for before, step in zip((selection.steps[0], *selection.steps), selection.steps):
        gone = set(before.subjects) - set(step.subjects)
        why = Counter(reason for s, reason in selection.excluded if s in gone)
        flow.append((step.name, *_numbers(step.subjects), ", ".join(f"{r} {n}" for r, n in why.most_common())))
    persons = {s.file_id: s for s in selection.kept}
    sites = [("site (client order)", "total", "ASD", "HC", "time points", "ASD/HC of the test folds")]
    one_class = []
    for site, lists in folds.items():
        own = [persons[case] for one in lists for case in one]
        lengths = sorted({connectomes.lengths[s.file_id] for s in own})
        span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
        tested = [counts(persons[case] for case in one) for one in lists]
        one_class += [f"{site} fold{i}" for i, n in enumerate(tested) if not (n["asd"] and n["hc"])]
        sites.append((site, *_numbers(own), span, " ".join(f"{n['asd']}/{n['hc']}" for n in tested)))
    edges = about["edges"]
    lines = [
        *_aligned(flow),
        "",
        *_aligned(sites),
        "",
        f"features: {about['features']}, {about['n_features']} edges of {about['n_rois']} ROIs, atlas {about['atlas']}",
        f"folds: {about['folds']['n']}, {about['folds']['origin']}",
        f"constant or NaN ROIs ({about['bad_roi_rule']}): {len(about['bad_rois'])} subjects,"
        f" {edges['zeroed']} of {edges['total']} edges set to 0",
    ]
    if about["phenotypic"]["delimiter"] != ",":
        lines.append(f"note: {about['phenotypic']['file']} is separated by {about['phenotypic']['delimiter']!r}")
    for site, ids in about["missing_series"].items():
        more = ", ..." if len(ids) > _LISTED else ""
        lines.append(f"note: {len(ids)} subjects of {site} have no series file: {', '.join(ids[:_LISTED])}{more}")
    lines += [f"note: site {site} dropped, {n} usable subjects" for site, n in about["dropped_sites"].items()]
    if about["files_outside_cohort"]:
        lines.append(f"note: {about['files_outside_cohort']} series files of subjects outside the cohort are not read")
    if one_class:
        lines.append(f"note: test folds of one class, AUC is not defined there: {', '.join(one_class)}")
    return tuple(lines)


def _numbers(subjects: Iterable[Subject]) -> tuple[str, str, str]:
    n = counts(subjects)
    return str(n["total"]), str(n["asd"]), str(n["hc"])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other: the first and the last to the left, numbers between them to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
