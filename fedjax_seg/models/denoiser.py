"""The network of the diffusion generator: a small U-Net that is told the mask, the noise level and the client.

Not in MODELS: no federation trains it; synthesis/diffusion_training.py does.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import layers

FREQUENCIES = 32  # of the time embedding, each as a sine and a cosine
_SLOWEST = 1e4


class FilmBlock(nn.Module):
    """Residual block of two 3x3 convolutions, whose second norm is scaled and shifted by the condition.

    Source: Dhariwal and Nichol 2021, "adaptive group normalization" (appendix A); FiLM, Perez et al. 2018. The last
    convolution starts at zero: a new block is the identity (or the 1x1 convolution where channels change).
    """

    features: int
    conv: str

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [B, H, W, C], condition [B, E] -> [B, H, W, features]."""
        conv = layers.conv_of(self.conv)
        h = conv(self.features, (3, 3), kernel_init=layers.before_relu)(nn.silu(layers.GroupNorm()(x)))
        film = nn.Dense(2 * self.features, kernel_init=nn.initializers.zeros)(condition)
        scale, shift = jnp.split(film[:, None, None], 2, axis=-1)
        h = nn.silu(layers.GroupNorm()(h) * (1 + scale) + shift)
        h = conv(self.features, (3, 3), kernel_init=nn.initializers.zeros)(h)
        if x.shape[-1] != self.features:
            x = conv(self.features, (1, 1), use_bias=False, kernel_init=layers.before_output)(x)
        return x + h


class Denoiser(nn.Module):
    """(noisy image, mask, time, client) -> v [B, H, W, 1]; H and W are multiples of patch * 2^depth."""

    width: int
    depth: int
    patch: int
    clients: int
    conv: str

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, time: jax.Array, client: jax.Array) -> jax.Array:
        """x, mask [B, H, W, 1] in about [-1, 1]; time [B] in [0, 1]; client int [B]."""
        _check_size(x.shape, self.patch * 2**self.depth)
        condition = self._condition(time, client)
        block = lambda level, name: FilmBlock(self.width * 2**level, self.conv, name=name)
        h = _to_depth(jnp.concatenate([x, mask], -1), self.patch)
        h = layers.conv_of(self.conv)(self.width, (3, 3), kernel_init=layers.before_output, name="stem")(h)
        skips = []
        for level in range(self.depth):
            h = block(level, f"down_{level}")(h, condition)
            skips.append(h)
            h = _halved(h)
        for i in range(2):
            h = block(self.depth, f"middle_{i}")(h, condition)
        for level in reversed(range(self.depth)):
            h = layers.UpConv(self.width * 2**level, self.conv, name=f"enlarge_{level}")(h)
            h = block(level, f"up_{level}")(jnp.concatenate([skips[level], h], -1), condition)
        h = nn.silu(layers.GroupNorm(name="last_norm")(h))
        head = layers.conv_of(self.conv)(self.patch**2, (3, 3), kernel_init=nn.initializers.zeros, name="head")
        return _to_space(head(h), self.patch)

    def _condition(self, time: jax.Array, client: jax.Array) -> jax.Array:
        """[B, 4 width]: sines and cosines of the time (Vaswani et al. 2017) and a row per client, in two layers."""
        size = 4 * self.width
        speeds = jnp.exp(-jnp.log(_SLOWEST) * jnp.arange(FREQUENCIES) / FREQUENCIES)
        angles = 1000.0 * time[:, None] * speeds
        told = nn.Dense(size, name="time_in")(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        # As a product: the gradient of a gather is a scatter, which is slow in loops on a CPU.
        told += nn.Dense(size, use_bias=False, name="client_in")(jax.nn.one_hot(client, self.clients))
        return nn.silu(nn.Dense(size, name="condition")(nn.silu(told)))


def _to_depth(x: jax.Array, patch: int) -> jax.Array:
    """[B, H, W, C] -> [B, H/patch, W/patch, patch^2 C]."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c)
    return jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(b, h // patch, w // patch, -1)


def _to_space(x: jax.Array, patch: int) -> jax.Array:
    """[B, H, W, patch^2] -> [B, H patch, W patch, 1]."""
    b, h, w, _ = x.shape
    x = jnp.transpose(x.reshape(b, h, w, patch, patch), (0, 1, 3, 2, 4))
    return x.reshape(b, h * patch, w * patch, 1)


def _halved(x: jax.Array) -> jax.Array:
    """Mean of every 2x2 pixels."""
    b, h, w, c = x.shape
    return jnp.mean(x.reshape(b, h // 2, 2, w // 2, 2, c), (2, 4))


def _check_size(shape: tuple[int, ...], multiple: int) -> None:
    if shape[1] % multiple or shape[2] % multiple:
        raise checks.UserError(
            f"size: images of {shape[1]} x {shape[2]} given, multiples of {multiple} expected (patch * 2^depth)"
        )


def denoiser(*, width: int = 16, depth: int = 3, patch: int = 1, clients: int = 1, conv: str = "auto") -> Denoiser:
    """A U-Net with FiLM blocks: `depth` times halved, one block per level and direction, two in the middle.

    Source: Ho et al. 2020 (U-Net, group norm, sine embedding) and Dhariwal and Nichol 2021 (adaptive group norm), much
    smaller and without attention. The mask is a second input channel, the client a row added to the time embedding.
    With patch 2, pixels are first gathered into patches, so that the full size costs a quarter (Hoogeboom et al. 2023,
    "simple diffusion").

    Args:
      width: channels at the first level; doubled at every level.
      patch: pixels per side that become channels of one; 1 = none.
      clients: how many clients it can be told of.
      conv: what vmap does to convolutions (models/conv.py); changes no result.
    """
    checks.number("width", width, low=1, high=512, integer=True)
    checks.number("depth", depth, low=1, high=6, integer=True)
    checks.number("patch", patch, low=1, high=8, integer=True)
    checks.number("clients", clients, low=1, integer=True)
    checks.one_of("conv", conv, layers.convolution.RULES)
    return Denoiser(width, depth, patch, clients, conv)
