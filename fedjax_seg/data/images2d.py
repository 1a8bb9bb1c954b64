"""A folder of images with masks (segmentation) or labels (classification) and a CSV; one client per hospital."""

from collections.abc import Sequence

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import image_clients, image_cohort, image_labels
from fedjax_seg.data import image_options as options
from fedjax_seg.data import image_report as reporting
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.image_cases import read_cases
from fedjax_seg.data.image_clients import Division
from fedjax_seg.data.image_faults import collected
from fedjax_seg.data.image_table import Columns, read_image_table, torn
from fedjax_seg.data.raster import Look

_LAYOUT = "a folder with metadata.csv (columns image,mask,site,patient) and the files that it names"
_PARTITIONS = ("site", "column:NAME", *options.DRAWN, *options.DRAWN_BY_MASKS)


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
      partition: 'site'; 'column:NAME'; 'dirichlet' (skew of labels, of lesion size tertiles for masks), 'quantity'
        (skew of sizes), 'lesion_size' (patients in ascending order of their mean lesion, cut into equal parts) or
        'iid'. No patient is divided.
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
    masks = target == "mask"
    look = Look(channels, size, unify, resize, mask_resize, fill, window, hu_slope, hu_offset)
    drawn = partition in _PARTITIONS and partition not in ("site", "column:NAME")
    column = "" if drawn else "site" if partition == "site" else partition.removeprefix("column:")
    division = Division(
        *("images2d", column, partition, clients, alpha, tuple(sites), tuple(external), min_site_size),
        *(test_share, aside_share, seed),
    )
    options.check_look(look)
    options.check_target(target, mask_values, classes, spacing, partition)
    options.check_division(division, partition, _PARTITIONS, val)
    base = image_cohort.folder(root, _LAYOUT)
    path = base / table
    if not path.is_file():
        there = image_cohort.listed(base)
        raise checks.UserError(f"data.table: no {table} in {base} (found: {there}); {_LAYOUT} expected")
    if patients_per_site and not column:
        raise checks.UserError("data.patients_per_site: needs data.partition='site' or 'column:NAME'")
    found = read_image_table(path, Columns(target, patient_column, column, patients_per_site), base)
    rows = tuple(r._replace(split=val if r.split == "val" else r.split) for r in found.rows)
    rows = image_clients.chosen(rows, division)
    if not rows and not found.faults:
        raise checks.UserError(f"{path}: no row of an image; {len(found.skipped)} rows of other files are skipped")
    cases = read_cases(base, rows, look, mask_values, masks)
    y, names, faults = cases.y, _mask_names(classes, mask_values), list[str]()
    if y is None:
        names, y, faults = image_labels.numbered(rows, classes)
        faults += image_labels.twins(rows, column, classes)
    faults = [*found.faults, *torn(found.rows), *cases.faults, *faults, *image_clients.divided(rows, division)]
    if faults:
        raise collected(f"data.images2d: {base}", faults)
    lesion = np.array([one.lesion for one in cases.seen if one is not None]) if masks else None
    assigned, roles = image_clients.divide(rows, y, lesion, division)
    about = {
        "name": "images2d",
        **image_cohort.origin(base),
        "target": target,
        "input": options.input_text(look, zooms=[one.zoom for one in cases.seen if one]),
        "windowed": bool(window),
        "partition": options.partition_text(division),
        "split_rule": options.split_text(sum(bool(r.split) for r in rows), len(rows), division, val),
        "patients": f"column {patient_column!r}" if found.patients else reporting.NO_PATIENTS,
    }
    alone = (
        f"WARNING: {path.name} has no column of patients: images of one person may be in training and test, and scores"
        " too good; add one of patients, slides or groups (data.patient_column)"
    )
    return image_cohort.assemble(
        *(base, found, rows, cases, y, names, assigned, roles, about),
        spacing=spacing,
        skip=("image", "mask", "label", "split", "spacing", patient_column, column),
        notes=() if found.patients else (alone,),
    )


def _mask_names(classes: Sequence[str], mask_values: Sequence[int]) -> tuple[str, ...]:
    default = ("background", *(f"label {v}" for v in mask_values[1:])) if mask_values else ("background", "lesion")
    return tuple(classes) or default
