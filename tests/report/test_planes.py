"""Which slices are cut out of a volume, and which way up they come: volumes whose voxels tell where they are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import planes

SHAPE = (5, 6, 7)  # left, back, head
PLACE = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)  # PLACE[x, y, z] = (x, y, z)
ORIENTATIONS = ["".join(o) for pairs in itertools.permutations(("LR", "PA", "SI")) for o in itertools.product(*pairs)]


def stored(volume, orientation):
    """The upright volume as a file of that orientation holds it; written by looking up each voxel."""
    letters, out = "LPS", {}
    axes = [next(a for a, pair in enumerate(("LR", "PA", "SI")) if o in pair) for o in orientation]
    shape = [volume.shape[a] for a in axes]
    for index in np.ndindex(*shape):
        place = [0, 0, 0]
        for i, (axis, letter) in enumerate(zip(axes, orientation)):
            place[axis] = index[i] if letter == letters[axis] else shape[i] - 1 - index[i]
        out[index] = volume[tuple(place)]
    return np.array([out[i] for i in np.ndindex(*shape)]).reshape(*shape, *volume.shape[3:])


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_every_orientation_is_turned_upright(orientation):
    assert len(ORIENTATIONS) == 48
    small = PLACE[:2, :3, :4]
    np.testing.assert_array_equal(planes.upright(stored(small, orientation), orientation), small)


@pytest.mark.parametrize("orientation", ["", "LP", "LPL", "LRS", "XPS", "lps", "LPSI"])
def test_no_orientation_is_a_clear_error(orientation):
    with pytest.raises(UserError, match=r"orientation: .* one letter each of L or R"):
        planes.upright(PLACE, orientation)


def test_slices_are_the_way_up_that_radiologists_see():
    at = (1, 2, 3)
    axial, coronal, sagittal = (planes.cut(PLACE, name, at) for name in planes.NAMES)
    # Rows from the top, columns from the left. Axial: front up; the others: head up; the patient's left is right.
    assert axial.shape == (6, 5, 3) and coronal.shape == (7, 5, 3) and sagittal.shape == (7, 6, 3)
    assert axial[0, 0].tolist() == [0, 0, 3] and axial[-1, -1].tolist() == [4, 5, 3]
    assert coronal[0, 0].tolist() == [0, 2, 6] and coronal[-1, -1].tolist() == [4, 2, 0]
    assert sagittal[0, 0].tolist() == [1, 0, 6] and sagittal[-1, -1].tolist() == [1, 5, 0]


def test_pixels_are_square_whatever_the_voxels_are():
    coronal = planes.cut(PLACE[..., 2], "coronal", (0, 0, 0), (1.0, 1.0, 3.0))
    assert coronal.shape == (21, 5)
    assert coronal[:, 0].tolist() == [z for z in range(6, -1, -1) for _ in range(3)]
    assert planes.cut(PLACE[..., 0], "axial", (0, 0, 0), (1.0, 0.5, 3.0)).shape == (6, 10)
    assert planes.cut(PLACE[..., 0], "axial", (0, 0, 0), (1.0, 0.6, 3.0)).shape == (6, 8)  # 5 x 1 / 0.6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.5))
def test_the_largest_area_is_found_along_every_axis(seed, share):
    mask = (np.random.default_rng(seed).random((3, 4, 5)) < share) * 2
    at = planes.largest(mask)
    for axis in range(3):
        areas = [np.count_nonzero(np.take(mask, i, axis)) for i in range(mask.shape[axis])]
        assert at[axis] == (areas.index(max(areas)) if mask.any() else mask.shape[axis] // 2)


def a_case():
    """A head of values 10 to 15 in the air, a bright lesion in it, and a prediction one voxel too far left."""
    image, truth = np.zeros((24, 30, 20)), np.zeros((24, 30, 20), np.uint8)
    image[4:20, 5:25, 3:17] = np.linspace(10, 15, 14)
    truth[8:12, 10:13, 5:10] = 1
    truth[9, 10, 6] = 3
    image[truth > 0] = 20
    return image, truth, np.roll(truth, 1, 0)


def test_planes_go_through_the_lesion_and_leave_the_air_out():
    image, truth, predicted = a_case()
    scans = planes.planes("case", image, truth, predicted)
    assert [s.title for s in scans] == ["case\naxial", "case\ncoronal", "case\nsagittal"]
    # areas by hand: 4 x 3, 4 x 5 and 3 x 5 voxels; the head is 16 x 20 x 14, with three voxels of air around
    assert [int(np.sum(s.truth > 0)) for s in scans] == [12, 20, 15]
    assert [s.image.shape for s in scans] == [(26, 22), (20, 22), (20, 26)]
    assert all(s.truth.shape == s.predicted.shape == s.image.shape for s in scans)
    axial = scans[0]
    assert (axial.image[axial.truth > 0] == 1).all() and axial.image[0, 0] == 0
    left = [np.flatnonzero((m > 0).any(0)).min() for m in (axial.truth, axial.predicted)]
    assert left[1] == left[0] + 1
    assert 3 in scans[1].truth  # classes are kept; the coronal slice is the first of the largest ones


@pytest.mark.parametrize("orientation", ["LPS", "RAS", "SLA", "PIR"])
def test_planes_do_not_depend_on_how_a_file_stores_them(orientation):
    image, truth, predicted = a_case()
    truth[9:11, 10, 5:10] = 0  # one slice is the largest along every axis
    spacing = dict(zip("xyz", (1.0, 1.0, 2.0)))
    upright = planes.planes("", image, truth, predicted, spacing=tuple(spacing.values()))
    axes = ["xyz"[next(a for a, pair in enumerate(("LR", "PA", "SI")) if o in pair)] for o in orientation]
    kept = [stored(v, orientation) for v in (image, truth, predicted)]
    turned = planes.planes("", *kept, spacing=[spacing[a] for a in axes], orientation=orientation)
    for one, two in zip(upright, turned):
        assert one.image.shape == two.image.shape
        assert int(np.sum(one.truth > 0)) == int(np.sum(two.truth > 0))
    np.testing.assert_array_equal(upright[1].truth, turned[1].truth)


def test_where_nothing_is_true_the_prediction_decides_and_else_the_middle():
    image, truth, predicted = a_case()
    found = planes.planes("", image, 0 * truth, predicted)
    assert [int(np.sum(s.predicted > 0)) for s in found] == [12, 20, 15]
    nothing = planes.planes("", image, 0 * truth)
    # z = 10 is the eighth of the head's 14 slices: 10 + 5 * 7 / 13, in a window from 10 to 20
    assert nothing[0].predicted is None and nothing[0].image.max() == pytest.approx(0.5 * 7 / 13)
    blank = planes.planes("", 0 * image, 0 * truth, 0 * truth)
    assert [s.image.shape for s in blank] == [(30, 24), (20, 24), (20, 30)]


def test_intensities_lose_their_extremes_and_air_is_black():
    image = np.zeros(10_000)
    image[:4000] = np.linspace(-2, 2, 4000)
    image[4000] = 1000.0  # one vessel
    image[4001] = np.nan
    shown = planes.window(image)
    assert (shown >= 0).all() and (shown <= 1).all()
    assert shown[5000] == 0  # the air of a z-score over the brain
    # 1 % of the values are black, half a percent white: the middle of the range is near its middle
    assert 0.45 < shown[2000] < 0.55 and shown[4000] == 1
    assert planes.window(np.zeros(3)).tolist() == [0, 0, 0]


def test_shapes_must_agree():
    image, truth, _ = a_case()
    with pytest.raises(ValueError, match="class map of shape"):
        planes.planes("", image[1:], truth)
