"""Gliomas for the synthetic brain: how large, where, and which voxels are core, enhancing rim and oedema.

Labels are those of BraTS 2021 and FeTS: 1 necrotic or non-enhancing core (NCR), 2 oedema (ED), 4 enhancing rim (ET).
The constants below are fitted to the volumes and places of 368 BraTS 2020 label maps (128 x 128 x 128 voxels over the
whole field of view, 4.258 mm^3 each); no map, nor any part of one, is used.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from fedjax_seg.synthesis import mri_anatomy, mri_fields
from fedjax_seg.synthesis.mri_anatomy import Head, Push
from fedjax_seg.synthesis.mri_fields import Grid, smooth

NCR, ED, ET = 1, 2, 4

# Weibull law of the whole tumour in ml; its shares are linked to it by a Gaussian copula.
WHOLE_SHAPE, WHOLE_SCALE = 1.73, 110.8
WHOLE_LEAST, WHOLE_MOST = 7.0, 300.0
CORE_SHARE = (1.761, 2.606)  # Beta law of (NCR + ET) / whole
NO_ET = 0.073  # share of tumours without an enhancing rim
# ET / (NCR + ET) where there is one: a mixture of two Beta laws.
RIM_WEAK, RIM_WEAK_LAW, RIM_LAW = 0.299, (0.458, 0.564), (5.265, 2.552)
COPULA = ((1.0, 0.155, -0.241), (0.155, 1.0, -0.397), (-0.241, -0.397, 1.0))  # whole, core share, rim share
SECOND = 0.08  # share of tumours with a second core
# Centre of the core in the field of view: distance from the middle, from front to back, height; mean and sd
# in mm of the law before it meets the brain: what lies in white matter and deep enough is taken.
PLACE = ((36.0, 14.0), (132.0, 36.0), (78.0, 25.0))
ALONG = (0.88, 1.16, 0.98)  # tumours are longer from front to back; product 1


class Volumes(NamedTuple):
    """Of one tumour, in ml."""

    core: float
    oedema: float
    rim: float

    @property
    def whole(self) -> float:
        return self.core + self.oedema + self.rim


class Plan(NamedTuple):
    """A tumour before it is drawn; nothing here depends on the number of voxels.

    Attributes:
      volumes: in ml.
      centres: [1 or 2, 3] of the cores, mm from the anatomy's ORIGIN.
      sizes: [1 or 2] radii of the cores, relative to the first.
      forms: [1 or 2, 3, 3]; stretches and turns each core.
      lean: [3], where the oedema leans to, mm per mm.
      coarse, middle, fine: nodes of noise at 20, 9 and 4 mm for the outlines.
      cystic: in [0, 1]; how much of the core is fluid.
    """

    volumes: Volumes
    centres: np.ndarray
    sizes: np.ndarray
    forms: np.ndarray
    lean: np.ndarray
    coarse: np.ndarray
    middle: np.ndarray
    fine: np.ndarray
    cystic: float

    @property
    def radius(self) -> float:
        """mm; of a ball as large as core and rim."""
        return _radius(self.volumes.core + self.volumes.rim)

    @property
    def push(self) -> Push:
        """How the tumour displaces the brain."""
        return Push(self.centres[0], max(self.radius, 8.0), min(0.30, 0.010 * self.radius))


class Lesion(NamedTuple):
    """A drawn tumour on the n voxels of a head.

    Attributes:
      label: uint8 [n]; 0, 1, 2, 4.
      core, rim, oedema: float32 [n]; shares of the voxel, with soft edges.
    """

    label: np.ndarray
    core: np.ndarray
    rim: np.ndarray
    oedema: np.ndarray


def volumes(random: np.random.Generator, shift: float = 0.0) -> Volumes:
    """Draws the three volumes of a tumour; `shift` is added to the logarithm of the whole."""
    normal = np.linalg.cholesky(np.asarray(COPULA)) @ random.standard_normal(3)
    whole, core, rim = special.ndtr(normal)
    ml = WHOLE_SCALE * (-np.log1p(-whole)) ** (1 / WHOLE_SHAPE) * np.exp(shift)
    ml = float(np.clip(ml, WHOLE_LEAST, WHOLE_MOST))
    middle = max(float(special.betaincinv(*CORE_SHARE, core)), 0.03) * ml
    share = rim_share(rim) if random.uniform() >= NO_ET else 0.0
    return Volumes(core=middle * (1 - share), oedema=ml - middle, rim=middle * share)


def rim_share(quantile: float) -> float:
    """Inverse of the mixture's distribution function."""
    at = np.linspace(0, 1, 1001)
    law = RIM_WEAK * special.betainc(*RIM_WEAK_LAW, at) + (1 - RIM_WEAK) * special.betainc(*RIM_LAW, at)
    return float(np.interp(quantile, law, at))


def plan(random: np.random.Generator, rough: Head, shift: float = 0.0) -> Plan:
    """Draws a tumour for a head that was drawn coarsely and without a mass: size, place, form."""
    wanted = volumes(random, shift)
    radius = _radius(wanted.core + wanted.rim)
    x, y, z = (p + np.float32(o) for p, o in zip(rough.places, mri_anatomy.ORIGIN))
    at = (np.abs(x - mri_anatomy.ORIGIN[0]), y, z)
    score = sum(-0.5 * ((p - m) / sd) ** 2 for p, (m, sd) in zip(at, PLACE))
    score = score - 0.5 * (np.maximum(0.55 * radius - rough.depth, 0) / 4) ** 2
    score = np.where((rough.white > 0.45) & (rough.below == 0), score, score - 60)
    chance = random.gumbel(size=(2, len(score)))
    places = np.stack(rough.places, 1)
    centres = [places[np.argmax(score + chance[0])]]
    if random.uniform() < SECOND:
        away = np.linalg.norm(places - centres[0], axis=1)
        centres.append(places[np.argmax(score + chance[1] - 0.5 * ((away - 1.4 * radius - 14) / 5) ** 2)])
    forms = []
    for _ in centres:
        turn, _ = np.linalg.qr(random.standard_normal((3, 3)))
        stretch = np.exp(0.2 * random.standard_normal(3))
        forms.append((stretch / stretch.prod() ** (1 / 3))[:, None] * turn)
    lean = random.standard_normal(3)
    return Plan(
        volumes=wanted,
        centres=np.asarray(centres, np.float32),
        sizes=np.asarray([1.0, random.uniform(0.35, 0.7)][: len(centres)], np.float32),
        forms=np.asarray(forms, np.float32),
        lean=(random.uniform(0.05, 0.8) * lean / np.linalg.norm(lean)).astype(np.float32),
        coarse=mri_fields.noise(random, 20.0),
        middle=mri_fields.noise(random, 9.0),
        fine=mri_fields.noise(random, 4.0),
        cystic=float(random.uniform()),
    )


def draw(this: Plan, head: Head, at: Grid) -> Lesion:
    """Labels of every voxel of the head. The three volumes are those of the plan, to the voxel where they fit."""
    reach = 1.9 * _radius(this.volumes.whole) + 16
    off = [np.stack([(p - c) / a for p, c, a in zip(head.places, centre, ALONG)]) for centre in this.centres]
    near = np.flatnonzero(np.min([(o * o).sum(0) for o in off], axis=0) < reach**2)
    off = [o[:, near] for o in off]
    index = head.flat[near]
    coarse, middle, fine = (smooth(a, at).reshape(-1)[index] for a in (this.coarse, this.middle, this.fine))
    ml = float(np.prod(at.spacing)) / 1000
    radius = this.radius

    # Core and rim: bent ellipsoids around their centres, as a distance in mm.
    balls = [
        np.sqrt(((form @ o) ** 2).sum(0)) + radius * (1 - size) for form, o, size in zip(this.forms, off, this.sizes)
    ]
    ball = np.min(balls, axis=0)
    ball = ball + radius * (0.16 * coarse + 0.06 * middle) + 0.8 * middle + 0.5 * fine
    fluid, grey, below = (a[near] for a in (head.csf, head.grey, head.below))
    ball = ball + 9 * fluid + 14 * below
    edge, core = _smallest(ball, this.volumes.core + this.volumes.rim, ml)

    # The rim is what lies outermost in it; it opens where the noise is high.
    inward = (ball - edge) + (1.4 + 0.12 * radius) * middle + (0.6 + 0.05 * radius) * coarse + 2.5 * fine
    inward = np.where(core, inward, np.inf)
    inner, necrotic = _smallest(inward, this.volumes.core, ml)

    # Oedema spreads along white matter, away from the core, and seldom crosses the middle.
    across = np.maximum(-np.sign(this.centres[0, 0]) * head.places[0][near], 0)
    spread = np.maximum(ball - edge, 0) * 0.8 + 0.2 * np.sqrt((off[0] ** 2).sum(0)) - this.lean @ off[0]
    spread = spread + 3.4 * coarse + 2.3 * middle + 0.9 * fine + 5 * grey + 30 * below + 0.8 * across
    spread = spread + 60 * np.maximum(fluid - 0.35, 0)  # readers do not cut thin sulci out
    spread = np.where(core, -np.inf, spread)
    outer, whole = _smallest(spread, this.volumes.whole, ml)

    label = np.zeros(len(head.flat), np.uint8)
    label[near] = np.where(necrotic, NCR, np.where(core, ET, np.where(whole, ED, 0)))
    width = 0.9 + at.widest
    inside = np.clip(0.5 + (edge - ball) / width, 0, 1)
    middle_share = np.where(core, np.clip(0.5 + (inner - inward) / width, 0, 1), 0) * inside
    around = np.where(core, 1, np.clip(0.5 + (outer - spread) / (width + 2.0), 0, 1)) * (1 - inside)
    shares = []
    for part in (middle_share, inside - middle_share, around):
        full = np.zeros(len(head.flat), np.float32)
        full[near] = part
        shares.append(full)
    return Lesion(label, *shares)


def _radius(ml: float) -> float:
    return float((3000 * ml / (4 * np.pi)) ** (1 / 3))


def _smallest(field: np.ndarray, volume: float, ml: float) -> tuple[float, np.ndarray]:
    """The level under which a field takes that volume, and where it does. Infinite voxels count: never, always."""
    count = min(round(volume / ml), int((field < np.inf).sum()))
    if count == 0:
        return -1e3, np.zeros(field.shape, bool)
    order = np.argpartition(field, count - 1)[:count]
    chosen = np.zeros(field.shape, bool)
    chosen[order] = True
    level = field[order].max()
    return float(level) if np.isfinite(level) else -1e3, chosen
