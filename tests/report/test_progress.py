"""The line of an evaluation: what the task puts first, n/a where nothing is defined."""

import math
from types import SimpleNamespace

import pytest

from fedjax_seg.report.progress import Progress


class Lines:
    """A run's folder as far as progress needs it."""

    quiet = True

    def __init__(self):
        self.lines = []

    def log(self, text, console=True):
        self.lines.append(text)


def row(metric, value, site="mean_of_sites"):
    return {"site": site, "metric": metric, "value": value}


ROWS = [row("accuracy", 0.5), row("accuracy", 0.7), row("accuracy", 0.0, "A"), row("cross_entropy", 1.0)]
ROWS += [row("auc", math.nan)]
METRICS = {"accuracy": (), "cross_entropy": (), "ece": (), "f1": (), "auc": ()}


@pytest.mark.parametrize(
    "headline, words",
    [
        (("accuracy", "f1", "auc", "ece"), "test accuracy 0.600, f1 n/a, auc n/a  "),
        ((), "test accuracy 0.600, cross_entropy 1.000, ece n/a  "),
    ],
    ids=["headline", "none"],
)
def test_the_line_shows_the_headline(headline, words):
    folder = Lines()
    with Progress(folder, 0, 10) as progress:
        progress.show(1, [], SimpleNamespace(headline=headline, metrics=METRICS))
        progress.show(2, ROWS, SimpleNamespace(headline=headline, metrics=METRICS))
    (line,) = folder.lines
    assert line.startswith("round 2/10") and words in line
