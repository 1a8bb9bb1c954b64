"""What a run says of a federation of volumes: facts, lines to print, and the CSV files it saves."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_seg.data import label_schemes
from fedjax_seg.data.volume_cache import Entry

_LISTED = 3
_OWN_PLACE = {"cache", "workers", "ahead"}  # options that decide no number


class Cohort(NamedTuple):
    """N subjects in the order of the arrays.

    Attributes:
      sites: K names.
      entries: N.
      site_of: N client ids.
      train: ids of those that train; all others test.
      channels: names.
      scheme: of the labels.
    """

    sites: tuple[str, ...]
    entries: tuple[Entry, ...]
    site_of: tuple[int, ...]
    train: frozenset[str]
    channels: tuple[str, ...]
    scheme: label_schemes.Scheme


def table1(cohort: Cohort) -> list[dict[str, Any]]:
    """A row per site: site, total, train, test."""
    rows = []
    for k, site in enumerate(cohort.sites):
        own = [e.subject in cohort.train for e, of in zip(cohort.entries, cohort.site_of) if of == k]
        rows.append({"site": site, "total": len(own), "train": sum(own), "test": len(own) - sum(own)})
    return rows


def about(cohort: Cohort, layout: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able facts, without any path: equal data give equal facts wherever they lie."""
    scheme = cohort.scheme
    facts = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items() if name not in _OWN_PLACE}
    sizes = Counter("x".join(map(str, e.native)) for e in cohort.entries)
    return facts | {
        "name": layout,
        "channels": list(cohort.channels),
        "label_scheme": scheme.name,
        "label_values": list(scheme.values),
        "regions": [[name, list(ids)] for name, ids in scheme.regions],
        "sites": list(cohort.sites),
        "subjects": len(cohort.entries),
        "native_sizes": dict(sizes),
        "orientation": cohort.entries[0].orientation,
        "voxels": {c: sum(e.voxels.get(v, 0) for e in cohort.entries) for c, v in zip(scheme.classes, scheme.values)},
        "table1": table1(cohort),
    }


def notes(cohort: Cohort) -> list[str]:
    """Whatever deserves a warning, a line per kind."""
    facts = [(e.subject, e.facts) for e in cohort.entries]
    lines = []
    if rounded := [(s, f["rounded"]) for s, f in facts if f["rounded"]]:
        lines.append(
            f"{sum(n for _, n in rounded)} label voxels of {_subjects(rounded)} were not quite whole numbers (a scale"
            " factor): rounded"
        )
    if bad := [(s, f["nonfinite"]) for s, f in facts if f["nonfinite"]]:
        total = sum(n for _, files in bad for n in files.values())
        lines.append(f"WARNING: {total} NaN or infinite voxels of {_subjects(bad)} are taken as background")
    if flat := [(s, f["constant"]) for s, f in facts if f["constant"]]:
        lines.append(f"WARNING: {sum(len(c) for _, c in flat)} constant images of {_subjects(flat)} are all zero now")
    if outside := [(s, f["outside"]) for s, f in facts if f["outside"]]:
        lines.append(
            f"{sum(n for _, n in outside)} label voxels of {_subjects(outside)} lie outside of the brain's box: the box"
            " was enlarged to hold them"
        )
    if elsewhere := [(s, f["geometry"]) for s, f in facts if f["geometry"]]:
        lines.append(
            f"WARNING: files of {_subjects(elsewhere)} lie elsewhere in space than the first image: taken as they lie"
            " in the array (data.check_affine=False)"
        )
    if empty := [(e.subject, 0) for e in cohort.entries if not e.values]:
        lines.append(f"{_subjects(empty)} without any label voxel: patches are drawn uniformly there")
    if (found := Counter(tuple(round(mm, 3) for mm in e.spacing) for e in cohort.entries)) and len(found) > 1:
        lines.append(f"{len(found)} different spacings (mm); volumes are not resampled")
    first = cohort.entries[0].orientation
    if other := [(f"{e.subject}: {e.orientation}", 0) for e in cohort.entries if e.orientation != first]:
        lines.append(f"{_subjects(other)} lie otherwise than the first ({first}): arrays and pictures are not turned")
    lines += _twice(cohort)
    return lines


def _twice(cohort: Cohort) -> list[str]:
    """Warnings of equal voxels under several ids, first of those on both sides of the split."""
    same: dict[str, list[tuple[str, str]]] = {}
    for e, k in zip(cohort.entries, cohort.site_of):
        use = "train" if e.subject in cohort.train else "test"
        same.setdefault(e.content, []).append((f"{e.subject} of {cohort.sites[k]}, {use}", use))
    many = [own for own in same.values() if len(own) > 1]
    across, within = ([own for own in many if (len({use for _, use in own}) > 1) == both] for both in (True, False))
    lines = []
    for start, groups in (
        ("THE SAME SCAN TRAINS AND TESTS, so scores are too good", across),
        ("the same scan", within),
    ):
        if groups:
            told = "; ".join(" = ".join(text for text, _ in own) for own in groups[:_LISTED])
            told += "; ..." * (len(groups) > _LISTED)
            lines.append(f"WARNING: {start}: {len(groups)} under more than one id ({told}); keep one id of each")
    return lines


def megabytes(cohort: Cohort) -> int:
    """Of the cohort in the cache."""
    return round(sum(e.bytes for e in cohort.entries) / 1e6)


def fresh(cohort: Cohort) -> str:
    """How many of the subjects were read from their files."""
    return f"{sum(e.fresh for e in cohort.entries)} of {len(cohort.entries)} subjects"


def summary(cohort: Cohort, facts: Mapping[str, Any], cached: str, remarks: Sequence[str]) -> tuple[str, ...]:
    """Lines to print."""
    rows = facts["table1"]
    total = {"site": "all"} | {k: sum(row[k] for row in rows) for k in ("total", "train", "test")}
    lines = _aligned([list(rows[0]), *(list(row.values()) for row in (*rows, *([total] if len(rows) > 1 else [])))])
    sizes = Counter(facts["native_sizes"]).most_common()
    more = f" and {len(sizes) - _LISTED} other sizes" if len(sizes) > _LISTED else ""
    largest = "x".join(str(max(axis)) for axis in zip(*(e.shape for e in cohort.entries)))
    named = zip(cohort.scheme.values, cohort.scheme.classes)
    values = ", ".join(name if name == str(v) else f"{v} {name}" for v, name in named)
    crop = "cropped to the brain, " if facts["crop"] else ""
    patch = "x".join(map(str, facts["patch"]))
    return (
        *lines,
        "",
        f"volumes: {', '.join(f'{n} of {size}' for size, n in sizes[:_LISTED])}{more};"
        f" channels {', '.join(cohort.channels)}",
        f"label scheme: {cohort.scheme.name} ({values})",
        f"input: normalised by {facts['normalise']!r}; {crop}largest {largest}",
        f"patches: {patch}, {facts['patches']} of a subject and epoch, {facts['sampling']} sampling",
        f"generator: {facts['generator']}",
        f"cache: {cached}",
        *(text if text.startswith("WARNING") else f"note: {text}" for text in remarks),
    )


def files(cohort: Cohort) -> dict[str, str]:
    """split.csv can be given back as the table of another run; cohort.csv tells what was found of every subject."""
    split, rows = [], []
    for e, k in zip(cohort.entries, cohort.site_of):
        use = "train" if e.subject in cohort.train else "val"
        split.append([cohort.sites[k], e.subject, use])
        lesion = sum(n for value, n in e.voxels.items() if value)
        shapes = ["x".join(map(str, shape)) for shape in (e.native, e.shape)]
        facts = [e.facts["rounded"], sum(e.facts["nonfinite"].values()), e.facts["outside"]]
        rows.append([e.subject, cohort.sites[k], use, *shapes, " ".join(f"{mm:g}" for mm in e.spacing), lesion, *facts])
    columns = ["subject", "site", "role", "size", "cropped", "spacing_mm", "labelled_voxels"]
    columns += ["rounded_voxels", "nonfinite_voxels", "labels_outside_brain"]
    return {
        "split.csv": _csv(["Partition_ID", "Subject_ID", "TrainOrVal"], split),
        "cohort.csv": _csv(columns, rows),
    }


def labels_csv(voxels: Mapping[str, Mapping[int, int]]) -> str:
    """CSV: a row per subject, a column per label value, voxels of the whole file."""
    values = sorted({value for counts in voxels.values() for value in counts})
    rows = [[subject, *(counts.get(v, 0) for v in values)] for subject, counts in voxels.items()]
    return _csv(["Subject_ID", *(f"voxels_{value}" for value in values)], rows)


def _subjects(named: Sequence[tuple[str, Any]]) -> str:
    names = ", ".join(name for name, _ in named[:_LISTED]) + ", ..." * (len(named) > _LISTED)
    return f"{len(named)} subject(s) ({names})"


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _aligned(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Columns under each other: the first to the left, numbers to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in texts
    ]
