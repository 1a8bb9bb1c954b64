"""The classification task: losses by closed form, metrics against scikit-learn and by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sk
from tiny_federation import quick_jit

from fedjax_seg import tasks
from fedjax_seg.core.checks import UserError
from fedjax_seg.tasks.classification import expected_calibration_error, score

RNG = np.random.default_rng(7)
X = RNG.normal(size=(5, 3)).astype(np.float32)
Y = np.array([0, 2, 1, 1, 0], np.int32)
MASK = np.array([1, 1, 0, 1, 0], np.float32)
WEIGHT, BIAS = RNG.normal(size=(3, 3)), RNG.normal(size=3)


def linear(double_softmax=False, classes=3):
    return tasks.make(
        "classification", {"name": "mlp", "hidden": (), "classes": classes}, double_softmax=double_softmax
    )


def variables():
    return {"params": {"Dense_0": {"kernel": jnp.float32(WEIGHT), "bias": jnp.float32(BIAS)}}}


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def closed_form(double):
    """Loss and its gradient with respect to the logits, both by hand in float64."""
    p, one_hot = softmax(X @ WEIGHT + BIAS), np.eye(3)[Y]
    if not double:
        return -np.log(p[np.arange(5), Y]), p - one_hot
    # cross entropy of softmax(p): d/dp = softmax(p) - one_hot; softmax's Jacobian: diag(p) - p p^T
    q = softmax(p)
    outer = np.stack([np.diag(r) - np.outer(r, r) for r in p])
    return -np.log(q[np.arange(5), Y]), np.einsum("nij,nj->ni", outer, q - one_hot)


@pytest.mark.parametrize("double", [False, True])
def test_loss_and_gradient_have_their_closed_form(double):
    task = linear(double)
    batch = {"x": X, "y": Y, "mask": MASK}
    loss_of = jax.value_and_grad(lambda v: task.loss(v, batch, jax.random.key(0)), has_aux=True)
    (loss, updated), grads = quick_jit(loss_of)(variables())
    per_case, d_logits = closed_form(double)
    share = (MASK / MASK.sum())[:, None]
    np.testing.assert_allclose(loss, np.sum(share[:, 0] * per_case), rtol=1e-6)
    np.testing.assert_allclose(grads["params"]["Dense_0"]["kernel"], X.T @ (share * d_logits), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads["params"]["Dense_0"]["bias"], np.sum(share * d_logits, 0), rtol=1e-5, atol=1e-7)
    assert updated == {}


def test_a_double_softmax_is_bounded_below():
    """A certain and right prediction: log(1 + (classes - 1)/e), not 0."""
    sure = {"params": {"Dense_0": {"kernel": jnp.zeros((3, 3)), "bias": jnp.array([200.0, 0.0, 0.0])}}}
    batch = {"x": X[:1], "y": np.zeros(1, np.int32), "mask": np.ones(1)}
    loss, _ = linear(True).loss(sure, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, np.log(1 + 2 / np.e), rtol=1e-6)
    np.testing.assert_allclose(linear(False).loss(sure, batch, jax.random.key(0))[0], 0, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
def test_masked_cases_have_no_influence_and_predictions_have_one_softmax(double):
    task = linear(double)
    run = quick_jit(jax.value_and_grad(lambda v, b: task.loss(v, b, None)[0]))
    other = {"x": np.where(MASK[:, None] > 0, X, 1e3).astype(np.float32), "y": np.where(MASK > 0, Y, 0), "mask": MASK}
    first, second = run(variables(), {"x": X, "y": Y, "mask": MASK}), run(variables(), other)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    nobody = run(variables(), {"x": X, "y": Y, "mask": np.zeros(5, np.float32)})
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nobody))

    out = quick_jit(task.outputs)(variables(), {"x": X, "y": Y, "mask": MASK})
    np.testing.assert_allclose(out["probability"], softmax(X @ WEIGHT + BIAS), rtol=1e-5)
    np.testing.assert_allclose(out["loss"], closed_form(False)[0], rtol=1e-5)
    np.testing.assert_array_equal(out["label"], Y)


def outputs(probability, label):
    probability = np.asarray(probability, np.float32)
    loss = -np.log(probability[np.arange(len(label)), label])
    return {"probability": probability, "loss": loss, "label": np.asarray(label, np.int32)}


def values(rows):
    return {row["metric"]: row["value"] for row in rows}


def test_binary_metrics_equal_scikit_learn():
    rng = np.random.default_rng(1)
    label = rng.integers(0, 2, 60)
    positive = np.round(np.clip(0.5 + 0.2 * (label - 0.5) + 0.3 * rng.normal(size=60), 0.02, 0.98), 2)  # with ties
    out, cases = outputs(np.stack([1 - positive, positive], 1), label), np.arange(10, 55)
    rows = score(out, cases)
    y, p = label[cases], out["probability"][cases]
    predicted = p.argmax(1)
    expected = {
        "accuracy": sk.accuracy_score(y, predicted),
        "f1": sk.f1_score(y, predicted),
        "auc": sk.roc_auc_score(y, p[:, 1]),
        "sensitivity": sk.recall_score(y, predicted),
        "specificity": sk.recall_score(y, predicted, pos_label=0),
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "cross_entropy": np.mean(-np.log(np.where(y == 1, p[:, 1], p[:, 0]).astype(np.float64))),
    }
    found = values(rows)
    assert set(found) == set(expected) | {"ece"} == set(linear(classes=2).metrics)
    assert all(row["n"] == 45 for row in rows)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_multi_class_metrics_equal_scikit_learn():
    rng = np.random.default_rng(2)
    label = rng.integers(0, 3, 50)
    p = softmax(rng.normal(size=(50, 3)) + 1.5 * np.eye(3)[label])
    found = values(score(outputs(p, label), np.arange(50)))
    assert set(found) == set(linear().metrics)
    np.testing.assert_allclose(found["f1"], sk.f1_score(label, p.argmax(1), average="macro"), rtol=1e-9)
    np.testing.assert_allclose(found["auc"], sk.roc_auc_score(label, p, multi_class="ovr"), rtol=1e-6)
    np.testing.assert_allclose(found["balanced_accuracy"], sk.balanced_accuracy_score(label, p.argmax(1)), rtol=1e-12)
    two = np.flatnonzero((label < 2) & (p.argmax(1) < 2))  # without predictions that scikit-learn warns of
    two_of_three = values(score(outputs(p, label), two))
    assert np.isnan(two_of_three["auc"]) and np.isfinite(two_of_three["f1"])
    expected = sk.balanced_accuracy_score(label[two], p[two].argmax(1))
    np.testing.assert_allclose(two_of_three["balanced_accuracy"], expected, rtol=1e-12)
    assert np.isnan(values(score(outputs(p, label), np.flatnonzero(label == 1)))["balanced_accuracy"])


@pytest.mark.parametrize("only", [0, 1])
def test_a_one_class_fold_has_no_auc(only):
    p = np.array([[0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    found = values(score(outputs(p, np.full(3, only)), np.arange(3)))
    assert np.isnan(found["auc"]) and np.isnan(found["balanced_accuracy"])
    assert np.isnan(found["specificity"] if only else found["sensitivity"])
    np.testing.assert_allclose(found["accuracy"], 1 / 3 if only else 2 / 3)
    np.testing.assert_allclose(found["f1"], 0.5 if only else 0.0)


def test_a_model_that_says_nan_has_no_auc_and_no_case_has_no_row():
    out = {"probability": np.full((4, 2), np.nan), "loss": np.full(4, np.nan), "label": np.array([0, 1, 0, 1])}
    found = values(score(out, np.arange(4)))
    assert np.isnan(found["auc"]) and np.isnan(found["cross_entropy"]) and np.isnan(found["ece"])
    assert score(out, np.zeros(0, int)) == []


def test_calibration_by_hand():
    """Bins (.5, .6], (.7, .8] and (.9, 1]: |1 - .6| + |1 - (.75 + .8)| + |1 - 1| over 4 cases."""
    p = np.array([[0.4, 0.6], [0.75, 0.25], [0.2, 0.8], [1.0, 0.0]])
    label = np.array([1, 0, 0, 0])
    np.testing.assert_allclose(expected_calibration_error(p, label), (0.4 + 0.55 + 0.0) / 4, rtol=1e-12)
    # one bin: |mean accuracy - mean confidence|
    np.testing.assert_allclose(expected_calibration_error(p, label, bins=1), abs(0.75 - 3.15 / 4), rtol=1e-12)


def test_confusion_and_columns_of_cases():
    """Truth 0 0 1 2, predicted 0 2 1 0; case 0 is not asked for."""
    p = [[0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.1, 0.7, 0.2], [0.4, 0.3, 0.3]]
    task, out, cases = linear(), outputs(p, [1, 0, 0, 1, 2]), np.arange(1, 5)
    np.testing.assert_array_equal(task.confusion(out, cases), [[1, 0, 1], [0, 1, 0], [1, 0, 0]])
    columns = task.case_values(out, cases)
    assert tuple(columns) == ("label", "probability", "predicted", "correct", "loss", "p_0", "p_1", "p_2")
    np.testing.assert_allclose(columns["probability"], [0.5, 0.6, 0.7, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(np.stack([columns[f"p_{c}"] for c in range(3)], 1), out["probability"][1:])
    two = outputs([[0.2, 0.8], [0.7, 0.3]], [0, 0])
    np.testing.assert_array_equal(linear(classes=2).confusion(two, np.arange(2)), [[1, 1], [0, 0]])
    columns = linear(classes=2).case_values(two, np.arange(2))
    assert tuple(columns) == ("label", "probability", "predicted", "correct", "loss")
    np.testing.assert_allclose(columns["probability"], [0.8, 0.3], rtol=1e-6)


def test_a_model_of_bags_is_told_how_many_instances_are_real():
    """A padded row must not matter: to the loss, its gradient, the outputs and the evidence."""
    task = tasks.make("classification", {"name": "attention_mil", "hidden": 4, "attention": 3, "classes": 3})
    rng = np.random.default_rng(3)
    x, real = rng.normal(size=(2, 4, 5)).astype(np.float32), np.array([2, 4], np.int32)
    batch = {"y": np.array([0, 2], np.int32), "mask": np.ones(2, np.float32), "instances": real}
    other = np.where(np.arange(4)[None, :, None] < real[:, None, None], x, 7.0).astype(np.float32)

    @quick_jit
    @partial(jax.vmap, in_axes=(0, None))
    def everything(x, batch):
        whole = {"x": x, **batch}
        start = task.init(jax.random.key(0), whole)
        gradient = jax.value_and_grad(lambda v: task.loss(v, whole, jax.random.key(0))[0])(start)
        without = task.outputs(start, {"x": x, "y": batch["y"]})
        return (gradient, task.outputs(start, whole), task.evidence(start, whole)), without

    told, untold = everything(np.stack([x, other]), batch)
    jax.tree.map(lambda v: np.testing.assert_array_equal(v[0], v[1]), told)
    assert np.abs(untold["probability"][0, 0] - untold["probability"][1, 0]).max() > 0.01


IMAGES, BAGS = np.zeros((2, 4, 4, 3), np.float32), np.zeros((2, 3, 5), np.float32)


@pytest.mark.parametrize("name", ["cnn", "mlp", "unet", "resunet3d"])
def test_a_model_that_takes_no_bags_is_one_line(name):
    task = tasks.make("classification", {"name": name})
    with pytest.raises(UserError) as error:
        task.init(jax.random.key(0), {"x": BAGS, "instances": np.array([1, 3], np.int32)})
    text = "given with bags of instances [n, d]; 'attention_mil' expected (--config.model.name)"
    assert str(error.value) == f"model {name!r} {text}"


def test_a_model_of_pixels_is_no_classifier():
    task = tasks.make("classification", {"name": "unet", "width": 2, "depth": 1, "classes": 3})
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda key: task.init(key, {"x": IMAGES}), jax.random.key(0))
    assert str(error.value) == (
        "model 'unet': an output of shape (2, 4, 4, 3) given, one label of 3 per case (2, 3) expected;"
        " take 'cnn' or 'mlp' (--config.model.name)"
    )


@pytest.mark.parametrize("name, x", [("attention_mil", IMAGES), ("resunet3d", IMAGES), ("cnn", BAGS)])
def test_inputs_of_another_kind_are_one_line(name, x):
    task = tasks.make("classification", {"name": name})
    with pytest.raises(UserError, match=rf"model '{name}': an input of shape") as error:
        jax.eval_shape(lambda key: task.init(key, {"x": x}), jax.random.key(0))
    assert "\n" not in str(error.value)


def test_directions_and_names():
    directions = {name: rule[0] for name, rule in linear(classes=2).metrics.items()}
    assert {name for name, way in directions.items() if way == "min"} == {"cross_entropy", "ece"}
    assert set(directions.values()) == {"max", "min"}
    assert linear().linear_input == "params/Dense_0/kernel"
    with pytest.raises(UserError, match="task 'classification': unknown option 'double_softmx'"):
        tasks.make("classification", {"name": "mlp"}, double_softmx=True)
    with pytest.raises(UserError, match=r"task\.name: unknown name 'clasification'"):
        tasks.make("clasification", {"name": "mlp"})
