"""Which tiles belong together: the slides or patients of a table of tiles, and their hospitals where ids tell them."""

from collections.abc import Sequence
from typing import NamedTuple

from fedjax_seg.core import checks
from fedjax_seg.data.image_table import ImageTable, Row
from fedjax_seg.data.tcga import barcode

FROM = ("auto", "prefix", "none")
NO_GROUPS = "none told: tiles of one slide can be in training and in test, scores are too high"
NO_GROUPS_WARNING = (
    "WARNING: NO GROUPS. Nothing tells which tiles are of one slide or patient: tiles of one slide can be in training"
    " and in test, at several clients too, and SCORES ARE TOO HIGH; add a column of slides or patients"
    " (data.group_column)"
)


class Grouped(NamedTuple):
    """rows: with their groups in `patient`; told: where they are from; sites: of the ids; notes: lines to print."""

    rows: tuple[Row, ...]
    told: str
    sites: bool
    notes: tuple[str, ...]


def grouped(found: ImageTable, how: str, group_column: str, site_column: str, sited: bool, per_site: bool) -> Grouped:
    """Decides the groups, and the sites where ids are TCGA barcodes and no column or folder names sites.

    Args:
      found: rows with the group of the table or folder as patient, if it has one (found.patients).
      how: 'auto' = of the table or folder; else of TCGA barcodes in the paths, if all images have one; else none.
        'prefix' = the file name up to its last '_'. 'none' = every image is a group of its own.
      group_column, site_column: their names; the site of a barcode is written into the cells as site_column.
      sited: whether the table or the folders name sites.
      per_site: a group's id becomes site/group.

    Raises: UserError where `how` contradicts the table.
    """
    rows, notes, told, codes = found.rows, list[str](), "", False
    if how != "auto" and found.patients:
        raise checks.UserError(
            f"data.group_from: {how!r} given, but the groups are told by {group_column!r}; set data.group_column=''"
        )
    known = [barcode(r.patient if found.patients else r.image) for r in rows]
    some = sum(code is not None for code in known)
    if how == "prefix":
        rows = tuple(r._replace(patient=_prefix(r.image)) for r in rows)
        told = "file names up to the last '_'"
    elif how == "auto" and rows and some == len(rows):
        rows, codes = tuple(_coded(r, site_column, sited) for r in rows), not sited
        told = "patients of TCGA barcodes (the first three fields)"
        notes.append(
            f"note: ids are TCGA barcodes: {len({r.patient for r in rows})} patients (first three fields)"
            + (f", hospitals are the tissue source sites (second field), as column {site_column!r}" if codes else "")
        )
    elif found.patients:
        told = f"column {group_column!r}" if found.path else "folders below the classes"
    else:
        told = NO_GROUPS
        notes.append(NO_GROUPS_WARNING + _hint(rows))
    if some and some < len(rows) and how == "auto":
        notes.append(f"note: {some} of {len(rows)} ids are TCGA barcodes: not used, as not all of them are")
    if per_site:
        if not (sited or codes):
            raise checks.UserError(f"data.groups_per_site: needs sites, there is no column {site_column!r}")
        rows = tuple(r._replace(patient=f"{r.cells[site_column]}/{r.patient}") for r in rows)
    return Grouped(rows, told, codes, tuple(notes))


def _coded(row: Row, site_column: str, sited: bool) -> Row:
    code = barcode(row.patient) or barcode(row.image)
    assert code is not None
    cells = row.cells if sited else {**row.cells, site_column: code.site}
    return row._replace(patient=code.patient, cells=cells)


def _prefix(image: str) -> str:
    name = image.rpartition("/")[2]
    stem = name.rpartition(".")[0] or name
    return stem.rpartition("_")[0] or stem


def _hint(rows: Sequence[Row]) -> str:
    groups = len({_prefix(r.image) for r in rows if r.image})
    if not 1 < groups < len(rows):
        return ""
    return f", or data.group_from='prefix' if names are <slide>_<tile>: {groups} groups of {len(rows)} images"
