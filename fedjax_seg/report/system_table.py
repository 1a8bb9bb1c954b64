"""What a method costs and what it reaches: DP-SimAgg's Table II, for any runs, beside the paper's numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_seg.report import tables
from fedjax_seg.report.method_table import published
from fedjax_seg.report.runs import Run, replicas_of
from fedjax_seg.report.tables import Cell, Table

PER_LABEL = "soft_dice_"
# the key of a value (and of a paper's number in a config's `published`), its heading, its best direction
COSTS = (
    ("wall_hours", "wall-clock (h)", "min"),
    ("peak_memory_gb", "memory (GB)", "min"),
    ("energy_wh", "energy (Wh)", "min"),
    ("minutes", "simulated time (min)", "min"),
    ("projected_score", "projected score", "max"),
)


def applies(runs: Sequence[Run]) -> bool:
    """Whether a run has simulated time or soft Dice per label."""
    return any(run.summary.get("simulated") or _labels(run) for run in runs)


def used(run: Run) -> dict[str, float]:
    """Wall-clock hours and energy summed over the processes that worked on a run, and the largest memory of one.

    A process that was killed has left no such line: its share is missing.
    """
    path = run.folder / "timing.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    mine = [line for line in lines if line.get("event") == "resources"]
    if not mine:
        return {}
    found = {
        "wall_hours": sum(line["wall_seconds"] for line in mine) / 3600,
        "peak_memory_gb": max(line["peak_memory_gb"] for line in mine),
    }
    energy = [line["energy_wh"] for line in mine]
    return found | ({"energy_wh": sum(energy)} if None not in energy else {})


def system_table(runs: Sequence[Run]) -> Table:
    """Rows: runs. Columns: time, memory, energy, simulated time, projected score, soft Dice per label.

    Source: DP-SimAgg, Table II (there the methods are the columns). Deviation: the wall-clock time is in hours, and
    the soft Dice is the mean over all held-out cases after the last round; the paper's round 20 scores the model
    that 19 rounds have made, since its last aggregate is never validated.
    """
    labels = list(dict.fromkeys(name for run in runs for name in _labels(run)))
    names = [key for key, _, _ in COSTS] + labels
    papers = [published(run) for run in runs]
    beside = [n for n in names if any(n in p for p in papers)]
    cells = []
    for run, paper in zip(runs, papers):
        given = [Cell(paper[n], text=f"{paper[n]:g}") if n in paper else Cell(math.nan, text="-") for n in beside]
        cells.append((*_costs(run), *(_pooled(run, name) for name in labels), *given))
    headings = {key: heading for key, heading, _ in COSTS}
    columns = [("ours", headings.get(n, n)) for n in names] + [("paper", headings.get(n, n)) for n in beside]
    better = {key: direction for key, _, direction in COSTS}
    directions = ["" if n in ("wall_hours", "peak_memory_gb", "energy_wh") else better.get(n, "max") for n in names]
    definitions = runs[0].summary["metrics"].get(labels[0], ["", ""])[1] if labels else ""
    caption = (
        "Wall-clock time and memory of the simulation itself, n/a energy where the hardware tells none. Simulated time"
        " and projected score: of the hospitals, n/a without a clock (or where not every round was scored)."
        f" {'Per label: ' + definitions + '.' if definitions else ''} All cases pooled; mean ± sample standard"
        " deviation over folds and seeds. Best in bold, second best underlined."
    )
    rows = tuple(run.label for run in runs)
    return Table(caption, "Method", tuple(columns), rows, tuple(cells), (*directions, *("" for _ in beside)), 4)


def _labels(run: Run) -> list[str]:
    return [name for name in run.summary["metrics"] if name.startswith(PER_LABEL)]


def _pooled(run: Run, metric: str) -> Cell:
    return tables.summarise(v.get("pooled", math.nan) for v in replicas_of(run, metric))


def _costs(run: Run) -> list[Cell]:
    found = used(run)
    cells = []
    for key, digits in (("wall_hours", 2), ("peak_memory_gb", 2), ("energy_wh", 1)):
        cells.append(Cell(found[key], text=f"{found[key]:.{digits}f}") if key in found else Cell(math.nan))
    simulated: Sequence[Mapping[str, Any]] = run.summary.get("simulated") or ()
    for key in ("minutes", "projected_score"):
        cells.append(tables.summarise(math.nan if row[key] is None else row[key] for row in simulated))
    return cells
