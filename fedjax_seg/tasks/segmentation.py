"""Segmentation: cross entropy and soft Dice, and per-case outputs small enough for a whole test set."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg import models
from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batch, Task, Variables
from fedjax_seg.tasks import overlap

BAND = 2  # voxels on either side of the label's border whose loss is the boundary loss
TINY = 1e-8  # keeps the logarithm of a loss of 0 finite


def segmentation(
    model: Mapping[str, Any],
    *,
    loss: str = "cross_entropy",
    smooth: float = 1.0,
    surface: bool = True,
    tolerance: float = 1.0,
    hd95: str = "max",
    both_empty: str = "perfect",
    one_empty: str = "diagonal",
) -> Task:
    """Segmentation of images or volumes.

    Batches hold 'x' [B, *space, channels], 'y' integer [B, *space] (0 = background), 'mask' [B] and, where known,
    'spacing' [B, axes] (mm per voxel, in the order of the axes).

    Args:
      model: slot of the model, {'name': ..., options}; its module has `classes` and gives logits [B, *space, classes].
        A module whose __call__ takes `mask` is told which examples of a training batch are real.
      loss: 'cross_entropy' (mean over voxels), 'dice' (1 - soft Dice, see `soft_dice`) or 'both', their sum.
      smooth: voxels added to both sides of the soft Dice's fraction.
      surface: whether HD95 and NSD are computed; False saves their time on the host.
      tolerance: of NSD, in mm.
      hd95: 'max' of the two directed percentiles or 'pooled'.
      both_empty: score where truth and prediction are empty, 'perfect' or 'undefined'.
      one_empty: HD95 where one of them is, the 'diagonal' of the image or 'undefined'.

    Returns: Task; `outputs` gives 'loss' [B] (cross entropy), 'counts' int32 [B, classes - 1, 3], 'shape' int32
      [B, axes], 'spacing' where known, and with `surface` 'predicted' and 'truth', uint8 [B, classes - 1, bytes], the
      masks of the foreground classes with 8 voxels a byte.
    """
    checks.one_of("task.loss", loss, ("cross_entropy", "dice", "both"))
    checks.number("task.smooth", smooth, above=0)
    checks.number("task.tolerance", tolerance, low=0)
    checks.one_of("task.hd95", hd95, ("max", "pooled"))
    checks.one_of("task.both_empty", both_empty, ("perfect", "undefined"))
    checks.one_of("task.one_empty", one_empty, ("diagonal", "undefined"))
    module = models.make(**model)
    rules = overlap.Rules(module.classes, surface, tolerance, hd95, both_empty, one_empty)
    apply, look = partial(training_logits, module), partial(evaluation_logits, module)

    def init(key: Array, batch: Batch) -> Variables:
        return initial_variables(module, key, batch, f"task 'segmentation': model {model['name']!r}")

    def loss_of(variables: Variables, batch: Batch, key: Array) -> tuple[Array, dict[str, Any]]:
        logits, updated = apply(variables, batch, key)
        labels = one_hot(batch["y"], module.classes)
        value = jnp.zeros(len(logits))
        if loss != "dice":
            value = value + voxel_mean(cross_entropy(logits, labels))
        if loss != "cross_entropy":
            value = value + 1 - soft_dice(jax.nn.softmax(logits), labels, smooth)
        return real_mean(value, batch["mask"]), updated

    def outputs(variables: Variables, batch: Batch) -> dict[str, Array]:
        return case_outputs(look(variables, batch["x"]), batch, surface)

    def evidence(variables: Variables, batch: Batch) -> dict[str, Array]:
        return features(look(variables, batch["x"]), batch["y"], smooth)

    return Task(
        init=init,
        loss=loss_of,
        outputs=outputs,
        score=partial(overlap.rows, rules=rules),
        metrics=overlap.definitions(rules),
        case_values=partial(overlap.case_table, rules=rules),
        headline=("dice", "cross_entropy", *(("hd95",) if surface else ())),
        paired="dice",
        evidence=evidence,
        masks=overlap.label_maps if surface else None,
    )


def initial_variables(module: Any, key: Array, batch: Batch, what: str) -> Variables:
    """The module's variables. Raises: UserError where its logits are not those of the labels' voxels."""
    logits, variables = module.init_with_output(key, batch["x"], train=False)
    if logits.shape[:-1] != batch["y"].shape:
        raise checks.UserError(
            f"{what} gives logits {logits.shape} for labels "
            f"{batch['y'].shape}; a model with logits per voxel, and masks as labels expected"
        )
    return variables


def training_logits(module: Any, variables: Variables, batch: Batch, key: Array) -> tuple[Array, dict[str, Any]]:
    """float32 logits of a training batch, and the collections that it has updated ({} where there are none).

    A module whose __call__ takes `mask` is told which examples are real; one with `dropout` > 0 draws from `key`.
    """
    told = "mask" in inspect.signature(type(module).__call__).parameters
    options: dict[str, Any] = {"mask": batch["mask"]} if told else {}
    if getattr(module, "dropout", 0) > 0:
        options["rngs"] = {"dropout": key}
    mutable = [name for name in variables if name != "params"]
    if not mutable:
        return module.apply(variables, batch["x"], train=True, **options).astype(jnp.float32), {}
    logits, updated = module.apply(variables, batch["x"], train=True, mutable=mutable, **options)
    return logits.astype(jnp.float32), updated


def evaluation_logits(module: Any, variables: Variables, x: Array) -> Array:
    """float32 [B, *space, classes]."""
    return module.apply(variables, x, train=False).astype(jnp.float32)


def real_mean(values: Array, mask: Array) -> Array:
    """The mean of values [B] over the examples with mask 1; 0 where there are none."""
    mask = mask.astype(jnp.float32)
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def one_hot(y: Array, classes: int) -> Array:
    """bool [B, *space, classes]. A comparison: a gather of the label's logit would be a scatter in the gradient."""
    return y[..., None].astype(jnp.int32) == jnp.arange(classes)


def voxel_mean(x: Array) -> Array:
    """[B, *space] -> [B]."""
    return x.mean(tuple(range(1, x.ndim)))


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax(logits) at the label of every voxel; both [B, *space, classes], result [B, *space]."""
    return jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(labels, logits, 0), -1)


def soft_dice(probability: Array, labels: Array, smooth: float) -> Array:
    """(2 sum p t + smooth) / (sum p + sum t + smooth) per example and foreground class, mean over these classes.

    Source: V-Net (Milletari et al. 2016), with plain sums in the denominator. `smooth` keeps value and gradient finite
    on empty masks and makes an empty truth with an empty prediction 1.

    Args:
      probability, labels: [B, *space, classes]; class 0 is left out.
      smooth: voxels, > 0.

    Returns: float32 [B].
    """
    space = tuple(range(1, probability.ndim - 1))
    p, t = probability[..., 1:], labels[..., 1:].astype(probability.dtype)
    both, total = jnp.sum(p * t, space), jnp.sum(p, space) + jnp.sum(t, space)
    return jnp.mean((2 * both + smooth) / (total + smooth), -1)


def case_outputs(logits: Array, batch: Batch, masks: bool) -> dict[str, Array]:
    """What scoring on the host needs of every case, see `segmentation`."""
    *_, classes = logits.shape
    space = logits.shape[1:-1]
    labels = one_hot(batch["y"], classes)
    guess = one_hot(jnp.argmax(logits, -1), classes)
    planes = [jnp.moveaxis(m.reshape(len(m), -1, classes)[..., 1:], 1, 2) for m in (guess, labels)]  # [B, planes, V]
    predicted, truth = planes
    counts = [jnp.sum(m, -1, dtype=jnp.int32) for m in (predicted & truth, predicted & ~truth, truth & ~predicted)]
    result = {
        "loss": voxel_mean(cross_entropy(logits, labels)),
        "counts": jnp.stack(counts, -1),
        "shape": jnp.broadcast_to(jnp.array(space, jnp.int32), (len(logits), len(space))),
    }
    if masks:
        result |= {"predicted": jnp.packbits(predicted, axis=-1), "truth": jnp.packbits(truth, axis=-1)}
    return result | ({"spacing": batch["spacing"]} if "spacing" in batch else {})


def features(logits: Array, y: Array, smooth: float) -> dict[str, Array]:
    """What an attacker with the predicted probabilities and the label measures on every case; float32 [B] each.

    Source: FedOnco-Bench's attack features: log loss, Dice, boundary loss, confidence. Both losses are given in
    logarithms, which are nearly normal over cases where the losses themselves are heavily skewed.

    Returns:
      log_loss: log of the mean cross entropy over voxels.
      dice: soft Dice.
      boundary_loss: log of the mean cross entropy within 2 voxels (in the maximum norm) of a change of label; of the
        whole image where its label is constant.
      confidence: mean over voxels of the largest probability.
    """
    labels, probability = one_hot(y, logits.shape[-1]), jax.nn.softmax(logits)
    entropy = cross_entropy(logits, labels)
    band = near_border(y).astype(entropy.dtype)
    space = tuple(range(1, y.ndim))
    inside = jnp.sum(band, space)
    mean, near = entropy.mean(space), jnp.sum(entropy * band, space) / jnp.maximum(inside, 1)
    return {
        "log_loss": jnp.log(mean + TINY),
        "dice": soft_dice(probability, labels, smooth),
        "boundary_loss": jnp.log(jnp.where(inside > 0, near, mean) + TINY),
        "confidence": voxel_mean(probability.max(-1)),
    }


def near_border(y: Array) -> Array:
    """bool [B, *space]: voxels with two different labels within BAND voxels of them, in the maximum norm."""
    low = high = y.astype(jnp.int32)
    for axis in range(1, y.ndim):
        low, high = window(low, axis, jnp.minimum), window(high, axis, jnp.maximum)
    return low != high


def window(x: Array, axis: int, choose: Any) -> Array:
    """The minimum or maximum of the 2 BAND + 1 voxels around every voxel along an axis; shifts, which compile small."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (BAND, BAND)
    wide, result = jnp.pad(x, pad, mode="edge"), x
    for shift in range(2 * BAND + 1):
        result = choose(result, jax.lax.slice_in_dim(wide, shift, shift + x.shape[axis], axis=axis))
    return result
