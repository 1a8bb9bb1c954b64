"""What a privacy budget costs: utility against the epsilon of whole runs, method by method, and the law behind it."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_seg.report import privacy_figures, tables
from fedjax_seg.report.runs import Run, headline, inside_sites, replicas_of
from fedjax_seg.report.tables import Cell, Table

ENOUGH = 1.0  # signal-to-noise ratio of one release below which its noise is larger than what it can say
_BUDGET = re.compile(r",? *(?:eps|epsilon|ε) *=? *[0-9.eE+-]+$")


class Point(NamedTuple):
    """A run in the plane of privacy and utility.

    Attributes:
      method: the run's label without its budget.
      epsilon: of the whole run as accounted; infinite where nothing is promised.
      utility: over folds and seeds.
      snr: n / (z sqrt d) of one release; NaN where it does not apply.
      private: whether the run has a mechanism at all.
      unit: whom the guarantee is about; '' without one.
      adjacency: how their data may differ.
    """

    method: str
    epsilon: float
    utility: Cell
    snr: float
    private: bool
    unit: str = ""
    adjacency: str = ""


def law(snr: float | None, unit: str = "client") -> str:
    """What the feasibility law says of a run, in words; '' where there is no number.

    Source: a release sends the sum of n messages of norm at most C, with noise of standard deviation z C in each of d
    entries: its signal is at most n C, its noise about z C sqrt d.

    Args:
      snr: n / (z sqrt d).
      unit: of the guarantee.
    """
    if snr is None or not math.isfinite(snr):
        return ""
    head = f"Signal-to-noise ratio of one release: at most n / (z √d) = {snr:.2g}."
    if snr >= ENOUGH:
        return f"{head} A release can say more than its noise hides; whether a model learns is in the table."
    found = f"{head} The noise of a release is about {1 / snr:.2g} times the largest signal that it can carry, for any"
    found += " aggregator: such a run can hardly learn. What to do instead:"
    patients = (
        "patient-level DP: `--config.client.name=dp_sgd --config.client.unit=patient`, where n is the number of"
        " patients, not of hospitals (it promises something to patients, not to hospitals)"
    )
    lines = [patients] if unit == "client" else []
    lines += [
        f"fewer trainable parameters (a head, the affine parameters of norms): d ≤ {_small(snr)} times today's would"
        " bring the ratio to 1",
        f"more {unit}s a round: {1 / snr:.2g} times as many, or a larger epsilon",
    ]
    return found + "\n" + "\n".join(f"- {line}" for line in lines)


def _small(snr: float) -> str:
    return f"{snr**2:.1g}"


def point(run: Run, metric: str) -> Point:
    """A run's place. Its epsilon is read from the privacy card, else from the ledger of older runs."""
    card, ledger = run.summary.get("privacy_card") or {}, run.summary.get("privacy") or {}
    epsilon = (card or ledger).get("epsilon")
    snr = (card.get("utility") or {}).get("snr")
    external, inside = run.summary.get("external", ()), inside_sites(run.summary)
    utility = tables.summarise(tables.sites_mean(v, external or inside) for v in replicas_of(run, metric))
    return Point(
        method=_BUDGET.sub("", run.label),
        epsilon=math.inf if epsilon is None else float(epsilon),
        utility=utility,
        snr=math.nan if snr is None else float(snr),
        private=bool(card.get("mechanisms")) if card else bool(ledger),
        unit=str((card or ledger).get("unit") or ""),
        adjacency=str((card or ledger).get("adjacency") or ""),
    )


def applies(runs: Sequence[Run]) -> bool:
    """Whether runs have finite epsilons, at two values of it or more."""
    found = {round(p.epsilon, 2) for p in (point(run, headline(run.summary)[0]) for run in runs)}
    return len(found - {math.inf}) >= 2


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """{group: its runs}, those without a cross-site table."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.summary.get("protocol") != "cross_site":
            found.setdefault(run.group or "runs", []).append(run)
    return found


def trade_off_table(runs: Sequence[Run]) -> Table:
    """Rows: runs of one group, by method, then epsilon; columns: epsilon as accounted, utility, its loss against the
    first run without a mechanism, SNR of a release."""
    metric = headline(runs[0].summary)[0]
    found = sorted_points(runs, metric)
    plain = next((p.utility.mean for p in found if not p.private), math.nan)
    cells, labels = [], []
    for p in found:
        loss, promise = p.utility.mean - plain, (p.unit, p.adjacency) if math.isfinite(p.epsilon) else ()
        cells.append(
            (
                Cell(p.epsilon, text="∞" if math.isinf(p.epsilon) else f"{p.epsilon:.3g}"),
                p.utility,
                Cell(loss, text="-" if not p.private or math.isnan(loss) else f"{loss:+.3f}"),
                Cell(p.snr, text="-" if math.isnan(p.snr) else f"{p.snr:.2g}{' !' if p.snr < ENOUGH else ''}"),
                Cell(math.nan, text=", ".join(filter(None, promise)) or "-"),
            )
        )
        labels.append(p.method)
    columns = ("epsilon", metric, "against no privacy", "SNR of a release", "promised to")
    caption = (
        f"{metric}: mean over sites (the external test set where there is one), mean ± sample standard deviation over"
        " folds and seeds. epsilon: of the whole run, as accounted; ∞ = no guarantee. SNR: n / (z √d), the most that"
        " one release can say; '!' = below 1, its noise is larger than its signal."
    )
    direction = runs[0].summary["metrics"][metric][0]
    return Table(
        caption, "Method", tuple(("", c) for c in columns), tuple(labels), tuple(cells), ("", direction, "", "", "")
    )


def sorted_points(runs: Sequence[Run], metric: str) -> list[Point]:
    """Methods in the order of the runs, each by its epsilon."""
    found = [point(run, metric) for run in runs]
    order = list(dict.fromkeys(p.method for p in found))
    return sorted(found, key=lambda p: (order.index(p.method), p.epsilon))


def cannot_learn(runs: Sequence[Run]) -> str:
    """A line for every run whose releases are mostly noise, and what to do instead; '' where none is."""
    metric = headline(runs[0].summary)[0]
    weak = [p for p in sorted_points(runs, metric) if p.snr < ENOUGH]
    if not weak:
        return ""
    lines = [f"- {p.method}, epsilon {p.epsilon:.3g}: n / (z √d) = {p.snr:.2g}" for p in weak]
    worst = min(weak, key=lambda p: p.snr)
    advice = law(worst.snr, worst.unit or "client").partition("\n")[2]
    text = "One release of these runs carries more noise than signal, whatever the aggregator (feasibility law):"
    return f"{text}\n" + "\n".join(lines) + f"\n\nFor the last word, of {worst.method}, instead:\n{advice}"


def figure(by_group: Mapping[str, Sequence[Run]], folder: Path, name: str = "trade_off") -> Path:
    """Utility over epsilon: a panel per group, a line per method; see privacy_figures.utility_panels."""
    panels: dict[str, Any] = {}
    first = next(iter(by_group.values()))[0].summary
    metric, delta = headline(first)[0], None
    for group, runs in by_group.items():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        plain: dict[str, tuple[float, float]] = {}
        for run, p in ((run, point(run, metric)) for run in runs):
            std = math.nan if p.utility.std is None else p.utility.std
            if math.isfinite(p.epsilon):
                lines.setdefault(p.method, []).append((p.epsilon, p.utility.mean, std))
                delta = (run.summary.get("privacy_card") or run.summary.get("privacy") or {}).get("delta", delta)
            elif not p.private:
                plain.setdefault(p.method, (p.utility.mean, std))
        panels[group] = (lines, plain)
    return privacy_figures.utility_panels(panels, folder, name, y_label=metric, delta=delta)
