"""Augmentation of a training batch inside jit: pure functions of (batch, key)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batch

Augmentation = Callable[[Batch, Array], Batch]


def none() -> Augmentation:
    """The batch as it is."""
    return lambda batch, key: batch


def images(*, flips: bool = True, shift: int = 4, intensity: float = 0.1, noise: float = 0.02) -> Augmentation:
    """Random flips, shifts, grey levels and noise of 2D images, drawn anew for every example.

    An image and its mask are moved alike: pixel (i, j) of both comes from one place, so that a mask has no new value.
    What a shift uncovers repeats the edge. Values may leave [0, 1]. Order: flip, shift, x * (1 + s) + o, + noise.

    Args:
      flips: each axis is turned round with probability 1/2.
      shift: whole pixels per axis, uniform in [-shift, shift].
      intensity: s and o are uniform in [-intensity, intensity]; x is about [0, 1].
      noise: standard deviation of the normal noise on every value of x.

    Returns: (batch, key) -> batch, safe under jit, scan and vmap. `x` is [B, H, W, C]; `y` [B, H, W] moves with it, any
      other `y` (a label per image) and all other entries stay. Example b depends on the key and b alone; examples with
      mask 0 stay as they are.
    """
    checks.number("augment.shift", shift, low=0, integer=True)
    checks.number("augment.intensity", intensity, low=0)
    checks.number("augment.noise", noise, low=0)

    def one(x: Array, y: Array, moves: bool, key: Array) -> tuple[Array, Array]:
        draws = jax.random.uniform(jax.random.fold_in(key, 0), (6,))  # one call: compiling a generator takes a second
        turned = (draws[:2] < 0.5) & flips
        by = jnp.minimum(jnp.floor(draws[2:4] * (2 * shift + 1)), 2 * shift).astype(int) - shift
        rows, columns = (_places(n, turned[axis], by[axis]) for axis, n in enumerate(x.shape[:2]))
        x = x[rows][:, columns]
        y = y[rows][:, columns] if moves else y
        scale, offset = ((2 * draws[4:] - 1) * intensity).astype(x.dtype)
        x = x * (1 + scale) + offset
        if noise:
            x = x + noise * jax.random.normal(jax.random.fold_in(key, 1), x.shape, x.dtype)
        return x, y

    def augmented(batch: Batch, key: Array) -> Batch:
        x, y = batch["x"], batch["y"]
        moves = y.ndim == 3 and y.shape == x.shape[:3]
        return _of_every_example(batch, key, lambda a, b, k: one(a, b, moves, k))

    return augmented


def volumes(
    *, flips: tuple[bool, ...] = (True, True, True), intensity: float = 0.1, noise: float = 0.0
) -> Augmentation:
    """Random mirrors, and contrast and brightness of every channel, of 3D patches; drawn anew for every example.

    As in `images`, a patch and its labels are moved alike. Order: mirror, x * (1 + s) + o, + noise.

    Args:
      flips: for every axis of the array, whether it is turned round with probability 1/2. Brains are nearly symmetric
        from left to right; a hippocampus is not.
      intensity: s and o of every channel are uniform in [-intensity, intensity]; x has a standard deviation of about 1.
      noise: standard deviation of the normal noise on every value of x.

    Returns: (batch, key) -> batch. `x` is [B, X, Y, Z, C], `y` [B, X, Y, Z].
    """
    if len(flips) != 3:
        raise checks.UserError(f"augment.flips: {flips!r} given, three values (one per axis) expected")
    checks.number("augment.intensity", intensity, low=0)
    checks.number("augment.noise", noise, low=0)

    def one(x: Array, y: Array, key: Array) -> tuple[Array, Array]:
        channels = x.shape[-1]
        draws = jax.random.uniform(jax.random.fold_in(key, 0), (3 + 2 * channels,))
        for axis in range(3):
            if flips[axis]:
                turned = draws[axis] < 0.5
                x, y = (jnp.where(turned, jnp.flip(v, axis), v) for v in (x, y))
        change = ((2 * draws[3:] - 1) * intensity).astype(x.dtype)
        x = x * (1 + change[:channels]) + change[channels:]
        if noise:
            x = x + noise * jax.random.normal(jax.random.fold_in(key, 1), x.shape, x.dtype)
        return x, y

    return lambda batch, key: _of_every_example(batch, key, one)


def _of_every_example(batch: Batch, key: Array, one: Callable[..., tuple[Array, Array]]) -> Batch:
    """one(x, y, key of the example) of the real examples; all other entries stay."""
    x, y = batch["x"], batch["y"]
    keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(x.shape[0]))
    new = jax.vmap(one)(x, y, keys)
    real = batch["mask"] > 0
    keep = lambda a, b: jnp.where(real.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
    return {**batch, "x": keep(new[0], x), "y": keep(new[1], y)}


def _places(size: int, turned: Array, by: Array) -> Array:
    """int [size]: where along an axis each pixel comes from."""
    at = jnp.clip(jnp.arange(size) - by, 0, size - 1)
    return jnp.where(turned, size - 1 - at, at)


AUGMENTATIONS = {"none": none, "images": images, "volumes": volumes}


def make(name: str, **options: Any) -> Augmentation:
    """The augmentation of that name; an unknown name or option is a UserError."""
    return checks.call(checks.lookup(AUGMENTATIONS, name, "augment.name"), f"augment.{name}", (), options)
