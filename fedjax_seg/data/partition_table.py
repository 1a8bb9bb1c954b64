"""Which subject belongs to which institution: the partitioning CSV of FeTS, and the split inside each institution."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import csv_table

SITE = ("partition_id", "institutionname")
SUBJECT = "subject_id"
USE = "trainorval"
NO_SITE = "-1"  # FeTS writes it for the validation subjects, which belong to no institution


class Row(NamedTuple):
    """A subject of an institution. Everything stays text: '00012' is no number.

    Attributes:
      use: 'train' or 'val' where the table says so, else ''.
    """

    subject: str
    site: str
    use: str


Sides = tuple[list[str], list[str]]  # the subjects for training, and those for validation


def read(path: Path | str) -> tuple[list[Row], list[str]]:
    """Reads the table: comma, semicolon or tab separated, with or without byte-order mark, CRLF or spaces.

    Returns: the rows in the table's order, and notes (rows left out, with their number).
    Raises: UserError where it is unreadable or lacks a column; DataFaults with all its faults.
    """
    rows, notes, faults = scan(path)
    if faults:
        raise checks.DataFaults(str(path), faults)
    return rows, notes


def scan(path: Path | str) -> tuple[list[Row], list[str], list[str]]:
    """As `read`, yet faults are returned; a subject whose own cells are whole is among the rows all the same."""
    _, _, header, lines = csv_table.read(path)
    site, subject, use = _columns(path, header)
    rows: list[Row] = []
    faults: list[str] = []
    seen: dict[str, int] = {}
    without = 0
    for line, cells in lines:
        if len(cells) != len(header):
            faults.append(f"line {line}: {len(cells)} cells, {len(header)} in the header; one row per subject expected")
            continue
        row = Row(cells[subject], cells[site], cells[use].lower() if use >= 0 else "")
        faults += [f"line {line}: {fault}" for fault in _faults(row, header, (site, subject, use), cells)]
        if not row.subject:
            continue
        if seen.setdefault(row.subject, line) != line:
            faults.append(
                f"line {line}: {row.subject} is already in line {seen[row.subject]}; delete one, a subject has one site"
            )
        elif row.site == NO_SITE:
            without += 1
        elif row.site:
            rows.append(row)
    if not rows and not faults:
        what = f"{without} row(s), all with {header[site]} {NO_SITE} (no institution)" if without else "no row"
        raise checks.UserError(f"{path}: {what}; a row per subject with its institution expected")
    notes = [f"{without} row(s) with {header[site]} {NO_SITE} (no institution) left out"] if without else []
    return rows, notes, faults


def sites(rows: Iterable[Row]) -> list[str]:
    """The institutions in order: by number where all are numbers, else as text."""
    names = {row.site for row in rows}
    if all(name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def sizes(rows: Iterable[Row]) -> Mapping[str, int]:
    """{site: number of its subjects} in the order of `sites`."""
    rows = list(rows)
    counts = dict.fromkeys(sites(rows), 0)
    for row in rows:
        counts[row.site] += 1
    return counts


def split(
    rows: Sequence[Row], share: float = 0.8, seed: int = 0, min_site: int = 2, drop_small: bool = False
) -> tuple[dict[str, Sides], list[str]]:
    """Splits every institution into training and validation.

    The table's own word (`use`) wins. Else int(share * n) subjects train, drawn from the seed and the site's name only:
    neither the order of the table nor another site changes a draw.

    Source: FeTS 2022, gandlf_csv_adapter.train_val_split: int(.8 n) of every institution train (4 -> 3/1). Deviation:
    a seed; no list of 63 subjects that must train.

    Args:
      min_site: a site with fewer subjects is too small.
      drop_small: leaves sites out that are too small or have an empty side, and tells so; else they are faults.

    Returns: {site: (training subjects, validation subjects), each sorted} in the order of `sites`, and notes.
    Raises: DataFaults, a line per site.
    """
    checks.number("data.train_share", share, above=0, high=1)
    checks.number("data.split_seed", seed, low=0, integer=True)
    members: dict[str, list[Row]] = {site: [] for site in sites(rows)}
    for row in rows:
        members[row.site].append(row)
    parts: dict[str, Sides] = {}
    faults, small = [], []
    for site, own in members.items():
        train, val = _sides(own, share, seed, site)
        if len(own) >= min_site and train and val:
            parts[site] = train, val
            continue
        why = f"site {site}: {len(own)} subject(s)"
        why += f", at least {min_site} expected" if len(own) < min_site else f", {len(train)} train and {len(val)} val"
        cure = "add subjects"
        if len(own) >= min_site and any(row.use for row in own):
            cure = f"write {'train' if val else 'val'} for at least one in the table"
        faults.append(f"{why}; {cure}, or let small sites be dropped")
        small.append((site, len(own)))
    if faults and not drop_small:
        raise checks.DataFaults("the split of the institutions", faults)
    if not parts:
        raise checks.UserError(f"no site can be split, {len(members)} found; {faults[0] if faults else 'no subject'}")
    if not small:
        return parts, []
    names = ", ".join(f"{site} ({n})" for site, n in small)
    return parts, [f"{len(small)} small site(s) dropped, with {sum(n for _, n in small)} subject(s): {names}"]


def _sides(rows: Sequence[Row], share: float, seed: int, site: str) -> Sides:
    if any(row.use for row in rows):
        train, val = ([row.subject for row in rows if row.use == use] for use in ("train", "val"))
    else:
        names = sorted(row.subject for row in rows)
        drawn = [names[i] for i in np.random.default_rng([seed, *site.encode()]).permutation(len(names))]
        cut = int(share * len(drawn))
        train, val = drawn[:cut], drawn[cut:]
    return sorted(train), sorted(val)


def _columns(path: Path | str, header: Sequence[str]) -> tuple[int, int, int]:
    """Where the site, the subject and (or -1) the use stand."""
    lower = [name.lower() for name in header]
    where = [[i for i, name in enumerate(lower) if name in wanted] for wanted in (SITE, (SUBJECT,), (USE,))]
    if len(where[0]) != 1 or len(where[1]) != 1 or len(where[2]) > 1:
        raise checks.UserError(
            f"{path}: columns {', '.join(header) or 'none'} found; one Partition_ID (or InstitutionName) and one"
            " Subject_ID expected, and TrainOrVal at most once; separated by comma, semicolon or tab"
        )
    return where[0][0], where[1][0], where[2][0] if where[2] else -1


def _faults(row: Row, header: Sequence[str], columns: Iterable[int], cells: Sequence[str]) -> list[str]:
    empty = [header[i] for i in columns if i >= 0 and not cells[i]]
    faults = [f"no {name}; fill the cell in" for name in empty]
    if row.use not in ("", "train", "val"):
        faults.append(f"TrainOrVal {row.use!r} found, train or val expected")
    return faults
