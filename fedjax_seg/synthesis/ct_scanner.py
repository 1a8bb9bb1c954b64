"""What a scanner makes of a slice: reconstruction kernel, noise, streaks, a bias field, its own calibration."""

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array
from fedjax_seg.synthesis.ct_shapes import grid, smooth

LOWEST, HIGHEST = -1024, 3071  # 12 bits


def _filtered(picture: Array, k: Array | float) -> Array:
    """[k, 1 - 2k, k] along both axes: smooths for k > 0, sharpens for k < 0."""
    for axis in (0, 1):
        wide = jnp.pad(picture, [(1, 1) if a == axis else (0, 0) for a in (0, 1)], mode="edge")
        n = picture.shape[axis]
        before, after = (jax.lax.slice_in_dim(wide, i, i + n, axis=axis) for i in (0, 2))
        picture = picture + k * (before + after - 2 * picture)
    return picture


def random_numbers(size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the normal numbers of one scan."""
    return {"grain": (size, size), "streaks": (size, max(4, size // 6)), "field": (3, 3)}


def scan(normal: dict[str, Array], hu: Array, body: Array, profile: dict[str, Array]) -> Array:
    """int16 [H, W], the image in HU.

    Noise is given at 256 pixels per side and shrinks with the root of the size (less than averaging pixels would
    shrink it, so that small pictures are noisy too). It is strongest at the centre of the body, where the rays are
    longest.

    Args:
      normal: as random_numbers.
      hu: float32 [H, W].
      body: [H, W] coverage of the body.
      profile: ct_profiles.Profile as arrays.
    """
    size = hu.shape[0]
    at = grid(size)
    kernel = profile["kernel"]
    image = _filtered(hu, 0.10 - 0.18 * kernel)
    field = 0.6 * smooth(normal["field"], size) + 1.6 * (at.x**2 + at.y**2 - 0.3)
    image = image + body * ((profile["scale"] - 1) * image + profile["offset"] + profile["bias"] * field)
    blur = jnp.clip(0.17 - 0.10 * kernel, 0.02, 0.24)
    # the standard deviation of white noise after the filter, per axis: root of (1 - 2 blur)^2 + 2 blur^2
    grain = _filtered(normal["grain"], blur) / ((1 - 2 * blur) ** 2 + 2 * blur**2)
    streaks = smooth(normal["streaks"], size)
    share = profile["streaks"]
    grain = jnp.sqrt(1 - share) * grain + jnp.sqrt(share) * streaks
    strength = profile["noise"] * jnp.sqrt(size / 256) * (0.45 + 0.55 / (1 + 2.2 * (at.x**2 + at.y**2)))
    image = image + grain * strength * (0.35 + 0.65 * body)
    return jnp.clip(jnp.round(image), LOWEST, HIGHEST).astype(jnp.int16)
