"""Methods with what they achieve and what they leak, beside the numbers that a paper printed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_seg.report import tables
from fedjax_seg.report.attack_tables import attack_name
from fedjax_seg.report.privacy_report import attack_values, strongest
from fedjax_seg.report.runs import Run, headline, inside_sites, replicas_of
from fedjax_seg.report.tables import Cell, Table

ATTACK, STRONGEST, EPSILON = "attack_auc", "strongest_attack", "epsilon"


def applies(runs: Sequence[Run]) -> bool:
    """Whether a run was attacked, accounted or is set beside a paper's numbers."""
    return any(run.summary.get("attack") or run.summary.get("privacy") or published(run) for run in runs)


def published(run: Run) -> dict[str, float]:
    """{metric: value} of the paper, from the run's config."""
    head = "published."
    return {k.removeprefix(head): float(v) for k, v in run.summary["config"].items() if k.startswith(head)}


def utility(run: Run, metric: str) -> Cell:
    """A metric over folds and seeds: on the external test set where there is one, else as mean over sites."""
    external, inside = run.summary.get("external", ()), inside_sites(run.summary)
    return tables.summarise(tables.sites_mean(v, external or inside) for v in replicas_of(run, metric))


def leak(run: Run) -> Cell:
    """AUC of the shadow attack (of the loss threshold where no shadow was trained)."""
    return tables.summarise(attack_values(run.summary) or attack_values(run.summary, "loss"))


def strongest_leak(run: Run) -> Cell:
    """AUC of the attack that is farthest from guessing, with its name."""
    kind, values = strongest(run.summary)
    cell = tables.summarise(values)
    if not cell.n:
        return cell
    spread = "" if cell.std is None else f" ± {cell.std:.3f}"
    return cell._replace(text=f"{cell.mean:.3f}{spread} ({attack_name(kind)})")


def _shown(run: Run) -> str:
    """Which attack `leak` is of."""
    return next((kind for kind in ("shadow", "loss") if attack_values(run.summary, kind)), "")


def method_table(runs: Sequence[Run]) -> Table:
    """Rows: runs. Columns: the two first headline metrics, attack AUC (and that of the strongest attack where
    it is another one) and epsilon, ours and the paper's.

    Source: FedOnco-Bench's results table (Dice, CE, MI AUC). Added: the standard deviation over seeds, epsilon.
    Left out, unless a paper has the number: the attack where no run had one, epsilon where no run has a mechanism, a
    second metric that no run has.
    """
    first = runs[0].summary
    metrics = headline(first)[:2]
    given = [published(run) for run in runs]
    table = {m: [utility(run, m) for run in runs] for m in metrics}
    there = {m: any(cell.n for cell in cells) for m, cells in table.items()} | {metrics[0]: True}
    table |= {ATTACK: [leak(run) for run in runs], STRONGEST: [strongest_leak(run) for run in runs]}
    table[EPSILON] = [_epsilon(run.summary) for run in runs]
    there |= {ATTACK: any(cell.n for cell in table[ATTACK]), EPSILON: any(run.summary.get("privacy") for run in runs)}
    there[STRONGEST] = any(strongest(run.summary)[0] != _shown(run) for run in runs)
    names = [n for n in table if there[n] or any(n in p for p in given)]
    beside = [n for n in names if any(n in p for p in given)]
    cells = []
    for place, paper in enumerate(given):
        ours = [table[n][place] for n in names]
        cells.append((*ours, *(Cell(paper[n], text=f"{paper[n]:g}") if n in paper else _none() for n in beside)))
    where = f"the external test set {', '.join(first['external'])}" if first.get("external") else "mean over sites"
    shown = [n for n in names if n in metrics]
    caption = f"{', '.join(shown)}: {where}, mean ± sample standard deviation over folds and seeds."
    if ATTACK in names:
        other = " (by the loss threshold where none was trained)" if any(_shown(run) == "loss" for run in runs) else ""
        caption += (
            f" attack_auc: membership inference by a classifier trained on a shadow federation{other}, 0.5 = guessing,"
            " below 0.5 is a leak as well."
        )
    if STRONGEST in names:
        caption += (
            f" {STRONGEST}: of all membership attacks on the last model the one whose AUC is farthest from 0.5; the"
            " farthest of several is some way off by chance as well."
        )
    if EPSILON in names:
        caption += " epsilon: of the worst client over the whole run, ∞ = no guarantee."
    caption += " Best in bold, second best underlined."
    directions = [first["metrics"][n][0] if n in metrics else "" for n in names] + [""] * len(beside)
    columns = [("ours", n) for n in names] + [("paper", n) for n in beside]
    return Table(caption, "Method", tuple(columns), tuple(r.label for r in runs), tuple(cells), tuple(directions))


def points(runs: Sequence[Run]) -> Mapping[str, tuple[float, float, float, float]]:
    """{method: (AUC of the strongest attack, std, first headline metric, std)} of the runs that were attacked."""
    found = {}
    for run in runs:
        x, y = strongest_leak(run), utility(run, headline(run.summary)[0])
        if x.n:
            found[run.label] = (x.mean, _std(x), y.mean, _std(y))
    return found


def attacks_of_points(runs: Sequence[Run]) -> str:
    """Which attack every point is of, in words."""
    found = {run.label: attack_name(kind) for run in runs if (kind := strongest(run.summary)[0])}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{label}: {kind}" for label, kind in found.items())


def _std(cell: Cell) -> float:
    return math.nan if cell.std is None else cell.std


def _none() -> Cell:
    return Cell(math.nan, text="-")


def _epsilon(summary: Mapping[str, Any]) -> Cell:
    value = (summary.get("privacy") or {}).get(EPSILON)
    return Cell(math.nan, text="∞") if value is None else Cell(value, text=f"{value:.2f}")
