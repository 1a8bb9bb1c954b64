"""Tumours: where they grow, their irregular outlines, what is in them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array
from fedjax_seg.synthesis import ct_anatomy
from fedjax_seg.synthesis.ct_anatomy import Patient, Slice
from fedjax_seg.synthesis.ct_shapes import Grid, coverage, smooth

MOST = 4  # tumours in one slice
HALF_FIELD_MM = 200.0  # the picture shows 400 mm by 400 mm
_SEARCH = 40  # places tried along each axis
_WAVES = 6  # of the outline
# The random numbers of a patient's tumours: uniform and normal ones.
UNIFORM = {"tumours": (4 + 6 * MOST,), "places": (MOST, _SEARCH * _SEARCH)}
NORMAL = {"waves": (MOST, 2, _WAVES), "rough": (64, 64), "knots": (20, 20)}


class Tumours(NamedTuple):
    """The tumours of a patient; leading axis MOST, radius 0 = not there. Coordinates of the standard body, bent.

    Attributes:
      x, y, radius: of the middle slice.
      waves: [MOST, 2, waves] cosine and sine parts of the outline, relative to the radius.
      stretch, turn: of the ellipse under the outline.
      contrast: HU that a liver tumour is darker than the liver.
      necrotic: 1 = with a dark core.
      in_lung: 1 = lung, 0 = liver; scalar.
    """

    x: Array
    y: Array
    radius: Array
    waves: Array
    stretch: Array
    turn: Array
    contrast: Array
    necrotic: Array
    in_lung: Array


def tumours(profile: dict[str, Array], person: Patient, level: Array, in_lung: Array) -> Tumours:
    """Draws tumours at places of that level where they fit; at least one, the largest first.

    Args:
      profile: ct_profiles.Profile as arrays.
      person: with the random numbers UNIFORM and NORMAL among its own.
      level: of the patient's middle slice.
    """
    numbers = person.uniform["tumours"]
    u = numbers[4:].reshape(6, MOST)
    low, high = profile["radius"] / HALF_FIELD_MM
    first = low * (high / low) ** numbers[0]
    radius = jnp.maximum(first * jnp.where(jnp.arange(MOST) == 0, 1.0, 0.55 + 0.4 * u[0]), low)
    fewest, most = profile["tumours"]
    number = fewest + jnp.floor((most - fewest + 1) * numbers[1])
    radius = jnp.where(jnp.arange(MOST) < number, radius, 0.0)
    _, bent = ct_anatomy.places(person, _SEARCH)
    f = ct_anatomy.fields(bent, level, person)
    # The bending differs a little between slices of another size: stay clear of what would cover a liver tumour.
    covered = 0.03 - ct_anatomy.blocked(bent, level, person)
    depth = -jnp.where(in_lung > 0, f.lung, jnp.maximum(f.liver, covered))
    x, y, radius = _placed(person.uniform["places"], depth, bent, radius, low)
    decay = jnp.array([0.10, 0.075, 0.055, 0.04, 0.032, 0.028])
    lively = jnp.where(radius > 0.05, 1.0, 0.6)[:, None, None]  # small tumours are rounder
    contrast_low, contrast_high = profile["contrast"]
    return Tumours(
        x,
        y,
        radius,
        waves=lively * decay * person.normal["waves"],
        stretch=0.82 + 0.36 * u[1],
        turn=jnp.pi * u[2],
        contrast=contrast_low + (contrast_high - contrast_low) * u[3],
        necrotic=((u[4] < 0.45) & (radius > 0.09)).astype(jnp.float32),
        in_lung=in_lung,
    )


def _placed(random: Array, depth: Array, at: Grid, radius: Array, low: Array) -> tuple[Array, Array, Array]:
    """Places of the tumours; the first is shrunk where it does not fit, the others are left out."""
    x, y, depth = (jnp.broadcast_to(a, depth.shape).ravel() for a in (at.x, at.y, depth))

    def one(clear: Array, given: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        wanted, draw, is_first = given
        fits = (depth > 0.6 * wanted) & (clear > wanted * 1.25 + 0.02)
        best = jnp.argmax(jnp.where(fits, draw, depth - 10.0))
        shrunk = jnp.where(is_first, jnp.minimum(wanted, jnp.maximum(depth[best] / 0.6, low)), 0.0)
        size = jnp.where(fits[best], wanted, shrunk)
        near = jnp.hypot(x - x[best], y - y[best]) - size * 1.25
        return jnp.where(size > 0, jnp.minimum(clear, near), clear), (x[best], y[best], size)

    clear = jnp.full(depth.shape, jnp.inf)
    return jax.lax.scan(one, clear, (radius, random, jnp.arange(MOST) == 0))[1]


def grow(these: Tumours, plain: Slice, person: Patient, at: Grid, height: Array) -> tuple[Array, Array]:
    """Puts the tumours into a slice.

    Args:
      at: the pixel centres, stretched and bent.
      height: of the slice above the middle of the tumours, in radii; in (-1, 1).

    Returns: HU float32 [H, W] and the mask uint8 [H, W]: pixels of which a tumour fills at least half.
    """
    size = plain.hu.shape[0]
    rough, knots = smooth(person.normal["rough"], size), smooth(person.normal["knots"], size)
    lung, agent = these.in_lung > 0, person.agent
    organ = jnp.where(lung, plain.lung, plain.liver)
    softness = at.pixel * 1.2 + jnp.where(lung, 0.008, 0.014)
    grain = 5 * knots + 3 * rough

    def one(carry: tuple[Array, Array], tumour: Tumours) -> tuple[tuple[Array, Array], None]:
        hu, most = carry
        away, edge = _outline(tumour, at)
        edge = edge * jnp.sqrt(1 - height**2)
        frayed = away - edge + jnp.minimum(0.05 * tumour.radius, 0.006) * rough
        cover = coverage(frayed, softness) * organ * (tumour.radius > 0)
        within = away / jnp.maximum(edge, 1e-4)
        solid = grain + jnp.where(lung, 34 + 34 * agent, 60 + 48 * agent - tumour.contrast)
        rim = agent * (tumour.radius > 0.07) * jnp.clip(1 - jnp.abs(within - 0.88) / 0.12, 0, 1)
        core = tumour.necrotic * jnp.clip((0.58 + 0.08 * knots - within) / 0.15, 0, 1)
        solid = solid + 12 * rim - jnp.where(lung, 24.0, 18.0) * core
        return (hu + cover * (solid - hu), jnp.maximum(most, cover)), None

    each = these._replace(in_lung=jnp.broadcast_to(these.in_lung, (MOST,)))
    (hu, most), _ = jax.lax.scan(one, (plain.hu, jnp.zeros_like(plain.hu)), each)
    return hu, (most >= 0.5).astype(jnp.uint8)


def _outline(tumour: Tumours, at: Grid) -> tuple[Array, Array]:
    """Distance from the centre of one tumour, and of its edge in that direction, [H, W] each."""
    c, s = jnp.cos(tumour.turn), jnp.sin(tumour.turn)
    dx, dy = at.x - tumour.x, at.y - tumour.y
    u, v = (dx * c + dy * s) * tumour.stretch, (dy * c - dx * s) / tumour.stretch
    away = jnp.sqrt(u * u + v * v) + 1e-6
    real, imaginary = u / away, v / away
    cosine, sine = real, imaginary
    outline = jnp.ones_like(away)
    for k in range(_WAVES):  # cosine and sine of 2, 3, ... times the angle, by turning on
        cosine, sine = cosine * real - sine * imaginary, sine * real + cosine * imaginary
        outline = outline + tumour.waves[0, k] * cosine + tumour.waves[1, k] * sine
    return away, tumour.radius * jnp.maximum(outline, 0.45)
