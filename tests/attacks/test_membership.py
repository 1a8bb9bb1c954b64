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


def halves_of(models=8, seed=0):
    """Pools of three clients, patients of one to five cases; patient 'both' has cases at two clients."""
    rng = np.random.default_rng(7)
    patients = np.concatenate([np.repeat([f"{k}_{i}" for i in range(20)], rng.integers(1, 6, 20)) for k in range(3)])
    starts = [int(np.flatnonzero(np.char.startswith(patients, f"{k}_"))[0]) for k in range(3)]
    pool = np.split(np.arange(len(patients)), starts[1:])
    patients[[starts[0], starts[2]]] = "both"
    return pool, patients, candidates.shadow_halves(pool, patients, models, seed)


def test_every_patient_is_in_half_of_the_shadows_with_all_cases():
    pool, patients, halves = halves_of()
    inside = np.array([np.isin(np.arange(len(patients)), np.concatenate(train)) for train in halves])
    np.testing.assert_array_equal(inside.sum(0), 4)
    for row in inside:
        assert not set(patients[row]) & set(patients[~row])
    for train in halves:
        for cases, mine in zip(pool, train):
            assert set(mine) <= set(cases) and len(mine) == len(set(mine))
            assert (
                abs(len(cases) - 2 * len(mine)) <= 10
            )  # twice the cases of a patient: one more, or one at two clients
    np.testing.assert_array_equal(inside[0], ~inside[1])
    # Two pairs are drawn apart from each other: as much in common as chance gives, and not all or nothing.
    common = [np.mean(inside[0] == inside[m]) for m in range(2, 8)]
    assert all(0.2 < share < 0.8 for share in common)
    again, other = halves_of()[2], halves_of(seed=1)[2]
    assert all(np.array_equal(a, b) for x, y in zip(halves, again) for a, b in zip(x, y))
    assert not np.array_equal(np.concatenate(halves[0]), np.concatenate(other[0]))


def test_shadows_draw_from_training_cases_and_from_non_members_of_their_sites():
    outside = np.array([90, 131, 160, 220])
    federated = candidates.shadow_pool([np.arange(5), np.array([101]), np.array([150])], outside, SITE_OF)
    assert [sorted(cases) for cases in federated] == [[0, 1, 2, 3, 4, 90], [101, 131], [150, 160]]
    pooled = candidates.shadow_pool([np.arange(0), np.array([1, 101])], outside, SITE_OF)
    assert [sorted(cases) for cases in pooled] == [[], [1, 90, 101, 131]]


def test_a_population_is_of_nobody_who_is_asked_or_trained_on():
    patients = [f"p{i // 2}" for i in range(230)]
    chosen = candidates.Candidates(np.arange(0, 10), np.array([80, 81, 82, 84]))
    test = [np.arange(80, 100), np.arange(120, 140), np.arange(200, 230)]
    choose = lambda aside, **options: candidates.population(aside, test, chosen, SITE_OF, patients, **options)
    assert choose(np.arange(150, 190), count=25).size == 25 and set(choose(np.arange(150, 190))) == set(range(150, 190))
    # Test cases of site 0, the candidates' own; 83 and 85 are of patients who are asked.
    assert choose(np.arange(0), fewest=5).tolist() == list(range(86, 100))
    assert not len(choose(np.arange(0)))


def test_scores_from_elsewhere_are_read_like_the_others():
    members, others = trained(100.0)
    from fedjax_seg.attacks.membership import Scored

    ids = ([f"a{i // 2}" for i in range(CASES)], [f"b{i // 2}" for i in range(CASES)])
    few = Scored(np.arange(4.0), np.arange(4.0) - 9, (["a0", "a0", "a1", "a1"], ["b0", "b1", "b2", "b3"]))
    for patients in (None, ids):
        loss = Scored(-members["log_loss"], -others["log_loss"], patients)
        plain, same, rest = report(members, others, patients=patients, scored={"x": loss, "few": few}, resamples=20)
        assert same.attack == "x" and summary(same) == {**summary(plain), "attack": "x"}
        unit = "case" if patients is None else "patient"
        sizes = (4, 4) if patients is None else (2, 4)
        assert (rest.unit, rest.members, rest.non_members, rest.auc.value) == (unit, *sizes, 1.0)


def test_the_table_makes_the_attack():
    assert attacks.make("none") is None
    made = attacks.make("membership", count=10, resamples=7, unit="case", share=0.4, shadow=False)
    assert not made.shadow
    assert len(made.choose([np.arange(0, 80)], [np.arange(80, 100)], SITE_OF).members) == 5
    assert len(made.plan_shadow(np.arange(30), SITE_OF, [str(i) for i in range(230)], 4).train[0]) == 12
    assert [r.attack for r in made.read(*trained(100.0, 2))] == ["loss"]
    assert checks.options(attacks.ATTACKS["membership"])["count"] == 1000
    assert (made.models, made.updates, made.canaries) == (0, False, 0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"count": 1}, "attack.count"),
        ({"share": 0}, "attack.share"),
        ({"unit": "slice"}, "attack.unit"),
        ({"resamples": 0}, "attack.resamples"),
        ({"shadow": "yes"}, "attack.shadow"),
        ({"shadows": 4}, "did you mean 'shadow'"),
        ({"models": 3}, "attack.models: 3 given, 0 or an even number from 4 on"),
        ({"models": 2}, "attack.models: 2 given"),
        ({"updates": 1.5}, "attack.updates"),
        ({"canaries": -1}, "attack.canaries"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        attacks.make("membership", **options)
