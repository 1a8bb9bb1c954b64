"""Layers of the volumetric models, written for loops on a CPU: instance norm, channel dropout, up-sampling.

A norm layer has 'Norm' in its name, so that FedBN's patterns ('batch_stats/*', '*Norm*') find all of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import layers

NORMS = ("instance", "batch", "group", "none")
SLOPE = 0.01  # of the leaky ReLU


class InstanceNorm(nn.Module):
    """Normalises every channel of every example alone; with `tracked`, running statistics in 'batch_stats'.

    As PyTorch's InstanceNorm3d(affine=True): eps 1e-5. tracked is its track_running_stats: training uses the example's
    own statistics and moves the running ones by 0.1 towards their mean over the batch's real examples (the variance
    there is the unbiased one); evaluation uses the running ones. Not tracked: always the example's own.
    Rows with mask 0 enter no running statistic; a batch without a real row leaves them as they are.

    Deviation: a channel of one voxel becomes its bias and moves the running variance towards 0; PyTorch refuses it.
    """

    tracked: bool = True
    momentum: float = 0.9  # what the running statistics keep; PyTorch's momentum is 0.1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None = None) -> jax.Array:
        """x [B, D, H, W, C], mask [B] or None (all rows are real) -> [B, D, H, W, C]."""
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        if self.tracked:
            running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
            running_var = self.variable("batch_stats", "var", jnp.ones, channels)
        if self.tracked and not train:
            mean, var = running_mean.value, running_var.value
        else:
            mean, var = _moments(x)
        if self.tracked and train and not self.is_initializing():
            real = jnp.ones(x.shape[:1]) if mask is None else (mask > 0).astype(jnp.float32)
            count, voxels = jnp.sum(real), x.shape[1] * x.shape[2] * x.shape[3]
            share = (real / jnp.maximum(count, 1))[:, None]
            average = lambda m: jnp.sum(jnp.where(share > 0, share * jax.lax.stop_gradient(m), 0), 0)
            keep = jnp.where(count > 0, self.momentum, 1.0)
            unbiased = average(var) * (voxels / max(voxels - 1, 1))
            running_mean.value = (keep * running_mean.value + (1 - keep) * average(mean)).astype(mean.dtype)
            running_var.value = (keep * running_var.value + (1 - keep) * unbiased).astype(var.dtype)
        factor = scale * jax.lax.rsqrt(var + layers.EPSILON)
        shift = bias - mean * factor
        if factor.ndim == 2:
            factor, shift = factor[:, None, None, None], shift[:, None, None, None]
        return x * factor.astype(x.dtype) + shift.astype(x.dtype)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance over the voxels, [B, C] each, in at least float32: one pass over the array."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = jnp.mean(wide, (1, 2, 3)), jnp.mean(jnp.square(wide), (1, 2, 3))
    return first, jnp.maximum(second - jnp.square(first), 0)


def normalised(kind: str, tracked: bool, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
    """x through a new norm layer of this kind; to be called inside a compact module."""
    if kind == "instance":
        return InstanceNorm(tracked)(x, train, mask)
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])  # the 2D norms only count voxels
    return layers.normalised(kind, flat, train, mask).reshape(x.shape)


def conv_of(rule: str, dtype: Any) -> Any:
    """linen's Conv over the convolution of this package: float32 parameters, computed in `dtype`."""
    return functools.partial(layers.conv_of(rule), dtype=dtype, kernel_init=layers.before_relu)


def leaky_relu(x: jax.Array) -> jax.Array:
    return nn.leaky_relu(x, SLOPE)


class ChannelDropout(nn.Module):
    """Drops whole channels of an example with probability `rate` in training, as PyTorch's Dropout3d.

    Raises: UserError where a rate > 0 meets training without a key.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if not train or self.rate == 0:
            return x
        if not self.has_rng("dropout"):
            raise checks.UserError(
                f"model.dropout={self.rate:g}: training without a random key;"
                " give apply(..., rngs={'dropout': key}), or set model.dropout to 0"
            )
        return nn.Dropout(self.rate, broadcast_dims=(1, 2, 3), deterministic=False)(x)


def line_weights(size: int) -> np.ndarray:
    """Linear interpolation of a line to twice its points, the corners aligned: float32 [2 size, size], rows sum to 1.

    Point i of 2n lies at i (n - 1) / (2n - 1) among the n given ones.
    """
    place = np.arange(2 * size) * (size - 1) / (2 * size - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(size))).astype(np.float32)


def double(x: jax.Array) -> jax.Array:
    """Trilinear interpolation to twice the voxels, corners aligned: [B, D, H, W, C] -> [B, 2D, 2H, 2W, C].

    As PyTorch's interpolate(scale_factor=2, mode='trilinear', align_corners=True). One axis after the other, each a
    product with a small matrix.
    """
    for axis in (1, 2, 3):
        weights = jnp.asarray(line_weights(x.shape[axis]), x.dtype)
        x = jnp.moveaxis(jax.lax.dot_general(weights, x, (((1,), (axis,)), ((), ()))), 0, axis)
    return x
