"""Border distances: hand computed, other packages' numbers on rebuilt shapes, and all pairs of border voxels."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.distance import cdist

from fedjax_seg.tasks import surface


def ball(shape, centre, radius):
    return sum((g - c) ** 2 for g, c in zip(np.indices(shape), centre)) <= radius**2


def dice(first, second):
    return 2 * np.sum(first & second) / (first.sum() + second.sum())


def all_of(first, second, spacing):
    d = surface.directed_distances(first, second, spacing)
    return [surface.percentile_distance(d, *which) for which in ((95, "max"), (95, "pooled"), (100, "max"))]


def box(shape, *ranges):
    mask = np.zeros(shape, bool)
    mask[tuple(slice(*r) for r in ranges)] = True
    return mask


SPACE = (48, 48, 48)
BALL, SHIFTED = ball(SPACE, (20, 20, 20), 8), ball(SPACE, (22, 20, 20), 8)
LESION = ball(SPACE, (32, 36, 36), 4)  # a second, false positive one


def test_values_that_monai_and_medpy_give():
    """MONAI 1.6.1 (max of both directions, HD100) and MedPy 0.5.2 (pooled); Dice says that the shapes are the same."""
    assert round(dice(BALL, SHIFTED), 4) == 0.8151
    np.testing.assert_allclose(all_of(BALL, SHIFTED, (1, 1, 1)), [2.0, 2.0, 2.0])
    both = SHIFTED | LESION
    assert round(dice(BALL, both), 4) == 0.7683
    np.testing.assert_allclose(all_of(BALL, both, (1, 1, 1)), [19.6723, 18.0278, 21.5639], atol=5e-5)
    np.testing.assert_allclose(all_of(both, BALL, (1, 1, 1)), [19.6723, 18.0278, 21.5639], atol=5e-5)
    along_last = ball(SPACE, (20, 20, 22), 8)
    np.testing.assert_allclose(all_of(BALL, along_last, (1, 1, 3))[:2], [4.1231, 4.1231], atol=5e-5)


def test_spacing_belongs_to_the_axes_of_the_array():
    """A shift along the first axis is 2 mm whatever the last axis's spacing, and 2 of its own spacing."""
    np.testing.assert_allclose(all_of(BALL, SHIFTED, (1, 1, 3)), [2.0, 2.0, 2.0])
    points = [box((5, 9), (r, r + 1), (c, c + 1)) for r, c in ((1, 2), (4, 6))]
    np.testing.assert_allclose(all_of(*points, (1, 1)), [5.0] * 3)
    np.testing.assert_allclose(all_of(*points, (2, 0.5)), [np.hypot(6, 2)] * 3)


def test_hand_computed():
    point = [box((9, 9, 9), (x, x + 1), (4, 5), (4, 5)) for x in (2, 5)]
    np.testing.assert_allclose(all_of(*point, (1, 1, 1)), [3.0] * 3)  # single voxels 3 apart
    slabs = box((12, 10, 10), (0, 4)), box((12, 10, 10), (0, 6))  # at the end of the image
    assert all_of(*slabs, (1, 1, 1))[0] == 2.0
    # Squares 5 x 5 and 3 x 3 with one centre, borders of 16 and 8 pixels: corners are sqrt 2 apart, all else 1.
    outer, inner = box((9, 9), (2, 7), (2, 7)), box((9, 9), (3, 6), (3, 6))
    to_inner, to_outer = surface.directed_distances(outer, inner, (1, 1))
    assert sorted(np.round(to_inner**2)) == [1] * 12 + [2] * 4 and sorted(to_outer) == [1] * 8
    assert surface.surface_dice((to_inner, to_outer), 1.0) == 20 / 24
    assert surface.surface_dice((to_inner, to_outer), 0.99) == 0
    assert surface.surface_dice((to_inner, to_outer), 1.5) == 1
    # 16 sorted distances: position 0.95 * 15 = 14.25 is sqrt 2; pooled 24: 0.95 * 23 = 21.85 is sqrt 2 as well,
    # position 0.75 * 15 = 11.25 is a quarter of the way from 1 to sqrt 2, pooled 0.75 * 23 = 17.25 is 1.
    d = (to_inner, to_outer)
    np.testing.assert_allclose(surface.percentile_distance(d, 75, "max"), 1 + (np.sqrt(2) - 1) / 4)
    np.testing.assert_allclose(surface.percentile_distance(d, 75, "pooled"), 1)


def test_a_border_is_the_mask_without_its_erosion_by_the_cross():
    rng = np.random.default_rng(0)
    for shape, share in itertools.product(((7, 9), (5, 6, 7), (1, 4)), (0.5, 0.9, 1.0)):
        mask = rng.random(shape) < share
        eroded = ndimage.binary_erosion(mask, ndimage.generate_binary_structure(mask.ndim, 1), border_value=0)
        np.testing.assert_array_equal(surface.border(mask), mask & ~eroded)


def test_the_penalty_is_the_diagonal_in_mm():
    assert round(surface.diagonal((240, 240, 155), (1, 1, 1)), 5) == 373.12866
    assert surface.diagonal((30, 40), (2, 1.0)) == np.hypot(60, 40)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([(8, 11), (5, 6, 7)]), st.sampled_from([0.03, 0.3, 0.8, 1.0]))
def test_distances_are_those_of_all_pairs_of_border_voxels(seed, shape, share):
    """Over the whole image and by brute force, where the code crops to the union of both masks."""
    rng = np.random.default_rng(seed)
    spacing = rng.uniform(0.5, 3, len(shape))
    masks = [ndimage.binary_closing(rng.random(shape) < share) for _ in range(2)]
    for mask in masks:
        mask.flat[rng.integers(mask.size)] = True
    cross = ndimage.generate_binary_structure(len(shape), 1)
    points = [np.argwhere(m & ~ndimage.binary_erosion(m, cross, border_value=0)) * spacing for m in masks]
    pairs = cdist(*points)
    first, second = surface.directed_distances(*masks, spacing)
    np.testing.assert_allclose(first, pairs.min(1), atol=1e-9)
    np.testing.assert_allclose(second, pairs.min(0), atol=1e-9)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_both_ways_to_the_nearest_voxel_agree(share):
    """The search tree, which sparse borders take, and the distance transform, which dense ones take."""
    rng = np.random.default_rng(4)
    points, targets = rng.random((2, 15, 11, 13)) < share
    spacing = np.array([0.7, 1.3, 2.0])
    tree, transform = (f(points, targets, spacing) for f in (surface.by_tree, surface.by_transform))
    np.testing.assert_allclose(tree, transform, rtol=1e-12)
    np.testing.assert_allclose(tree, cdist(np.argwhere(points) * spacing, np.argwhere(targets) * spacing).min(1))
