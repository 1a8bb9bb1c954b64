"""Drawing synthetic CT slices by split and number: anatomy, tumours, scanner."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array
from fedjax_seg.data.slice_cohort import SHADOW, TEST
from fedjax_seg.synthesis import ct_anatomy, ct_lesions, ct_profiles, ct_scanner
from fedjax_seg.synthesis.ct_shapes import draws

CHUNK = 8  # slices per call of the device
_LUNG_LEVELS, _LIVER_LEVELS = (0.06, 0.50), (0.68, 0.97)


class Slices(NamedTuple):
    """Slices of one split. Arrays [n, H, W]: image int16 (HU), mask uint8 (1 = tumour), tissue int8 (ct_anatomy)."""

    image: np.ndarray
    mask: np.ndarray
    tissue: np.ndarray


def profile_of(client: int) -> int:
    """The profile of a client, both from 0."""
    return client % len(ct_profiles.PROFILES)


def clients_of(split: str, index: np.ndarray, clients: int, slices_per_patient: int) -> np.ndarray:
    """The client, from 0, whose profile each slice has."""
    if split in (TEST, SHADOW):
        return index // slices_per_patient % clients
    return np.full(index.shape, int(split.rpartition("_")[2]) - 1)


def slices(
    split: str,
    index: Sequence[int] | np.ndarray,
    *,
    clients: int = 5,
    size: int = 256,
    seed: int = 0,
    slices_per_patient: int = 1,
) -> Slices:
    """Draws slices of a split by their numbers: the same ones as `ct` writes, in any order.

    Args:
      split: 'client_1', 'client_2', ..., 'test' or 'shadow'.
      index: numbers of the slices.
      clients: how many there are (test and shadow take their profiles in turn).
    """
    numbers = np.asarray(index, np.int32)
    profiles = [profile_of(k) for k in clients_of(split, numbers, clients, slices_per_patient).tolist()]
    stream = 0 if split == TEST else 1 if split == SHADOW else 1 + int(split.rpartition("_")[2])
    starts = range(0, len(numbers), CHUNK)

    def chunk(start: int) -> list[np.ndarray]:
        own = numbers[start : start + CHUNK]
        padded = np.resize(own, CHUNK)  # one compiled program for every length
        which = np.resize(np.asarray(profiles[start : start + CHUNK]), CHUNK)
        drawn = _draw(seed, stream, padded, _values(which), slices_per_patient, size)
        return [np.asarray(a)[: len(own)] for a in drawn]

    first = chunk(0)  # compiles
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a program of small steps keeps one core busy
        parts = [first, *pool.map(chunk, starts[1:])]
    return Slices(*(np.concatenate(column) for column in zip(*parts)))


def _values(which: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers of the given profiles, a row each."""
    table = [{k: v for k, v in p._asdict().items() if k != "about"} for p in ct_profiles.PROFILES.values()]
    return {k: np.asarray([table[i][k] for i in which], np.float32) for k in table[0]}


@functools.partial(jax.jit, static_argnames="size")
def _draw(
    seed: int, stream: int, index: Array, profiles: dict[str, Array], per_patient: int, size: int
) -> tuple[Array, Array, Array]:
    key = jax.random.fold_in(jax.random.key(seed), stream)
    # A loop, not vmap: each ellipse then visits its own window of the picture.
    return jax.lax.map(lambda one: _one(key, one[0], one[1], jnp.int32(per_patient), size), (index, profiles))


def _one(
    key: Array, index: Array, profile: dict[str, Array], per_patient: Array, size: int
) -> tuple[Array, Array, Array]:
    own = jax.random.fold_in(key, index // per_patient)
    shapes = {"site": (2,), **ct_anatomy.UNIFORM, **ct_lesions.UNIFORM}
    uniform = draws(jax.random.fold_in(own, 0), shapes, "uniform")
    normal = draws(jax.random.fold_in(own, 1), {**ct_anatomy.NORMAL, **ct_lesions.NORMAL}, "normal")
    noise = draws(jax.random.fold_in(own, 2 + index % per_patient), ct_scanner.random_numbers(size), "normal")
    person = ct_anatomy.patient(uniform, normal, profile["enhanced"])
    where, depth = uniform["site"]
    in_lung = (where < profile["lung"]).astype(jnp.float32)
    low, high = (jnp.where(in_lung > 0, a, b) for a, b in zip(_LUNG_LEVELS, _LIVER_LEVELS))
    level = low + (high - low) * depth
    tumours = ct_lesions.tumours(profile, person, level, in_lung)
    # Neighbouring slices lie 0.6 radii above to 0.6 below the middle of the tumours.
    height = 0.6 * (2 * (index % per_patient) / jnp.maximum(per_patient - 1, 1) - (per_patient > 1))
    plain = ct_anatomy.draw(person, level + 0.02 * height, size)
    hu, mask = ct_lesions.grow(tumours, plain, person, ct_anatomy.places(person, size)[1], height)
    return ct_scanner.scan(noise, hu, plain.body, profile), mask, plain.tissue
