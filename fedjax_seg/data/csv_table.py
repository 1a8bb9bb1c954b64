"""A CSV table as people save it: comma, semicolon or tab, with or without a byte-order mark or spaces around cells."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core import checks


class CsvTable(NamedTuple):
    """What the file holds.

    Attributes:
      content: its bytes.
      delimiter: found in the first line.
      header: the cells of the first line.
      lines: (line of the file, cells) of every row that is not blank.
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
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        lines = [(reader.line_num, [c.strip() for c in row]) for row in reader if any(c.strip() for c in row)]
    except csv.Error as error:
        raise checks.UserError(f"{path}: line {reader.line_num}: {error}; a CSV table expected") from None
    return CsvTable(content, delimiter, header, lines)
