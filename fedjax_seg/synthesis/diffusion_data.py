"""Slices that a diffusion model learns from: a data set of ours, scaled to [-1, 1], and the way back to its unit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import federated, records
from fedjax_seg.data.images2d import images2d

TABLE = "metadata.csv"
SOFT_TISSUE = (40.0, 400.0)  # as data.records.tfds


class Unit(NamedTuple):
    """What [0, 1] means in the files: value = low + x * (high - low), stored as `dtype`."""

    low: float
    high: float
    dtype: str

    def stored(self, x: np.ndarray) -> np.ndarray:
        """Of x in [-1, 1]; clipped and rounded."""
        return np.rint(self.low + (np.clip(x, -1, 1) + 1) / 2 * (self.high - self.low)).astype(self.dtype)

    def read(self, values: np.ndarray) -> np.ndarray:
        """float32 in [-1, 1] of stored values."""
        return ((values.astype(np.float32) - self.low) / (self.high - self.low) * 2 - 1).astype(np.float32)


class TrainingSlices(NamedTuple):
    """N slices of K clients.

    Attributes:
      x: float32 [N, H, W, 1] in [-1, 1].
      label: uint8 [N, H, W], the mask; 0 is background.
      client: int32 [N]; patient: N strings.
      train, held_out: int [*], rows; no patient is in both.
      clients: K names.
      spacing: mm per pixel (rows, columns), the median; None where not known.
      real: True unless the data set says of itself that it is synthetic (no slice is, or is made from, a patient's).
      facts: JSON-able, for the description of what is generated; 'digest' identifies the slices and their division.
    """

    x: np.ndarray
    label: np.ndarray
    client: np.ndarray
    patient: tuple[str, ...]
    train: np.ndarray
    held_out: np.ndarray
    clients: tuple[str, ...]
    classes: int
    unit: Unit
    spacing: tuple[float, float] | None
    real: bool
    facts: Mapping[str, Any]


def read(
    root: str, *, size: int, window: tuple[float, ...] | None, clients: tuple[str, ...], held_out: float
) -> TrainingSlices:
    """The training slices of a data set in TFDS form, or of a folder of images and masks with metadata.csv.

    Args:
      root: the folder.
      size: pixels per side.
      window: (centre, width) in HU that becomes [-1, 1]; () = the full range of unsigned images; None = (40, 400) for
        data in TFDS form (unless they are unsigned), () for a folder of images.
      clients: which of them, () = all (an external test set and an attacker's slices are never used).
      held_out: share of the patients of each client that stays out of training, in [0, 0.9].

    Raises: UserError on an option or the data.
    """
    checks.number("held_out", held_out, low=0, high=0.9)
    if not root:
        raise checks.UserError("data: no folder given; name a data set in TFDS form, or a folder with metadata.csv")
    if (Path(root).expanduser() / TABLE).is_file():
        window = window or ()
        data = images2d(root=root, size=(size, size), window=window, test_share=held_out, sites=clients)
        eight = all(kind.startswith("8-bit") for kind in data.about["kinds"])
        unit = _unit(window, "uint8" if eight else "uint16")
    else:
        window = SOFT_TISSUE if window is None else window
        data = records.tfds(root=root, window=window, size=size, test_share=held_out)
        dtype = _stored_type(records.find(root))
        unit = _unit(() if np.dtype(dtype).kind == "u" else window, dtype)
    return _slices(data, clients, unit, held_out, size)


def _stored_type(folder: Path) -> str:
    """The type of the images of a data set in TFDS form, as its description says."""
    described = json.loads((folder / "features.json").read_text(encoding="utf-8"))
    try:
        return str(described["featuresDict"]["features"]["image"]["tensor"]["dtype"])
    except KeyError:
        raise checks.UserError(f"data: {folder}: images of a type that is no tensor; arrays expected") from None


def _unit(window: tuple[float, ...], dtype: str) -> Unit:
    if window:
        centre, width = window
        return Unit(centre - width / 2, centre + width / 2, "int16")
    if np.dtype(dtype).kind != "u":
        raise checks.UserError(f"window: () given, images are {dtype}; (centre, width) expected, e.g. --window=40,400")
    return Unit(0.0, float(np.iinfo(dtype).max), dtype)


def _slices(
    data: federated.FederatedData, clients: tuple[str, ...], unit: Unit, held_out: float, size: int
) -> TrainingSlices:
    own = tuple(name for name in data.sites if name not in data.external)
    for name in clients:
        checks.lookup(dict.fromkeys(own), name, "clients")
    names = clients or own
    ids = [data.sites.index(name) for name in names]
    parts = {side: [getattr(data.splits[0], side)[k] for k in ids] for side in ("train", "test")}
    rows = np.sort(np.concatenate([*parts["train"], *parts["test"]]))
    place = {k: n for n, k in enumerate(ids)}
    where = lambda side: np.flatnonzero(np.isin(rows, np.concatenate(parts[side])))
    spacing = data.arrays.get("spacing")
    about = data.about
    origin = str(about.get("generator") or "")
    real = not about.get("synthetic")
    facts = {
        "digest": federated.digest(data),
        "generator": origin,
        "generated": dict(about.get("generated") or about.get("generator_facts") or {}),
        "size": size,
        "unit": unit._asdict(),
        "held_out": held_out,
        "slices": {n: [len(a), len(b)] for n, a, b in zip(names, parts["train"], parts["test"])},
    }
    return TrainingSlices(
        x=data.arrays["x"][rows] * 2 - 1,
        label=np.asarray(data.arrays["y"][rows], np.uint8),
        client=np.array([place[k] for k in data.site_of[rows]], np.int32),
        patient=tuple(data.patient_ids[i] for i in rows),
        train=where("train"),
        held_out=where("test"),
        clients=names,
        classes=len(data.classes),
        unit=unit,
        spacing=None if spacing is None else tuple(np.median(spacing[rows], 0).tolist()),
        real=real,
        facts=facts,
    )


def as_input(label: np.ndarray, classes: int) -> np.ndarray:
    """Masks [..., H, W] as the network reads them: float32 [..., H, W, 1], labels spread over [-1, 1]."""
    return (label[..., None].astype(np.float32) * (2 / (classes - 1)) - 1).astype(np.float32)
