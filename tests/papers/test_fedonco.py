"""FedOnco-Bench at its smallest: every method runs, is attacked and accounted; a killed run is the same run."""

import csv
import json

import jax
import numpy as np
import pytest
from tiny_runs import ROOT, assert_same_run, rows

from fedjax_seg import config as configuration
from fedjax_seg import experiment, outcome, tasks
from fedjax_seg.core.checks import UserError
from fedjax_seg.report import runs, sweep_report

CONFIG = ROOT / "configs" / "fedonco_bench.py"
SIZES = {"client_1": 10, "client_2": 8, "client_3": 8, "client_4": 5, "client_5": 5}  # 8 + 6 + 6 + 4 + 4 train
TRAIN = {"client_1": 8, "client_2": 6, "client_3": 6, "client_4": 4, "client_5": 4}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compile):
    """For all runs of this module."""


def config(root, method="fedavg", **changes):
    c = configuration.load(CONFIG, f"ci,{method}")
    c.data.root, c.model.width, c.model.depth, c.batch_size, c.devices = root, 2, 1, 4, 1
    c.attack.count, c.attack.resamples = 16, 20
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    return c


@pytest.fixture(scope="module")
def done(ct_root, tmp_path_factory):
    """method -> (folder, summary) of a finished run; each method runs once."""
    base, kept = tmp_path_factory.mktemp("fedonco"), {}

    def run(method):
        if method not in kept:
            with pytest.MonkeyPatch.context() as patch:
                if method != "fedavg":  # pictures are half of the time of a tiny run
                    patch.setattr(outcome.run_report, "write", lambda *unused: None)
                kept[method] = (base / method, experiment.run(config(ct_root, method), base / method, quiet=True))
        return kept[method]

    return run


def test_the_default_is_what_the_paper_prints():
    c = configuration.load(CONFIG)
    assert (c.rounds, c.local_epochs, c.batch_size, len(c.seeds)) == (100, 1, 16, 3)
    assert (c.client.lr, c.client.schedule, c.client.schedule_decay, c.client.schedule_every) == (0.01, "step", 0.1, 70)
    assert (c.client.momentum, c.client.weight_decay, c.task.loss) == (0.9, 1e-4, "cross_entropy")
    assert c.synthesis.clients == (1000, 1000, 1000, 500, 500) and c.data.test_share == 0.2
    assert (c.synthesis.size, c.synthesis.test, c.synthesis.shadow, c.attack.count) == (256, 1000, 1000, 1000)
    assert (c.augment.name, c.secure_sum.name, c.model.norm) == ("none", "assumed", "batch")
    assert c.grid == tuple(f"paper,{m}" for m in ("fedavg", "fedprox", "fedbn", "dp_sgd", "centralised", "local"))
    private, pooled = configuration.load(CONFIG, "dp_sgd"), configuration.load(CONFIG, "centralised")
    assert (private.client.noise_multiplier, private.client.clip, private.model.norm) == (1.2, 1.0, "group")
    assert private.batch_sampling == "poisson" and pooled.local_epochs * pooled.rounds == 500
    assert configuration.load(CONFIG, "fedprox").client.mu == 0.01
    task = tasks.make(model=dict(c.model), **c.task)
    batch = {"x": jax.ShapeDtypeStruct((1, 32, 32, 1), "float32"), "y": jax.ShapeDtypeStruct((1, 32, 32), "uint8")}
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    assert sum(x.size for x in jax.tree.leaves(shapes["params"])) == 1_231_466


def values(summary, metric, split="test"):
    return {r["site"]: r["value"] for r in summary["results"] if r["metric"] == metric and r["split"] == split}


def test_sites_means_and_the_external_test_set(done):
    _, summary = done("fedavg")
    dice = values(summary, "dice")
    assert summary["external"] == ["test"] and set(dice) == {*SIZES, "test", "mean_of_sites", "worst_site", "pooled"}
    np.testing.assert_allclose(dice["mean_of_sites"], np.mean([dice[s] for s in SIZES]))  # without the external one
    assert summary["participation"] == dict.fromkeys(SIZES, 2) | {"test": 0}
    n = {r["site"]: r["n"] for r in summary["results"] if r["metric"] == "dice"}
    assert n["test"] == 6 and n["pooled"] == 8 and n["client_1"] == 2


def test_a_case_has_its_own_row_and_the_report_its_pictures(done):
    folder, summary = done("fedavg")
    with open(folder / "per_case.csv", newline="") as file:
        cases = list(csv.DictReader(file))
    assert {"case", "patient", "dice", "hd95", "nsd", "truth_voxels"} <= set(cases[0]) and len(cases) == 8 + 6
    mean = np.mean([float(c["dice"]) for c in cases if c["site"] == "test"])
    np.testing.assert_allclose(values(summary, "dice")["test"], mean)
    for name in ("examples", "overlays", "roc", "attack_auc", "convergence", "site_boxes"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 2000, name
    report = (folder / "report.md").read_text()
    assert "generator: ct" in report and "Membership inference" in report and "No noise" not in report


def test_the_attack_looks_at_every_evaluated_round_and_matches_sites(done):
    folder, summary = done("fedavg")
    final = {row["attack"]: row for row in summary["attack"]["final"]}
    assert set(final) == {"loss", "shadow"} and all(0 <= row["auc"] <= 1 for row in final.values())
    assert final["loss"]["members"] == final["loss"]["non_members"] == 8  # every held-out slice, matched
    assert final["loss"]["tpr_at_1_percent_fpr"] is None  # 8 non-members cannot show 1 %
    curve = [r for r in rows(folder) if r["split"] == "attack"]
    assert {(r["round"], r["metric"]) for r in curve} == {(t, f"auc_{a}") for t in (0, 1, 2) for a in final}
    last = {r["metric"]: r["value"] for r in curve if r["round"] == 2}
    assert all(last[f"auc_{a}"] == row["auc"] for a, row in final.items())


def test_the_shadow_federation_trains_on_the_attackers_cases_alone(ct_root, tmp_path):
    from fedjax_seg import attacking

    c = config(ct_root)
    loaded = experiment.load_data(c, tmp_path)
    built = experiment.build(c, loaded)
    watch = attacking.prepare(built)
    used = np.concatenate([watch.shadow_plan.train[0, k, :n] for k, n in enumerate(watch.shadow_plan.train_sizes[0])])
    asked = watch.shadow.cases[0][watch.shadow.valid[0]]
    assert set(used) <= set(asked) == set(loaded.aside)
    inside = watch.shadow.cases[0][watch.shadow.valid[0] & watch.shadow.member[0]]
    assert set(used) == set(inside) and len(used) == len(loaded.aside) // 2
    target = watch.target.cases[0][watch.target.valid[0]]
    assert not set(target) & set(loaded.aside)
    for k, n in enumerate(watch.shadow_plan.train_sizes[0]):
        assert set(loaded.site_of[watch.shadow_plan.train[0, k, :n]]) <= {k}
    members, valid, cases = watch.target.member[0], watch.target.valid[0], watch.target.cases[0]
    train = set(np.concatenate(loaded.splits[0].train))
    assert all((case in train) == member for case, member in zip(cases[valid], members[valid]))
    for k in range(len(loaded.sites)):
        assert np.sum(valid[k] & members[k]) == np.sum(valid[k] & ~members[k])
        assert set(loaded.site_of[cases[k][valid[k]]]) <= {k}


def test_a_private_run_has_a_ledger_and_a_guarantee(done):
    from fedjax_seg.privacy import accounting

    folder, summary = done("dp_sgd")
    ledger = json.loads((folder / "privacy.json").read_text())["ledger"]
    by_client = {row["client"]: row for row in ledger["rows"]}
    assert {k: row["units"] for k, row in by_client.items()} == TRAIN
    assert by_client["client_1"]["q_origin"] == "4/8 = 0.5" and by_client["client_1"]["steps"] == 4
    assert by_client["client_1"]["epsilon_pld"] == pytest.approx(
        accounting.poisson_epsilon(1.2, 0.5, 4, 1e-5), abs=1e-6
    )
    assert summary["privacy"]["epsilon"] == max(row["epsilon_pld"] for row in ledger["rows"])
    assert "epsilon" in (folder / "train.log").read_text()  # told before it trains
    assert done("fedavg")[1]["privacy"] == {}


@pytest.mark.slow
def test_local_and_centralised_models_are_attacked_on_their_own_cases(done):
    _, local = done("local")
    assert {row["fold"] for row in local["attack"]["final"]} == {f"{local_fold(local)}_{site}" for site in SIZES}
    by_fold = {row["fold"]: row for row in local["attack"]["final"] if row["attack"] == "loss"}
    assert by_fold[f"{local_fold(local)}_client_1"]["members"] == 2  # as many as it has held out
    assert {r["site"] for r in local["results"] if r["fold"].endswith("client_2")} >= {"client_2", "test"}
    _, pooled = done("centralised")
    assert pooled["participation"]["pooled_training"] == 2 and pooled["participation"]["client_1"] == 0
    (loss,) = [row for row in pooled["attack"]["final"] if row["attack"] == "loss"]
    assert loss["members"] == loss["non_members"] == 8


def local_fold(summary):
    (name,) = {
        row["fold"].removesuffix(f"_{s}") for row in summary["results"] for s in SIZES if row["fold"].endswith(s)
    }
    return name


@pytest.mark.parametrize("method", ["fedbn", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_the_other_methods_run(method, ct_root, tmp_path):
    c = config(ct_root, method, **{"attack.name": "none", "rounds": 1})
    configuration.rename(c, "attack", "none")
    built = experiment.build(c, experiment.load_data(c, tmp_path))
    state, records, done = built.rounds(built.initial(), built.plan, 1)
    assert int(done[0]) == 1 and not np.any(np.asarray(records["halt"]))
    moved = jax.tree.map(
        lambda a, b: float(np.max(np.abs(np.asarray(a - b)))), state.variables, built.initial().variables
    )
    if method == "fedbn":
        assert not any(jax.tree.leaves(moved["batch_stats"]))  # what stays at home never moves at the server
    assert any(jax.tree.leaves(moved["params"]))


@pytest.mark.slow
def test_killed_and_continued_is_the_same_run(done, ct_root, tmp_path, monkeypatch):
    monkeypatch.setattr(outcome.run_report, "write", lambda *unused: None)
    whole, calls = done("fedavg")[0], []
    with pytest.raises(experiment.Preempted):  # after the first round
        experiment.run(config(ct_root), tmp_path / "cut", stop=lambda: True, quiet=True)
    with pytest.raises(experiment.Preempted, match="shadow"):  # while the shadow federation trains
        experiment.run(config(ct_root), tmp_path / "cut", stop=lambda: len(calls) > 1 or calls.append(1), quiet=True)
    experiment.run(config(ct_root), tmp_path / "cut", quiet=True)
    assert_same_run(whole, tmp_path / "cut")


@pytest.mark.slow
def test_the_sweeps_table_has_a_row_per_method(done, tmp_path):
    found = [runs.read_run(done(m)[0]) for m in ("fedavg", "dp_sgd", "local", "centralised")]
    sweep_report.write(tmp_path, found)
    table = (tmp_path / "tables" / "FedOnco-Bench_ci_methods.md").read_text()
    lines = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert lines[2:] == ["FedAvg", "FedAvg + DP-SGD", "Local only", "Centralised"]
    assert "paper dice" in table and "∞" in table
    assert (tmp_path / "figures" / "FedOnco-Bench_ci_privacy_utility.png").exists()
    assert (tmp_path / "tables" / "FedOnco-Bench_ci_paired_test.md").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_sampling": "poisson"}, "config.batch_sampling: 'poisson' given for client 'local_sgd'"),
        (
            {"privacy.target_epsilon": 3.0},
            "config.privacy.target_epsilon: 3 given, which needs --config.client.name=dp_sgd",
        ),
        ({"aggregator": "median"}, "aggregator 'median': secure_sum 'assumed'"),
        ({"aggregator": "scaffold"}, "SCAFFOLD is a client and an aggregator"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message, ct_root, tmp_path):
    c = config(ct_root, **{key: value for key, value in changes.items() if key != "aggregator"})
    configuration.rename(c, "aggregator", changes.get("aggregator", c.aggregator.name))
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        experiment.run(c, tmp_path / "run", quiet=True)


def test_batch_norm_is_refused_for_private_training(ct_root, tmp_path):
    c = config(ct_root, "dp_sgd")
    c.model.norm = "batch"
    with pytest.raises(UserError, match=r"norm=group"):
        experiment.run(c, tmp_path / "run", quiet=True)


def test_the_noise_follows_from_a_target_epsilon(ct_root, tmp_path):
    from fedjax_seg import privacy_budget
    from fedjax_seg.privacy import accounting

    c = config(ct_root, "dp_sgd", **{"privacy.target_epsilon": 2.0})
    made = privacy_budget.calibrated(c, experiment.load_data(c, tmp_path))
    assert c.client.noise_multiplier == 1.2  # the given config is left alone
    worst = max(accounting.poisson_epsilon(made.client.noise_multiplier, 4 / n, -(-n // 4) * 2, 1e-5) for n in (8, 6))
    four = accounting.poisson_epsilon(made.client.noise_multiplier, 1.0, 2, 1e-5)
    assert max(worst, four) == pytest.approx(2.0, abs=2e-3) and max(worst, four) <= 2.0


def test_an_attack_without_cases_of_its_own_is_refused(ct_root, tmp_path, monkeypatch):
    read = experiment.read_data

    def without(c, scratch):
        import dataclasses

        return dataclasses.replace(read(c, scratch), aside=np.zeros(0, np.int32))

    with pytest.raises(UserError, match=r"none aside; set config\.data\.aside_share"):
        experiment.run(config(ct_root), tmp_path / "run", quiet=True, load=without)
