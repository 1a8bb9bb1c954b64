"""Series files of the Preprocessed Connectomes Project, `<FILE_ID>_rois_<atlas>.1D`: finding, reading, checking."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import connectivity

PATTERN = "<FILE_ID>_rois_<atlas>.1D"
_FEWEST_TIME_POINTS = 3  # two points always lie on a line: every correlation would be 1 or -1


class Series(NamedTuple):
    """A file's table: values float64 [T, R], the '#' names of the ROIs ('' x 0 where absent), the file's SHA-256."""

    values: np.ndarray
    names: tuple[str, ...]
    sha256: str


class Connectomes(NamedTuple):
    """Features of the subjects that were read without a fault.

    Attributes:
      features: {file id: float32 [E]}, E = R(R-1)/2.
      edge_ok: {file id: bool [E]}, False where one of the two ROIs is bad (the feature is 0 there).
      bad_rois: {file id: number of bad ROIs}.
      lengths: {file id: T}.
      rois: R, the same in every file.
      sha256: of the sorted lines `<file name> <SHA-256 of the file>`.
      faults: one line per fault; where there is any, the other fields are incomplete.
    """

    features: Mapping[str, np.ndarray]
    edge_ok: Mapping[str, np.ndarray]
    bad_rois: Mapping[str, int]
    lengths: Mapping[str, int]
    rois: int
    sha256: str
    faults: tuple[str, ...]


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted, links to folders followed once, hidden files and folders left out."""
    seen = set()

    def unreadable(error: OSError) -> None:
        raise checks.UserError(f"{error.filename}: folder cannot be read ({error.strerror}); allow reading it")

    for at, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        real = os.path.realpath(at)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield from (Path(at, name) for name in sorted(names) if not name.startswith("."))


def find_series(folder: Path, atlas: str = "") -> tuple[str, dict[str, Path]]:
    """The series files below a folder.

    Args:
      folder: searched recursively.
      atlas: '' = the only one there is.

    Returns: the atlas, {file id: path}.
    Raises: UserError where there is none, where several atlases or several copies of a file leave a choice.
    """
    files = [p for p in walk(folder) if p.suffix.lower() == ".1d"]
    found = [(*p.stem.rpartition("_rois_")[::2], p) for p in files if "_rois_" in p.stem]
    if not found:
        what = f"{len(files)} .1D files but none named so, e.g. {files[0].name!r}" if files else "no .1D file at all"
        raise checks.UserError(f"data.series: {folder}: {what}; expected {PATTERN}, in it or any folder below")
    atlases = Counter(name for _, name, _ in found)
    if not atlas and len(atlases) > 1:
        listed = ", ".join(f"{name} ({n} files)" for name, n in sorted(atlases.items()))
        raise checks.UserError(f"data.atlas: several atlases below {folder}: {listed}; name one")
    atlas = atlas or next(iter(atlases))
    checks.lookup(atlases, atlas, "data.atlas")
    paths: dict[str, Path] = {}
    for file_id, name, path in found:
        if name == atlas and paths.setdefault(file_id, path) != path:
            raise checks.UserError(
                f"data.series: {file_id} has two files, {paths[file_id]} and {path}; set data.series to one folder"
            )
    return atlas, paths


def read_series(path: Path) -> Series:
    """Reads a table of T lines (time points) by R cells (ROIs), separated by blanks or tabs.

    Lines that begin with '#' are comments. If a comment line consists of words that all begin with '#', as PCP writes
    the ROI codes, they are the names of the columns.

    Raises: UserError (without the file's name) where it is not a full table of numbers.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise checks.UserError(f"cannot be read ({error.strerror}); make it readable") from None
    names: tuple[str, ...] = ()
    lines, rows = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        words = line.split()
        if words and words[0].startswith(b"#"):
            if len(words) > 1 and all(word.startswith(b"#") for word in words):
                names = tuple(word.decode("utf-8", "replace") for word in words)
        elif words:
            lines.append(number)
            rows.append(words)
    if not rows:
        raise checks.UserError("no line of numbers, the file is empty or cut off; fetch it again")
    for number, row in zip(lines, rows):
        if len(row) != len(rows[0]):
            raise checks.UserError(
                f"line {number} has {len(row)} cells, line {lines[0]} has {len(rows[0])};"
                " the file is cut off or damaged: fetch it again"
            )
    try:
        values = np.array([word for row in rows for word in row], np.float64).reshape(len(rows), -1)
    except ValueError:
        number, word = next((n, w) for n, row in zip(lines, rows) for w in row if not _is_number(w))
        text = word[:30].decode("utf-8", "replace")
        raise checks.UserError(
            f"line {number}: {text!r} is not a number; numbers separated by blanks or tabs expected,"
            " a line of names must begin with '#'"
        ) from None
    return Series(values, names, hashlib.sha256(content).hexdigest())


def _is_number(word: bytes) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_connectomes(paths: Mapping[str, Path], *, fisher_z: bool = False) -> Connectomes:
    """Reads the series of all subjects, checks that they agree, and turns each into edges. All faults are collected.

    Args:
      paths: {file id: path}, in the order in which they are read.
      fisher_z: as in `connectivity.edges`.
    """
    faults: dict[str, str] = {}
    shapes: dict[str, tuple[int, int]] = {}
    names: dict[str, tuple[str, ...]] = {}
    hashes, features, edge_ok, bad_count = {}, {}, {}, {}
    for file_id, path in paths.items():
        try:
            series = read_series(path)
        except checks.UserError as error:
            faults[file_id] = str(error)
            continue
        shapes[file_id], names[file_id], hashes[path.name] = series.values.shape, series.names, series.sha256
        bad = connectivity.bad_rois(series.values)
        bad_count[file_id] = int(bad.sum())
        if series.values.shape[0] >= _FEWEST_TIME_POINTS and (~bad).sum() >= 2:
            features[file_id], edge_ok[file_id] = connectivity.edges(series.values, fisher_z=fisher_z)
    rois = _commonest([columns for _, columns in shapes.values()], default=0)
    faults |= _shape_faults(shapes, rois) | _name_faults(names, shapes)
    for file_id, (rows, columns) in shapes.items():
        if rows < _FEWEST_TIME_POINTS:
            faults.setdefault(file_id, f"{rows} time points, at least {_FEWEST_TIME_POINTS} expected; fetch it again")
        elif file_id not in features:
            bad_ones = f"{bad_count[file_id]} of {columns} ROIs are constant or hold NaN, no edge is left"
            faults.setdefault(file_id, f"{bad_ones}; fetch it again or delete it")
    digest = hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()
    told = tuple(f"{file_id}: {paths[file_id]}: {faults[file_id]}" for file_id in paths if file_id in faults)
    lengths = {file_id: rows for file_id, (rows, _) in shapes.items()}
    return Connectomes(features, edge_ok, bad_count, lengths, rois, digest, told)


def _commonest(values: Sequence[Any], default: Any) -> Any:
    """The most frequent value, the smaller of equally frequent ones."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value), default=default)


def _shape_faults(shapes: Mapping[str, tuple[int, int]], rois: int) -> dict[str, str]:
    agreeing = sum(columns == rois for _, columns in shapes.values())
    faults = {}
    for file_id, (rows, columns) in shapes.items():
        others = f"{columns} columns, {rois} in {agreeing} of the {len(shapes)} files"
        if columns != rois and rows == rois:
            faults[file_id] = f"{others}; it looks transposed ({rows} rows): a line is a time point, a column a ROI"
        elif columns != rois:
            faults[file_id] = f"{others}; is it of another atlas? replace it or remove it"
        elif columns < 2:
            faults[file_id] = "a single column; at least 2 ROIs expected"
    return faults


def _name_faults(names: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Where the names of the columns do not fit the table, or are not those of the other files."""
    fitting = [own for file_id, own in names.items() if own and len(own) == shapes[file_id][1]]
    common = _commonest(fitting, default=())
    faults = {}
    for file_id, own in names.items():
        rows, columns = shapes[file_id]
        if own and len(own) != columns:
            turned = " it looks transposed:" if len(own) == rows else ""
            faults[file_id] = f"{len(own)} ROI names above {columns} columns;{turned} a column per ROI expected"
        elif own and own != common and len(own) == len(common):
            i = next(i for i, (a, b) in enumerate(zip(own, common)) if a != b)
            faults[file_id] = f"column {i + 1} is {own[i]}, {common[i]} in the other files; is it of another atlas?"
    return faults
