"""The cases of an image table: files decoded in threads, all their faults in one list."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import raster
from fedjax_seg.data.image_table import Row, is_junk, place

DESCRIPTIONS = ("generator.json", "about.json")
PICTURES = ("contact_sheet.png",)  # a generator's picture of what it wrote


class Seen(NamedTuple):
    """What a file told that its final pixels do not.

    Attributes:
      shape: (rows, columns) as stored.
      kind: e.g. '16-bit PNG I;16'.
      bits: 0 = range unknown.
      highest: the largest stored value.
      sha256: of the stored pixels.
      transparent, turned: see Raster.
      zoom: factors of the mm per pixel, rows and columns.
      lesion_before, lesion: pixels with a label above 0 as stored and in the end; 0 without masks.
    """

    shape: tuple[int, int]
    kind: str
    bits: int
    highest: float
    sha256: str
    transparent: bool
    turned: bool
    zoom: tuple[float, float]
    lesion_before: int
    lesion: int


class Cases(NamedTuple):
    """x float32 [N, H, W, C] in [0, 1]; y uint8 [N, H, W], or None without masks; what was seen; all the faults."""

    x: np.ndarray
    y: np.ndarray | None
    seen: tuple[Seen | None, ...]
    faults: tuple[str, ...]


def read_cases(root: Path, rows: Sequence[Row], look: raster.Look, mask_values: Sequence[int], masks: bool) -> Cases:
    """Reads image and mask of every row. A row with a fault leaves zeros behind; its fault names file and line."""
    x = np.zeros((len(rows), *look.size, 3 if look.channels == "rgb" else 1), np.float32)
    y = np.zeros((len(rows), *look.size), np.uint8) if masks else None
    listings: dict[Path, dict[str, str]] = {}

    def one(n: int) -> tuple[Seen | None, list[str]]:
        row, faults = rows[n], list[str]()
        if not row.image or (masks and not row.mask):  # the table's fault
            return None, faults
        image, mask = None, None
        try:
            image = raster.decode(root / row.image)
            pixels = raster.to_unit(image, look)
        except UserError as error:
            faults.append(f"{place(row.image, row)}: {_told(root / row.image, error, listings)}")
        if masks:
            try:
                mask = raster.labels(raster.decode_mask(root / row.mask), mask_values)
                if image is not None and mask.shape != image.pixels.shape[:2]:
                    raise UserError(f"the mask is {_by(mask.shape)}, its image {row.image} {_by(image.pixels.shape)}")
            except UserError as error:
                faults.append(f"{place(row.mask, row)}: {_told(root / row.mask, error, listings)}")
        if faults or image is None:
            return None, faults
        fitted, labels, zoom = raster.fit(pixels, mask, look)
        x[n] = np.clip(fitted, 0, 1)
        if y is not None and labels is not None:
            y[n] = labels
        before, after = (0, 0) if mask is None or labels is None else (np.count_nonzero(mask), np.count_nonzero(labels))
        height, width = image.pixels.shape[:2]
        seen = Seen(
            *((height, width), image.kind, image.bits, float(image.pixels.max()), image.sha256),
            *(image.transparent, image.turned, zoom, int(before), int(after)),
        )
        return seen, []

    # Decoding leaves Python's lock; more threads than cores hide slow disks.
    with ThreadPoolExecutor(max_workers=min(16, 2 * (os.cpu_count() or 1))) as pool:
        results = list(pool.map(one, range(len(rows))))
    return Cases(x, y, tuple(seen for seen, _ in results), tuple(f for _, faults in results for f in faults))


def _by(shape: Sequence[int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _told(path: Path, error: UserError, listings: dict[Path, dict[str, str]]) -> str:
    """The error; for a missing file also one there of the same name in other case or of another type."""
    if str(error) != "no such file":
        return str(error)
    if path.is_symlink():
        return "a link to a file that is not there"
    if path.parent not in listings:
        there = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        listings[path.parent] = {name.lower().rpartition(".")[0]: name for name in there}
    near = listings[path.parent].get(path.name.lower().rpartition(".")[0], "")
    return f"{error}; {near} is there" if near else str(error)


def unnamed_files(root: Path, table: Path | None, rows: Sequence[Row]) -> tuple[list[str], int]:
    """Files below the root that no row names, except the table and descriptions: (paths, how many of them are junk)."""
    named = {name for row in rows for name in (row.image, row.mask)}
    named |= {*DESCRIPTIONS, *PICTURES, os.path.relpath(table, root).replace(os.sep, "/") if table else ""}
    found = []
    for folder, _, names in os.walk(root):
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        found += [name if below == "." else f"{below}/{name}" for name in names]
    extra = sorted(set(found) - named)
    return extra, sum(map(is_junk, extra))


def files_digest(seen: Sequence[Seen], rows: Sequence[Row]) -> str:
    """sha256 over the paths and pixels of all images, in the order of the rows."""
    total = hashlib.sha256()
    for row, one in zip(rows, seen):
        total.update(f"{row.image} {one.sha256}\n".encode())
    return total.hexdigest()
