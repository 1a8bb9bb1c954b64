"""Cluster-based SMC at its smallest: every sum gives the model of FedAvg, and a leak shows only where there is one."""

import csv

import numpy as np
import pytest
from tiny_runs import ROOT

from fedjax_seg import config as configuration
from fedjax_seg import experiment, outcome, synthesis
from fedjax_seg.core.checks import UserError
from fedjax_seg.report import runs, sweep_report

CONFIG = ROOT / "configs" / "smc_histopathology.py"
SUMS = ("smc", "additive", "secagg")  # the others: tests/federation/test_secure_rounds.py


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compile):
    """For all runs of this module."""


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return str(synthesis.make("histology", tmp_path_factory.mktemp("tiles") / "set", size=32, hospitals=(12,) * 4))


def config(tiles, method, **changes):
    c = configuration.load(CONFIG, f"ci,{method}")
    c.data.root, c.data.size, c.model.width, c.model.blocks, c.devices = tiles, (16, 16), 2, 1, 1
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    return c


@pytest.fixture(scope="module")
def done(tiles, tmp_path_factory):
    """method -> (folder, summary) of a finished run; each method runs once."""
    base, kept = tmp_path_factory.mktemp("smc"), {}

    def run(method):
        if method not in kept:
            with pytest.MonkeyPatch.context() as patch:
                if method not in ("fedavg", "smc"):  # pictures are half of the time of a tiny run
                    patch.setattr(outcome.run_report, "write", lambda *unused: None)
                kept[method] = (base / method, experiment.run(config(tiles, method), base / method, quiet=True))
        return kept[method]

    return run


def test_what_the_config_says():
    c = configuration.load(CONFIG, "lc25000,smc")
    assert (c.secure_sum.name, c.secure_sum.size, c.secure_sum.law, c.secure_sum.concentration) == (
        *("smc_scalar", 4, "dirichlet", 1.0),
    )
    assert (c.aggregator.name, c.aggregator.of, c.data.clients, c.data.partition) == ("mean", "weights", 8, "dirichlet")
    grid = configuration.load(CONFIG, "lc25000,M=2").grid
    assert len(grid) == 12 and grid[1] == "lc25000,M=2,smc" and "lc25000,noise,sigma=0.03" in grid
    c = configuration.load(CONFIG, "small,additive,K=9,M=2")
    assert (len(c.synthesis.hospitals), c.secure_sum.clusters, c.secure_sum.size) == (9, 2, 0)
    for words, message in (
        ("smc,K=x", "K=x given, a whole number"),
        ("smcc", "unknown word 'smcc'"),
        ("smc,K=4,K=5", "given twice"),
        ("fedavg,M=2", "M= given, which 'fedavg' does not read"),
        ("additive,sigma=0.1", "sigma= given, which 'additive' does not read"),
    ):
        with pytest.raises(UserError, match=message):
            configuration.load(CONFIG, words)


@pytest.mark.parametrize("method", SUMS)
def test_every_sum_is_fedavg(done, method):
    _, plain = done("fedavg")
    folder, summary = done(method)
    probability = lambda where: runs.read_run(where).cases["p_0"]
    np.testing.assert_allclose(probability(folder), probability(done("fedavg")[0]), atol=2e-4)
    norm = lambda found: [
        r["value"] for r in found if r["metric"] == "update_norm" and r["round"] == 2 and r["site"] != "server"
    ]
    read = lambda where: runs.read_rows(where / "metrics.jsonl")
    np.testing.assert_allclose(
        norm(read(folder)), norm(read(done("fedavg")[0])), rtol=1e-2
    )  # Adam makes much of last bits
    assert summary["secrecy"]["entries"] == plain["secrecy"]["entries"]


def test_messages_bytes_and_steps_are_those_of_the_formulas(done):
    entries = done("fedavg")[1]["secrecy"]["entries"]
    size, k, n = 4 * entries, 4, 2  # four hospitals in clusters of two
    expected = {  # messages, bytes up, bytes between hospitals, steps; notes on secure aggregation, 4.4
        "fedavg": (k, k * size, 0, 1),
        "smc": (k * n, k * size, k * (n - 1) * size, 2),
        "additive": (k * n, k * size, k * (n - 1) * size, 2),
    }
    for method, numbers in expected.items():
        told = done(method)[1]["secrecy"]["per_round"]
        assert (told["messages"], told["bytes_up"], told["bytes_peer"], told["hops"]) == numbers, method
        assert told["bytes_down"] == k * size and told["dropped"] == told["aborted"] == told["saturated"] == 0
    folder, _ = done("additive")
    with open(folder / "communication.csv", newline="") as file:
        assert [row["messages"] for row in csv.DictReader(file)] == ["8.0", "8.0"]


def test_the_leak_shows_where_there_is_one(done):
    found = {
        method: {row["viewer"]: row for row in done(method)[1]["secrecy"]["rows"] if row["site"] == "mean"}
        for method in ("fedavg", "smc", "additive", "secagg")
    }
    assert found["fedavg"]["server"]["cosine"] > 0.9999 and found["fedavg"]["neighbour"]["cosine"] is None
    # a network of 300 numbers; test_share_leakage.py has the figures of a large one
    assert found["smc"]["neighbour"]["cosine"] > 0.99
    assert found["smc"]["neighbour"]["verdict"].startswith(("the update itself", "its direction"))
    for method, viewer in (("additive", "neighbour"), ("additive", "server"), ("secagg", "server")):
        row = found[method][viewer]
        known = found[method]["sum"]["cosine"]  # of a cluster of two the server may have the sum, and no more
        assert abs(row["cosine"]) <= max(row["chance"], known) and not row["verdict"].startswith(("the", "its")), row


def test_reports(done, tmp_path):
    folder, _ = done("smc")
    report = (folder / "report.md").read_text()
    for words in ("HIDES NOTHING", "What single hospitals give away", "## Communication", "confusion.png", "TenSEAL"):
        assert words in report
    assert (folder / "figures" / "share_leakage.png").is_file() and (folder / "figures" / "communication.png").is_file()
    finished = [runs.read_run(done(method)[0]) for method in ("fedavg", "smc", "additive", "secagg")]
    sweep_report.write(tmp_path, finished)
    text = (tmp_path / "report.md").read_text()
    assert "the update itself" in text and "nothing above chance" in text and "all others of a cluster" in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"secure_sum.clusters": 4, "secure_sum.size": 0}, "hides nothing"),
        ({"secure_sum.size": 5}, "size"),
        ({"secure_sum.clip": 0.0}, "clip"),
        ({"secure_sum.frac": 31}, "frac"),
        ({"protocol": "local"}, "nothing is summed over sites"),
        ({"network.mbit_s": 0.0}, "network.mbit_s"),
        ({"network.file": "/nowhere.csv"}, "nowhere.csv: cannot be read"),
        ({"dropout.schedule": ("1:hospital_9",)}, "unknown site 'hospital_9'"),
    ],
)
def test_faults_are_told_before_anything_compiles(tiles, tmp_path, changes, message):
    c = config(tiles, "additive")
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        (c[group] if group else c)[name] = value
    with pytest.raises(UserError, match=message):
        experiment.run(c, tmp_path / "run", quiet=True)


POISSON = {"sampler": configuration.slot("sampler", "poisson", q=0.5), "aggregator.expected_clients": 2.0}


@pytest.mark.parametrize(
    "method, changes, message",
    [
        ("central_dp", POISSON, "claim that rests on the sampler 'poisson'"),
        ("additive", {"sampler": configuration.slot("sampler", "adaptive", size=2)}, "single updates, which a secure"),
        ("additive", {"aggregator": configuration.slot("aggregator", "extrinsic_mean")}, "neither updates nor weights"),
        (
            "secagg",
            {"aggregator": configuration.slot("aggregator", "fednova"), "local_epochs": 9, "secure_sum.clip": 2.0},
            "sends numbers of local steps, up to",
        ),
        ("fedavg", {"protocol": "local", "dropout.probability": 0.5}, "no federation to drop out of"),
    ],
)
def test_parts_that_do_not_go_together(tiles, tmp_path, method, changes, message):
    c = config(tiles, method)
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        (c[group] if group else c)[name] = value
    with pytest.raises(UserError, match=message):
        experiment.check_data(c, tmp_path / "run")


def test_a_rule_that_reads_single_messages_is_refused(tiles, tmp_path):
    c = config(tiles, "secagg")
    configuration.rename(c, "aggregator", "median")
    with pytest.raises(UserError, match=r"aggregator 'median': .*reads single messages"):
        experiment.run(c, tmp_path / "run", quiet=True)
