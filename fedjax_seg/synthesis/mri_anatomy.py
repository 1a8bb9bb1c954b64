"""A synthetic brain without its skull: hemispheres with folded cortex, deep nuclei, ventricles, cerebellum, stem.

Shapes and sizes are those of textbooks, adjusted by eye to the look of slices in the field of view of BraTS; no atlas
and no patient's image is used. Places are mm from ORIGIN: x to the patient's left, y to the back, z upwards.
"""

from typing import NamedTuple

import numpy as np

from fedjax_seg.synthesis import mri_fields
from fedjax_seg.synthesis.mri_fields import Grid, capsule, cover, depth, looked_up, smooth

ORIGIN = (120.0, 124.0, 74.0)
_LATTICE = 2.8  # mm per node of the folds
_WAVE = 6.0  # nodes; a fold and its neighbour of the other sign lie 8 mm apart
# The lateral ventricle of one side: rods (from, to, radii). x counts from the middle.
_VENTRICLE = (
    ((13, -40, 3), (7, -20, 11), (3.0, 6.0)),
    ((7, -20, 11), (9, 10, 15), (6.0, 6.0)),
    ((9, 10, 15), (20, 32, 8), (5.0, 5.6)),
    ((20, 32, 8), (25, 56, 2), (5.0, 1.4)),
    ((22, 33, 6), (33, 16, -18), (3.8, 2.0)),
    ((33, 16, -18), (33, -4, -25), (2.0, 1.6)),
)
# Grey nuclei of one side: centre, half axes, share of grey matter.
_NUCLEI = (
    ((11, 10, 3), (9, 15, 9), 0.62),  # thalamus
    ((26, -8, 1), (5.5, 17, 10), 0.95),  # putamen
    ((19, -3, 0), (4.5, 9, 6), 0.45),  # pallidum
    ((14, -21, 9), (5, 11, 9), 0.95),  # head of the caudate
    ((28, 0, -26), (5, 16, 5), 0.9),  # hippocampus, amygdala
)


class Person(NamedTuple):
    """What makes one brain differ from another; nothing here depends on the number of voxels.

    Attributes:
      scale: [3] about 1.
      folds, vessels: [48, 48, 48] periodic: mm to the next sulcus (with a sign), and noise.
      bend: [3, ...] nodes of a smooth displacement.
      slow, fine: nodes of noise at 30 mm and at 7 mm.
      gap: half the width of a sulcus in mm.
      ventricle: factor of the ventricles' radii.
    """

    scale: np.ndarray
    folds: np.ndarray
    vessels: np.ndarray
    bend: np.ndarray
    slow: np.ndarray
    fine: np.ndarray
    gap: float
    ventricle: float


class Push(NamedTuple):
    """A mass that displaces what is around it: its centre (mm from ORIGIN), its radius, the share of the shift."""

    centre: np.ndarray
    radius: float
    share: float


class Head(NamedTuple):
    """The n voxels of the brain. Arrays are [n] unless stated.

    Attributes:
      flat: int64; place in the grid's box, counted as in a flat array.
      places: (x, y, z) before any mass pushed.
      csf, grey, white: shares of the voxel, sum 1.
      vessel: how much of it takes up contrast agent (veins, sinuses, choroid plexus), 0..1.
      depth: mm under the outer surface.
      below: 1 in the cerebellum and the stem.
      fine, slow: the smooth noise, unit variance.
    """

    flat: np.ndarray
    places: tuple[np.ndarray, ...]
    csf: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    vessel: np.ndarray
    depth: np.ndarray
    below: np.ndarray
    fine: np.ndarray
    slow: np.ndarray


def person(random: np.random.Generator) -> Person:
    """Draws one."""
    age = float(random.uniform())
    return Person(
        scale=(1 + 0.03 * random.standard_normal() + 0.02 * random.standard_normal(3)).astype(np.float32),
        folds=mri_fields.zero_distance(mri_fields.banded(random, _WAVE), _LATTICE),
        vessels=mri_fields.banded(random, 6.0),
        bend=np.stack([mri_fields.noise(random, 42.0) for _ in range(3)]),
        slow=mri_fields.noise(random, 30.0),
        fine=mri_fields.noise(random, 7.0),
        gap=0.15 + 0.6 * age + 0.1 * float(random.uniform()),
        ventricle=0.72 + 0.55 * age + 0.12 * float(random.standard_normal()),
    )


def head(one: Person, at: Grid, push: Push | None = None) -> Head:
    """The brain of that person on a grid, pushed aside by a mass where there is one."""
    whole = _places(one, at)
    fine = smooth(one.fine, at)
    cerebrum, below = _hulls(whole)
    outer = np.maximum(cerebrum, below) + np.float32(0.45) * fine
    index = np.flatnonzero(outer > 0)

    def inside(a: np.ndarray) -> np.ndarray:
        return np.broadcast_to(a, at.shape).reshape(-1)[index]

    places = tuple(inside(a) for a in whole)
    cerebrum, below, outer, fine = (inside(a) for a in (cerebrum, below, outer, fine))
    slow = inside(smooth(one.slow, at))
    moved = _pushed(places, push) if push else places
    width = 0.25 + at.widest
    is_below = (below > cerebrum).astype(np.float32)
    sheet, fold, middle = _cortex(one, moved, cerebrum, slow, fine)
    lower = _lower(moved, below, fine)
    pial = np.where(is_below > 0, lower, sheet)
    pial = np.minimum(pial, np.abs(cerebrum - below) + 8 * (np.minimum(cerebrum, below) < 0) - 0.9 * one.gap)
    # a sulcus thinner than a voxel fills a part of it
    csf = cover(-pial, width) * min(1.0, 0.3 + 1.8 * one.gap / at.widest)
    white = cover(pial - (3.1 + 0.4 * fine - 1.3 * is_below), 0.8 + at.widest)
    stem = cover(_stem(moved), width)
    white = white * (1 - stem) + 0.72 * stem
    csf = csf * (1 - stem)
    white, csf, plexus = _deep(one, moved, white, csf, slow, fine, width)
    white = np.minimum(white, 1 - csf)
    vessel = _vessels(one, moved, outer, csf, fold, middle, fine) + 0.7 * plexus
    # the stripping of the skull leaves some sulci open at the surface, with a frayed edge
    keep = ~((csf > 0.5) & (outer < 2.4 + 1.0 * slow) & (is_below < 1))
    parts = (csf, 1 - csf - white, white, np.clip(vessel, 0, 1), outer, is_below, fine, slow)
    return Head(index[keep], tuple(p[keep] for p in places), *(p[keep].astype(np.float32) for p in parts))


def _places(one: Person, at: Grid) -> list[np.ndarray]:
    """Standard coordinates of the voxels: scaled and bent a little."""
    axes = (at.x, at.y, at.z)
    bend = (1.6, 2.2, 1.8)
    return [
        (axis - np.float32(o)) / s + np.float32(b) * smooth(nodes, at)
        for axis, o, s, b, nodes in zip(axes, ORIGIN, one.scale, bend, one.bend)
    ]


def _pushed(places: tuple[np.ndarray, ...], push: Push) -> tuple[np.ndarray, ...]:
    """Where the tissue at each place would be without the mass."""
    off = [p - np.float32(c) for p, c in zip(places, push.centre)]
    near = np.exp(-sum(o * o for o in off) / np.float32((1.7 * push.radius) ** 2))
    factor = 1 - np.float32(push.share) * near
    return tuple(np.float32(c) + o * factor for o, c in zip(off, push.centre))


def _hulls(places: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Depth under the surface of the cerebrum, and of the cerebellum with the stem."""
    x, y, z = places
    side = np.abs(x)
    narrow = x * (1 + 0.0007 * np.maximum(-y, 0)) * (1 + 0.0005 * np.maximum(y, 0))
    height = np.where(z > -4, np.float32(76.0), np.float32(34.0)) * (1 - 0.0012 * np.maximum(-y, 0))
    upper = depth((narrow, y, z), (0, 0, -4), (68.0, 85.0, height))
    tip = z + 0.14 * (y + 8)  # the temporal pole lies lower than its root
    temporal = depth((side, y, tip), (43, -8, -25), (21.5, 42, 24))
    upper = np.maximum(upper, temporal)
    half = depth((side, y, z), (21, 40, -41), (30, 31, 24))
    vermis = depth((x, y, z), (0, 36, -36), (15, 26, 20))
    return upper, np.maximum(np.maximum(half, vermis), _stem(places))


def _stem(places: list[np.ndarray] | tuple[np.ndarray, ...]) -> np.ndarray:
    pons = capsule(places, (0, 6, -16), (0, 14, -46), (14.5, 15.5))
    return np.maximum(pons, capsule(places, (0, 14, -46), (0, 24, -76), (12, 8.5)))


def _cortex(
    one: Person, places: tuple[np.ndarray, ...], outer: np.ndarray, slow: np.ndarray, fine: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distance in mm to the nearest pial surface (below 0 in the fluid), the fold noise, distance to the fissure."""
    x, y, z = places
    side = np.abs(x)
    # Folds stand upright on the surface: their noise is looked up at places drawn out towards one shell.
    ray = np.sqrt(x * x + 0.64 * y * y + z * z) + 1
    out = (np.float32(64) / ray) ** np.float32(0.62)
    # they wind: turned about the middle by an angle that changes with the depth and from place to place
    wind = 2.6 * np.sin(0.19 * outer + 2.0 * slow) + 0.8 * fine
    fold = looked_up(one.folds, (x * out + wind, 0.85 * y * out - wind, z * out + wind), _LATTICE)
    reach = 19 + 6 * slow
    sulcus = np.abs(fold) / np.maximum(out, 0.8) + 0.5 * np.maximum(outer - reach, 0)
    sulcus = sulcus - one.gap * np.clip(0.8 + 0.4 * slow + 0.25 * fine, 0.1, 1.8)
    # The halves join only inside the ring of the corpus callosum.
    ring = 1 - np.sqrt((y / 43) ** 2 + ((z - 1) / 22) ** 2)
    middle = np.abs(x + 0.8 * slow)
    fissure = middle + 30 * np.maximum(ring + 0.01, 0) - (0.35 + 0.7 * one.gap)
    sylvian = np.abs(z + 12 - 0.22 * (y + 5) + 1.2 * slow + wind) + 1.5 * np.maximum(38 - side, 0)
    sylvian = sylvian + np.maximum(-38 - y, 0) + np.maximum(y - 26, 0) - (0.3 + 0.9 * one.gap)
    surface = outer - 0.2 - 0.5 * one.gap
    return np.minimum(np.minimum(sulcus, fissure), np.minimum(sylvian, surface)), fold, middle


def _lower(places: tuple[np.ndarray, ...], outer: np.ndarray, fine: np.ndarray) -> np.ndarray:
    """As the first of _cortex, in the cerebellum: thin leaves that lie around the fourth ventricle."""
    x, y, z = places
    ray = np.arctan2(z + 40, y - 22) * 30 + 0.25 * np.sqrt(x * x + y * y) + 0.9 * fine
    leaf = np.abs(np.mod(ray, np.float32(6.4)) - np.float32(3.2))
    return np.minimum(leaf + 0.45 * np.maximum(outer - 9, 0) - 0.1, outer - 0.3)


def _deep(
    one: Person,
    places: tuple[np.ndarray, ...],
    white: np.ndarray,
    csf: np.ndarray,
    slow: np.ndarray,
    fine: np.ndarray,
    width: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nuclei and ventricles put in; the choroid plexus beside."""
    x, y, z = places
    near = np.flatnonzero((np.abs(x) < 48) & (np.abs(y + 0) < 66) & (z > -48) & (z < 32))
    x, y, z = x[near], y[near], z[near]
    side, s, grain = np.abs(x), slow[near], fine[near]
    here = (side + 0.8 * s, y, z)
    w, c = white[near], csf[near]
    # inside the ring nothing is cortex: white matter between the nuclei
    core = cover(14 - np.abs(z) / 1.6 - np.maximum(side - 30, 0) - np.maximum(np.abs(y) - 40, 0), 6)
    w, c = np.maximum(w, core), c * (1 - core)
    for centre, axes, grey in _NUCLEI:
        there = cover(depth(here, centre, axes), width + 0.8)
        w = w * (1 - there) + (1 - grey) * there
        c = c * (1 - there)
    rods = [capsule(here, a, b, radii) for a, b, radii in _VENTRICLE]
    lateral = 1.6 * np.log(sum(np.exp(np.minimum(r, 12) / 1.6) for r in rods)) + 4.5 * np.float32(one.ventricle - 1)
    for centre, axes, _ in (_NUCLEI[0], _NUCLEI[3]):  # thalamus and caudate bulge into it
        lateral = np.minimum(lateral, 0.4 - depth(here, centre, axes))
    lateral = np.minimum(lateral + 0.5 * grain, side - 0.7)  # the septum
    third = np.minimum(1.1 * one.ventricle - side, depth((y, z), (8, -4), (19, 13)))
    fourth = depth((x, y, z), (0, 27, -38), (6, 4.5, 9))
    cistern = depth((x, y, z), (0, -16, -31), (13, 14, 7))
    fluid = cover(np.maximum(np.maximum(lateral, third), np.maximum(fourth, cistern)), width)
    plexus = np.zeros_like(white)
    plexus[near] = cover(depth((side, y, z), (23, 33, 6), (2.6, 6, 4)), width) * (fluid > 0.5)
    white, csf = white.copy(), csf.copy()
    white[near], csf[near] = w * (1 - fluid), c * (1 - fluid) + fluid
    return white, csf, plexus


def _vessels(
    one: Person,
    places: tuple[np.ndarray, ...],
    outer: np.ndarray,
    csf: np.ndarray,
    fold: np.ndarray,
    middle: np.ndarray,
    fine: np.ndarray,
) -> np.ndarray:
    x, y, z = places
    other = looked_up(one.vessels, (x, y, z), _LATTICE)
    thin = cover(0.10 - np.abs(other), 0.12) * np.clip(1.6 * csf, 0, 1) * (np.abs(fold) < 1.5) * (outer < 24)
    edge = (z > 8) | (y > 50)
    sinus = cover(2.3 - middle, 2.0) * cover(5.0 - outer, 3.0) * edge
    falx = cover(0.7 - middle, 1.0) * (csf > 0.3) * 0.35
    arteries = cover(1.5 - np.hypot(middle - 5, z + 31), 1.5) + cover(1.6 - np.hypot(y + 18, z + 30), 1.5)
    arteries = arteries * (np.abs(x) < 28) * (csf > 0.2)
    dura = 0.5 * cover(0.9 - outer, 1.0) * cover(fine - 0.6, 0.6)
    return 0.75 * thin + sinus + falx + arteries + dura
