"""One subject from its files to the arrays that training reads: checked, normalised, cropped."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import nifti
from fedjax_seg.data.volume_tree import Subject

NORMALISATIONS = ("image", "brain", "none")


class Prepared(NamedTuple):
    """What became of a subject's files; image, label and marked are empty where there are faults.

    Attributes:
      image: float16 [x, y, z, C], the box that is kept.
      label: uint8 [x, y, z], in the file's own values.
      marked: int32, flat indices of the labelled voxels of `label`, grouped by ascending value.
      affine: [4, 4], of the files.
      native, start: voxels of the files; first voxel of the box.
      spacing: mm per voxel.
      background: per channel, the normalised value of 0.
      values, offsets: value g has the places offsets[g] <= n < offsets[g + 1] in marked.
      voxels: {label value: voxels of the whole file}; {} where the label cannot be read.
      facts: 'rounded' label voxels that were not quite whole numbers; 'nonfinite' {file: voxels}; 'constant' files or
        channels; 'outside' label voxels that the brain's box had to be enlarged for; 'geometry' '' or one line.
      sources: (stat, sha256) of every file, the label last; taken before reading.
      faults: "subject: file: cause; cure".
    """

    image: np.ndarray
    label: np.ndarray
    marked: np.ndarray
    affine: np.ndarray
    native: tuple[int, ...]
    start: tuple[int, ...]
    spacing: tuple[float, ...]
    background: tuple[float, ...]
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    voxels: Mapping[int, int]
    facts: Mapping[str, Any]
    sources: tuple[tuple[os.stat_result, str], ...]
    faults: tuple[str, ...]


class _Read(NamedTuple):
    channels: list[np.ndarray]  # float32 [X, Y, Z] each
    names: list[str]  # of the channels
    geometries: list[tuple[str, nifti.Geometry]]  # (file name, geometry), the label last
    label: np.ndarray | None
    rounded: int
    sources: list[tuple[os.stat_result, str]]
    faults: list[str]


def prepared(subject: Subject, normalise: str, crop: bool, channels: bool) -> Prepared:
    """Reads every voxel of a subject.

    NaN and infinite voxels become 0 and are counted; whether they are a fault is the caller's business, as is a label
    that lies elsewhere in space. Normalisation comes before the crop.

    Args:
      normalise: 'image': z-score per channel over all voxels of the file (Source: GaNDLF 'normalize', which FeTS uses;
        Deviation: the standard deviation is that of the population). 'brain': over the voxels that are not 0; these
        stay 0. 'none': as stored.
      crop: keep the box of voxels that are not 0 in any channel, enlarged to hold every label voxel.
      channels: a file holds all channels in its fourth axis.
    """
    read = _read(subject, channels)
    faults, voxels = list(read.faults), dict[int, int]()
    if read.label is not None:
        voxels = _counted(read.label)
        strange = [v for v in voxels if not 0 <= v <= 255]
        if strange:
            listed = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
            faults.append(
                f"{subject.id}: {read.geometries[-1][0]}: label values {listed} found, 0 to 255 expected; renumber them"
            )
    facts: dict[str, Any] = {"rounded": read.rounded, "nonfinite": {}, "constant": [], "outside": 0, "geometry": ""}
    if not faults:
        shape_fault, facts["geometry"] = _geometry(read.geometries)
        faults += [f"{subject.id}: {shape_fault}"] if shape_fault else []
    if faults or read.label is None:
        none = np.zeros(0, np.float16)
        return Prepared(
            *(none, none, none, none, (), (), (), (), (), ()), voxels, facts, tuple(read.sources), tuple(faults)
        )
    for name, x in zip(read.names, read.channels):
        bad = ~np.isfinite(x)
        if bad.any():
            file = name.partition(" channel ")[0]
            facts["nonfinite"][file] = facts["nonfinite"].get(file, 0) + int(np.count_nonzero(bad))
            x[bad] = 0
    box, facts["outside"] = _box(read.channels, read.label, crop)
    image, background = _normalised(read, normalise, box, facts["constant"])
    if not np.isfinite(image).all():
        faults = [
            f"{subject.id}: {name}: values up to {float(np.abs(x).max()):.4g}, at most 65504 can be kept (float16);"
            " set data.normalise='image'"
            for name, x in zip(read.names, read.channels)
            if np.abs(x).max() > 65504
        ]
    label = np.ascontiguousarray(read.label[box], np.uint8)
    marked, values, offsets = grouped(label)
    geometry = read.geometries[0][1]
    return Prepared(
        image=image,
        label=label,
        marked=marked,
        affine=np.asarray(geometry.affine, np.float64),
        native=tuple(read.label.shape),
        start=tuple(s.start for s in box),
        spacing=tuple(float(mm) for mm in nifti.spacing(geometry.affine)),
        background=background,
        values=values,
        offsets=offsets,
        voxels=voxels,
        facts=facts,
        sources=tuple(read.sources),
        faults=tuple(faults),
    )


def grouped(label: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """The labelled voxels of a volume.

    Returns: int32 flat indices (C order), grouped by ascending value and ascending in each group; the values; offsets.
    """
    flat = np.flatnonzero(label)
    of = label.reshape(-1)[flat]
    values, counts = np.unique(of, return_counts=True)
    index = flat[np.argsort(of, kind="stable")].astype(np.int32)
    return index, tuple(int(v) for v in values), (0, *(int(n) for n in np.cumsum(counts)))


def label_counts(path: Path) -> Mapping[int, int]:
    """{value: voxels} of a label map, {} where it cannot be read."""
    try:
        return _counted(nifti.read_labels(path)[0].data)
    except UserError:
        return {}


def _counted(label: np.ndarray) -> dict[int, int]:
    """{value: voxels}, ascending."""
    if label.min() >= 0 and label.max() < 256:  # counting needs no sorting
        counts = np.bincount(label.ravel(order="K"))
        return {int(v): int(counts[v]) for v in np.flatnonzero(counts)}
    return {int(v): int(n) for v, n in zip(*np.unique(label, return_counts=True))}


def _read(subject: Subject, channels: bool) -> _Read:
    """All files of a subject; one that cannot be read leaves a fault, so that the others are checked as well."""
    assert subject.label is not None
    out = _Read([], [], [], None, 0, [], [])
    label, rounded = None, 0
    for path in (*subject.images, subject.label):
        try:
            with path.open("rb") as file:
                out.sources.append((os.fstat(file.fileno()), hashlib.file_digest(file, "sha256").hexdigest()))
            if path == subject.label:
                volume, rounded = nifti.read_labels(path)
                label = volume.data
            else:
                volume = nifti.read_image(path, channels=channels)
                data = volume.data
                split = [data] if data.ndim == 3 else [np.ascontiguousarray(x) for x in np.moveaxis(data, -1, 0)]
                out.channels.extend(split)
                one = len(split) == 1
                out.names.extend(path.name if one else f"{path.name} channel {c}" for c in range(len(split)))
            out.geometries.append((path.name, volume.geometry))
        except UserError as error:
            out.faults.append(f"{subject.id}: {_named(path, str(error))}")
        except OSError as error:
            out.faults.append(f"{subject.id}: {path.name}: cannot be read ({error.strerror or error}); mend the file")
    return out._replace(label=label, rounded=rounded)


def _named(path: Path, text: str) -> str:
    """The message with the file's name in front, without its folder."""
    text = text.replace(str(path), path.name)
    return text if text.startswith(path.name) else f"{path.name}: {text}"


def _geometry(geometries: Sequence[tuple[str, nifti.Geometry]]) -> tuple[str, str]:
    """(fault, doubt): files of different shapes cannot be used; files that lie elsewhere in space may be."""
    first, reference = geometries[0]
    doubts = []
    for name, other in geometries[1:]:
        if tuple(other.shape[:3]) != tuple(reference.shape[:3]):
            have, want = (" x ".join(map(str, g.shape[:3])) for g in (other, reference))
            return f"{name}: {have} voxels, {first} has {want}; resample one to the other", ""
        difference = nifti.same_geometry(reference, other)
        if difference:
            doubts.append(f"{name}: lies elsewhere in space than {first} ({difference})")
    return "", "; ".join(doubts)


def _box(channels: Sequence[np.ndarray], label: np.ndarray, crop: bool) -> tuple[tuple[slice, ...], int]:
    """The box to keep, and how many label voxels lie outside of the brain's own box."""
    if not crop:
        return tuple(slice(0, n) for n in label.shape), 0
    brain = np.zeros(label.shape, bool)
    for x in channels:
        brain |= x != 0
    marked = label > 0
    own = _bounds(brain)
    outside = int(np.count_nonzero(marked)) - (int(np.count_nonzero(marked[own])) if own else 0)
    return _bounds(brain | marked) or tuple(slice(0, n) for n in label.shape), outside


def _bounds(mask: np.ndarray) -> tuple[slice, ...]:
    """The smallest box of all that is True; () where nothing is."""
    axes = range(mask.ndim)
    lines = [np.flatnonzero(mask.any(tuple(b for b in axes if b != a))) for a in axes]
    return tuple(slice(int(at[0]), int(at[-1]) + 1) for at in lines) if len(lines[0]) else ()


def _normalised(
    read: _Read, normalise: str, box: tuple[slice, ...], constant: list[str]
) -> tuple[np.ndarray, tuple[float, ...]]:
    """float16 [x, y, z, C] and, per channel, what a voxel of 0 became; appends the names of constant channels."""
    shape = tuple(s.stop - s.start for s in box)
    image = np.empty((*shape, len(read.channels)), np.float16)
    background = []
    for c, (name, x) in enumerate(zip(read.names, read.channels)):
        part, zero = x[box], np.float32(0)
        if normalise != "none":
            inside = x if normalise == "image" else x[x != 0]
            if inside.size == 0 or inside.min() == inside.max():
                constant.append(name)
                part = np.zeros(shape, np.float32)
            else:
                mean, std = (np.float32(f(inside, dtype=np.float64)) for f in (np.mean, np.std))
                zero = -mean / std if normalise == "image" else zero
                part = (part - mean) / std if normalise == "image" else np.where(part != 0, (part - mean) / std, 0)
        with np.errstate(over="ignore"):  # told as a fault
            image[..., c] = part
        background.append(float(np.float16(zero)))
    return image, tuple(background)
