"""Epsilons against published and independently computed values; what the ledger says, and what it refuses to say."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Mechanism
from fedjax_seg.privacy import accounting, composition

DELTA = 1e-5
LARGE, SMALL = (0.02, 5000), (0.04, 2500)  # 800 and 400 images, batches of 16, 100 rounds of one epoch
PAPER = Mechanism("example", 1.0, 1.2, "zero-out", True)


def gaussian_epsilon(mu, delta=DELTA):
    """Balle and Wang (2018), Theorem 8, solved for epsilon: sensitivity / standard deviation = mu."""
    phi = stats.norm.cdf
    found = lambda e: phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu) - delta
    return optimize.brentq(found, 0, 500)


@pytest.mark.parametrize(
    "accountant, adjacency, large, small, within",
    [
        ("pld", "zero-out", 6.76, 10.29, 0.02),
        ("pld", "add-remove", 6.76, 10.29, 0.02),
        ("rdp", "zero-out", 7.32, 11.1, 0.05),
        ("pld", "replace-one", 12.7, 19.6, 0.05),
    ],
)
def test_the_papers_values(accountant, adjacency, large, small, within):
    for (q, steps), expected in ((LARGE, large), (SMALL, small)):
        found = accounting.poisson_epsilon(1.2, q, steps, DELTA, accountant=accountant, adjacency=adjacency)
        assert abs(found - expected) < within


def test_epsilon_lies_above_what_sampling_of_the_dominating_pair_shows():
    """delta(epsilon) = E[(1 - e^(epsilon - L))+] of the composed loss L by Monte Carlo, on few steps: independent."""
    z, q, steps, delta, draws = 0.8, 0.1, 20, 1e-3, 400_000
    rng = np.random.default_rng(0)
    loss = np.zeros(draws)
    for _ in range(steps):  # removal: the data set with the unit against the one without
        x = rng.normal(size=draws) * z + (rng.random(draws) < q)
        loss += np.log1p(q * np.expm1((2 * x - 1) / (2 * z * z)))
    epsilon = accounting.poisson_epsilon(z, q, steps, delta)
    values = np.maximum(0, -np.expm1(np.minimum(epsilon - loss, 0)))
    error = values.std() / math.sqrt(draws)
    assert abs(values.mean() - delta) < 5 * error and error < 0.05 * delta


def test_without_sampling_it_is_the_gaussian_mechanism():
    for z, steps in ((1.2, 100), (3.0, 1), (8.0, 7)):
        expected = gaussian_epsilon(math.sqrt(steps) / z)
        assert abs(accounting.any_order_epsilon(z, steps, DELTA) - expected) < 1e-6 * expected
        assert abs(accounting.poisson_epsilon(z, 1.0, steps, DELTA) - expected) < 1e-6 * expected
    assert abs(accounting.any_order_epsilon(1.2, 100, DELTA) - 69.5) < 0.05


def test_replace_one_doubles_the_sensitivity_with_every_accountant():
    """dp-accounting doubles it inside one accountant and not in the other: both must bound the exact value."""
    exact = gaussian_epsilon(2.0)
    assert abs(accounting.any_order_epsilon(1.0, 1, DELTA, adjacency="replace-one") - exact) < 1e-6
    for accountant, slack in (("pld", 0.01), ("rdp", 0.1)):
        found = accounting.poisson_epsilon(1.0, 1.0, 1, DELTA, accountant=accountant, adjacency="replace-one")
        assert exact - 1e-6 <= found <= exact * (1 + slack)
    with pytest.raises(UserError, match="accountant: 'rdp' given for replace-one under Poisson sampling"):
        accounting.poisson_epsilon(1.0, 0.1, 5, DELTA, accountant="rdp", adjacency="replace-one")


@pytest.mark.parametrize("target, expected, within", [(1, 5.38, 0.04), (8, 1.09, 0.005)])
def test_noise_from_a_target(target, expected, within):
    """Published beside epsilon 2 and 4 (2.93, 1.70); the value for 1 was computed on a grid that costs 0.7 % there."""
    z = accounting.calibrate(target, *LARGE, DELTA)
    assert abs(z - expected) < within
    found = accounting.poisson_epsilon(z, *LARGE, DELTA)
    assert target * (1 - 1e-3) < found <= target


def test_limits():
    assert accounting.poisson_epsilon(0.0, 0.1, 5, DELTA) == math.inf == accounting.any_order_epsilon(0.0, 1, DELTA)
    assert accounting.poisson_epsilon(1.0, 0.1, 0, DELTA) == 0 == accounting.any_order_epsilon(1.0, 0, DELTA)
    for call in (
        lambda: accounting.poisson_epsilon(-1.0, 0.1, 5, DELTA),
        lambda: accounting.poisson_epsilon(1.0, 1.1, 5, DELTA),
        lambda: accounting.poisson_epsilon(1.0, 0.1, 5, 0.0),
        lambda: accounting.calibrate(0.0, 0.1, 5, DELTA),
    ):
        with pytest.raises(UserError, match="given"):
            call()


def test_what_a_cut_draw_costs():
    assert accounting.cut_slack(6.76, 800, 0.02, 800, 5000) == 0
    tail = sum(math.comb(50, k) * 0.2**k * 0.8 ** (50 - k) for k in range(21, 51))
    assert math.isclose(accounting.cut_slack(2.0, 50, 0.2, 20, 7), 7 * tail * (1 + math.exp(2)), rel_tol=1e-9)
    assert accounting.cut_slack(60.0, 50, 0.2, 20, 7) == 1


def ledger(mechanism=PAPER, sampling="poisson", units=None, **options):
    rest = {"batch_size": 16, "local_epochs": 1, "participations": 100, "delta": DELTA, "capacity": 56} | options
    rows = accounting.client_ledger(
        mechanism, sampling=sampling, units=units or {"a": 800, "b": 400, "c": 800, "d": 0}, **rest
    )
    return {row["client"]: row for row in rows}


def test_the_ledger_of_the_paper():
    rows = ledger()
    assert abs(rows["a"]["epsilon_pld"] - 6.76) < 0.02 and abs(rows["b"]["epsilon_pld"] - 10.29) < 0.02
    assert abs(rows["a"]["epsilon_rdp"] - 7.32) < 0.02
    assert rows["a"]["q_origin"] == "16/800 = 0.02" and rows["b"]["q_origin"] == "16/400 = 0.04"
    assert (rows["a"]["steps"], rows["b"]["steps"]) == (5000, 2500)
    assert {**rows["a"], "client": "c"} == rows["c"]
    assert rows["d"]["epsilon_pld"] == 0 and rows["d"]["steps"] == 0
    assert 0 < rows["a"]["delta_slack"] < 1e-8 and rows["a"]["delta"] == DELTA + rows["a"]["delta_slack"]
    assert "Poisson sampling of examples" in rows["a"]["rests_on"]
    assert (rows["a"]["unit"], rows["a"]["adjacency"], rows["a"]["units"]) == ("example", "zero-out", 800)


def test_shuffled_epochs_get_no_amplified_epsilon():
    rows = ledger(sampling="shuffled", local_epochs=2, participations=50)
    for name in ("a", "b"):
        assert abs(rows[name]["epsilon_pld"] - 69.5) < 0.05  # 100 epochs, whatever the size
        assert rows[name]["q"] is None and rows[name]["epsilon_rdp"] is None
        assert "not proven for them and is not printed" in rows[name]["rests_on"]
    patients = ledger(PAPER._replace(unit="patient"), sampling="shuffled", units={"a": 90})["a"]
    assert patients["epsilon_pld"] == math.inf and "several examples of one patient" in patients["rests_on"]


def test_no_noise_is_no_guarantee_and_few_cases_are_not_sampled():
    for sampling in ("poisson", "shuffled"):
        row = ledger(PAPER._replace(noise_multiplier=0.0, formal=False), sampling=sampling)["a"]
        assert row["epsilon_pld"] == math.inf and row["rests_on"].startswith("nothing")
    row = ledger(units={"a": 10}, participations=9)["a"]
    assert row["q"] == 1 and abs(row["epsilon_pld"] - gaussian_epsilon(3 / 1.2)) < 1e-5
    assert row["q_origin"] == "1 (10 units, batches of 16)" and "every example is in every step" in row["rests_on"]
    lost = ledger(PAPER._replace(noise_multiplier=0.2), units={"a": 800}, participations=2, capacity=20)["a"]
    assert lost["epsilon_pld"] == math.inf and lost["delta"] == 1


def test_one_gaussian_both_ways():
    """Balle and Wang (2018): 3.73063 and 0.49989 for epsilon 1 and 10; the classical formula is 4.8448 / epsilon."""
    for epsilon, sigma in ((1.0, 3.73063), (10.0, 0.49989)):
        assert abs(accounting.gaussian_sigma(epsilon, DELTA) - sigma) < 1e-4
        assert abs(accounting.gaussian_epsilon(accounting.gaussian_sigma(epsilon, DELTA), DELTA) - epsilon) < 1e-5
        assert abs(composition.classical_sigma(epsilon, DELTA) - 4.844805 / epsilon) < 1e-6
    for epsilon, true_epsilon, true_delta in (
        (0.5, 0.353, 1.6e-8),
        (1, 0.751, 4.1e-8),
        (5, 4.54, 1.3e-6),
        (10, 10.39, 2.27e-5),
    ):
        z = composition.classical_sigma(epsilon, DELTA)
        assert abs(accounting.gaussian_epsilon(z, DELTA) - true_epsilon) < 6e-3
        assert composition.gaussian_delta(z, epsilon) == pytest.approx(true_delta, rel=0.05)


CENTRAL = Mechanism("client", 2.0, 3.7306316, "zero-out", True)


def rounds_ledger(mechanism=CENTRAL, **options):
    given = {"rounds": 20, "participations": 4, "smallest_cohort": 6, "q": None, "truncated": False, "delta": DELTA}
    made = composition.round_ledger(mechanism, **(given | options))
    return made, {(r["what"], r["method"]): r for r in made["rows"]}


# Published for 20 rounds of one release, at most 4 per client, delta 1e-5:
# (z, exact 20, RDP 20, exact 4, RDP 4, exact 4 under replace-one, Poisson 6/33 PLD, RDP)
RUNS = [
    (3.7306316, 5.41, 5.83, 2.15, 2.34, 4.75, 0.889, 0.989),
    (0.4998886, 77.4, 81.1, 24.4, 25.9, 65.3, 23.0, 26.1),
    (1.0, 28.4, None, 10.0, None, 24.4, 6.08, 6.94),
]


@pytest.mark.parametrize("z, all20, all_rdp, four, four_rdp, replaced, poisson, poisson_rdp", RUNS)
def test_the_ledger_of_rounds(z, all20, all_rdp, four, four_rdp, replaced, poisson, poisson_rdp):
    near = lambda row, value: value is None or row["epsilon"] == pytest.approx(value, rel=4e-3)
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=z), q=6 / 33)
    assert near(rows["all rounds", "exact Gaussian"], all20) and near(rows["all rounds", "RDP"], all_rdp)
    own = "rounds of one client"
    assert near(rows[own, "exact Gaussian"], four) and near(rows[own, "RDP"], four_rdp)
    assert near(rows[f"{own}, replace-one", "exact Gaussian"], replaced)
    assert near(rows["all rounds", "Poisson, PLD"], poisson) and near(rows["all rounds", "Poisson, RDP"], poisson_rdp)
    basic = rows["all rounds", "basic composition"]
    assert basic["epsilon"] == pytest.approx(20 * made["epsilon_round"]) and basic["delta"] == pytest.approx(20 * DELTA)
    assert made["epsilon"] == min(rows[own, "exact Gaussian"]["epsilon"], rows["all rounds", "Poisson, PLD"]["epsilon"])
    assert all(r["status"] == "proven" for r in made["rows"] if r["method"] != "classical formula")


def test_replace_one_mechanisms_are_not_doubled_again():
    """Their noise multiplier refers to the replace-one sensitivity already."""
    made, rows = rounds_ledger(CENTRAL._replace(adjacency="replace-one"))
    assert made["epsilon"] == pytest.approx(gaussian_epsilon(2 / 3.7306316), rel=1e-5)
    assert ("rounds of one client, replace-one", "exact Gaussian") not in rows


@pytest.mark.parametrize(
    "options, mechanism, words",
    [
        ({}, CENTRAL, "the sampler is not Poisson"),
        ({"q": 6 / 33, "truncated": True}, CENTRAL, "cut to the capacity"),
        ({"q": 6 / 33}, CENTRAL._replace(adjacency="replace-one"), "stated for replace-one"),
    ],
)
def test_amplification_only_where_it_is_proven(options, mechanism, words):
    made, rows = rounds_ledger(mechanism, participations=20, **options)
    assert made["amplification"].startswith("none: ") and words in made["amplification"]
    assert not any("Poisson" in method for _, method in rows)
    assert made["epsilon"] == pytest.approx(5.41, abs=5e-3)


def test_claims_without_a_proof_are_listed_as_claims():
    """DP-SimAgg: 20 = 20 * 1 is claimed; 190 tensors of noise are 3800 releases: exact 134, if it were sound."""
    paper = Mechanism("client", math.nan, 4.844805, "replace-one", False)
    made, rows = rounds_ledger(paper, q=6 / 33, reasons=("Df is data",))
    assert made["epsilon"] is None and made["sensitivity"] is None and made["reasons"] == ("Df is data",)
    assert rows["all rounds", "basic composition"]["epsilon"] == pytest.approx(20, rel=1e-4)
    assert rows["rounds of one client", "exact Gaussian"]["epsilon"] == pytest.approx(1.61, abs=5e-3)
    assert {r["status"] for r in made["rows"]} == {"claimed, not proven"}
    made, rows = rounds_ledger(paper, tensors=190)
    assert rows["all rounds", "exact Gaussian"]["releases"] == 3800
    assert rows["all rounds", "exact Gaussian"]["epsilon"] == pytest.approx(134, abs=0.6)
    assert rows["all rounds", "basic composition"]["epsilon"] == pytest.approx(3800, rel=1e-4)


def test_rounds_without_noise_have_no_ledger():
    made, _ = rounds_ledger(CENTRAL._replace(noise_multiplier=0.0, formal=False))
    assert made["epsilon"] is None and made["rows"] == [] and made["reasons"] == ("there is no noise",)
    with pytest.raises(UserError, match="rounds: 0 given"):
        rounds_ledger(rounds=0)
