"""Diffusion over arrays: the cosine schedule, adding noise, what v means, and DDIM sampling. Pure functions.

Time is an integer t in 0..T; 0 is the image, T is noise. With a = sqrt(alpha_bar_t) and s = sqrt(1 - alpha_bar_t),
z_t = a x + s e for an image x and e ~ N(0, 1).

Networks predict v = a e - s x (Salimans and Ho 2022, section 4 and appendix D) and not e: x = a z - s v is stable at
every t, whereas (z - s e) / a divides by almost 0 near T; this matters here, since sampling starts there, few steps are
taken and the network is small. Its squared error weighs the error of x by 1 + SNR, never less than 1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array

STEPS = 1000  # T
_OFFSET = 0.008  # s of Nichol and Dhariwal
_MOST_NOISE = 0.999  # of one step, theirs too


def cosine(steps: int = STEPS) -> np.ndarray:
    """alpha_bar_t for t = 0..steps, float64 [steps + 1]; 1 at 0, falling.

    Source: Nichol and Dhariwal 2021, equation 17: alpha_bar_t = f(t) / f(0), f(t) = cos((t/T + s) / (1 + s) * pi/2)^2
    with s = 0.008, and beta_t = 1 - alpha_bar_t / alpha_bar_(t-1) clipped at 0.999. Deviation: none.
    """
    t = np.arange(steps + 1) / steps
    f = np.cos((t + _OFFSET) / (1 + _OFFSET) * np.pi / 2) ** 2
    beta = np.minimum(1 - f[1:] / f[:-1], _MOST_NOISE)
    return np.concatenate([[1.0], np.cumprod(1 - beta)])


def _like(values: Array, x: Array) -> Array:
    """[B] -> [B, 1, ...] with the axes of x; a scalar as it is."""
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim)) if values.ndim else values


def amounts(alpha_bar: Array, x: Array) -> tuple[Array, Array]:
    """a (of the image) and s (of the noise), to be multiplied with x [B, ...]."""
    alpha_bar = _like(jnp.asarray(alpha_bar, x.dtype), x)
    return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)


def noised(x: Array, noise: Array, alpha_bar: Array) -> Array:
    """z_t ~ q(z_t | x) for noise ~ N(0, 1) (Ho et al. 2020, equation 4)."""
    a, s = amounts(alpha_bar, x)
    return a * x + s * noise


def velocity(x: Array, noise: Array, alpha_bar: Array) -> Array:
    """What the network has to predict: v = a e - s x."""
    a, s = amounts(alpha_bar, x)
    return a * noise - s * x


def image_and_noise(z: Array, v: Array, alpha_bar: Array) -> tuple[Array, Array]:
    """(x, e) of z and v; z = a x + s e and v = a e - s x is a rotation."""
    a, s = amounts(alpha_bar, z)
    return a * z - s * v, s * z + a * v


def ddim(
    predict: Callable[[Array, Array], Array],
    noise: Array,
    *,
    steps: int,
    eta: float = 0.0,
    keys: Array | None = None,
    limit: float | None = 1.0,
    total: int = STEPS,
) -> Array:
    """Images of noise, by a trained (or ideal) denoiser.

    Source: Song et al. 2021, equation 12, with sigma of equation 16. eta = 0 is deterministic; eta = 1 with
    steps = total is the sampler of Ho et al. 2020. Times are spread evenly over 0..total.

    Args:
      predict: (z [B, ...], t int32 [B]) -> v [B, ...].
      noise: float32 [B, ...], N(0, 1).
      keys: [B], one per image, read where eta > 0: an image does not depend on the others.
      limit: the predicted image is clipped to [-limit, limit] at every step (as Ho et al.); None = not.

    Returns: float32 [B, ...].
    """
    checks.number("steps", steps, low=1, high=total, integer=True)
    checks.number("eta", eta, low=0, high=1)
    if eta > 0 and keys is None:
        raise checks.UserError("eta: above 0 needs a key per image")
    times = np.round(np.linspace(total, 0, steps + 1)).astype(np.int32)
    alpha_bar = cosine(total)
    now, then = alpha_bar[times[:-1]], alpha_bar[times[1:]]
    sigma = eta * np.sqrt((1 - then) / (1 - now)) * np.sqrt(np.maximum(1 - now / then, 0))
    ahead = np.sqrt(np.maximum(1 - then - sigma**2, 0))
    table = {
        name: jnp.asarray(x, jnp.float32)
        for name, x in {"now": now, "image": np.sqrt(then), "ahead": ahead, "sigma": sigma}.items()
    }

    def step(z: Array, row: dict[str, Array]) -> tuple[Array, None]:
        v = predict(z, jnp.full(z.shape[:1], row["t"]))
        x, e = image_and_noise(z, v, row["now"])
        if limit is not None:
            x = jnp.clip(x, -limit, limit)
            a, s = amounts(row["now"], z)
            e = (z - a * x) / s  # the noise that goes with the clipped image
        z = row["image"] * x + row["ahead"] * e
        if eta > 0:
            fresh = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, row["t"]), z.shape[1:]))(keys)
            z = z + row["sigma"] * fresh
        return z, None

    return jax.lax.scan(step, noise, table | {"t": jnp.asarray(times[:-1])})[0]
