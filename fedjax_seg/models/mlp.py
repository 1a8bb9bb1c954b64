"""A multi-layer perceptron with LayerNorm, as FedHAvg uses on connectomes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks


def torch_uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """PyTorch's default weight of a linear layer: uniform in +-1/sqrt(fan_in). shape = [fan_in, fan_out]."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Mlp(nn.Module):
    """hidden x (Dense, LayerNorm, activation), then Dense to the classes; input [B, ...] is flattened, output logits.

    Weights and biases start as PyTorch's (uniform in +-1/sqrt(fan_in)), which the released FedHAvg code relies on.
    """

    hidden: tuple[int, ...]
    classes: int
    norm: bool
    activation: str

    @property
    def linear_input(self) -> str:
        """Path of the kernel that the flattened input meets (see core.types.Task)."""
        return "params/Dense_0/kernel"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = self._dense(x, width)
            if self.norm:
                x = nn.LayerNorm(epsilon=1e-5)(x)
            x = getattr(nn, self.activation)(x)
        return self._dense(x, self.classes)

    def _dense(self, x: jax.Array, width: int) -> jax.Array:
        bound = x.shape[-1] ** -0.5

        def bias(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return nn.Dense(width, kernel_init=torch_uniform, bias_init=bias)(x)


def mlp(
    *, hidden: tuple[int, ...] = (1024, 256, 64), classes: int = 2, norm: bool = True, activation: str = "relu"
) -> Mlp:
    """The MLP of FedHAvg: d-1024-256-64-2 with LayerNorm and ReLU; 7,112,770 parameters for d = 6,670.

    Source: FedHAvg section 4.1; order of the layers and initialisation: notes on the released code (models.py).
    """
    for width in hidden:
        checks.number("model.hidden", width, low=1, integer=True)
    checks.number("model.classes", classes, low=2, integer=True)
    checks.one_of("model.activation", activation, ("relu", "gelu", "tanh", "silu", "elu", "leaky_relu"))
    return Mlp(tuple(hidden), classes, norm, activation)
