"""A body in axial slices: one smooth family from the upper chest (level 0) over heart and liver to the kidneys (1).

Everything is drawn for a standard body, half axes 0.78 and 0.53 half fields of view without the fat under the skin, in
coordinates that are stretched to the patient and bent by smooth noise. Nothing is fitted to real patients; the HU are
textbook values: air -1000, lung -860, fat -105, water 0, muscle 55, liver 60 without contrast agent, blood 45, spongy
bone 200, compact bone 500 and more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array
from fedjax_seg.synthesis import ct_organs
from fedjax_seg.synthesis.ct_shapes import Grid, coverage, ellipse, grid, paint, ramp, smooth, spots, union

AIR, LUNG, FAT, MUSCLE, LIVER, BONE = range(6)  # codes of `Slice.tissue`; -1 = another tissue or an edge
_HALF_WIDTH, _HALF_HEIGHT = 0.78, 0.53
_BEND = 7
_BRANCHES, _POINTS = 40, 9  # vessels of a lung or of half the liver, and the spots of each
# The random numbers of a patient: uniform and normal ones.
UNIFORM = {
    "patient": (6,),
    "organs": (len(ct_organs.ORGANS), ct_organs.RANDOM),
    "skeleton": (len(ct_organs.SKELETON), ct_organs.RANDOM),
    "ribs": (ct_organs.RIBS, 3),
    "vessels": (2, 5, _BRANCHES),
}
NORMAL = {"bend": (2, _BEND, _BEND), "coarse": (14, 14), "middle": (36, 36), "fine": (96, 96)}


class Patient(NamedTuple):
    """What all slices of a patient share."""

    stretch: Array  # [2], along x and y
    fat: Array  # thickness under the skin, half fields of view
    agent: Array  # contrast agent in the blood, 0 = none, 1 = much
    uniform: dict[str, Array]  # as UNIFORM
    normal: dict[str, Array]  # as NORMAL


class Fields(NamedTuple):
    """Distances at given places, negative inside; half fields of view."""

    body: Array
    muscle: Array
    cavity: Array
    lung: Array
    abdomen: Array
    liver: Array


class Slice(NamedTuple):
    """A slice before the scanner. float32 [H, W] but for `tissue`, int8 [H, W]."""

    hu: Array
    body: Array  # coverage
    lung: Array  # coverage
    liver: Array  # coverage
    tissue: Array


def patient(uniform: dict[str, Array], normal: dict[str, Array], enhanced: Array) -> Patient:
    """A patient from the random numbers UNIFORM and NORMAL; `enhanced` is the chance of contrast agent."""
    u = uniform["patient"]
    return Patient(
        stretch=jnp.stack([0.92 + 0.13 * u[0], 0.98 + 0.17 * u[1]]),
        fat=0.02 + 0.09 * u[2] ** 1.5,
        agent=jnp.where(u[3] < enhanced, 0.6 + 0.4 * u[4], 0.0),
        uniform=uniform,
        normal=normal,
    )


def places(person: Patient, size: int) -> tuple[Grid, Grid]:
    """The pixel centres in the coordinates of the standard body: stretched only, and stretched and bent."""
    plain = grid(size)
    straight = Grid(plain.x / person.stretch[0], plain.y / person.stretch[1], plain.pixel)
    bend = [smooth(values, size) for values in person.normal["bend"]]
    return straight, Grid(straight.x + 0.016 * bend[0], straight.y + 0.013 * bend[1], plain.pixel)


def fields(at: Grid, level: Array, person: Patient) -> Fields:
    """Outlines of the body, its wall and the organs that tumours grow in, at any places."""
    x, y = at.x, at.y
    beside, behind, belly = ramp(jnp.abs(x), 0.2, 0.8), ramp(y, -0.2, 0.5), ramp(level, 0.6, 0.95)
    p, q = x / _HALF_WIDTH, y / _HALF_HEIGHT
    p, q = p * p, q * q
    boxy = 0.30 + 0.15 * ramp(y, 0.0, 0.4)  # flat where the patient lies
    norm = (1 - boxy) * jnp.sqrt(p + q) + boxy * jnp.sqrt(jnp.sqrt(p * p + q * q))
    away = jnp.sqrt(x * x + y * y)
    muscle = away - away / jnp.maximum(norm, 1e-3)
    muscle = muscle + 0.03 * ramp(y, 0.2, 0.5) / (1 + (x / 0.1) ** 2)  # the groove along the spine
    body = muscle - person.fat * (0.55 + 0.5 * beside + 0.35 * behind + 0.5 * belly * ramp(y, 0.0, -0.5))
    shoulders = ramp(level, 0.35, 0.05)
    wall = 0.055 + 0.045 * behind + 0.05 * shoulders * (beside + 0.4) + 0.02 * belly * beside
    cavity = muscle + wall
    right, left = ramp(level, 0.48, 0.75), ramp(level, 0.56, 0.81)
    dome = union(
        ellipse(x, y, -0.38, -0.04, 0.64 * right, 0.60 * right),
        ellipse(x, y, 0.40, -0.06, 0.62 * left, 0.60 * left),
        0.12,
    )
    middle = union(
        ellipse(x, y, 0.0, 0.27, 0.15, 0.19), ellipse(x, y, 0.0, -0.06, 0.13 + 0.05 * ramp(level, 0.1, 0.3), 0.42), 0.10
    )
    heart = ramp(level, 0.26, 0.40)
    middle = union(middle, ellipse(x, y, 0.13, -0.14, 0.33 * heart, 0.25 * heart, -0.42), 0.06)
    lung = jnp.maximum(jnp.maximum(cavity + 0.012, -middle), -dome)
    abdomen = jnp.maximum(cavity + 0.008, dome)
    grown = ramp(level, 0.50, 0.70) * (1 - 0.22 * ramp(level, 0.86, 1.05))
    liver = union(
        ellipse(x, y, -0.37, -0.01, 0.37 * grown, 0.43 * grown, 0.15),
        ellipse(x, y, -0.04, -0.24, 0.36 * grown, 0.15 * grown, 0.12),
        0.12,
    )
    hollow = union(ellipse(x, y, 0.0, 0.20, 0.19, 0.23), ellipse(x, y, -0.1, 0.02, 0.10, 0.12), 0.1)
    liver = jnp.maximum(jnp.maximum(liver, abdomen + 0.014), -hollow)
    return Fields(body, muscle, cavity, lung, abdomen, liver)


def blocked(at: Grid, level: Array, person: Patient) -> Array:
    """Distance to the nearest organ that is painted over the liver, at any places."""
    table = ct_organs.rows(ct_organs.ORGANS, level, person.agent, person.uniform["organs"])
    cx, cy, a, b, turn = (table[:, i, None, None] for i in range(5))
    return jnp.where(a > 1e-3, ellipse(at.x, at.y, cx, cy, a, b, turn), 1.0).min(0)


def _vessels(straight: Grid, level: Array, random: Array) -> Array:
    """[H, W] in [0, 1]: short vessels of both lungs or of the liver, thicker and longer near their roots."""
    chest = level < 0.6
    root = jnp.where(chest, jnp.array([[-0.20, 0.03], [0.20, 0.03]]), jnp.array([[-0.28, -0.03], [-0.34, 0.05]]))
    reach = jnp.where(chest, jnp.array([0.50, 0.42]), jnp.array([0.42, 0.36]))
    u = jnp.moveaxis(random, 1, 0)  # [5, 2, branches]
    far, turn = jnp.sqrt(0.005 + 0.995 * u[0]), 2 * jnp.pi * u[1]
    course = turn + 1.4 * (u[2] + u[4] - 1.0)
    length = (1.1 - far) * (0.06 + 0.42 * u[3]) * reach[0]
    along = jnp.linspace(0.0, 1.0, _POINTS)[:, None, None]
    radius = (0.0135 * (1.12 - far) ** 1.4 + 0.003) * (1 - 0.5 * along)
    bow = jnp.sin(3 * along + turn) * 0.1
    x = root[:, :1] + far * jnp.cos(turn) * reach[0] + length * (along * jnp.cos(course) + bow * jnp.sin(course))
    y = root[:, 1:] + far * jnp.sin(turn) * reach[1] + length * (along * jnp.sin(course) - bow * jnp.cos(course))
    total = spots(straight, x.ravel(), y.ravel(), radius.ravel())
    return jnp.clip(1.2 * total - 0.12, 0.0, 1.0)


def draw(person: Patient, level: Array, size: int) -> Slice:
    """A slice of the patient without tumour, noise and scanner.

    Args:
      level: scalar in [0, 1], from the upper chest to the kidneys.
      size: pixels per side.
    """
    straight, bent = places(person, size)
    # Each is computed once: XLA would else copy the formulas into every place that reads them.
    bent, f = jax.lax.optimization_barrier((bent, fields(bent, level, person)))
    soft = straight.pixel * 1.2
    body, muscle, cavity, lung, abdomen, liver = (coverage(d, soft) for d in f)
    coarse, middle, fine = (smooth(person.normal[k], size) for k in ("coarse", "middle", "fine"))
    vessels = _vessels(straight, level, person.uniform["vessels"])
    coarse, middle, fine, vessels = jax.lax.optimization_barrier((coarse, middle, fine, vessels))
    agent = person.agent

    hu = _couch(person, size)
    hu = hu + body * (20.0 - hu)  # skin
    fat = -105.0 + 6 * middle + 18 * jnp.clip(jnp.abs(coarse) - 1.2, 0, 1)
    hu = hu + coverage(f.body + 0.011, soft) * (fat - hu)
    fibres = jnp.clip(jnp.abs(middle + 0.6 * coarse) - 1.4, 0.0, 0.8) * 90  # fat between the bundles of muscle
    hu = hu + muscle * (55.0 + 6 * agent + 4 * fine - fibres - hu)
    hu = hu + cavity * (-85.0 + 55 * jnp.clip(0.4 * middle + 0.5 * fine - 0.5, 0.0, 1.0) - hu)
    hu = hu + lung * (-862.0 + 45 * straight.y + 14 * coarse + 16 * fine + vessels * (880.0 + 60 * agent) - hu)
    hu = hu + abdomen * (fat - hu)
    rim = coverage(jnp.abs(f.abdomen) - 0.007, soft) * cavity * ramp(level, 0.48, 0.52)
    hu = hu + rim * (45.0 - hu)  # diaphragm and peritoneum
    parenchyma = 60.0 + 48 * agent + 3 * middle + 2 * coarse
    hu = hu + liver * (parenchyma + vessels * jnp.where(agent > 0, 40 * agent, -12.0) - hu)
    organs = ct_organs.rows(ct_organs.ORGANS, level, agent, person.uniform["organs"])
    hu, free = paint(hu, bent, organs, person.stretch, 0.5, cavity * (1 - lung * 0.97))
    bones, left = _bones(person, level, bent)
    hu = hu + (1 - left) * body * (bones * (1 + 0.10 * fine + 0.05 * middle) - hu)
    return Slice(hu, body, lung, liver * free, _tissue(f, hu, bones, left, vessels))


def _bones(person: Patient, level: Array, bent: Grid) -> tuple[Array, Array]:
    """HU of the bones, and how much of a pixel is no bone."""
    shape = jnp.broadcast_shapes(bent.x.shape, bent.y.shape)
    skeleton = ct_organs.rows(ct_organs.SKELETON, level, jnp.float32(0), person.uniform["skeleton"])
    ribs = ct_organs.ribs(*_along_the_wall(person, level), person.uniform["ribs"])
    return paint(jnp.full(shape, 300.0), bent, jnp.concatenate([ribs, skeleton]), person.stretch, 0.25)


def _along_the_wall(person: Patient, level: Array) -> tuple[Array, Array, Array]:
    """Where ribs sit: x, y and the direction of the wall, 8 on either side from the back to the front."""
    u = person.uniform["ribs"]
    half = ct_organs.RIBS // 2
    shift = 0.1 * jnp.sin(37.0 * level + 50 * person.stretch[0])
    turns = jnp.pi * (0.29 + 1.03 * jnp.arange(half) / (half - 1)) + shift
    angle = jnp.concatenate([turns, jnp.pi - turns - 0.1]) + 0.12 * (u[:, 2] - u[:, 1])
    angle = jnp.stack([angle, angle + 0.03])
    c, s = jnp.cos(angle), jnp.sin(angle)

    def nearer(_: int, radius: Array) -> Array:
        return radius - (fields(Grid(c * radius, s * radius, 0.01), level, person).cavity - 0.022)

    # The distance is radial: one step lands on the outline, the second corrects for the wall.
    radius = jax.lax.fori_loop(0, 2, nearer, jnp.full_like(angle, 0.4))
    x, y = c * radius, s * radius
    return x[0], y[0], jnp.arctan2(y[1] - y[0], x[1] - x[0])


def _couch(person: Patient, size: int) -> Array:
    """Air, and the couch under the patient's back."""
    at = grid(size)
    depth = at.y - (_HALF_HEIGHT + 0.9 * person.fat) * person.stretch[1] - 0.03 + 0.14 * at.x**2
    shell = coverage(jnp.minimum(jnp.abs(depth), jnp.abs(depth - 0.10)) - 0.007, at.pixel * 1.2)
    foam = coverage(jnp.maximum(-depth, depth - 0.10), at.pixel)
    return -1000.0 + (jnp.abs(at.x) < 0.66) * (60 * foam + 560 * shell)


def _tissue(f: Fields, hu: Array, bones: Array, left: Array, vessels: Array) -> Array:
    """Codes where a pixel is clear of every edge, for tests and pictures."""
    code = jnp.full(hu.shape, -1, jnp.int8)
    for mark, where in (
        (AIR, f.body > 0.25),
        (LUNG, (f.lung < -0.02) & (vessels < 0.02)),
        (FAT, (f.body < -0.025) & (f.muscle > 0.02)),
        (MUSCLE, (f.muscle < -0.02) & (f.cavity > 0.02)),
        (LIVER, (f.liver < -0.02) & (hu > 20)),
    ):
        code = jnp.where(where & (left > 0.99), jnp.int8(mark), code)
    return jnp.where((bones > 395) & (left < 0.01), jnp.int8(BONE), code)
