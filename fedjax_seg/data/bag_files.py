"""Files of whole-slide features: one matrix [instances, features] per slide, in .npz or .h5 (h5py, optional)."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.checks import UserError
from fedjax_seg.data.image_cases import Seen
from fedjax_seg.data.image_table import Row, place

HDF5 = (".h5", ".hdf5")
ENDINGS = (".npz", *HDF5)
KEY = "features"
_GIB = 2**30


class Bag(NamedTuple):
    """features: float32 [m, d], not more than wanted; stored: instances of the file; sha256: of all of them."""

    features: np.ndarray
    stored: int
    kind: str
    sha256: str


class Bags(NamedTuple):
    """x float32 [N, n, d], padded with zeros; instances int32 [N], real rows of each; what was seen; all the faults.

    `seen` tells (stored instances, features) as its shape. Where there are faults, x has no instances.
    """

    x: np.ndarray
    instances: np.ndarray
    seen: tuple[Seen | None, ...]
    faults: tuple[str, ...]


def thinned(instances: int, most: int) -> np.ndarray:
    """int [min(instances, most)], rows evenly spaced: the middle ones of `most` equal parts; most 0 = all rows."""
    if not most or instances <= most:
        return np.arange(instances)
    return (2 * np.arange(most) + 1) * instances // (2 * most)


def read_bag(path: Path, most: int = 0) -> Bag:
    """One file. Raises: UserError saying what is wrong with it, without the name of the file."""
    if not path.name.lower().endswith(ENDINGS):
        torch = "; PyTorch files are not read, the same program writes h5_files/ beside pt_files/"
        raise UserError(
            f"{', '.join(ENDINGS)} expected" + torch * (path.suffix == ".pt" and path.is_file())
            if path.suffix or path.is_file()
            else f"no such file, nor with {' or '.join(ENDINGS)} at its end"
        )
    if not path.is_file():
        if path.is_symlink():
            raise UserError("a link to a file that is not there")
        near = [path.stem + end for end in ENDINGS if path.with_name(path.stem + end).is_file()]
        raise UserError("no such file" + (f"; {near[0]} is there" if near else ""))
    if path.stat().st_size == 0:
        raise UserError("an empty file (0 bytes); copy it again")
    try:
        with _hdf5(path) if path.name.lower().endswith(HDF5) else _npz(path) as array:
            values = np.asarray(array)
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever their readers stumble over
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(f"cut short or damaged ({text}); copy it again") from None
    return _checked(values, most, f"{values.dtype} {path.suffix.lower()}")


def _checked(values: np.ndarray, most: int, kind: str) -> Bag:
    if values.dtype.kind != "f":
        raise UserError(f"{KEY} of type {values.dtype} found, floating point numbers expected")
    if values.ndim != 2:
        raise UserError(f"{KEY} of shape {list(values.shape)} found, [instances, features] expected")
    if 0 in values.shape:
        raise UserError(f"no instance ({KEY} of shape {list(values.shape)}); leave the slide out")
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = int(narrow.size - np.count_nonzero(np.isfinite(narrow)))
    if bad:
        raise UserError(f"{bad} of {narrow.size} numbers are NaN, infinite or beyond float32; extract them again")
    digest = hashlib.sha256(f"{values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
    return Bag(narrow[thinned(len(narrow), most)], len(narrow), kind, digest.hexdigest())


@contextlib.contextmanager
def _npz(path: Path) -> Iterator[np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        names = file.files
        if KEY not in names and len(names) != 1:
            raise UserError(f"no array {KEY!r} (found: {', '.join(names) or 'nothing'})")
        yield file[KEY if KEY in names else names[0]]


@contextlib.contextmanager
def _hdf5(path: Path) -> Iterator[np.ndarray]:
    with _h5py().File(path, "r") as file:
        found = file.get(KEY)
        if not hasattr(found, "shape"):
            raise UserError(f"no data set {KEY!r} (found: {', '.join(file) or 'nothing'})")
        where = file.get("coords")
        if hasattr(where, "shape") and found.shape and where.shape[:1] != found.shape[:1]:
            raise UserError(f"{found.shape[0]} rows of {KEY}, {where.shape[0]} of coords; the extraction did not end")
        yield found[()]


def _h5py() -> Any:
    try:
        import h5py  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(
            f"data.slide_bags: {error.name or error} cannot be imported, .h5 files need it; pip install"
            " 'fedjax-seg[histopathology]'"
        ) from None
    return h5py


def read_bags(root: Path, rows: Sequence[Row], most: int, memory_gb: float) -> Bags:
    """The bags of all rows; their faults name file and line.

    Args:
      most: instances of a bag, larger ones are thinned out; 0 = all.
      memory_gb: GiB that x may take.

    Raises: UserError where x would be larger, before all files are read, or h5py is missing.
    """
    if any(row.image.lower().endswith(HDF5) for row in rows):
        _h5py()
    faults: list[str] = []
    bags: list[Bag | None] = []
    largest = 0
    for row in rows:
        bag = None
        try:
            bag = read_bag(root / row.image, most) if row.image else None  # '' is the table's fault
        except UserError as error:
            faults.append(f"{place(row.image, row)}: {error}")
        bags.append(bag)
        if bag is not None and len(bag.features) > largest:
            largest = len(bag.features)
            _fits(len(rows), largest, bag.features.shape[1], most, memory_gb)
    faults += _widths(rows, bags)
    width = 0 if faults or not largest else next(bag.features.shape[1] for bag in bags if bag is not None)
    x = np.zeros((len(rows), largest if width else 0, width), np.float32)
    instances = np.array([0 if bag is None else len(bag.features) for bag in bags], np.int32)
    seen = tuple(None if bag is None else _seen(bag) for bag in bags)
    for n, bag in enumerate(bags if width else ()):
        if bag is not None:
            x[n, : len(bag.features)] = bag.features
        bags[n] = None  # so that all of it is never twice in memory
    return Bags(x, instances, seen, tuple(faults))


def _seen(bag: Bag) -> Seen:
    shape = (bag.stored, bag.features.shape[1])
    return Seen(shape, bag.kind, 0, 0.0, bag.sha256, False, False, (1.0, 1.0), 0, 0)


def _fits(bags: int, instances: int, width: int, most: int, memory_gb: float) -> None:
    wanted = bags * instances * width * 4 / _GIB
    if wanted > memory_gb:
        fit = int(memory_gb * _GIB / (bags * width * 4))
        cure = f"set data.most_instances to at most {fit}, or raise" if fit else "raise"
        raise UserError(
            f"data.most_instances: {most or 'all'} given; {bags} bags padded to {instances} instances of {width}"
            f" features take {wanted:.3g} GiB, {memory_gb:g} allowed; {cure} data.memory_gb"
        )


def _widths(rows: Sequence[Row], bags: Sequence[Bag | None]) -> list[str]:
    """Faults: bags of another encoder."""
    found = Counter(bag.features.shape[1] for bag in bags if bag is not None)
    if len(found) < 2:
        return []
    usual, times = found.most_common(1)[0]
    return [
        f"{place(row.image, row)}: {bag.features.shape[1]} features per instance, {usual} in {times} other bags; all of"
        " one encoder expected"
        for row, bag in zip(rows, bags)
        if bag is not None and bag.features.shape[1] != usual
    ]


def check_limits(most: int, memory_gb: float) -> None:
    """Raises: UserError on an option of `read_bags` that is out of range."""
    checks.number("data.most_instances", most, low=0, integer=True)
    checks.number("data.memory_gb", memory_gb, above=0)
