"""Layers of the convolutional models, written for loops on a CPU: normalisation, pooling, up-convolution, a block.

A norm layer has 'Norm' in its name, so that FedBN's patterns ('batch_stats/*', '*Norm*') find all of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import conv as convolution

NORMS = ("batch", "group", "none")
GROUPS = 8  # of a GroupNorm, or the most below that divide its channels
EPSILON = 1e-5  # as PyTorch

# He et al. 2015 for what a ReLU follows (PyTorch's default, uniform in +-1/sqrt(fan in), has a sixth of its variance
# and lets the signal fade where there is no norm); variance 1/(fan in) for what none follows. Biases start at 0.
before_relu = nn.initializers.he_normal()
before_output = nn.initializers.lecun_normal()


def check(width: int, classes: int, norm: str, conv: str) -> None:
    """The options that all convolutional models share."""
    checks.number("model.width", width, low=1, integer=True)
    checks.number("model.classes", classes, low=2, integer=True)
    checks.one_of("model.norm", norm, NORMS)
    checks.one_of("model.conv", conv, convolution.RULES)


def conv_of(rule: str) -> Any:
    """linen's Conv over the convolution of this package, under one vmap rule."""
    return functools.partial(convolution.Conv, conv_general_dilated=convolution.BY_RULE[rule])


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of x and of x^2 over the pixels, [N, C] each, in at least float32: one pass over the array."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(wide, (1, 2)), jnp.mean(jnp.square(wide), (1, 2))


class BatchNorm(nn.Module):
    """Normalises channels over the real examples of the batch; running statistics in 'batch_stats'.

    As PyTorch's BatchNorm2d (eps 1e-5; momentum 0.1 there is 0.9 here), but the running variance is the biased one,
    as in linen. Rows with mask 0 are normalised like the others and enter no statistic; a batch without a real row
    uses the running statistics and leaves them as they are.
    """

    momentum: float = 0.9

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None = None) -> jax.Array:
        """x [B, H, W, C], mask [B] or None (all rows are real) -> [B, H, W, C]."""
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels)
        mean, var = running_mean.value, running_var.value
        if train:
            real = jnp.ones(x.shape[:1]) if mask is None else (mask > 0).astype(jnp.float32)
            count = jnp.sum(real)
            share = (real / jnp.maximum(count, 1))[:, None]
            first, second = (jnp.sum(jnp.where(share > 0, share * m, 0), 0) for m in _moments(x))
            mean = jnp.where(count > 0, first, mean)
            var = jnp.where(count > 0, jnp.maximum(second - jnp.square(first), 0), var)
            if not self.is_initializing():
                keep = jnp.where(count > 0, self.momentum, 1.0)
                running_mean.value = (keep * running_mean.value + (1 - keep) * mean).astype(mean.dtype)
                running_var.value = (keep * running_var.value + (1 - keep) * var).astype(var.dtype)
        factor = scale * jax.lax.rsqrt(var + EPSILON)
        return x * factor.astype(x.dtype) + (bias - mean * factor).astype(x.dtype)


class GroupNorm(nn.Module):
    """Normalises each example alone, over pixels and groups of channels (Wu and He 2018); no running statistics.

    8 groups, or the most below 8 that divide the channels.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        groups = max(g for g in range(1, GROUPS + 1) if channels % g == 0)
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        first, second = (jnp.mean(m.reshape(-1, groups, channels // groups), 2) for m in _moments(x))
        inverse = jax.lax.rsqrt(jnp.maximum(second - jnp.square(first), 0) + EPSILON)
        mean, inverse = (jnp.repeat(v, channels // groups, axis=1) for v in (first, inverse))
        factor = (scale * inverse)[:, None, None]
        return x * factor.astype(x.dtype) + (bias - mean[:, None, None] * factor).astype(x.dtype)


def max_pool(x: jax.Array) -> jax.Array:
    """Largest of every 2x2 pixels, [B, H, W, C] -> [B, H/2, W/2, C]; of equal ones each gets a share of the gradient.

    By maximum of slices: the gradient of a window's maximum is a scatter, which is slow on a CPU.
    """
    b, h, w, c = x.shape
    x = x.reshape(b, h // 2, 2, w // 2, 2, c)
    rows = jnp.maximum(x[:, :, 0], x[:, :, 1])
    return jnp.maximum(rows[:, :, :, 0], rows[:, :, :, 1])


class UpConv(nn.Module):
    """Transposed convolution 2x2 of stride 2, as one dot and a pixel shuffle: windows do not overlap.

    Parameters and values are those of linen's ConvTranspose(features, (2, 2), (2, 2)) (lax.conv_transpose): kernel
    [2, 2, in, out], bias [out].
    """

    features: int
    rule: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        # An output pixel sees one input pixel: the fan in is c, where linen would count the window too.
        start = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0, 1))
        kernel = self.param("kernel", start, (2, 2, c, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # lax correlates with the dilated input: the pixel at offset a meets the entry 1 - a of the kernel.
        flat = jnp.transpose(kernel[::-1, ::-1], (2, 0, 1, 3)).reshape(1, 1, c, -1).astype(x.dtype)
        y = convolution.BY_RULE[self.rule](x, flat, (1, 1), "VALID", dimension_numbers=convolution.DIMENSIONS)
        y = jnp.transpose(y.reshape(b, h, w, 2, 2, self.features), (0, 1, 3, 2, 4, 5))
        return y.reshape(b, 2 * h, 2 * w, self.features) + bias.astype(x.dtype)


def normalised(kind: str, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
    """x through a new norm layer of this kind; to be called inside a compact module."""
    if kind == "batch":
        return BatchNorm()(x, train, mask)
    return GroupNorm()(x) if kind == "group" else x


class DoubleConv(nn.Module):
    """Two times (3x3 convolution, norm, ReLU)."""

    features: int
    norm: str
    rule: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        for _ in range(2):
            x = conv_of(self.rule)(self.features, (3, 3), kernel_init=before_relu)(x)
            x = nn.relu(normalised(self.norm, x, train, mask))
        return x
