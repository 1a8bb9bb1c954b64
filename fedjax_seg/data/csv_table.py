"""A CSV table as people save it: comma, semicolon or tab, with or without a byte-order mark or spaces around cells."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core import checks

_END = "end of the table"


class CsvTable(NamedTuple):
    """What the file holds.

    Attributes:
      content: its bytes.
      delimiter: found in the first line.
      header: the cells of the first line.
      lines: (its first line of the file, cells) of every row that is not blank.
    """

    content: bytes
    delimiter: str
    header: list[str]
    lines: list[tuple[int, list[str]]]


def read(path: Path | str) -> CsvTable:
    """Reads a table; all cells are text without spaces around it. Raises: UserError where it is unreadable or none."""
    try:
        content = Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise checks.UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise checks.UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as 'CSV UTF-8'") from None
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    # a row of our own at the end: where it is not read as one, a quote before it is open
    reader = csv.reader(io.StringIO(f"{text}\n{_END}", newline=""), delimiter=delimiter, skipinitialspace=True)
    rows, start = list[tuple[int, list[str]]](), 1
    try:
        for cells in reader:
            rows.append((start, [c.strip() for c in cells]))
            start = reader.line_num + 1
    except csv.Error as error:
        raise checks.UserError(f"{path}: line {start}: {error}; a CSV table expected, is a quote not closed?") from None
    start, last = rows.pop()
    if last != [_END]:
        raise checks.UserError(f"{path}: line {start}: a quote is not closed, all that follows is one cell; close it")
    return CsvTable(content, delimiter, rows[0][1], [(n, cells) for n, cells in rows[1:] if any(cells)])


def over_lines(cells: Sequence[str]) -> str:
    """What is wrong with a row where a cell runs over several lines, which names and labels do not; '' = nothing."""
    return "a cell runs over several lines: a quote is not closed" if any("\n" in cell for cell in cells) else ""
