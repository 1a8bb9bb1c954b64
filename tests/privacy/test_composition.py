"""The ledger of noise once per round: published values, what is proven under which sampler, and what is refused."""

import json
import math

import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Mechanism
from fedjax_seg.federation import sampling
from fedjax_seg.privacy import accounting, composition

DELTA, K, Q = 1e-5, 33, 6 / 33
CENTRAL = Mechanism("client", 2.0, 3.7306316, "zero-out", True)
WINDOW, POISSON, UNIFORM = sampling.sliding_window(K, 6), sampling.poisson(K, Q), sampling.uniform(K, 6)
BINS = sampling.full(K)._replace(bins=5, max_participations=lambda rounds: -(-rounds // 5), min_separation=5)


def rounds_ledger(mechanism=CENTRAL, sampler=WINDOW, **options):
    given = {"clients": K, "rounds": 20, "smallest_cohort": 6, "delta": DELTA}
    made = composition.round_ledger(mechanism, sampler, **(given | options))
    json.dumps(made)
    return made, {(r["what"], r["method"]): r for r in made["rows"]}


# Published for 20 rounds of one release, at most 4 per client, delta 1e-5:
# (z, exact 20, RDP 20, exact 4, RDP 4, exact 4 under replace-one, Poisson 6/33 PLD, RDP, replace-one PLD)
RUNS = [
    pytest.param(3.7306316, 5.41, 5.83, 2.15, 2.34, 4.75, 0.889, 0.989, 1.71, id="1"),
    pytest.param(0.4998886, 77.4, 81.1, 24.4, 25.9, 65.3, 23.0, 26.1, 25.9, marks=pytest.mark.slow, id="10"),
    pytest.param(1.0, 28.4, None, 10.0, None, 24.4, 6.08, 6.94, 8.34, marks=pytest.mark.slow, id="z1"),
]


@pytest.mark.parametrize("z, all20, all_rdp, four, four_rdp, replaced, poisson, poisson_rdp, poisson_replaced", RUNS)
def test_the_ledger_of_rounds(z, all20, all_rdp, four, four_rdp, replaced, poisson, poisson_rdp, poisson_replaced):
    near = lambda row, value: value is None or row["epsilon"] == pytest.approx(value, rel=4e-3)
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=z))
    own = "rounds of one client"
    assert near(rows["all rounds", "exact Gaussian"], all20) and near(rows["all rounds", "RDP"], all_rdp)
    assert near(rows[own, "exact Gaussian"], four) and near(rows[own, "RDP"], four_rdp)
    assert near(rows[f"{own}, replace-one", "exact Gaussian"], replaced)
    basic = rows["all rounds", "basic composition"]
    assert basic["epsilon"] == pytest.approx(20 * made["epsilon_round"]) and basic["delta"] == pytest.approx(20 * DELTA)
    assert made["epsilon"] == rows[own, "exact Gaussian"]["epsilon"] and made["participations"] == 4
    assert made["gdp_mu"] == pytest.approx(2 / z) and made["gdp_meaning"].startswith("exact")

    drawn, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=z), POISSON)
    assert near(rows["all rounds", "Poisson, PLD"], poisson) and near(rows["all rounds", "Poisson, RDP"], poisson_rdp)
    assert near(rows["all rounds, replace-one", "Poisson, PLD"], poisson_replaced)
    assert drawn["epsilon"] == rows["all rounds", "Poisson, PLD"]["epsilon"]
    assert drawn["amplification"].startswith("Poisson sampling of clients, q = 0.181818; rounds without a client")
    status = {r["status"] for r in drawn["rows"] if r["method"] not in ("classical formula", "advanced composition")}
    assert status == {"proven"}


def test_advanced_composition():
    """Published: 55.8 (worse than basic), 16.5 and 6825 for epsilon 1; nothing of use for epsilon 10."""
    for count, value in ((20, 55.8), (4, 16.5), (3800, 6825)):
        assert composition.advanced_epsilon(1.0, count, DELTA) == pytest.approx(value, rel=2e-3)
    _, rows = rounds_ledger()
    found = rows["rounds of one client", "advanced composition"]
    assert found["epsilon"] == pytest.approx(16.47, abs=0.01) and found["delta"] == pytest.approx(5 * DELTA)
    _, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=0.4998886))
    found = rows["all rounds", "advanced composition"]
    assert (found["status"], found["epsilon"]) == ("vacuous", math.inf)


def test_curves_of_a_run():
    made, _ = rounds_ledger(CENTRAL._replace(noise_multiplier=1.0))
    assert [p["epsilon"] for p in made["per_round"]] == sorted(p["epsilon"] for p in made["per_round"])
    after = {p["round"]: p["epsilon"] for p in made["per_round"]}
    assert len(after) <= 12 and after[20] == made["epsilon"]
    assert after[5] == pytest.approx(
        accounting.gaussian_epsilon(1.0, DELTA)
    )  # one cycle of six windows, one round each
    for point in made["curve"]:  # exact at every delta
        assert composition.gaussian_delta(0.5, point["epsilon"]) == pytest.approx(point["delta"], rel=1e-3)
    assert made["events"][0] | {"sentence": ""} == {
        "event": "gaussian", "noise_multiplier": 1.0, "count": 4, "adjacency": "zero-out", "sentence": ""
    }  # fmt: skip


def test_a_poisson_run_on_its_way():
    made, _ = rounds_ledger(CENTRAL._replace(noise_multiplier=1.0), POISSON)
    after = {p["round"]: p["epsilon"] for p in made["per_round"]}
    expected = accounting.poisson_epsilon(1.0, Q, 10, DELTA)
    assert after[10] == pytest.approx(expected, rel=1e-3) and after[20] == made["epsilon"]
    at = {p["delta"]: p["epsilon"] for p in made["curve"]}
    assert at[DELTA] == made["epsilon"] and at[1e-8] == pytest.approx(8.904, abs=0.02)
    assert at[1e-8] == pytest.approx(accounting.poisson_epsilon(1.0, Q, 20, 1e-8), rel=1e-3)
    assert made["gdp_mu"] == pytest.approx(math.sqrt(20)) and "mu = 1.324 at delta 1e-05" in made["gdp_meaning"]


def test_draws_of_a_fixed_size():
    """Notes: 10.6 for z = 2 of the zero-out sensitivity, 20 rounds of 6 of 33; z = 1 of the replace-one sensitivity."""
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=1.0, adjacency="replace-one"), UNIFORM)
    assert made["epsilon"] == rows["all rounds", "fixed size, RDP"]["epsilon"] == pytest.approx(10.6, abs=0.05)
    assert made["amplification"].startswith("a fresh uniform subset of 6 of 33 clients in every round")
    zeroed, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=2.0), UNIFORM)
    assert zeroed["epsilon"] == pytest.approx(11.5, abs=0.03)  # all 20 rounds: nothing is proven for its own adjacency
    assert rows["all rounds, replace-one", "fixed size, RDP"]["epsilon"] == pytest.approx(10.6, abs=0.05)
    assert zeroed["amplification"].startswith("none: what subsets of a fixed size are worth")


def test_poisson_draws_that_are_cut():
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=2.0), sampling.poisson(K, Q, capacity=10))
    assert made["epsilon"] == rows["all rounds", "truncated Poisson, PLD"]["epsilon"] == pytest.approx(3.16, abs=0.01)
    assert "cut to a random 10 of those drawn" in made["amplification"] and ("all rounds", "Poisson, PLD") not in rows


def test_balls_in_bins():
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=1.0), BINS)
    proven, sampled = (rows["all rounds", f"balls in bins, {how}"] for how in ("PLD", "Monte Carlo"))
    assert made["epsilon"] == proven["epsilon"] == pytest.approx(8.32, abs=0.15)
    assert sampled["status"].startswith("Monte Carlo, 200000 samples") and "formal at" in sampled["status"]
    assert sampled["epsilon"] == pytest.approx(8.32, abs=0.25) and sampled["delta"] > 5 * DELTA
    replaced, rows = rounds_ledger(CENTRAL._replace(adjacency="replace-one"), BINS)
    assert not any("bins" in method for _, method in rows) and replaced["epsilon"] == pytest.approx(2.15, abs=5e-3)


def test_a_bound_by_sampling_is_never_the_headline(monkeypatch):
    """Too few samples show an epsilon of 0; the run's epsilon must not follow."""
    monkeypatch.setattr(composition, "MONTE_CARLO", 10_000)
    monkeypatch.setattr(composition.balls_in_bins, "epsilon", lambda *rest: (0.0, 1e-3, "lucky"))
    made, rows = rounds_ledger(CENTRAL._replace(noise_multiplier=1.0), BINS)
    assert rows["all rounds", "balls in bins, Monte Carlo"]["epsilon"] == 0 and made["epsilon"] > 8


def test_replace_one_mechanisms_are_not_doubled_again():
    """Their noise multiplier refers to the replace-one sensitivity already."""
    made, rows = rounds_ledger(CENTRAL._replace(adjacency="replace-one"))
    assert made["epsilon"] == pytest.approx(accounting.gaussian_epsilon(3.7306316 / 2, DELTA), rel=1e-5)
    assert not any("replace-one" in what for what, _ in rows)


@pytest.mark.parametrize(
    "sampler, mechanism, words",
    [
        (sampling.full(K), CENTRAL, "the sampler is not Poisson"),
        (UNIFORM, CENTRAL, "proven here for replace-one"),
        (sampling.poisson(K, 1.0), CENTRAL, "every client is in every round"),
        (sampling.poisson(K, Q, capacity=10), CENTRAL._replace(adjacency="add-remove"), "cut to the capacity"),
        (POISSON, CENTRAL._replace(adjacency="replace-one"), "stated for replace-one"),
    ],
    ids=["full", "uniform", "all", "cut", "replaced"],
)
def test_amplification_only_where_it_is_proven(sampler, mechanism, words):
    made, rows = rounds_ledger(mechanism, sampler)
    assert made["amplification"].startswith("none: ") and words in made["amplification"]
    assert not any("Poisson" in method for _, method in rows)
    assert made["epsilon"] == pytest.approx(5.41, abs=5e-3)


def test_claims_without_a_proof_are_listed_as_claims():
    """DP-SimAgg: 20 = 20 * 1 is claimed; 190 tensors of noise are 3800 releases: exact 134, if it were sound."""
    paper = Mechanism("client", math.nan, 4.844805, "replace-one", False)
    made, rows = rounds_ledger(paper, reasons=("Df is data",))
    assert made["epsilon"] is None and made["sensitivity"] is None and made["reasons"] == ("Df is data",)
    assert made["curve"] == made["per_round"] == [] and made["gdp_mu"] is None
    assert rows["all rounds", "basic composition"]["epsilon"] == pytest.approx(20, rel=1e-4)
    assert rows["rounds of one client", "exact Gaussian"]["epsilon"] == pytest.approx(1.61, abs=5e-3)
    assert {r["status"] for r in made["rows"]} == {"claimed, not proven"}
    made, rows = rounds_ledger(paper, tensors=190)
    assert rows["all rounds", "exact Gaussian"]["releases"] == 3800
    assert rows["all rounds", "exact Gaussian"]["epsilon"] == pytest.approx(134, abs=0.6)
    assert rows["all rounds", "basic composition"]["epsilon"] == pytest.approx(3800, rel=1e-4)
    assert rows["all rounds", "advanced composition"]["epsilon"] == pytest.approx(6825, rel=1e-3)


BANDED = CENTRAL._replace(noise_multiplier=1.0, span=20, separation=5, participations=4)


def test_correlated_noise_is_one_release():
    made, rows = rounds_ledger(BANDED, sampling.randomized_order(30, 6), clients=30)
    assert made["epsilon"] == pytest.approx(accounting.gaussian_epsilon(1.0, DELTA)) and made["gdp_mu"] == 1.0
    assert made["events"][0]["count"] == 1 and {p["epsilon"] for p in made["per_round"]} == {made["epsilon"]}
    assert ("all rounds", "basic composition") not in rows
    assert rows["all rounds, one release, replace-one", "exact Gaussian"]["epsilon"] == pytest.approx(9.997, abs=2e-3)


@pytest.mark.parametrize(
    "mechanism, sampler, rounds, words",
    [
        (CENTRAL._replace(noise_multiplier=0.0, formal=False), WINDOW, 20, "there is no noise"),
        (CENTRAL._replace(noise_multiplier=0.0), WINDOW, 20, "there is no noise"),
        (CENTRAL._replace(sensitivity=math.inf), WINDOW, 20, "nothing is clipped: the sensitivity is infinite"),
        (CENTRAL._replace(sensitivity=math.inf, noise_multiplier=0.0), WINDOW, 20, "nothing is clipped"),
        (CENTRAL._replace(sensitivity=math.nan), WINDOW, 20, "the sensitivity depends on the data"),
        (CENTRAL, sampling.adaptive(K, 6), 20, "the sampler chooses clients by their private updates"),
        (BANDED, WINDOW, 20, "the noise is made for clients in at most 4 rounds, 5 apart; the sampler allows 4, 1"),
        (BANDED, sampling.randomized_order(K, 6), 21, "the noise is made for 20 rounds, 21 are run"),
        (BANDED._replace(participations=3), sampling.randomized_order(30, 6), 20, "in at most 3 rounds"),
    ],
    ids=["noise 0", "claimed", "no clip", "neither", "data", "adaptive", "separation", "span", "participations"],
)
def test_no_guarantee_is_said_so(mechanism, sampler, rounds, words):
    made, _ = rounds_ledger(mechanism, sampler, rounds=rounds)
    assert made["epsilon"] is None and not made["formal"] and made["gdp_mu"] is None
    assert made["curve"] == made["per_round"] == []
    assert any(reason.startswith(words) or words in reason for reason in made["reasons"])
    assert all(row["status"] != "proven" for row in made["rows"])


def test_what_is_no_ledger():
    made, _ = rounds_ledger(CENTRAL._replace(noise_multiplier=0.0, formal=False))
    assert made["rows"] == [] and made["reasons"] == ("there is no noise",) and made["epsilon_round"] is None
    with pytest.raises(UserError, match="rounds: 0 given"):
        rounds_ledger(rounds=0)
    with pytest.raises(UserError, match=r"q = 0\.181818 given with at most 4 of 20 rounds per client"):
        rounds_ledger(sampler=WINDOW._replace(q=Q))
