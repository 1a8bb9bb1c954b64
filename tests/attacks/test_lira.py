"""LiRA against closed forms of normal distributions, and against the plain formula of the paper."""

import numpy as np
import pytest
from scipy import stats

from fedjax_seg.attacks import lira
from fedjax_seg.attacks import membership_scores as scores
from fedjax_seg.core.checks import UserError

SPREAD = 3.0  # of the difficulty of cases, in deviations of one case's confidence over models


def world(n=3000, models=64, shift=1.0, seed=0, deviation=1.0):
    """(target, shadows, inside, member): cases of different difficulty, more confident by `shift` where trained on."""
    rng = np.random.default_rng(seed)
    level, inside, member = SPREAD * rng.normal(size=n), rng.random((models, n)) < 0.5, rng.random(n) < 0.5
    shadows = level + shift * inside + deviation * rng.normal(size=(models, n))
    return level + shift * member + deviation * rng.normal(size=n), shadows, inside, member


def auc(score, member):
    return scores.mann_whitney_auc(score[member], score[~member])


def paper(target, shadows, inside):
    """The likelihood ratio with plain means and one deviation for each side, written down once more."""
    sides = [np.where(use, shadows, np.nan) for use in (inside, ~inside)]
    means = [np.nanmean(side, 0) for side in sides]
    deviations = [np.nanstd(side - mean) for side, mean in zip(sides, means)]
    return np.subtract(*(stats.norm.logpdf(target, m, s) for m, s in zip(means, deviations)))


@pytest.mark.parametrize("attack", ["online", "offline"])
@pytest.mark.parametrize("shared", ["auto", True])
def test_auc_and_tpr_of_normal_confidences(attack, shared):
    """A shift of one deviation: Phi(1 / sqrt 2) = 0.760; TPR at FPR x is Phi(Phi^-1(x) + 1)."""
    target, shadows, inside, member = world(n=6000, models=100)
    score = getattr(lira, attack)(target, shadows, inside, shared_variance=shared)
    assert auc(score, member) == pytest.approx(stats.norm.cdf(1 / np.sqrt(2)), abs=0.018)  # 2.5 deviations
    tpr = scores.tpr_at_fpr(score[member], score[~member], 0.1)
    assert tpr.value == pytest.approx(stats.norm.cdf(stats.norm.ppf(0.1) + 1), abs=0.04)
    # One threshold on the confidence pays for the difficulty of cases: Phi(1 / sqrt(2 (1 + 9))) = 0.588.
    threshold = auc(target, member)
    assert threshold == pytest.approx(stats.norm.cdf(1 / np.sqrt(2 * (1 + SPREAD**2))), abs=0.02)
    assert auc(score, member) > threshold + 0.1


def test_many_models_give_the_papers_score():
    target, shadows, inside, _ = world(n=400, models=400)
    found, plain = lira.online(target, shadows, inside, shared_variance=True), paper(target, shadows, inside)
    assert np.corrcoef(found, plain)[0, 1] > 0.99
    known = lira.offline(target, shadows, inside, shared_variance=False)
    out = np.where(inside, np.nan, shadows)
    direct = (target - np.nanmean(out, 0)) / np.nanstd(out, 0, ddof=1)
    np.testing.assert_allclose(known, direct, rtol=0.01)


@pytest.mark.parametrize("models", [4, 8])
def test_few_models_do_what_can_be_done_with_them(models):
    """A shift that all cases share leaves only the level unknown, to variance 1 / M: Phi(1 / sqrt(2 (1 + 1 / M)))."""
    rng, n = np.random.default_rng(3), 6000
    member, inside = np.arange(n) % 3 == 0, (np.arange(models)[:, None] + np.arange(n)) % 2 == 0
    level = SPREAD * rng.normal(size=n)
    shadows, target = level + inside + rng.normal(size=inside.shape), level + member + rng.normal(size=n)
    found = auc(lira.online(target, shadows, inside), member)
    assert found == pytest.approx(stats.norm.cdf(1 / np.sqrt(2 * (1 + 1 / models))), abs=0.015)
    assert found > auc(paper(target, shadows, inside), member) + 0.03


def test_a_mean_of_few_models_is_less_certain():
    """Residuals +-1 of 4 models twice: variance 8 / 6. One model: twice that, four models: 5/4 of it."""
    shadows = np.array([[1.0, 1, 5], [1, 1, 9], [-1, -1, 9], [-1, -1, 9]])
    inside = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]], bool)
    found = lira.offline(np.array([3.0, -3.0, 8.0]), shadows, inside)
    variance = 8 / 6
    expected = [3 / np.sqrt(1.25 * variance), -3 / np.sqrt(1.25 * variance), 3 / np.sqrt(2 * variance)]
    np.testing.assert_allclose(found, expected)


def test_own_variances_pay_where_cases_differ_in_them():
    """Half of the cases are ten times as noisy and have the same shift: what a shared deviation cannot know."""
    quiet, loud = world(n=1500, shift=1.0, deviation=0.3), world(n=1500, shift=1.0, deviation=3.0, seed=1)
    target, shadows, inside, member = (np.concatenate(both, -1) for both in zip(quiet, loud))
    own, shared = (auc(lira.online(target, shadows, inside, shared_variance=v), member) for v in (False, True))
    assert own > shared + 0.05
    assert auc(lira.online(target, shadows, inside), member) == own  # 'auto': about 32 models of each side


def test_auto_shares_below_sixteen_models_of_a_side():
    target, shadows, inside, _ = world(n=200, models=30)
    inside = np.arange(30)[:, None] < np.where(np.arange(200) < 100, 15, 14)  # OUT: 15 or 16
    inside = np.broadcast_to(inside, shadows.shape)
    auto, shared = (lira.offline(target, shadows, inside, shared_variance=v) for v in ("auto", True))
    assert np.array_equal(auto[:100], shared[:100]) and not np.isclose(auto[100:], shared[100:]).any()


def test_swapped_memberships_mirror_the_score():
    target, shadows, inside, member = world(n=500, models=20)
    right, wrong = lira.online(target, shadows, inside), lira.online(target, shadows, ~inside)
    np.testing.assert_allclose(wrong, -right, rtol=1e-9, atol=1e-12)
    assert auc(wrong, member) == pytest.approx(1 - auc(right, member), abs=1e-12)


def test_units_do_not_matter():
    """The score is that of the confidence in other units and from another zero, by case or for all."""
    target, shadows, inside, _ = world(n=100, models=12)
    again = lira.online(7 * target - 3, 7 * shadows - 3, inside)
    np.testing.assert_allclose(again, lira.online(target, shadows, inside), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(lira.offline(7 * target, 7 * shadows, inside), lira.offline(target, shadows, inside))


def test_cases_without_a_side_are_filled_in_and_counted():
    target, shadows, inside, member = world(models=40)
    n = len(target)
    inside[:, : n // 3] = False
    inside[:, n // 3 : 2 * n // 3] = True
    rng = np.random.default_rng(9)
    level = SPREAD * rng.normal(size=n)
    shadows = level + inside + rng.normal(size=shadows.shape)
    target = level + member + rng.normal(size=n)
    score = lira.online(target, shadows, inside)
    for part in (slice(0, n // 3), slice(n // 3, 2 * n // 3), slice(2 * n // 3, n)):
        assert auc(score[part], member[part]) == pytest.approx(0.76, abs=0.05)
    # Together, too: the fill-ins are on the scale of the others.
    assert auc(score, member) == pytest.approx(0.76, abs=0.03)
    found = lira.coverage(inside)
    assert (found["models"], found["cases"], found["no_in"], found["no_out"]) == (40, n, n // 3, n // 3)
    assert found["neither"] == 0
    offline = lira.offline(target, shadows, inside)
    assert np.isfinite(offline).all()


def test_models_that_diverged_do_not_count():
    target, shadows, inside, _ = world(n=50, models=11)
    broken = np.vstack([shadows, np.full((2, 50), np.nan)])
    broken[-1] = np.inf
    more = np.vstack([inside, np.ones((1, 50), bool), np.zeros((1, 50), bool)])
    for attack in (lira.online, lira.offline):
        np.testing.assert_allclose(attack(target, broken, more), attack(target, shadows, inside))
    assert lira.coverage(more, broken)["median_in"] == np.median(inside.sum(0))
    target[3] = np.nan
    score = lira.online(target, shadows, inside)
    assert np.isnan(score[3]) and np.isfinite(np.delete(score, 3)).all()
    # A case that no model of either side speaks of has no score but 0.
    shadows[:, 5] = np.nan
    assert lira.online(target, shadows, inside)[5] == 0 and lira.coverage(inside, shadows)["neither"] == 1


@pytest.mark.parametrize("models", [2, 3, 6])
def test_equal_models_give_finite_scores(models):
    shadows = np.broadcast_to(np.linspace(0, 1, 7), (models, 7))
    inside = np.arange(models)[:, None] % 2 == np.arange(7) % 2
    for attack in (lira.online, lira.offline):
        score = attack(shadows[0], shadows, inside)
        np.testing.assert_allclose(score, 0, atol=1e-9)
        assert np.isfinite(attack(shadows[0] + 100, shadows, inside)).all()
    constant = np.zeros((models, 7))
    assert np.isfinite(lira.online(np.ones(7), constant, inside)).all()


def test_what_cannot_be_scored_is_said():
    target, shadows, inside, _ = world(n=6, models=3)
    with pytest.raises(UserError, match="no case has shadow models both with and without it"):
        lira.online(target, shadows, np.zeros_like(inside))
    assert np.isfinite(lira.offline(target, shadows, np.zeros_like(inside))).all()
    assert np.isfinite(lira.offline(target, shadows[:1], inside[:1] & False)).all()
    with pytest.raises(UserError, match="no shadow model without any of the cases"):
        lira.offline(target, shadows, np.ones_like(inside))
    with pytest.raises(UserError, match=r"shadows \(3, 6\) and inside \(3, 5\) given"):
        lira.online(target, shadows, inside[:, :5])
    with pytest.raises(UserError, match="shared_variance"):
        lira.online(target, shadows, inside, shared_variance="yes")


def test_several_targets_at_once():
    target, shadows, inside, _ = world(n=20, models=8)
    both = lira.online(np.stack([target, shadows[0]]), shadows, inside)
    assert both.shape == (2, 20)
    np.testing.assert_array_equal(both[0], lira.online(target, shadows, inside))


def test_confidence_is_the_logit_or_minus_the_logarithm():
    p = np.array([1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
    log_loss = np.log(-np.log(p))
    np.testing.assert_allclose(lira.confidence(log_loss, "classification"), np.log(p / (1 - p)), rtol=1e-9)
    np.testing.assert_allclose(lira.confidence(log_loss), -np.log(-np.log(p)))
    extreme = np.array([-np.inf, np.log(1e-8), 0.0, 7.0, 12.0])  # losses from 0 to 160000
    for kind in lira.KINDS:
        found = lira.confidence(extreme.astype(np.float32), kind)
        assert np.isfinite(found).all() and (np.diff(found) <= 0).all()
    with pytest.raises(UserError, match="kind: 'regression' given"):
        lira.confidence(log_loss, "regression")


def rounds(models=300, n=1500, correlation=0.9, shifts=(1.0, 0.2), seed=0):
    """A trajectory of two rounds whose luck is nearly the same and whose leaks are not."""
    rng = np.random.default_rng(seed)
    covariance = np.array([[1, correlation], [correlation, 1]])
    inside, member = rng.random((models, n)) < 0.5, rng.random(n) < 0.5
    level = SPREAD * rng.normal(size=(2, 1, n))
    luck = np.moveaxis(rng.multivariate_normal([0, 0], covariance, size=(models + 1, n)), -1, 0)
    seen = level + luck + np.array(shifts)[:, None, None] * np.vstack([inside, member[None]])
    return seen[:, -1], seen[:, :-1], inside, member, covariance


def test_the_trajectory_uses_what_the_rounds_have_in_common():
    """The best test of two normals has AUC Phi(sqrt(d' S^-1 d / 2)): 0.910 here, where one round has 0.760."""
    target, shadows, inside, member, covariance = rounds()
    shifts = np.array([1.0, 0.2])
    best = stats.norm.cdf(np.sqrt(shifts @ np.linalg.solve(covariance, shifts) / 2))
    assert best == pytest.approx(0.9095, abs=1e-4)  # (1 - 0.36 + 0.04) / 0.19 = 3.579
    together = auc(lira.trajectory(target, shadows, inside), member)
    summed = auc(sum(lira.online(t, s, inside) for t, s in zip(target, shadows)), member)
    assert together == pytest.approx(best, abs=0.02) and summed < 0.78


def test_a_repeated_round_adds_nothing():
    """Ten looks at one model are one look; a sum of the ratios would be sure ten times over."""
    target, shadows, inside, _, _ = rounds(models=400, n=50)
    once = lira.online(target[0], shadows[0], inside)
    repeated = lira.trajectory(np.stack([target[0]] * 10), np.stack([shadows[0]] * 10), inside)
    np.testing.assert_allclose(repeated, once, rtol=0.05, atol=0.05)
    single = lira.trajectory(target[:1], shadows[:1], inside)
    np.testing.assert_allclose(single, once, rtol=0.01, atol=0.01)


def test_independent_rounds_are_summed():
    target, shadows, inside, _, _ = rounds(models=60, n=200, correlation=0.0)
    summed = sum(lira.online(t, s, inside, shared_variance=True) for t, s in zip(target, shadows))
    found = lira.trajectory(target, shadows, inside, shared_variance=True)
    np.testing.assert_allclose(found, summed, rtol=0.05, atol=0.1)


def test_few_models_and_many_rounds_stay_finite_and_informed():
    rng = np.random.default_rng(5)
    inside, member = np.arange(4)[:, None] % 2 == rng.integers(0, 2, 400), rng.random(400) < 0.5
    level = SPREAD * rng.normal(size=400)
    luck = np.cumsum(rng.normal(size=(20, 5, 400)), 0) / np.sqrt(20)
    growing = np.linspace(0, 2, 20)[:, None, None]
    seen = level + luck + growing * np.vstack([inside, member[None]])
    score = lira.trajectory(seen[:, -1], seen[:, :-1], inside)
    assert np.isfinite(score).all() and auc(score, member) > 0.75
    seen[7, 0, 3] = np.nan  # one model of one case in one round
    assert np.isfinite(lira.trajectory(seen[:, -1], seen[:, :-1], inside)).all()
    with pytest.raises(UserError, match=r"\[T, n\] and \[T, M, n\] expected"):
        lira.trajectory(seen[:, -1], seen[0], inside)
