"""Classification of whole cases: cross entropy, probabilities, and accuracy, F1, AUC, ... per site."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import metrics as sklearn_metrics

from fedjax_seg import models
from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Batch, Task, Variables

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
    "f1": ("max", "macro F1 over the classes (scikit-learn f1_score, zero_division=0)"),
    "auc": ("max", "macro one-vs-rest area under the ROC curve; n/a unless all classes are present"),
}


def classification(model: Mapping[str, Any], *, double_softmax: bool = False) -> Task:
    """Softmax classification; batches hold 'x' [B, ...], 'y' int32 [B], 'mask' [B].

    Args:
      model: slot of the model, {'name': ..., options}.
      double_softmax: the released FedHAvg code ends its model in a softmax and applies cross entropy, which takes a
        softmax of its own, to the probabilities. True does the same: the loss is bounded below by
        log(1 + (classes - 1)/e) and its gradients are small. Predictions are unchanged (one softmax).

    Returns: Task; `outputs` gives 'probability' [B, classes], 'loss' [B] (plain cross entropy), 'label' [B].
    """
    module = models.make(**model)
    classes = module.classes

    def init(key: Array, batch: Batch) -> Variables:
        return module.init(key, batch["x"])

    def logits_of(variables: Variables, x: Array, train: bool) -> tuple[Array, dict[str, Any]]:
        mutable = [name for name in variables if name != "params"] if train else []
        if mutable:
            return module.apply(variables, x, train=True, mutable=mutable)
        return module.apply(variables, x, train=False), {}

    def cross_entropy(logits: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]

    def loss(variables: Variables, batch: Batch, key: Array) -> tuple[Array, dict[str, Any]]:
        logits, updated = logits_of(variables, batch["x"], True)
        if double_softmax:
            logits = jax.nn.softmax(logits)
        mask = batch["mask"].astype(logits.dtype)
        total = jnp.sum(cross_entropy(logits, batch["y"]) * mask)
        return total / jnp.maximum(jnp.sum(mask), 1), updated

    def outputs(variables: Variables, batch: Batch) -> dict[str, Array]:
        logits, _ = logits_of(variables, batch["x"], False)
        return {
            "probability": jax.nn.softmax(logits),
            "loss": cross_entropy(logits, batch["y"]),
            "label": batch["y"],
        }

    def evidence(variables: Variables, batch: Batch) -> dict[str, Array]:
        logits, _ = logits_of(variables, batch["x"], False)
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
    )


def case_values(outputs: Mapping[str, np.ndarray], cases: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of per_case.csv: label, probability (of class 1 where there are two, else of the predicted class),
    predicted, correct, loss; [n] each. Arguments as for `score`."""
    probability, label = np.asarray(outputs["probability"])[cases], np.asarray(outputs["label"])[cases].astype(int)
    predicted = probability.argmax(1)
    shown = np.ones_like(predicted) if probability.shape[1] == 2 else predicted
    return {
        "label": label,
        "probability": probability[np.arange(len(cases)), shown],
        "predicted": predicted,
        "correct": (predicted == label).astype(int),
        "loss": np.asarray(outputs["loss"])[cases],
    }


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
    classes = np.arange(probability.shape[1])
    every = len(np.unique(label)) == len(classes) and np.all(np.isfinite(probability))
    rounded = probability / probability.sum(1, keepdims=True)  # scikit-learn wants rows that sum to 1 in float64
    return {
        "f1": float(
            sklearn_metrics.f1_score(label, probability.argmax(1), labels=classes, average="macro", zero_division=0)
        ),
        "auc": float(sklearn_metrics.roc_auc_score(label, rounded, multi_class="ovr")) if every else float("nan"),
    }


def expected_calibration_error(probability: np.ndarray, label: np.ndarray, bins: int = 10) -> float:
    """Mean over cases of |accuracy - confidence| per equal-width confidence bin (Guo et al. 2017, equation 3).

    Args:
      probability: [n, classes].
      label: int [n].
    """
    checks.number("bins", bins, low=1, integer=True)
    confidence, right = probability.max(1), probability.argmax(1) == label
    if not np.all(np.isfinite(confidence)):
        return float("nan")
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(np.sum(right[which == b]) - np.sum(confidence[which == b])) for b in range(bins)]
    return float(np.sum(gaps) / len(label))
