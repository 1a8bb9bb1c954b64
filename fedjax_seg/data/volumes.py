"""Trees of NIfTI volumes and a partitioning CSV -> FederatedData behind a CaseStore; one client per institution."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import label_schemes, partition_table, volume_cache, volume_report, volume_tree
from fedjax_seg.data import patches as drawing
from fedjax_seg.data.federated import FederatedData, Split, validate
from fedjax_seg.data.volume_preparation import NORMALISATIONS, label_counts
from fedjax_seg.data.volume_store import volume_store

LAYOUTS = ("fets", "msd")
_DESCRIPTIONS = ("generator.json", "about.json")  # written beside the data by who made them
_MOST_READERS, _MOST_AHEAD = 16, 8  # threads: a subject being read takes about half a GB


class Options(NamedTuple):
    """The options of `fets` and `msd` beside the two paths; what each means is told there."""

    label_scheme: str
    normalise: str
    crop: bool
    patch: tuple[int, ...]
    patches: int
    sampling: str
    background: float
    share: float
    split_seed: int
    drop_small: bool
    nonfinite: str
    check_affine: bool
    cache: str
    workers: int
    ahead: int
    sites: tuple[str, ...]


class _Plan(NamedTuple):
    """Who is wanted, as the table says.

    rows: the good ones, None where there is none; parts: {site: (train, val)}, {} where the table has faults.
    """

    rows: tuple[partition_table.Row, ...] | None
    parts: dict[str, partition_table.Sides]
    notes: list[str]
    faults: list[str]


def volumes(layout: str, root: str, partition: str, options: Options) -> FederatedData:
    """Reads, checks and caches all subjects of the table.

    Subjects are in the order of their sites, and sorted by id at each site: neither the order of the table nor that of
    the folder matters. A subject is a patient.

    Args:
      layout: a name of LAYOUTS.
      root: the tree.
      partition: the table, a path relative to root or as it is.

    Returns: no 'x' and no 'y': 'content' uint8 [N, 32] (sha256 of the image and the label as cached), 'shape' and
      'full' int32 [N, 3], 'spacing' float32 [N, 3] (mm); `store` has the volumes. One split, 'split0'.
    Raises: UserError on an option, DataFaults with all the faults of table, tree and files. Its labels.csv has the
      voxels of every label that could be read.
    """
    draw = _checked(options)
    if not root:
        raise checks.UserError("data.root: no folder given; name the folder of the volumes")
    base = volume_tree.existing(Path(root).expanduser().absolute(), "the volumes")
    path = _table_path(base, partition)
    plan = _planned(path, options)
    tree = _tree(layout, base, plan)
    rules = volume_cache.Rules(
        options.normalise, bool(options.crop), layout == "msd", options.nonfinite, bool(options.check_affine)
    )
    cache = volume_cache.folder(options.cache, base, rules)
    workers = options.workers or min(_cores(), _MOST_READERS)
    begun = time.perf_counter()
    found = volume_cache.prepare(tree.subjects, rules, cache, workers=workers)
    seconds = time.perf_counter() - begun
    if tree.labels:
        others = {s: counts for s, path in tree.labels.items() if (counts := label_counts(path))}
        found = found._replace(voxels=dict(sorted({**found.voxels, **others}.items())))
    site_of = {row.subject: row.site for row in plan.rows or ()}
    scheme, unknown = _scheme(layout, options.label_scheme, found, site_of)
    faults = [*plan.faults, *tree.faults, *found.faults, *_channels(tree, found), *unknown]
    labels = volume_report.labels_csv(found.voxels)
    if faults or scheme is None:
        raise checks.DataFaults(f"data.{layout}: {base}", faults, {"labels.csv": labels})
    entries = {entry.subject: entry for entry in found.entries if entry is not None}
    cohort = volume_report.Cohort(
        sites=tuple(plan.parts),
        entries=tuple(entries[s] for train, val in plan.parts.values() for s in sorted([*train, *val])),
        site_of=tuple(k for k, sides in enumerate(plan.parts.values()) for _ in (*sides[0], *sides[1])),
        train=frozenset(s for train, _ in plan.parts.values() for s in train),
        channels=tree.channels,
        scheme=scheme,
    )
    about = volume_report.about(cohort, layout, options._asdict()) | _origin(base)
    notes = [*plan.notes, *tree.notes, *volume_report.notes(cohort)]
    cached = f"{cache}, {volume_report.megabytes(cohort)} MB; {volume_report.fresh(cohort)} read now, {seconds:.1f} s"
    data = FederatedData(
        arrays=_arrays(cohort),
        case_ids=tuple(e.subject for e in cohort.entries),
        patient_ids=tuple(e.subject for e in cohort.entries),
        sites=cohort.sites,
        site_of=np.array(cohort.site_of, np.int32),
        splits=(Split("split0", _side(cohort, True), _side(cohort, False)),),
        classes=scheme.classes,
        about=about,
        files={"labels.csv": labels} | volume_report.files(cohort),
        summary=volume_report.summary(cohort, about, cached, notes),
        store=volume_store(cohort.entries, scheme, draw, depth=options.ahead, threads=min(workers, _MOST_AHEAD)),
    )
    validate(data)
    return data


def _checked(options: Options) -> drawing.Drawing:
    """How patches are drawn. Raises: UserError at the first option that cannot be."""
    checks.one_of("data.label_scheme", options.label_scheme, label_schemes.NAMES)
    checks.one_of("data.normalise", options.normalise, NORMALISATIONS)
    checks.one_of("data.nonfinite", options.nonfinite, volume_cache.NONFINITE)
    for name in ("crop", "drop_small", "check_affine"):
        checks.one_of(f"data.{name}", getattr(options, name), (True, False))
    patch = options.patch
    if not isinstance(patch, Sequence) or isinstance(patch, str) or len(patch) != 3:
        raise checks.UserError(f"data.patch: {patch!r} given, voxels along three axes, e.g. (64, 64, 64), expected")
    draw = drawing.Drawing(tuple(patch), options.patches, options.sampling, options.background)
    drawing.check(draw)
    checks.number("data.share", options.share, above=0, high=1)
    if options.share == 1:
        raise checks.UserError("data.share: 1 given, a number in (0, 1) expected: the rest of each site is tested on")
    checks.number("data.split_seed", options.split_seed, low=0, integer=True)
    checks.number("data.workers", options.workers, low=0, integer=True)
    checks.number("data.ahead", options.ahead, low=0, integer=True)
    if isinstance(options.sites, str) or len({str(s) for s in options.sites}) != len(options.sites):
        raise checks.UserError(f"data.sites: {options.sites!r} given, a tuple of distinct names expected")
    return draw


def _table_path(base: Path, partition: str) -> Path:
    if not partition:
        raise checks.UserError(
            "data.partition: no table given; name the CSV with the columns Partition_ID and Subject_ID"
        )
    for path in (base / partition, Path(partition).expanduser()):
        if path.is_file():
            return path
    raise checks.UserError(
        f"data.partition: no file {partition}, neither in {base} nor as a path of its own; a CSV"
        " with the columns Partition_ID and Subject_ID expected"
    )


def _planned(path: Path, options: Options) -> _Plan:
    rows, notes, faults = partition_table.scan(path)
    if faults:
        good = tuple(row for row in rows if not options.sites or row.site in map(str, options.sites))
        return _Plan(good or None, {}, notes, [f"{path.name}: {fault}" for fault in faults])
    order = partition_table.sites(rows)
    if options.sites:
        order = [str(site) for site in options.sites]
        for site in order:
            checks.lookup({row.site: row for row in rows}, site, "data.sites")
        rows = [row for row in rows if row.site in order]
    try:
        parts, more = partition_table.split(
            rows, options.share, options.split_seed, drop_small=bool(options.drop_small)
        )
    except checks.DataFaults as error:
        faults = [f"{path.name}: {fault} (data.drop_small=True)" for fault in error.faults]
        return _Plan(tuple(rows), {}, list(notes), faults)
    except checks.UserError as error:
        return _Plan(tuple(rows), {}, list(notes), [f"{path.name}: {error}"])
    parts = {site: parts[site] for site in order if site in parts}
    kept = tuple(row for row in rows if row.site in parts)  # a dropped site is not read
    return _Plan(kept, parts, [*notes, *more], [])


def _tree(layout: str, root: Path, plan: _Plan) -> volume_tree.Tree:
    """Files of the wanted subjects. Where the table has no good row, of all that have a label: whoever mends the table
    wants to know of their faults as well, and what is read is in the cache."""
    read = volume_tree.fets_tree if layout == "fets" else volume_tree.msd_tree
    if plan.rows is not None:
        return read(root, {row.subject for row in plan.rows}, labels=True)
    tree = read(root, labels=False)
    return tree._replace(subjects=tuple(s for s in tree.subjects if s.label is not None))


def _scheme(
    layout: str, asked: str, found: volume_cache.Found, site_of: dict[str, str]
) -> tuple[label_schemes.Scheme | None, list[str]]:
    present = {s: tuple(voxels) for s, voxels in found.voxels.items() if all(0 <= v <= 255 for v in voxels)}
    if not present:
        return None, []
    sites = {s: site_of[s] for s in present if s in site_of}
    try:
        return label_schemes.find(present, asked, layout=layout, site_of=sites), []
    except checks.DataFaults as error:
        return None, list(error.faults)
    except checks.UserError as error:
        return None, [str(error)]


def _channels(tree: volume_tree.Tree, found: volume_cache.Found) -> list[str]:
    return [
        f"{e.subject}: {len(e.background)} channel(s), {len(tree.channels)} expected ({', '.join(tree.channels)})"
        for e in found.entries
        if e is not None and len(e.background) != len(tree.channels)
    ]


def _arrays(cohort: volume_report.Cohort) -> dict[str, np.ndarray]:
    entries = cohort.entries
    return {
        "content": np.array([list(bytes.fromhex(e.content)) for e in entries], np.uint8),
        "shape": np.array([e.shape for e in entries], np.int32),
        "full": np.array([e.native for e in entries], np.int32),
        "spacing": np.array([e.spacing for e in entries], np.float32),
    }


def _side(cohort: volume_report.Cohort, train: bool) -> tuple[np.ndarray, ...]:
    return tuple(
        np.array(
            [
                n
                for n, (entry, site) in enumerate(zip(cohort.entries, cohort.site_of))
                if site == k and (entry.subject in cohort.train) == train
            ],
            np.int32,
        )
        for k in range(len(cohort.sites))
    )


def _origin(base: Path) -> dict[str, Any]:
    """Who made the data, as generator.json or about.json beside them says."""
    facts: Any = {}
    for name in _DESCRIPTIONS:
        if (base / name).is_file():
            try:
                facts = json.loads((base / name).read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise checks.UserError(f"{base / name}: not JSON ({error}); mend or delete it") from None
            break
    facts = facts if isinstance(facts, dict) else {"generator": str(facts)}
    named = facts.get("generator") or facts.get("name")
    return {
        "generator": str(named or "none named in the folder: taken as real volumes"),
        "generator_facts": facts,
        "synthetic": facts.get("synthetic") is True,  # no volume is, or is made from, a patient's: may be shown
    }


def _cores() -> int:
    """Cores that this process may use: a batch system often grants fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
