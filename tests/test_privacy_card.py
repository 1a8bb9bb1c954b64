"""The privacy card, targets and budgets: of runs that are built and not trained."""

import json
import math

import dp_accounting
import jax
import jax.numpy as jnp
import pytest
import tiny_runs

from fedjax_seg import consistency, experiment, guarantee, privacy_budget, privacy_card
from fedjax_seg.audit import __main__ as audit_command
from fedjax_seg.audit import audit_mechanism, run_audit
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import round
from fedjax_seg.main import guarded

PARTS = ("threat_model", "mechanisms", "ledger", "audit", "attacks", "secure_sum", "utility", "warnings")
PRIVATE = ("aggregator.name=dp_fedavg", "aggregator.clip=1.0")
POISSON = ("client.name=dp_sgd", "client.clip=1.0", "batch_sampling=poisson", "batch_size=4")


@pytest.fixture(scope="module")
def loaded(pcp_root, tmp_path_factory):
    return experiment.load_data(tiny_runs.config(pcp_root), tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def built(pcp_root, loaded):
    def build(*overrides):
        config = tiny_runs.config(pcp_root, *(f"--config.{key}" for key in overrides))
        return experiment.build(privacy_budget.calibrated(config, loaded), loaded)

    return build


def card_of(made, **known):
    return privacy_card.card(made, guarantee.of_run(made), **known)


def test_a_run_without_a_mechanism_says_that_nothing_is_guaranteed(built):
    card = card_of(built())
    assert all(part in card for part in PARTS)
    assert card["epsilon"] is None and card["epsilon_text"] == "infinite"  # never 0, never blank
    assert "No differential-privacy guarantee" in card["sentence"] and card["mechanisms"] == []
    assert card["ledger"]["rows"] == [] and "epsilon is infinite" in card["ledger"]["text"]
    assert any("no guarantee" in line for line in card["warnings"])


def test_noise_of_zero_is_an_infinite_epsilon(built):
    for overrides in ((*PRIVATE, "aggregator.noise_multiplier=0.0"), (*POISSON, "client.noise_multiplier=0.0")):
        card = card_of(built(*overrides))
        assert card["epsilon"] is None and card["epsilon_text"] == "infinite"
        assert "there is no noise" in card["sentence"] and not card["mechanisms"][0]["formal"]


def test_a_private_aggregator_has_its_proof_its_schedule_and_its_curve(built):
    made = built(*PRIVATE, "aggregator.noise_multiplier=2.0", "rounds=9")
    card = card_of(made)
    (mechanism,) = card["mechanisms"]
    assert (mechanism["sensitivity"], mechanism["stddev"], mechanism["participations"]) == (1.0, 2.0, 9)
    assert "||T_k|| <= C" in mechanism["proof"] and "3 of 3 clients" in mechanism["sampling"]
    assert card["epsilon"] == pytest.approx(dp_accounting.get_epsilon_gaussian(2 / 3, 1e-5), rel=1e-6)
    at = {point["delta"]: point["epsilon"] for point in card["ledger"]["curve"]}
    assert at[1e-5] == pytest.approx(card["epsilon"]) and at[1e-8] > at[1e-5]
    assert card["ledger"]["per_round"][-1]["round"] == 9
    assert card["ledger"]["gdp_mu"] == pytest.approx(3 / 2)
    # n/(z sqrt d) of three hospitals, 28 inputs, 8 hidden units, 2 classes.
    entries = card["utility"]["parameters"]
    assert card["utility"]["snr"] == pytest.approx(3 / (2 * math.sqrt(entries))) and entries > 200
    assert any("mostly noise" in line for line in card["warnings"])
    assert "what to do instead" in card["utility"]["text"].lower()


def test_who_really_came_is_held_against_what_was_accounted(built):
    made = built(*PRIVATE, "aggregator.noise_multiplier=2.0", "sampler.name=sliding_window", "sampler.size=1")
    row = {"split": "train", "metric": "update_norm", "fold": "fold0", "seed": 0, "value": 1.0, "n": 1}
    fine = [{**row, "site": "NYU", "round": 1}, {**row, "site": "NYU", "round": 4}]
    card = card_of(made, written=fine)
    assert card["mechanisms"][0]["realised"] == {"NYU": 2, "UM": 0, "UCLA": 0}
    assert not any("ACCOUNTING BUG" in line for line in card["warnings"])
    card = card_of(made, written=[*fine, {**row, "site": "NYU", "round": 2}])  # two of four rounds were accounted
    assert any("ACCOUNTING BUG" in line for line in card["warnings"])


def test_dp_sgd_is_about_patients_or_images_and_says_so(built):
    card = card_of(built(*POISSON, "client.noise_multiplier=3.0"))
    assert card["unit"] == "example" and card["mechanisms"][0]["where"] == "client"
    assert "poisson batches of 4" in card["mechanisms"][0]["sampling"]
    assert card["epsilon"] > 0 and card["ledger"]["events"][0]["event"] == "poisson"


@pytest.mark.parametrize("target", [2.0, 8.0])
def test_an_aggregators_noise_follows_from_a_target(built, target):
    made = built(*PRIVATE, f"privacy.target_epsilon={target}", "rounds=6")
    z = made.config.aggregator.noise_multiplier
    assert dp_accounting.get_epsilon_gaussian(z / math.sqrt(6), 1e-5) == pytest.approx(target, rel=2e-3)
    assert guarantee.of_run(made)["epsilon"] <= target * (1 + 1e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("privacy.target_epsilon=1.0",), "or an aggregator with a noise_multiplier"),
        ((*PRIVATE, *POISSON, "privacy.target_epsilon=1.0"), "not both"),
        ((*PRIVATE, "aggregator.epsilon=1.0", "privacy.target_epsilon=1.0"), "per round given together with"),
        (("aggregator.name=geyer", "privacy.target_epsilon=1.0"), "promises nothing"),
    ],
)
def test_targets_that_cannot_be_kept(built, overrides, words):
    with pytest.raises(UserError, match=words):
        built(*overrides)


def test_a_target_is_kept_where_a_secure_sum_rounds(pcp_root, loaded):
    """A clip of .1 in 16 bits: rounding alone makes the sensitivity 2 % larger."""
    words = (*PRIVATE[:1], "aggregator.clip=0.1", "privacy.target_epsilon=4.0", "secure_sum.name=secagg")
    words = [f"--config.{key}" for key in (*words, "secure_sum.frac=12")]
    made, _ = experiment.prepared(tiny_runs.config(pcp_root, *words), None, lambda config, folder: loaded)
    assert made.parts.secure.rounding * math.sqrt(500) > 2e-3 * 0.1
    assert 3.99 < guarantee.of_run(made)["epsilon"] <= 4.0


def test_claims_that_rest_on_who_is_drawn(built):
    poisson = (*PRIVATE, "aggregator.noise_multiplier=2.0", "aggregator.expected_clients=1.5")
    poisson = (*poisson, "sampler.name=poisson", "sampler.q=0.5", "rounds=20")
    made = built(*poisson)
    card = card_of(made, written=[{"split": "train", "metric": "update_norm", "site": "NYU", "fold": 0, "seed": 0}])
    known = dp_accounting.get_epsilon_gaussian(2 / math.sqrt(20), 1e-5)
    assert card["epsilon"] < known and card["epsilon_if_known"] == pytest.approx(known, rel=1e-6)
    assert any("must stay secret" in line for line in card["warnings"]) and card["mechanisms"][0]["realised"] is None
    salted = [made._replace(parts=made.parts._replace(salt=salt)) for salt in (1, 2)]
    state, plan = jax.eval_shape(made.initial), tree.rows(made.plan, 0)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), state)
    draw = lambda m, t: round.gather(m.parts, state._replace(round=jnp.int32(t)), plan).drawn.present.tolist()
    one, other = ([draw(m, t) for t in range(12)] for m in salted)
    assert one != other and one == [draw(salted[0], t) for t in range(12)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sampler.name=balls_in_bins", "sampler.cycle=2", "secure_sum.name=secagg"), "rests on the sampler"),
        (("sampler.name=poisson", "sampler.q=0.5", "secure_sum.name=secagg"), "rests on the sampler"),
        (("sampler.name=poisson", "sampler.q=0.5", "max_sim_hours=5.0"), "the number of rounds, would tell"),
    ],
)
def test_what_would_tell_who_was_drawn_is_refused(built, overrides, words):
    private = (*PRIVATE, "aggregator.noise_multiplier=2.0", "aggregator.expected_clients=1.5")
    with pytest.raises(UserError, match=words):
        built(*private, *overrides)


def test_a_rule_that_is_no_sum_is_not_zero_out_under_coins(built):
    rule = ("aggregator.name=private_sim_agg", "aggregator.clip=1.0", "aggregator.noise_multiplier=2.0")
    rule = (*rule, "aggregator.bound=2C", "sampler.name=poisson", "sampler.q=0.5")
    with pytest.raises(UserError, match="'add-remove' expected"):
        built(*rule, "aggregator.adjacency=zero-out")
    assert built(*rule, "aggregator.adjacency=add-remove").parts.aggregator.mechanism.formal


def test_a_patient_at_two_sites_is_no_unit(built, loaded):
    from dataclasses import replace

    ids = list(loaded.patient_ids)
    here, there = loaded.splits[0].train[0][0], loaded.splits[0].train[1][0]
    ids[there] = ids[here]
    with pytest.raises(UserError, match=r"unit: 'patient' given, and patient .* has training cases at NYU and UM"):
        consistency._check_homes(replace(loaded, patient_ids=tuple(ids)))
    consistency._check_homes(loaded)


@pytest.mark.parametrize(
    "rule",
    [("dp_simagg", "aggregator.clip=5.0"), ("geyer",), ("ref_sim_agg", "aggregator.tau=1.0", "aggregator.cap=5.0")],
)
def test_a_runs_own_mechanism_is_what_is_audited(built, rule):
    noise = ("aggregator.noise_multiplier=2.0",) if rule[0] != "dp_simagg" else ()
    ((made, n),) = run_audit.audited(built(f"aggregator.name={rule[0]}", *rule[1:], *noise), 3)
    assert n == 3 and made.name == rule[0] and made.claimed and made.release is not None
    found = audit_mechanism(made, n=n, dim=3, trials=0, steps=0)
    assert not found.violations and found.sensitivity["found"] > 0
    if rule[0] == "ref_sim_agg":  # clients at and beyond the cap reach the bound
        assert found.sensitivity["share"] > 0.99


def test_a_budget_ends_the_run_before_it_is_spent(built):
    """z = 2: k rounds have the epsilon of one with 2/sqrt(k)."""
    of = lambda k: dp_accounting.get_epsilon_gaussian(2 / math.sqrt(k), 1e-5)
    private = (*PRIVATE, "aggregator.noise_multiplier=2.0", "rounds=20")
    assert privacy_budget.rounds_allowed(built(*private)) == 20
    assert privacy_budget.rounds_allowed(built(*private, f"privacy.budget={of(7) + 1e-6}")) == 7
    assert privacy_budget.rounds_allowed(built(*private, f"privacy.budget={of(8) - 1e-6}")) == 7
    with pytest.raises(UserError, match="one round alone"):
        privacy_budget.rounds_allowed(built(*private, f"privacy.budget={of(1) / 2}"))
    with pytest.raises(UserError, match="promises nothing"):
        privacy_budget.rounds_allowed(built("privacy.budget=3.0"))


def test_a_run_stops_at_its_budget_and_goes_on_when_it_is_raised(pcp_root, tmp_path, quick_compile, capsys):
    of = lambda k: dp_accounting.get_epsilon_gaussian(2 / math.sqrt(k), 1e-5)
    words = [f"--config.{key}" for key in (*PRIVATE, "aggregator.noise_multiplier=2.0", "folds=(0,)")]
    run = lambda budget: experiment.run(
        tiny_runs.config(pcp_root, *words, f"--config.privacy.budget={budget}"), tmp_path, quiet=True
    )
    stopped = run(of(3))
    assert stopped["round"] == 3 and "privacy budget" in stopped["stopped"]
    assert stopped["privacy"]["epsilon"] == pytest.approx(of(3), rel=1e-6)  # of the rounds that were run
    assert run(of(3))["round"] == 3  # nothing to do
    on = run(of(4) + 1e-6)
    assert on["round"] == 4 and on["stopped"] == "" and on["privacy_card"]["epsilon"] == pytest.approx(of(4), rel=1e-6)
    _audited(tmp_path, on, capsys)


def _audited(folder, summary, capsys):
    """The command on that finished run: its card gets an audit, and nothing else of the run changes."""
    before = {p: p.read_bytes() for p in folder.glob("metrics.*")}
    words = ["audit", f"--workdir={folder}", "--dim=4", "--trials=2000", "--restarts=2", "--steps=2"]
    assert guarded(audit_command.command, words) == 0
    assert "nothing contradicts what is proven" in capsys.readouterr().out
    card = json.loads((folder / "privacy.json").read_text())
    (row,) = card["audit"]["sensitivity"]
    assert row["found"] == pytest.approx(1.0, abs=1e-6) and row["proven"] == 1.0 and row["n"] == 3
    (canary,) = card["audit"]["canaries"]
    # One round with z = 2; what is shown stays below it.
    claimed = dp_accounting.get_epsilon_gaussian(2.0, 1e-5)
    assert canary["epsilon_claimed"] == pytest.approx(claimed, rel=1e-6) and 0 < canary["epsilon_low"] < claimed
    assert card["epsilon"] == summary["privacy_card"]["epsilon"] and card["warnings"]
    assert json.loads((folder / "summary.json").read_text())["privacy_card"] == card
    report = (folder / "report.md").read_text()
    assert "canaries" in report.lower() and report.count("## Privacy\n") == 1
    assert before == {p: p.read_bytes() for p in before}
    with pytest.raises(UserError, match="no finished run there"):
        run_audit.audit_run(folder / "nowhere")
