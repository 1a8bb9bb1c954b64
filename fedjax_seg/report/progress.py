"""Progress of a run: a bar with the time left on a terminal, otherwise one line per evaluation."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SHOWN = 3  # metrics on a line


class Progress:
    """Context manager; `show` after every device call. `folder` gets the lines (train.log has them in any case)."""

    def __init__(self, folder: Any, done: int, total: int):
        self._folder, self._first, self._total, self._began = folder, done, total, time.monotonic()
        self._warm: tuple[int, float] | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        terminal = sys.stderr.isatty() and not folder.quiet
        self._bar = Bar(*columns, console=Console(stderr=True)) if terminal else None
        self._task = self._bar.add_task("rounds", total=total, completed=done) if self._bar else None

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, reached: int, rows: Sequence[Mapping[str, Any]], task: Any) -> None:
        """One line where `rows` holds an evaluation: the first headline metrics of the task (of all its metrics where
        it names none), means over sites, averaged over replicas."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=reached)
        if not rows:
            return
        words = []
        for metric in list(task.headline or task.metrics)[:SHOWN]:
            values = [r["value"] for r in rows if r["site"] == "mean_of_sites" and r["metric"] == metric]
            values = [v for v in values if v == v]
            words.append(f"{metric} {sum(values) / len(values):.3f}" if values else f"{metric} n/a")
        now = time.monotonic()
        if self._warm is None:  # the first device call compiles: it tells nothing about the rest
            self._warm = (reached, now)
            seconds = (now - self._began) / max(reached - self._first, 1)
        else:
            seconds = (now - self._warm[1]) / max(reached - self._warm[0], 1)
        left = seconds * (self._total - reached)
        line = f"round {reached}/{self._total}  test {', '.join(words)}  {seconds:.2f} s/round, {left:.0f} s left"
        self._folder.log(line, console=self._bar is None)
