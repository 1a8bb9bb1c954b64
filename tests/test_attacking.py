"""Shadow federations, canaries and updates on a federation that overfits: who is in, what is trained, what is found."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
import tiny_runs
from matplotlib.figure import Figure

from fedjax_seg import assembly, attack_verdict, attacking, experiment, outcome, shadows
from fedjax_seg import config as configuration
from fedjax_seg.core.checks import UserError
from fedjax_seg.data import federated

SITES, EACH, FEATURES = ("a", "b", "c"), 40, 24


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compile):
    """For all federations of this module."""


def cases(seed=0, pairs=False):
    """Half of the cases are easy for every model; the labels of the others are coins, and can only be learned by heart.

    Three sites of 40 cases, half of them test. With `pairs` the first two cases of a site are one patient.
    """
    rng = np.random.default_rng(seed)
    count = len(SITES) * EACH
    y = rng.integers(0, 2, count).astype(np.int32)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    x[:, 0] = np.where(np.arange(count) % 4 < 2, 6.0, 0.0) * (2 * y - 1)
    site_of = np.repeat(np.arange(3), EACH).astype(np.int32)
    at = np.arange(count) % EACH
    patients = tuple(f"{k}_{max(i, int(pairs))}" for k, i in zip(site_of, at))
    own = [np.flatnonzero(site_of == k) for k in range(3)]
    split = federated.Split("only", tuple(c[: EACH // 2] for c in own), tuple(c[EACH // 2 :] for c in own))
    names = tuple(f"case{i}" for i in range(count))
    return federated.FederatedData({"x": x, "y": y}, names, patients, SITES, site_of, (split,), ("no", "yes"))


def config(**attack):
    c = configuration.load(tiny_runs.QUICKSTART)
    c.rounds, c.eval_every, c.devices, c.batch_size, c.input_span = 24, 12, 1, 8, "off"
    c.model.hidden, c.client.lr, c.client.weight_decay = (16,), 0.1, 0.0
    c.aggregator = configuration.slot("aggregator", "weighted_mean")
    c.attack = configuration.slot("attack", "membership", shadow=False, resamples=200, **attack)
    return c


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(folder, summary, what the updates told) of a whole run."""
    folder, kept, look = tmp_path_factory.mktemp("overfit") / "run", [], attacking.update_evidence
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome.run_report, "write", lambda *unused: None)
        patch.setattr(attacking, "update_evidence", lambda *given: kept.append(look(*given)) or kept[0])
        c = config(models=8, updates=True)
        summary = experiment.run(c, folder, quiet=True, load=lambda c, scratch: cases())
    return folder, summary, kept[0]


@pytest.fixture(scope="module")
def overfit(done):
    """(folder, experiment, watch, evidence) of that run, from what it has written."""
    folder, _, updates = done
    built = assembly.build(config(models=8, updates=True), cases())
    watch, seen = attacking.prepare(built), attacking.recall(folder, 24)
    many = attacking.many_evidence(built, watch, folder, tuple(seen), lambda: False, lambda line: 1 / 0)
    return folder, built, watch, attack_verdict.Evidence(seen, {}, many, updates)


def made_up(watch, models=0):
    """Evidence without a model: members have a lower loss."""
    rng, shape = np.random.default_rng(3), watch.target.cases.shape
    seen = {0: {"log_loss": rng.normal(size=shape) - 3 * watch.target.member}}
    many = {0: {"log_loss": rng.normal(size=(models, *shape[1:]))}} if models else {}
    return attack_verdict.Evidence(seen, {}, many, {})


@pytest.fixture(scope="module")
def found(overfit):
    _, built, watch, seen = overfit
    return attack_verdict.verdict(built, watch, seen)


def by_attack(verdict):
    return {row["attack"]: row for row in verdict["final"]}


def test_lira_is_above_the_loss_threshold_where_cases_differ_in_difficulty(found):
    rows = by_attack(found)
    assert list(rows) == ["loss", "lira_online", "lira_offline", "rmia", "trajectory", "update_cosine"]
    assert {name: row["shadows"] for name, row in rows.items()} == {
        name: 8 if name in attack_verdict.BY_MANY else 0 for name in rows
    }
    for name in ("lira_online", "rmia", "trajectory"):
        assert rows[name]["auc"] > rows["loss"]["auc"] + 0.05 and rows[name]["auc_low"] > 0.6, name
    assert rows["lira_online"]["unit"] == "case" and rows["lira_online"]["members"] == 60
    assert set(found["roc"]) == set(rows) and json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_model_before_training_tells_nothing(overfit):
    _, built, watch, seen = overfit
    verdict = attack_verdict.verdict(built, watch, seen._replace(target={0: seen.target[0]}, updates={}))
    for row in verdict["final"]:
        assert row["auc_low"] <= 0.5 <= row["auc_high"], row["attack"]


def test_shadows_train_on_halves_of_the_training_cases_and_the_candidates(overfit):
    _, built, watch, _ = overfit
    data, asked = built.data, watch.target
    pool = set(np.concatenate([*data.splits[0].train, asked.cases[0][asked.valid[0] & ~asked.member[0]]]).tolist())
    assert len(pool) == len(data.case_ids)
    for split, inside in zip(watch.many.splits, watch.many.inside):
        trained_on = np.concatenate(split.train)
        assert set(trained_on) <= pool and set(np.flatnonzero(inside)) == set(trained_on)
        for k, mine in enumerate(split.train):
            assert abs(len(mine) - EACH / 2) <= 1 and set(data.site_of[mine]) == {k}
        ids = np.asarray(data.patient_ids)
        assert not set(ids[inside]) & set(ids[~inside])
    np.testing.assert_array_equal(watch.many.inside.sum(0), 4)
    made = shadows.federation(built, watch.many)
    assert made.parts.salt != built.parts.salt and len(made.replicas) == 8
    kernel = max(map(np.asarray, jax.tree.leaves(made.initial(shadows.START).variables)), key=lambda x: x.size)
    assert all(not np.allclose(kernel[0], kernel[m]) for m in range(1, 8))  # starts of their own


@pytest.mark.slow
def test_what_finished_is_kept_and_the_rest_is_trained_on_continuation(overfit, monkeypatch):
    folder, built, watch, seen = overfit
    ask = lambda stop=lambda: False: attacking.many_evidence(
        built, watch, folder, tuple(seen.target), stop, lambda line: None
    )
    with monkeypatch.context() as patch:  # all are there: nothing trains
        patch.setattr(shadows, "build", None)
        np.testing.assert_array_equal(ask()[24]["log_loss"], seen.many[24]["log_loss"])
    for number in (2, 5):
        (folder / "attack" / f"shadow_{number:04d}.npz").unlink()
    polled = []
    with pytest.raises(assembly.Preempted, match="trains those that are left"):
        ask(lambda: len(polled) > 1 or polled.append(1))  # after number 2, which takes two polls
    assert (folder / "attack" / "shadow_0002.npz").exists() and not (folder / "attack" / "shadow_0005.npz").exists()
    again = ask()
    for at, of_round in seen.many.items():
        for name, value in of_round.items():
            np.testing.assert_array_equal(again[at][name], value)


def test_the_server_sees_whose_case_it_is_unless_updates_are_summed(overfit, found):
    _, built, watch, seen = overfit
    (row,) = found["source"]
    assert row["n"] == 60 and row["accuracy"] > row["chance"] == pytest.approx(1 / 3)
    c = config(updates=True)
    c.secure_sum = configuration.slot("secure_sum", "assumed")
    hidden = assembly.build(c, cases())
    told = jax.eval_shape(hidden.updates, hidden.initial(), hidden.plan, watch.target.cases)
    assert set(told) == {"cosine", "product", "sent"} == set(seen.updates) - {"losses"}
    verdict = attack_verdict.verdict(built, watch, seen._replace(updates={k: seen.updates[k] for k in told}))
    (row,) = verdict["source"]
    assert row["accuracy"] is None and row["chance_uniform"] == pytest.approx(1 / 3) and "sum" in row["words"]
    assert "update_cosine" in by_attack(verdict) and "sum of the updates" in verdict["text"]


def test_an_update_is_compared_with_cases_of_clients_that_sent_one(overfit):
    _, built, watch, seen = overfit
    sent = np.array([[True, False, True]])
    row = by_attack(attack_verdict.verdict(built, watch, seen._replace(updates={**seen.updates, "sent": sent})))
    assert (row["update_cosine"]["members"], row["update_cosine"]["non_members"], row["loss"]["members"]) == (
        40,
        40,
        60,
    )


def test_canaries_that_lost_their_coin_are_not_trained_on():
    data, c = cases(pairs=True), config(models=4, canaries=30)
    made = attacking.without_canaries(c, data)
    assert attacking.without_canaries(config(), data) is data
    told = made.about["canaries"]["only"]
    members = {i for i, inside in zip(told["cases"], told["inside"]) if inside}
    out = set(told["cases"]) - members
    before, after = (set(np.concatenate(d.splits[0].train).tolist()) for d in (data, made))
    assert before - after == out and members <= after and 5 < len(out) < 28
    ids = np.asarray(data.patient_ids)
    assert not set(ids[sorted(out)]) & set(ids[sorted(after)])
    assert len({*ids[told["cases"]]}) == 30 < len(told["cases"])  # a patient with two cases is one canary
    built = assembly.build(c, made)
    watch = attacking.prepare(built)
    asked = watch.target
    assert set(asked.cases[0][asked.valid[0] & asked.member[0]]) == members
    assert set(asked.cases[0][asked.valid[0] & ~asked.member[0]]) == out
    # The test cases are nobody's members, and RMIA compares with them.
    assert set(asked.cases[0][asked.population[0]]) == set(np.concatenate(data.splits[0].test).tolist())
    assert set(np.flatnonzero(watch.many.inside.any(0))) == before
    verdict = attack_verdict.verdict(built, watch, made_up(watch, 4), {"epsilon": 3.0})
    audit = {row["attack"]: row for row in verdict["one_run"]}
    assert set(audit) == {"loss", "lira_online", "lira_offline", "rmia"}  # a trajectory takes two rounds
    for row in audit.values():
        assert (row["canaries"], row["epsilon_claimed"]) == (30, None) and row["epsilon_low"] >= 0
    assert audit["loss"]["epsilon_low"] > 0 and verdict["unit"] == "patient"
    noisy = built.client._replace(mechanism=types.SimpleNamespace(unit="patient"))  # the ledger speaks of a canary
    audit = attack_verdict.verdict(built._replace(client=noisy), watch, made_up(watch, 4), {"epsilon": 3.0})["one_run"]
    assert {row["epsilon_claimed"] for row in audit} == {3.0}
    assert "canaries that coins left out" in verdict["text"]
    with pytest.raises(UserError, match="count 100 given, at most 57 expected"):
        attacking.without_canaries(config(canaries=100), data)


def test_a_run_leaves_its_canaries_out(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(experiment, "build", lambda config, loaded, salt: seen.append(loaded) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        experiment.run(config(canaries=20), tmp_path / "run", quiet=True, load=lambda c, scratch: cases())
    assert sum(map(len, seen[0].splits[0].train)) == 60 - seen[0].about["canaries"]["only"]["inside"].count(False) < 60


def test_a_run_with_canaries_ends_with_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda self, to, **how: to.write(b"no pixels"))  # most of the seconds
    c = config(canaries=30)
    c.rounds = c.eval_every = 1
    summary = experiment.run(c, tmp_path / "run", quiet=True, load=lambda c, scratch: cases())
    assert [row["canaries"] for row in summary["attack"]["one_run"]] == [30]
    words = (tmp_path / "run" / "report.html").read_text()
    assert "One-run audit: lower bounds" in words and summary["attack"]["one_run"][0]["words"] in words


def halting(which, at):
    """In the place of experiment.rounds: replicas `which` halt after round `at`; the others reach what was asked."""

    def rounds(state, plan, reached):
        halt = np.zeros((len(state), 2), bool)
        halt[which, 0] = reached > at
        return np.where(halt[:, 0], state, reached), {"halt": halt}, None

    return rounds


def fake(experiment_, which, at, replicas_):
    look = lambda state, index, sizes: {"log_loss": np.broadcast_to(state[:, None, None], (len(state), 3, 2)) * 1.0}
    return experiment_._replace(rounds=halting(which, at), evidence=look, initial=lambda stream: np.zeros(replicas_))


def test_a_shadow_that_diverges_has_no_evidence_and_the_run_goes_on(overfit, monkeypatch):
    _, built, watch, _ = overfit
    monkeypatch.setattr(attacking.replicas, "place", lambda how, tree: tree)
    said, asked = [], watch._replace(shadow=watch.target, shadow_plan=built.plan)
    stops = lambda reached: reached + 12
    seen = attacking.shadow_evidence(fake(built, [0], 12, 1), asked, (0, 12, 24), lambda: False, said.append, stops)
    assert [np.isfinite(x["log_loss"]).all() for x in seen.values()] == [True, True, False]
    assert np.isnan(seen[24]["log_loss"]).all() and "diverged" in said[-1] and len(said) == 2
    found = attack_verdict.verdict(
        built,
        asked,
        attack_verdict.Evidence(
            {24: made_up(watch).target[0]}, {24: {"log_loss": np.full(watch.target.cases.shape, np.nan)}}, {}, {}
        ),
    )
    (row,) = [row for row in found["final"] if row["attack"] == "shadow"]
    assert row["auc"] is None and row["words"].startswith("no reading")


@pytest.mark.parametrize("which", [[1], [0, 1], [0, 2], [0, 1, 2, 3]], ids=["one", "pair", "half", "all"])
def test_of_many_shadows_those_that_diverge_count_as_missing(tmp_path, monkeypatch, overfit, which):
    built = overfit[1]
    made = attacking.prepare(assembly.build(config(models=4), cases())).many
    plan = built.plan._replace(**{k: np.repeat(v, 4, 0) for k, v in built.plan._asdict().items()})
    whole = fake(built, which, 12, 4)._replace(plan=plan, how=built.how._replace(vmap=True))
    monkeypatch.setattr(shadows, "federation", lambda experiment, made: whole)
    monkeypatch.setattr(shadows.replicas, "place", lambda how, tree: tree)
    said = []
    ask = lambda: shadows.evidence(
        built, made, np.zeros((3, 2), int), (0, 12, 24), tmp_path, lambda: False, said.append
    )
    if len(which) == 4:
        with pytest.raises(UserError, match="4 of 4 shadow federations diverged"):
            ask()
        return
    seen = ask()
    for at, lost in ((0, False), (12, False), (24, True)):
        bad = np.isnan(seen[at]["log_loss"]).all((1, 2))
        assert np.flatnonzero(bad).tolist() == (which if lost else []) and np.isfinite(seen[at]["log_loss"][~bad]).all()
    assert sum("diverged" in line for line in said) == len(which)
    watch = attacking.prepare(assembly.build(config(models=4), cases()))
    many = made_up(watch, 4)
    many.many[0]["log_loss"][which] = np.nan
    found = by_attack(attack_verdict.verdict(built, watch, many))
    assert {"lira_online", "lira_offline", "rmia"} < set(found)
    assert all(row["auc"] is not None for row in found.values())


def test_shadows_are_of_one_split(tmp_path):
    data = cases()
    turned = federated.Split("other", data.splits[0].test, data.splits[0].train)
    c = config(models=4)
    built = assembly.build(c, dataclasses.replace(data, splits=(*data.splits, turned)))
    watch = attacking.prepare(built)
    verdict = attack_verdict.verdict(built, watch, made_up(watch, 4))
    by_fold = {fold: [r["attack"] for r in verdict["final"] if r["fold"] == fold] for fold in ("only", "other")}
    assert by_fold == {"only": ["loss", "lira_online", "lira_offline", "rmia"], "other": ["loss"]}
    assert "of fold only alone" in verdict["text"] and "held-out candidates of other patients" in verdict["text"]


def test_the_verdict_is_in_the_summary_and_in_the_metrics(done, found):
    folder, summary, _ = done
    attack = summary["attack"]
    assert [{k: row[k] for k in found["final"][i]} for i, row in enumerate(attack["final"])] == found["final"]
    assert all(attack[name] == found[name] for name in ("curve", "source", "text"))
    curve = {(row["round"], row["metric"]) for row in tiny_runs.rows(folder) if row["split"] == "attack"}
    assert {(24, "auc_update_cosine"), (12, "auc_trajectory"), (0, "auc_lira_online"), (0, "auc_rmia")} <= curve
