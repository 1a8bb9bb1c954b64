"""Histology tiles with a class each, from a table or a folder per class; one client per hospital."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import class_folders, csv_table, image_clients, image_cohort, image_labels, tile_groups
from fedjax_seg.data import image_options as options
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.image_cases import read_cases
from fedjax_seg.data.image_clients import Clients, Division
from fedjax_seg.data.image_faults import collected
from fedjax_seg.data.image_table import Columns, ImageTable, Row, read_image_table, torn
from fedjax_seg.data.raster import Look
from fedjax_seg.data.stain import draw, shift

_LAYOUT = "a folder with metadata.csv (columns image,label,group,site), or with <class>/*.png or <site>/<class>/*.png"
_TABLE, _GROUP, _SITE = "metadata.csv", "group", "site"
_PARTITIONS = ("auto", "site", "column:NAME", *options.DRAWN)


class Scale(NamedTuple):
    """x = (value in [0, 1] - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str


# Public constants: statistics of the hospitals' own pixels would have to be computed over all of them first.
SCALES = {
    "fixed": Scale(
        (0.70322989, 0.53606487, 0.66096631),
        (0.21716536, 0.26081574, 0.20723464),
        "H&E tiles of TCGA and others, Kang et al. 2023 (CVPR, benchmarking self-supervised learning in pathology)",
    ),
    "imagenet": Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "ImageNet, as torchvision documents them"),
    "none": Scale((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "values stay in [0, 1]"),
}


def standardise(x: np.ndarray, scale: Scale) -> None:
    """Of x [N, H, W, 3], in place."""
    np.subtract(x, np.array(scale.mean, np.float32), out=x)
    np.divide(x, np.array(scale.std, np.float32), out=x)


def described(normalise: str) -> dict[str, Any]:
    """The entry 'normalise' of `about`: how pictures come back from x."""
    scale = SCALES[normalise]
    return {"name": normalise, "mean": list(scale.mean), "std": list(scale.std), "source": scale.source}


def histopathology(
    *,
    root: str,
    table: str = _TABLE,
    folders: str = "auto",
    size: tuple[int, int] = (64, 64),
    unify: str = "resize",
    resize: str = "area",
    fill: float = 1.0,
    classes: tuple[str, ...] = (),
    label_column: str = "label",
    group_column: str = _GROUP,
    group_from: str = "auto",
    groups_per_site: bool = False,
    site_column: str = _SITE,
    partition: str = "auto",
    clients: int = 8,
    alpha: float = 0.5,
    sites: tuple[str, ...] = (),
    external: tuple[str, ...] = (),
    min_site_size: int = 0,
    stain: float = 0.0,
    normalise: str = "fixed",
    test_share: float = 0.2,
    aside_share: float = 0.0,
    val: str = "unused",
    seed: int = 0,
) -> FederatedData:
    """Reads and checks all of it. Groups (slides or patients) are never divided: neither between clients nor the split.

    The table has a row per tile: `image` (a path below root), `label`, and if there are such `group`, `site`, `split`
    (train, test, val, aside; empty = drawn) and further columns. Without a table the folders tell classes and sites;
    files that are no images (Thumbs.db, notebook check points) are skipped and counted. 8- and 16-bit PNG, TIFF, JPEG
    and more; transparency is composited on white, grey becomes three equal channels, 16 bits are read by their range.

    Args:
      root: the folder.
      table: the CSV, below root; '' = the folders are the table, as they are where there is no metadata.csv.
      folders: what the folders mean without a table: 'class', 'site/class', 'class/group', 'site/class/group'; 'auto'
        = the first, second or last of them by their number.
      size: (rows, columns) of every tile.
      unify, resize: how tiles come to this size, see `images2d`.
      fill: value of filled-up pixels in [0, 1]; 1 = white, as the background of a slide.
      classes: names of the labels in the order of their numbers; () = sorted.
      label_column, group_column, site_column: names in the table. group_column='' = there are none.
      group_from: where groups come from, see `tile_groups.grouped`. Without any, a loud warning. Ids that all are TCGA
        barcodes give the patient, and the tissue source site as the hospital where no site is told.
      groups_per_site: ids of groups start again at every site: the id becomes site/group.
      partition: 'auto' = 'site' where sites are told, else 'dirichlet'; 'site'; 'column:NAME'; 'dirichlet' (skew of
        labels; a group counts with its most frequent one), 'quantity' (skew of sizes) or 'iid'.
      clients, alpha: number of drawn clients and the Dirichlet parameter; not read by 'site' and 'column:NAME'.
      sites, external, min_site_size: see `images2d`; sizes are counted in groups.
      stain: strength s >= 0 of a shift of colours per hospital, training and test alike: each stain (colour
        deconvolution) times U(1 - s, 1 + s) plus U(-s, s), drawn from the seed and the client's name (stain.draw).
      normalise: 'fixed' (H&E), 'imagenet' or 'none': public constants, so that nothing of the hospitals is told.
      test_share, aside_share: of the groups of each client, where the table does not say (partition.roles).
      val: what rows of split val do: 'unused', 'train' or 'test'.
      seed: of the partition, the split and the stain shift.

    Returns: x float32 [N, H, W, 3], standardised (about['normalise'] has 'mean' and 'std': x * std + mean is in
      [0, 1]); y int32 [N]; patient_ids are the groups. One split, 'split0'.
    Raises: UserError on an option or the table; DataFaults with all the faults of rows, folders and files.
    """
    look = Look("rgb", size, unify, resize, fill=fill)
    drawn = partition if partition in options.DRAWN else ""
    division = Division(
        *("histopathology", "", drawn, clients, alpha, tuple(sites), tuple(external), min_site_size),
        *(test_share, aside_share, seed, "group", "data.groups_per_site"),
    )
    options.check_look(look)
    options.check_division(division, partition, _PARTITIONS, val)
    checks.one_of("data.folders", folders, ("auto", *class_folders.TEMPLATES))
    checks.one_of("data.group_from", group_from, tile_groups.FROM)
    checks.one_of("data.normalise", normalise, SCALES)
    checks.number("data.stain", stain, low=0, high=1)
    base = image_cohort.folder(root, _LAYOUT)
    site = site_column or _SITE
    found, sited, notes = _rows(base, table, folders, _Names(label_column, group_column, site_column), partition)
    groups = tile_groups.grouped(found, group_from, group_column, site, sited, groups_per_site)
    sited = sited or groups.sites
    if not drawn:
        column = _column(partition, groups.rows, site, sited)
        division = division._replace(column=column, rule="" if column else "dirichlet")
    rows = tuple(r._replace(split=val if r.split == "val" else r.split) for r in groups.rows)
    rows = image_clients.chosen(rows, division)
    if not rows and not found.faults:
        raise checks.UserError(
            f"{found.path}: no row of an image; {len(found.skipped)} rows of other files are skipped"
        )
    cases = read_cases(base, rows, look, (), False)
    labels, y, faults = image_labels.numbered(rows, classes)
    faults += image_labels.twins(rows, site if sited else "", classes)
    if len(labels) < 2 and rows and all(r.label for r in rows):  # an empty cell is a fault of its own
        faults.append(f"one class only ({', '.join(labels)}); at least two expected")
    faults = [*found.faults, *torn(groups.rows, "group"), *cases.faults, *faults]
    faults += image_clients.divided(rows, division)
    if faults:
        raise collected(f"data.histopathology: {base}", faults)
    assigned, roles = image_clients.divide(rows, y, None, division)
    shifts = _shifted(cases.x, assigned, stain, seed)
    scale = SCALES[normalise]
    standardise(cases.x, scale)
    read = options.input_text(look, masks=False, zooms=[one.zoom for one in cases.seen if one])
    text = f"{read}; stain shift per client: {stain:g}"
    about = {
        "name": "histopathology",
        **image_cohort.origin(base),
        "target": "label",
        "input": f"{text}; normalise: {normalise} ({scale.source})",
        "normalise": described(normalise),
        "stain": {"strength": stain, "clients": shifts},
        "partition": options.partition_text(division) + _origin_of_sites(division, found, groups.sites),
        "split_rule": options.split_text(sum(bool(r.split) for r in rows), len(rows), division, val),
        "patients": groups.told,
    }
    return image_cohort.assemble(
        *(base, found, rows, cases, y, labels, assigned, roles, about),
        skip=("image", "split", "spacing", label_column, group_column, division.column),
        unit="group",
        notes=(*notes, *groups.notes),
    )


class _Names(NamedTuple):
    """The columns of the table; '' = none."""

    label: str
    group: str
    site: str


def _rows(
    base: Path, table: str, folders: str, names: _Names, partition: str
) -> tuple[ImageTable, bool, tuple[str, ...]]:
    """The rows of the table or of the folders, whether they tell sites, and lines to print."""
    path = base / table
    if not table or (table == _TABLE and not path.is_file()):
        read = class_folders.read_class_folders(base, folders, (names.site or _SITE, names.group or _GROUP))
        return read.table, (names.site or _SITE) in read.table.rows[0].cells, read.notes
    if not path.is_file():
        there = image_cohort.listed(base)
        raise checks.UserError(f"data.table: no {table} in {base} (found: {there}); {_LAYOUT} expected")
    if folders != "auto":
        raise checks.UserError(f"data.folders: {folders!r} given, but {table} is there; set data.table='' to ignore it")
    header = csv_table.read(path).header
    by_column = partition.removeprefix("column:") if partition.startswith("column:") else ""
    # a column 'Site' is a slip to be told, no table without sites
    told = names.site != _SITE or any(h.lower() == _SITE for h in header)
    meant = told and partition not in options.DRAWN
    columns = Columns(
        *("label", names.group, by_column or (names.site if meant else "")),
        label=names.label,
        default=_GROUP,
        alike=("group", "slide", "patient"),
        options={
            "target": "data.label_column",
            "patient": "data.group_column",
            "partition": "data.partition" if by_column else "data.site_column",
        },
    )
    return read_image_table(path, columns, base), bool(names.site) and names.site in header, ()


def _column(partition: str, rows: Sequence[Row], site: str, sited: bool) -> str:
    """The column that 'auto', 'site' and 'column:NAME' stand for; '' where 'auto' finds no sites."""
    column = partition.removeprefix("column:") if partition.startswith("column:") else site
    if rows and column not in rows[0].cells and partition != "auto":
        raise checks.UserError(
            f"data.partition: {partition!r} given, but no column {column!r} or folder of sites, and ids are not TCGA"
            " barcodes; add it, or set data.partition='dirichlet'"
        )
    return column if sited or partition != "auto" else ""


def _origin_of_sites(division: Division, found: ImageTable, coded: bool) -> str:
    if not division.column:
        return ""
    return " (tissue source sites of TCGA barcodes)" if coded else "" if found.path else " (folders)"


def _shifted(x: np.ndarray, assigned: Clients, strength: float, seed: int) -> dict[str, dict[str, list[float]]]:
    """Shifts the stains of every client's tiles in place; what was drawn, for the report."""
    drawn: dict[str, dict[str, list[float]]] = {}
    for k, name in enumerate(assigned.names if strength else ()):
        jitter, own = draw(strength, seed=seed, client=name), np.flatnonzero(assigned.of == k)
        x[own] = shift(x[own], jitter)
        drawn[name] = {part: [round(float(v), 4) for v in values] for part, values in jitter._asdict().items()}
    return drawn
