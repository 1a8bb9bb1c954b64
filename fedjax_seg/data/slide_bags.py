"""Whole slides as bags of feature vectors with one label each; one client per hospital."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import bag_files, image_clients, image_cohort, image_labels
from fedjax_seg.data import image_options as options
from fedjax_seg.data.bag_table import LAYOUT, PATIENT, SITE, TABLE, BagTable, read_bag_table
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.image_cases import Cases
from fedjax_seg.data.image_clients import Division
from fedjax_seg.data.image_faults import collected
from fedjax_seg.data.image_table import Row, torn

NO_PATIENTS = "none named: every slide counts as a patient of its own"
_WARNING = (
    "WARNING: NO PATIENTS. No column patient or group: slides of one person may be in training and test, and scores too"
    " good; add it (data.patient_column)"
)
_PARTITIONS = ("auto", "site", "column:NAME", *options.DRAWN)


def slide_bags(
    *,
    root: str,
    table: str = TABLE,
    most_instances: int = 1024,
    memory_gb: float = 4.0,
    classes: tuple[str, ...] = (),
    patient_column: str = PATIENT,
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

    The table has a row per slide: `bag` (a path below root, its ending may be left out), `label`, and if there are such
    `patient` (or `group`, `case_id`), `site`, `split` (train, test, val, aside; empty = drawn) and more. Without a
    table: <class>/<slide>.npz. File names that all are TCGA barcodes tell patients, and the tissue source site as the
    hospital, where no column does. An .npz has an array 'features' [instances, d] (or one array only), an .h5 a data
    set 'features' (as CLAM writes it, 'coords' beside); 16, 32 or 64 bits.

    Args:
      root: the folder.
      table: the CSV, below root.
      most_instances: larger bags are thinned out to so many, evenly spaced in the order of the file, the same ones in
        every run; 0 = none is.
      memory_gb: GiB that the padded bags may take, N * largest bag * d * 4 bytes.
      classes: names of the labels in the order of their numbers; () = sorted.
      patient_column: '' = there are none: every slide is a patient of its own, with a warning.
      patients_per_site: patient ids start again at every site: the id becomes site/patient.
      partition: 'site'; 'auto' = 'site' where a column or barcodes tell sites, else 'dirichlet'; 'column:NAME';
        'dirichlet' (skew of labels), 'quantity' (skew of sizes) or 'iid'. No patient is divided.
      clients, alpha, sites, external, min_site_size, test_share, aside_share, val, seed: see `images2d`.

    Returns: x float32 [N, n, d], bags padded with zeros at the end; 'instances' int32 [N], how many rows of each are
      real; y int32 [N]. In the order of the table; one split, 'split0'.
    Raises: UserError on an option, the table or the memory; DataFaults with all the faults of rows and files.
    """
    drawn = partition in options.DRAWN
    auto = partition == "auto"
    column = "" if drawn else SITE if auto or partition == "site" else partition.removeprefix("column:")
    division = Division(
        *("slide_bags", column, partition, clients, alpha, tuple(sites), tuple(external), min_site_size),
        *(test_share, aside_share, seed),
    )
    options.check_division(division, partition, _PARTITIONS, val)
    bag_files.check_limits(most_instances, memory_gb)
    base = image_cohort.folder(root, LAYOUT)
    if patients_per_site and not column:
        raise checks.UserError("data.patients_per_site: needs data.partition='site' or 'column:NAME'")
    told = read_bag_table(base, table, patient_column, column, patients_per_site, auto)
    if auto and not told.sited:
        column, division = "", division._replace(column="", rule="dirichlet")
    found = told.table
    rows = tuple(r._replace(split=val if r.split == "val" else r.split) for r in found.rows)
    rows = image_clients.chosen(rows, division)
    if not rows and not found.faults:
        raise checks.UserError(f"{found.path}: no row of a bag")
    bags = bag_files.read_bags(base, rows, most_instances, memory_gb)
    names, y, faults = image_labels.numbered(rows, classes)
    faults += image_labels.twins(rows, SITE if told.sited else "", classes)
    faults = [*found.faults, *torn(found.rows), *bags.faults, *faults, *image_clients.divided(rows, division)]
    if faults:
        raise collected(f"data.slide_bags: {base}", faults)
    assigned, roles = image_clients.divide(rows, y, None, division)
    facts = _facts(bags, most_instances)
    by_code = " (tissue source sites of TCGA barcodes)" * (told.coded and column == SITE)
    origin = image_cohort.origin(base)
    about = {
        "name": "slide_bags",
        **origin,
        "target": "label",
        "input": _input_text(facts),
        "bags": facts,
        "partition": options.partition_text(division) + by_code,
        "split_rule": options.split_text(sum(bool(r.split) for r in rows), len(rows), division, val),
        "patients": told.patients or NO_PATIENTS,
    }
    data = image_cohort.assemble(
        *(base, found, rows, Cases(bags.x, None, bags.seen, ()), y, names, assigned, roles, about),
        skip=("bag", "label", "split", told.column, division.column),
        notes=_notes(told, facts),
    )
    return _as_bags(data, rows, bags.instances)


def _facts(bags: bag_files.Bags, most: int) -> dict[str, Any]:
    stored = np.array([one.shape[0] for one in bags.seen if one is not None])
    return {
        "features": int(bags.x.shape[2]),
        "padded_to": int(bags.x.shape[1]),
        "most_instances": most,
        "stored": {"least": int(stored.min()), "median": float(np.median(stored)), "largest": int(stored.max())},
        "thinned_out": int((stored > bags.instances).sum()),
        "megabytes": round(bags.x.nbytes / 1e6, 1),
    }


def _input_text(facts: Mapping[str, Any]) -> str:
    stored = facts["stored"]
    return (
        f"bags of {facts['features']} features per instance, {stored['least']} to {stored['largest']} instances (median"
        f" {stored['median']:g}), padded with zeros to {facts['padded_to']}"
    )


def _notes(told: BagTable, facts: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [] if told.patients else [_WARNING]
    if facts["thinned_out"]:
        notes.append(
            f"note: {facts['thinned_out']} bags have more than {facts['most_instances']} instances (up to"
            f" {facts['stored']['largest']}): so many evenly spaced ones of each are kept (data.most_instances)"
        )
    if told.coded:
        notes.append("note: files are named by TCGA barcodes: the tissue source site (second field) is column 'site'")
    return tuple(notes)


def _as_bags(data: FederatedData, rows: Sequence[Row], instances: np.ndarray) -> FederatedData:
    """The numbers of instances of the cases that are left, and the report of an image folder in the words of bags."""
    of = {row.image: n for row, n in zip(rows, instances)}
    own = np.array([of[name] for name in data.case_ids], np.int32)
    header, _, body = data.files["cohort.csv"].partition("\n")
    header = header.replace("image,", "bag,").replace(",rows,columns,", ",instances_stored,features,")
    in_words = lambda lines: [line.replace("pictures", "bags").replace("images", "bags") for line in lines]
    return dataclasses.replace(
        data,
        arrays={**data.arrays, "instances": own},
        files={**data.files, "cohort.csv": f"{header}\n{body}"},
        summary=tuple(in_words(data.summary)),
        about={**data.about, "warnings": in_words(data.about["warnings"])},
    )
