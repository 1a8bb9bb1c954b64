"""FedHAvg (papers of the project: hyperbolic aggregation on multi-site fMRI): the config says what the paper prints."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import ROOT, folder

from fedjax_seg import config as configuration
from fedjax_seg import experiment, models

FILE = ROOT / "configs" / "fedhavg_abide.py"
METHODS = ("fedavg", "fedavg_weighted", "median", "trimmed", "ext_delta", "gbar_delta", "ext", "gbar")


def load(words):
    return configuration.load(FILE, words)


def test_the_model_has_the_papers_parameters():
    """d-1024-256-64-2 with d = 116 x 115 / 2 = 6,670: weights, biases, and scale and bias of three LayerNorms."""
    widths = (6670, 1024, 256, 64, 2)
    by_hand = sum(a * b + b for a, b in itertools.pairwise(widths)) + 2 * sum(widths[1:4])
    assert by_hand == 7_112_770
    module = models.make(**load("paper,fedavg").model)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 6670)))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes["params"])]
    assert sum(sizes) == by_hand and len(sizes) == 14  # the tensors that are aggregated one by one
    assert set(shapes) == {"params"}


@pytest.mark.parametrize("profile", ["paper", "released"])
@pytest.mark.parametrize("method", METHODS)
def test_what_both_profiles_print(profile, method):
    c = load(f"{profile},{method}")
    assert (c.rounds, c.local_epochs, c.batch_size) == (100, 1, 16)
    assert (c.client.optimizer, c.client.lr, c.client.momentum, c.client.weight_decay) == ("sgd", 1e-4, 0.9, 1e-3)
    assert (c.client.schedule, c.client.mu, c.client.clip, c.client.local) == ("constant", 0.0, 0.0, ())
    assert (c.model.hidden, c.model.classes, c.model.norm, c.model.activation) == ((1024, 256, 64), 2, True, "relu")
    assert (c.data.folds, c.data.max_fd, c.data.fisher_z) == (5, 0.15, False)
    assert (c.sampler.name, c.server.name, c.server.lr, c.server.momentum) == ("full", "sgd", 1.0, 0.0)
    assert c.group == profile and c.corruption.kind == "none" and c.protocol == "federated"


def test_where_the_profiles_differ():
    """The paper's section 4 against its released code, line by line as the config's docstring lists them."""
    paper, released = load("paper,gbar"), load("released,gbar")
    assert (paper.client.nesterov, released.client.nesterov) == (False, True)
    assert (paper.client.keep_optimizer, released.client.keep_optimizer) == (False, True)
    assert (paper.task.double_softmax, released.task.double_softmax) == (False, True)
    assert paper.data.sites == ("NYU", "UM", "UCLA", "USM")
    assert released.data.sites == ("NYU", "UM", "USM", "UCLA")
    assert (paper.aggregator.margin_on, released.aggregator.margin_on) == ("argument", "radius")
    same = {
        "client.nesterov",
        "client.keep_optimizer",
        "task.double_softmax",
        "data.sites",
        "aggregator.margin_on",
        "group",
    }
    a, b = configuration.flat(paper), configuration.flat(released)
    assert {key for key in a if a[key] != b[key]} == same


@pytest.mark.parametrize("method", ["ext", "gbar"])
def test_curvature_and_scale(method):
    rule = {"ext": "extrinsic_mean", "gbar": "gyro_mean"}[method]
    for words, of, c, gamma in (
        (f"paper,{method}", "weights", 2.0, 1.0),
        (f"released,{method}", "weights", 2.0, 1.0),
        (f"paper,{method}_delta", "updates", 2.0, 100.0),
        (f"released,{method}_delta", "updates", 4.0, 1000.0),
        (f"paper,{method},c=0.5,gamma=3", "weights", 0.5, 3.0),
    ):
        found = load(words).aggregator
        assert (found.name, found.of, found.c, found.gamma) == (rule, of, c, gamma), words
        assert (found.per, found.margin) == ("tensor", 1e-5)


def test_the_other_methods_of_table_3():
    rules = {m: load(f"paper,{m}").aggregator for m in METHODS}
    assert (rules["fedavg"].name, rules["fedavg_weighted"].name) == ("mean", "weighted_mean")
    assert (rules["median"].name, rules["median"].tie) == ("median", "lower")
    assert (rules["trimmed"].name, rules["trimmed"].alpha) == ("trimmed_mean", 0.25)


def test_the_grids():
    table3 = load(None).grid
    assert table3 == tuple(f"{p},{m}" for p in ("paper", "released") for m in METHODS)
    assert len({load(words).label for words in table3}) == 8
    table2 = load("paper,table2")
    assert table2.grid == ("paper,table2,fedavg",)
    one = load(table2.grid[0])
    assert (one.protocol, one.rounds, one.aggregator.name) == ("cross_site", 100, "mean")


def test_all_17_sites_is_a_variant():
    c = load("released,gbar,all17")
    assert c.data.sites == () and c.data.min_site_size == 10
    assert all("all17" in words for words in load("released,all17").grid)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    sites = (("NYU", 8), ("UM", 7), ("UCLA", 6), ("USM", 6))
    return folder(tmp_path_factory.mktemp("fedhavg") / "pcp", sites=sites)


# What every method must write beside the sites' metrics: facts of its rule that the papers' discussion needs.
OWN_METRICS = {"ext": "clamped_fraction", "gbar": "clamped_fraction"}


@pytest.mark.parametrize("profile", ["paper", "released"])
@pytest.mark.parametrize("method", METHODS)
def test_two_rounds(method, profile, root, tmp_path, quick_compile, no_figures):
    c = load(f"{profile},{method}")
    c.data.root, c.model.hidden, c.rounds, c.eval_every, c.devices = root, (8,), 2, 2, 1
    c.folds, c.seeds = (0,), (0,)
    summary = experiment.run(c, tmp_path / "run", quiet=True)
    assert summary["sites"] == list(c.data.sites) and summary["group"] == profile
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in found:
        assert row["value"] is not None and np.isfinite(row["value"]), row  # both classes are in every test fold
    last = {(r["site"], r["metric"]) for r in found if r["round"] == 2 and r["split"] == "test"}
    assert {(s, m) for s in c.data.sites for m in ("accuracy", "f1", "auc")} <= last
    norms = [r["value"] for r in found if r["metric"] == "update_norm"]
    assert len(norms) == 2 * 4 and min(norms) > 0
    if method.split("_")[0] in OWN_METRICS:
        assert [r["round"] for r in found if r["metric"] == OWN_METRICS[method.split("_")[0]]] == [1, 2]
    for name in ("config.json", "manifest.json", "per_case.csv", "report.md", "report.html", "DONE", "checkpoints/2"):
        assert (tmp_path / "run" / name).exists()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["client_order"] == list(c.data.sites)  # the gyro mean depends on it
    if method == "gbar":
        assert (
            f"depends on the order of its fold; here: {', '.join(c.data.sites)}"
            in (tmp_path / "run" / "report.md").read_text()
        )
