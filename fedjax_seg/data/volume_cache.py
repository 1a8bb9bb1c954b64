"""Every subject is read once: all its voxels are checked, normalised, cropped and written; later runs map the result.

An entry lies in `subject/hash of its source files/`: `image.npy` float16 [x, y, z, C], `label.npy` uint8 [x, y, z] in
the file's own values, `index.npy` int32 (flat indices of the labelled voxels, grouped by ascending value) and, written
last, `meta.json`.
Files appear whole or not at all, so a process killed at any moment leaves only whole subjects behind. Sources that have
changed get a folder of their own: a run that is still going keeps reading what it began with.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import nifti, whole_files
from fedjax_seg.data import volume_preparation as preparation
from fedjax_seg.data.volume_tree import Subject

FORMAT = 2  # raise it whenever the bytes or the place of an entry would change
QUIET = 20  # so many subjects are read without a word
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
      orientation: where the axes point to, as nifti.orientation has it.
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
    orientation: str
    background: tuple[float, ...]
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    voxels: Mapping[int, int]
    content: str
    facts: Mapping[str, Any]
    bytes: int
    fresh: bool


_Result = tuple[Entry | None, Mapping[int, int], Sequence[str]]  # entry, voxels of every label value, faults


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
    return base.absolute() / hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def prepare(subjects: Sequence[Subject], rules: Rules, cache: Path, *, workers: int) -> Found:
    """Entries of all subjects; those that are missing or whose files have changed are made.

    At most `workers` subjects are in memory at a time. Reading more than QUIET subjects is announced on stderr, with
    the room that they will take, and followed by a line for every tenth.

    Returns: the faults of all subjects together, each as "subject: file: cause; cure".
    Raises: UserError where the cache cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            try:
                results = list(pool.map(lambda subject: _known(subject, rules, cache), subjects))
                new = [n for n, result in enumerate(results) if result is None]
                tell = len(new) > QUIET
                begun = time.monotonic()
                if tell:  # the first one tells how large an entry is
                    results[new[0]] = first = _made(subjects[new[0]], rules, cache)
                    _announced(len(new), first[0], cache)
                jobs = {n: pool.submit(_made, subjects[n], rules, cache) for n in (new[1:] if tell else new)}
                for done, n in enumerate(jobs, start=1 + tell):
                    results[n] = jobs[n].result()
                    if tell and 10 * done // len(new) > 10 * (done - 1) // len(new):
                        left = (time.monotonic() - begun) * (len(new) - done) / done
                        _told(f"{done} of {len(new)} subjects read, about {left / 60:.1f} min left")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise UserError(f"data.cache: {cache}: {error.strerror or error}; name another folder, or make room") from None
    all_of = [result for result in results if result is not None]
    voxels = {subject.id: counts for subject, (_, counts, _) in zip(subjects, all_of) if counts}
    return Found(tuple(r[0] for r in all_of), voxels, tuple(fault for r in all_of for fault in r[2]))


def _announced(count: int, first: Entry | None, cache: Path) -> None:
    size = f", about {first.bytes * count / 1e9:.1f} GB," if first else ""
    _told(f"reading {count} subjects{size} into {cache} ({shutil.disk_usage(cache).free / 1e9:.1f} GB free)")


def _told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _known(subject: Subject, rules: Rules, cache: Path) -> _Result | None:
    """What the cache has of a subject; None where it must be read."""
    sources = _sources(subject)
    found = _valid(cache / subject.id, sources)
    return _judged(subject, rules, sources, *found, fresh=False) if found else None


def _made(subject: Subject, rules: Rules, cache: Path) -> _Result:
    sources = _sources(subject)
    made = preparation.prepared(subject, rules.normalise, rules.crop, rules.channels)
    if faults := [*made.faults, *_refused(subject, rules, made.facts)]:
        return None, made.voxels, faults
    place = cache / subject.id / _name(sources, [sha256 for _, sha256 in made.sources])
    return _judged(subject, rules, sources, place, _written(place, sources, made), fresh=True)


def _judged(
    subject: Subject, rules: Rules, sources: tuple[Path, ...], place: Path, meta: Mapping[str, Any], fresh: bool
) -> _Result:
    entry = _entry(subject.id, place, sources, meta, fresh)
    faults = _refused(subject, rules, entry.facts)
    return (None if faults else entry), entry.voxels, faults


def _sources(subject: Subject) -> tuple[Path, ...]:
    assert subject.label is not None
    return *subject.images, subject.label


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
        orientation=nifti.orientation(np.array(meta["affine"])),
        bytes=size,
        fresh=fresh,
        **lists,
    )


def _valid(place: Path, sources: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """(folder, description) of the subject's entry that was made of these very files; None where there is none.

    Files that look untouched are not read: size, both times and inode agree. Else their bytes decide, since copying can
    keep size and mtime of other content.
    """
    entries = sorted(place.iterdir()) if place.is_dir() else []
    whole = [(entry, meta) for entry in entries if (meta := _described(entry, sources))]
    if not whole:
        return None
    try:
        now = [_stamp(path.stat()) for path in sources]
    except OSError:  # whoever reads it will tell
        return None
    for entry, meta in whole:
        if [{name: s[name] for name in n} for s, n in zip(meta["sources"], now)] == now:
            return entry, meta
    try:
        name = _name(sources, [_sha256(path) for path in sources])
    except OSError:
        return None
    for entry, meta in whole:
        if entry.name == name:
            for source, stamp in zip(meta["sources"], now):
                source.update(stamp)
            with contextlib.suppress(OSError):  # the next start need not hash again; a shared cache may be read-only
                _write_json(entry / META, meta)
            return entry, meta
    return None


def _described(entry: Path, sources: Sequence[Path]) -> dict[str, Any] | None:
    """An entry's description where all its files are there and it tells of files of these names."""
    try:
        meta = json.loads((entry / META).read_text(encoding="utf-8"))
        whole = all((entry / name).stat().st_size == size for name, size in meta["bytes"].items())
        same = [s["file"] for s in meta["sources"]] == [p.name for p in sources]
        whole &= all(name in s for s in meta["sources"] for name in ("size", "mtime_ns", "ctime_ns", "inode"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(meta) if whole and same else None


def _stamp(stat: os.stat_result) -> dict[str, int]:
    return {
        "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino
    }  # fmt: skip


def _name(sources: Sequence[Path], sha256: Sequence[str]) -> str:
    """Of an entry's folder: other content has another one."""
    described = json.dumps([[path.name, own] for path, own in zip(sources, sha256)])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _written(place: Path, sources: Sequence[Path], made: preparation.Prepared) -> dict[str, Any]:
    """Writes an entry, its description last."""
    place.mkdir(parents=True, exist_ok=True)
    whole_files.clean(place)
    content = hashlib.sha256(str(made.image.shape).encode())
    content.update(made.image.data)
    content.update(made.label.data)
    for name, array in ((IMAGE, made.image), (LABEL, made.label), (INDEX, made.marked)):
        with whole_files.atomic(place / name) as file:
            np.save(file, array)
    meta = {
        "format": FORMAT,
        "sources": [
            {"file": p.name, **_stamp(stat), "sha256": sha256} for p, (stat, sha256) in zip(sources, made.sources)
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
    with whole_files.atomic(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
