"""Audits of one run: nothing where nothing leaks, near the cap for an oracle, seldom above the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from fedjax_seg.attacks.one_run import SHARES, choose, lower_bound, one_run
from fedjax_seg.core.checks import UserError

DELTA = 1e-5


def test_null_scores_show_nothing():
    rng = np.random.default_rng(0)
    for gaussian in (False, True):
        found = []
        for _ in range(20):
            inside, score = rng.random(64) < 0.5, rng.normal(size=64)
            found.append(lower_bound(score[inside], score[~inside], DELTA, 0.05, gaussian=gaussian))
        assert np.median(found) == 0 and np.sum(np.array(found) > 0) <= stats.binom.ppf(0.999, 20, 0.05)
    alternating = one_run(np.arange(0.0, 64, 2), np.arange(1.0, 64, 2), delta=DELTA)
    assert (alternating["epsilon_low"], alternating["epsilon_low_fdp"]) == (0, 0)
    assert "no lower bound" in alternating["words"] and "proves no privacy" in alternating["words"]
    assert lower_bound(np.ones(34), np.ones(30), DELTA, 0.05) == 0


def test_a_perfect_separation_reaches_the_cap():
    """256 canaries can show about 3.1 and 6.6. By hand: 128 guesses, all right, at a quarter of 5%: q^128 = 0.0125."""
    scores = np.random.default_rng(1).random(256)
    q = (0.05 / len(SHARES)) ** (1 / 128)
    assert lower_bound(1 + scores[:128], scores[128:], 1e-9, 0.05) == pytest.approx(math.log(q / (1 - q)), abs=0.01)
    found = one_run(1 + scores[:128], scores[128:], delta=DELTA)
    assert found["epsilon_low"] == found["cap"] == pytest.approx(3.1, abs=0.3)
    assert found["epsilon_low_fdp"] == found["cap_fdp"] == pytest.approx(6.6, abs=0.6)
    assert (found["canaries"], found["inside"]) == (256, 128) and f"{found['cap']:.2f}" in found["words"]
    assert found["words"].startswith("epsilon is at least 3.")
    # Few canaries, a large delta and more confidence: less can be shown.
    for count, delta, error in ((8, DELTA, 0.05), (128, 1e-3, 0.05), (128, DELTA, 0.001)):
        assert lower_bound(1 + scores[:count], scores[128 : 128 + count], delta, error) < found["cap"] - 0.5
    # However the coins fell, no more than the cap is shown.
    for count in (100, 156):
        assert 2.5 < lower_bound(1 + scores[:count], scores[count:], DELTA, 0.05) <= found["cap"] + 1e-6


def test_an_inverted_attack_shows_nothing():
    scores = np.random.default_rng(2).random(64)
    found = one_run(scores[:32], 1 + scores[32:], delta=DELTA)
    assert found["epsilon_low"] == found["epsilon_low_fdp"] == 0 and found["cap"] > 1


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_randomised_response_is_not_overstated(epsilon):
    """Pure DP at its worst: every canary's bit is reported truly with e^eps / (1 + e^eps). At most 5% may exceed it."""
    rng, above, found = np.random.default_rng(3), 0, []
    for _ in range(60):
        inside = rng.random(128) < 0.5
        true = rng.random(128) < 1 / (1 + math.exp(-epsilon))
        score = np.where(true == inside, 1, -1) * rng.random(128)
        low = lower_bound(score[inside], score[~inside], 1e-9, 0.05)
        above, found = above + (low > epsilon + 1e-6), [*found, low]
    assert above <= stats.binom.ppf(0.999, 60, 0.05)
    assert epsilon == 0 or np.median(found) > 0.2  # and not by showing nothing


def test_what_is_shown_under_a_gaussian_only_is_said():
    """2 m delta = 1.28: the general bound shows nothing, however good the scores are."""
    scores = np.random.default_rng(5).random(64)
    found = one_run(1 + scores[:32], scores[32:], delta=0.01)
    assert found["epsilon_low"] == 0 == found["cap"] and found["epsilon_low_fdp"] > 1
    assert "if the trade-off curve is a Gaussian's" in found["words"]


def test_no_reading():
    good = np.arange(6.0)
    for scores in ((good, np.zeros(0)), (np.zeros(0), good), (good, np.array([0.0, np.nan])), (np.r_[np.inf], good)):
        found = one_run(*scores, delta=DELTA)
        assert found["epsilon_low"] is None and found["cap"] is None and "no reading" in found["words"]
    for options in ({"delta": 0.0}, {"delta": DELTA, "confidence": 0.4}):
        with pytest.raises(UserError, match="given"):
            one_run(good, good, **options)


def test_canaries_are_training_cases_with_fair_coins():
    train = np.array([9, 3, 5, 7, 1, 3])
    found = choose(train, None, 4, 0)
    assert len(found.cases) == 4 and set(found.cases) <= set(train) and (np.diff(found.cases) > 0).all()
    assert found.inside.dtype == bool and sorted(found.canary) == [0, 1, 2, 3]
    again = choose(train[::-1], None, 4, 0)
    assert all(np.array_equal(a, b) for a, b in zip(found, again))
    heads = np.array([choose(np.arange(10), None, 10, seed).inside for seed in range(400)])
    assert abs(heads.mean() - 0.5) < 4 * 0.5 / math.sqrt(4000)
    # Coins are independent: their number varies as a binomial's, where "exactly half" would not vary at all.
    assert np.var(heads.sum(1)) == pytest.approx(2.5, rel=0.35)
    assert abs(np.corrcoef(heads.T)[np.triu_indices(10, 1)]).max() < 4.5 / math.sqrt(400)


def test_coins_do_not_depend_on_who_is_a_canary():
    """Inclusion of a case as a canary and its coin: no association over seeds."""
    heads = [choose(np.arange(20), None, 10, seed) for seed in range(400)]
    first = [c.inside[c.cases == 0][0] for c in heads if 0 in c.cases]
    assert abs(np.mean(first) - 0.5) < 4 * 0.5 / math.sqrt(len(first))


def test_the_cases_of_a_patient_share_a_coin():
    ids = np.array([f"p{i // 3}" for i in range(60)])  # 20 patients of 3 cases each
    train = np.delete(np.arange(60), [0, 1])
    found = choose(train, ids, 15, 4)
    assert len(np.unique(found.canary)) == 15 and 0 not in found.cases and 1 not in found.cases
    for c in range(15):
        mine = found.canary == c
        assert len(set(ids[found.cases[mine]])) == 1 and len(set(found.inside[mine])) == 1
        assert mine.sum() == np.sum(ids[train] == ids[found.cases[mine]][0])  # all of the patient's training cases
    assert 0 < found.inside.sum() < len(found.cases)


def test_more_canaries_than_there_are():
    with pytest.raises(UserError, match="count 5 given, at most 4 expected, the number of training cases"):
        choose(np.arange(4), None, 5, 0)
    with pytest.raises(UserError, match="count 3 given, at most 2 expected, the number of training patients"):
        choose(np.arange(4), ["a", "a", "b", "b"], 3, 0)
    with pytest.raises(UserError, match="canaries: count: 1 given"):
        choose(np.arange(4), None, 1, 0)
