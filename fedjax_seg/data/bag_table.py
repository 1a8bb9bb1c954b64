"""The table of a folder of slide features: a row per bag, or a folder per class."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import csv_table
from fedjax_seg.data.bag_files import ENDINGS
from fedjax_seg.data.image_cohort import listed
from fedjax_seg.data.image_table import SPLITS, ImageTable, Row, below_root, is_junk, repeats
from fedjax_seg.data.tcga import barcode

TABLE, PATIENT, SITE = "metadata.csv", "patient", "site"
LAYOUT = "a folder with metadata.csv (columns bag,label,patient,site) and an .npz or .h5 per slide, or <class>/*.npz"
_ALIKE = (PATIENT, "group", "case_id")  # the last is what CLAM calls it


class BagTable(NamedTuple):
    """What the table tells.

    Attributes:
      table: rows whose `image` is the file of a bag.
      column: of the patients, '' = none.
      patients: where they are from, '' = they are not told.
      sited: a cell SITE tells the hospital.
      coded: it is the tissue source site of a TCGA barcode.
    """

    table: ImageTable
    column: str
    patients: str
    sited: bool
    coded: bool


def read_bag_table(
    base: Path, table: str, patient_column: str, column: str, per_site: bool, may_lack: bool = False
) -> BagTable:
    """Reads the table, or the folders where there is none.

    Args:
      base: the folder.
      table: below base; TABLE may be absent.
      patient_column: '' = none; PATIENT may be absent, then group or case_id is taken, or TCGA barcodes of the files.
      column: whose cells name the clients, '' = none; SITE may be absent where all files have TCGA barcodes.
      per_site: a patient's id becomes client/patient.
      may_lack: where neither a column nor barcodes tell the clients, they will be drawn.

    Raises: UserError on the whole table; faults of single rows are collected.
    """
    path: Path | None = base / table
    if path is not None and path.is_file():
        content, delimiter, header, lines = csv_table.read(path)
        if patient_column == PATIENT:
            patient_column = next((name for name in _ALIKE if name in header), "")
        optional = column == SITE and not any(name.lower() == SITE for name in header)
        _check_columns(path, header, ("bag", "label", patient_column, "" if optional else column))
        if not lines:
            raise UserError(f"{path}: a header but no row; a row per slide expected")
        rows, faults, skipped = _rows(base, header, lines, patient_column, "" if optional else column)
        faults += repeats(rows)
    elif table == TABLE:
        path, delimiter, rows, faults, skipped = None, ",", _folders(base), [], []
        content = "\n".join(r.image for r in rows).encode()
        header, patient_column = [], ""
    else:
        raise UserError(f"data.table: no {table} in {base} (found: {listed(base)}); {LAYOUT} expected")
    codes = [barcode(r.image.rpartition("/")[2]) for r in rows]
    known = bool(rows) and all(codes)
    told = f"column {patient_column!r}" if patient_column else ""
    if known and not patient_column:
        rows = [r._replace(patient=code.patient) for r, code in zip(rows, codes) if code]
        told = "patients of TCGA barcodes (the first three fields)"
    coded = known and SITE not in header
    if coded:
        rows = [r._replace(cells={**r.cells, SITE: code.site}) for r, code in zip(rows, codes) if code]
    lost = bool(column and rows) and column not in rows[0].cells
    if lost and not may_lack:
        raise UserError(
            f"data.partition: no column {column!r} in {table}, and files are not all named by TCGA barcodes; add it, or"
            " set data.partition='dirichlet'"
        )
    if lost and per_site:
        raise UserError(f"data.patients_per_site: needs sites, there is no column {column!r} in {table}")
    if per_site:
        rows = [r._replace(patient=f"{r.cells[column]}/{r.patient}") for r in rows]
    sha = hashlib.sha256(content).hexdigest()
    found = ImageTable(path, sha, delimiter, bool(told), tuple(rows), tuple(faults), tuple(skipped))
    return BagTable(found, patient_column, told, coded or SITE in header, coded)


def _check_columns(path: Path, header: Sequence[str], needed: Sequence[str]) -> None:
    for name in filter(None, needed):
        if header.count(name) > 1:
            raise UserError(f"{path}: {header.count(name)} columns named {name!r}; one expected")
        if name not in header:
            alike = {"bag": ["slide_id", "slide", "file"]}.get(name, [])
            close = difflib.get_close_matches(name, [h.lower() for h in header], n=1) + alike
            near = next((h for h in header if h.lower() in close), "")
            cure = f"rename {near!r}" if near else "add it"
            raise UserError(f"{path}: no column {name!r}, columns found: {', '.join(header) or 'none'}; {cure}")


def _rows(base: Path, header, lines, patient: str, column: str) -> tuple[list[Row], list[str], list[str]]:
    rows, faults, skipped = list[Row](), list[str](), list[str]()
    for line, values in lines:
        cells: Mapping[str, str] = dict(zip(header, values))
        wide = csv_table.over_lines([cells.get(name, "") for name in ("bag", "label", patient, column, "split")])
        if len(values) < len(header) or any(values[len(header) :]):
            count = f"{len(values)} cells, {len(header)} in the header; quote cells with separators"
            wide = f"{count}, or {wide}" if wide else count
        if wide:
            faults.append(f"line {line}: {wide}")
            continue
        name, wrong = _below(base, cells["bag"])
        if is_junk(name):
            skipped.append(name)
            continue
        faults += [f"line {line}: {fault}" for fault in wrong]
        what = name or cells["bag"] or "row without a bag"
        for role, key in (("label", "label"), (patient, patient), (column, column)):
            if key and not cells[key]:
                faults.append(f"line {line}: {what}: no {role}; fill the cell in")
        split = cells.get("split", "").lower()
        if split and split not in SPLITS:
            text = f"split {cells['split']!r} found, one of {', '.join(SPLITS)} (or empty) expected"
            faults.append(f"line {line}: {what}: {text}")
        person = cells[patient] if patient else name
        rows.append(Row(line, name, "", cells["label"], person, split, None, cells))
    return rows, faults, skipped


def _below(base: Path, text: str) -> tuple[str, list[str]]:
    """The path with '/' and its ending (slide ids of CLAM have none), or '' and what is wrong."""
    name, faults = below_root(text, "bag", base)
    if name and not name.lower().endswith(ENDINGS):
        name = next((name + end for end in ENDINGS if (base / (name + end)).is_file()), name)
    return name, faults


def _folders(base: Path) -> list[Row]:
    """<class>/<slide>.npz or .h5."""
    names = sorted(
        path.relative_to(base).as_posix()
        for path in base.glob("*/*")
        if path.name.lower().endswith(ENDINGS) and not is_junk(path.relative_to(base).as_posix())
    )
    if not names:
        raise UserError(f"data.table: no {TABLE} in {base} (found: {listed(base)}); {LAYOUT} expected")
    return [Row(0, name, "", name.partition("/")[0], name, "", None, {}) for name in names]
