"""Colour deconvolution: pixels by hand, the way back, and what a hospital's shift may depend on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedjax_seg.data.stain import HED_FROM_RGB, Jitter, draw, hed2rgb, rgb2hed, shift

# of an independent implementation (scikit-image, hed_from_rgb)
PUBLISHED_INVERSE = [
    [1.87798274, -1.00767869, -0.55611582],
    [-0.06590806, 1.13473037, -0.1355218],
    [-0.60190736, -0.48041419, 1.57358807],
]


def test_the_inverse_matrix_is_the_published_one():
    np.testing.assert_allclose(HED_FROM_RGB, PUBLISHED_INVERSE, atol=1e-7)


@pytest.mark.parametrize(
    "rgb, hed",
    [
        ((1, 1, 1), (0, 0, 0)),
        ((math.exp(-0.65), math.exp(-0.70), math.exp(-0.29)), (1, 0, 0)),
        ((math.exp(-0.14), math.exp(-1.98), math.exp(-0.22)), (0, 2, 0)),
        # haematoxylin 1 and eosin 0.5: densities 0.685, 1.195, 0.345
        ((math.exp(-0.685), math.exp(-1.195), math.exp(-0.345)), (1, 0.5, 0)),
        # density 1 in all: the sums of the columns of the inverse
        ((1 / math.e,) * 3, np.sum(PUBLISHED_INVERSE, 0)),
    ],
)
def test_a_pixel_by_hand(rgb, hed):
    np.testing.assert_allclose(rgb2hed(np.array(rgb, float)), hed, atol=1e-6)
    np.testing.assert_allclose(hed2rgb(np.array(hed, float)), rgb, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, (2, 4, 4, 3), elements=st.floats(0, 1, width=32)))
def test_the_way_back(x):
    np.testing.assert_allclose(hed2rgb(rgb2hed(x)), x, atol=1e-5)


def test_a_shift_by_hand():
    none = Jitter(np.ones(3), np.zeros(3))
    x = np.random.default_rng(0).random((300, 2, 2, 3)).astype(np.float32)
    assert shift(x, none).dtype == np.float32
    np.testing.assert_allclose(shift(x, none), x, atol=1e-5)
    purple = np.exp(-np.array([0.65, 0.70, 0.29])).reshape(1, 1, 1, 3)
    twice = Jitter(np.array([2.0, 1, 1]), np.zeros(3))
    np.testing.assert_allclose(shift(purple, twice), purple**2, atol=1e-6)
    pink = Jitter(np.ones(3), np.array([0, 0.1, 0]))
    np.testing.assert_allclose(shift(np.ones((1, 1, 1, 3)), pink)[0, 0, 0], np.exp([-0.007, -0.099, -0.011]), atol=1e-6)
    bleach = Jitter(np.ones(3), np.array([0, -0.1, 0]))
    assert shift(np.ones((1, 1, 1, 3)), bleach).max() == 1  # nothing is brighter than white


def test_a_draw_depends_on_the_seed_and_the_name():
    same, other = draw(0.2, seed=1, client="A"), [draw(0.2, seed=2, client="A"), draw(0.2, seed=1, client="B")]
    assert np.array_equal(same.alpha, draw(0.2, seed=1, client="A").alpha)
    assert not any(np.array_equal(same.alpha, o.alpha) or np.array_equal(same.beta, o.beta) for o in other)
    many = [draw(0.3, seed=s, client="A") for s in range(500)]
    alpha, beta = np.array([j.alpha for j in many]), np.array([j.beta for j in many])
    # uniform of half width s: standard deviation s / sqrt 3
    for values, centre in ((alpha, 1), (beta, 0)):
        assert np.abs(values - centre).max() <= 0.3 and np.abs(values - centre).max() > 0.29
        np.testing.assert_allclose(values.mean(0), centre, atol=0.03)
        np.testing.assert_allclose(values.std(0), 0.3 / math.sqrt(3), atol=0.015)
