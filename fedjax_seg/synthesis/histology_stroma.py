"""What all tissues under the microscope share: the slide, collagen, blood, lymphocytes, clefts."""

from typing import NamedTuple

import numpy as np

from fedjax_seg.synthesis import histology_fields as fields
from fedjax_seg.synthesis.histology_fields import Grid
from fedjax_seg.synthesis.histology_nuclei import Nuclei, nuclei


class Slide(NamedTuple):
    """What the tiles of a slide share.

    Attributes:
      lattice: smooth noise (histology_fields.lattice).
      nuclear: factor of the size of tumour nuclei.
      haematoxylin, eosin: factors of the stains.
      fibres: strength of collagen.
      open: the share of open chromatin of tumour nuclei.
      inflamed: 0 to 1, how many lymphocytes.
    """

    lattice: np.ndarray
    nuclear: float
    haematoxylin: float
    eosin: float
    fibres: float
    open: float
    inflamed: float


class View(NamedTuple):
    """A tile to be drawn.

    Attributes:
      random: of this tile.
      where: its pixels.
      slide: what it shares with others.
      x, y: [S, S], coordinates pushed around by some micrometres: nothing in tissue is straight.
      slow: noise [6, S, S] with long waves: flow of cells, lymphocytes, blood, blood in walls, clefts, clefts.
    """

    random: np.random.Generator
    where: Grid
    slide: Slide
    x: np.ndarray
    y: np.ndarray
    slow: np.ndarray


FLOW, LYMPHOCYTES, BLOOD, HELD, CLEFTS, MORE_CLEFTS = range(6)


def slide(random: np.random.Generator) -> Slide:
    """A slide of any class."""
    normal = random.normal(0, 1, 4).clip(-2, 2)
    return Slide(
        lattice=fields.lattice(random),
        nuclear=float(np.exp(0.10 * normal[0])),
        haematoxylin=float(np.exp(0.20 * normal[1])),
        eosin=float(np.exp(0.24 * normal[2])),
        fibres=float(np.exp(0.30 * normal[3])),
        open=float(random.uniform(0.15, 0.8)),
        inflamed=float(random.beta(0.7, 2.0)),
    )


def view(random: np.random.Generator, where: Grid, own: Slide) -> View:
    pushed = np.float32(3.0) * fields.smooth(random, where, 32, 2)
    return View(random, where, own, where.x + pushed[0], where.y + pushed[1], fields.smooth(random, where, 60, 6))


def collagen(at: View) -> np.ndarray:
    """Eosin [S, S] of fibrous stroma: wavy bundles."""
    random, lattice, x, y = at.random, at.slide.lattice, at.x, at.y
    turn = random.uniform(0, np.pi)
    broad = fields.noise(lattice, random, x, y, 8, stretch=7, turn=turn)
    thin = fields.noise(lattice, random, x, y, max(4.0, 2 * at.where.pixel), stretch=8, turn=turn)
    level = random.uniform(0.25, 0.62)
    return np.maximum(level * (1 + at.slide.fibres * (0.16 * broad - 0.2 * np.abs(thin) + 0.12)), 0.06)


def cells_of_stroma(at: View, stroma: np.ndarray, taken: np.ndarray) -> list[Nuclei]:
    """Spindle cells and lymphocytes where `stroma` [S, S] is above 0, clear of the points taken [n, 2]."""
    points = fields.spread(at.random, at.where, at.random.uniform(9, 17), jitter=0.8)
    points = points[stroma[fields.place(points, at.where)] > 1]
    points = points[fields.apart(points, 4.5, taken)]
    turn = at.random.uniform(0, np.pi) + 0.6 * at.slow[FLOW][fields.place(points, at.where)]
    spindle = nuclei(at.random, points, radius=2.5, spread=0.2, shape=(1.8, 4.0), turn=turn, dark=(0.95, 0.15))
    return [spindle, lymphocytes(at, stroma - 1)]


def lymphocytes(at: View, room: np.ndarray) -> Nuclei:
    """Small round dark nuclei in clusters, where `room` [S, S] is above 1."""
    points = _clustered(at, 6.2, at.slow[LYMPHOCYTES], 1.4 - 2.2 * at.slide.inflamed, 2.0, room)
    return nuclei(at.random, points, radius=2.4, spread=0.08, shape=(1.0, 1.25), dark=(1.2, 0.1))


def blood(at: View, room: np.ndarray, density: float, drift: int = BLOOD) -> Nuclei:
    """Red blood cells in drifts, where `room` [S, S] is above 1; `dark` is their eosin."""
    points = _clustered(at, 6.0, at.slow[drift], 1.6 - 2.2 * density, 2.2, room)
    return nuclei(at.random, points, radius=2.7, spread=0.08, shape=(1.0, 1.7), dark=(1.25, 0.1))


def _clustered(at: View, spacing: float, dense: np.ndarray, low: float, high: float, room: np.ndarray) -> np.ndarray:
    points = fields.spread(at.random, at.where, spacing, jitter=0.7)
    place = fields.place(points, at.where)
    chance = fields.ramp(dense[place], low, high)
    return points[(at.random.random(len(points)) < chance) & (room[place] > 1)]


def clefts(at: View, room: np.ndarray, noise: int = CLEFTS) -> np.ndarray:
    """Where there is no tissue [S, S] in [0, 1], at most where `room` is above 0: retraction and torn sections."""
    edge = 2.2 - 2.2 * at.random.beta(0.6, 1.3)
    return fields.ramp(at.slow[noise], edge, edge + 0.4) * fields.ramp(room, 0, 3)


def held(at: View, table: Nuclei, torn: np.ndarray) -> Nuclei:
    """The nuclei but for those that lie in clefts [S, S]."""
    keep = torn[fields.place(np.stack([table.x, table.y], 1), at.where)] < 0.5
    return Nuclei(*(column[keep] for column in table))
