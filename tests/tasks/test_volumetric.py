"""The task for volumes: losses by closed form, whole cases against all pairs of border voxels, the rule for empties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy import ndimage
from scipy.spatial.distance import cdist
from tiny_federation import quick_jit

from fedjax_seg import models, tasks
from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import evaluate
from fedjax_seg.tasks import volume_scores
from fedjax_seg.tasks.volumetric import case_outputs, fets_dice

RNG = np.random.default_rng(3)
REGIONS = {"ET": (3,), "TC": (1, 3), "WT": (1, 2, 3)}
FETS = (0, 1, 2, 4)
ONE = {"params": {"scale": jnp.float32(1)}}


class Untold(nn.Module):
    """Logits are the channels themselves."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        assert x.dtype == jnp.float32
        return x * self.param("scale", nn.initializers.ones, ())


class Dropping(nn.Module):
    """Tells by a statistic how much of a batch is real, and by its logits which voxels were dropped."""

    classes: int
    dropout: float = 0.5

    @nn.compact
    def __call__(self, x, train, mask=None):
        seen = self.variable("batch_stats", "seen", jnp.zeros, ())
        if train and not self.is_initializing():
            seen.value = jnp.sum(mask)
        return nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(self.classes)(x))


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    monkeypatch.setitem(models.MODELS, "untold", lambda *, classes=4: Untold(classes))
    monkeypatch.setitem(models.MODELS, "dropping", lambda *, classes=4, dropout=0.5: Dropping(classes, dropout))


def make(name="untold", classes=4, tile=(4, 4, 4), **options):
    return tasks.make("volumetric", {"name": name, "classes": classes}, tile=tile, **options)


def patches(classes=4):
    """Float16 logits as patches; labels of patch 1 are all background; patch 2 is padding."""
    x = RNG.normal(size=(4, 3, 4, 5, classes)).astype(np.float16)
    y = RNG.integers(0, classes, (4, 3, 4, 5)).astype(np.uint8)
    y[1] = 0
    return {"x": x, "y": y, "mask": np.array([1, 1, 0, 1], np.float32)}


def by_hand(batch, smooth, weights):
    """Cross entropy, 1 - soft Dice of the foreground, FeTS loss of every patch; float64, class by class."""
    result = []
    for x, y in zip(batch["x"].astype(np.float64), batch["y"]):
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        entropy = -np.log(np.take_along_axis(p, y[..., None].astype(int), -1)).mean()
        sums = [((p[..., k] * (y == k)).sum(), p[..., k].sum() + (y == k).sum()) for k in range(x.shape[-1])]
        dice = [1 - (2 * a + smooth) / (b + smooth) for a, b in sums[1:]]
        fets = [w * (1 - (2 * a + 1e-7) / (b + 1e-7)) for w, (a, b) in zip(weights, sums)]
        result.append((entropy, np.mean(dice), np.sum(fets)))
    return np.array(result).T


def test_losses_have_their_closed_form():
    batch = patches()
    entropy, dice, fets = by_hand(batch, 0.5, (0.1, 0.2, 0.3, 0.4))
    equal = by_hand(batch, 0.5, (0.25,) * 4)[2]
    real = batch["mask"] > 0
    for options, per_case in (
        ({"loss": "cross_entropy"}, entropy),
        ({"loss": "dice", "smooth": 0.5}, dice),
        ({"loss": "dice_ce", "smooth": 0.5}, entropy + dice),
        ({"loss": "fets_dice", "class_weights": (1, 2, 3, 4)}, fets),
        ({"loss": "fets_dice"}, equal),
    ):
        value, updated = quick_jit(make(**options).loss)(ONE, batch, None)
        np.testing.assert_allclose(value, per_case[real].mean(), rtol=1e-5)
        assert updated == {}


def test_the_fets_loss_has_finite_gradients_without_a_voxel_of_a_class():
    """Absent in truth, and in the prediction down to a probability of 0."""
    labels = jnp.broadcast_to(jnp.arange(4) == 0, (1, 2, 2, 2, 4))
    logits = jnp.where(labels, 300.0, 0.0)
    loss = lambda logits: fets_dice(jax.nn.softmax(logits), labels, (0.25,) * 4)[0]
    value, grad = quick_jit(jax.value_and_grad(loss))(logits)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    assert np.all(np.isfinite(grad))
    # 8 voxels of background predicted as class 1: those two classes lose all, the other two nothing.
    wrong = jnp.roll(labels, 1, -1).astype(jnp.float32)
    losses = quick_jit(lambda p: fets_dice(p, labels, (0.4, 0.3, 0.2, 0.1)))(wrong)
    np.testing.assert_allclose(losses, [0.7], rtol=1e-5)


def test_training_tells_the_mask_and_draws_and_evaluation_does_not():
    task, batch = make("dropping"), patches()
    variables = quick_jit(lambda key: dict(task.init(key, batch)))(jax.random.key(0))
    run = quick_jit(task.loss)
    values = [run(variables, batch, jax.random.key(k)) for k in (1, 1, 2)]
    assert values[0][0] == values[1][0] != values[2][0]
    assert values[0][1]["batch_stats"]["seen"] == 3
    whole = volumes((3, 4, 5), [(3, 4, 5)], [(3, 4, 5)])
    jax.eval_shape(task.outputs, variables, whole)  # would fail without a key if it drew


# ---- whole cases ----


def volumes(buffer, shapes, fulls, predicted=None, truth=None, spacing=(1, 1, 1)):
    """A batch whose logits are x; what lies behind the end of a volume is nonsense."""
    n = len(shapes)
    x = np.full((n, *buffer, 4), np.nan, np.float16)
    y = np.full((n, *buffer), 2, np.uint8)
    for i, shape in enumerate(shapes):
        inside = tuple(slice(m) for m in shape)
        y[i][inside] = RNG.integers(0, 4, shape) if truth is None else truth[i]
        own = RNG.normal(size=(*shape, 4)) if predicted is None else 5 * (np.arange(4) == predicted[i][..., None])
        x[i][inside] = own
    numbers = {"shape": np.array(shapes, np.int32), "full": np.array(fulls, np.int32)}
    return {
        "x": x,
        "y": y,
        "spacing": np.tile(np.float32([spacing]), (n, 1)),
        "background": np.zeros((n, 4), np.float32),
        "mask": np.ones(n, np.float32),
        **numbers,
    }


@functools.cache
def program(options):
    return quick_jit(make(**dict(options)).outputs)


def outcome(batch, **options):
    on_device = {k: v for k, v in options.items() if k in ("tile", "overlap", "blend", "tiles_at_once")}
    out = program(tuple(on_device.items()))(ONE, batch)
    return make(**options), jax.tree.map(np.asarray, out)


def blobs(shape):
    """A class map with neighbours of one class, so that masks have an inside."""
    smooth = ndimage.gaussian_filter(RNG.normal(size=(4, *shape)), (0, 1, 1, 1))
    return smooth.argmax(0)


def border_points(mask, spacing):
    cross = ndimage.generate_binary_structure(mask.ndim, 1)
    return np.argwhere(mask & ~ndimage.binary_erosion(mask, cross, border_value=0)) * spacing


@pytest.mark.parametrize("options", [{}, {"overlap": 0.5, "blend": "gaussian", "tiles_at_once": 3}])
def test_whole_cases_against_all_pairs(options):
    """Volumes of several sizes in one buffer, through tiles; every number again from the volume itself."""
    shapes, fulls, spacing = [(9, 7, 8), (6, 10, 5)], [(11, 9, 8), (6, 12, 7)], np.array([1, 1.5, 2])
    truth = [blobs(s) for s in shapes]
    batch = volumes((9, 10, 8), shapes, fulls, truth=truth, spacing=spacing)
    for i, t in enumerate(truth):  # logits in favour of the truth
        inside = tuple(slice(m) for m in shapes[i])
        batch["x"][i][inside] += (np.arange(4) == t[..., None]).astype(np.float16)
    task, out = outcome(batch, regions="brats", labels=FETS, **options)
    found = task.reduce(out)
    for i, (shape, t) in enumerate(zip(shapes, truth)):
        x = batch["x"][i][tuple(slice(m) for m in shape)].astype(np.float64)
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        guess = p.argmax(-1)
        entropy = -np.log(np.take_along_axis(p, t[..., None], -1)).mean()
        away = [np.prod(fulls[i]) - np.prod(shape), 0, 0, 0]  # voxels of the file outside of the crop: background
        sums = [
            ((p[..., k] * (t == k)).sum() + n, p[..., k].sum() + (t == k).sum() + 2 * n) for k, n in enumerate(away)
        ]
        soft = [2 * both / total for both, total in sums]
        expected = {"cross_entropy": entropy, "round_score": np.mean(soft), "soft_dice": np.mean(soft[1:])}
        expected |= {f"soft_dice_{label}": soft[k] for k, label in enumerate(FETS)}
        for name, ids in REGIONS.items():
            a, b = np.isin(t, ids), np.isin(guess, ids)
            pairs = cdist(border_points(a, spacing), border_points(b, spacing))
            near = (pairs.min(1) <= 1).sum() + (pairs.min(0) <= 1).sum()
            outside = np.prod(fulls[i]) - a.sum()
            expected |= {
                f"dice_{name}": 2 * (a & b).sum() / (a.sum() + b.sum()),
                f"hd95_{name}": max(np.percentile(pairs.min(1), 95), np.percentile(pairs.min(0), 95)),
                f"nsd_{name}": near / sum(pairs.shape),
                f"sensitivity_{name}": (a & b).sum() / a.sum(),
                f"specificity_{name}": 1 - (b & ~a).sum() / outside,
                f"truth_voxels_{name}": a.sum(),
                f"predicted_voxels_{name}": b.sum(),
            }
        for metric in ("dice", "hd95", "nsd", "sensitivity", "specificity"):
            expected[metric] = np.mean([expected[f"{metric}_{name}"] for name in REGIONS])
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-4, err_msg=name)
    assert set(task.metrics) <= set(found) and {v.shape for v in found.values()} == {(2,)}


def four_cases():
    """A core of 2 with a rim: good; ET missed; ET invented; nothing anywhere."""
    truth, predicted = np.zeros((2, 4, 6, 6, 6), int)
    truth[:2, 1:5, 1:5, 1:5] = 2
    truth[:2, 2:4, 2:4, 2:4] = 3
    predicted[0] = truth[0]
    predicted[0, 2, 2:4, 2:4] = 1  # half of the enhancing tumour taken for a necrosis
    predicted[1] = np.where(truth[1] == 3, 1, truth[1])
    truth[2, 1:3] = predicted[2, 1:3] = 2
    predicted[2, 4, 4, 4] = 3
    return predicted, truth


def test_regions_by_hand_and_the_rule_for_empty_masks():
    predicted, truth = four_cases()
    batch = volumes((7, 6, 6), [(6, 6, 6)] * 4, [(240, 240, 155)] * 4, predicted, truth)
    task, out = outcome(batch, regions="brats", labels=FETS)
    found = task.reduce(out)
    penalty = 373.12866
    np.testing.assert_allclose(found["dice_ET"], [2 * 4 / 12, 0, 0, 1])
    np.testing.assert_allclose(found["dice_TC"], [1, 1, 0, 1])
    np.testing.assert_allclose(found["dice_WT"], [1, 1, 2 * 72 / (72 + 73), 1])
    np.testing.assert_allclose(found["hd95_ET"], [1, penalty, penalty, 0], rtol=1e-6)
    np.testing.assert_allclose(found["hd95_TC"], [0, 0, penalty, 0], rtol=1e-6)
    np.testing.assert_allclose(found["hd95"], [1 / 3, penalty / 3, (2 * penalty + 0) / 3, 0], rtol=1e-6)
    assert np.isnan(found["sensitivity_ET"]).tolist() == [False, False, True, True]
    np.testing.assert_allclose(found["specificity_ET"][2], 1 - 1 / (240 * 240 * 155), rtol=1e-12)
    counts = {name: found[name].tolist() for name in ("n_missed", "n_false_alarm", "n_both_empty")}
    assert counts == {"n_missed": [0, 1, 0, 0], "n_false_alarm": [0, 0, 2, 0], "n_both_empty": [0, 0, 0, 3]}

    rows = {r["metric"]: (r["value"], r["n"]) for r in task.score(found, np.arange(4))}
    assert list(rows) == list(task.metrics)
    assert rows["dice_ET"] == (pytest.approx((8 / 12 + 1) / 4), 4) and rows["n_false_alarm"] == (2, 4)
    assert rows["sensitivity_ET"] == (pytest.approx(0.25), 2)
    some = task.case_values(found, np.array([3, 1]))
    assert some["dice_ET"].tolist() == [1, 0] and task.paired in some
    assert task.score(found, np.array([], int)) == []


def test_rules_are_options_and_definitions_say_them():
    predicted, truth = four_cases()
    batch = volumes((7, 6, 6), [(6, 6, 6)] * 4, [(6, 6, 6)] * 4, predicted, truth)
    task, out = outcome(batch, regions="brats", both_empty="undefined", one_empty="undefined", hd95="pooled")
    found = task.reduce(out)
    assert np.isnan(found["hd95_ET"]).tolist() == [False, True, True, True] and np.isnan(found["dice"][3])
    assert "undefined" in task.metrics["hd95_ET"][1] and "pooled" in task.metrics["hd95"][1]
    plain = make(regions="brats", labels=FETS).metrics
    assert "larger one of the two directed" in plain["hd95"][1] and "(ET, TC, WT)" in plain["dice"][1]
    assert (
        plain["dice_TC"][1].startswith("region TC (labels 1, 4) only") and "diagonal of the volume" in plain["hd95"][1]
    )
    assert all("GaNDLF soft Dice" in plain[m][1] for m in ("soft_dice_4", "round_score", "soft_dice"))
    # By classes, the masks are named by the values of the files.
    task, out = outcome(batch, labels=FETS, surface=False)
    found = task.reduce(out)
    np.testing.assert_allclose(found["dice_4"], [8 / 12, 0, 0, 1])
    np.testing.assert_allclose(found["dice_2"], 1)
    assert "dice_3" not in task.metrics and not any("hd95" in name for name in found) and "hd95" not in task.headline
    assert task.metrics["dice_4"][1].startswith("label 4 only")


def test_masks_are_the_class_maps_and_the_transfer_is_small():
    predicted, truth = four_cases()
    shapes = [(6, 6, 6), (5, 6, 4), (6, 6, 6), (1, 1, 1)]
    cut = [tuple(slice(n) for n in s) for s in shapes]
    batch = volumes(
        (7, 6, 6), shapes, shapes, [p[c] for p, c in zip(predicted, cut)], [t[c] for t, c in zip(truth, cut)]
    )
    task, out = outcome(batch, regions="brats")
    found = task.masks(out, np.array([1, 0]))
    for i, case in enumerate((1, 0)):
        for got, own in zip(found, (truth, predicted)):
            expected = np.zeros((7, 6, 6), np.uint8)
            expected[cut[case]] = own[case][cut[case]]
            np.testing.assert_array_equal(got[i], expected)
    assert found[0].dtype == np.uint8 and out["truth"].nbytes == 4 * 2 * -(-7 * 36 // 8)


def test_columns_do_not_depend_on_the_chunks_that_were_reduced():
    predicted, truth = four_cases()
    batch = volumes((7, 6, 6), [(6, 6, 6)] * 4, [(6, 6, 6)] * 4, predicted, truth)
    task, out = outcome(batch, regions="brats")
    together = task.reduce(out)
    pieces = [task.reduce({name: x[c : c + 1] for name, x in out.items()}) for c in range(4)]
    for name, column in together.items():
        np.testing.assert_array_equal(column, np.concatenate([p[name] for p in pieces]))
    by_site = {name: column.reshape(2, 2) for name, column in together.items()}
    rows = {(r["site"], r["metric"]): r["value"] for r in evaluate.scores(task, by_site, (2, 2), ("a", "b"))}
    assert (
        rows["a", "n_missed"] == 1 and rows["worst_site", "n_false_alarm"] == 2 and rows["pooled", "n_both_empty"] == 3
    )


def test_sums_over_a_volume_keep_small_terms():
    p = np.tile(np.float32([0.001, 0.999]), (2, 1024, 512, 1))
    out = quick_jit(case_outputs)(p, np.ones(p.shape[:3], np.uint8), jnp.array(p.shape[:3]))
    sums = np.asarray(out["soft"], float).sum(0)
    np.testing.assert_allclose(sums[:, 1], 2**20 * p[0, 0, 0].astype(float), rtol=1e-6)


def test_two_classes_have_one_mask():
    rules = make(classes=2).metrics
    assert "dice" in rules and "dice_1" not in rules and {"soft_dice_0", "soft_dice_1"} <= set(rules)


def test_confusion_counts_every_region():
    confusion = RNG.integers(0, 9, (1, 4, 4))
    for ids in REGIONS.values():
        own = np.isin(np.arange(4), ids)
        expected = [confusion[0][own][:, own].sum(), confusion[0][~own][:, own].sum(), confusion[0][own][:, ~own].sum()]
        np.testing.assert_array_equal(volume_scores._counts(confusion, ids)[0], expected)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"loss": "focal"}, "task.loss: 'focal' given"),
        ({"loss": "fets_dice", "class_weights": (1, 2)}, "task.class_weights: 2 weights given, 4 expected"),
        ({"loss": "fets_dice", "class_weights": (0, 0, 0, 0)}, "task.class_weights: all are 0"),
        ({"loss": "fets_dice", "class_weights": (1, -1, 1, 1)}, r"task.class_weights\[1\]"),
        ({"class_weights": (1, 1, 1, 1)}, "'fets_dice' expected"),
        ({"regions": "tumour"}, "task.regions"),
        ({"regions": "brats", "classes": 3}, "model.classes=4 expected"),
        ({"labels": (0, 1, 2)}, "task.labels"),
        ({"labels": (0, 1, 2, 2)}, "task.labels"),
        ({"tile": (64, 64, 0)}, "task.tile"),
        ({"overlap": 1}, "task.overlap"),
        ({"blend": "hann"}, "task.blend"),
        ({"hd95": "mean"}, "task.hd95"),
        ({"smooth": 0}, "task.smooth"),
        ({"overlp": 0.5}, "did you mean 'overlap'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        make(**options)


def test_a_model_of_whole_cases_is_refused():
    with pytest.raises(UserError, match=r"task 'volumetric': model 'mlp' gives logits \(4, 4\) for labels"):
        jax.eval_shape(make("mlp").init, jax.random.key(0), patches())
