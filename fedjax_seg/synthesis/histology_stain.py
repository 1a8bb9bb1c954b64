"""Haematoxylin and eosin: from amounts of stain to the pixels of a hospital's scanner."""

from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

# Optical density of red, green and blue, of length 1: Ruifrok & Johnston 2001, the matrix of normalised OD.
HAEMATOXYLIN, EOSIN = (0.65, 0.70, 0.29), (0.07, 0.99, 0.11)
_USUAL = (0.80, 0.50)  # density of amount 1 of each


class Stain(NamedTuple):
    """How a hospital's tiles are stained and scanned.

    Attributes:
      vectors: [2, 3]; optical density per amount of haematoxylin and eosin, with the strength of the stain.
      light: [3], the colour of empty glass, in (0, 1].
      blur: Gaussian, micrometres.
      noise: standard deviation of the camera, in [0, 1] of the range.
    """

    vectors: np.ndarray
    light: np.ndarray
    blur: float
    noise: float

    def described(self) -> dict[str, Any]:
        """Facts for a report."""
        return {
            "haematoxylin": [round(float(v), 3) for v in self.vectors[0]],
            "eosin": [round(float(v), 3) for v in self.vectors[1]],
            "light": [round(float(v), 3) for v in self.light],
            "blur_um": round(self.blur, 3),
            "noise": round(self.noise, 4),
        }


def hospital(random: np.random.Generator, differ: float) -> Stain:
    """A hospital's stain; `differ` scales how far it lies from the textbook (0 = all hospitals alike).

    The angle of each vector, its strength, the light, the blur and the noise differ.
    """
    vectors = np.array([HAEMATOXYLIN, EOSIN])
    vectors = vectors + differ * random.normal(0, 1, (2, 3)) * np.array([[0.05, 0.05, 0.03], [0.045, 0.03, 0.06]])
    vectors = np.maximum(vectors, 0.02)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    strength = np.array(_USUAL) * np.exp(differ * random.normal(0, 0.16, 2).clip(-0.35, 0.35))
    light = 0.96 + differ * random.normal(0, 1, 3).clip(-2, 2) * np.array([0.012, 0.015, 0.03])
    light = np.clip(light - differ * random.uniform(0, 0.06), 0.6, 1.0)
    blur, noise = random.uniform(-1, 1, 2)
    return Stain(
        vectors * strength[:, None], light, max(0.45 + 0.35 * differ * blur, 0.0), 0.010 + 0.006 * differ * noise
    )


def scan(
    random: np.random.Generator, stain: Stain, haematoxylin: np.ndarray, eosin: np.ndarray, pixel: float
) -> np.ndarray:
    """uint8 [S, S, 3]; the tile of amounts of stain [S, S], pixels of `pixel` micrometres.

    Source: Ruifrok & Johnston 2001, equation (1): the law of Lambert and Beer, I = I0 * 10^-density, with
    densities of two stains that add.
    """
    density = haematoxylin[..., None] * stain.vectors[0].astype(np.float32)
    density = density + eosin[..., None] * stain.vectors[1].astype(np.float32)
    seen = stain.light.astype(np.float32) * np.exp(density * np.float32(-np.log(10)))
    if stain.blur / pixel > 0.15:
        seen = ndimage.gaussian_filter(seen, (stain.blur / pixel, stain.blur / pixel, 0), mode="nearest", truncate=3)
    seen = seen + np.float32(max(stain.noise, 0)) * random.standard_normal(seen.shape, np.float32)
    return np.rint(np.clip(seen, 0, 1) * np.float32(255)).astype(np.uint8)
