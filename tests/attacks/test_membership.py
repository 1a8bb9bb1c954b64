"""The membership attack finds what leaks, nothing where nothing does, and says so when it is inverted."""

import json

import numpy as np
import pytest

from fedjax_seg import attacks
from fedjax_seg.attacks import candidates
from fedjax_seg.attacks.membership import attack_classifier, report, summary
from fedjax_seg.core import checks
from fedjax_seg.core.checks import UserError

FEATURES, CASES, VOXELS = 60, 100, 12


def trained(ridge, seed=0):
    """Evidence of a ridge regression onto noise, on its training cases and on fresh ones; inf: never trained."""
    rng = np.random.default_rng(seed)
    (x, fresh), (y, other) = rng.normal(size=(2, CASES, FEATURES)), rng.normal(size=(2, CASES, VOXELS))
    weight = (
        np.linalg.solve(x.T @ x + ridge * np.eye(FEATURES), x.T @ y)
        if np.isfinite(ridge)
        else rng.normal(size=(FEATURES, VOXELS))
    )

    def evidence(x, y):
        return {"log_loss": np.log(np.mean((x @ weight - y) ** 2, 1)), "size": np.mean((x @ weight) ** 2, 1)}

    return evidence(x, y), evidence(fresh, other)


@pytest.fixture(scope="module")
def overfit():
    return report(*trained(100.0), *trained(100.0, 1))


def test_an_overfit_model_is_found_by_both_attacks(overfit):
    assert [r.attack for r in overfit] == ["loss", "shadow"]
    for reading in overfit:
        assert reading.auc.low > 0.6 and not reading.inverted and "lies above 0.5" in reading.words
        assert reading.tpr[0.01].value > 0.01 and reading.tpr[0.001] is None
        assert (reading.unit, reading.members, reading.non_members) == ("case", CASES, CASES)


def test_an_untrained_model_leaks_nothing():
    for reading in report(*trained(np.inf), *trained(np.inf, 1)):
        assert reading.auc.low <= 0.5 <= reading.auc.high and abs(reading.auc.value - 0.5) < 3 * reading.null
        assert "not told apart" in reading.words


def test_swapped_labels_mirror_the_auc_and_are_flagged_as_inverted(overfit):
    members, non_members = trained(100.0)
    right, wrong = report(members, non_members)[0], report(non_members, members)[0]
    assert wrong.auc.value == 1 - right.auc.value and wrong.advantage == pytest.approx(right.advantage)
    assert wrong.inverted and f"the AUC is {right.auc.value:.3f}: a leak, not safety" in wrong.words
    # A shadow attack trained with its labels swapped is the paper's 0.25.
    shadow = trained(100.0, 1)
    swapped = report(members, non_members, shadow[1], shadow[0])[1]
    assert swapped.inverted and swapped.auc.value == pytest.approx(
        1 - report(members, non_members, *shadow)[1].auc.value
    )


def test_only_an_interval_below_a_half_is_inverted():
    a, b = {"log_loss": np.array([0.0, 2.0, 4.0, 6.0])}, {"log_loss": np.array([1.0, 3.0, 5.0, 5.5])}
    reading = report(b, a)[0]
    assert reading.auc.value == 7 / 16 and not reading.inverted and "not told apart" in reading.words


def test_an_oracle_and_constant_evidence():
    def flat(value, n=150):
        return {"log_loss": np.full(n, value), "size": np.full(n, 0.5)}

    for reading in report(flat(1.0), flat(1.0), flat(1.0), flat(1.0)):
        assert reading.auc == (0.5, 0.5, 0.5) and reading.advantage == 0 and not reading.inverted
        assert reading.tpr[0.01].value == 0
    for reading in report(flat(0.0), flat(1.0), flat(0.1), flat(0.8)):
        assert reading.auc.value == 1 and reading.tpr[0.01].value == 1 and reading.balanced_advantage == 1


def test_the_classifier_needs_no_balance_and_no_scale():
    """Ten times as many shadow members as others, features in other units: the same order of scores."""
    shadow = trained(100.0)
    target = trained(100.0, 1)[0]
    units = {"log_loss": 1e3, "size": 1e-3}

    def scaled(side):
        return {name: x * units[name] for name, x in side.items()}

    plain = attack_classifier(*shadow)(target)
    np.testing.assert_allclose(attack_classifier(*map(scaled, shadow))(scaled(target)), plain, atol=1e-6)
    tenfold = {name: np.tile(x, 10) for name, x in shadow[0].items()}
    more = attack_classifier(tenfold, shadow[1])(target)
    assert abs(np.mean(more) - np.mean(plain)) < 0.5  # without balance it would move by log 10


def test_patients_are_units_where_they_repeat():
    """Two cases of a patient, one of which is uninformative: the mean of both decides."""
    a, b = {"log_loss": np.array([0.0, 5.0, 1.0, 5.0])}, {"log_loss": np.array([4.0, 2.5, 3.0, 5.0])}
    ids = (["p", "p", "q", "q"], ["s", "r", "s", "r"])
    reading = report(a, b, patients=ids)[0]
    # Members -2.5 and -3; non-members r: -3.75, s: -3.5.
    assert (reading.unit, reading.members, reading.non_members, reading.auc.value) == ("patient", 2, 2, 1.0)
    cases = report(a, b, patients=ids, unit="case")[0]
    # 0 and 1 win 4 each, both 5s tie with the 5: 8 + 2/2 of 16.
    assert (cases.unit, cases.members) == ("case", 4) and cases.auc.value == 9 / 16
    single = report(a, b, patients=(list("abcd"), list("efgh")))[0]
    assert single.unit == "case" and single.members == 4
    with pytest.raises(UserError, match=r"attack\.unit: 'patient' given, but the data has no patient ids"):
        report(a, b, unit="patient")


@pytest.mark.parametrize("which", range(4))
def test_evidence_that_is_not_finite_gives_no_reading_and_no_crash(which):
    sides = [{"log_loss": np.linspace(0, 1, 8)} for _ in range(4)]
    sides[which]["log_loss"][3] = np.nan
    readings = report(*sides, resamples=10)
    assert np.isnan(readings[1].auc.value) and "not finite" in readings[1].words
    assert np.isnan(readings[0].auc.value) == (which < 2)
    assert summary(readings[1])["auc"] is None


def test_readings_are_deterministic_and_plain(overfit):
    sides = trained(100.0, 2)
    first, second = (report(*sides, *sides, seed=3, resamples=50) for _ in range(2))
    assert [summary(r) for r in first] == [summary(r) for r in second]
    plain = json.loads(json.dumps(summary(overfit[0]), allow_nan=False))
    assert plain["tpr_at_0.1_percent_fpr"] is None and plain["tpr_at_1_percent_fpr"] > 0.01 and not plain["inverted"]


SITE_OF = np.repeat([0, 1, 2, 3], [100, 40, 60, 30])  # site 3 only tests


def test_members_and_non_members_are_matched_by_site():
    train = [np.arange(0, 80), np.arange(100, 132), np.arange(140, 150), np.zeros(0, int)]
    test = [np.arange(80, 100), np.arange(132, 140), np.arange(150, 200), np.arange(200, 230)]
    room = [20, 8, 10, 0]
    everything = candidates.choose_cases(train, test, SITE_OF, 1000)
    for side, pool in zip(everything, (train, test)):
        assert np.bincount(SITE_OF[side], minlength=4).tolist() == room
        assert set(side) <= set(np.concatenate(pool)) and len(set(side)) == len(side)
    some = candidates.choose_cases(train, test, SITE_OF, 19, seed=1)
    assert len(some.members) == len(some.non_members) == 9
    np.testing.assert_array_equal(np.bincount(SITE_OF[some.members]), np.bincount(SITE_OF[some.non_members]))
    assert np.bincount(SITE_OF[some.members]).tolist() == [5, 2, 2]  # 9 * (20, 8, 10) / 38 = 4.7, 1.9, 2.4
    # One client that holds everything (centralised) has the same candidates.
    pooled = candidates.choose_cases([*[t[:0] for t in train], np.concatenate(train)], test, SITE_OF, 19, seed=1)
    np.testing.assert_array_equal(pooled.members, some.members)
    assert not np.array_equal(candidates.choose_cases(train, test, SITE_OF, 19, seed=2).members, some.members)
    with pytest.raises(UserError, match="no site has both training and test cases"):
        candidates.choose_cases([np.arange(5)], [np.arange(200, 230)], SITE_OF, 10)


def test_the_shadow_plan_divides_by_patient():
    patients = [f"p{i // 3}" for i in range(230)]
    patients[131:134] = ["wanderer"] * 3  # of site 1
    patients[150] = "wanderer"  # and of site 2
    aside = np.r_[0:60, 120:140, 140:160, 201:204]
    plan = candidates.shadow_plan(aside, SITE_OF, patients, 5, share=0.5, seed=4)
    inside, out = np.concatenate(plan.train), np.concatenate(plan.out)
    assert sorted([*inside, *out]) == sorted(aside)
    assert not {patients[i] for i in inside} & {patients[i] for i in out}
    for k in range(3):
        assert all(SITE_OF[i] == k for i in [*plan.train[k], *plan.out[k]])
        assert abs(len(plan.train[k]) - len(plan.out[k])) <= 4
    assert len(plan.train[3]) == 3 and len(plan.out[3]) == 0  # one patient: it trains
    assert len(plan.train[4]) == len(plan.out[4]) == 0
    most = candidates.shadow_plan(aside, SITE_OF, patients, 5, share=0.8, seed=4)
    assert len(most.train[0]) == pytest.approx(48, abs=1.5)
    pair = candidates.shadow_plan(np.arange(6), SITE_OF, patients, 1, share=0.99)
    assert len(pair.train[0]) == len(pair.out[0]) == 3  # two patients: one stays out, whatever the share
    other = candidates.shadow_plan(aside, SITE_OF, patients, 5, seed=5)
    assert not np.array_equal(plan.train[0], other.train[0])
    for few in (aside[:0], np.arange(3)):
        with pytest.raises(UserError, match="set aside for shadow models, at least 2"):
            candidates.shadow_plan(few, SITE_OF, patients, 5)


def test_the_table_makes_the_attack():
    assert attacks.make("none") is None
    made = attacks.make("membership", count=10, resamples=7, unit="case", share=0.4, shadow=False)
    assert not made.shadow
    assert len(made.choose([np.arange(0, 80)], [np.arange(80, 100)], SITE_OF).members) == 5
    assert len(made.plan_shadow(np.arange(30), SITE_OF, [str(i) for i in range(230)], 4).train[0]) == 12
    assert [r.attack for r in made.read(*trained(100.0, 2))] == ["loss"]
    assert checks.options(attacks.ATTACKS["membership"])["count"] == 1000


@pytest.mark.parametrize(
    "options, words",
    [
        ({"count": 1}, "attack.count"),
        ({"share": 0}, "attack.share"),
        ({"unit": "slice"}, "attack.unit"),
        ({"resamples": 0}, "attack.resamples"),
        ({"shadow": "yes"}, "attack.shadow"),
        ({"shadows": 4}, "did you mean 'shadow'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        attacks.make("membership", **options)
