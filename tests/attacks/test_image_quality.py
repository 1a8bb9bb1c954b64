"""PSNR, SSIM, Dice and the matching, against hand values and the formula written out."""

import itertools

import numpy as np
import pytest

from fedjax_seg.attacks import image_quality as quality


@pytest.mark.parametrize("error, peak, expected", [(0.1, 1.0, 20.0), (0.01, 1.0, 40.0), (0.5, 5.0, 20.0), (1, 1, 0)])
def test_psnr_by_hand(error, peak, expected):
    """An error of a tenth of the peak in every pixel is 20 dB."""
    truth = np.linspace(0, 1, 24).reshape(2, 3, 4)
    signs = np.where(np.arange(24).reshape(2, 3, 4) % 2, -1, 1)
    assert quality.psnr(truth + error * signs, truth, peak) == pytest.approx(expected)
    assert quality.psnr(truth, truth) == quality.CEILING


def written_out(x, y, peak=1.0):
    """Equation 13 of Wang et al. (2004) with its 11 x 11 window, window by window."""
    line = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    window = np.outer(line, line) / np.outer(line, line).sum()
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    found = []
    for i, j in itertools.product(range(x.shape[0] - 10), range(x.shape[1] - 10)):
        a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
        ma, mb = (window * a).sum(), (window * b).sum()
        va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
        both = (window * (a - ma) * (b - mb)).sum()
        found.append((2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return np.mean(found)


@pytest.mark.parametrize("peak", [1.0, 255.0])
def test_ssim_is_the_formula(peak):
    random = np.random.default_rng(0)
    x = peak * random.uniform(size=(14, 17))
    y = 0.7 * x + 0.3 * peak * random.uniform(size=(14, 17))
    assert quality.ssim(x, y, peak) == pytest.approx(written_out(x, y, peak), abs=1e-9)
    assert quality.ssim(x, x, peak) == pytest.approx(1)
    colour = np.stack([x, y, y], -1)
    one = written_out(x, y, peak)
    assert quality.ssim(colour, np.stack([x, x, y], -1), peak) == pytest.approx((1 + one + 1) / 3, abs=1e-9)


@pytest.mark.parametrize("size", [4, 12])
def test_ssim_of_flat_images_by_hand(size):
    """Without variance only the means speak: (2 a b + C1) / (a^2 + b^2 + C1); small images as well."""
    a, b = np.full((size, size), 0.25), np.full((size, size), 0.75)
    expected = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)
    assert quality.ssim(a, b) == pytest.approx(expected)


def test_dice_by_hand():
    a, b = np.array([[1, 2, 0], [0, 0, 0]]), np.array([[1, 0, 0], [3, 0, 0]])
    assert quality.dice(a, b) == 0.5  # one of two and two
    assert (quality.dice(a, 0 * a), quality.dice(0 * a, 0 * a)) == (0, 1)


def test_recovered_images_find_their_originals():
    truths = np.random.default_rng(1).uniform(size=(4, 5, 5, 1))
    order = [2, 0, 3, 1]
    found = truths[order] + 0.01
    assert quality.matched(found, truths) == [order.index(i) for i in range(4)]
    # The best of all pairs goes first only where the sum is the largest: 0 could take either, 1 only the second.
    a, b = np.zeros(4), np.full(4, 0.2)
    assert quality.matched([np.full(4, 0.11), np.full(4, 0.05)], [a, b]) == [1, 0]
