"""Cached volumes as a CaseStore: patches for training, whole volumes for evaluation, predictions as files.

Files are mapped for one patch and let go, so that resident memory does not grow with what has been read.
"""

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.stores import CaseStore
from fedjax_seg.data import label_schemes, nifti, patches, volume_cache
from fedjax_seg.data.read_ahead import ReadAhead
from fedjax_seg.data.volume_cache import Entry


def volume_store(
    entries: Sequence[Entry],
    scheme: label_schemes.Scheme,
    drawing: patches.Drawing,
    *,
    multiple: int = 8,
    depth: int = 4,
    threads: int = 1,
) -> CaseStore:
    """The cases in the order of `entries`.

    Voxels outside of a volume (patches larger than it, the rest of the buffer of `whole`) have what a voxel of 0 became
    by normalisation, and label 0: a cropped volume goes on there as its file does.

    Args:
      entries: of one number of channels.
      scheme: whose values the labels have; 'y' is class ids.
      drawing: of patches.
      multiple: every axis of the buffer of `whole` is rounded up to a multiple of it, as networks that halve need.
      depth: training batches read ahead of every client.
      threads: that read ahead.
    """
    for entry in entries:  # a value without a class would become background in `classes`
        if not set(entry.values) <= set(scheme.values):
            raise UserError(
                f"{entry.subject}: label values {entry.values} found, {scheme.values} ({scheme.name}) expected"
            )
    channels = len(entries[0].background)
    largest = tuple(math.ceil(max(axis) / multiple) * multiple for axis in zip(*(e.shape for e in entries)))
    classes = np.zeros(256, np.uint8)
    classes[list(scheme.values)] = range(len(scheme.values))
    axes = len(largest)
    spec: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "x": ((*drawing.size, channels), np.dtype(np.float16)),
        "y": (drawing.size, np.dtype(np.uint8)),
    }
    whole_spec = {
        "x": ((*largest, channels), np.dtype(np.float16)),
        "y": (largest, np.dtype(np.uint8)),
        "shape": ((axes,), np.dtype(np.int32)),
        "full": ((axes,), np.dtype(np.int32)),
        "spacing": ((axes,), np.dtype(np.float32)),
        "background": ((channels,), np.dtype(np.float32)),
    }

    def part(entry: Entry, first: Sequence[int], size: tuple[int, ...]) -> dict[str, np.ndarray]:
        image, label = (_mapped(entry, name) for name in (volume_cache.IMAGE, volume_cache.LABEL))
        fill = np.array(entry.background, np.float16)
        return {"x": patches.cut(image, first, size, fill), "y": classes[patches.cut(label, first, size, 0)]}

    def patch(entry: Entry, seed: tuple[int, ...]) -> dict[str, np.ndarray]:
        marked = patches.Marked(lambda n: int(_mapped(entry, volume_cache.INDEX)[n]), entry.offsets)
        return part(entry, patches.start(drawing, seed, entry.shape, marked), drawing.size)

    def batch(rows: Any, size: int, key: Any, step: int, batch_size: int, epochs: int) -> Mapping[str, np.ndarray]:
        chosen = patches.entries(drawing, size, key, step, batch_size, epochs)
        return patches.stacked([patch(entries[rows[e.row]], e.seed) for e in chosen], spec, batch_size)

    def whole(case: int) -> Mapping[str, np.ndarray]:
        entry = entries[int(case)]
        return part(entry, (0,) * axes, largest) | {
            "shape": np.array(entry.shape, np.int32),
            "full": np.array(entry.native, np.int32),
            "spacing": np.array(entry.spacing, np.float32),
            "background": np.array(entry.background, np.float16).astype(np.float32),
        }

    def save(case: int, labels: np.ndarray, folder: str | Path) -> Path:
        return _saved(entries[int(case)], scheme, np.asarray(labels), Path(folder))

    ahead = ReadAhead(
        batch,
        lambda size, batch_size, epochs: epochs * patches.steps_per_epoch(size, drawing.per_case, batch_size),
        lambda batch_size: batch_size * sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.values()),
        depth=depth,
        threads=threads,
    )
    return CaseStore(
        patches=ahead.get,
        whole=whole,
        patch_spec=spec,
        whole_spec=whole_spec,
        per_case=drawing.per_case,
        save=save,
        waited=ahead.waited,
        close=ahead.close,
    )


def _mapped(entry: Entry, name: str) -> np.ndarray:
    """A file of the cache as an array that reads what is looked at; the map is closed with its last reference.

    What the file holds is known, so that its header need not be parsed (np.load takes longer than a small patch); the
    voxels are at its end.
    """
    files: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        volume_cache.IMAGE: ((*entry.shape, len(entry.background)), np.dtype(np.float16)),
        volume_cache.LABEL: (entry.shape, np.dtype(np.uint8)),
        volume_cache.INDEX: ((entry.offsets[-1],), np.dtype(np.int32)),
    }
    shape, dtype = files[name]
    path = entry.folder / name
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.ndarray(shape, dtype, memory, len(memory) - math.prod(shape) * dtype.itemsize)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"data.cache: {path} cannot be read ({error}); it was there when the run began: start again, and do not"
            " delete the cache meanwhile"
        ) from None


def _saved(entry: Entry, scheme: label_schemes.Scheme, labels: np.ndarray, folder: Path) -> Path:
    """Writes a prediction as <subject>.nii.gz in the frame, size and label values of the subject's files.

    Args:
      labels: uint8 [*shape], class ids in the box that was kept; all the rest of the file becomes background.
      folder: is made where it does not exist.
    """
    if labels.shape != tuple(entry.shape) or labels.dtype != np.uint8:
        raise ValueError(f"{entry.subject}: labels {labels.dtype} {labels.shape}, uint8 {entry.shape} expected")
    full = np.full(entry.native, scheme.values[0], np.uint8)
    full[tuple(slice(a, a + n) for a, n in zip(entry.start, entry.shape))] = label_schemes.to_values(labels, scheme)
    path = folder / f"{entry.subject}.nii.gz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nifti.write_labels(path, full, entry.sources[0])
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); name another folder") from None
    return path
