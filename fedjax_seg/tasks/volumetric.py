"""Segmentation of 3D volumes: trained on patches, evaluated on whole volumes by tiles, scored case by case."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg import models
from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batch, Task, Variables
from fedjax_seg.tasks import tiling, volume_scores
from fedjax_seg.tasks.overlap import Rules
from fedjax_seg.tasks.segmentation import (
    cross_entropy,
    evaluation_logits,
    initial_variables,
    one_hot,
    real_mean,
    soft_dice,
    training_logits,
    voxel_mean,
)

LOSSES = ("cross_entropy", "dice", "dice_ce", "fets_dice")
MAPS = ("truth", "predicted")
TINY = 1e-30  # a probability of 0 (all of a voxel's tiles agree) keeps a finite logarithm


def volumetric(
    model: Mapping[str, Any],
    *,
    loss: str = "dice_ce",
    class_weights: Sequence[float] = (),
    smooth: float = 1.0,
    regions: str = "classes",
    labels: Sequence[int] = (),
    tile: Sequence[int] = (64, 64, 64),
    overlap: float = 0.0,
    blend: str = "uniform",
    tiles_at_once: int = 1,
    surface: bool = True,
    tolerance: float = 1.0,
    hd95: str = "max",
    both_empty: str = "perfect",
    one_empty: str = "diagonal",
) -> Task:
    """Segmentation of volumes that stay on disk (core.types.CaseStore).

    Training batches hold 'x' [B, *patch, channels] (any float), 'y' uint8 [B, *patch] (class ids, 0 = background) and
    'mask' [B]. Evaluation batches hold 'x' [B, *largest, channels] and 'y' uint8 [B, *largest], buffers with the volume
    in their first corner, 'shape' int32 [B, 3] (its extent), 'full' int32 [B, 3] (the shape of the file before it was
    cropped: what lies outside the crop is background, predicted as such; HD95's penalty is the diagonal of it),
    'spacing' float32 [B, 3] in mm, and 'background' float32 [B, channels], what surrounds the volume.

    Args:
      model: slot of the model, {'name': ..., options}, see `segmentation`; with `dropout` > 0 it draws in training.
      loss: 'cross_entropy' (mean over voxels), 'dice' (1 - soft Dice of the foreground), 'dice_ce' (their sum) or
        'fets_dice' (see `fets_dice`).
      class_weights: of 'fets_dice', one per class, scaled to sum 1; () = equal.
      smooth: of 'dice' and 'dice_ce', in voxels; 'fets_dice' has GaNDLF's 1e-7.
      regions: what is scored: 'classes' (every foreground class) or 'brats' (ET, TC, WT).
      labels: the files' values of the classes, which name the soft Dice of each, e.g. (0, 1, 2, 4); () = class ids.
      tile, overlap, blend, tiles_at_once: see tiling.tiled; probabilities are averaged.
      surface, tolerance, hd95, both_empty, one_empty: see `segmentation`.

    Returns: Task. `outputs` (see `case_outputs`) are what `masks` and `reduce` take; `score` and `case_values` take the
      columns that `reduce` makes of them.
    """
    tile, labels = tuple(tile), tuple(int(v) for v in labels)
    _check(loss, smooth, tolerance, hd95, both_empty, one_empty)
    tiling.check(tile, overlap, blend, tiles_at_once)
    module = models.make(**model)
    weights = _weights(class_weights, module.classes, loss)
    how = volume_scores.scoring(
        regions, labels, Rules(module.classes, surface, tolerance, hd95, both_empty, one_empty)
    )  # fmt: skip

    def init(key: Array, batch: Batch) -> Variables:
        what = f"task 'volumetric': model {model['name']!r}"
        return initial_variables(module, key, _in_float32(batch), what)

    def loss_of(variables: Variables, batch: Batch, key: Array) -> tuple[Array, dict[str, Any]]:
        logits, updated = training_logits(module, variables, _in_float32(batch), key)
        value = case_loss(loss, logits, batch["y"], smooth, weights)
        return real_mean(value, batch["mask"]), updated

    def outputs(variables: Variables, batch: Batch) -> dict[str, Array]:
        def predict(x: Array) -> Array:
            return jax.nn.softmax(evaluation_logits(module, variables, x.astype(jnp.float32)))

        def one(case: tuple[Array, ...]) -> dict[str, Array]:
            x, y, shape, fill = case
            options: dict[str, Any] = {"tile": tile, "overlap": overlap, "blend": blend, "at_once": tiles_at_once}
            return case_outputs(tiling.tiled(predict, x, shape, fill=fill, **options), y, shape)

        # One after the other: every case has a number of tiles of its own.
        found = jax.lax.map(one, tuple(batch[name] for name in ("x", "y", "shape", "background")))
        return found | {name: batch[name] for name in ("shape", "full", "spacing")}

    return Task(
        init=init,
        loss=loss_of,
        outputs=outputs,
        score=partial(volume_scores.score, how=how),
        metrics=volume_scores.definitions(how),
        case_values=volume_scores.case_values,
        headline=("dice", *(("hd95",) if surface else ()), "soft_dice", "round_score"),
        paired="dice",
        masks=volume_scores.class_maps,
        reduce=partial(volume_scores.reduce, how=how),
    )


def _in_float32(batch: Batch) -> dict[str, Array]:
    return {**batch, "x": batch["x"].astype(jnp.float32)}


def _check(loss: str, smooth: float, tolerance: float, hd95: str, both_empty: str, one_empty: str) -> None:
    checks.one_of("task.loss", loss, LOSSES)
    checks.number("task.smooth", smooth, above=0)
    checks.number("task.tolerance", tolerance, low=0)
    checks.one_of("task.hd95", hd95, ("max", "pooled"))
    checks.one_of("task.both_empty", both_empty, ("perfect", "undefined"))
    checks.one_of("task.one_empty", one_empty, ("diagonal", "undefined"))


def _weights(given: Sequence[float], classes: int, loss: str) -> tuple[float, ...]:
    """One weight per class with sum 1. Raises: UserError."""
    if not len(given):
        return (1 / classes,) * classes
    if loss != "fets_dice":
        raise checks.UserError(
            f"task.class_weights: given for task.loss={loss!r}, which has none; 'fets_dice' expected"
        )
    if len(given) != classes:
        raise checks.UserError(f"task.class_weights: {len(given)} weights given, {classes} expected, one per class")
    for k, weight in enumerate(given):
        checks.number(f"task.class_weights[{k}]", weight, low=0)
    if not sum(given) > 0:
        raise checks.UserError("task.class_weights: all are 0, a positive one expected")
    return tuple(float(w / sum(given)) for w in given)


def case_loss(loss: str, logits: Array, y: Array, smooth: float, weights: Sequence[float]) -> Array:
    """The loss of every example, float32 [B]; logits [B, *space, classes], y integer [B, *space]."""
    labels = one_hot(y, logits.shape[-1])
    if loss == "fets_dice":
        return fets_dice(jax.nn.softmax(logits), labels, weights)
    value = jnp.zeros(len(logits))
    if loss != "dice":
        value = value + voxel_mean(cross_entropy(logits, labels))
    if loss != "cross_entropy":
        value = value + 1 - soft_dice(jax.nn.softmax(logits), labels, smooth)
    return value


def fets_dice(probability: Array, labels: Array, weights: Sequence[float]) -> Array:
    """sum over all classes of weight * (1 - soft Dice), per example.

    Source: GaNDLF's loss 'dc' as FeTS 2022 Task 1 uses it: (2 sum p t + 1e-7) / (sum p + sum t + 1e-7) with plain sums,
    background included. Deviation: there the weights are the inverse voxel frequencies of one collaborator's training
    cases, scaled to sum 1; here they are given, or equal. Batches there hold one patch; here the loss is that of every
    patch by itself.

    Args:
      probability, labels: [B, *space, classes].
      weights: one per class.

    Returns: float32 [B].
    """
    space = tuple(range(1, probability.ndim - 1))
    t, smooth = labels.astype(probability.dtype), volume_scores.SMOOTH
    both, total = jnp.sum(probability * t, space), jnp.sum(probability, space) + jnp.sum(t, space)
    return jnp.sum(jnp.asarray(weights, jnp.float32) * (1 - (2 * both + smooth) / (total + smooth)), -1)


def case_outputs(probability: Array, y: Array, shape: Array) -> dict[str, Array]:
    """What scoring on the host needs of one case.

    Args:
      probability: [*buffer, classes], 0 outside the volume.
      y: integer [*buffer].
      shape: int32 [axes], extent of the volume.

    Returns:
      entropy: float32 [n], n = the first axis of the buffer: sums over planes of -log(probability of the label).
      soft: float32 [n, classes, 3]: sums over planes of p t, p and t for the soft Dice.
      confusion: int32 [classes, classes]: voxels by true class and predicted class.
      truth, predicted: uint8 [bits, bytes]: the bits of the class ids, lowest first, 8 voxels a byte.
      buffer: int32 [axes], its size.
    """
    *space, classes = probability.shape
    bits = range(max(1, (classes - 1).bit_length()))

    def plane(at: tuple[Array, Array, Array]) -> dict[str, Array]:
        p, y, i = at
        inside = (i < shape[0]) & tiling.outer([(jnp.arange(n) < end)[:, None] for n, end in zip(space[1:], shape[1:])])
        labels = one_hot(y, classes) & inside
        at_label = jnp.sum(jnp.where(labels, p, 0), -1)
        t = labels.astype(p.dtype)
        true = jnp.where(inside[..., 0], y, 0).astype(jnp.uint8)
        guess = jnp.argmax(p, -1).astype(jnp.uint8)
        pairs = jnp.zeros(classes**2, jnp.int32).at[true.ravel().astype(jnp.int32) * classes + guess.ravel()].add(1)
        return {
            "entropy": jnp.sum(jnp.where(inside[..., 0], -jnp.log(jnp.maximum(at_label, TINY)), 0)),
            "soft": jnp.stack([jnp.sum(x, (0, 1)) for x in (p * t, p, t)], -1),
            "confusion": pairs.reshape(classes, classes),
            "truth": true,
            "predicted": guess,
        }

    # Plane by plane: what is computed on the way is as large as the probabilities, several times. The sums of planes
    # meet on the host in float64.
    found = jax.lax.map(plane, (probability, y, jnp.arange(space[0])))
    packed = {name: [jnp.packbits((found[name].ravel() >> b & 1).astype(bool)) for b in bits] for name in MAPS}
    return found | {
        "confusion": jnp.sum(found["confusion"], 0),
        "buffer": jnp.array(space, jnp.int32),
        **{name: jnp.stack(planes) for name, planes in packed.items()},
    }
