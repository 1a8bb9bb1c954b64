"""The segmentation task: losses by closed form, scores by hand, and the rule for empty masks."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy import ndimage
from tiny_federation import quick_jit

from fedjax_seg import models, tasks
from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import evaluate
from fedjax_seg.tasks import overlap
from fedjax_seg.tasks.segmentation import near_border

RNG = np.random.default_rng(11)


class Voxelwise(nn.Module):
    """Logits are a linear map of a voxel's channels, plus the share of the batch that is real where it is told."""

    classes: int

    @nn.compact
    def __call__(self, x, train, mask=None):
        seen = self.variable("batch_stats", "seen", jnp.zeros, ())
        if train and not self.is_initializing():
            seen.value = jnp.sum(mask)
        return nn.Dense(self.classes)(x)


class Untold(nn.Module):
    """Logits are the channels themselves."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        return x * self.param("scale", nn.initializers.ones, ())


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    monkeypatch.setitem(models.MODELS, "voxelwise", lambda *, classes=2: Voxelwise(classes))
    monkeypatch.setitem(models.MODELS, "untold", lambda *, classes=2: Untold(classes))


def make(name="untold", classes=2, **options):
    return tasks.make("segmentation", {"name": name, "classes": classes}, **options)


def images(shape, classes, n=4):
    """Logits as images, labels of which those of image 1 are all background, and a mask without image 2."""
    x = RNG.normal(size=(n, *shape, classes)).astype(np.float32)
    y = RNG.integers(0, classes, (n, *shape)).astype(np.uint8)
    y[1] = 0
    return {"x": x, "y": y, "mask": np.array([1, 1, 0, 1], np.float32)}


def by_hand(batch, smooth):
    """Cross entropy, soft Dice per example, in float64 and example by example."""
    entropy, dice = [], []
    for x, y in zip(batch["x"].astype(np.float64), batch["y"]):
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        entropy.append(-np.log(np.take_along_axis(p, y[..., None].astype(int), -1)).mean())
        parts = []
        for k in range(1, x.shape[-1]):
            t = (y == k).astype(float)
            parts.append((2 * (p[..., k] * t).sum() + smooth) / (p[..., k].sum() + t.sum() + smooth))
        dice.append(np.mean(parts))
    return np.array(entropy), np.array(dice)


@pytest.mark.parametrize("shape, classes", [((5, 7), 2), ((3, 4, 5), 3)])
def test_losses_have_their_closed_form(shape, classes):
    batch = images(shape, classes)
    entropy, dice = by_hand(batch, 0.5)
    expected = {"cross_entropy": entropy, "dice": 1 - dice, "both": entropy + 1 - dice}
    scale = {"params": {"scale": jnp.float32(1)}}
    real = batch["mask"] > 0
    for name, per_case in expected.items():
        task = make(classes=classes, loss=name, smooth=0.5)
        value, updated = quick_jit(task.loss)(scale, batch, None)
        np.testing.assert_allclose(value, per_case[real].mean(), rtol=1e-5)
        assert updated == {}


def test_gradients_stay_finite_and_masked_examples_have_no_influence():
    batch = images((4, 4), 2)
    task = make(loss="both")
    run = quick_jit(
        jax.value_and_grad(lambda x, b: task.loss({"params": {"scale": jnp.float32(1)}}, b | {"x": x}, 0)[0])
    )
    value, grad = run(batch["x"], batch)
    assert np.all(np.isfinite(grad)) and np.any(grad[1]) and not np.any(grad[2])
    changed = batch | {"y": np.where(batch["mask"][:, None, None] > 0, batch["y"], 1 - batch["y"])}
    assert run(np.where(batch["mask"][:, None, None, None] > 0, batch["x"], 99).astype(np.float32), changed)[0] == value
    nobody = run(batch["x"], batch | {"mask": np.zeros(4, np.float32)})
    assert nobody[0] == 0 and not np.any(nobody[1])
    # No voxel of the class, and none predicted: the fraction is smooth / smooth.
    sure = np.zeros_like(batch["x"]) + np.array([1e4, -1e4], np.float32)
    for y in (np.zeros((4, 4, 4), np.uint8), np.ones((4, 4, 4), np.uint8)):
        value, grad = run(sure, batch | {"y": y, "mask": np.ones(4, np.float32)})
        np.testing.assert_allclose(value, 0 if not y.any() else 2e4 + 1 - 1 / 17, rtol=1e-6)
        assert np.all(np.isfinite(grad))


def test_only_training_batches_tell_the_mask_and_update_statistics():
    task, batch = make("voxelwise"), images((3, 3), 2)
    variables = dict(task.init(jax.random.key(0), batch))
    _, updated = task.loss(variables, batch, jax.random.key(1))
    assert updated["batch_stats"]["seen"] == 3
    unmasked = {"x": batch["x"], "y": batch["y"]}
    out = task.outputs(variables, unmasked)  # would fail on an immutable collection if it wrote
    assert set(out) == {"loss", "counts", "shape", "predicted", "truth"}


def labels_as_images(predicted, classes):
    return {"x": np.float32(np.arange(classes) == np.asarray(predicted)[..., None]) * 4}


@functools.cache
def outputs_of(classes, surface):
    return quick_jit(make(classes=classes, surface=surface).outputs)


def outcome(task, predicted, truth, classes=2, **more):
    """The task's outputs for given predictions: the device's path."""
    batch = (
        labels_as_images(predicted, classes) | {"y": np.asarray(truth, np.uint8), "mask": np.ones(len(truth))} | more
    )
    scale = {"params": {"scale": jnp.float32(1)}}
    return jax.tree.map(np.asarray, outputs_of(classes, "hd95" in task.metrics)(scale, batch))


def value_of(rows, metric):
    return next((r["value"], r["n"]) for r in rows if r["metric"] == metric)


def five_cases():
    """6 x 8 images: shifted by one pixel, missed, false alarm, both empty, truth everywhere."""
    truth, predicted = np.zeros((2, 5, 6, 8), int)
    truth[0, 1:4, 1:4], predicted[0, 1:4, 2:5] = 1, 1
    truth[1, 2, 2] = 1
    predicted[2, :, :4] = 1
    truth[4], predicted[4, 0] = 1, 1
    return predicted, truth


def test_scores_by_hand_and_the_rule_for_empty_masks():
    task = make(tolerance=0.5)
    out = outcome(task, *five_cases(), spacing=np.tile(np.float32([[1, 2]]), (5, 1)))
    table = task.case_values(out, np.arange(5))
    diagonal = np.hypot(6, 16)
    nan = np.nan
    np.testing.assert_allclose(table["dice"], [12 / 18, 0, 0, 1, 16 / 56])
    np.testing.assert_allclose(table["iou"], [6 / 12, 0, 0, 1, 8 / 48])
    np.testing.assert_allclose(table["sensitivity"], [6 / 9, 0, nan, nan, 8 / 48])
    np.testing.assert_allclose(table["specificity"], [36 / 39, 1, 24 / 48, 1, nan])
    # Case 0: a column of 2 mm pixels apart, 3 of 8 border pixels; the 95th percentile is 2. Case 4: the truth's border
    # is the frame of the image, the prediction's its first row; the last row is 5 mm away.
    np.testing.assert_allclose(table["hd95"], [2, diagonal, diagonal, 0, 5])
    # Case 0: of each 3 x 3 ring of 8, the top and bottom row overlap in 2 of 3 pixels, the columns never: 4 and 4.
    # Case 4: frame of 24 pixels, 8 of them in the first row; all 8 of the prediction's.
    np.testing.assert_allclose(table["nsd"], [8 / 16, 0, 0, 1, 16 / 32])
    np.testing.assert_array_equal(table["truth_voxels"], [9, 1, 0, 0, 48])
    np.testing.assert_array_equal(table["predicted_voxels"], [9, 0, 24, 0, 8])

    rows = task.score(out, np.arange(5))
    assert [r["metric"] for r in rows] == list(task.metrics)
    assert value_of(rows, "dice") == pytest.approx(((12 / 18 + 1 + 16 / 56) / 5, 5))
    assert value_of(rows, "sensitivity") == pytest.approx(((6 / 9 + 8 / 48) / 3, 3))
    assert [value_of(rows, c) for c in overlap.COUNTS] == [(1, 5), (1, 5), (1, 5)]
    assert value_of(rows, "hd95") == pytest.approx(((2 + 2 * diagonal + 5) / 5, 5))
    some = task.score(out, np.array([3, 1]))
    assert value_of(some, "dice") == (0.5, 2) and np.isnan(value_of(some, "sensitivity")[0]) is np.False_
    only = task.score(out, np.array([3]))
    assert np.isnan(value_of(only, "sensitivity")[0]) and value_of(only, "sensitivity")[1] == 0
    assert task.score(out, np.array([], int)) == []


def test_empties_can_be_left_out_but_never_without_a_count():
    task = make(both_empty="undefined", one_empty="undefined")
    out = outcome(task, *five_cases())
    rows = task.score(out, np.arange(5))
    assert value_of(rows, "dice")[1] == 4 and value_of(rows, "hd95")[1] == 2 and value_of(rows, "nsd")[1] == 4
    assert value_of(rows, "n_missed") == (1, 5) and value_of(rows, "n_both_empty") == (1, 5)
    assert "undefined" in task.metrics["hd95"][1] and "n_missed" in task.metrics["hd95"][1]
    assert "diagonal" in make().metrics["hd95"][1] and "both empty: 1" in make().metrics["dice"][1]


def test_missing_more_lesions_never_improves_a_mean():
    task = make()
    _, truth = five_cases()
    truth = np.repeat(truth[:1], 4, 0)
    good, bad = truth.copy(), truth.copy()
    good[:, 1, 1] = 0
    bad[:] = good
    bad[:2] = 0
    rows = [task.score(outcome(task, p, truth), np.arange(4)) for p in (good, bad)]
    for metric in ("dice", "iou", "nsd", "sensitivity"):
        assert value_of(rows[0], metric)[0] > value_of(rows[1], metric)[0]
    assert value_of(rows[0], "hd95")[0] < value_of(rows[1], "hd95")[0]


def test_several_classes_have_a_mean_and_values_of_their_own():
    truth, predicted = np.zeros((2, 2, 4, 4), int)
    truth[0, 0, :2], predicted[0, 0, :2] = 1, 1
    truth[0, 3], predicted[0, 3, :2] = 2, 2
    truth[1, 0], predicted[1, 1] = 1, 2
    task = make(classes=3, surface=False)
    out = outcome(task, predicted, truth, 3)
    assert "predicted" not in out and "hd95" not in task.metrics and task.headline == ("dice", "cross_entropy")
    table = task.case_values(out, np.arange(2))
    np.testing.assert_allclose(table["dice_1"], [1, 0])
    np.testing.assert_allclose(table["dice_2"], [2 / 3, 0])
    np.testing.assert_allclose(table["dice"], [5 / 6, 0])
    np.testing.assert_allclose(table["sensitivity"], [0.75, 0])  # class 2 has no truth in case 1
    rows = task.score(out, np.arange(2))
    assert value_of(rows, "sensitivity_2") == (0.5, 1) and value_of(rows, "n_false_alarm") == (1, 2)


@pytest.mark.parametrize("rule, value", [("max", 19.6723), ("pooled", 18.0278)])
def test_hd95_is_the_rule_that_was_asked_for(rule, value):
    """A ball, and its shift with a second false positive: MONAI's and MedPy's values (see test_surface)."""
    grid = np.indices((40, 44, 44))
    balls = [((grid - np.reshape(c, (3, 1, 1, 1))) ** 2).sum(0) <= r**2 for c, r in
             (((16, 20, 20), 8), ((18, 20, 20), 8), ((28, 36, 36), 4))]  # fmt: skip
    truth, predicted = balls[0][None], (balls[1] | balls[2])[None].astype(int)
    task = make(hd95=rule)
    table = task.case_values(outcome(task, predicted, truth), np.arange(1))
    np.testing.assert_allclose(table["hd95"], value, atol=5e-5)
    np.testing.assert_allclose(table["dice"], 0.7683, atol=5e-5)


def test_volumes_and_odd_sizes_survive_the_packing():
    task = make()
    truth = RNG.random((2, 3, 5, 7)) < 0.4
    predicted = RNG.random((2, 3, 5, 7)) < 0.4
    out = outcome(task, predicted.astype(int), truth)
    assert out["truth"].nbytes == 2 * 14 and out["shape"].tolist() == [[3, 5, 7]] * 2
    np.testing.assert_array_equal(overlap.unpack(out["truth"][1, 0], (3, 5, 7)), truth[1])
    np.testing.assert_array_equal(overlap.unpack(out["predicted"][0, 0], (3, 5, 7)), predicted[0])


def test_evaluation_over_sites_takes_the_outputs():
    task = make()
    out = outcome(task, *five_cases())
    stacked = {name: np.stack([x[:2], x[2:4]]) for name, x in out.items()}
    rows = evaluate.scores(task, stacked, (2, 1), ("a", "b"))
    found = {(r["site"], r["metric"]): r["value"] for r in rows}
    assert found["a", "n_missed"] == 1 and found["b", "n_false_alarm"] == 1 and found["pooled", "n_missed"] == 1
    assert found["worst_site", "dice"] == 0 and found["worst_site", "hd95"] == 10.0


def test_evidence_by_hand():
    """Probabilities of 3/4 and 1/4; the label is one column of a 7 x 12 image, its band 2 columns on either side."""
    task = make()
    y = np.zeros((2, 7, 12), np.uint8)
    y[0, :, 5:] = 1
    x = np.zeros((2, 7, 12, 2), np.float32)
    x[..., 0] = np.log(3)
    x[0, :, 6:, :] = [0, np.log(3)]
    found = jax.tree.map(np.asarray, quick_jit(task.evidence)({"params": {"scale": jnp.float32(1)}}, {"x": x, "y": y}))
    assert set(found) == {"log_loss", "dice", "boundary_loss", "confidence"}
    good, bad = np.log(4 / 3), np.log(4)
    np.testing.assert_allclose(np.exp(found["log_loss"]), [(11 * good + bad) / 12, good], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found["boundary_loss"]), [(3 * good + bad) / 4, good], rtol=1e-5)
    np.testing.assert_allclose(found["confidence"], 0.75)
    hit, mass = 7 * (6 * 0.75 + 0.25), 7 * (6 * 0.25 + 6 * 0.75)
    np.testing.assert_allclose(found["dice"], [(2 * hit + 1) / (mass + 49 + 1), 1 / (84 / 4 + 1)], rtol=1e-5)


def test_the_band_is_a_dilation_less_an_erosion():
    y = (RNG.random((3, 9, 10)) < 0.1).astype(np.uint8)
    window = np.ones((5, 5))
    for mask, band in zip(y, np.asarray(near_border(jnp.asarray(y)))):
        wide, small = ndimage.binary_dilation(mask, window), ndimage.binary_erosion(mask, window, border_value=1)
        np.testing.assert_array_equal(band, wide & ~small)


def test_scoring_is_fast():
    """200 images of 64 x 64 in well under a second; the bound is loose for a busy machine."""
    grid = np.indices((64, 64))[:, None]
    centre, radius = RNG.uniform(20, 44, (2, 200, 1, 1)), RNG.uniform(4, 15, (200, 1, 1))
    truth = ((grid - centre) ** 2).sum(0) < radius**2
    task = make()
    out = outcome(task, np.roll(truth, 2, 1).astype(int), truth)
    start = time.process_time()
    rows = task.score(out, np.arange(200))
    assert time.process_time() - start < 1.0
    assert value_of(rows, "hd95")[0] == 2.0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"loss": "focal"}, "task.loss: 'focal' given"),
        ({"hd95": "mean"}, "task.hd95"),
        ({"smooth": 0}, "task.smooth"),
        ({"tolerance": -1}, "task.tolerance"),
        ({"both_empty": 1}, "task.both_empty"),
        ({"one_empty": 0}, "task.one_empty"),
        ({"tolerence": 1}, "did you mean 'tolerance'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        make(**options)


def test_a_model_of_whole_images_is_refused():
    batch = images((4, 4), 2)
    with pytest.raises(UserError, match=r"model 'mlp' gives logits \(4, 2\) for labels \(4, 4, 4\)"):
        jax.eval_shape(make("mlp").init, jax.random.key(0), batch)


def test_label_maps_are_the_masks_that_were_packed():
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 3, (2, 4, 5, 7)).astype(np.uint8)
    planes = lambda y: np.stack([np.packbits((y == k).reshape(4, -1), axis=-1) for k in (1, 2)], 1)
    outputs = {"truth": planes(truth), "predicted": planes(predicted), "shape": np.tile([5, 7], (4, 1))}
    found = overlap.label_maps(outputs, np.array([2, 0]))
    np.testing.assert_array_equal(found[0], truth[[2, 0]])
    np.testing.assert_array_equal(found[1], predicted[[2, 0]])


def test_masks_may_have_names_and_overlap():
    """Two masks of one case each way: the second one holds the first, counts are those of the pairs."""
    rules = overlap.Rules(3, distances=False, names=(("core", "the core"), ("whole", "the whole")))
    found = np.array([[[2, 0, 2], [6, 2, 0]], [[0, 0, 3], [0, 0, 0]]])
    table = overlap.case_means(overlap.mask_columns(found, np.array([20, 20]), rules), rules)
    np.testing.assert_allclose(table["dice_core"], [4 / 6, 0])
    np.testing.assert_allclose(table["dice_whole"], [12 / 14, 1])
    np.testing.assert_allclose(table["dice"], [(4 / 6 + 12 / 14) / 2, 0.5])
    np.testing.assert_allclose(table["specificity_whole"], [12 / 14, 1])
    counts = overlap.empties(found)
    assert {name: n.tolist() for name, n in counts.items()} == {
        "n_missed": [0, 1], "n_false_alarm": [0, 0], "n_both_empty": [0, 1],
    }  # fmt: skip
    metrics = overlap.definitions(rules)
    assert metrics["dice_whole"][1].startswith("the whole only: ") and "masks (core, whole)" in metrics["dice"][1]
    assert "foreground class" not in " ".join(text for _, text in metrics.values())
    rows = {r["metric"]: (r["value"], r["n"]) for r in overlap.summary(table | counts, ("sensitivity", "n_missed"))}
    assert rows == {"sensitivity": (0.375, 2), "n_missed": (1.0, 2)}
