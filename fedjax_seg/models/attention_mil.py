"""Attention-based multiple instance learning: one label for a bag of feature vectors (a whole slide)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_seg.core import checks
from fedjax_seg.models.layers import before_output, before_relu


def bag_weights(scores: jax.Array, instances: jax.Array | None) -> jax.Array:
    """Softmax over the real instances of every bag.

    Args:
      scores: [B, n].
      instances: int [B], the first so many of a row are real; None = all are.

    Returns: [B, n], rows sum to 1; exactly 0 at padding, and a row of zeros where no instance is real. Gradients are
      finite everywhere.
    """
    if instances is None:
        return jax.nn.softmax(scores, axis=-1)
    real = jnp.arange(scores.shape[-1]) < instances[:, None]
    low = jnp.finfo(scores.dtype).min
    scores = jnp.where(real, scores, low)  # padding decides neither the largest score nor the sum
    shifted = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(real, jnp.exp(shifted), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


class AttentionMil(nn.Module):
    """[B, n, d] -> logits [B, classes]; the order of a bag's instances does not matter. The last layer is 'head'.

    The weights of the instances [B, n] are kept as 'intermediates/weights': ask for them by
    `apply(..., mutable=['intermediates'])`.
    """

    hidden: int
    attention: int
    gated: bool
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, instances: jax.Array | None = None) -> jax.Array:
        """instances: int [B], how many rows of each bag are real, the first ones; None: all. 0: a row of padding."""
        if x.ndim != 3:
            raise checks.UserError(
                f"model 'attention_mil': an input of shape {x.shape} given, bags [B, instances, features] expected"
            )
        h = nn.relu(nn.Dense(self.hidden, kernel_init=before_relu, name="embedding")(x))
        a = nn.tanh(nn.Dense(self.attention, use_bias=False, kernel_init=before_output, name="attention")(h))
        if self.gated:
            a = a * nn.sigmoid(nn.Dense(self.attention, use_bias=False, kernel_init=before_output, name="gate")(h))
        scores = nn.Dense(1, use_bias=False, kernel_init=before_output, name="score")(a)[..., 0]
        weights = bag_weights(scores, instances)
        self.sow("intermediates", "weights", weights, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        z = jnp.einsum("bn,bnh->bh", weights, h)
        return nn.Dense(self.classes, kernel_init=before_output, name="head")(z)


def attention_mil(*, hidden: int = 128, attention: int = 64, gated: bool = True, classes: int = 2) -> AttentionMil:
    """Embedding, attention over the instances, their weighted mean, one dense layer.

    Source: Ilse, Tomczak, Welling 2018, Attention-based Deep Multiple Instance Learning: z = sum_k a_k h_k (equation
    7); a_k = softmax_k(w^T tanh(V h_k)) (8), gated: w^T (tanh(V h_k) * sigmoid(U h_k)) (9). V, U and w have no biases,
    as printed. Deviation: a softmax over `classes` in the place of the paper's Bernoulli.

    Args:
      hidden: width of h, one dense layer with ReLU on the features of an instance.
      attention: rows of V and U.
      gated: equation 9 instead of 8.
    """
    for what, value in (("hidden", hidden), ("attention", attention)):
        checks.number(f"model.{what}", value, low=1, integer=True)
    checks.number("model.classes", classes, low=2, integer=True)
    checks.one_of("model.gated", gated, (True, False))
    return AttentionMil(hidden, attention, gated, classes)
