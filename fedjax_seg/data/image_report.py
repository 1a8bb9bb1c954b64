"""What a run says of an image folder: the table of clients, warnings, and the CSV files it saves."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.data.image_cases import Seen
from fedjax_seg.data.image_table import Row
from fedjax_seg.data.partition import ASIDE, TEST, TRAIN

NO_PATIENTS = "none named: every image counts as a patient of its own"
NO_GENERATOR = "none named in the folder: taken as real images"
_LISTED = 3
_DIM = 0.25  # of the range: 12-bit CT in 16 bits reaches 0.06


class Cohort(NamedTuple):
    """N cases in the order of the arrays: rows, what was seen of their files, client, role, labels; names of both."""

    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    of: np.ndarray  # int [N]
    roles: np.ndarray  # str [N]
    y: np.ndarray  # uint8 [N, H, W] or int [N]
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    unit: str = "patient"  # what is never divided, as tables call it


def _masks(cohort: Cohort) -> bool:
    return cohort.y.ndim == 3


def per_client(cohort: Cohort) -> list[dict[str, Any]]:
    """A row per client: cases and patients, cases per role, and of masks the median lesion and the empty ones."""
    lesion = np.array([one.lesion for one in cohort.seen])
    rows = []
    for k, name in enumerate(cohort.clients):
        own = cohort.of == k
        row: dict[str, Any] = {"client": name, "cases": int(own.sum())}
        row["patients"] = len({r.patient for r, mine in zip(cohort.rows, own) if mine})
        row |= {role: int((own & (cohort.roles == role)).sum()) for role in (TRAIN, TEST, ASIDE)}
        if _masks(cohort):
            some = lesion[own & (lesion > 0)]
            row |= {"lesion_pixels_median": float(np.median(some)) if len(some) else None}
            row |= {"empty_masks": int((own & (lesion == 0)).sum())}
        else:
            row |= {name: int((own & (cohort.y == n)).sum()) for n, name in enumerate(cohort.classes)}
        rows.append(row)
    return rows


def table1(cohort: Cohort) -> list[dict[str, Any]]:
    """A row per client for the report's cohort table: site, total, cases per class (of masks: with lesion, empty)."""
    rows = []
    for row in per_client(cohort):
        if _masks(cohort):
            parts = {"with lesion": row["cases"] - row["empty_masks"], "empty mask": row["empty_masks"]}
        else:
            parts = {name: row[name] for name in cohort.classes}
        rows.append({"site": row["client"], "total": row["cases"]} | parts)
    return rows


def copied(cohort: Cohort) -> dict[str, int]:
    """Pictures that occur more than once, pixel by pixel, and where.

    Returns: 'images' beyond the first of each picture; pictures 'across_patients' and 'across_clients'; 'test' images
      with a copy in training; 'aside' images with a copy in training or test.
    """
    groups: dict[str, list[int]] = {}
    for n, one in enumerate(cohort.seen):
        groups.setdefault(one.sha256, []).append(n)
    found = Counter[str]()
    for own in groups.values():
        found["images"] += len(own) - 1
        found["across_patients"] += len({cohort.rows[n].patient for n in own}) > 1
        found["across_clients"] += len(set(cohort.of[own].tolist())) > 1
        role = Counter(cohort.roles[own].tolist())
        found["test"] += role[TEST] if role[TRAIN] else 0
        found["aside"] += role[ASIDE] if role[TRAIN] or role[TEST] else 0
    return {name: found[name] for name in ("images", "across_patients", "across_clients", "test", "aside")}


def contradictions(cohort: Cohort) -> list[str]:
    """A warning where a picture has several labels; none for masks."""
    first: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    for n, one in enumerate(cohort.seen if not _masks(cohort) else ()):
        other = first.setdefault(one.sha256, n)
        if cohort.y[other] != cohort.y[n]:
            found.setdefault(one.sha256, (other, n))
    if not found:
        return []
    a, b = (f"{cohort.rows[n].image} ({cohort.classes[cohort.y[n]]})" for n in next(iter(found.values())))
    return [f"WARNING: {len(found)} pictures have different labels, e.g. {a} and {b}"]


def files(cohort: Cohort) -> dict[str, str]:
    """cohort.csv: every case with its client, patient, role, and label or lesion pixels as stored and as used."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    masks = _masks(cohort)
    end = ["lesion_pixels_stored", "lesion_pixels"] if masks else ["label"]
    writer.writerow(["image", "client", "patient", "role", "rows", "columns", *end])
    for n, (row, one) in enumerate(zip(cohort.rows, cohort.seen)):
        last = [one.lesion_before, one.lesion] if masks else [cohort.classes[cohort.y[n]]]
        writer.writerow([row.image, cohort.clients[cohort.of[n]], row.patient, cohort.roles[n], *one.shape, *last])
    return {"cohort.csv": text.getvalue()}


def summary(cohort: Cohort, about: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines to print: the clients, how the inputs were made, and all that deserves a warning."""
    rows = about["clients"]
    header = [name.replace("_", " ").replace("pixels median", "px (median)") for name in rows[0]]
    header[2] = f"{cohort.unit}s"
    total = ["all", *(sum(row[k] or 0 for row in rows) for k in list(rows[0])[1:])]
    if _masks(cohort):
        some = [one.lesion for one in cohort.seen if one.lesion]
        total[list(rows[0]).index("lesion_pixels_median")] = float(np.median(some)) if some else None
    lines = _aligned([header, *(list(row.values()) for row in rows), *([total] if len(rows) > 1 else [])])
    kinds = ", ".join(f"{n} {kind}" for kind, n in about["kinds"].items())
    sizes = Counter(about["stored_sizes"]).most_common()
    more = f" and {len(sizes) - _LISTED} other sizes" if len(sizes) > _LISTED else ""
    lines += [
        "",
        f"images: {kinds}; {', '.join(f'{n} of {size}' for size, n in sizes[:_LISTED])}{more}",
        f"input: {about['input']}",
        f"generator: {about['generator']}",
        f"clients: {about['partition']}",
        f"split: {about['split_rule']}",
    ]
    return (*lines, *_leaks(cohort, about), *_files_notes(cohort, about), *_table_notes(cohort, about))


def _leaks(cohort: Cohort, about: Mapping[str, Any]) -> list[str]:
    lines, n = list[str](), about["copies"]
    if n["images"]:
        line = (
            f"{n['images']} images are exact copies of others ({n['across_patients']} pictures under several"
            f" {cohort.unit}s, {n['across_clients']} at several clients);"
            f" {n['test']} test images have a copy in training"
        )
        if n["aside"]:
            line += f", {n['aside']} set aside have one in training or test"
        lines.append(("WARNING: " if n["test"] or n["aside"] else "note: ") + line)
    return lines


def _files_notes(cohort: Cohort, about: Mapping[str, Any]) -> list[str]:
    seen = cohort.seen
    lost = sum(one.lesion_before > 0 and one.lesion == 0 for one in seen)
    stretched = sum(abs(one.zoom[0] / one.zoom[1] - 1) > 0.01 for one in seen)
    sixteen = [one.highest for one in seen if one.bits == 16]
    depths = sorted({one.bits for one in seen})
    lines = []
    if lost:
        cure = ", or data.mask_resize='majority'" * ("masks nearest" in about["input"])
        lines.append(f"WARNING: {lost} masks lost their lesion on the way to this size; take a larger data.size{cure}")
    if stretched:
        lines.append(f"note: {stretched} images are stretched by more than 1 %; data.unify='pad' keeps proportions")
    if any(one.transparent for one in seen):
        lines.append(f"note: {sum(one.transparent for one in seen)} images are transparent: composited on white")
    if any(one.turned for one in seen):
        lines.append(f"note: {sum(one.turned for one in seen)} images have an EXIF turn, which is not made")
    if len(depths) > 1:
        lines.append(
            f"note: bit depths {', '.join(str(b or 32) for b in depths)} are mixed; a client may differ by that"
        )
    if sixteen and not about.get("windowed") and max(sixteen) < _DIM * 65535:
        cure = "; set data.window" * ("windowed" in about)
        lines.append(f"note: 16-bit images reach {max(sixteen):g} of 65535 only: they are dark{cure}")
    return lines


def _table_notes(cohort: Cohort, about: Mapping[str, Any]) -> list[str]:
    left, extra = about["left_out"], about["files_not_named"]
    lines = []
    if about["table"]["delimiter"] != ",":
        lines.append(f"note: {about['table']['file']} is separated by {about['table']['delimiter']!r}")
    for name, n in left["clients_dropped"].items():
        lines.append(f"note: client {name} dropped, {n} {cohort.unit}(s)")
    if left["rows_unused"]:
        lines.append(f"note: {left['rows_unused']} rows are in no part (split val, dropped clients)")
    if left["rows_of_junk"]:
        lines.append(f"note: {left['rows_of_junk']} rows name files that are no images (Thumbs.db and such): skipped")
    if extra["total"]:
        more = ", ..." if extra["total"] > len(extra["first"]) else ""
        table = about["table"]["file"]
        what = f"that {table} does not name" if table else "that are no images, or in no class folder,"
        lines.append(f"note: files {what} are not read: {extra['total']} ({', '.join(extra['first'])}{more})")
    known = sum(r.spacing is not None for r in cohort.rows)
    if 0 < known < len(cohort.rows):
        lines.append(f"note: spacing is known of {known} of {len(cohort.rows)} images: set data.spacing for the others")
    idle = [row["client"] for row in about["clients"] if not row[TRAIN] and row[TEST]]
    if idle:
        lines.append(f"note: clients without a training case: {', '.join(idle)}")
    return lines


def _aligned(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Columns under each other: the first to the left, numbers to the right, '-' where there is none."""
    texts = [["-" if c is None else f"{c:g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in texts
    ]
