"""The phenotypic table of the Preprocessed Connectomes Project (PCP) and the cohort rule; needs no series file."""

import csv
import difflib
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core import checks

ASD, CONTROL, UNKNOWN = 1, 0, -1
FD_COLUMN = "func_mean_fd"
_REQUIRED = ("SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP")
_MISSING = frozenset({"", "-9999", "-9999.0", "nan", "na", "n/a"})


class Subject(NamedTuple):
    """One row of the table.

    Attributes:
      line: of the CSV file, from 1 (the header).
      file_id: the stem of the series file, '' where the table says `no_filename`.
      sub_id: the person, digits without leading zeros ('0050003' and '50003' are one person).
      site: SITE_ID with sub-sites merged, '' where missing.
      diagnosis: ASD, CONTROL or UNKNOWN.
      mean_fd: mean framewise displacement in mm, NaN where missing.
      faults: what is wrong with the row, one line each, '' = nothing.
    """

    line: int
    file_id: str
    sub_id: str
    site: str
    diagnosis: int
    mean_fd: float
    faults: tuple[str, ...] = ()


class Phenotypic(NamedTuple):
    path: Path
    sha256: str
    delimiter: str
    subjects: tuple[Subject, ...]


class Step(NamedTuple):
    name: str
    subjects: tuple[Subject, ...]


class Selection(NamedTuple):
    """Who is left after each step of the cohort rule, and why the others are not.

    Attributes:
      sites: chosen site names in client order.
      steps: from all the rows to the last rule applied; each keeps the order of the table.
      excluded: (subject, reason) in the order of exclusion.
    """

    sites: tuple[str, ...]
    steps: tuple[Step, ...]
    excluded: tuple[tuple[Subject, str], ...]

    @property
    def kept(self) -> tuple[Subject, ...]:
        return self.steps[-1].subjects


def merged_site(site_id: str) -> str:
    """SITE_ID without a numeric sub-site: UM_1 -> UM; MAX_MUN stays, its underscore is part of the name."""
    return re.sub(r"_\d+$", "", site_id)


def read_phenotypic(path: Path) -> Phenotypic:
    """Reads the table as text; comma, semicolon or tab separated, with or without a byte-order mark.

    Empty cells and -9999 are missing. Faults of single rows are kept with the row: only those of the chosen sites
    matter to a run.

    Raises: UserError where the file is unreadable, not a table, or lacks one of the columns SUB_ID, SITE_ID, FILE_ID,
      DX_GROUP and func_mean_fd.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise checks.UserError(f"{path}: cannot be read ({error.strerror}); name the phenotypic CSV") from None
    except UnicodeDecodeError as error:
        raise checks.UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as 'CSV UTF-8'") from None
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        column = {name: _column(path, header, name) for name in (*_REQUIRED, FD_COLUMN)}
        rows = [(reader.line_num, [c.strip() for c in row]) for row in reader if any(c.strip() for c in row)]
    except csv.Error as error:
        raise checks.UserError(f"{path}: line {reader.line_num}: {error}; a CSV table expected") from None
    if not rows:
        raise checks.UserError(f"{path}: a header but no row; a row per subject expected")
    subjects = [_subject(line, row, len(header), column, delimiter) for line, row in rows]
    return Phenotypic(path, hashlib.sha256(content).hexdigest(), delimiter, _mark_repeats(subjects))


def _column(path: Path, header: Sequence[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if header.count(name) > 1:
        raise checks.UserError(f"{path}: {header.count(name)} columns named {name}; one expected, rename the others")
    if len(header) <= 1:
        raise checks.UserError(
            f"{path}: one single column found ({header[0][:60] if header else ''!r}); a header with"
            f" {', '.join(_REQUIRED)} separated by comma, semicolon or tab expected"
        )
    close = difflib.get_close_matches(name.upper(), [h.upper() for h in header], n=1, cutoff=0.8)
    near = next((h for h in header if close and h.upper() == close[0]), "")
    hint = f"; the nearest is {near!r}: rename it" if near else "; take the official PCP table"
    raise checks.UserError(f"{path}: no column {name} among its {len(header)} columns{hint}")


def _subject(line: int, row: Sequence[str], width: int, column: dict[str, int], delimiter: str) -> Subject:
    if len(row) < width or any(row[width:]):
        fault = f"{len(row)} cells, {width} in the header; quote cells that contain {delimiter!r}"
        cells = {name: row[i] if i < len(row) else "" for name, i in column.items()}
        # its cells may be shifted, so its site is not believed: without a site it is reported whatever sites are chosen
        file_id = "" if cells["FILE_ID"].lower() == "no_filename" else cells["FILE_ID"] or "no FILE_ID"
        return Subject(line, file_id, "", "", UNKNOWN, math.nan, (fault,))
    cells = {name: "" if row[i].lower() in _MISSING else row[i] for name, i in column.items()}
    faults = [f"{name} missing; fill it in" for name in ("SUB_ID", "SITE_ID") if not cells[name]]
    diagnosis = {"": UNKNOWN, "1": ASD, "2": CONTROL}.get(_whole(cells["DX_GROUP"]))
    if diagnosis is None:
        faults.append(f"DX_GROUP {cells['DX_GROUP']!r}; 1 (ASD) or 2 (control) expected")
    decimal = cells[FD_COLUMN] if delimiter == "," else cells[FD_COLUMN].replace(",", ".")
    mean_fd = _real(decimal)
    if decimal and not (math.isfinite(mean_fd) and mean_fd >= 0):
        faults.append(f"{FD_COLUMN} {cells[FD_COLUMN]!r}; a number of mm, at least 0, expected")
    sub_id = _whole(cells["SUB_ID"])
    file_id = "" if cells["FILE_ID"].lower() == "no_filename" else cells["FILE_ID"]
    padded = re.search(r"_(\d{7})$", file_id)
    if padded and sub_id.isdecimal() and int(padded[1]) != int(sub_id):
        faults.append(
            f"FILE_ID {file_id} beside SUB_ID {cells['SUB_ID']}; the same number expected, is a column shifted?"
        )
    site = merged_site(cells["SITE_ID"])
    return Subject(line, file_id, sub_id, site, UNKNOWN if diagnosis is None else diagnosis, mean_fd, tuple(faults))


def _whole(text: str) -> str:
    """'0050003' and '50003.0' -> '50003'; any other text unchanged."""
    found = re.fullmatch(r"0*(\d+)(\.0*)?", text)
    return found[1] if found else text


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _mark_repeats(subjects: Iterable[Subject]) -> tuple[Subject, ...]:
    """Adds a fault where a FILE_ID returns, or where one SUB_ID has two sites or two diagnoses."""
    first_file: dict[str, Subject] = {}
    first_person: dict[str, Subject] = {}
    marked = []
    for s in subjects:
        faults = list(s.faults)
        earlier = first_file.setdefault(s.file_id, s) if s.file_id else s
        if earlier is not s:
            faults.append(f"FILE_ID already in line {earlier.line}; delete one of the two rows")
        person = first_person.setdefault(s.sub_id, s) if s.sub_id and s.file_id else s
        if (person.site, person.diagnosis) != (s.site, s.diagnosis):
            faults.append(
                f"SUB_ID {s.sub_id} has another site or diagnosis in line {person.line}; one person, one SUB_ID"
            )
        marked.append(s._replace(faults=tuple(faults)))
    return tuple(marked)


def narrow(selection: Selection, name: str, reason: Callable[[Subject], str]) -> Selection:
    """One more step: keeps the subjects whose `reason` for exclusion is ''."""
    reasons = [(s, reason(s)) for s in selection.kept]
    step = Step(name, tuple(s for s, why in reasons if not why))
    return Selection(
        selection.sites, (*selection.steps, step), (*selection.excluded, *((s, why) for s, why in reasons if why))
    )


def cohort(subjects: Sequence[Subject], *, max_fd: float = 0.15, sites: Sequence[str] = ()) -> Selection:
    """The cohort rule of the FedHAvg paper (Table 1) on the phenotypic table alone.

    Source: with the official table and the default limit this gives the 163, 104, 72 and 50 subjects of the paper's
    NYU, UM, UCLA and USM. A row without a motion value is dropped, since it cannot meet the limit.

    Args:
      subjects: the rows of the table.
      max_fd: limit of func_mean_fd in mm, inclusive; inf = no limit, and rows without a value stay.
      sites: merged site names in client order; () = all, largest cohort first, ties by name.

    Returns: the selection after the steps: rows, file id, diagnosis, motion, sites.
    Raises: UserError on an unknown or repeated site, or a max_fd that is not positive.
    """
    if max_fd != math.inf:
        checks.number("data.max_fd", max_fd, above=0.0)
    chosen = _chosen_sites(subjects, sites)
    s = Selection(chosen, (Step("rows in the table", tuple(subjects)),), ())
    s = narrow(s, "with a file id", lambda p: "" if p.file_id else "no_filename")
    # a faulty row stays in: it is reported as a fault, not silently left out
    s = narrow(s, "diagnosis known", lambda p: "" if p.diagnosis != UNKNOWN or p.faults else "DX_GROUP missing")
    if max_fd != math.inf:
        s = narrow(s, f"{FD_COLUMN} <= {max_fd:g}", lambda p: "" if p.faults else _motion(p.mean_fd, max_fd))
    if not sites:
        sizes = {site: sum(p.site == site for p in s.kept) for site in chosen}
        chosen = tuple(sorted(chosen, key=lambda site: (-sizes[site], site)))
    s = narrow(s, "in the chosen sites", lambda p: "" if p.site in chosen or not p.site else "site not chosen")
    return s._replace(sites=chosen)


def _motion(mean_fd: float, max_fd: float) -> str:
    if math.isnan(mean_fd):
        return f"{FD_COLUMN} missing"
    return f"{FD_COLUMN} > {max_fd:g}" if mean_fd > max_fd else ""


def _chosen_sites(subjects: Sequence[Subject], sites: Sequence[str]) -> tuple[str, ...]:
    known = sorted({p.site for p in subjects} - {""})
    if isinstance(sites, str):
        raise checks.UserError(f"data.sites: {sites!r} given, a tuple of names expected, e.g. ({sites!r},)")
    for i, site in enumerate(sites):
        if site in sites[:i]:
            raise checks.UserError(f"data.sites: {site!r} given twice; each site is one client")
        if site not in known:
            merged = merged_site(str(site))
            hint = f" sub-sites are merged: write {merged!r};" if merged in known else ""
            near = checks.suggestion(str(site).upper(), known)
            raise checks.UserError(f"data.sites: unknown site {site!r};{hint}{near}")
    return tuple(sites) or tuple(known)
