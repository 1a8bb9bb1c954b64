"""Image classification sets of TensorFlow Datasets that somebody prepared on this disk: nothing is downloaded."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import image_clients, image_cohort, prepared_tfds
from fedjax_seg.data import image_options as options
from fedjax_seg.data import image_report as reporting
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.histopathology import SCALES, described, standardise
from fedjax_seg.data.image_cases import Cases, Seen
from fedjax_seg.data.image_clients import Clients, Division
from fedjax_seg.data.image_table import ImageTable, Row
from fedjax_seg.data.partition import TEST
from fedjax_seg.data.prepared_tfds import Part
from fedjax_seg.data.raster import Look, Raster, fit, to_unit

_GIB = 2**30


def tfds_images(
    *,
    dataset: str,
    data_dir: str = "",
    splits: tuple[str, ...] = ("train",),
    external: tuple[str, ...] = (),
    size: tuple[int, ...] = (),
    channels: str = "rgb",
    normalise: str = "fixed",
    group_pattern: str = "",
    most: int = 0,
    memory_gb: float = 4.0,
    partition: str = "dirichlet",
    clients: int = 8,
    alpha: float = 0.5,
    test_share: float = 0.2,
    aside_share: float = 0.0,
    seed: int = 0,
) -> FederatedData:
    """Reads the features image and label of a prepared data set, without TensorFlow (array_record files).

    Args:
      dataset: as TFDS calls it, e.g. 'colorectal_histology' or 'patch_camelyon'.
      data_dir: the folder with a folder per data set; '' = TFDS_DATA_DIR, or ~/tensorflow_datasets.
      splits: of the data set, dealt out to the clients together.
      external: splits of it that only test, each a site of its own; they come last.
      size: (rows, columns) of every case, scaled by areas; () = as stored.
      channels: 'gray' or 'rgb'.
      normalise: see `histopathology`; 'none' for 'gray'.
      group_pattern: a regular expression; what it finds in a case's id (its file name, where the data set has them) is
        the slide or patient, never divided. '' = every image is a patient of its own, with a loud warning.
      most: cases of each split, drawn evenly by class; 0 = all.
      memory_gb: GiB that the images may take as float32.
      partition: 'dirichlet' (skew of labels; 'auto' is the same), 'quantity' (skew of sizes) or 'iid'.
      clients, alpha, test_share, aside_share, seed: see `images2d`; the seed also draws the cases of `most`.

    Returns: x float32 [N, H, W, C], standardised; y int32 [N]; one split, 'split0'.
    Raises: UserError on an option, or that tells what to prepare where.
    """
    checks.one_of("data.partition", partition, ("auto", *options.DRAWN))
    partition = "dirichlet" if partition == "auto" else partition
    division = Division(
        *("tfds_images", "", partition, clients, alpha, (), tuple(external), 0, test_share, aside_share, seed),
        *("group" if group_pattern else "patient",),
    )
    options.check_division(division, partition, options.DRAWN, "unused")
    pattern = _check(size, channels, normalise, group_pattern, most, memory_gb, splits, external)
    folder = prepared_tfds.located(dataset, data_dir)
    builder, classes = prepared_tfds.opened(folder, dataset, (*splits, *external))
    parts = [prepared_tfds.drawn(builder, split, most, seed) for split in (*splits, *external)]
    rows = _rows(parts, classes, pattern)
    look = _look(builder, parts[0], tuple(size), channels)
    _fits(len(rows), look, memory_gb, most)
    cases = _read(builder, parts, look, not size)
    y = np.concatenate([part.labels for part in parts])
    assigned, roles = _divided(rows, y, parts, division)
    scale, read = SCALES[normalise], options.input_text(look, False, [one.zoom for one in cases.seen if one])
    if normalise != "none":
        standardise(cases.x, scale)
    about = {
        "name": "tfds_images",
        "generator": f"TFDS {dataset} {builder.info.version}",
        "generator_facts": {"splits": {part.split: part.stored for part in parts}},
        "synthetic": False,
        "target": "label",
        "input": f"{read}; normalise: {normalise} ({scale.source})",
        "normalise": described(normalise),
        "partition": options.partition_text(division),
        "split_rule": options.split_text(0, len(rows), division, "unused"),
        "patients": f"{group_pattern!r} in the ids of cases" if pattern else reporting.NO_PATIENTS,
    }
    table = ImageTable(None, "", ",", bool(pattern), rows, (), ())
    beside = folder / "images"  # no loose images lie beside records: nothing is to be listed as not read
    return image_cohort.assemble(
        *(beside, table, rows, cases, y, classes, assigned, roles, about),
        unit=division.unit,
        notes=_notes(dataset, parts, most, bool(pattern)),
    )


def _check(size, channels, normalise, group_pattern, most, memory_gb, splits, external) -> re.Pattern[str] | None:
    if isinstance(size, str) or len(size) not in (0, 2):
        raise checks.UserError(f"data.size: {size!r} given, (rows, columns) or () expected")
    options.check_look(Look(channels, tuple(size) or (1, 1), "resize", "area"))
    checks.one_of("data.normalise", normalise, SCALES)
    if channels == "gray" and normalise != "none":
        raise checks.UserError(f"data.normalise: {normalise!r} is of three colours; channels='gray' needs 'none'")
    checks.number("data.most", most, low=0, integer=True)
    checks.number("data.memory_gb", memory_gb, above=0)
    if isinstance(splits, str) or isinstance(external, str) or not splits:
        raise checks.UserError(f"data.splits: {splits!r} and {external!r} given, tuples of names expected")
    if len({*splits, *external}) != len(splits) + len(external):
        raise checks.UserError(f"data.splits, data.external: {(*splits, *external)} given, distinct names expected")
    try:
        return re.compile(group_pattern) if group_pattern else None
    except re.error as error:
        raise checks.UserError(f"data.group_pattern: {group_pattern!r} is no regular expression ({error})") from None


def _rows(parts: Sequence[Part], classes: Sequence[str], pattern: re.Pattern[str] | None) -> tuple[Row, ...]:
    rows = []
    for part in parts:
        for name, label in zip(part.ids, part.labels):
            found = pattern.search(name) if pattern else None
            if pattern and not found:
                raise checks.UserError(
                    f"data.group_pattern: {pattern.pattern!r} is not in the id {name!r}; a pattern that is in all ids"
                    " expected"
                )
            rows.append(Row(0, name, "", classes[label], found.group() if found else name, "", None, {}))
    return tuple(rows)


def _look(builder: Any, part: Part, size: tuple[int, ...], channels: str) -> Look:
    if not size:
        size = next(prepared_tfds.images(builder, part)).shape[:2]
    return Look(channels, (size[0], size[1]), "resize", "area")


def _fits(cases: int, look: Look, memory_gb: float, most: int) -> None:
    height, width = look.size
    each = height * width * (3 if look.channels == "rgb" else 1) * 4 / _GIB
    if cases * each > memory_gb:
        raise checks.UserError(
            f"data.most: {most or 'all'} given; {cases} images of {height}x{width} take {cases * each:.3g} GiB,"
            f" {memory_gb:g} allowed; set data.most so that {int(memory_gb / each)} are read in all, a smaller"
            " data.size, or raise data.memory_gb"
        )


def _read(builder: Any, parts: Sequence[Part], look: Look, as_stored: bool) -> Cases:
    n = sum(len(part.at) for part in parts)
    x = np.zeros((n, *look.size, 3 if look.channels == "rgb" else 1), np.float32)
    seen: list[Seen] = []
    for part in parts:
        for name, image in zip(part.ids, prepared_tfds.images(builder, part)):
            shape = (image.shape[0], image.shape[1])
            if as_stored and shape != look.size:
                raise checks.UserError(
                    f"data.size: images of {look.size} and {shape} found ({name}); set data.size=(rows, columns)"
                )
            bits = 8 * image.itemsize
            if image.dtype.kind != "u" or image.shape[-1] not in (1, 3) or bits > 16:
                raise checks.UserError(
                    f"data.dataset: {name} is {image.dtype} {list(image.shape)}; 8 or 16 bits, 1 or 3 colours expected"
                )
            digest = hashlib.sha256(f"{image.shape} {image.dtype}".encode() + image.tobytes()).hexdigest()
            kind = f"{bits}-bit {'RGB' if image.shape[-1] == 3 else 'grey'}"
            raster = Raster(image.astype(np.float32), bits, kind, digest, False, False)
            fitted, _, zoom = fit(to_unit(raster, look), None, look)
            x[len(seen)] = np.clip(fitted, 0, 1)
            seen.append(Seen(shape, kind, bits, float(image.max()), digest, False, False, zoom, 0, 0))
    return Cases(x, None, tuple(seen), ())


def _divided(
    rows: tuple[Row, ...], y: np.ndarray, parts: Sequence[Part], division: Division
) -> tuple[Clients, tuple[str, ...]]:
    """Clients and roles: those of the splits are drawn, external splits come after them and only test."""
    names = [part.split for part in parts for _ in part.at]
    free = np.array([name not in division.external for name in names])
    own, roles = image_clients.divide(
        [r for r, mine in zip(rows, free) if mine], y[free], None, division._replace(external=())
    )
    of, role = np.empty(len(rows), np.int32), np.full(len(rows), TEST, object)
    of[free], role[free] = own.of, roles
    for n in np.flatnonzero(~free):
        of[n] = len(own.names) + division.external.index(names[n])
    assigned = Clients((*own.names, *division.external), of, division.external, own.dropped)
    shared = {r.patient for r, mine in zip(rows, free) if mine} & {r.patient for r, m in zip(rows, free) if not m}
    if shared:
        raise checks.UserError(
            f"data.external: group {min(shared)!r} is in data.splits too ({len(shared)} such groups); an external split"
            " must share none"
        )
    return assigned, tuple(role.tolist())


def _notes(dataset: str, parts: Sequence[Part], most: int, grouped: bool) -> tuple[str, ...]:
    notes = []
    if not grouped:
        known = prepared_tfds.KNOWN.get(dataset)
        about = f": {known.origin}; {known.cure}" if known else "; set data.group_pattern if the ids of cases tell"
        notes.append(
            f"WARNING: NO PATIENTS OR SLIDES in {dataset}{about}. Images of one slide are in training and in test, and"
            " SCORES ARE TOO HIGH"
        )
    for part in parts:
        if len(part.at) < part.stored:
            notes.append(
                f"note: {len(part.at)} of the {part.stored} cases of split {part.split!r} are read, drawn evenly by"
                f" class (data.most={most})"
            )
    return tuple(notes)
