"""Which patch of which case comes next: a pure draw, without any state between two draws.

A client's epoch is `per_case` patches of each of its cases, shuffled. Everything is drawn from (key, epoch) and
(key, epoch, entry), so batch number `step` can be made on any thread, before or after any other, with the same bits.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks

SAMPLINGS = ("foreground", "balanced", "uniform")
_ORDER, _PLACE = 0, 1  # the last word of a seed: two draws that never share a stream


class Drawing(NamedTuple):
    """How patches are drawn.

    Attributes:
      size: voxels of a patch per axis.
      per_case: patches of a case and epoch.
      sampling: 'foreground': the centre is a labelled voxel, all of them equally likely. 'balanced': a label value that
        the case has, all of them equally likely, then a voxel of it. 'uniform': all places inside are equally likely.
      background: in [0, 1]; the share of 'balanced' patches that are drawn uniformly instead.
    """

    size: tuple[int, ...]
    per_case: int
    sampling: str
    background: float = 0.0


class Marked(NamedTuple):
    """The labelled voxels of a case. at: (n) -> flat index (C order) of voxel n; they are grouped by label value,
    group g is offsets[g] <= n < offsets[g + 1]."""

    at: Callable[[int], int]
    offsets: Sequence[int]


class Entry(NamedTuple):
    """One patch to be cut: `row` counts within the client's cases; `seed` decides the place in the volume."""

    row: int
    seed: tuple[int, ...]


def check(drawing: Drawing) -> None:
    """Raises UserError on an impossible option."""
    if not drawing.size:
        raise checks.UserError(f"data.patch: {drawing.size!r} given, voxels per axis, e.g. (64, 64, 64), expected")
    for side in drawing.size:
        checks.number("data.patch", side, low=1, high=4096, integer=True)
    checks.number("data.patches", drawing.per_case, low=1, integer=True)
    checks.one_of("data.sampling", drawing.sampling, SAMPLINGS)
    checks.number("data.background", drawing.background, low=0, high=1)
    if drawing.background and drawing.sampling != "balanced":
        raise checks.UserError(
            f"data.background: {drawing.background!r} given, but data.sampling={drawing.sampling!r} does not read it;"
            " set data.sampling='balanced', or leave it at 0"
        )


def steps_per_epoch(cases: int, per_case: int, batch_size: int) -> int:
    """Batches of an epoch of so many cases; the last one may be smaller."""
    return math.ceil(cases * per_case / batch_size)


def entries(drawing: Drawing, size: int, key: Sequence[int], step: int, batch_size: int, epochs: int) -> list[Entry]:
    """The patches of local batch number `step` of a client with `size` cases.

    Args:
      size: cases of the client.
      key: two words of 32 bits, of this client and round.
      step: counts through all epochs; every epoch ends with a batch of its own.

    Returns: at most batch_size entries; none beyond the last epoch (or where there is no case).
    """
    per_epoch = steps_per_epoch(size, drawing.per_case, batch_size)
    if step < 0 or step >= per_epoch * epochs:
        return []
    epoch, place = divmod(step, per_epoch)
    words = (*(int(word) for word in key), epoch)
    order = _random(*words, _ORDER).permutation(size * drawing.per_case)
    chosen = order[place * batch_size : (place + 1) * batch_size].tolist()
    return [Entry(e // drawing.per_case, (*words, e, _PLACE)) for e in chosen]


def start(drawing: Drawing, seed: Sequence[int], shape: Sequence[int], marked: Marked) -> tuple[int, ...]:
    """The first voxel of a patch in a volume.

    The patch lies inside the volume: around a labelled voxel close to the border it is moved inwards. Along an axis on
    which the volume is smaller than the patch it is centred, so that the first voxel is negative. A case without any
    labelled voxel is drawn uniformly.

    Deviation: torchio's LabelSampler, which FeTS and GaNDLF use, never takes a voxel closer to the border than half a
    patch as a centre; here all labelled voxels have the same chance, since the brain is cropped close.

    Args:
      seed: of the entry.
      shape: of the volume.
      marked: its labelled voxels.
    """
    random = _random(*seed)
    room = [have - want for have, want in zip(shape, drawing.size)]
    group = _group(drawing, random, marked.offsets)
    if group is None:
        return tuple(int(random.integers(r + 1)) if r > 0 else r // 2 for r in room)
    voxel = marked.at(int(random.integers(*group)))
    centre = np.unravel_index(voxel, shape)
    return tuple(
        min(max(int(c) - want // 2, 0), r) if r > 0 else r // 2 for c, want, r in zip(centre, drawing.size, room)
    )


def _group(drawing: Drawing, random: np.random.Generator, offsets: Sequence[int]) -> tuple[int, int] | None:
    """The numbers (first, end) of labelled voxels to choose from; None = uniform over the volume."""
    if drawing.sampling == "uniform" or offsets[-1] == 0:
        return None
    if drawing.sampling == "foreground":
        return 0, offsets[-1]
    if random.random() < drawing.background:
        return None
    groups = [(first, end) for first, end in itertools.pairwise(offsets) if end > first]
    return groups[int(random.integers(len(groups)))]


def cut(volume: np.ndarray, first: Sequence[int], size: Sequence[int], fill: Any) -> np.ndarray:
    """A patch as a new array.

    Args:
      volume: [*space] or [*space, channels]; only the patch is read.
      first: the first voxel per axis, may be negative.
      size: of the patch; what lies outside of the volume is `fill`.
      fill: a number, or one per channel.
    """
    low = [max(f, 0) for f in first]
    high = [min(f + s, n) for f, s, n in zip(first, size, volume.shape)]
    inside = volume[tuple(slice(a, b) for a, b in zip(low, high))]
    axes = len(size)
    if inside.shape[:axes] == tuple(size):
        return np.array(inside)
    out = np.empty((*size, *volume.shape[axes:]), volume.dtype)
    out[...] = fill
    out[tuple(slice(a - f, b - f) for a, b, f in zip(low, high, first))] = inside
    return out


def stacked(parts: Sequence[Mapping[str, np.ndarray]], spec: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """A batch: the parts in their order, then zeros up to batch_size; 'mask' float32 [B] is 1 for the parts."""
    out: dict[str, Any] = {name: np.zeros((batch_size, *shape), dtype) for name, (shape, dtype) in spec.items()}
    for i, part in enumerate(parts):
        for name in spec:
            out[name][i] = part[name]
    out["mask"] = (np.arange(batch_size) < len(parts)).astype(np.float32)
    return out


def _random(*words: int) -> np.random.Generator:
    # PCG64 of a hashed sequence of words: NumPy keeps both streams stable over versions.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
