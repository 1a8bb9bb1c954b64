"""Organs, vessels and bones of the standard body: tables of ellipses that come and go with the level."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_seg.core.types import Array
from fedjax_seg.synthesis.ct_shapes import ramp

_GAS = -920.0
RIBS = 16
RANDOM = 6  # uniform numbers per part and patient


class Part(NamedTuple):
    """An ellipse of the standard body (lengths in half fields of view).

    Attributes:
      x, y, a, b, turn: centre, half axes, angle in radians.
      hu, agent: HU = hu + agent * (contrast agent, 0 to 1).
      start, end, slope: the levels between which it is seen; the half axes grow and shrink over `slope`.
      soft: width of the edge beyond a pixel.
      shell, shell_hu, shell_agent: thickness and HU of a rim; 0 = none.
      drift: shift of x over the levels 0.3 to 0.7.
      spread: HU differ by up to so much between patients.
      chance: the share of patients that have it.
      gas: the chance that it is filled with gas instead.
      still: multiplies the random shift and size.
    """

    x: float
    y: float
    a: float
    b: float
    turn: float = 0.0
    hu: float = 45.0
    agent: float = 0.0
    start: float = -1.0
    end: float = 2.0
    slope: float = 0.07
    soft: float = 0.0
    shell: float = 0.0
    shell_hu: float = 0.0
    shell_agent: float = 0.0
    drift: float = 0.0
    spread: float = 0.0
    chance: float = 1.0
    gas: float = 0.0
    still: float = 1.0


# Heart, great vessels, airways and gullet, painted in this order.
_CHEST = (
    Part(-0.13, -0.20, 0.05, 0.035, 0.5, agent=110, end=0.16),
    Part(0.03, -0.06, 0.19, 0.075, 0.55, agent=150, end=0.17),
    Part(-0.07, -0.15, 0.09, 0.085, agent=150, start=0.12, end=0.42),
    Part(-0.175, -0.10, 0.052, 0.045, agent=110, start=0.05, end=0.40),
    Part(0.085, -0.17, 0.08, 0.075, 0.3, agent=110, start=0.16, end=0.36),
    Part(-0.06, -0.035, 0.15, 0.042, -0.15, agent=110, start=0.17, end=0.33),
    Part(0.15, 0.02, 0.10, 0.045, 0.5, agent=110, start=0.18, end=0.34),
    Part(0.13, -0.14, 0.285, 0.205, -0.42, hu=48, agent=50, start=0.26, end=0.72, slope=0.12, soft=0.012),
    Part(-0.10, -0.07, 0.10, 0.105, 0.3, agent=110, start=0.26, end=0.72, slope=0.12, soft=0.010),
    Part(0.02, -0.22, 0.16, 0.075, -0.25, agent=110, start=0.26, end=0.72, slope=0.12, soft=0.012),
    Part(0.22, -0.12, 0.125, 0.075, -0.5, agent=150, start=0.34, end=0.70, slope=0.10, soft=0.015),
    Part(0.04, 0.0, 0.15, 0.075, 0.05, agent=150, start=0.26, end=0.56, slope=0.10, soft=0.012),
    Part(0.0, 0.05, 0.055, 0.050, hu=-980, end=0.24, slope=0.05, shell=0.011, shell_hu=45),
    Part(-0.10, 0.06, 0.050, 0.036, 0.5, hu=-970, start=0.18, end=0.38, shell=0.011, shell_hu=40),
    Part(0.12, 0.07, 0.048, 0.034, -0.4, hu=-970, start=0.18, end=0.38, shell=0.011, shell_hu=40),
    Part(0.025, 0.11, 0.034, 0.026, hu=-200, end=0.72, drift=0.03, shell=0.020, shell_hu=42),
    Part(-0.06, 0.165, 0.018, 0.018, agent=110, end=0.72),
    Part(0.115, 0.155, 0.066, 0.064, agent=150, start=0.08, end=0.67, slope=0.05, drift=-0.05),
)
# Then spleen, stomach, pancreas, gall bladder, kidneys, muscles along the spine, vessels, bowel.
_BELLY = (
    Part(0.555, 0.12, 0.135, 0.250, 0.30, hu=52, agent=62, start=0.60, end=1.10, slope=0.14),
    Part(0.31, -0.11, 0.235, 0.190, -0.45, hu=30, start=0.60, end=1.04, slope=0.12, shell=0.018, shell_hu=45,
         shell_agent=30, spread=15),
    Part(0.32, -0.19, 0.155, 0.070, -0.25, hu=_GAS, start=0.60, end=1.02, slope=0.12),
    Part(0.16, 0.0, 0.20, 0.042, -0.30, hu=42, agent=50, start=0.76, end=1.10, slope=0.10, soft=0.012),
    Part(-0.06, 0.02, 0.065, 0.060, 0.2, hu=42, agent=50, start=0.76, end=1.10, slope=0.10, soft=0.012),
    Part(0.08, 0.045, 0.14, 0.018, -0.25, agent=100, start=0.76, end=1.10, slope=0.10),
    Part(-0.11, -0.01, 0.050, 0.035, 0.5, agent=100, start=0.66, end=1.0),
    Part(-0.21, -0.17, 0.060, 0.085, 0.4, hu=8, start=0.80, end=1.10, slope=0.06, chance=0.6),
    Part(-0.355, 0.215, 0.105, 0.130, -0.35, hu=33, agent=85, start=0.80, slope=0.10, soft=0.006, shell=0.036,
         shell_hu=34, shell_agent=130),
    Part(0.355, 0.215, 0.105, 0.130, 0.35, hu=33, agent=85, start=0.76, slope=0.10, soft=0.006, shell=0.036,
         shell_hu=34, shell_agent=130),
    Part(-0.295, 0.195, 0.052, 0.046, hu=-75, start=0.84, slope=0.08, soft=0.015),
    Part(0.295, 0.195, 0.052, 0.046, hu=-75, start=0.81, slope=0.08, soft=0.015),
    Part(-0.085, 0.17, 0.022, 0.085, 0.25, hu=52),
    Part(0.085, 0.18, 0.020, 0.080, -0.2, hu=52),
    Part(-0.15, 0.26, 0.065, 0.070, hu=55, start=0.86, slope=0.14),
    Part(0.15, 0.26, 0.065, 0.070, hu=55, start=0.86, slope=0.14),
    Part(-0.125, 0.09, 0.066, 0.050, 0.2, agent=100),
    Part(0.045, 0.135, 0.058, 0.057, agent=140),
    *(
        Part(x, y, a, b, t, hu=hu, start=start, slope=0.14, shell=0.014, shell_hu=40, shell_agent=45, spread=25,
             gas=gas)
        for x, y, a, b, t, hu, start, gas in (
            (0.05, -0.32, 0.080, 0.066, 0.2, -50, 0.78, 0.6),
            (0.22, -0.32, 0.090, 0.064, 0.0, -50, 0.76, 0.6),
            (0.42, -0.28, 0.085, 0.070, 0.4, -50, 0.72, 0.6),
            (0.60, -0.10, 0.070, 0.080, 0.1, -50, 0.66, 0.6),
            (0.60, 0.12, 0.062, 0.068, 0.0, -50, 0.92, 0.6),
            (0.30, 0.02, 0.074, 0.056, 0.9, 20, 0.82, 0.2),
            (0.44, -0.08, 0.080, 0.056, 2.1, 20, 0.80, 0.2),
            (0.16, -0.16, 0.068, 0.054, 1.5, 20, 0.84, 0.2),
            (0.34, -0.15, 0.072, 0.056, 0.4, 20, 0.82, 0.2),
            (0.48, 0.05, 0.070, 0.058, 2.7, 20, 0.82, 0.2),
            (0.22, 0.10, 0.060, 0.050, 1.9, 20, 0.86, 0.2),
        )
    ),
)  # fmt: skip
ORGANS = (*_CHEST, *_BELLY)
# Vertebra, breast bone, shoulder blades; the spinal canal comes last.
SKELETON = (
    *(Part(s * 0.062, 0.335, 0.024, 0.050, hu=520, still=0.3) for s in (-1, 1)),
    *(Part(s * 0.060, 0.415, 0.062, 0.020, s * 0.75, hu=560, still=0.3) for s in (-1, 1)),
    *(Part(s * 0.135, 0.375, 0.080, 0.022, s * 0.25, hu=480, still=0.5) for s in (-1, 1)),
    Part(0.0, 0.475, 0.017, 0.060, hu=520, still=0.5),
    Part(0.0, 0.25, 0.108, 0.088, hu=185, soft=0.006, shell=0.013, shell_hu=560, still=0.5),
    Part(0.0, -0.495, 0.085, 0.024, hu=170, end=0.56, shell=0.011, shell_hu=420, still=0.5),
    *(Part(s * 0.56, 0.30, 0.165, 0.016, -s * 0.85, hu=620, end=0.32) for s in (-1, 1)),
    *(Part(s * 0.58, 0.40, 0.085, 0.014, -s * 0.15, hu=560, end=0.32) for s in (-1, 1)),
    *(Part(s * 0.675, 0.175, 0.040, 0.050, hu=200, end=0.32, shell=0.012, shell_hu=520) for s in (-1, 1)),
    Part(0.0, 0.368, 0.052, 0.042, hu=38, soft=0.01, shell=0.016, still=0.0),
)


def rows(parts: tuple[Part, ...], level: Array, agent: Array, random: Array) -> Array:
    """The parts of a slice as a table for `ct_shapes.paint`.

    Args:
      random: uniform numbers [M, RANDOM] of the patient.
    """
    p = Part(*jnp.asarray(np.asarray(parts, np.float32).T))
    u = 2 * random - 1
    here = ramp(level, p.start, p.start + p.slope) * ramp(level, p.end, p.end - p.slope)
    here = here * (random[:, 4] < p.chance)
    hu = jnp.where(random[:, 5] < p.gas, _GAS, p.hu + p.agent * agent + p.spread * u[:, 4])
    return jnp.stack(
        [
            p.x + p.drift * ramp(level, 0.3, 0.7) + 0.012 * p.still * u[:, 0],
            p.y + 0.010 * p.still * u[:, 1],
            p.a * here * (1 + 0.12 * p.still * u[:, 2]),
            p.b * here * (1 + 0.12 * p.still * u[:, 3]),
            p.turn + 0.1 * p.still * u[:, 5],
            hu,
            p.soft,
            p.shell * here,
            p.shell_hu + p.shell_agent * agent,
        ],
        1,
    )


def ribs(x: Array, y: Array, turn: Array, random: Array) -> Array:
    """A table of ribs at these places of the wall and along these directions; random: uniform [RIBS, 3]."""
    u, ones = random, jnp.ones(RIBS)
    columns = (x, y, 0.035 + 0.065 * u[:, 0], 0.018 + 0.007 * u[:, 1], turn + 0.3 * (u[:, 2] - 0.5))
    return jnp.stack([*columns, 230 * ones, 0 * ones, 0.0105 * ones, 640 * ones], 1)
