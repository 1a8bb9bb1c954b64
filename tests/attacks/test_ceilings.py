"""Ceilings against closed forms and the values of Gaussian and pure DP; only what cannot be chance is above."""

import math

import numpy as np
import pytest
from scipy import stats

from fedjax_seg.attacks import ceilings
from fedjax_seg.attacks import membership_scores as scores
from fedjax_seg.core.checks import UserError


@pytest.mark.parametrize(("epsilon", "auc"), [(0.0, 0.5), (1.0, 0.731), (2.0, 0.881), (6.76, 0.99884)])
def test_pure_dp_is_the_curve_of_randomised_response(epsilon, auc):
    """(0, 0), (1, e^eps) / (1 + e^eps), (1, 1): the area is 1/2 + (TPR - FPR) / 2 of the corner."""
    found = ceilings.ceiling([(epsilon, 0.0)])
    corner = 1 / (1 + math.exp(epsilon))
    assert found.auc == pytest.approx(auc, abs=5e-4)
    assert found.auc == pytest.approx(0.5 + (math.exp(epsilon) - 1) * corner / 2, abs=1e-6)
    assert ceilings.allowed(found.pairs, None, corner) == pytest.approx(1 - corner, rel=1e-12)


@pytest.mark.parametrize(
    ("mu", "auc", "percent", "permille"),
    [(0.5, 0.638, 0.034, 0.005), (1.0, 0.760, 0.092, 0.018), (2.0, 0.921, 0.372, 0.138)],
)
def test_gaussian_dp(mu, auc, percent, permille):
    found = ceilings.ceiling([], mu)
    assert found.auc == pytest.approx(auc, abs=5e-4)
    for fpr, tpr in ((0.01, percent), (0.001, permille)):
        assert found.tpr[np.searchsorted(found.fpr, fpr)] == pytest.approx(tpr, abs=5e-4)
    # A pair that promises next to nothing changes nothing, and makes the area one by integration.
    assert ceilings.ceiling([(50.0, 0.0)], mu).auc == pytest.approx(found.auc, abs=1e-6)


def test_delta_by_hand():
    """eps = ln 3, delta = 0.2: (0, .2), (.2, .8), (.8, 1), (1, 1): area .2 (1.0 / 2) + .6 (1.8 / 2) + .2 = .84."""
    found = ceilings.ceiling([{"epsilon": math.log(3), "delta": 0.2}])
    np.testing.assert_allclose(ceilings.allowed(found.pairs, None, np.array([0, 0.2, 0.8, 1])), [0.2, 0.8, 1, 1])
    assert found.auc == pytest.approx(0.84, abs=1e-5)


def test_many_pairs_of_a_gaussian_give_its_curve():
    """The pairs (eps, delta(eps)) are the tangents of the Gaussian's trade-off curve (Dong et al., Corollary 2.13)."""
    mu, epsilon = 1.3, np.linspace(0, 12, 400)
    delta = stats.norm.cdf(-epsilon / mu + mu / 2) - np.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
    pairs = list(zip(epsilon, np.maximum(delta, 0)))
    found = ceilings.ceiling(pairs)
    x = np.linspace(0.001, 0.999, 50)
    gaussian = stats.norm.cdf(stats.norm.ppf(x) + mu)
    np.testing.assert_allclose(ceilings.allowed(found.pairs, None, x), gaussian, atol=2e-4)
    assert found.auc == pytest.approx(stats.norm.cdf(mu / np.sqrt(2)), abs=1e-4)
    # The exact curve is the smaller one, and the two together are never above either.
    both = ceilings.ceiling(pairs[::80], mu)
    assert both.auc == pytest.approx(stats.norm.cdf(mu / np.sqrt(2)), abs=1e-5)
    assert ceilings.ceiling(pairs[::80]).auc > both.auc + 1e-3
    assert ceilings.allowed([(0.5, 0.0)], 2.0, 0.01) == pytest.approx(0.01 * math.exp(0.5))
    assert ceilings.allowed([(5.0, 0.0)], 2.0, 0.01) == pytest.approx(0.372, abs=5e-4)


def test_a_ceiling_is_concave_and_rises_from_0_to_1():
    found = ceilings.ceiling([(1.0, 1e-5), (0.5, 0.1), (4.0, 0.0)], 2.0)
    assert found.fpr[0] == 0 and found.fpr[-1] == 1 and found.tpr[-1] == 1
    slopes = np.diff(found.tpr) / np.diff(found.fpr)
    assert (slopes >= 0).all() and (np.diff(slopes) <= 1e-9).all() and (found.tpr >= found.fpr).all()
    assert {0.01, 0.001} <= set(found.fpr)


def test_no_guarantee_is_no_ceiling():
    for curve in ([], [(None, 1e-5)], [(math.inf, 1e-5)], [{"epsilon": math.nan, "delta": 1e-5}], [(3.0, 1.0)]):
        for mu in (None, math.inf, math.nan):
            assert ceilings.ceiling(curve, mu) is None
    rows = ceilings.marked([row(0.99, 0.98)], None)
    assert rows[0]["auc_ceiling"] is None and rows[0]["above_ceiling"] is None and rows[0]["auc"] == 0.99
    assert rows[0]["tpr_at_1_percent_fpr_ceiling"] is None and "guarantees nothing" in ceilings.words(rows[0])
    for curve, mu, words in (([(-1.0, 0.0)], None, "epsilon"), ([(1.0, -0.1)], None, "delta"), ([], -1.0, "mu")):
        with pytest.raises(UserError, match=words):
            ceilings.ceiling(curve, mu)


def row(auc, low, high=None, members=500, non_members=500, **more):
    high = auc + (auc - low) if high is None else high
    return {"attack": "lira", "auc": auc, "auc_low": low, "auc_high": high, "members": members} | {
        "non_members": non_members,
        **more,
    }


@pytest.mark.parametrize(
    ("auc", "low", "high", "above"),
    [
        (0.80, 0.74, 0.86, ["auc"]),
        (0.80, 0.73, 0.87, []),  # the lower end is below 0.731
        (0.20, 0.14, 0.26, ["1 - auc"]),  # inverted: the mirrored interval is [0.74, 0.86]
        (0.20, 0.13, 0.27, []),
        (0.50, 0.45, 0.55, []),
    ],
)
def test_only_an_interval_wholly_above_is_above(auc, low, high, above):
    found = ceilings.marked([row(auc, low, high)], ceilings.ceiling([(1.0, 0.0)]))[0]
    assert found["auc_ceiling"] == pytest.approx(0.7311, abs=1e-4)
    assert found["above"] == above and found["above_ceiling"] == bool(above)
    sentence = ceilings.words(found)
    assert (ceilings.ABOVE in sentence) == bool(above) and ("proves nothing" in sentence) == (not above)


def measured(mu, members, non_members, seed):
    """A row of an attack that is as good as mu-Gaussian DP allows, and its curve."""
    rng = np.random.default_rng(seed)
    inside, outside = rng.normal(size=members) + mu, rng.normal(size=non_members)
    n, m = members, non_members
    auc = scores.mann_whitney_auc(inside, outside)
    half = 1.96 * scores.null_deviation(n, m)
    found = row(auc, auc - half, auc + half, n, m)
    for fpr in ceilings.FPRS:
        tpr = scores.tpr_at_fpr(inside, outside, fpr)
        name = f"tpr_at_{100 * fpr:g}_percent_fpr"
        found |= {name: tpr and tpr.value, f"{name}_low": tpr and tpr.low, f"{name}_high": tpr and tpr.high}
    return found, {"lira": scores.roc(inside, outside)._asdict()}


def test_an_attack_at_its_ceiling_is_rarely_called_a_bug_and_one_above_always():
    """With 100 non-members the threshold of 'FPR 1%' has a true FPR of 2% on average: it must not be taken at 1%."""
    at = ceilings.ceiling([], 2.0)
    called = [
        ceilings.marked([r], at, roc)[0]["above_ceiling"] for r, roc in (measured(2, 1000, 100, s) for s in range(100))
    ]
    assert sum(called) <= 10
    for seed in range(5):
        found, roc = measured(2.0, 1000, 1000, seed)
        low = ceilings.marked([found], ceilings.ceiling([], 1.0), roc)[0]
        assert low["above"] == ["auc", "tpr at 1%", "tpr at 0.1%", "curve"]
        assert low["tpr_at_1_percent_fpr_ceiling"] == pytest.approx(0.092, abs=5e-4)
        assert low["tpr_at_0.1_percent_fpr_ceiling"] == pytest.approx(0.018, abs=5e-4)


def test_a_curve_alone_can_be_above_either_way_round():
    """30% of members are certain: the AUC of 0.65 is allowed by epsilon 1, TPR 0.3 at FPR 0 is not."""
    inside, outside = np.r_[np.full(300, 2.0), np.zeros(700)], np.zeros(1000)
    auc = scores.mann_whitney_auc(inside, outside)
    assert auc == pytest.approx(0.65)
    at = ceilings.ceiling([(1.0, 0.0)])
    for sign, value in ((1, auc), (-1, 1 - auc)):
        curve = {"lira": scores.roc(sign * inside, sign * outside)._asdict()}
        found = ceilings.marked([row(value, value - 0.02), row(value, value - 0.02)], at, curve)
        assert found[0]["above"] == ["curve"]
        assert found[1]["above"] == []  # the curve is the first row's
    few = ceilings.marked([row(auc, 0.5, members=10, non_members=10)], at, curve)[0]
    assert not few["above_ceiling"]


def test_rows_without_a_reading_are_not_judged():
    nothing = dict.fromkeys(("auc", "auc_low", "auc_high")) | {"attack": "loss", "members": 3, "non_members": 3}
    found = ceilings.marked([nothing], ceilings.ceiling([(1.0, 0.0)]))[0]
    assert found["above_ceiling"] is None and found["auc_ceiling"] is not None
    assert "no reading" in ceilings.words(found)


COVERS = {
    ("client", "case"): True, ("client", "patient"): True, ("client", "client"): True,
    ("patient", "case"): True, ("patient", "patient"): True, ("patient", "client"): False,
    ("example", "case"): True, ("example", "patient"): False, ("example", "client"): False,
}  # fmt: skip


@pytest.mark.parametrize(("ledger", "attack"), COVERS)
def test_which_guarantee_covers_which_attack(ledger, attack):
    covered, reason = ceilings.applies(ledger, attack)
    assert covered == COVERS[ledger, attack] and ledger in reason and ("no ceiling" in reason) != covered
    # Where patients have several cases, a case's membership is not a change of one example.
    covered, reason = ceilings.applies(ledger, attack, repeated=True)
    assert covered == (COVERS[ledger, attack] and ledger != "example")


def test_unknown_units_are_refused():
    with pytest.raises(UserError, match="ledger unit: 'site' given"):
        ceilings.applies("site", "case")
    with pytest.raises(UserError, match="attack unit: 'slice' given"):
        ceilings.applies("client", "slice")
