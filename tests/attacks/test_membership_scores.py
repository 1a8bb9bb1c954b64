"""Scores of attacks against scikit-learn, closed forms, hand computation and the identities that must hold exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from fedjax_seg.attacks import membership_scores as scores

few_values = st.lists(st.integers(0, 4).map(float), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(few_values, few_values)
def test_auc_counts_pairs_and_ties_and_swaps_exactly(members, non_members):
    a, b = np.array(members), np.array(non_members)
    pairs = np.mean((a[:, None] > b) + 0.5 * (a[:, None] == b))
    auc = scores.mann_whitney_auc(a, b)
    np.testing.assert_allclose(auc, pairs, rtol=1e-12)
    assert scores.mann_whitney_auc(b, a) == 1 - auc
    label = np.repeat([1, 0], [len(a), len(b)])
    np.testing.assert_allclose(auc, sk.roc_auc_score(label, np.concatenate([a, b])), rtol=1e-12)
    curve = scores.roc(a, b)
    np.testing.assert_allclose(np.trapezoid(curve.tpr, curve.fpr), auc, rtol=1e-12)
    fpr, tpr, _ = sk.roc_curve(label, np.concatenate([a, b]), drop_intermediate=False)
    np.testing.assert_allclose(curve, (fpr, tpr), atol=1e-12)


def test_constant_scores_are_exactly_a_half_and_an_oracle_is_exactly_one():
    for n, m in ((500, 500), (3, 7), (1, 1)):
        assert scores.mann_whitney_auc(np.full(n, 0.3), np.full(m, 0.3)) == 0.5
        assert scores.mann_whitney_auc(np.ones(n), np.zeros(m)) == 1.0
        found = scores.bootstrap_interval(np.full(n, 0.3), np.full(m, 0.3), resamples=20)
        assert found == (0.5, 0.5, 0.5)


def test_auc_of_shifted_normal_scores():
    """Phi(shift / sqrt 2); the AUC is not the area of the concave hull, which is never below 1/2."""
    rng = np.random.default_rng(0)
    null = rng.normal(size=20000)
    for shift in (-1.0, 0.0, 1.0):
        auc = scores.mann_whitney_auc(rng.normal(size=20000) + shift, null)
        assert auc == pytest.approx(stats.norm.cdf(shift / np.sqrt(2)), abs=4 * scores.null_deviation(20000, 20000))


def test_the_null_deviation_and_the_bootstrap_agree_with_it():
    assert scores.null_deviation(500, 500) == pytest.approx(0.0183, abs=5e-5)
    rng = np.random.default_rng(1)
    found = [scores.mann_whitney_auc(*rng.normal(size=(2, 500))) for _ in range(400)]
    assert np.std(found) == pytest.approx(0.01827, rel=0.15)
    low, high = scores.bootstrap_interval(*rng.normal(size=(2, 500)), seed=3)[1:]
    assert high - low == pytest.approx(2 * 1.96 * 0.01827, rel=0.1)


def test_the_interval_covers_the_true_auc_as_often_as_it_says():
    rng = np.random.default_rng(2)
    truth, hits = stats.norm.cdf(0.5 / np.sqrt(2)), 0
    for seed in range(200):
        a, b = rng.normal(size=(2, 40))
        _, low, high = scores.bootstrap_interval(a + 0.5, b, resamples=200, seed=seed)
        hits += low <= truth <= high
    assert 0.89 <= hits / 200 <= 0.99  # 3 deviations around 0.95 and a little for 40 cases


def test_patients_are_drawn_with_all_their_cases():
    """Copies of every case add nothing: drawing patients gives the interval of one case each, cases not."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=40) + 0.5, rng.normal(size=30)
    once = scores.bootstrap_interval(a, b, seed=5)
    ids = [np.repeat([f"p{i:03d}" for i in range(n)], 4) for n in (40, 30)]
    copied = scores.bootstrap_interval(np.repeat(a, 4), np.repeat(b, 4), tuple(ids), seed=5)
    np.testing.assert_allclose(copied, once, rtol=1e-12)
    blind = scores.bootstrap_interval(np.repeat(a, 4), np.repeat(b, 4), seed=5)
    assert blind.high - blind.low < 0.6 * (once.high - once.low)
    shuffled = rng.permutation(160)
    again = scores.bootstrap_interval(np.repeat(a, 4)[shuffled], np.repeat(b, 4), (ids[0][shuffled], ids[1]), seed=5)
    np.testing.assert_allclose(again, once, rtol=1e-12)


def test_tpr_at_fpr_by_hand():
    non_members = np.arange(1.0, 101.0)  # 1..100
    members = np.array([99.5, 100.0, 100.5, 98.0, 1.0])
    # One of 100 may exceed the threshold: it is 99, which 99.5, 100 and 100.5 exceed.
    found = scores.tpr_at_fpr(members, non_members, 0.01)
    assert found.value == 3 / 5
    assert scores.tpr_at_fpr(members, non_members, 0.009) is None
    assert scores.tpr_at_fpr(members, non_members, 0.001) is None
    assert scores.tpr_at_fpr(members, np.arange(1000.0), 0.001) is not None
    assert scores.tpr_at_fpr(members, non_members, 0.03).value == 4 / 5  # the threshold is 97
    assert scores.tpr_at_fpr(members, non_members, 1.0).value == 1
    # Ties with the threshold are not above it: constant scores catch nobody.
    assert scores.tpr_at_fpr(np.ones(50), np.ones(200), 0.01).value == 0
    # 0.29 * 100 is 28.999... in floating point; 29 non-members may exceed the threshold 71.
    assert scores.tpr_at_fpr(np.array([71.5, 71.0]), non_members, 0.29).value == 1 / 2


def test_clopper_pearson_is_the_exact_interval():
    for hits, trials in ((0, 10), (3, 10), (10, 10), (7, 500)):
        exact = stats.binomtest(hits, trials).proportion_ci(0.95, "exact")
        found = scores.clopper_pearson(hits, trials)
        np.testing.assert_allclose(found, (hits / trials, exact.low, exact.high), rtol=1e-9)


def test_advantages_are_two_sided():
    members, non_members = np.array([3.0, 2.0, 0.0]), np.array([1.0, -1.0])
    assert scores.advantage(0.25) == scores.advantage(0.75) == 0.25
    assert scores.balanced_advantage(members, non_members) == pytest.approx(2 / 3)  # above 1: 2 of 3 against none
    assert scores.balanced_advantage(-members, -non_members) == pytest.approx(2 / 3)
