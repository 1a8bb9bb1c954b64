"""FederatedData: the cases of all sites, and which of them train and test in each split. Host side, numpy only."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.stores import CaseStore


class Split(NamedTuple):
    """One way to divide the cases, e.g. one fold. Index arrays point into the leading axis of the arrays.

    Attributes:
      name: e.g. 'fold0'; the `fold` column of every metrics row.
      train: K index arrays, one per client; an empty one = the client takes no part.
      test: K index arrays, one per client: the cases scored under that client's site name.
    """

    name: str
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class FederatedData:
    """All the cases of a federation, in memory or (volumes) behind a `store`.

    Attributes:
      arrays: 'x' [N, ...] float32 and 'y' [N, ...], and what else a batch should hold of a case, e.g. 'spacing' [N, 2]
        (mm per pixel, rows then columns); the leading axis is the case.
      case_ids, patient_ids: N strings.
      sites: K client names; the position is the client id.
      site_of: int32 [N], the client id of every case.
      splits: one per fold (at least one).
      external: names of sites that only test (a global test set). They come last in `sites`, train in no split, and
        means over sites leave them out.
      store: where the cases themselves lie when they are too large for memory (volumes); `arrays` then holds only
        small facts per case, among them 'content' uint8 [N, 32], a hash of the case, and neither 'x' nor 'y'.
      aside: int [A], cases of an attacker's own (shadow models): in no split, nor are their patients.
      classes: names of the label values 0, 1, ...
      about: JSON-able facts for the report (rule, atlas, features, file hashes, ...).
      files: {file name: text} to be saved in the run's folder (cohort flow, folds).
      summary: lines printed before the run (the flow of subjects).
    """

    arrays: Mapping[str, np.ndarray]
    case_ids: tuple[str, ...]
    patient_ids: tuple[str, ...]
    sites: tuple[str, ...]
    site_of: np.ndarray
    splits: tuple[Split, ...]
    classes: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    summary: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    aside: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    store: CaseStore | None = None


def validate(data: FederatedData) -> None:
    """Raises UserError where a split leaks (a patient in train and test), repeats a case, or has no training case."""
    patients = np.asarray(data.patient_ids)
    for split in data.splits:
        train = np.concatenate(split.train) if split.train else np.zeros(0, int)
        test = np.concatenate(split.test) if split.test else np.zeros(0, int)
        if len(train) == 0:
            raise checks.UserError(f"data: split {split.name!r} has no training case at any site")
        if len(np.unique(train)) != len(train) or len(np.unique(test)) != len(test):
            raise checks.UserError(f"data: split {split.name!r} lists a case twice")
        shared = sorted(set(patients[train]) & set(patients[test]))
        if shared:
            raise checks.UserError(
                f"data: patient {str(shared[0])!r} is in training and test of split {split.name!r}"
                f" ({len(shared)} such patients); split by patient"
            )
        used = np.concatenate([train, test])
        leaked = sorted(set(patients[used]) & set(patients[data.aside]))
        if leaked:
            raise checks.UserError(
                f"data: patient {str(leaked[0])!r} is set aside for the attacker and in split {split.name!r}"
                f" ({len(leaked)} such patients); the attacker's cases must be of other patients"
            )
    for name in data.external:
        k = data.sites.index(name)
        if any(len(split.train[k]) for split in data.splits) or k < len(data.sites) - len(data.external):
            raise checks.UserError(f"data: external site {name!r} has training cases, or does not come last")


def digest(data: FederatedData) -> str:
    """sha256 of everything that decides a run's numbers: arrays, case ids, client order and splits."""
    total = hashlib.sha256()
    for name in sorted(data.arrays):
        x = np.ascontiguousarray(data.arrays[name])
        total.update(f"{name} {x.dtype} {x.shape}".encode())
        total.update(x.data)
    splits = [[s.name, *([p.tolist() for p in side] for side in (s.train, s.test))] for s in data.splits]
    total.update(json.dumps([data.case_ids, data.sites, splits, data.external, data.aside.tolist()]).encode())
    return total.hexdigest()


def padded_plan(splits: tuple[Split, ...], which: str) -> tuple[np.ndarray, np.ndarray]:
    """Index plan of all splits as rectangular arrays for the device.

    Args:
      splits: F splits over K clients.
      which: 'train' or 'test'.

    Returns: int32 [F, K, M] case indices (padding 0) and int32 [F, K] sizes; M is the largest size, at least 1.
    """
    return padded([getattr(s, which) for s in splits])


def padded(parts: Sequence[Sequence[np.ndarray]], least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """F x K lists of cases as int32 [F, K, M], padded with 0, and int32 [F, K] sizes; M is at least `least`."""
    longest = max(least, max(len(p) for row in parts for p in row))
    sizes = np.array([[len(p) for p in row] for row in parts], np.int32)
    plan = np.zeros((*sizes.shape, longest), np.int32)
    for f, row in enumerate(parts):
        for k, p in enumerate(row):
            plan[f, k, : len(p)] = p
    return plan, sizes
