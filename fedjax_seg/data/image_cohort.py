"""An image folder as FederatedData: where it lies, who made it, and all that is said of it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import image_report as reporting
from fedjax_seg.data import partition as parting
from fedjax_seg.data.federated import FederatedData, Split, validate
from fedjax_seg.data.image_cases import DESCRIPTIONS, Cases, Seen, files_digest, unnamed_files
from fedjax_seg.data.image_clients import Clients
from fedjax_seg.data.image_table import ImageTable, Row


def folder(root: str, layout: str) -> Path:
    """The folder of the data. Raises: UserError that tells the expected layout."""
    if not root:
        raise checks.UserError(f"data.root: no folder given; name {layout}")
    base = Path(root).expanduser()
    if not base.is_dir():
        what = "is a file" if base.exists() else "does not exist"
        raise checks.UserError(f"data.root: {base} {what}; {layout} expected")
    return base


def listed(base: Path) -> str:
    """The first entries of a folder, for messages."""
    there = sorted(p.name + "/" * p.is_dir() for p in base.iterdir())
    return ", ".join(there[:6]) + (", ..." if len(there) > 6 else "") or "nothing"


def origin(base: Path) -> dict[str, Any]:
    """What generator.json or about.json of the folder says of who made the images, as entries of `about`."""
    facts: dict[str, Any] = {}
    for name in DESCRIPTIONS:
        if (base / name).is_file():
            try:
                found = json.loads((base / name).read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise checks.UserError(f"{base / name}: not JSON ({error}); mend or delete it") from None
            facts = found if isinstance(found, dict) else {"generator": str(found)}
            break
    return {
        "generator": str(facts.get("generator") or facts.get("name") or reporting.NO_GENERATOR),
        "generator_facts": facts,
        "synthetic": facts.get("synthetic") is True,  # no image is, or is made from, a patient's: may be shown
    }


def assemble(
    base: Path,
    found: ImageTable,
    rows: Sequence[Row],
    cases: Cases,
    y: np.ndarray,
    classes: tuple[str, ...],
    assigned: Clients,
    roles: Sequence[str],
    about: Mapping[str, Any],
    *,
    spacing: Sequence[float] = (),
    skip: Sequence[str] = (),
    unit: str = "patient",
    notes: Sequence[str] = (),
) -> FederatedData:
    """Leaves out the cases without a part, and describes the others.

    Args:
      found: the table; `rows` of it are the N cases.
      cases: their x, and what was seen of the files.
      y: labels [N] or masks [N, H, W].
      assigned, roles: of image_clients.divide.
      about: what the maker knows; facts of the cases are added.
      spacing: mm per pixel as stored where the table has none.
      skip: columns that are no facts of a site.
      unit: what is never divided, as tables call it.
      notes: lines for the summary; those that begin with WARNING also go into about['warnings'].
    """
    keep = np.flatnonzero((assigned.of >= 0) & (np.array(roles) != parting.UNUSED)).tolist()
    unused = len(rows) - len(keep)
    own, role, of = [rows[n] for n in keep], np.array(roles)[keep], assigned.of[keep]
    seen = [s for n in keep if (s := cases.seen[n]) is not None]
    arrays = {"x": cases.x[keep], "y": y[keep]} if unused else {"x": cases.x, "y": y}
    mm = _spacing(own, seen, spacing)
    if mm is not None:
        arrays["spacing"] = mm
    cohort = reporting.Cohort(tuple(own), tuple(seen), of, role, arrays["y"], assigned.names, classes, unit)
    parts = {
        part: tuple(np.flatnonzero((of == k) & (role == part)).astype(np.int32) for k in range(len(assigned.names)))
        for part in (parting.TRAIN, parting.TEST)
    }
    notes = (*reporting.contradictions(cohort), *notes)
    extra, junk = unnamed_files(base, found.path, found.rows)
    about = {
        **about,
        "table": {"file": found.path.name if found.path else "", "sha256": found.sha256, "delimiter": found.delimiter},
        "images_sha256": files_digest(seen, own),
        "kinds": dict(Counter(s.kind for s in seen)),
        "stored_sizes": dict(Counter(f"{s.shape[0]}x{s.shape[1]}" for s in seen)),
        "copies": reporting.copied(cohort),
        "left_out": {
            "rows_unused": unused,
            "clients_dropped": dict(assigned.dropped),
            "rows_of_junk": len(found.skipped),
        },
        "files_not_named": {"total": len(extra), "junk": junk, "first": extra[:3]},
        "clients": reporting.per_client(cohort),
        "table1": reporting.table1(cohort),
        "site_columns": site_columns(own, of, len(assigned.names), skip),
        "warnings": [text for text in notes if text.startswith("WARNING")],
    }
    data = FederatedData(
        arrays=arrays,
        case_ids=tuple(r.image for r in own),
        patient_ids=tuple(r.patient for r in own),
        sites=assigned.names,
        site_of=of,
        splits=(Split("split0", parts[parting.TRAIN], parts[parting.TEST]),),
        classes=classes,
        about=about,
        files=reporting.files(cohort),
        summary=(*reporting.summary(cohort, about), *notes),
        external=assigned.external,
        aside=np.flatnonzero(role == parting.ASIDE).astype(np.int32),
    )
    validate(data)
    return data


def site_columns(rows: Sequence[Row], of: np.ndarray, clients: int, skip: Sequence[str]) -> dict[str, list[str]]:
    """Columns of the table that are facts of a site: {column: its cell at every client, in client order}.

    Args:
      rows, of: N cases and their clients.
      skip: columns that are left out: what is read of every image, and the column that names the clients.
    """
    out: dict[str, list[str]] = {}
    for column in rows[0].cells if rows else ():
        values: list[set[str]] = [set() for _ in range(clients)]
        for r, k in zip(rows, of):
            values[k].add(r.cells[column])
        if column and column not in skip and all(len(v) == 1 for v in values) and set.union(*values) != {""}:
            out[column] = [min(v) for v in values]
    return out


def _spacing(rows: Sequence[Row], seen: Sequence[Seen], given: Sequence[float]) -> np.ndarray | None:
    """float32 [N, 2], mm per final pixel; None where it is not known of every case."""
    stored = [r.spacing or ((given[0], given[-1]) if given else None) for r in rows]
    known = [(mm[0] * s.zoom[0], mm[1] * s.zoom[1]) for mm, s in zip(stored, seen) if mm is not None]
    return np.array(known, np.float32) if len(known) == len(rows) else None
