"""Small synthetic folders in the form of the Preprocessed Connectomes Project (PCP), with no real subject in them."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks

TABLE = "Phenotypic_V1_0b_preprocessed1.csv"
ATLAS = "synthetic"
_OPTIONS_FILE = "synthetic_data.json"
_FIRST_SUB_ID = 90001  # real ABIDE numbers lie between 50002 and 51607
_SUB_SITES = ("UM", "UCLA", "LEUVEN")  # sites that ABIDE lists in two parts
_FILE_PREFIX = {"PITT": "Pitt", "YALE": "Yale", "TRINITY": "Trinity", "STANFORD": "Stanford", "OLIN": "Olin"}

# Part of the 106 official columns, in the official order. Two index columns come first, one without a name.
COLUMNS = (
    *("", "Unnamed: 0", "SUB_ID", "X", "subject", "SITE_ID", "FILE_ID", "DX_GROUP", "DSM_IV_TR", "AGE_AT_SCAN", "SEX"),
    *("HANDEDNESS_CATEGORY", "HANDEDNESS_SCORES", "FIQ", "VIQ", "PIQ", "FIQ_TEST_TYPE", "ADOS_TOTAL", "SRS_RAW_TOTAL"),
    *("COMORBIDITY", "CURRENT_MED_STATUS", "MEDICATION_NAME", "EYE_STATUS_AT_SCAN", "func_quality", "func_mean_fd"),
    *("func_num_fd", "func_perc_fd", "qc_rater_1", "qc_notes_rater_1", "qc_anat_rater_2", "qc_anat_notes_rater_2"),
    *("qc_func_rater_2", "qc_func_notes_rater_2", "SUB_IN_SMP"),
)


class _Person(NamedTuple):
    """One row. `site` is merged, `part` the sub-site (0 = none); `file` is False where only the row exists."""

    site: str
    part: int
    asd: bool
    prefix: str
    mean_fd: str = ""
    listed: bool = True
    file: bool = True
    zero_roi: bool = False


def connectomes(
    folder: str | Path,
    *,
    sites: Sequence[tuple[str, int]] = (("NYU", 40), ("UM", 28), ("UCLA", 20), ("USM", 16)),
    rois: int = 40,
    length: int = 120,
    class_effect: float = 0.45,
    site_effect: float = 1.0,
    seed: int = 0,
    awkward: bool = False,
) -> Path:
    """Writes a phenotypic CSV and `rois_synthetic/<FILE_ID>_rois_synthetic.1D` files; the same bytes for one seed.

    Every series is Gaussian: a signal that all ROIs share, a signal per network of four neighbouring ROIs, one per
    pair of the class effect, and noise. In the first rois/4 pairs (i, i + rois/2) subjects with ASD share less signal
    than controls, so only rois/4 of the edges carry the class. Sites differ in offset, scale, noise, shared signal
    and number of time points. Nothing is fitted to real data.

    Args:
      folder: new, empty, or holding an earlier output of the same options (which is written again).
      sites: (merged site, usable subjects); half of each, rounded up, are controls.
      rois: at least 8.
      length: time points of the first site, at least 20; the others differ.
      class_effect: in [0, 1]; the share of the pairs' signal that ASD lacks. 0 = no difference between the classes.
      site_effect: scales how much sites differ; 0 = not at all (but for the class balance).
      seed: at least 0.
      awkward: adds what real folders have: sub-sites _1 and _2, MAX_MUN with other file prefixes, CMU with two
        subjects, rows without a file id, without or above the motion limit, without a series file, -9999, quoted
        commas, and two subjects with a ROI of zeros. The usable subjects of `sites` stay the same in number.

    Returns: the folder.
    Raises: UserError on an option, or where the folder holds anything else.
    """
    _check(sites, rois, length, class_effect, site_effect, seed)
    names = [site for site, _ in sites]
    options = {"generator": "connectomes", "sites": [list(s) for s in sites], "rois": rois, "length": length}
    options |= {"class_effect": class_effect, "site_effect": site_effect, "seed": seed, "awkward": awkward}
    root = _prepared(Path(folder), options)
    people = _people(sites, awkward)
    random = np.random.default_rng([seed, 0])
    rows = [_row(i, person, random, awkward) for i, person in enumerate(people)]
    (root / TABLE).write_text(_csv(rows), encoding="utf-8", newline="")
    series_folder = root / f"rois_{ATLAS}"
    series_folder.mkdir(exist_ok=True)
    order = names + sorted({p.site for p in people} - set(names))
    for i, person in enumerate(people):
        if person.file:
            where = order.index(person.site)
            series = _series(person.asd, where, rois, length, class_effect, site_effect, [seed, 1, i])
            if person.zero_roi:
                series[:, 3] = 0.0
            path = series_folder / f"{_file_id(i, person)}_rois_{ATLAS}.1D"
            path.write_text(_table(series), encoding="ascii", newline="")
    return root


def _check(
    sites: Sequence[tuple[str, int]], rois: int, length: int, class_effect: float, site_effect: float, seed: int
) -> None:
    checks.number("synthesis.rois", rois, low=8, integer=True)
    checks.number("synthesis.length", length, low=20, integer=True)
    checks.number("synthesis.class_effect", class_effect, low=0.0, high=1.0)
    checks.number("synthesis.site_effect", site_effect, low=0.0, high=3.0)
    checks.number("synthesis.seed", seed, low=0, integer=True)
    for site, size in sites:
        checks.number(f"synthesis.sites: {site}", size, low=1, integer=True)
    names = [site for site, _ in sites]
    if len(set(names)) != len(names) or not names:
        raise checks.UserError(f"synthesis.sites: {names} given, at least one site and each once expected")


def _prepared(folder: Path, options: dict[str, Any]) -> Path:
    """The folder, made; the options are written first, so that an interrupted output can be told from foreign files."""
    text = json.dumps(options, indent=1) + "\n"
    note = folder / _OPTIONS_FILE
    if folder.is_dir() and any(folder.iterdir()) and (not note.is_file() or note.read_text() != text):
        held = "an output of other options" if note.is_file() else "other files"
        raise checks.UserError(f"synthesis: {folder} holds {held}; name a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise checks.UserError(f"synthesis: {folder} cannot be written ({error.strerror}); name another") from None
    return folder


def _people(sites: Sequence[tuple[str, int]], awkward: bool) -> list[_Person]:
    people = []
    for site, size in sites:
        for i in range(size):
            part = 1 + (i >= size - size // 3) if awkward and site in _SUB_SITES else 0
            prefix = f"{_FILE_PREFIX.get(site, site)}_{part}" if part else _FILE_PREFIX.get(site, site)
            people.append(_Person(site, part, asd=i % 2 == 1, prefix=prefix, zero_roi=awkward and i == 1))
    if not awkward:
        return people
    # the first site alone keeps its zero ROI, and one subject of the last
    marked = [n for n, p in enumerate(people) if p.zero_roi]
    people = [p._replace(zero_roi=n in (marked[:1] + marked[1:][-1:])) for n, p in enumerate(people)]
    for i in range(12):
        people.append(_Person("MAX_MUN", 0, asd=i % 2 == 1, prefix=f"MaxMun_{'abcd'[i % 4]}"))
    people += [_Person("CMU", 0, asd=i == 1, prefix=f"CMU_{'ab'[i]}") for i in range(2)]
    first, last = people[0], people[sum(size for _, size in sites) - 1]
    for i in range(4):
        people.append(first._replace(asd=i % 2 == 1, listed=False, file=False, zero_roi=False))
        people.append(last._replace(asd=i % 2 == 1, mean_fd=f"{0.1501 + 0.2 * i:.4f}", zero_roi=False))
    people.append(first._replace(asd=True, mean_fd="missing", zero_roi=False))
    people.append(last._replace(asd=False, mean_fd="-9999", zero_roi=False))
    people.append(first._replace(asd=True, file=False, zero_roi=False))
    return people


def _file_id(i: int, person: _Person) -> str:
    return f"{person.prefix}_{_FIRST_SUB_ID + i:07d}"


def _row(i: int, person: _Person, random: np.random.Generator, awkward: bool) -> dict[str, str]:
    number = _FIRST_SUB_ID + i
    fd = random.uniform(0.02, 0.148)
    age, sex, iq = random.uniform(7.0, 40.0), random.choice(["1", "1", "1", "2"]), random.integers(75, 135, 3)
    odd = awkward and i % 7 == 0
    row = {
        "": str(i),
        "Unnamed: 0": str(i + 1),
        "SUB_ID": str(number),
        "X": str(i + 1),
        "subject": str(number),
        "SITE_ID": f"{person.site}_{person.part}" if person.part else person.site,
        "FILE_ID": _file_id(i, person) if person.listed else "no_filename",
        "DX_GROUP": "1" if person.asd else "2",
        "DSM_IV_TR": "1" if person.asd else "0",
        "AGE_AT_SCAN": f"{age:.2f}",
        "SEX": str(sex),
        "HANDEDNESS_CATEGORY": "-9999" if odd else "R",
        "FIQ": "-9999" if odd else str(iq[0]),
        "VIQ": str(iq[1]),
        "PIQ": str(iq[2]),
        "FIQ_TEST_TYPE": "WASI",
        "CURRENT_MED_STATUS": "1" if odd else "0",
        "MEDICATION_NAME": "synthetic A, synthetic B" if odd else "",
        "EYE_STATUS_AT_SCAN": "1",
        "func_mean_fd": {"": f"{fd:.10f}", "missing": ""}.get(person.mean_fd, person.mean_fd),
        "func_num_fd": str(int(fd * 100)),
        "qc_rater_1": "OK",
        "qc_anat_notes_rater_2": "made up, not rated" if odd else "",
        "qc_func_rater_2": "OK",
        "SUB_IN_SMP": "1",
    }
    return {name: row.get(name, "") for name in COLUMNS}


def _csv(rows: Sequence[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _series(
    asd: bool, site: int, rois: int, length: int, class_effect: float, site_effect: float, seed: Sequence[int]
) -> np.ndarray:
    """float64 [T, rois]; see `connectomes` for the model. Site number 0, 1, ... sets the site's effects."""
    random = np.random.default_rng(seed)
    wave = np.sin(1.0 + 2.0 * site)  # a fixed irregular number in [-1, 1] per site
    points = max(20, round(length * (1 + 0.35 * site_effect * wave)))
    personal = random.uniform(0.8, 1.2)  # how strongly this person's networks are coupled
    shared = 0.4 * (1 + 0.5 * site_effect * wave) * random.normal(size=(points, 1))
    network = np.repeat(random.normal(size=(points, -(-rois // 4))), 4, axis=1)[:, :rois]
    pairs = np.zeros((points, rois))
    half, affected = rois // 2, rois // 4
    signal = random.normal(size=(points, affected)) * (1 - class_effect * asd)
    pairs[:, :affected] += signal
    pairs[:, half : half + affected] += signal
    noise = (1 + 0.3 * site_effect * np.cos(2.0 * site)) * random.normal(size=(points, rois))
    unit = shared + 0.6 * personal * network + 0.6 * pairs + noise
    return 10.0 * (1 + 0.4 * site_effect * np.cos(5.0 * site)) * unit + 5.0 * site_effect * wave


def _table(series: np.ndarray) -> str:
    rois = series.shape[1]
    form = "\t".join(["%.6f"] * rois) + "\n"
    header = "\t".join(f"#{code}" for code in range(1, rois + 1)) + "\n"
    return header + "".join(form % tuple(row) for row in series.tolist())
