"""A folder of images with masks (segmentation) or labels (classification) and a CSV; one client per hospital."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import image_options as options
from fedjax_seg.data import image_report as reporting
from fedjax_seg.data import partition as parting
from fedjax_seg.data.federated import FederatedData, Split, validate
from fedjax_seg.data.image_cases import DESCRIPTIONS, Cases, Seen, files_digest, read_cases, unnamed_files
from fedjax_seg.data.image_table import Columns, ImageTable, Row, read_image_table
from fedjax_seg.data.raster import Look

_LAYOUT = "a folder with metadata.csv (columns image,mask,site,patient) and the files that it names"


class Clients(NamedTuple):
    """names: K; of: int32 [N], the client of every case; external: the last names, which only test."""

    names: tuple[str, ...]
    of: np.ndarray
    external: tuple[str, ...]
    dropped: Mapping[str, int]  # {client: patients} too small to take part


def images2d(
    *,
    root: str,
    table: str = "metadata.csv",
    target: str = "mask",
    channels: str = "gray",
    size: tuple[int, int] = (64, 64),
    unify: str = "resize",
    resize: str = "area",
    mask_resize: str = "nearest",
    fill: float = 0.0,
    window: tuple[float, ...] = (),
    hu_slope: float = 1.0,
    hu_offset: float = 0.0,
    mask_values: tuple[int, ...] = (),
    classes: tuple[str, ...] = (),
    spacing: tuple[float, ...] = (),
    patient_column: str = "patient",
    patients_per_site: bool = False,
    partition: str = "site",
    clients: int = 5,
    alpha: float = 0.5,
    sites: tuple[str, ...] = (),
    external: tuple[str, ...] = (),
    min_site_size: int = 0,
    test_share: float = 0.2,
    aside_share: float = 0.0,
    val: str = "unused",
    seed: int = 0,
) -> FederatedData:
    """Reads and checks all of it; training and test are divided by patient.

    The table has a row per image: `image`, `mask` (or `label`), `site`, `patient`; optional `split` (train, test, val,
    aside; empty = drawn) and `spacing` (mm per pixel as stored: '0.7', or '0.7 0.8' for rows and columns). Paths are
    relative to root. 8- and 16-bit PNG, TIFF, JPEG and more; transparency is composited on white; EXIF turns are not
    made.

    Args:
      root: the folder.
      table: the CSV, below root.
      target: 'mask' = segmentation, 'label' = classification of whole images.
      channels: 'gray' (C = 1) or 'rgb' (C = 3); others are converted (ITU-R BT.601, or repeated).
      size: (rows, columns) of every case.
      unify: 'resize' = scaled to size (proportions may change, counted); 'crop' = cut around the centre, shorter sides
        filled up, nothing scaled; 'pad' = filled up to the proportions of size, then scaled.
      resize: 'area' (mean; bilinear when enlarging), 'bilinear' or 'nearest', of images.
      mask_resize: 'nearest', or 'majority' (the label with the largest share of the pixel, ties to the lesion). Masks
        that lose their lesion are counted.
      fill: value of filled-up pixels in [0, 1].
      window: (centre, width) in HU: x = clip((HU - centre) / width + 1/2, 0, 1), HU = stored * hu_slope + hu_offset
        (DICOM LINEAR_EXACT). () = the full range of the bit depth.
      mask_values: stored value of label 0, 1, ...; () = 0 and 1, or 0 and 255.
      classes: names of the labels. For target='label' they are the labels, in the order of their numbers; () = sorted.
      spacing: mm per pixel as stored, (both,) or (rows, columns), where the table has none; () = unknown.
      patient_column: '' = there are none: every image is a patient of its own, with a warning (also where the table
        has no column of the default name).
      patients_per_site: patient ids start again at every site: the id becomes site/patient.
      partition: 'site'; 'column:NAME'; 'dirichlet' (skew of labels, of lesion size tertiles for masks), 'lesion_size'
        (patients in ascending order of their mean lesion, cut into equal parts) or 'iid'. No patient is divided.
      clients, alpha: number of drawn clients and the Dirichlet parameter; not read by 'site' and 'column:NAME'.
      sites: names of the clients in client order; () = all, sorted.
      external: clients of whom all cases test; they come last.
      min_site_size: clients with fewer patients are dropped and counted; drawn ones are drawn again.
      test_share, aside_share: of the patients of each client, where the table does not say (partition.roles).
      val: what rows of split val do: 'unused', 'train' or 'test'.
      seed: of the partition and of the split.

    Returns: x float32 [N, H, W, C] in [0, 1]; y uint8 [N, H, W], or int32 [N]; 'spacing' float32 [N, 2] of the final
      pixels where known for all. In the order of the table; one split, 'split0'.
    Raises: UserError on an option or the table; DataFaults with all the faults of rows and files.
    """
    look = Look(channels, size, unify, resize, mask_resize, fill, window, hu_slope, hu_offset)
    options.check(
        look,
        target=target,
        mask_values=mask_values,
        classes=classes,
        spacing=spacing,
        partition=partition,
        min_site_size=min_site_size,
        test_share=test_share,
        aside_share=aside_share,
        val=val,
        seed=seed,
    )
    masks = target == "mask"
    base, path = _paths(root, table)
    column = "" if partition in options.DRAWN else "site" if partition == "site" else partition.removeprefix("column:")
    if patients_per_site and not column:
        raise checks.UserError("data.patients_per_site: needs data.partition='site' or 'column:NAME'")
    found = read_image_table(path, Columns(target, patient_column, column, patients_per_site))
    rows = tuple(r._replace(split=val if r.split == "val" else r.split) for r in found.rows)
    if column and sites:
        rows = _chosen(rows, column, (*sites, *external))
    if not rows:
        raise checks.UserError(f"{path}: no row of an image; {len(found.skipped)} rows of other files are skipped")
    cases = read_cases(base, rows, look, mask_values, masks)
    names, y, faults = (_mask_names(classes, mask_values), cases.y, []) if masks else _labels(rows, classes)
    faults = [*found.faults, *cases.faults, *faults, *_divided(rows, column)]
    if faults:
        raise checks.DataFaults(f"data.images2d: {base}", faults)
    assert y is not None
    least = max(min_site_size, parting.needed(test_share, aside_share))
    assigned = _assign(rows, cases, y, partition, column, clients, alpha, least, seed)
    assigned = _ordered(assigned, rows, sites, external, min_site_size)
    roles = _roles(rows, assigned, test_share, aside_share, seed)
    origin = _generator(base)
    about = {
        "name": "images2d",
        "generator": str(origin.get("generator") or origin.get("name") or reporting.NO_GENERATOR),
        "generator_facts": origin,
        "synthetic": origin.get("synthetic") is True,  # no image is, or is made from, a patient's: may be shown
        "target": target,
        "input": options.input_text(look),
        "windowed": bool(window),
        "partition": options.partition_text(partition, clients, alpha, seed),
        "split_rule": options.split_text(
            sum(bool(r.split) for r in rows), len(rows), test_share, aside_share, val, seed
        ),
        "patients": f"column {patient_column!r}" if found.patients else reporting.NO_PATIENTS,
    }
    return _assemble(base, found, rows, cases, y, names, assigned, roles, about, spacing)


def _paths(root: str, table: str) -> tuple[Path, Path]:
    if not root:
        raise checks.UserError(f"data.root: no folder given; name {_LAYOUT}")
    base = Path(root).expanduser()
    if not base.is_dir():
        what = "is a file" if base.exists() else "does not exist"
        raise checks.UserError(f"data.root: {base} {what}; {_LAYOUT} expected")
    path = base / table
    if not path.is_file():
        there = sorted(p.name + "/" * p.is_dir() for p in base.iterdir())
        listed = ", ".join(there[:6]) + (", ..." if len(there) > 6 else "")
        raise checks.UserError(f"data.table: no {table} in {base} (found: {listed or 'nothing'}); {_LAYOUT} expected")
    return base, path


def _chosen(rows: Sequence[Row], column: str, wanted: Sequence[str]) -> tuple[Row, ...]:
    known = {r.cells[column] for r in rows}
    for name in wanted:
        checks.lookup(dict.fromkeys(known), name, "data.sites")
    return tuple(r for r in rows if r.cells[column] in wanted)


def _mask_names(classes: Sequence[str], mask_values: Sequence[int]) -> tuple[str, ...]:
    default = ("background", *(f"label {v}" for v in mask_values[1:])) if mask_values else ("background", "lesion")
    return tuple(classes) or default


def _labels(rows: Sequence[Row], classes: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray, list[str]]:
    names = tuple(classes) or parting.by_value([r.label for r in rows])[0]
    faults = [
        f"line {r.line}: {r.image}: label {r.label!r} found, one of {', '.join(names)} expected (data.classes)"
        for r in rows
        if r.label and r.label not in names
    ]
    number = {name: n for n, name in enumerate(names)}
    return names, np.array([number.get(r.label, 0) for r in rows], np.int32), faults


def _divided(rows: Sequence[Row], column: str) -> list[str]:
    """Patients of two sites: one person in two hospitals, or two persons of one number?"""
    at: dict[str, dict[str, None]] = {}
    for r in rows if column else ():
        at.setdefault(r.patient, {})[r.cells[column]] = None
    cure = "one client per patient expected; set data.patients_per_site if ids start again at every site"
    return [f"patient {p}: at {' and '.join(own)}; {cure}" for p, own in at.items() if p and len(own) > 1]


def _assign(rows, cases: Cases, y, partition, column, clients, alpha, least, seed) -> Clients:
    if column:
        names, of = parting.by_value([r.cells[column] for r in rows])
        return Clients(names, of, (), {})
    checks.number("data.clients", clients, low=1, integer=True)
    patients, unit = np.unique([r.patient for r in rows], return_inverse=True)
    if partition == "iid":
        of = parting.iid(len(patients), clients, seed=seed, min_units=least)
    else:
        if cases.y is None:
            counts = np.zeros((len(patients), int(y.max()) + 1), int)
            np.add.at(counts, (unit, y), 1)
            labels = counts.argmax(1)
        else:
            lesion = np.bincount(unit, [one.lesion for one in cases.seen if one is not None]) / np.bincount(unit)
            labels = parting.thirds(lesion)
        if partition == "lesion_size":
            of = parting.by_order(lesion, clients, min_units=least)
        else:
            of = parting.dirichlet(labels, clients, alpha=alpha, seed=seed, min_units=least)
    digits = len(str(clients - 1))
    return Clients(tuple(f"client_{k:0{digits}d}" for k in range(clients)), of[unit], (), {})


def _ordered(own: Clients, rows: Sequence[Row], sites, external, min_site_size: int) -> Clients:
    """Clients in the wanted order, external ones last, small ones without cases (their `of` is -1)."""
    for what, chosen in (("data.sites", sites), ("data.external", external)):
        if len(set(chosen)) != len(chosen):
            raise checks.UserError(f"{what}: {tuple(chosen)} given, distinct names expected")
        for name in chosen:
            checks.lookup(dict.fromkeys(own.names), name, what)
    persons = {name: {r.patient for r, k in zip(rows, own.of) if own.names[k] == name} for name in own.names}
    wanted = [n for n in (sites or own.names) if n not in external] + list(external)
    small = {n: len(persons[n]) for n in wanted if len(persons[n]) < min_site_size and n not in external}
    names = tuple(n for n in wanted if n not in small)
    if not set(names) - set(external):
        sizes = ", ".join(f"{n} {len(p)}" for n, p in persons.items())
        raise checks.UserError(f"data.min_site_size: no client of {min_site_size} patients ({sizes}); lower it")
    place = {n: k for k, n in enumerate(names)}
    of = np.array([place.get(own.names[k], -1) for k in own.of], np.int32)
    return Clients(names, of, tuple(external), small)


def _roles(rows, assigned: Clients, test_share: float, aside_share: float, seed: int) -> tuple[str, ...]:
    """What every case is for: 'train', 'test', 'aside' or 'unused'."""
    faults: list[str] = []
    role: dict[str, str] = {}
    for k, name in enumerate(assigned.names):
        own = [r for r, client in zip(rows, assigned.of) if client == k]
        patients = sorted({r.patient for r in own})
        if name in assigned.external:
            role |= dict.fromkeys(patients, parting.TEST)
            continue
        given = {r.patient: r.split for r in own if r.split}
        need = parting.needed(test_share, aside_share)
        if not given and len(patients) < need:
            parts = "training" + ", test" * (test_share > 0) + ", aside" * (aside_share > 0)
            faults.append(
                f"client {name}: {len(patients)} patient(s), {need} needed for {parts};"
                f" set data.min_site_size={need} to drop such clients"
            )
        role |= parting.roles(patients, given, test_share=test_share, aside_share=aside_share, seed=seed, site=name)
    if faults:
        raise checks.DataFaults("data.images2d: split by patient", faults)
    return tuple(role.get(r.patient, parting.UNUSED) for r in rows)


def _generator(base: Path) -> dict[str, Any]:
    """What generator.json or about.json of the folder says of its origin; {} where there is none."""
    for name in DESCRIPTIONS:
        if (base / name).is_file():
            try:
                facts = json.loads((base / name).read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise checks.UserError(f"{base / name}: not JSON ({error}); mend or delete it") from None
            return facts if isinstance(facts, dict) else {"generator": str(facts)}
    return {}


def _assemble(
    base: Path, found: ImageTable, rows, cases: Cases, y, names, assigned: Clients, roles, about, spacing
) -> FederatedData:
    keep = np.flatnonzero((assigned.of >= 0) & (np.array(roles) != parting.UNUSED))
    unused = len(rows) - len(keep)
    pick = lambda values: [values[n] for n in keep]
    rows, roles, of = pick(rows), np.array(roles)[keep], assigned.of[keep]
    seen = [s for s in pick(cases.seen) if s is not None]
    arrays = {"x": cases.x[keep], "y": y[keep]} if unused else {"x": cases.x, "y": y}
    mm = _spacing(rows, seen, spacing)
    if mm is not None:
        arrays["spacing"] = mm
    cohort = reporting.Cohort(tuple(rows), tuple(seen), of, roles, arrays["y"], assigned.names, names)
    parts = {
        role: tuple(np.flatnonzero((of == k) & (roles == role)).astype(np.int32) for k in range(len(assigned.names)))
        for role in (parting.TRAIN, parting.TEST)
    }
    extra, junk = unnamed_files(base, found.path, found.rows)
    about = about | {
        "table": {"file": found.path.name, "sha256": found.sha256, "delimiter": found.delimiter},
        "images_sha256": files_digest(seen, rows),
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
    }
    data = FederatedData(
        arrays=arrays,
        case_ids=tuple(r.image for r in rows),
        patient_ids=tuple(r.patient for r in rows),
        sites=assigned.names,
        site_of=of,
        splits=(Split("split0", parts[parting.TRAIN], parts[parting.TEST]),),
        classes=names,
        about=about,
        files=reporting.files(cohort),
        summary=reporting.summary(cohort, about),
        external=assigned.external,
        aside=np.flatnonzero(roles == parting.ASIDE).astype(np.int32),
    )
    validate(data)
    return data


def _spacing(rows: Sequence[Row], seen: Sequence[Seen], given: Sequence[float]) -> np.ndarray | None:
    """float32 [N, 2], mm per final pixel; None where it is not known of every case."""
    stored = [r.spacing or ((given[0], given[-1]) if given else None) for r in rows]
    known = [(mm[0] * s.zoom[0], mm[1] * s.zoom[1]) for mm, s in zip(stored, seen) if mm is not None]
    return np.array(known, np.float32) if len(known) == len(rows) else None
