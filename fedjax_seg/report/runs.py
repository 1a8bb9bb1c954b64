"""A finished run as read from its folder, and the values of its replicas."""

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.writer import CASE_KEYS


class Run(NamedTuple):
    """A finished run as read from its folder.

    Attributes:
      folder: absolute path.
      label: the name of the method in tables.
      group: runs of one group are compared with each other (e.g. the profile).
      summary: summary.json; 'results' are the rows of the last evaluation, 'metrics' {name: [direction, definition]}.
      rows: metrics.jsonl, a null value read as NaN.
      cases: columns of per_case.csv as arrays [rows]; {} where the run wrote none.
    """

    folder: Path
    label: str
    group: str
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    cases: Mapping[str, np.ndarray]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads summary.json, metrics.jsonl and, where there is one, per_case.csv. Raises: UserError naming the file."""
    path = Path(os.path.abspath(folder))
    if not (path / "summary.json").is_file():
        raise UserError(f"{path}: no summary.json; the run has not finished (give its command again to continue it)")
    summary = _json(path / "summary.json", (path / "summary.json").read_text())
    missing = [k for k in ("results", "metrics") if k not in summary]
    if missing:
        raise UserError(f"{path / 'summary.json'}: no {missing[0]!r} in it; not written by this version")
    for row in summary["results"]:
        row["value"] = _number(row["value"])
    return Run(
        folder=path,
        label=str(summary.get("label") or path.name),
        group=str(summary.get("group") or ""),
        summary=summary,
        rows=read_rows(path / "metrics.jsonl"),
        cases=_read_cases(path / "per_case.csv"),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, null read as NaN; [] where there is no such file. Raises: UserError naming it."""
    rows = [_json(path, line) for line in path.read_text().splitlines()] if path.is_file() else []
    for row in rows:
        row["value"] = _number(row["value"])
    return rows


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); it was cut short or edited") from None


def _read_cases(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [k for k in CASE_KEYS if rows and k not in rows[0]]
    if missing:
        raise UserError(f"{path}: no column {missing[0]!r}; columns {', '.join(CASE_KEYS)} expected")
    try:
        return {k: np.array([_case_value(k, row[k]) for row in rows]) for k in (rows[0] if rows else CASE_KEYS)}
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}; it was cut short or edited") from None


def _case_value(column: str, text: str) -> Any:
    if column in CASE_KEYS:
        return int(text) if column == "seed" else text
    return math.nan if text == "" else float(text)


def values_of(
    results: Iterable[Mapping[str, Any]], metric: str, split: str = "test"
) -> dict[tuple[str, str], dict[str, float]]:
    """{(fold, seed): {site: value}} of one metric; the replicas come in the order of the rows."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results:
        if row["metric"] == metric and row["split"] == split:
            found.setdefault((str(row["fold"]), str(row["seed"])), {})[row["site"]] = float(row["value"])
    return found


def replicas_of(run: Run, metric: str, split: str = "test") -> list[dict[str, float]]:
    """{site: value} of every replica. Models that each saw one site alone ('local') are one replica per fold and seed:
    a site's value is its own model's, an external site's the mean over all of them."""
    values = values_of(run.summary["results"], metric, split)
    if run.summary.get("protocol") != "local":
        return list(values.values())
    joined: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (fold, seed), found in values.items():
        own = next((s for s in sorted(run.summary["sites"], key=len) if fold.endswith(f"_{s}")), "")
        together = joined.setdefault((fold.removesuffix(f"_{own}"), seed), {})
        for site, value in found.items():
            together.setdefault(site, []).append(value)
    mean = lambda found: float(np.mean([v for v in found if not math.isnan(v)] or [math.nan]))
    return [{site: mean(found) for site, found in together.items()} for together in joined.values()]


def tested_sites(result: Mapping[str, Any]) -> list[str]:
    """Sites that have test results, in client order (a pooled training client has none)."""
    found = {row["site"] for row in result["results"]}
    return [site for site in result["sites"] if site in found]


def inside_sites(result: Mapping[str, Any]) -> list[str]:
    """Tested sites that are part of the federation: those that means over sites are made of."""
    return [site for site in tested_sites(result) if site not in result.get("external", ())]


def headline(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that tables and figures show."""
    return tuple(result.get("headline", ())) or tuple(result["metrics"])[:3]
