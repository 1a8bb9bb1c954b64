"""Simulated time: how long a round would have taken at the hospitals, and the score that such time gives.

A clock is numpy on the host and pure in (round, who trained): nothing to checkpoint, no change to what is learned.
CLOCKS is the table of contents: {name: maker}; 'none' gives None.

In a round every site downloads the model and validates it on its validation cases; a site that trains goes on to
train, validates its own model once more, and uploads it. The round lasts as long as its slowest site.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.federation.fets_times import MACHINES, NETWORKS

WEEK = 604_800.0  # seconds; the longest run that the projected convergence score knows
_ASSIGNMENT_SEED = 0xFEEDFACE
_SHORTEST = 1.0  # seconds; the challenge's floor under every draw
_COLUMNS = ("site", "train_seconds_per_sample", "val_seconds_per_sample", "download_seconds", "upload_seconds")
_SPREAD = "train_sd"  # the one column that may be left out


class Clock(NamedTuple):
    """How long a round takes. K sites, in the order of the client ids.

    Attributes:
      by_site: (round from 0, ids of the clients that train) -> K seconds, one for every site.
      seconds: (round from 0, ids of the clients that train) -> seconds of the round, the largest of these.
      text: one line for the log.
    """

    by_site: Callable[[int, Sequence[int]], tuple[float, ...]]
    seconds: Callable[[int, Sequence[int]], float]
    text: str


class Score(NamedTuple):
    """The projected convergence score after some rounds.

    Attributes:
      seconds: simulated time so far.
      best: the best score of a round so far; -1 before the first.
      area: the sum over the rounds of the best score so far times the round's seconds.
      projected: the area of a whole week, if the best score stayed what it is, divided by the week.
    """

    seconds: float = 0.0
    best: float = -1.0
    area: float = 0.0
    projected: float = -1.0


def none(sites: Sequence[str], train_sizes: Sequence[int], val_sizes: Sequence[int], epochs: int = 1) -> None:
    """No simulated time."""


def fets(
    sites: Sequence[str], train_sizes: Sequence[int], val_sizes: Sequence[int], epochs: int = 1, *, patches: int = 40
) -> Clock:
    """The hospitals of the FeTS challenge: published seconds, drawn as the challenge's code draws them.

    Source: FETS-AI/Challenge, tag 2022, its timing functions. Sites in the order of their sorted names ('10' before
    '2') draw a machine and a network once, from NumPy's legacy generator seeded with 0xFEEDFACE. In every round the
    generator is seeded with the round's number; site by site, the seconds of the download, of a validation case and,
    where the site trains, of a training sample, of a validation case once more and of the upload are normal draws, at
    least 1 s each. The seconds of a sample are one draw, multiplied by the number of samples.
    Deviation: the challenge's sliding window shuffles the list of names that the draws of later rounds follow; here
    the order is always that of the sorted names, so that time depends on who trains and on nothing else.

    Args:
      sites: K names.
      train_sizes: K numbers of training cases.
      val_sizes: K numbers of validation cases.
      epochs: local epochs of a round.
      patches: training samples of a case and epoch; the challenge's loader has 40. 1 where a sample is a whole case.
    """
    _check(sites, train_sizes, val_sizes, epochs, patches)
    order = sorted(range(len(sites)), key=lambda k: sites[k])
    draws = np.random.RandomState(_ASSIGNMENT_SEED)  # the published numbers come from this generator
    pairs = [(k, MACHINES[draws.randint(len(MACHINES))], NETWORKS[draws.randint(len(NETWORKS))]) for k in order]

    def by_site(round: int, trained: Sequence[int]) -> tuple[float, ...]:
        draws, chosen, seconds = np.random.RandomState(round), frozenset(map(int, trained)), [0.0] * len(sites)
        draw = lambda law: max(_SHORTEST, float(draws.normal(*law)))
        for k, (training, validation), (download, upload) in pairs:
            seconds[k] = draw(download) + val_sizes[k] * draw(validation)
            if k in chosen:
                learning = train_sizes[k] * patches * epochs * draw(training)
                seconds[k] += learning + val_sizes[k] * draw(validation) + draw(upload)
        return tuple(seconds)

    samples = "one sample" if patches == 1 else f"{patches} samples"
    return _clock(by_site, f"clock: hospitals of the FeTS challenge, {samples} of a training case and epoch")


def own(
    sites: Sequence[str],
    train_sizes: Sequence[int],
    val_sizes: Sequence[int],
    epochs: int = 1,
    *,
    file: str = "",
    patches: int = 1,
) -> Clock:
    """Seconds that the user has measured, or supposes, for every site.

    Args:
      sites, train_sizes, val_sizes, epochs: as in `fets`.
      file: a CSV with the columns site, train_seconds_per_sample, val_seconds_per_sample, download_seconds and
        upload_seconds. A column train_sd may be added: the seconds of a training sample are then a normal draw in
        every round and site, at least 0; an empty cell is 0. Rows of other sites are not read further.
      patches: training samples of a case and epoch.

    Raises: UserError for an unreadable file; DataFaults with a line for every fault of its content.
    """
    _check(sites, train_sizes, val_sizes, epochs, patches)
    if not file:
        raise checks.UserError(f"clock 'sites': no file given; a CSV with the columns {', '.join(_COLUMNS)} expected")
    times = _read(file, sites)

    def by_site(round: int, trained: Sequence[int]) -> tuple[float, ...]:
        chosen, seconds = frozenset(map(int, trained)), []
        for k, site in enumerate(sites):
            train, spread, validation, download, upload = times[site]
            total = download + val_sizes[k] * validation
            if k in chosen:
                if spread:
                    train = max(0.0, float(np.random.default_rng((round, k)).normal(train, spread)))
                total += train_sizes[k] * patches * epochs * train + val_sizes[k] * validation + upload
            seconds.append(total)
        return tuple(seconds)

    return _clock(by_site, f"clock: seconds of every site from {Path(file).name}")


CLOCKS = {
    "none": none,
    "fets": fets,
    "sites": own,
}


def make(
    name: str,
    sites: Sequence[str],
    train_sizes: Sequence[int],
    val_sizes: Sequence[int],
    epochs: int = 1,
    **options: Any,
) -> Clock | None:
    """The clock of that name, None for 'none'; an unknown name, option or value is a UserError."""
    maker = checks.lookup(CLOCKS, name, "clock.name")
    return checks.call(maker, f"clock {name!r}", (sites, train_sizes, val_sizes, epochs), options)


def scores(rounds: Iterable[tuple[float, float]]) -> list[Score]:
    """The projected convergence score after every round.

    Source: FETS-AI/Challenge, tag 2022: best is the running maximum of the rounds' scores, starting at -1; area grows
    by best x the round's seconds; projected = ((week - seconds) x best + area) / week.
    A score that is not a number (nobody had a case) leaves the best one as it is. The challenge ends a run with the
    round in which its time goes beyond the week (`exceeded`): what such a round achieved counts from the round's
    start to the end of the week, as the formula has it.

    Args:
      rounds: (seconds, score) of every round, in order; see `fets_scores` for which model is scored.
    """
    found, last = [], Score()
    for seconds, score in rounds:
        best = max(last.best, score) if not math.isnan(score) else last.best
        total, area = last.seconds + seconds, last.area + best * seconds
        last = Score(total, best, area, ((WEEK - total) * best + area) / WEEK)
        found.append(last)
    return found


def fets_scores(values_by_round: Mapping[int, float], rounds: int) -> list[float]:
    """The challenge's score of every round from ours.

    There the sites validate the model that they receive: the score of round r (from 0) is that of the model which
    r rounds have made, and the initial model's in round 0. So the last aggregate is never scored, and T rounds take
    the values after 0 .. T - 1 rounds.

    Args:
      values_by_round: {number of finished rounds: value}, from 0; more of them (the last model's) are left out.
      rounds: T.

    Raises: UserError where one of 0 .. T - 1 has no value.
    """
    missing = [r for r in range(rounds) if r not in values_by_round]
    if missing:
        raise checks.UserError(
            f"projected score: no value after {missing[0]} round(s), one after each of 0..{rounds - 1} expected;"
            " evaluate every round (eval_every=1)"
        )
    return [float(values_by_round[r]) for r in range(rounds)]


def exceeded(total_seconds: float, budget_hours: float) -> bool:
    """Whether simulated time is beyond its budget: no further round begins. The challenge's budget is 168 hours."""
    checks.number("clock: budget_hours", budget_hours, above=0)
    return total_seconds > budget_hours * 3600


def _clock(by_site: Callable[[int, Sequence[int]], tuple[float, ...]], text: str) -> Clock:
    return Clock(by_site, lambda round, trained: max(by_site(round, trained)), text)


def _check(
    sites: Sequence[str], train_sizes: Sequence[int], val_sizes: Sequence[int], epochs: int, patches: int
) -> None:
    assert len(sites) == len(train_sizes) == len(val_sizes) > 0 and len(set(sites)) == len(sites)
    checks.number("clock: epochs", epochs, low=0, integer=True)
    checks.number("clock: patches", patches, low=1, integer=True)


def _read(file: str, sites: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """{site: (train, spread, validation, download, upload)} of the given sites."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise checks.UserError(f"clock.file: {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise checks.UserError(f"clock.file: {file} is no text in UTF-8; save the table as CSV in UTF-8") from None
    try:
        header, *lines = list(csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)) or [[]]
    except csv.Error as error:
        raise checks.UserError(f"clock.file: {file} is no CSV ({error})") from None
    header, known = [name.strip() for name in header], (*_COLUMNS, _SPREAD)
    faults = [f"no column {c!r}; found {', '.join(header) or 'none'}" for c in _COLUMNS if c not in header]
    faults += [f"unknown column {c!r};{checks.suggestion(c, known)}" for c in header if c not in known]
    if faults:
        raise checks.DataFaults(f"clock.file {file}", faults)
    filled = lambda cells: map(str.strip, [*cells, *("" for _ in header)])  # a short line has empty cells
    rows = [(n, dict(zip(header, filled(cells)))) for n, cells in enumerate(lines, 2) if any(cells)]
    found: dict[str, tuple[float, ...]] = {}
    for line, row in rows:
        site = row["site"]
        if site in found:
            faults.append(f"line {line}: site {site!r} is there twice, one line for each expected")
        elif site in sites:
            found[site] = _seconds(row, f"line {line}, site {site!r}", faults)
    listed = {row["site"] for _, row in rows}
    faults += [f"no line for site {s!r};{checks.suggestion(s, listed)}" for s in sites if s not in found]
    if faults:
        raise checks.DataFaults(f"clock.file {file}", faults)
    return found


def _seconds(cells: Mapping[str, str], where: str, faults: list[str]) -> tuple[float, ...]:
    """(train, spread, validation, download, upload) of one line; adds to the faults."""
    values = []
    for column in (_COLUMNS[1], _SPREAD, *_COLUMNS[2:]):
        text = cells.get(column, "") or ("0" if column == _SPREAD else "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            faults.append(f"{where}: {column} is {text!r}, a number of seconds >= 0 expected")
        values.append(value)
    return tuple(values)
