"""Augmentation: image and mask move alike, examples are independent, padding and labels stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import augment

KEY = jax.random.key(3)


def batch(count=6, height=5, width=7, masked=()):
    place = np.arange(height * width, dtype=np.float32).reshape(height, width)
    x = np.repeat(place[None, ..., None], count, 0) + 100 * np.arange(count).reshape(-1, 1, 1, 1)
    mask = np.array([i not in masked for i in range(count)], np.float32)
    return {
        "x": jnp.asarray(x), "y": jnp.asarray(x[..., 0].astype(np.int32)),
        "mask": jnp.asarray(mask), "spacing": jnp.ones((count, 2)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    """(image and mask after flips and shifts of up to 2 pixels, and before), 800 examples."""
    change = jax.jit(augment.images(shift=2, intensity=0, noise=0))
    start = batch(800)
    return jax.tree.map(np.asarray, (change(start, KEY), start))


@pytest.fixture(scope="module")
def full():
    return jax.jit(augment.images(shift=2))


def test_none_is_the_batch_itself():
    one = batch()
    assert augment.make("none")(one, KEY) is one


def test_image_and_mask_come_from_the_same_places(moved):
    found, start = moved
    assert np.array_equal(found["x"][..., 0], found["y"]) and found["y"].dtype == np.int32
    assert all(set(a.flat) <= set(b.flat) for a, b in zip(found["y"], start["y"]))  # no new label
    assert np.array_equal(found["spacing"], start["spacing"]) and np.array_equal(found["mask"], start["mask"])


def test_all_flips_and_shifts_occur_equally_often(moved):
    """A shifted picture repeats its edge; a flip and a shift of up to 2 pixels tell each other apart."""
    found, start = moved
    counts = np.zeros((4, 5, 5), int)
    for a, b in zip(found["y"], start["y"]):
        framed = np.pad(b, 2, mode="edge")
        windows = {(i, j): framed[i : i + 5, j : j + 7] for i in range(5) for j in range(5)}
        turns = [lambda w: w, lambda w: w[::-1], lambda w: w[:, ::-1], lambda w: w[::-1, ::-1]]
        hits = [(k, *at) for k, turn in enumerate(turns) for at, w in windows.items() if np.array_equal(a, turn(w))]
        assert len(hits) == 1
        counts[hits[0]] += 1
    # multinomial counts: within 4.5 standard deviations
    assert np.abs(counts.sum((1, 2)) - 200).max() < 4.5 * np.sqrt(800 * 0.25 * 0.75)
    for axis in ((0, 1), (0, 2)):
        assert np.abs(counts.sum(axis) - 160).max() < 4.5 * np.sqrt(800 * 0.2 * 0.8)


def test_grey_levels_and_noise_leave_the_mask_alone():
    flat = batch(200) | {"x": jnp.full((200, 5, 7, 1), 0.5)}
    found = jax.jit(augment.images(flips=False, shift=0, intensity=0.2, noise=0.03))(flat, KEY)
    values = np.asarray(found["x"])
    assert np.array_equal(found["y"], flat["y"])
    # 0.5 s + o with s, o uniform in [-0.2, 0.2]: variance (0.25 + 1) 0.2^2 / 3, and 0.03^2 / 35 of the noise's mean
    level = values.mean((1, 2, 3))
    assert level.std() == pytest.approx(np.sqrt(1.25 * 0.04 / 3), rel=0.15) and np.abs(level - 0.5).max() < 0.33
    grain = values - level[:, None, None, None]
    assert grain.std() == pytest.approx(0.03 * np.sqrt(34 / 35), rel=0.05)


def test_padding_is_untouched_and_examples_are_independent(full):
    whole, part = batch(6), batch(6, masked=(1, 4))
    a, b = full(whole, KEY), full(part, KEY)
    assert not np.array_equal(a["x"][1], whole["x"][1])
    for i in range(6):
        same = part if i in (1, 4) else a
        assert np.array_equal(b["x"][i], same["x"][i]) and np.array_equal(b["y"][i], same["y"][i])
    others = {name: jnp.where(jnp.arange(6).reshape(6, *[1] * (v.ndim - 1)) < 3, v, 0) for name, v in whole.items()}
    assert np.array_equal(full(others, KEY)["x"][:3], a["x"][:3])
    assert not np.array_equal(full(whole, jax.random.key(4))["x"], a["x"])


def test_under_vmap_every_client_draws_its_own(full):
    keys = jax.random.split(KEY, 3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), batch())
    together = jax.jit(jax.vmap(full))(stacked, keys)
    for k in range(3):
        alone = full(batch(), keys[k])
        np.testing.assert_allclose(together["x"][k], alone["x"], rtol=1e-5)
        assert np.array_equal(together["y"][k], alone["y"])


def test_labels_of_whole_images_stay():
    one = batch() | {"y": jnp.arange(6)}
    assert np.array_equal(jax.jit(augment.images(noise=0))(one, KEY)["y"], np.arange(6))


def test_patches_and_labels_are_mirrored_alike_and_every_mirror_occurs():
    place = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    one = {"x": jnp.asarray(np.repeat(place[None, ..., None], 400, 0)), "mask": jnp.ones(400)}
    one["y"] = one["x"][..., 0].astype(jnp.uint8)
    found = jax.jit(augment.volumes(intensity=0))(one, KEY)
    assert np.array_equal(found["x"][..., 0].astype(np.uint8), found["y"])
    turns = [tuple(a for a in range(3) if code >> a & 1) for code in range(8)]
    hits = [[np.array_equal(y, np.flip(place, turn)) for turn in turns] for y in np.asarray(found["y"])]
    assert np.array(hits).sum(1).tolist() == [1] * 400
    assert np.abs(np.array(hits).sum(0) - 50).max() < 4.5 * np.sqrt(400 / 8 * 7 / 8)
    still = jax.jit(augment.volumes(flips=(False, False, True), intensity=0))(one, KEY)["y"]
    assert {tuple(y[:, :, 0].ravel()) for y in np.asarray(still)} == {tuple(place[:, :, i].ravel()) for i in (0, 3)}


def test_channels_of_a_patch_change_their_contrast_apart():
    one = {"x": jnp.ones((300, 2, 2, 2, 2)), "y": jnp.zeros((300, 2, 2, 2), jnp.uint8), "mask": jnp.ones(300)}
    values = np.asarray(jax.jit(augment.volumes(intensity=0.2))(one, KEY)["x"])
    assert np.ptp(values, (1, 2, 3)).max() == 0  # one draw for a whole channel
    level = values[:, 0, 0, 0]  # 1 + s + o: variance 2 * 0.2^2 / 3
    assert level.std(0) == pytest.approx(np.full(2, np.sqrt(2 * 0.04 / 3)), rel=0.15)
    assert abs(np.corrcoef(level.T)[0, 1]) < 0.25


@pytest.mark.parametrize(
    "name, options, text",
    [
        ("image", {}, "augment.name: unknown name 'image'; did you mean 'images'"),
        ("images", {"shift": 0.5}, "augment.shift: 0.5 given, an integer"),
        ("images", {"noise": -1.0}, "augment.noise"),
        ("images", {"flip": True}, "unknown option 'flip'"),
        ("volumes", {"flips": (True,)}, "augment.flips: .* three values"),
    ],
)
def test_wrong_options(name, options, text):
    with pytest.raises(UserError, match=text):
        augment.make(name, **options)
