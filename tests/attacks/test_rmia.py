"""RMIA against the definition written as a loop, its identities, and cases of different difficulty."""

import numpy as np
import pytest

from fedjax_seg.attacks import membership_scores as scores
from fedjax_seg.attacks.rmia import rmia
from fedjax_seg.core.checks import UserError


def world(n=600, models=8, population=300, seed=0, gain=0.5):
    """Losses in logarithms: cases of different difficulty, a loss exp(-gain) times as large where trained on."""
    rng = np.random.default_rng(seed)
    level, others = rng.normal(size=n) - 1, rng.normal(size=population) - 1
    inside, member = rng.random((models, n)) < 0.5, rng.random(n) < 0.5
    shadows = level - gain * inside + 0.3 * rng.normal(size=(models, n))
    target = level - gain * member + 0.3 * rng.normal(size=n)
    z = others + 0.3 * rng.normal(size=(models + 1, population))
    return (target, shadows, inside, z[0], z[1:]), member


def auc(score, member):
    return scores.mann_whitney_auc(score[member], score[~member])


def test_the_offline_score_is_its_definition():
    (target, shadows, inside, z, z_shadows), _ = world(n=12, models=5, population=9)
    inside[0] = False
    for share, gamma in ((0.3, 1.0), (0.0, 1.1), (1.0, 2.0)):
        found = rmia(target, shadows, inside, z, z_shadows, gamma=gamma, offline_share=share)
        for i in range(12):
            p_out = np.mean([np.exp(-np.exp(shadows[m, i])) for m in range(5) if not inside[m, i]])
            x = np.exp(-np.exp(target[i])) / (((1 + share) * p_out + 1 - share) / 2)
            beaten = []
            for j in range(9):
                p_z = np.mean(np.exp(-np.exp(z_shadows[:, j])))
                beaten.append(x / (np.exp(-np.exp(z[j])) / (((1 + share) * p_z + 1 - share) / 2)) >= gamma)
            assert found[i] == pytest.approx(np.mean(beaten), abs=1e-12)


def test_the_online_score_is_its_definition():
    """p(x) is half IN and half OUT, however many models there are of each; a of the population is fitted."""
    (target, shadows, inside, z, z_shadows), _ = world(n=30, models=7, population=11)
    inside[0], inside[1:3] = False, True
    inside[:, 0], inside[:, 1] = False, True  # one case without IN, one without OUT
    p = np.exp(-np.exp(shadows))
    means = [[p[use[:, i], i].mean() if use[:, i].any() else 0.0 for i in range(30)] for use in (inside, ~inside)]
    p_in, p_out = np.array(means)
    share = np.linalg.lstsq((1 - p_out[2:])[:, None], 1 - p_in[2:], rcond=None)[0][0]
    assert 0 < share < 1
    p_in[0], p_out[1] = 1 - share * (1 - p_out[0]), 1 - (1 - p_in[1]) / share
    p_z = np.exp(-np.exp(z_shadows)).mean(0)
    x = np.exp(-np.exp(target)) / (0.5 * (p_in + p_out))
    other = np.exp(-np.exp(z)) / (0.5 * (p_z + 1 - share * (1 - p_z)))
    np.testing.assert_allclose(rmia(target, shadows, inside, z, z_shadows), np.mean(x[:, None] >= other, 1))
    # 11 population cases tell the cases' ratios apart only roughly: once more against each of many thresholds.
    for gamma in np.geomspace(0.3, 3, 25):
        found = rmia(target, shadows, inside, z, z_shadows, gamma=gamma)
        np.testing.assert_allclose(found, np.mean(x[:, None] / other >= gamma, 1))


def test_it_finds_what_the_loss_hides_behind_difficulty():
    arguments, member = world()
    threshold = auc(-arguments[0], member)
    for share in (None, 0.3):
        score = rmia(*arguments, offline_share=share)
        assert auc(score, member) > threshold + 0.1
        np.testing.assert_allclose(np.clip(np.round(300 * score), 0, 300), 300 * score, atol=1e-9)  # shares of 300
    blind = rmia(*world(gain=0.0)[0])
    assert abs(auc(blind, member) - 0.5) < 4 * scores.null_deviation(member.sum(), (~member).sum())


def test_a_larger_gamma_beats_fewer():
    arguments, _ = world(n=50)
    found = [rmia(*arguments, gamma=gamma) for gamma in (0.5, 1.0, 1.5)]
    assert (found[0] >= found[1]).all() and (found[1] >= found[2]).all() and found[0].sum() > found[2].sum()


def test_equal_ratios_count_as_beaten():
    """Every model alike: all ratios are 1, and LR >= 1 holds for all."""
    flat, few = np.zeros(4), np.zeros((2, 4))
    inside = np.array([[True] * 4, [False] * 4])
    assert (rmia(flat, few, inside, np.zeros(3), np.zeros((2, 3))) == 1).all()
    assert (rmia(flat, few, inside, np.zeros(3), np.zeros((2, 3)), gamma=1.01) == 0).all()


def test_cases_without_a_side_and_broken_models():
    (target, shadows, inside, z, z_shadows), member = world(models=12)
    inside[:, :200], inside[:, 200:400] = False, True
    rng = np.random.default_rng(7)
    level = rng.normal(size=600) - 1
    shadows = level - 0.5 * inside + 0.3 * rng.normal(size=shadows.shape)
    target = level - 0.5 * member + 0.3 * rng.normal(size=600)
    score = rmia(target, shadows, inside, z, z_shadows)
    for part in (slice(0, 200), slice(200, 400), slice(400, 600)):
        assert auc(score[part], member[part]) > 0.65
    assert auc(score, member) > 0.65
    more = np.vstack([shadows, np.full((1, 600), np.nan)]), np.vstack([inside, np.ones((1, 600), bool)])
    np.testing.assert_array_equal(rmia(target, *more, z, np.vstack([z_shadows, np.full((1, 300), np.inf)])), score)
    target[3] = np.nan
    assert np.isnan(rmia(target, shadows, inside, z, z_shadows)[3])


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_losses_beyond_what_a_probability_can_hold(share):
    """exp(-2000) is 0 in floating point; scores stay finite and in order."""
    rng = np.random.default_rng(1)
    shadows, inside = np.log(2000 + rng.random((4, 6))), np.arange(4)[:, None] % 2 == np.arange(6) % 2
    target = np.log(np.array([1000.0, 2000, 3000, 2000, 1e-9, 2000]) + 1e-8)
    population = np.log(2000 + rng.random(5))
    score = rmia(target, shadows, inside, population, np.log(2000 + rng.random((4, 5))), offline_share=share)
    assert np.isfinite(score).all() and score[4] == 1 and score[0] == 1 and score[2] == 0


def test_what_does_not_fit_is_said():
    (target, shadows, inside, z, z_shadows), _ = world(n=6, models=3, population=4)
    cases = [
        ((target, shadows, inside[:2], z, z_shadows), {}, r"inside \(2, 6\)"),
        ((target, shadows, inside, z, z_shadows[:, :2]), {}, r"population \(4,\) and \(3, 2\) given"),
        ((target, shadows, inside & False, z, z_shadows), {}, "no case has reference models both with and without"),
        ((target, shadows, inside | True, z, z_shadows), {"offline_share": 0.3}, "no reference model without any"),
        ((target, shadows, inside, z * np.nan, z_shadows), {"offline_share": 0.3}, "no population case"),
        ((target, shadows, inside, z, z_shadows), {"gamma": 0.0}, "gamma: 0.0 given"),
        ((target, shadows, inside, z, z_shadows), {"offline_share": 1.5}, "offline_share: 1.5 given"),
    ]
    for arguments, options, words in cases:
        with pytest.raises(UserError, match=words):
            rmia(*arguments, **options)
