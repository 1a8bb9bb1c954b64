"""Synthetic brain MRI with gliomas at many sites, written as a FeTS folder."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import nifti
from fedjax_seg.synthesis import mri_fields, mri_scanner, mri_subjects
from fedjax_seg.synthesis.storage import prepared, write_whole

GENERATOR = (
    "mri phantoms (procedural; tumour volumes follow statistics of BraTS 2020, no image is or holds a patient's)"
)
VERSION = 1  # raised whenever the same options give other voxels
TABLE = "partitioning.csv"
# Subjects per site in FeTS 2022, sites 1, 2, ...: partitioning_1.csv and partitioning_2.csv of the challenge.
PARTITIONS = {
    "1": (511, 6, 15, 47, 22, 34, 12, 8, 4, 8, 14, 11, 35, 6, 13, 30, 9, 382, 4, 33, 35, 7, 5),
    "2": (
        *(170, 170, 171, 6, 15, 16, 15, 16, 22, 34, 12, 8, 4, 8, 14, 11, 12, 11, 12, 6, 13, 30, 9, 127, 127, 128, 4),
        *(33, 12, 11, 12, 7, 5),
    ),
}  # fmt: skip


def mri(
    folder: str | Path,
    *,
    size: tuple[int, ...] = (240, 240, 155),
    partition: str = "2",
    scale: float = 0.1,
    least: int = 4,
    sites: tuple[int, ...] = (),
    seed: int = 0,
) -> Path:
    """Writes `FeTS2022_00000/FeTS2022_00000_{t1,t1ce,t2,flair,seg}.nii.gz`, ... and `partitioning.csv`.

    Source: the form of the FeTS 2022 training data (folders, names, int16 images without a skull, labels 0/1/2/4,
    affine, a CSV with CRLF) and its numbers of subjects per site. Deviation: procedural phantoms. Volumes of the
    tumour's parts follow laws fitted to 368 BraTS 2020 label maps (mri_lesions); sites differ in gain, contrast,
    noise, bias field, blur, slice thickness, enhancement and size of the tumours (mri_scanner.RANGES).

    A subject depends on (seed, site, number in its site) alone, and is the same head in any `size`. The same options
    give the same bytes. What a stopped call has written is kept: the same call completes it.

    Args:
      folder: new, empty, or holding an output of the same options.
      size: voxels along x, y, z, at least 24 each; they cover 240 by 240 by 155 mm, so 240,240,155 is 1 mm.
      partition: '1' (23 sites) or '2' (33 sites), as in FeTS 2022.
      scale: in (0, 10]; factor of that partition's numbers of subjects, rounded.
      least: subjects that every site of that partition has at least.
      sites: subjects of each site, instead of a partition.
      seed: at least 0.

    Returns: the folder, to be read by `data.make('fets', root=folder, partition='partitioning.csv')`.
    Raises: UserError on an option, or where the folder holds anything else or cannot be written.
    """
    if len(size) != 3:
        raise checks.UserError(f"synthesis.size: {size!r} given, three numbers of voxels expected")
    for axis, n in zip("xyz", size):
        checks.number(f"synthesis.size: {axis}", n, low=24, high=512, integer=True)
    checks.number("synthesis.seed", seed, low=0, high=2**31 - 1, integer=True)
    counts = site_sizes(partition, scale, least, sites)
    about = {
        "generator": GENERATOR,
        "synthetic": True,
        "name": "mri",
        "version": VERSION,
        "seed": seed,
        "size": list(size),
        "sites": list(counts),
        "site_values": {str(k + 1): mri_subjects.site_of(seed, k).described() for k in range(len(counts))},
        "site_ranges": {name: list(values) for name, values in mri_scanner.RANGES.items()},
    }
    root = prepared(Path(folder), about)
    rows = list(_rows(counts))
    workers = int(np.clip(6e7 // np.prod(size), 1, os.cpu_count() or 1))  # a subject of 9 M voxels takes 1 GB
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda row: _write(root, row[0], seed, row[1], row[2], size), rows):
            pass
    lines = ["Partition_ID,Subject_ID", *(f"{site + 1},{name}" for name, site, _ in rows)]
    write_whole(root / TABLE, "".join(f"{line}\r\n" for line in lines).encode())
    return root


def site_sizes(partition: str, scale: float, least: int, sites: Sequence[int]) -> tuple[int, ...]:
    """Subjects per site. Raises: UserError."""
    for k, n in enumerate(sites):
        checks.number(f"synthesis.sites: site {k + 1}", n, low=1, high=99999, integer=True)
    checks.number("synthesis.scale", scale, above=0.0, high=10.0)
    checks.number("synthesis.least", least, low=1, high=1000, integer=True)
    counts = checks.lookup(PARTITIONS, str(partition), "synthesis.partition")
    return tuple(sites) or tuple(max(least, round(n * scale)) for n in counts)


def _rows(counts: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(name, site, number in the site) of all subjects."""
    pairs = ((site, i) for site, n in enumerate(counts) for i in range(n))
    for number, (site, i) in enumerate(pairs):
        yield f"FeTS2022_{number:05d}", site, i


def _write(root: Path, name: str, seed: int, site: int, number: int, size: Sequence[int]) -> None:
    folder = root / name
    files = {part: folder / f"{name}_{part}.nii.gz" for part in (*mri_scanner.MODALITIES, "seg")}
    if all(path.is_file() for path in files.values()):
        return  # every file is written whole or not at all
    drawn = mri_subjects.subject(seed, site, number, size)
    folder.mkdir(exist_ok=True)
    for part, array in {**drawn.images, "seg": drawn.labels}.items():
        nifti.write_volume(files[part], array, mri_fields.affine(size))
