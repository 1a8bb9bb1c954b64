"""Classification of whole cases: cross entropy, probabilities, and accuracy, F1, AUC, ... per site."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import metrics as sklearn_metrics

from fedjax_seg import models
from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batch, Task, Variables
from fedjax_seg.tasks import classification_intervals

BINARY = {
    "accuracy": ("max", "share of cases whose most probable class is the label"),
    "f1": ("max", "F1 of class 1, 0 where undefined (scikit-learn f1_score, zero_division=0)"),
    "auc": ("max", "area under the ROC curve of the probability of class 1; n/a where only one class is present"),
    "sensitivity": ("max", "recall of class 1; n/a without a case of class 1"),
    "specificity": ("max", "recall of class 0; n/a without a case of class 0"),
    "balanced_accuracy": ("max", "mean of sensitivity and specificity; n/a where either is"),
    "cross_entropy": ("min", "mean negative log probability of the label"),
    "ece": ("min", "expected calibration error of the top probability, 10 equal-width bins"),
}
HEADLINE = ("accuracy", "f1", "auc")
MULTI = {name: BINARY[name] for name in ("accuracy", "cross_entropy", "ece")} | {
    "f1": ("max", "macro F1 over the classes that occur, in labels or predictions (scikit-learn f1_score)"),
    "auc": ("max", "macro one-vs-rest area under the ROC curve; n/a unless all classes are present"),
    "balanced_accuracy": ("max", "mean recall over the classes that are present; n/a where fewer than two are"),
}


def classification(model: Mapping[str, Any], *, double_softmax: bool = False) -> Task:
    """Softmax classification; batches hold 'x' [B, ...], 'y' int32 [B], 'mask' [B].

    Where 'x' is a bag of instances, padded to a common number, a batch also holds 'instances' int [B], how many are
    real; the model is then called with `instances=` as well.

    Args:
      model: slot of the model, {'name': ..., options}. One that does not fit the batches is a UserError of `init`.
      double_softmax: the released FedHAvg code ends its model in a softmax and applies cross entropy, which takes a
        softmax of its own, to the probabilities. True does the same: the loss is bounded below by
        log(1 + (classes - 1)/e) and its gradients are small. Predictions are unchanged (one softmax).

    Returns: Task; `outputs` gives 'probability' [B, classes], 'loss' [B] (plain cross entropy), 'label' [B].
    """
    module = models.make(**model)
    classes = module.classes

    def bags(batch: Batch) -> dict[str, Array]:
        return {"instances": batch["instances"]} if "instances" in batch else {}

    def init(key: Array, batch: Batch) -> Variables:
        if "instances" in batch and "instances" not in checks.parameters(type(module).__call__):
            raise checks.UserError(
                f"model {model['name']!r} given with bags of instances [n, d]; 'attention_mil' expected"
                " (--config.model.name)"
            )
        logits, variables = module.init_with_output(key, batch["x"], **bags(batch))
        if logits.shape != (len(batch["x"]), classes):
            raise checks.UserError(
                f"model {model['name']!r}: an output of shape {logits.shape} given, one label of {classes} per case"
                f" {(len(batch['x']), classes)} expected; take 'cnn' or 'mlp' (--config.model.name)"
            )
        return variables

    def logits_of(variables: Variables, batch: Batch, train: bool) -> tuple[Array, dict[str, Any]]:
        mutable = [name for name in variables if name != "params"] if train else []
        if mutable:
            return module.apply(variables, batch["x"], train=True, mutable=mutable, **bags(batch))
        return module.apply(variables, batch["x"], train=False, **bags(batch)), {}

    def cross_entropy(logits: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]

    def loss(variables: Variables, batch: Batch, key: Array) -> tuple[Array, dict[str, Any]]:
        logits, updated = logits_of(variables, batch, True)
        if double_softmax:
            logits = jax.nn.softmax(logits)
        mask = batch["mask"].astype(logits.dtype)
        total = jnp.sum(cross_entropy(logits, batch["y"]) * mask)
        return total / jnp.maximum(jnp.sum(mask), 1), updated

    def outputs(variables: Variables, batch: Batch) -> dict[str, Array]:
        logits, _ = logits_of(variables, batch, False)
        return {
            "probability": jax.nn.softmax(logits),
            "loss": cross_entropy(logits, batch["y"]),
            "label": batch["y"],
        }

    def evidence(variables: Variables, batch: Batch) -> dict[str, Array]:
        logits, _ = logits_of(variables, batch, False)
        probability = jax.nn.softmax(logits)
        return {
            "log_loss": jnp.log(cross_entropy(logits, batch["y"]) + 1e-8),
            "confidence": jnp.max(probability, -1),
            "entropy": jnp.sum(jax.scipy.special.entr(probability), -1),
        }

    return Task(
        init,
        loss,
        outputs,
        score,
        BINARY if classes == 2 else MULTI,
        linear_input=getattr(module, "linear_input", ""),
        case_values=case_values,
        headline=HEADLINE,
        paired="correct",
        evidence=evidence,
        intervals=intervals,
        confusion=confusion,
    )


def case_values(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of per_case.csv, [n] each: label, probability (of class 1 where there are two, else of the predicted
    class), predicted, correct, loss; for more than two classes also p_0, p_1, ..., the probability of each, from which
    every metric can be computed again. Arguments as for `score`."""
    probability, label = np.asarray(outputs["probability"])[cases], np.asarray(outputs["label"])[cases].astype(int)
    predicted = probability.argmax(1)
    two = probability.shape[1] == 2
    shown = np.ones_like(predicted) if two else predicted
    return {
        "label": label,
        "probability": probability[np.arange(len(cases)), shown],
        "predicted": predicted,
        "correct": (predicted == label).astype(int),
        "loss": np.asarray(outputs["loss"])[cases],
        **({} if two else {f"p_{c}": column for c, column in enumerate(probability.T)}),
    }


def confusion(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> np.ndarray:
    """int [classes (truth), classes (predicted)], numbers of cases. Arguments as for `score`."""
    probability, label = np.asarray(outputs["probability"])[cases], np.asarray(outputs["label"])[cases].astype(int)
    classes = probability.shape[1]
    pairs = label * classes + probability.argmax(1)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def intervals(
    outputs: Mapping[str, np.ndarray],
    cases: np.ndarray,
    patients: Sequence[Any],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The rows of `score` with 95 % intervals, patients drawn again; see `classification_intervals.intervals`.

    Args:
      outputs, cases: as for `score`.
      patients: names of the patients of `cases`, [n].
    """
    values = {row["metric"]: row["value"] for row in score(outputs, cases)}
    mine = {name: np.asarray(outputs[name])[cases] for name in ("probability", "loss", "label")}
    return classification_intervals.intervals(values, mine, patients, resamples=resamples, seed=seed)


def score(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> list[dict[str, Any]]:
    """Metrics over some cases.

    Args:
      outputs: {'probability': [N, classes], 'loss': [N], 'label': [N]} on the host.
      cases: int [n], rows to score.

    Returns: rows {'metric', 'value', 'n'}; NaN where a metric is not defined (a one-class test fold has no AUC).
    """
    probability = np.asarray(outputs["probability"], np.float64)[cases]
    label = np.asarray(outputs["label"])[cases]
    n = len(label)
    if n == 0:
        return []
    predicted = probability.argmax(1)
    values = {
        "accuracy": float(np.mean(predicted == label)),
        "cross_entropy": float(np.mean(np.asarray(outputs["loss"], np.float64)[cases])),
        "ece": expected_calibration_error(probability, label),
    }
    values |= _binary(probability[:, 1], label, predicted) if probability.shape[1] == 2 else _multi(probability, label)
    return [{"metric": name, "value": value, "n": n} for name, value in values.items()]


def _binary(positive: np.ndarray, label: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    def recall(value: int) -> float:
        return float(np.mean(predicted[label == value] == value)) if np.any(label == value) else float("nan")

    sensitivity, specificity = recall(1), recall(0)
    both = len(np.unique(label)) == 2 and np.all(np.isfinite(positive))
    return {
        "f1": float(sklearn_metrics.f1_score(label, predicted, pos_label=1, zero_division=0)),
        "auc": float(sklearn_metrics.roc_auc_score(label, positive)) if both else float("nan"),
        "sensitivity": sensitivity,
        "specificity": specificity,
        "balanced_accuracy": (sensitivity + specificity) / 2,
    }


def _multi(probability: np.ndarray, label: np.ndarray) -> dict[str, float]:
    every = len(np.unique(label)) == probability.shape[1] and np.all(np.isfinite(probability))
    rounded = probability / probability.sum(1, keepdims=True)  # scikit-learn wants rows that sum to 1 in float64
    predicted = probability.argmax(1)
    recalls = [np.mean(predicted[label == c] == c) for c in np.unique(label)]
    return {
        "f1": float(sklearn_metrics.f1_score(label, predicted, average="macro", zero_division=0)),
        "auc": float(sklearn_metrics.roc_auc_score(label, rounded, multi_class="ovr")) if every else float("nan"),
        "balanced_accuracy": float(np.mean(recalls)) if len(recalls) > 1 else float("nan"),
    }


def expected_calibration_error(
    probability: np.ndarray, label: np.ndarray, bins: int = classification_intervals.BINS
) -> float:
    """Mean over cases of |accuracy - confidence| per equal-width confidence bin (Guo et al. 2017, equation 3).

    Args:
      probability: [n, classes].
      label: int [n].
    """
    checks.number("bins", bins, low=1, integer=True)
    confidence, right = probability.max(1), probability.argmax(1) == label
    if not np.all(np.isfinite(confidence)):
        return float("nan")
    which = classification_intervals.calibration_bin(confidence, bins)
    gaps = [abs(np.sum(right[which == b]) - np.sum(confidence[which == b])) for b in range(bins)]
    return float(np.sum(gaps) / len(label))
