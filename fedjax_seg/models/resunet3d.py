"""The residual 3D U-Net of the FeTS challenge 2022."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import conv as convolution
from fedjax_seg.models import layers, layers3d

DTYPES = ("float32", "bfloat16")
PADDING = ((1, 1), (1, 1), (1, 1))  # PyTorch's padding=1; at stride 2 linen's 'SAME' would be (0, 1)


class Style(NamedTuple):
    """What all blocks of a network share."""

    norm: str
    tracked: bool
    dropout: float
    dtype: str
    rule: str  # of a convolution under vmap

    def conv(self, features: int, stride: int = 1, **options: Any) -> nn.Module:
        """3x3x3."""
        strides = (stride,) * 3
        return layers3d.conv_of(self.rule, self.dtype)(features, (3, 3, 3), strides, PADDING, **options)

    def active(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Norm, leaky ReLU; to be called inside a compact module."""
        return layers3d.leaky_relu(layers3d.normalised(self.norm, self.tracked, x, train, mask))


class Residual(nn.Module):
    """x + [norm, act, conv, channel dropout, norm, act, conv](x), after a convolution where one is asked for.

    Attributes:
      first: 'none'; 'conv' (the first block); 'active' (the decoder: norm, act, conv).
      dropout: whether the block has dropout.
    """

    features: int
    style: Style
    first: str = "none"
    dropout: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        style = self.style
        if self.first == "active":
            x = style.active(x, train, mask)
        if self.first != "none":
            x = style.conv(self.features)(x)
        y = style.conv(self.features)(style.active(x, train, mask))
        if self.dropout:
            y = layers3d.ChannelDropout(style.dropout)(y, train)
        return x + style.conv(self.features)(style.active(y, train, mask))


class Shrink(nn.Module):
    """Convolution of stride 2, norm, act."""

    features: int
    style: Style

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        return self.style.active(self.style.conv(self.features, 2)(x), train, mask)


class Enlarge(nn.Module):
    """Trilinear interpolation to twice the size and a 1x1x1 convolution.

    The convolution comes first: both are linear, one acts on channels, the other on voxels with weights that sum to 1,
    so that the result is the same (up to rounding) for an eighth of the work.
    """

    features: int
    style: Style

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return layers3d.double(layers3d.conv_of(self.style.rule, self.style.dtype)(self.features, (1, 1, 1))(x))


class ResUnet3d(nn.Module):
    """[B, D, H, W, channels] -> logits float32 [B, D, H, W, classes]; sizes are multiples of 2^depth.

    The last layer is 'head'. Training with dropout > 0 needs apply(..., rngs={'dropout': key}).
    """

    width: int
    depth: int
    classes: int
    norm: str
    tracked: bool
    dropout: float
    dtype: str
    conv: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """mask [B]: rows with 0 (padding) enter no running statistic; None: all rows are real."""
        _check_size(x.shape, self.depth)
        style = Style(self.norm, self.tracked, self.dropout, self.dtype, self.conv)
        block = lambda features, name, **how: Residual(features, style, name=name, **how)
        x = block(self.width, "down_0", first="conv")(x.astype(self.dtype), train, mask)
        skips = []
        for level in range(1, self.depth + 1):
            skips.append(x)
            features = self.width * 2**level
            x = Shrink(features, style, name=f"shrink_{level}")(x, train, mask)
            x = block(features, f"down_{level}" if level < self.depth else "bottleneck")(x, train, mask)
        for level in reversed(range(self.depth)):
            x = Enlarge(self.width * 2**level, style, name=f"enlarge_{level}")(x)
            x = jnp.concatenate([x, skips[level]], -1)
            features = self.width * 2 ** max(level, 1)  # the last one keeps both halves
            x = block(features, f"up_{level}", first="active", dropout=False)(x, train, mask)
        x = style.active(x, train, mask)
        head = style.conv(self.classes, name="head", kernel_init=layers.before_output)
        return head(x).astype(jnp.promote_types(self.dtype, jnp.float32))


def _check_size(shape: tuple[int, ...], depth: int) -> None:
    if len(shape) != 5:
        raise checks.UserError(
            f"model 'resunet3d': an input of shape {shape} given, volumes [B, D, H, W, channels] expected"
        )
    multiple, size = 2**depth, shape[1:4]
    if any(n % multiple for n in size):
        text = lambda sizes: " x ".join(map(str, sizes))
        raise checks.UserError(
            f"model 'resunet3d': volumes of {text(size)} given, multiples of {multiple} expected"
            f" (2^depth, model.depth={depth}); pad or crop them to {text(n + -n % multiple for n in size)},"
            " or lower model.depth"
        )


def resunet3d(
    *,
    width: int = 32,
    depth: int = 4,
    classes: int = 4,
    norm: str = "instance",
    tracked: bool = True,
    dropout: float = 0.5,
    dtype: str = "float32",
    conv: str = "auto",
) -> ResUnet3d:
    """A residual U-Net with `depth` levels below the first, 33,377,028 parameters for 4 channels as it stands.

    Source: FeTS challenge 2022, plan.yaml ('resunet' of GaNDLF: base 32, instance norm with running statistics, leaky
    ReLU 0.01, channel dropout 0.5 in the encoder). Deviations: He's initialisation (PyTorch's default there); the 1x1x1
    convolution before the interpolation instead of after it, the same function.

    Args:
      width: channels of the first block; doubled at every level.
      norm: 'instance'; 'batch'; 'group' (8 groups or the most that divide; as DP-SGD needs); 'none'.
      tracked: of the instance norm: evaluation uses running statistics; False: the volume's own, and no 'batch_stats'.
      dropout: probability of a channel; 0 needs no random key in training.
      dtype: 'float32' | 'bfloat16', of the computation. Parameters, statistics and logits are float32.
      conv: what vmap does to convolutions (models/conv.py): 'auto' | 'loop' | 'grouped'; changes no result.
    """
    checks.number("model.width", width, low=1, integer=True)
    checks.number("model.depth", depth, low=1, high=8, integer=True)
    checks.number("model.classes", classes, low=2, integer=True)
    checks.one_of("model.norm", norm, layers3d.NORMS)
    checks.one_of("model.tracked", tracked, (True, False))
    checks.number("model.dropout", dropout, low=0, high=0.99)
    checks.one_of("model.dtype", dtype, DTYPES)
    checks.one_of("model.conv", conv, convolution.RULES)
    return ResUnet3d(width, depth, classes, norm, tracked, float(dropout), dtype, conv)
