"""A small residual CNN for classes of whole images."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import layers


class ResidualBlock(nn.Module):
    """relu(x' + norm(conv(relu(norm(conv(x)))))); x' is x, or a strided 1x1 convolution of it where shapes differ."""

    features: int
    stride: int
    norm: str
    rule: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        conv, strides = layers.conv_of(self.rule), (self.stride, self.stride)
        y = conv(self.features, (3, 3), strides, kernel_init=layers.before_relu)(x)
        y = nn.relu(layers.normalised(self.norm, y, train, mask))
        y = conv(self.features, (3, 3), kernel_init=layers.before_relu)(y)
        y = layers.normalised(self.norm, y, train, mask)
        if x.shape != y.shape:
            x = conv(self.features, (1, 1), strides, kernel_init=layers.before_output, name="shortcut")(x)
        return nn.relu(x + y)


class Cnn(nn.Module):
    """[B, H, W, channels] -> logits [B, classes] of any image size. The last layer is 'head'."""

    width: int
    blocks: int
    classes: int
    norm: str
    conv: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """mask [B]: rows with 0 (padding) enter no batch statistic; None: all rows are real."""
        if x.ndim != 4:
            raise checks.UserError(
                f"model 'cnn': an input of shape {x.shape} given, images [B, H, W, channels] expected"
            )
        x = layers.conv_of(self.conv)(self.width, (3, 3), kernel_init=layers.before_relu, name="stem")(x)
        x = nn.relu(layers.normalised(self.norm, x, train, mask))
        for level in range(self.blocks):
            block = ResidualBlock(self.width * 2**level, min(level, 1) + 1, self.norm, self.conv, name=f"block_{level}")
            x = block(x, train, mask)
        return nn.Dense(self.classes, kernel_init=layers.before_output, name="head")(jnp.mean(x, (1, 2)))


def cnn(*, width: int = 16, blocks: int = 3, classes: int = 2, norm: str = "group", conv: str = "auto") -> Cnn:
    """A residual CNN (He et al. 2016, basic blocks): stem, `blocks` blocks, mean over pixels, one dense layer.

    Args:
      width: channels of the stem and the first block; every further block halves the image and doubles the channels.
      norm, conv: as of models.unet.
    """
    layers.check(width, classes, norm, conv)
    checks.number("model.blocks", blocks, low=1, high=8, integer=True)
    return Cnn(width, blocks, classes, norm, conv)
