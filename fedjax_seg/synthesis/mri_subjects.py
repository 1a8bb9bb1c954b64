"""Drawing synthetic subjects by site and number: anatomy, tumour, scanner."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_seg.synthesis import mri_anatomy, mri_fields, mri_lesions, mri_scanner

_ROUGH = (40, 40, 26)  # voxels of the head in which the place of a tumour is looked for
_SITE, _PERSON, _TUMOUR, _SCAN = range(4)  # streams of random numbers


class Subject(NamedTuple):
    """Arrays of one subject, [X, Y, Z]: {modality: int16}, labels uint8 (0, 1, 2, 4)."""

    images: dict[str, np.ndarray]
    labels: np.ndarray


def site_of(seed: int, site: int) -> mri_scanner.Site:
    """The profile of a site (from 0): it depends on the seed and its number alone."""
    return mri_scanner.site(np.random.default_rng([seed, _SITE, site]))


def subject(seed: int, site: int, number: int, size: Sequence[int]) -> Subject:
    """Draws one subject by its site and its number in it, both from 0: the same one as `mri` writes."""
    where = site_of(seed, site)
    at = mri_fields.grid(size)
    plan, head, lesion = drawn(seed, site, number, at, where.lesion)
    random = np.random.default_rng([seed, _SCAN, site, number])
    boxes = mri_scanner.scan(random, head, lesion, plan, where, at)
    label = np.zeros(at.shape, np.uint8)
    label.reshape(-1)[head.flat] = lesion.label
    return Subject({name: _placed(box, at, size) for name, box in boxes.items()}, _placed(label, at, size))


def drawn(
    seed: int, site: int, number: int, at: mri_fields.Grid, shift: float = 0.0
) -> tuple[mri_lesions.Plan, mri_anatomy.Head, mri_lesions.Lesion]:
    """A subject before it is scanned."""
    person = mri_anatomy.person(np.random.default_rng([seed, _PERSON, site, number]))
    rough = mri_anatomy.head(person, mri_fields.grid(_ROUGH))
    plan = mri_lesions.plan(np.random.default_rng([seed, _TUMOUR, site, number]), rough, shift)
    head = mri_anatomy.head(person, at, plan.push)
    return plan, head, mri_lesions.draw(plan, head, at)


def _placed(box: np.ndarray, at: mri_fields.Grid, size: Sequence[int]) -> np.ndarray:
    out = np.zeros(tuple(size), box.dtype)
    out[at.window] = box
    return out
