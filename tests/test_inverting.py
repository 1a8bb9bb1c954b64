"""Gradient inversion on runs: what is sent in every scenario, exact leaks of dense layers, and what may be drawn."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import assembly, inverting
from fedjax_seg import config as configuration
from fedjax_seg.attacks.inversion import sure
from fedjax_seg.core.checks import UserError
from fedjax_seg.data.federated import FederatedData, Split

SITES, EACH = 3, 8
pytestmark = pytest.mark.usefixtures("quick_compile")


def data(shape, masks=False, seed=0, tested=2):
    """Three sites of eight cases, the last two of each for tests; images have a square somewhere."""
    random = np.random.default_rng(seed)
    n = SITES * EACH
    x = 0.3 * random.uniform(size=(n, *shape))
    y = np.arange(n) % 2
    if len(shape) == 3:
        y = np.zeros((n, *shape[:2]), np.int32)
        for i in range(n):
            top, left = random.integers(0, shape[0] - 3, 2)
            y[i, top : top + 3, left : left + 3] = 1
        x = x + 0.7 * y[..., None]
        y = y if masks else y.reshape(n, -1)[:, : shape[0] ** 2 // 2].any(1)
    sites = np.split(np.arange(n), SITES)
    split = Split("only", tuple(s[: EACH - tested] for s in sites), tuple(s[EACH - tested :] for s in sites))
    ids, site_of = tuple(f"case{i}" for i in range(n)), np.repeat(np.arange(SITES), EACH)
    arrays = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    return FederatedData(arrays, ids, ids, ("A", "B", "C"), site_of, (split,), ("no", "yes"), {"synthetic": True})


def built(loaded, model=("mlp", {"hidden": (8,)}), task="classification", attack="inversion", change=None, **options):
    c = configuration.base()
    c.data = configuration.slot("data", "images2d", root="unused")
    c.model = configuration.slot("model", model[0], **model[1])
    c.task = configuration.slot("task", task)
    c.client.lr = 0.05
    c.attack = configuration.slot("attack", attack, **options)
    if change:
        change(c)
    return assembly.build(c, loaded)


def recovered(experiment):
    """(found, pictures, rows by scenario, the scene and the messages by scenario that were attacked)."""
    kept = []

    def messages(experiment, scene):
        kept.extend([scene, original(experiment, scene)])
        return kept[1]

    original = inverting.messages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inverting, "messages", messages)
        found, pictures = inverting.recover(experiment, None, experiment.plan)
    rows, sent = {row["scenario"]: row for row in found["rows"]}, {m.key: m for m in reversed(kept[1])}
    return found, pictures, rows, kept[0], sent


@pytest.fixture(scope="module")
def dense(quick_compile):
    """Images and an mlp: the experiment, and `recovered`."""
    experiment = built(data((6, 6, 1)), change=lambda c: setattr(c, "input_span", "off"), noise=(0.01, 1.0))
    return experiment, *recovered(experiment)


def test_a_dense_first_layer_gives_single_images_away(dense):
    """The notes' 154 dB; a batch and a sum mix their images, and noise of the clip hides them."""
    _, found, pictures, rows, *_ = dense
    assert found["how"] == "closed form" and found["model"] == "initial" and found["site"] == "A"
    assert rows["gradient"]["psnr"] > 100 and rows["gradient"]["above"] == 1
    assert len(rows["gradient"]["each"]) == 2 and rows["batch_4"]["images"] == 4 and rows["sum"]["images"] == 3
    assert rows["sum"]["psnr"] < 60 and rows["noise_1"]["psnr"] < 20 < rows["noise_0.01"]["psnr"] + 10
    assert set(rows) == {"gradient", "steps_4", "batch_4", "sum", "noise_0.01", "noise_1"} and pictures["sum"].ndim == 4
    np.testing.assert_allclose(pictures["gradient"], pictures["truth"], atol=1e-4)
    json.dumps(found, allow_nan=False)


def test_the_guess_is_the_mean_of_other_cases(dense):
    """By hand: the test cases' mean image, in units of the data's range."""
    experiment, found, pictures, *_ = dense
    x = experiment.data.arrays["x"]
    test = np.concatenate(experiment.data.splits[0].test)
    mean = (x[test].mean(0) - x.min()) / (x.max() - x.min())
    np.testing.assert_allclose(pictures["baseline"], mean, atol=1e-5)
    errors = [np.mean((mean - t) ** 2) for t in pictures["truth"]]
    assert found["baseline"]["psnr"] == pytest.approx(np.mean([-10 * np.log10(e) for e in errors]), rel=1e-4)
    assert found["baseline"]["images"] == 6


def test_pictures_of_other_cases_do_not_stand_beside_the_originals(dense):
    """Of a sum only the first case is the hospital's; with no noise to speak of its picture is that original's."""
    _, _, pictures, rows, _, sent = dense
    assert len(pictures["truth"]) == len(pictures["batch_4"]) == 2 and len(rows["batch_4"]["each"]) == 4
    assert len(sent["sum"].cases) == 3 == len(rows["sum"]["each"]) and pictures["sum"].shape == (1, 6, 6, 1)
    for key in ("gradient", "steps_4", "batch_4", "sum"):
        for picture, original, value in zip(pictures[key], pictures["truth"], rows[key]["each"]):
            assert inverting.image_quality.psnr(picture, original) == pytest.approx(value, abs=1e-6), key


def local_noise(c):
    c.aggregator = configuration.slot("aggregator", "local_dp", clip=0.5, noise_multiplier=1.0)
    c.input_span = "off"


def central_noise(c):
    c.aggregator = configuration.slot("aggregator", "private_sim_agg", clip=0.5, noise_multiplier=1.0)
    c.input_span = "off"


@pytest.mark.parametrize(
    "change, words, messages",
    [
        (local_noise, "one image, as this run sends it", 1),
        (central_noise, "as this run releases it: 3 hospitals, one image each", 3),
    ],
    ids=["local", "central"],
)
def test_the_own_row_says_what_is_seen(change, words, messages):
    experiment = built(data((6, 6, 1)), change=change, noise=(), batch=(1,), local_steps=(1,))
    scene = inverting.choose(experiment, experiment.initial(), experiment.plan)
    (sent,) = inverting._as_run(experiment, scene, jax.random.key(0))
    assert sent.words == words and len(sent.cases) == messages


def gradients(experiment, scene):
    """case -> its flat gradient, by plain autodiff of the task's loss."""

    @jax.jit
    def slope(params, x, y):
        loss = lambda p: experiment.task.loss({"params": p}, {"x": x, "y": y, "mask": jnp.ones(len(x))}, None)[0]
        return jax.grad(loss)(params)

    def of(cases, params=scene.variables["params"]):
        return slope(params, scene.x[cases], scene.y[cases])

    return of


def flat(parameters):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(parameters)])


def test_messages_are_what_their_rows_say(dense):
    """Sums are means of clients' gradients, k steps are k steps, and noise comes after the clip; by hand."""
    experiment, *_, scene, sent = dense
    of = gradients(experiment, scene)
    cases = sent["sum"].cases
    assert cases.shape == (3, 1) and list(experiment.data.site_of[cases[:, 0]]) == [0, 1, 2]
    single = [flat(of(c)) for c in cases]
    np.testing.assert_allclose(sent["sum"].observed, np.mean(single, 0), rtol=1e-4, atol=1e-7)
    batch = sent["batch_4"].cases
    assert batch.shape == (1, 4) and set(experiment.data.site_of[batch[0]]) == {0}
    np.testing.assert_allclose(sent["batch_4"].observed, flat(of(batch[0])), rtol=1e-4, atol=1e-7)
    now = scene.variables["params"]
    for _ in range(4):
        now = jax.tree.map(lambda w, g: w - 0.05 * g, now, of(scene.own[:1], now))
    moved = (flat(scene.variables["params"]) - flat(now)) / 0.2
    np.testing.assert_allclose(sent["steps_4"].observed, moved, atol=2e-5)
    norms = [np.linalg.norm(flat(of(scene.own[i : i + 1]))) for i in range(2)]
    clip = np.median(norms)
    noise = np.asarray(sent["noise_1"].observed) - single[0] * min(1, clip / norms[0])
    assert np.std(noise) == pytest.approx(clip, rel=0.15)  # 322 entries: 4 standard errors


def private(c):
    c.client = configuration.slot("client", "dp_sgd", noise_multiplier=2.0, clip=0.5, lr=0.05)
    c.batch_sampling = "poisson"
    c.input_span = "off"


def test_a_private_run_adds_its_own_row_and_shows_no_picture():
    """One step on one image under DP-SGD: the update is lr (clipped gradient + N(0, (z C)^2)); by hand."""
    experiment = built(data((6, 6, 1)), change=private, noise=(), batch=(1,), local_steps=(1,))
    found, pictures, rows, scene, sent = recovered(experiment)
    assert pictures == {} and found["formal"] and rows["own"]["noise"] == 2.0
    gradient = flat(gradients(experiment, scene)(scene.own[:1]))
    rest = np.asarray(sent["own"].observed) / 0.05 - gradient * min(1, 0.5 / np.linalg.norm(gradient))
    assert np.std(rest) == pytest.approx(2.0 * 0.5, rel=0.15)


def test_a_layer_in_the_span_of_its_cases_leaks_all_the_same():
    """Features beyond twice the cases: the run works in other coordinates, the attacker's are undone."""
    experiment = built(data((80,)), noise=(), batch=(1,), local_steps=(1,))
    assert "in the span" in experiment.how.text
    found, pictures, rows, *_ = recovered(experiment)
    assert rows["gradient"]["psnr"] > 80 and rows["gradient"]["ssim"] is None and pictures == {}
    json.dumps(found, allow_nan=False)


def test_nothing_where_nobody_asks():
    experiment = built(data((6, 6, 1)), attack="none")
    assert inverting.recover(experiment, None, experiment.plan) == ({}, {})


def bags(loaded):
    return FederatedData(**{**vars(loaded), "arrays": {**loaded.arrays, "instances": np.ones(24, np.int32)}})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda e: e._replace(data=bags(e.data)), "'inversion' given with bags of instances"),
        (lambda e: e._replace(task=e.task._replace(linear_input="")), r"cases of shape \(80,\) and model 'mlp'"),
        (lambda e: e._replace(attack=e.attack._replace(site="D")), "config.attack.site: unknown site 'D'"),
    ],
    ids=["bags", "no-image", "site"],
)
def test_what_cannot_be_attacked_is_told(change, message):
    experiment = change(built(data((80,))))
    with pytest.raises(UserError, match=message):
        inverting.check(experiment)


UNET = ("unet", {"width": 2, "depth": 1, "norm": "batch"})


def test_the_attackers_loss_is_the_tasks():
    """With sure labels it is the very loss that the hospital trains on, and so are the batch statistics."""
    experiment = built(
        data((8, 8, 1), masks=True), UNET, "segmentation", change=lambda c: setattr(c.task, "loss", "both")
    )
    scene = inverting.choose(experiment, experiment.initial(), experiment.plan)
    cases = scene.own[:2]
    batch = {"x": scene.x[cases], "y": scene.y[cases], "mask": jnp.ones(2)}
    soft = inverting.soft_loss(experiment, scene)
    both = jax.jit(
        lambda v, images, labels: (
            experiment.task.loss(v, batch, jax.random.key(0)),
            soft(v["params"], images, labels),
        ),
    )
    labels = jax.nn.softmax(sure(scene.y[cases], scene.classes))
    (true, updated), (mine, changes) = both(scene.variables, scene.back(scene.x[cases]), labels)
    assert mine == pytest.approx(float(true), rel=1e-4)
    change = jax.tree.map(lambda a, b: a - b, updated["batch_stats"], scene.variables["batch_stats"])
    np.testing.assert_allclose(np.concatenate(changes), flat(change), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_small_unet_from_start_to_end():
    """Every scenario of a segmentation with batch statistics; the raw gradient beats what noise of the clip leaves."""
    experiment = built(
        data((8, 8, 1), masks=True), UNET, "segmentation", steps=150, lr=0.05, batch=(1, 2), noise=(1.0,)
    )
    found, pictures, rows, *_ = recovered(experiment)
    assert set(rows) == {"gradient", "steps_4", "unknown", "batch_2", "sum", "noise_1"}
    assert rows["gradient"]["psnr"] > rows["noise_1"]["psnr"] and 0 <= rows["unknown"]["dice"] <= 1
    assert all(row["ssim"] <= 1 for row in rows.values()) and pictures["sum"].shape == (1, 8, 8, 1)
    json.dumps(found, allow_nan=False)
