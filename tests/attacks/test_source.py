"""Whose case and which hospital: by hand, under the null, and on hospitals whose models know their own."""

import numpy as np
import pytest
from scipy import stats

from fedjax_seg.attacks import lira, source
from fedjax_seg.attacks import membership_scores as scores
from fedjax_seg.core.checks import UserError


def test_attribution_by_hand():
    losses = np.array([[0.1, 0.5, 0.9], [0.4, 0.2, 0.9], [0.3, 0.2, 0.9], [0.9, 0.8, 0.1], [0.2, 0.7, 0.8]])
    found = source.attribution(losses, np.array([0, 1, 0, 2, 1]))
    assert found["confusion"] == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert found["accuracy"] == 3 / 5 and found["n"] == 5 and found["left_out"] == 0
    exact = stats.binomtest(3, 5).proportion_ci(0.95, "exact")
    assert (found["low"], found["high"]) == pytest.approx((exact.low, exact.high))
    assert found["chance"] == 2 / 5 and found["chance_uniform"] == pytest.approx(1 / 3)
    assert found["words"].startswith("no better than a guess")


def test_models_that_know_their_own_are_found_and_equal_ones_are_chance():
    rng = np.random.default_rng(0)
    owner = rng.integers(0, 5, 1000)
    losses = rng.normal(size=(1000, 5))
    losses[np.arange(1000), owner] -= 1.5
    found = source.attribution(losses, owner)
    # P(x - 1.5 is below 4 normal values), by quadrature.
    x = np.linspace(-9, 9, 4001)
    expected = np.trapezoid(stats.norm.pdf(x + 1.5) * stats.norm.sf(x) ** 4, x)
    assert found["low"] < expected < found["high"] and found["words"].startswith("hospitals are told apart")
    # One and the same model for all (secure sums, no personal part): exactly a blind guess.
    same = source.attribution(np.repeat(rng.normal(size=(1000, 1)), 5, 1), owner)
    assert same["accuracy"] == pytest.approx(1 / 5) and same["words"].startswith("no better than a guess")
    np.testing.assert_allclose(np.sum(same["confusion"], 1), np.bincount(owner))


def test_naming_the_largest_hospital_is_no_attack():
    owner = np.array([0] * 90 + [1] * 10)
    losses = np.tile([0.1, 0.2], (100, 1))
    found = source.attribution(losses, owner)
    assert found["accuracy"] == 0.9 == found["chance"] and found["words"].startswith("no better than a guess")


def test_absent_models():
    losses = np.array([[0.1, 0.5, 0.2], [0.4, 0.2, 0.1], [0.3, 0.2, np.nan]])
    found = source.attribution(losses, np.array([0, 1, 2]), present=np.array([True, True, False]))
    assert (found["n"], found["left_out"], found["accuracy"], found["chance_uniform"]) == (2, 1, 1.0, 0.5)
    rowwise = source.attribution(losses, np.array([0, 1, 2]), present=np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1]]))
    assert (rowwise["n"], rowwise["left_out"], rowwise["accuracy"]) == (2, 1, 0.5)
    nobody = source.attribution(losses, np.array([2, 2, 2]), present=np.zeros(3, bool))
    assert nobody["accuracy"] is None and nobody["n"] == 0 and "no reading" in nobody["words"]


def test_faults():
    with pytest.raises(UserError, match="losses \\(4, 2\\) and owner \\(3,\\) given"):
        source.attribution(np.zeros((4, 2)), np.zeros(3, int))
    for owner in ([0, 2], [-1, 0]):
        with pytest.raises(UserError, match="0 to 1 expected"):
            source.attribution(np.zeros((2, 2)), np.array(owner))
    with pytest.raises(UserError, match="do not fit"):
        source.client_scores(np.zeros((3, 4)), np.zeros(5, int), 2)


def test_client_scores_are_means_over_a_hospitals_cases():
    confidences = np.array([[1.0, 2.0, 3.0, 10.0], [0.0, 0.0, 6.0, 1.0]])
    found = source.client_scores(confidences, np.array([0, 0, 0, 2]), 3)
    np.testing.assert_allclose(found, [[2, np.nan, 10], [2, np.nan, 1]])
    np.testing.assert_allclose(source.client_scores(confidences[0], np.array([0, 0, 0, 2]), 3), found[0])


def test_whether_a_hospital_took_part():
    """6 hospitals of different difficulty, 200 attacked federations: the AUC of a shift of one deviation, 0.760."""
    rng = np.random.default_rng(1)
    level, inside = 3 * rng.normal(size=6), rng.random((60, 6)) < 0.5
    shadows = level + inside + rng.normal(size=(60, 6))
    member = rng.random((200, 6)) < 0.5
    targets = level + member + rng.normal(size=(200, 6))
    found = np.stack([source.client_lira(t, shadows, inside) for t in targets])
    auc = scores.mann_whitney_auc(found[member], found[~member])
    assert auc == pytest.approx(0.760, abs=0.04)
    blind = scores.mann_whitney_auc(targets[member], targets[~member])
    assert auc > blind + 0.08
    # Shadows that all left everybody out: only the one-sided score is possible.
    np.testing.assert_array_equal(
        source.client_lira(targets[0], shadows, np.zeros_like(inside)),
        lira.offline(targets[0], shadows, np.zeros_like(inside)),
    )
