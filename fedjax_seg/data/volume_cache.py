"""Every subject is read once: all its voxels are checked, normalised, cropped and written; later runs map the result.

A subject's folder holds `image.npy` float16 [x, y, z, C], `label.npy` uint8 [x, y, z] in the file's own values,
`index.npy` int32 (flat indices of the labelled voxels, grouped by ascending value) and, written last, `meta.json`.
Files appear whole or not at all, so a process killed at any moment leaves only whole subjects behind.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import volume_preparation as preparation
from fedjax_seg.data.volume_tree import Subject

FORMAT = 1  # raise it whenever the bytes of an entry would change
IMAGE, LABEL, INDEX, META = "image.npy", "label.npy", "index.npy", "meta.json"
NONFINITE = ("error", "background")


class Rules(NamedTuple):
    """How subjects are read.

    Attributes:
      normalise, crop: see volume_preparation.prepared.
      channels: True = one file of an image holds all the channels in its fourth axis.
      nonfinite: what NaN and infinite voxels are: 'error', or 'background' (0 before normalisation).
      check_affine: False = image and label may lie at different places in space (their shapes still must agree).
    """

    normalise: str
    crop: bool
    channels: bool
    nonfinite: str = "error"
    check_affine: bool = True


class Entry(NamedTuple):
    """A subject in the cache.

    Attributes:
      subject: its id.
      folder: where its files lie.
      sources: the image files in the order of the channels, then the label.
      native, start, shape: voxels of the files; first voxel and size of the box that was kept.
      spacing: mm per voxel, in the order of the axes.
      background: of every channel, the normalised value of a voxel that was 0.
      values, offsets: the label values above 0; value g has the places offsets[g] <= n < offsets[g + 1] in INDEX.
      voxels: {label value: voxels of the whole file}.
      content: sha256 of shape, image and label.
      facts: counts for warnings: 'rounded', 'nonfinite', 'constant', 'outside', 'geometry'.
      bytes: of all the files.
      fresh: read in this run.
    """

    subject: str
    folder: Path
    sources: tuple[Path, ...]
    native: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    background: tuple[float, ...]
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    voxels: Mapping[int, int]
    content: str
    facts: Mapping[str, Any]
    bytes: int
    fresh: bool


class Found(NamedTuple):
    """entries: None where a subject has a fault; voxels: {subject: {label value: voxels}} of all readable labels."""

    entries: tuple[Entry | None, ...]
    voxels: Mapping[str, Mapping[int, int]]
    faults: tuple[str, ...]


def folder(place: str, root: Path, rules: Rules) -> Path:
    """The folder of all entries of a tree: below `place`, or the user's cache folder.

    Its name is a hash of the preprocessing, the format and the tree's path: two trees with the same subject ids never
    overwrite each other's entries. `nonfinite` and `check_affine` only decide what is refused, not what is written.
    """
    if place:
        base = Path(place).expanduser()
    else:
        user = os.environ.get("XDG_CACHE_HOME", "")
        base = (Path(user) if user else Path.home() / ".cache") / "fedjax_seg" / "volumes"
    decisive = [FORMAT, rules.normalise, rules.crop, rules.channels, str(root.resolve())]
    return base / hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def prepare(subjects: Sequence[Subject], rules: Rules, cache: Path, *, workers: int) -> Found:
    """Entries of all subjects; those that are missing or whose files have changed are made.

    At most `workers` subjects are in memory at a time.

    Returns: the faults of all subjects together, each as "subject: file: cause; cure".
    Raises: UserError where the cache cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            jobs = [pool.submit(_one, subject, rules, cache) for subject in subjects]
            try:
                results = [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise UserError(f"data.cache: {cache}: {error.strerror or error}; name another folder, or make room") from None
    voxels = {subject.id: counts for subject, (_, counts, _) in zip(subjects, results) if counts}
    return Found(tuple(r[0] for r in results), voxels, tuple(fault for r in results for fault in r[2]))


def labels_csv(voxels: Mapping[str, Mapping[int, int]]) -> str:
    """CSV: a row per subject, a column per label value, voxels of the whole file."""
    values = sorted({value for counts in voxels.values() for value in counts})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["Subject_ID", *(f"voxels_{value}" for value in values)])
    writer.writerows([subject, *(counts.get(v, 0) for v in values)] for subject, counts in voxels.items())
    return text.getvalue()


def _one(subject: Subject, rules: Rules, cache: Path) -> tuple[Entry | None, Mapping[int, int], list[str]]:
    place = cache / subject.id
    assert subject.label is not None
    sources = (*subject.images, subject.label)
    try:
        meta = _valid(place, sources)
        fresh = meta is None
        counts: Mapping[int, int] = {}
        if meta is None:
            made = preparation.prepared(subject, rules.normalise, rules.crop, rules.channels)
            counts = made.voxels
            faults = [*made.faults, *_refused(subject, rules, made.facts)]
            if faults:
                return None, counts, faults
            meta = _written(place, sources, made)
        entry = _entry(subject.id, place, sources, meta, fresh)
    except FileNotFoundError as error:
        return None, {}, [f"{subject.id}: {error.filename}: no such file; it was there a moment ago"]
    faults = _refused(subject, rules, entry.facts)
    return (None if faults else entry), entry.voxels, faults


def _refused(subject: Subject, rules: Rules, facts: Mapping[str, Any]) -> list[str]:
    """Faults that depend on an option: they hold for a cached subject as for one just read."""
    faults = []
    if facts["geometry"] and rules.check_affine:
        faults.append(
            f"{subject.id}: {facts['geometry']}; mend the file, or set data.check_affine=False to take the label as it"
            " lies in the array"
        )
    if rules.nonfinite == "error":
        faults += [
            f"{subject.id}: {name}: {n} NaN or infinite voxels; mend the file, or set data.nonfinite='background'"
            for name, n in facts["nonfinite"].items()
        ]
    return faults


def _entry(subject: str, place: Path, sources: tuple[Path, ...], meta: Mapping[str, Any], fresh: bool) -> Entry:
    lists = {k: tuple(meta[k]) for k in ("native", "start", "shape", "spacing", "background", "values", "offsets")}
    voxels = {int(value): n for value, n in meta["voxels"].items()}
    size = sum(meta["bytes"].values())
    return Entry(
        subject=subject,
        folder=place,
        sources=sources,
        voxels=voxels,
        content=meta["content"],
        facts=meta["facts"],
        bytes=size,
        fresh=fresh,
        **lists,
    )


def _valid(place: Path, sources: Sequence[Path]) -> dict[str, Any] | None:
    """The entry's description where all its files are there and it was made of these very files; else None."""
    try:
        meta = json.loads((place / META).read_text(encoding="utf-8"))
        for name, size in meta["bytes"].items():
            if (place / name).stat().st_size != size:
                return None
        noted = meta["sources"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if [s["file"] for s in noted] != [p.name for p in sources]:
        return None
    touched = False
    for source, path in zip(noted, sources):
        now = path.stat()
        if now.st_size != source["size"]:
            return None
        if now.st_mtime_ns != source["mtime_ns"]:
            if _sha256(path) != source["sha256"]:
                return None
            source["mtime_ns"], touched = now.st_mtime_ns, True
    if touched:  # the next start need not hash again
        _write_json(place / META, meta)
    return dict(meta)


def _written(place: Path, sources: Sequence[Path], made: preparation.Prepared) -> dict[str, Any]:
    """Writes an entry, its description last."""
    place.mkdir(exist_ok=True)
    _clean(place)
    (place / META).unlink(missing_ok=True)
    content = hashlib.sha256(str(made.image.shape).encode())
    content.update(made.image.data)
    content.update(made.label.data)
    for name, array in ((IMAGE, made.image), (LABEL, made.label), (INDEX, made.marked)):
        with _atomic(place / name) as file:
            np.save(file, array)
    meta = {
        "format": FORMAT,
        "sources": [
            {"file": p.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
            for p, (stat, sha256) in zip(sources, made.sources)
        ],
        "native": made.native,
        "start": made.start,
        "shape": made.label.shape,
        "affine": made.affine.tolist(),
        "spacing": made.spacing,
        "background": made.background,
        "values": made.values,
        "offsets": made.offsets,
        "voxels": {str(value): n for value, n in made.voxels.items()},
        "content": content.hexdigest(),
        "facts": made.facts,
        "bytes": {name: (place / name).stat().st_size for name in (IMAGE, LABEL, INDEX)},
    }
    _write_json(place / META, meta)
    return json.loads(json.dumps(meta))


def _write_json(path: Path, value: Any) -> None:
    with _atomic(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


@contextlib.contextmanager
def _atomic(path: Path):
    """A binary file that takes its name when it is complete."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _clean(place: Path) -> None:
    """Removes what processes of this machine left behind that no longer run."""
    for path in place.glob(f".*.{socket.gethostname()}.*.tmp"):
        number = int(path.name.split(".")[-2])
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:
            pass


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
