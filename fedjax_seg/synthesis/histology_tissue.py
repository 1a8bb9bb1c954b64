"""Three tissues of the lung under the microscope: amounts of stain on a tile, class by class.

What tells the classes apart is architecture (walls around air; rings of cells around lumina; sheets of polygonal cells
with whorls of keratin) and nuclei. How much glass, collagen, blood and inflammation a tile shows varies more within a
class than between classes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy import ndimage, spatial

from fedjax_seg.synthesis import histology_fields as fields
from fedjax_seg.synthesis import histology_stroma as stroma
from fedjax_seg.synthesis.histology_fields import Grid
from fedjax_seg.synthesis.histology_nuclei import Nuclei, joined, nuclei, paint
from fedjax_seg.synthesis.histology_stroma import Slide, View


class Tissue(NamedTuple):
    """Stains [S, S] of all that is no nucleus; nuclei; red blood cells."""

    haematoxylin: np.ndarray
    eosin: np.ndarray
    nuclei: Nuclei
    red: Nuclei


def amounts(random: np.random.Generator, where: Grid, slide: Slide, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Haematoxylin and eosin [S, S] of a tile of a class of TISSUES; 1 = a usual nucleus."""
    tissue = TISSUES[label](stroma.view(random, where, slide))
    grain = fields.noise(slide.lattice, random, where.x, where.y, max(2.2, 2 * where.pixel))
    (blue, covered), (red, blood) = paint(where, (tissue.nuclei, tissue.red), grain)
    eosin = tissue.eosin * (1 - 0.5 * covered) * (1 - blood) + red * (1 - 0.7 * covered)
    return slide.haematoxylin * (blue + tissue.haematoxylin * (1 - covered)), slide.eosin * eosin


def benign(at: View) -> Tissue:
    """Alveoli: thin walls with capillaries and small even nuclei around air; at times thickened, or full of fluid."""
    random, where = at.random, at.where
    wall = _alveoli(at)
    place_of = lambda points: fields.place(points, where)
    points = fields.spread(random, where, random.uniform(5.0, 7.5), jitter=0.6)
    depth = wall[place_of(points)]
    dense = np.where(depth < 4, random.uniform(0.45, 0.95), random.uniform(0.2, 0.7))
    points = points[(depth > 0.3) & (random.random(len(points)) < dense)]
    right, down = fields.slopes(wall, where.pixel)
    along = np.arctan2(down, right)[place_of(points)] + np.pi / 2
    free = fields.spread(random, where, 15, jitter=1.0)
    free = free[(wall[place_of(free)] < -6) & (random.random(len(free)) < random.beta(0.5, 2.5))]
    small = functools.partial(nuclei, random, radius=2.35, spread=0.15, shape=(1.1, 2.4))
    cells = [small(points, turn=along), small(free)]
    foam = _bodies(at, free, 5.6)  # macrophages in the air
    fluid = max(0.0, random.normal(0.0, 0.16)) * (1 + 0.15 * at.slow[stroma.CLEFTS])
    air = fields.ramp(wall, 0.5, -0.5 - where.pixel / 2) * (1 - 0.85 * foam)
    eosin = (stroma.collagen(at) * (1 - foam) + 0.38 * foam) * (1 - air) + fluid * air
    blood = stroma.blood(at, -wall, random.beta(0.5, 1.2))
    held = stroma.blood(at, wall - 0.5, random.beta(0.7, 1.5), stroma.HELD)  # in capillaries
    cells.append(stroma.lymphocytes(at, wall - 0.5))
    return Tissue((0.05 + 0.07 * foam) * (1 - air), eosin, joined(cells), joined([blood, held]))


def adenocarcinoma(at: View) -> Tissue:
    """Glands: lumina of many sizes, each lined by one or two rows of enlarged nuclei, in collagen."""
    random, where, own = at.random, at.where, at.slide
    height = random.uniform(9, 15) * own.nuclear  # of the lining cells
    lumen = _lumina(at, height)
    radius = 3.6 * own.nuclear
    points, out = _lining(at, lumen, height, radius)
    tumour = functools.partial(nuclei, radius=radius, spread=0.16, shape=(1.15, 1.9), dark=(1.0, 0.14), open=own.open)
    cells = joined([tumour(random, points, turn=out), *stroma.cells_of_stroma(at, lumen - height, points)])
    torn = stroma.clefts(at, lumen - height)
    lining = fields.ramp(lumen, height + 1, height - 1)
    tissue = fields.ramp(lumen, -0.5 - where.pixel / 2, where.pixel / 2 + 0.5)
    plasma = random.uniform(0.15, 0.5) - 0.1 * fields.ramp(lumen, 0.5 * height, 0)
    mucin = max(0.0, random.normal(-0.03, 0.10)) * (1 - tissue)
    mucin = np.maximum(mucin * (1 + 0.25 * at.slow[stroma.HELD]), 0)
    solid = tissue * (1 - torn)
    eosin = (plasma * lining + stroma.collagen(at) * (1 - lining)) * solid + mucin
    blue = (random.uniform(0.04, 0.22) * lining + 0.05 * (1 - lining)) * solid + mucin
    blood = stroma.blood(at, lumen - height - 3, random.beta(0.5, 2.5))
    return Tissue(blue, eosin, stroma.held(at, cells, torn), blood)


def squamous(at: View) -> Tissue:
    """Solid sheets of polygonal cells of very uneven nuclei, at times a whorl of keratin, bands of collagen between."""
    random, where, own = at.random, at.where, at.slide
    island = fields.smooth(random, where, random.uniform(90, 160))[0] + np.float32(random.uniform(0.1, 2.4))
    sheet = np.clip(fields.zero_distance(island, where.pixel), -60, 60)
    pearl, around, ring = _pearls(at)
    spacing = random.uniform(8.5, 15.5) * own.nuclear
    points = fields.spread(random, where, spacing, jitter=0.42)
    place = fields.place(points, where)
    points = points[(sheet[place] > -1) & ((pearl[place] < 0.5) | (random.random(len(points)) < 0.12))]
    place = fields.place(points, where)
    flow = random.uniform(0, np.pi) + 0.5 * at.slow[stroma.FLOW][place]
    stream = random.uniform(1.2, 2.1)
    tumour = functools.partial(nuclei, radius=min(3.7 * own.nuclear, 0.36 * spacing), spread=0.27, open=own.open)
    turn = np.where(around[place], ring[place], flow)
    cells = tumour(random, points, shape=(1 + 0.3 * (stream - 1), stream), turn=turn, dark=(1.0, 0.2))
    flat = 1 + 0.5 * around[place]
    cells = cells._replace(long=cells.long * flat, short=cells.short / flat)
    cells = joined([cells, *stroma.cells_of_stroma(at, -sheet - 2, points)])
    body, border = _polygons(at, points)
    inside = fields.ramp(sheet, -1.5, 1.5)
    plasma = random.uniform(0.14, 0.68) * body * (1 - random.uniform(0.1, 0.45) * border)
    keratin = random.uniform(0.7, 1.15) * (1 + 0.16 * _lamellae(at, pearl))
    torn = np.maximum(stroma.clefts(at, -sheet), stroma.clefts(at, 0.8 * sheet - 4, stroma.MORE_CLEFTS))
    eosin = plasma * inside + stroma.collagen(at) * (1 - inside)
    eosin = (eosin * (1 - pearl) + keratin * pearl) * (1 - torn)
    blue = (random.uniform(0.03, 0.18) * (1 - 0.5 * border) * inside + 0.05 * (1 - inside)) * (1 - pearl) * (1 - torn)
    blood = stroma.blood(at, -sheet - 3, random.beta(0.5, 2.5))
    return Tissue(blue, eosin, stroma.held(at, cells, torn), blood)


TISSUES: Mapping[str, Callable[[View], Tissue]] = {
    "benign": benign,
    "adenocarcinoma": adenocarcinoma,
    "squamous": squamous,
}


def _alveoli(at: View) -> np.ndarray:
    """[S, S]; depth in the walls between alveoli, below 0 in air."""
    random, where = at.random, at.where
    wave = random.uniform(34, 85)
    fine = 0.16 * fields.smooth(random, where, wave / 3.5, 2)
    levels = [fields.smooth(random, where, w)[0] + f for w, f in zip((wave, 1.3 * wave), fine)]
    levels = [level + np.float32(random.normal(0, 0.3)) for level in levels]
    first, second = (np.abs(fields.zero_distance(level, where.pixel)) for level in levels)
    thick = np.exp(random.uniform(np.log(2.2), np.log(8.0)) + 0.25 * fields.smooth(random, where, 25)[0])
    if random.random() < 0.6:  # a septum of collagen, or the wall of a vessel
        rise = fields.ramp(fields.smooth(random, where, 110)[0], random.uniform(-1.4, 0.5), 1.5)
        thick = thick + random.uniform(8, 30) * rise
    return np.maximum(np.maximum(thick, 1.5) - first, np.maximum(0.8 * thick, 1.5) - second)


def _bodies(at: View, points: np.ndarray, radius: float) -> np.ndarray:
    """Round cells [S, S] in [0, 1]."""
    nearest = np.full_like(at.x, 1e3)
    factors = at.random.uniform(0.8, 1.25, len(points)).astype(np.float32)
    for (px, py), factor in zip(points.astype(np.float32), factors):
        np.minimum(nearest, np.hypot(at.where.x - px, at.where.y - py) / factor, out=nearest)
    return fields.ramp(nearest, radius + 0.7, radius - 0.7)


def _lumina(at: View, height: float) -> np.ndarray:
    """[S, S]; distance from the nearest lumen, below 0 inside. Glands with lining cells of that height do not touch."""
    random, side, tries = at.random, at.where.side, 60
    largest = np.exp(random.uniform(np.log(6), np.log(48)))
    radii = np.sort(largest * random.uniform(0.2, 1.0, tries))[::-1]
    centres = random.uniform(-0.25 * side, 1.25 * side, (tries, 2))
    gap = random.uniform(0, 1) ** 2 * 12
    square = ((centres[:, None] - centres) ** 2).sum(-1)
    clear = square >= (radii[:, None] + radii + 2 * height + gap) ** 2
    free = np.ones(tries, bool)
    for n in range(tries):
        if free[n]:
            free[n + 1 :] &= clear[n, n + 1 :]
    beyond = np.abs(centres - side / 2).max(1) - side / 2
    nearest = np.full_like(at.x, 1e3)
    for n in np.flatnonzero(free & (beyond < radii + height + 8)).tolist():
        squash, turn = np.sqrt(random.uniform(1.0, 1.5)), random.uniform(0, np.pi)
        dx, dy = at.x - np.float32(centres[n, 0]), at.y - np.float32(centres[n, 1])
        c, s = np.cos(turn), np.sin(turn)
        u = dx * np.float32(c / squash) + dy * np.float32(s / squash)
        v = dy * np.float32(c * squash) - dx * np.float32(s * squash)
        np.minimum(nearest, np.sqrt(u * u + v * v) - np.float32(radii[n]), out=nearest)
    return nearest


def _lining(at: View, lumen: np.ndarray, height: float, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, 2] in one row around each lumen, at times two, and the direction [n] out of it, radians."""
    random, where = at.random, at.where
    points = fields.spread(random, where, 1.75 * radius)
    depth = lumen[fields.place(points, where)]
    lining = (depth > 0) & (depth < height)
    points, depth = points[lining], depth[lining]
    right, down = (slope[fields.place(points, where)] for slope in fields.slopes(lumen, where.pixel))
    steep = np.maximum(np.hypot(right, down), 1e-3)
    row = np.where(random.random(len(points)) < random.uniform(0, 0.5), 0.78, 0.46)
    shift = height * (row + random.normal(0, 0.06, len(points))) - depth
    points = points + np.stack([right, down], 1) * (shift / steep)[:, None]
    keep = fields.apart(points, 1.35 * radius)
    return points[keep], np.arctan2(down, right)[keep]


def _pearls(at: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keratin pearls, [S, S] each: how much is keratin, whether cells wind around it, in which direction (radians)."""
    keratin, around, turned = np.zeros_like(at.x), np.zeros(at.x.shape, bool), np.zeros_like(at.x)
    for _ in range(int(at.random.choice(3, p=(0.5, 0.35, 0.15)))):
        radius = np.exp(at.random.uniform(np.log(7), np.log(24)))
        cx, cy = at.random.uniform(0, at.where.side, 2).astype(np.float32)
        dx, dy = at.x - cx, at.y - cy
        away = np.hypot(dx, dy)
        keratin = np.maximum(keratin, fields.ramp(away, radius + 1.5, radius - 1.5))
        near = away < 1.8 * radius + 6
        around, turned = around | near, np.where(near, np.arctan2(dy, dx) + np.float32(np.pi / 2), turned)
    return keratin, around, turned


def _lamellae(at: View, pearl: np.ndarray) -> np.ndarray:
    """Layers of keratin [S, S], in [-1, 1]: they follow the outline of the pearls."""
    if not pearl.any():
        return pearl
    pixel = at.where.pixel
    depth = ndimage.distance_transform_edt(pearl > 0.5).astype(np.float32) * np.float32(pixel)
    return np.sin(depth * np.float32(2 * np.pi / max(4.2, 2.5 * pixel)) + fields.smooth(at.random, at.where, 14)[0])


def _polygons(at: View, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells around points, [S, S] each: an eosin factor of the cell, and 1 along borders between cells."""
    if len(points) < 2:
        return np.ones_like(at.x), np.zeros_like(at.x)
    away, which = spatial.cKDTree(points).query(np.stack([at.x.ravel(), at.y.ravel()], 1), k=2)
    factor = at.random.normal(1, 0.16, len(points)).clip(0.5, 1.6).astype(np.float32)
    border = np.exp(-np.square((away[:, 1] - away[:, 0]).astype(np.float32) / np.float32(max(1.3, at.where.pixel))))
    return factor[which[:, 0]].reshape(at.x.shape), border.reshape(at.x.shape)
