"""The memorisation check: copies are found, new slices pass, and its numbers are those worked out by hand."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.core.checks import UserError
from fedjax_seg.synthesis import memorisation


def drawn(seed, n, side=16):
    """Slices that vary in six directions, with noise."""
    basis = np.random.default_rng(99).normal(size=(6, side, side))
    random = np.random.default_rng(seed)
    x = np.einsum("nk,khw->nhw", random.normal(size=(n, 6)), basis) + 0.1 * random.normal(size=(n, side, side))
    return np.clip(0.2 * x, -1, 1)[..., None]


TRAINING, HELD_OUT = drawn(0, 300), drawn(1, 120)


def test_new_slices_pass():
    for seed in (2, 3, 4):
        found = memorisation.check(drawn(seed, 200), TRAINING, HELD_OUT)
        assert found.verdict.startswith("memorisation: no sign of it"), found.verdict
        assert found.p > 0.01 and 0.9 < found.ratio < 1.1 and found.copies <= found.reference_copies + 0.01


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_copies_are_found(share):
    samples = drawn(2, 200)
    count = int(share * len(samples))
    samples[:count] = TRAINING[50 : 50 + count] + 0.01 * np.random.default_rng(5).normal(size=(count, 16, 16, 1))
    found = memorisation.check(samples, TRAINING, HELD_OUT)
    assert found.verdict.startswith("memorisation: COPIES"), found.verdict
    assert found.copies >= share and found.nearer >= share and found.clear >= 0.9 * count
    np.testing.assert_array_equal(found.samples.row[:count], np.arange(50, 50 + count))
    np.testing.assert_array_equal(found.pairs[1], TRAINING[found.samples.row[np.argsort(
        found.samples.distance / found.samples.second)[:6]], ..., 0])  # fmt: skip


def test_a_copy_under_noise_of_single_pixels_is_found():
    # Noise of one pixel averages out over blocks: 64 pixels per side are compared as 16.
    fine = lambda x: np.repeat(np.repeat(x, 4, 1), 4, 2)
    samples = fine(TRAINING[:100]) + 0.15 * np.random.default_rng(1).normal(size=(100, 64, 64, 1))
    found = memorisation.check(samples, fine(TRAINING), fine(HELD_OUT))
    assert found.copies > 0.9 and "COPIES" in found.verdict


def test_one_copy_among_many_is_found():
    samples = drawn(2, 200)
    samples[17] = TRAINING[3]
    found = memorisation.check(samples, TRAINING, HELD_OUT)
    assert found.clear == 1 and "COPIES" in found.verdict and found.copies_p > 0.01


@pytest.mark.parametrize("strength", [0.05, 0.2])
def test_smooth_samples_are_near_but_no_copies(strength):
    found = memorisation.check(strength * drawn(2, 200), TRAINING, HELD_OUT)
    assert found.verdict.startswith("memorisation: nearer to training"), found.verdict
    assert found.ratio < 0.9 and found.p < 1e-6 and found.copies <= 0.02 and found.clear == 0


def test_the_chance_of_copies_by_hand():
    # 2 copies of 2 samples, none of 2 reference slices: 1 of the 6 ways to choose two of four.
    found = memorisation.check(levels([0.0, 0.9]), levels([0.0, 0.9]), levels([0.4, 0.5]))
    assert (found.copies, found.reference_copies, found.clear) == (1.0, 0.0, 2)
    assert found.copies_p == pytest.approx(1 / 6)


def test_slices_of_one_patient_do_not_hide_a_copy():
    # Neighbouring slices of a patient are alike: the second nearest has to be somebody else's.
    twins = np.repeat(TRAINING[:100], 2, 0) + 0.005 * np.random.default_rng(3).normal(size=(200, 16, 16, 1))
    patients = [f"p{i // 2}" for i in range(200)]
    assert memorisation.check(TRAINING[:50], twins, HELD_OUT, patients=patients).copies == 1
    assert memorisation.check(TRAINING[:50], twins, HELD_OUT).copies < 0.2


def test_nearest_by_hand():
    training = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.1]])
    got = memorisation.nearest(np.array([[3.0, 4.0], [1.0, 0.0]]), training, np.array([0, 1, 1]))
    np.testing.assert_allclose(got.distance, [0, np.sqrt(1 / 2)])
    np.testing.assert_allclose(got.second, [np.sqrt(25 / 2), np.sqrt((4 + 16) / 2)])
    assert got.row.tolist() == [1, 0] and got.copies.tolist() == [True, True]
    person = np.array([0, 1, 1])
    got = memorisation.nearest(training, training, person, person)  # among themselves: never with their own
    assert got.row.tolist() == [1, 0, 0] and got.distance[0] == pytest.approx(np.sqrt(25 / 2))


def levels(values):
    """Slices of one value each: their distance is the difference of values."""
    return np.asarray(values, float)[:, None, None, None] * np.ones((1, 4, 4, 1))


@pytest.mark.parametrize(
    "samples, p, nearer",
    [
        ([0.05], 1 / 100, 1.0),  # one of 100 exchangeable distances is the smallest with chance 1/100
        ([0.2], 1.0, 0.0),
        ([0.05, 0.05], 2 / (101 * 100), 1.0),  # both are the two smallest of 101
        ([0.05, 0.2], 1 - 99 / 101, 0.5),  # the smallest of 101 is one of these two
    ],
)
def test_the_chance_by_hand(samples, p, nearer):
    held_out = levels(0.1 + 0.001 * np.arange(99))
    found = memorisation.check(levels(samples), levels([0.0, -0.9]), held_out)
    assert found.threshold == pytest.approx(0.1)
    assert found.p == pytest.approx(p, rel=1e-9) and found.nearer == nearer


def test_without_held_out_slices_training_is_compared_with_itself():
    none = np.zeros((0, 16, 16, 1))
    found = memorisation.check(drawn(2, 100), TRAINING, none)
    assert "300 training slices of other patients" in found.verdict and "no sign" in found.verdict
    assert "COPIES" in memorisation.check(TRAINING[:20], TRAINING, none).verdict
    with pytest.raises(UserError, match="1 training patient"):
        memorisation.check(drawn(2, 3), TRAINING, none, patients=["a"] * 300)


def test_its_files(tmp_path):
    found = memorisation.check(drawn(2, 30), TRAINING, HELD_OUT)
    heights = []
    for pairs in (False, True):
        folder = tmp_path / str(pairs)
        heights.append(Image.open(memorisation.save(folder, found, pairs=pairs)).height)
    assert heights[0] < heights[1]  # no training slice in the figure unless asked for
    rows = list(csv.DictReader((folder / "memorisation.csv").read_text().splitlines()))
    assert [r["group"] for r in rows].count("sample") == 30 and len(rows) == 150
    np.testing.assert_allclose([float(r["distance"]) for r in rows[:30]], found.samples.distance, atol=1e-6)
    told = json.loads((folder / "memorisation.json").read_text())
    assert told["verdict"] == found.verdict and told["ratio"] == found.ratio
