import numpy as np
import pytest

from fedjax_seg.data import connectivity


def _series(points, rois, seed=0):
    return np.random.default_rng(seed).normal(size=(points, rois))


def test_upper_triangle_is_numpy_corrcoef_row_by_row():
    series = _series(30, 7) * 50 + 1000
    r, ok = connectivity.edges(series)
    full = np.corrcoef(series.T)
    expected = [full[i, j] for i in range(7) for j in range(i + 1, 7)]
    np.testing.assert_allclose(r, expected, atol=1e-6)
    assert r.dtype == np.float32 and ok.dtype == bool and ok.all()


def test_hand_computed_correlation():
    # a = (1, 2, 3), b = (1, 3, 2): centred (-1, 0, 1) and (-1, 1, 0), product 1, norms sqrt 2 each -> 1/2
    r, _ = connectivity.edges(np.array([[1.0, 1.0], [2.0, 3.0], [3.0, 2.0]]))
    assert r == pytest.approx([0.5])


def test_the_paper_atlas_gives_6670_features():
    assert connectivity.edges(_series(20, 116))[0].shape == (6670,)


def test_fisher_z_is_arctanh_in_closed_form():
    r, _ = connectivity.edges(_series(40, 5))
    z, _ = connectivity.edges(_series(40, 5), fisher_z=True)
    r = r.astype(np.float64)
    np.testing.assert_allclose(z, 0.5 * np.log((1 + r) / (1 - r)), rtol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_identical_columns_are_clipped_before_fisher_z(sign):
    column = _series(20, 1)
    z, _ = connectivity.edges(np.hstack([column, sign * column]), fisher_z=True)
    assert z == pytest.approx([sign * 0.5 * np.log((2 - 1e-7) / 1e-7)], rel=1e-6)  # r = 1 - 1e-7


@pytest.mark.parametrize("fisher_z", [False, True])
@pytest.mark.parametrize("cell", [0.0, 812.25, np.nan, np.inf])
def test_a_bad_roi_zeroes_its_edges_and_no_others(cell, fisher_z):
    series = _series(25, 5)
    clean, _ = connectivity.edges(series, fisher_z=fisher_z)
    if np.isfinite(cell):
        series[:, 2] = cell
    else:
        series[7, 2] = cell
    x, ok = connectivity.edges(series, fisher_z=fisher_z)
    touched = np.array([2 in (i, j) for i in range(5) for j in range(i + 1, 5)])
    assert connectivity.bad_rois(series).tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(ok, ~touched)
    np.testing.assert_array_equal(x[touched], 0.0)
    np.testing.assert_allclose(x[~touched], clean[~touched], atol=1e-6)


def test_one_zero_column_of_116_touches_115_edges():
    series = _series(40, 116)
    series[:, 100] = 0.0
    x, ok = connectivity.edges(series)
    assert (~ok).sum() == 115 and np.isfinite(x).all()


@pytest.mark.parametrize("unit", [1e-200, 1e-3, 1e200])
def test_the_unit_of_measurement_does_not_matter(unit):
    series = _series(30, 4)
    np.testing.assert_allclose(connectivity.edges(series * unit)[0], connectivity.edges(series)[0], atol=1e-6)
