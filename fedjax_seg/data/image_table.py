"""The CSV of an image folder: one row per image, checked as text before any image is opened."""

import difflib
import hashlib
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedjax_seg.core import checks
from fedjax_seg.data import csv_table

PATIENT = "patient"
SPLITS = ("train", "test", "val", "aside")
_JUNK_NAMES = {"thumbs.db", "desktop.ini", ".ds_store"}
_JUNK_FOLDERS = {".ipynb_checkpoints", "__macosx"}


class Row(NamedTuple):
    """One image.

    Attributes:
      line: of the CSV file, from 1 (the header); 0 where there is no file.
      image, mask: paths below the root with '/'; mask is '' where labels are the target.
      label: '' where masks are the target.
      patient: the image's path where the table has no patients.
      split: one of SPLITS, or '' = to be drawn.
      spacing: mm per pixel (rows, columns) as stored, or None.
      cells: {column: text}, for partitions by column.
    """

    line: int
    image: str
    mask: str
    label: str
    patient: str
    split: str
    spacing: tuple[float, float] | None
    cells: Mapping[str, str]


class ImageTable(NamedTuple):
    """The rows, and what is wrong with others.

    Attributes:
      path: of the CSV file; None where the names of folders are the table.
      faults: one line each.
      skipped: rows that name files no image viewer means as images (Thumbs.db, notebook check points).
    """

    path: Path | None
    sha256: str
    delimiter: str
    patients: bool  # False: no column of them, every image is one of its own
    rows: tuple[Row, ...]
    faults: tuple[str, ...]
    skipped: tuple[str, ...]


class Columns(NamedTuple):
    """Which columns a run reads.

    Attributes:
      target: 'mask' or 'label'.
      patient: '' = none. Where it is its own `default` it may be absent, any other must be there.
      partition: '' = none.
      patients_per_site: a patient's id is the partition's cell and the patient's cell together.
      label: name of the column of labels.
      default: see patient; also what messages call one.
      alike: words that tell that another column is the missing one of patients.
      options: {'target', 'patient', 'partition'}: the options that name these columns, for messages.
    """

    target: str
    patient: str
    partition: str
    patients_per_site: bool = False
    label: str = "label"
    default: str = PATIENT
    alike: tuple[str, ...] = (PATIENT,)
    options: Mapping[str, str] = MappingProxyType(
        {"target": "data.target", "patient": "data.patient_column", "partition": "data.partition"}
    )

    @property
    def aim(self) -> str:
        """The column of what is learned."""
        return "mask" if self.target == "mask" else self.label

    @property
    def read(self) -> tuple[str, ...]:
        """All that is read of a row."""
        return ("image", self.aim, self.patient, self.partition, "split", "spacing")


def place(name: str, row: Row) -> str:
    """A file name with the line that names it."""
    return f"{name} (line {row.line})" if row.line else name


def is_junk(path: str) -> bool:
    """Files that desktops and notebooks leave behind in image folders."""
    *folders, name = path.lower().split("/")
    return name in _JUNK_NAMES or name.startswith("._") or any(f in _JUNK_FOLDERS for f in folders)


def read_image_table(path: Path, columns: Columns, base: Path) -> ImageTable:
    """Reads the table: comma, semicolon or tab separated, with or without a byte-order mark or spaces around cells.

    Args:
      base: the folder of the data; absolute paths below it are as good as relative ones.

    Raises: UserError where it is unreadable, no table, or lacks a column; faults of single rows are collected.
    """
    content, delimiter, header, lines = csv_table.read(path)
    told = any(word in h.lower() for h in header for word in columns.alike)
    if columns.patient == columns.default and not told:
        columns = columns._replace(patient="")
    _check_columns(path, header, columns)
    if not lines:
        raise checks.UserError(f"{path}: a header but no row; a row per image expected")
    rows, faults, skipped = [], [], []
    for line, cells in lines:
        named = dict(zip(header, cells))
        wide = csv_table.over_lines([named.get(name, "") for name in columns.read])
        if len(cells) < len(header) or any(cells[len(header) :]):
            count = f"{len(cells)} cells, {len(header)} in the header; quote cells with {delimiter!r}"
            wide = f"{count}, or {wide}" if wide else count
        if wide:
            faults.append(f"line {line}: {wide}")
            continue
        row, wrong = _row(line, named, columns, base)
        if is_junk(row.image):
            skipped.append(row.image)
            continue
        rows.append(row)
        faults += [f"line {line}: {fault}" for fault in wrong]
    faults += repeats(rows)
    sha = hashlib.sha256(content).hexdigest()
    return ImageTable(path, sha, delimiter, bool(columns.patient), tuple(rows), tuple(faults), tuple(skipped))


def _check_columns(path: Path, header: Sequence[str], columns: Columns) -> None:
    needed = [name for name in ("image", columns.aim, columns.patient, columns.partition) if name]
    for name in needed:
        if header.count(name) == 1:
            continue
        if header.count(name) > 1:
            raise checks.UserError(f"{path}: {header.count(name)} columns named {name!r}; one expected")
        close = difflib.get_close_matches(name, [h.lower() for h in header], n=1)
        near = next((h for h in header if close and h.lower() == close[0]), "")
        if name == columns.patient and not near:
            near = next((h for h in header for word in columns.alike if word in h.lower()), "")
        role = {columns.partition: "partition", columns.aim: "target", columns.patient: "patient"}.get(name, "")
        cure = f", or change {columns.options[role]}" if role else ""
        hint = f"; rename {near!r}{cure}" if near else f"; add it{cure}"
        raise checks.UserError(f"{path}: no column {name!r}, columns found: {', '.join(header) or 'none'}{hint}")


def _row(line: int, cells: Mapping[str, str], columns: Columns, base: Path) -> tuple[Row, list[str]]:
    faults = []
    image, fault = below_root(cells["image"], "image", base)
    faults += fault
    name_of_row = image or cells["image"] or "row without an image"
    mask = ""
    if columns.target == "mask":
        mask, fault = below_root(cells["mask"], "mask", base)
        faults += fault
    elif not cells[columns.label]:
        faults.append(f"{name_of_row}: no label; fill the cell in")
    for role, name in ((columns.default, columns.patient), ("client", columns.partition)):
        if name and not cells[name]:
            faults.append(f"{name_of_row}: no {name}; fill the cell in, it names the {role}")
    split = cells.get("split", "").lower()
    if split and split not in SPLITS:
        faults.append(f"{name_of_row}: split {cells['split']!r} found, one of {', '.join(SPLITS)} (or empty) expected")
    spacing, fault = _spacing(cells.get("spacing", ""), name_of_row)
    faults += fault
    patient = cells[columns.patient] if columns.patient else image
    if columns.patient and columns.patients_per_site:
        patient = f"{cells[columns.partition]}/{patient}"
    label = cells[columns.label] if columns.target == "label" else ""
    return Row(line, image, mask, label, patient, split, spacing, cells), faults


def below_root(text: str, what: str, base: Path) -> tuple[str, list[str]]:
    """The path below base in one spelling ('/' between folders, no '.' or '..'); or '' and what is wrong with it."""
    if not text:
        return "", [f"no {what}; fill the cell in"]
    path = posixpath.normpath(text.replace("\\", "/"))
    for start in (base.absolute(), base.resolve()):
        path = path.removeprefix(posixpath.normpath(start.as_posix()).rstrip("/") + "/")
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "", [f"{what} {text} is an absolute path; a path relative to the folder of the data expected"]
    if path == ".." or path.startswith("../"):
        return "", [f"{what} {text} leads out of the folder of the data"]
    return path, []


def _spacing(text: str, image: str) -> tuple[tuple[float, float] | None, list[str]]:
    """'0.7' or '0.7 0.8' (rows, columns; also with x between them) in mm."""
    if not text:
        return None, []
    try:
        parts = [float(p) for p in re.split(r"[\sx]+", text)]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(math.isfinite(p) and p > 0 for p in parts):
        return None, [f"{image}: spacing {text!r} found; mm per pixel expected, e.g. 0.7 or '0.7 0.8' (rows, columns)"]
    return (parts[0], parts[-1]), []


def repeats(rows: Sequence[Row]) -> list[str]:
    """Faults: rows of a file that an earlier row names."""
    first: dict[str, int] = {}
    faults = []
    for row in rows:
        earlier = first.setdefault(row.image, row.line) if row.image else row.line
        if earlier != row.line:
            faults.append(f"line {row.line}: {row.image} is already in line {earlier}; delete one of the two rows")
    return faults


def torn(rows: Sequence[Row], unit: str = "patient") -> list[str]:
    """Faults: patients that the split column puts on two sides; words that are no split are faults of their own."""
    first: dict[str, Row] = {}
    faults = []
    for row in (r for r in rows if r.split in SPLITS and r.patient):
        earlier = first.setdefault(row.patient, row)
        if earlier.split != row.split:
            faults.append(
                f"line {row.line}: {unit} {row.patient} is in split {row.split} here and in {earlier.split} in line"
                f" {earlier.line}; one split per {unit}"
            )
    return faults
