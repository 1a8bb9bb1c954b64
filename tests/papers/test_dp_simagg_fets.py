"""DP-SimAgg on FeTS at its smallest: what is printed, what a run leaves, what it promises, what it would have taken."""

import csv
import json
import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import tiny_volumes
from tiny_runs import call, one_line, rows

from fedjax_seg import config as configuration
from fedjax_seg import experiment, outcome, tasks
from fedjax_seg.federation import clock
from fedjax_seg.report import run_report, runs, sweep_report

SITES = tiny_volumes.SITES
LABELS = ("0", "1", "2", "4")
FIGURES = "convergence site_boxes update_norms participation institutions modalities segmentations"
ROUNDS = {"sound_tight": 3, "krum": 1}  # of the runs that do not have two


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compile):
    """For all runs of this module, and the model of single voxels."""
    with pytest.MonkeyPatch.context() as patch:
        tiny_volumes.register(patch)
        yield


@pytest.fixture(scope="module")
def done(mri_root, tmp_path_factory):
    """method -> (folder, summary) of a finished run; each method runs once. SimAgg has the true network and figures."""
    base, kept = tmp_path_factory.mktemp("fets"), {}

    def run(method):
        if method not in kept:
            c = tiny_volumes.config(mri_root, base / "cache", method, rounds=ROUNDS.get(method, 2))
            c.sampler.size = 3 if method == "krum" else 2  # fewer have no neighbours for Krum
            with pytest.MonkeyPatch.context() as patch:
                if method == "simagg":
                    options = {"width": 2, "depth": 1, "tracked": False, "dropout": 0.0}
                    c.model = configuration.slot("model", "resunet3d", **options)
                else:
                    patch.setattr(outcome, "_pictures", lambda *unused: None)
                    for name in ("_course", "_institutions"):
                        patch.setattr(run_report, name, lambda *unused: [])
                kept[method] = (base / method, experiment.run(c, base / method, quiet=True))
        return kept[method]

    return run


def test_the_default_is_what_the_paper_prints():
    c = configuration.load(tiny_volumes.CONFIG)
    assert (c.rounds, c.local_epochs, c.batch_size, c.protocol, len(c.seeds)) == (20, 1, 1, "federated", 1)
    assert (c.data.name, c.data.partition, c.data.share) == ("fets", "partitioning_2.csv", 0.8)
    assert (c.data.patch, c.data.patches, c.data.sampling, c.data.normalise) == (
        (64, 64, 64),
        40,
        "foreground",
        "image",
    )
    assert (c.client.name, c.client.lr, c.client.momentum, c.client.weight_decay) == ("local_sgd", 5e-5, 0.9, 0.0)
    assert (c.client.schedule, c.client.mu, c.client.keep_optimizer) == ("constant", 0.0, False)
    model = {name: c.model[name] for name in ("name", "width", "depth", "classes", "norm", "tracked", "dropout")}
    assert [*model.values()] == ["resunet3d", 32, 4, 4, "instance", True, 0.5]
    assert (c.sampler.name, c.sampler.rho, c.sampler.released) == ("sliding_window", 0.2, False)
    assert (c.task.loss, c.task.labels, c.task.regions) == ("fets_dice", (0, 1, 2, 4), "brats")
    assert len(c.task.class_weights) == 4 and sum(c.task.class_weights) == pytest.approx(1)
    assert np.argsort(c.task.class_weights).tolist() == [0, 2, 1, 3]  # background and oedema are the most frequent
    assert (c.augment.name, c.secure_sum.name, c.attack.name, c.synthesis.name) == ("none", "none", "none", "")
    assert (c.clock.name, c.clock.patches, c.eval_every) == ("fets", 40, 1)
    assert {m for m, _ in [*tasks.make(model=dict(c.model), **c.task).metrics.items()]} >= {
        *(f"soft_dice_{label}" for label in LABELS), "round_score",
    }  # fmt: skip


def test_the_three_columns_of_table_2():
    """DP-SimAgg, Table II: rows 'Label 0, 1, 2, 4', 'Convergence score', 'Simulated time', 'Memory', 'Energy'."""
    printed = {
        "simagg": (0.9981, 0.6685, 0.6851, 0.7896, 0.7380, 8484.11),
        "dp_eps10": (0.9984, 0.6757, 0.6872, 0.7962, 0.7318, 8781.74),
        "dp_eps1": (0.9967, 0.6357, 0.5305, 0.5274, 0.5799, 8291.95),
    }
    assert {*configuration.load(tiny_volumes.CONFIG).grid} == {f"paper,{m}" for m in printed}
    for method, numbers in printed.items():
        c = configuration.load(tiny_volumes.CONFIG, method)
        names = (*(f"soft_dice_{label}" for label in LABELS), "projected_score", "minutes")
        assert tuple(c.published[n] for n in names) == numbers
        assert {*c.published} - {*names} == {"wall_hours", "peak_memory_gb", "energy_wh"}
        assert not configuration.load(tiny_volumes.CONFIG, f"small,{method}").published
    for method, epsilon in (("dp_eps1", 1.0), ("dp_eps10", 10.0)):
        a = configuration.load(tiny_volumes.CONFIG, method).aggregator
        assert (a.name, a.clip, a.epsilon, a.delta) == ("dp_simagg", 100.0, epsilon, 1e-5)
        assert (a.clipping, a.similarity, a.noise, a.of) == (True, True, True, "weights")


GROUPS = {
    "table1": "fedavg fedprox scaffold fednova krum multi_krum fedmedian dp_fedavg geyer local_dp simagg dp_eps10",
    "similarity": "simagg simagg_counts simagg_released simagg_multiplicative regsimagg regsimagg_released",
    "sound": "fedavg simagg simagg_released dp_eps10 sound_tight sound_2c sound_4c dp_fedavg",
    "ablation": "fedavg clip_only similarity_only noise_only dp_eps10",
}


@pytest.mark.parametrize("group, methods", GROUPS.items())
def test_the_grid_of_a_group(group, methods):
    found = [configuration.load(tiny_volumes.CONFIG, f"small,{m}") for m in methods.split()]
    assert configuration.load(tiny_volumes.CONFIG, f"small,{group}").grid == tuple(
        f"small,{m}" for m in methods.split()
    )
    assert len({c.label for c in found}) == len(found)  # a row of its own in every table
    assert len({(str(c.aggregator), str(c.client)) for c in found}) == len(found)  # no two methods are one
    assert {c.group for c in found} == {"DP-SimAgg, small"}  # in one table


def test_what_a_method_is():
    load = lambda method: configuration.load(tiny_volumes.CONFIG, f"paper,{method}")
    for method in ("sound_tight", "sound_2c", "sound_4c", "dp_fedavg", "local_dp"):
        c = load(method)
        assert not c.model.tracked and c.aggregator.epsilon == 10.0 and c.aggregator.clip == 1.0
    assert (
        load("scaffold").client.name == load("scaffold").aggregator.name == "scaffold"
        and load("fednova").aggregator.momentum == 0.9
    )
    assert load("fedprox").client.mu == 0.01 and load("fedprox").aggregator.name == "weighted_mean"
    off = {"clip_only": "similarity noise", "similarity_only": "clipping noise", "noise_only": "clipping similarity"}
    for method, parts in off.items():
        a = load(method).aggregator
        assert {p for p in ("clipping", "similarity", "noise") if not a[p]} == set(parts.split())


def value(summary, metric, site="pooled"):
    (found,) = [r["value"] for r in summary["results"] if (r["metric"], r["site"]) == (metric, site)]
    return found


def trained(folder):
    """{round: ids of the clients that trained}, of the norms that they left."""
    found = {}
    for row in rows(folder):
        if row["metric"] == "update_norm" and row["split"] == "train":
            found.setdefault(row["round"], []).append(SITES.index(row["site"]))
    return found


def test_a_run_leaves_all_its_files(done):
    folder, summary = done("simagg")
    assert summary["label"] == "SimAgg" and summary["round"] == 2 and summary["stopped"] == ""
    for name in ("DONE", "config.json", "manifest.json", "metrics.csv", "per_case.csv", "report.html", "train.log"):
        assert (folder / name).is_file(), name
    assert not (folder / "predictions").exists()
    card = json.loads((folder / "privacy.json").read_text())  # a run without a guarantee says so
    assert card["epsilon"] is None and card["sentence"].startswith("No differential-privacy guarantee")
    drawn = (
        "convergence",
        "site_boxes",
        "update_norms",
        "participation",
        "institutions",
        "modalities",
        "segmentations",
    )
    for name in drawn:
        assert (folder / "figures" / f"{name}.png").stat().st_size > 2000, name
        assert name in (folder / "report.md").read_text(), name
    report = (folder / "report.md").read_text()
    for words in ("simulated time (min)", "Definitions", "not for clinical use", "mri phantoms", "soft_dice_4"):
        assert words in report, words
    labels = list(csv.DictReader((folder / "labels.csv").read_text().splitlines()))
    assert [row["Subject_ID"] for row in labels] == [f"FeTS2022_{i:05d}" for i in range(8)]
    assert all(sum(int(row[f"voxels_{label}"]) for label in LABELS) == 24**3 for row in labels)


def test_every_test_case_has_a_row_and_the_sites_their_means(done):
    folder, summary = done("simagg")
    cases = list(csv.DictReader((folder / "per_case.csv").read_text().splitlines()))
    assert [row["site"] for row in cases] == list(SITES)  # one of two subjects is held out
    per_label = np.array([[float(row[f"soft_dice_{label}"]) for label in LABELS] for row in cases])
    for k, label in enumerate(LABELS):
        assert value(summary, f"soft_dice_{label}") == pytest.approx(per_label[:, k].mean(), rel=1e-12)
    assert value(summary, "round_score") == pytest.approx(per_label.mean(), rel=1e-12)  # with the background
    assert value(summary, "soft_dice") == pytest.approx(per_label[:, 1:].mean(), rel=1e-12)
    assert value(summary, "dice") == pytest.approx(
        np.mean([[float(row[f"dice_{r}"]) for r in ("ET", "TC", "WT")] for row in cases])
    )
    assert {r["site"] for r in summary["results"]} == {*SITES, "mean_of_sites", "worst_site", "pooled"}
    assert summary["participation"] == dict.fromkeys(SITES, 1)  # windows of two over four sites: everybody once


@pytest.mark.parametrize("method", ["simagg", "sound_tight"])
def test_simulated_time_is_that_of_the_clock_for_who_trained(done, method):
    folder, summary = done(method)
    cohorts, reached = trained(folder), summary["round"]
    assert sorted(cohorts) == list(range(1, reached + 1)) and all(len(ids) == 2 for ids in cohorts.values())
    hospitals = clock.make("fets", SITES, [1] * 4, [1] * 4, epochs=1, patches=2)
    expected = [hospitals.seconds(r - 1, cohorts[r]) for r in sorted(cohorts)]
    found = [r for r in rows(folder) if r["metric"] == "simulated_seconds"]
    assert [r["value"] for r in found] == expected and {(r["site"], r["n"]) for r in found} == {("server", 2)}
    (simulated,) = summary["simulated"]
    assert simulated["minutes"] == pytest.approx(sum(expected) / 60, rel=1e-12)
    scored = {r["round"]: r["value"] for r in rows(folder) if (r["metric"], r["site"]) == ("round_score", "pooled")}
    assert sorted(scored) == list(range(reached + 1)) and scored[reached] == value(summary, "round_score")
    # The challenge: best so far, area of best x time, the rest of the week at the best. The last model is not scored.
    best, area, time = -1.0, 0.0, 0.0
    for seconds, score in zip(expected, (scored[r] for r in range(reached))):
        best, time = max(best, score), time + seconds
        area += best * seconds
    week = 7 * 24 * 3600
    assert simulated["projected_score"] == pytest.approx((area + (week - time) * best) / week, rel=1e-12)


def test_the_literal_row_promises_nothing_and_says_why(done):
    folder, summary = done("dp_eps10")
    ledger = json.loads((folder / "privacy.json").read_text())
    assert ledger.keys() == summary["privacy_card"].keys() and ledger["sentence"].startswith("No differential-privacy")
    assert ledger["epsilon"] is None and not ledger["formal"] and ledger["sensitivity"] is None
    assert ledger["noise_multiplier"] == pytest.approx(math.sqrt(2 * math.log(1.25 / 1e-5)) / 10)
    claimed = {row["client"]: row for row in ledger["ledger"]["rows"]}
    assert {row["status"] for row in claimed.values()} == {"claimed, not proven", "vacuous"}  # advanced composition
    assert claimed["one round, classical formula"]["epsilon"] == pytest.approx(10)
    every = claimed["all rounds, basic composition"]  # 4 tensors, 2 rounds, 10 each
    assert (every["releases"], every["epsilon"], every["delta"]) == (8, pytest.approx(80), pytest.approx(8e-5))
    # A site is in one of the two rounds.
    assert claimed["rounds of one client, basic composition"]["epsilon"] == pytest.approx(40)
    log, report = (folder / "train.log").read_text(), (folder / "report.md").read_text()
    for text in (log, report):
        assert "NO privacy guarantee" in text and "4 tensors are noised in every round" in text
    assert len(ledger["reasons"]) >= 5 and all(reason in report for reason in ledger["reasons"])
    assert "claimed, not proven" in report and "rounds of one client, basic composition" in report
    assert log.index("NO privacy guarantee") < log.index("round 1/2")  # told before it trains
    assert max(r["value"] for r in rows(folder) if r["metric"] == "sigma_max") > 1  # C = 100 against weights of order 1


@pytest.mark.parametrize(
    "method, participations, sensitivity",
    # Three rounds of windows of two over four sites: nobody is in more than two of them, of two rounds in one.
    # (1/sqrt 2 + 2/n) C with n = 2 and C = .5; of a sum of clipped updates it is C.
    [("sound_tight", 2, (1 / math.sqrt(2) + 1) * 0.5), ("dp_fedavg", 1, 0.5)],
)
def test_the_sound_rows_promise_what_an_independent_accountant_finds(done, method, participations, sensitivity):
    folder, summary = done(method)
    ledger = json.loads((folder / "privacy.json").read_text())
    z = dp_accounting.get_sigma_gaussian(10.0, 1e-5)  # epsilon 10 per round
    assert ledger["noise_multiplier"] == pytest.approx(z, rel=1e-6) and ledger["participations"] == participations
    expected = dp_accounting.get_epsilon_gaussian(z / math.sqrt(participations), 1e-5)
    assert ledger["epsilon"] == pytest.approx(expected, rel=1e-6) and ledger["formal"]
    assert ledger["sensitivity"] == pytest.approx(sensitivity, rel=1e-6) and ledger["reasons"] == []
    assert (ledger["smallest_cohort"], ledger["rounds"], ledger["delta"]) == (2, ROUNDS.get(method, 2), 1e-5)
    assert max(map(len, trained(folder).values())) == 2
    assert max(list(summary["participation"].values())) <= participations  # what was promised is what happened
    for text in ((folder / "report.md").read_text(), (folder / "train.log").read_text()):
        assert f"epsilon {expected:.3f} at delta 1e-05" in text and "NO privacy" not in text


@pytest.mark.parametrize("method", ["fednova", "krum"])
def test_a_run_without_a_mechanism_has_no_ledger(done, method):
    folder, summary = done(method)
    assert summary["privacy"] == {} and json.loads((folder / "privacy.json").read_text())["ledger"]["rows"] == []
    norms = [r["value"] for r in rows(folder) if r["metric"] == "update_norm"]
    assert len(norms) == {"fednova": 4, "krum": 3}[method] and min(norms) > 0
    scored = {r["round"]: r["value"] for r in rows(folder) if (r["metric"], r["site"]) == ("round_score", "pooled")}
    assert np.isfinite(list(scored.values())).all() and scored[0] != scored[summary["round"]]


def test_the_sweeps_system_table_sets_methods_side_by_side(done, tmp_path):
    found = [runs.read_run(done(m)[0]) for m in ("dp_eps10", "sound_tight")]
    sweep_report.write(tmp_path, found)
    lines = csv.DictReader((tmp_path / "tables" / "DP-SimAgg_ci_system.csv").read_text().splitlines())
    table = {row["Method"]: row for row in lines}
    assert list(table) == ["DP-SimAgg, eps 10", "sound SimAgg, (1/√2+2/n)C"]
    for run in found:
        row, (simulated,) = table[run.label], run.summary["simulated"]
        assert float(row["ours simulated time (min)"]) == pytest.approx(simulated["minutes"])
        assert float(row["ours projected score"]) == pytest.approx(simulated["projected_score"])
        for label in LABELS:
            assert float(row[f"ours soft_dice_{label}"]) == pytest.approx(value(run.summary, f"soft_dice_{label}"))
        assert float(row["ours wall-clock (h)"]) > 0 and 0 < float(row["ours memory (GB)"]) < 100
        assert "ours energy (Wh)" in row
    methods = (tmp_path / "tables" / "DP-SimAgg_ci_methods.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in methods.splitlines() if line.startswith("|")}
    assert "∞" in lines["DP-SimAgg, eps 10"] and "∞" not in lines["sound SimAgg, (1/√2+2/n)C"]


FAULTS = {
    "adaptive": (
        "dp_eps10",
        ["--config.sampler.name=adaptive"],
        "config.sampler.name: 'adaptive' chooses by the clients' updates, which no noise covers",
    ),
    "adaptive, sound": ("sound_2c", ["--config.sampler.name=adaptive"], "config.sampler.name: 'adaptive' chooses"),
    "poisson batches": ("simagg", ["--config.batch_sampling=poisson"], "config.batch_sampling: 'poisson' given"),
    "attack": (
        "simagg",
        ["--config.attack.name=membership"],
        "config.attack.name: volumes are streamed from disk, for which only batch_sampling='shuffled'",
    ),
    "tight bound": (
        "sound_tight",
        ["--config.sampler.name=poisson", "--config.sampler.q=0.5"],
        "bound 'tight' given; bound simagg_tight: smallest cohort 0 found, at least 1 client in every round expected",
    ),
    "budget": (
        "simagg",
        ["--config.max_sim_hours=1", "--config.clock.name=none"],
        "config.max_sim_hours: 1 given without a clock; set --config.clock.name=fets",
    ),
    "regions": ("simagg", ["--config.model.classes=3"], "task.regions: 'brats' given for 3 classes; model.classes=4"),
    "labels": ("simagg", ["--config.task.labels=0,1,2"], "task.labels: (0, 1, 2) given, 4 different values"),
    "site": ("simagg", ["--config.data.sites=1,77"], "data.sites: unknown name '77'; did you mean '7'?"),
    "table": ("simagg", ["--config.data.partition=no.csv"], "data.partition: no file no.csv, neither in "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_together_is_one_line(name, mri_root, done, tmp_path, capsys):
    method, overrides, said = FAULTS[name]
    cache = Path(done("dp_eps10")[0]).parent / "cache"
    argv = tiny_volumes.words(mri_root, cache, tmp_path / "run", *overrides, method=method)
    assert call(argv) == 1
    assert said in one_line(capsys.readouterr().err)
    assert not (tmp_path / "run" / "config.json").exists()  # nothing has begun


def test_batch_statistics_are_refused_where_nothing_clips_them(mri_root, done, tmp_path, capsys):
    cache = Path(done("dp_eps10")[0]).parent / "cache"
    argv = tiny_volumes.words(mri_root, cache, tmp_path / "run", "--config.model.tracked=true", method="sound_tight")
    assert call(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: aggregator private_sim_agg: collections batch_stats found")
    assert "--config.model.tracked=False" in last
