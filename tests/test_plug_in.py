"""The README's way to plug in a rule, a sampler and a data set of one's own works as printed."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import aggregation, data, experiment
from fedjax_seg import config as configuration
from fedjax_seg.data.federated import FederatedData, Split


def largest(x, w, present):
    return x[jnp.argmax(jnp.where(present, jnp.sum(x**2, axis=1), -1))]


def two_blobs():
    """Two sites of 24 cases each, four features; the first one tells the class."""
    random = np.random.default_rng(0)
    y = np.tile([0, 1], 24).astype(np.int32)
    x = random.normal(size=(48, 4)).astype(np.float32)
    x[:, 0] += 4 * y - 2
    sites = (np.arange(24), np.arange(24, 48))
    split = Split("only", tuple(s[:16] for s in sites), tuple(s[16:] for s in sites))
    ids = tuple(f"case{i}" for i in range(48))
    return FederatedData({"x": x, "y": y}, ids, ids, ("A", "B"), np.repeat([0, 1], 24), (split,), ("no", "yes"))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(aggregation.AGGREGATORS, "largest", lambda: aggregation.lift(largest, per="model"))
    monkeypatch.setitem(data.DATASETS, "two_blobs", two_blobs)


def test_own_rule_and_own_data_in_a_run(registered, tmp_path):
    c = configuration.base()
    c.rounds, c.eval_every = 12, 12
    c.data = configuration.slot("data", "two_blobs")
    c.model = configuration.slot("model", "mlp", hidden=(8,))
    c.task = configuration.slot("task", "classification")
    c.client.lr = 0.1
    c.aggregator = configuration.slot("aggregator", "largest")
    summary = experiment.run(c, tmp_path / "run", quiet=True)
    accuracy = {r["site"]: r["value"] for r in summary["results"] if r["metric"] == "accuracy"}
    assert accuracy["A"] >= 0.8 and accuracy["B"] >= 0.8  # classes four standard deviations apart: Bayes error 2.3 %
    assert summary["label"] == "largest"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
