"""Colours of H&E slides as amounts of stain, and a shift of them per hospital."""

from typing import NamedTuple

import numpy as np

# Rows: haematoxylin, eosin, DAB; columns: the optical density of a unit of the stain in red, green and blue.
# Source: Ruifrok & Johnston 2001, Anal Quant Cytol Histol 23(4):291-299, in the two decimals in common use.
RGB_FROM_HED = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
HED_FROM_RGB = np.linalg.inv(RGB_FROM_HED)
_DARKEST = 1e-6  # log 0
_AT_ONCE = 256  # images
_STREAM = 2001  # no byte: the split by patient draws from [seed, *client]


class Jitter(NamedTuple):
    """alpha, beta: [3] for haematoxylin, eosin and DAB; stain -> alpha * stain + beta."""

    alpha: np.ndarray
    beta: np.ndarray


def rgb2hed(rgb: np.ndarray) -> np.ndarray:
    """[..., 3] in [0, 1] -> amounts of the three stains, [..., 3], by colour deconvolution.

    Source: Ruifrok & Johnston 2001. Deviation: optical density is the natural logarithm; negative amounts (colours that
    no mixture of the three stains has) are kept, so that the way back is exact.
    """
    return -np.log(np.maximum(rgb, _DARKEST)) @ HED_FROM_RGB.astype(rgb.dtype)


def hed2rgb(hed: np.ndarray) -> np.ndarray:
    """The inverse of rgb2hed: [..., 3] amounts -> [..., 3] in [0, 1]; brighter than white becomes white."""
    return np.minimum(np.exp(-(hed @ RGB_FROM_HED.astype(hed.dtype))), 1)


def draw(strength: float, *, seed: int, client: str) -> Jitter:
    """The shift of one hospital: alpha ~ U(1 - s, 1 + s), beta ~ U(-s, s), independent per stain.

    It depends on the seed and the client's name only, not on the other clients nor on their number.

    Source: Tellez et al. 2018 (IEEE TMI 37(9)) and 2019 (Med Image Anal 58), HED colour augmentation; there .05 is
    light and .2 strong. Deviation: drawn once per hospital, not per tile; beta is in units of natural optical density.
    """
    random = np.random.default_rng([seed, _STREAM, *client.encode()])
    return Jitter(random.uniform(1 - strength, 1 + strength, 3), random.uniform(-strength, strength, 3))


def shift(x: np.ndarray, jitter: Jitter) -> np.ndarray:
    """Tiles [n, H, W, 3] in [0, 1] with the stains of one hospital; float32, a new array."""
    out = np.empty(x.shape, np.float32)
    for start in range(0, len(x), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        hed = rgb2hed(x[part].astype(np.float32))
        out[part] = hed2rgb(hed * jitter.alpha.astype(np.float32) + jitter.beta.astype(np.float32))
    return out
