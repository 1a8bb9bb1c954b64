"""The 2D U-Net of FedOnco-Bench."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models import layers


class Unet(nn.Module):
    """[B, H, W, channels] -> logits [B, H, W, classes]; H and W are multiples of 2^depth. The last layer is 'head'."""

    width: int
    depth: int
    classes: int
    norm: str
    conv: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """mask [B]: rows with 0 (padding) enter no batch statistic; None: all rows are real."""
        _check_size(x.shape, self.depth)
        double = lambda level, name: layers.DoubleConv(self.width * 2**level, self.norm, self.conv, name=name)
        skips = []
        for level in range(self.depth):
            skips.append(double(level, f"down_{level}")(x, train, mask))
            x = layers.max_pool(skips[-1])
        x = double(self.depth, "bottleneck")(x, train, mask)
        for level in reversed(range(self.depth)):
            x = layers.UpConv(self.width * 2**level, self.conv, name=f"enlarge_{level}")(x)
            x = double(level, f"up_{level}")(jnp.concatenate([skips[level], x], -1), train, mask)
        return layers.conv_of(self.conv)(self.classes, (1, 1), kernel_init=layers.before_output, name="head")(x)


def _check_size(shape: tuple[int, ...], depth: int) -> None:
    if len(shape) != 4:
        raise checks.UserError(f"model 'unet': an input of shape {shape} given, images [B, H, W, channels] expected")
    multiple = 2**depth
    if shape[1] % multiple or shape[2] % multiple:
        fit = [n - n % -multiple if n % multiple else n for n in shape[1:3]]
        raise checks.UserError(
            f"model 'unet': images of {shape[1]} x {shape[2]} given, multiples of {multiple} expected"
            f" (2^depth, model.depth={depth}); pad or resize them to {fit[0]} x {fit[1]}, or lower model.depth"
        )


def unet(*, width: int = 52, depth: int = 2, classes: int = 2, norm: str = "batch", conv: str = "auto") -> Unet:
    """A U-Net with `depth` down and up blocks: two 3x3 convolutions each, 2x2 max pooling, 2x2 transposed convolutions.

    Source: FedOnco-Bench section 3 ("two down and two up blocks, about 1.2 M parameters"; the width is not given, 52
    makes 1,231,466 for one channel and two classes); Ronneberger et al. 2015. Deviations from the latter: convolutions
    keep the size, and layers are normalised.

    Args:
      width: channels of the first block; doubled at every level.
      norm: 'batch'; 'group' (8 groups or the most that divide; each example alone, as DP-SGD needs); 'none'.
      conv: what vmap does to convolutions (models/conv.py): 'auto' | 'loop' | 'grouped'; changes no result.
    """
    layers.check(width, classes, norm, conv)
    checks.number("model.depth", depth, low=1, high=8, integer=True)
    return Unet(width, depth, classes, norm, conv)
