"""Batch statistics: averaged by examples, apart from the server optimiser (FedAvg), or kept at home (FedBN).

A BatchNorm on the input: its running statistics depend on the cases alone, so numpy can tell them exactly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny_federation import BATCH, SIZES, cases, close, equal, in_order, parts, plan, quick_jit, runner, start

from fedjax_seg.clients import local_sgd
from fedjax_seg.core.types import Task
from fedjax_seg.federation import evaluate, server

ARRAYS, ROUNDS, EPSILON = cases(), 2, 1e-5
FEDBN = ("batch_stats/*", "*BatchNorm*")


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask=None):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=EPSILON)(x, mask=mask)
        return nn.Dense(2)(x)


def normed() -> Task:
    module = Normed()

    def loss(variables, batch, key):
        mask = batch["mask"]
        logits, updated = module.apply(variables, batch["x"], True, mask[:, None] > 0, mutable=["batch_stats"])
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
        return jnp.sum(losses * mask) / jnp.sum(mask), updated

    def outputs(variables, batch):
        return {"logits": module.apply(variables, batch["x"], False)}

    return Task(lambda key, batch: module.init(key, batch["x"], False), loss, outputs, lambda o, c: [], {})


@functools.cache
def run(local=(), optimizer="sgd"):
    """(client, state before, state after two rounds)."""
    task = normed()
    client = local_sgd(task, lr=0.1, local=local)
    made = parts(
        client, ARRAYS, aggregator="mean", server=server.make(optimizer, lr=1.0 if optimizer == "sgd" else 0.1)
    )
    begin = start(made, task, ARRAYS)
    return client, begin, runner(made, capacity=ROUNDS)(begin, plan(), ROUNDS)[0]


def statistics(averaged):
    """Running (mean, variance) of every client after two rounds, by hand; averaged = FedAvg, else FedBN."""
    x, first = ARRAYS["x"].astype(np.float64), np.cumsum([1, *SIZES])
    start_of = [(np.zeros(3), np.ones(3))] * len(SIZES)
    for _ in range(ROUNDS):
        after = []
        for k, size in enumerate(SIZES):
            mean, variance = start_of[k]
            for at in range(0, size, BATCH):
                batch = x[first[k] + at : first[k] + min(at + BATCH, size)]
                mean, variance = 0.9 * mean + 0.1 * batch.mean(0), 0.9 * variance + 0.1 * batch.var(0)
            after.append((mean, variance))
        if averaged:
            both = [np.average([a[i] for a in after], axis=0, weights=SIZES) for i in (0, 1)]
            after = [tuple(both)] * len(SIZES)
        start_of = after
    return start_of


def test_fedavg_averages_the_statistics_by_examples():
    _, begin, state = run()
    mean, variance = statistics(averaged=True)[0]
    stats = state.variables["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["var"], variance, rtol=1e-5)
    assert begin.personal == {} and state.personal == {}


def test_a_server_optimiser_never_touches_the_statistics():
    _, begin, state = run(optimizer="adam")
    equal(state.variables["batch_stats"], run()[2].variables["batch_stats"])  # as plain FedAvg's, to the bit
    assert np.all(np.asarray(state.variables["batch_stats"]["BatchNorm_0"]["var"]) >= 0)
    params = {x.shape for x in jax.tree.leaves(begin.variables["params"])}
    assert {x.shape for x in jax.tree.leaves(state.server_opt)} == params | {()}
    # Adam's first steps are about lr in every coordinate: the parameters did go through it
    moved = np.abs(
        np.asarray(state.variables["params"]["Dense_0"]["kernel"] - begin.variables["params"]["Dense_0"]["kernel"])
    )
    assert 0.05 < moved.max() <= 0.2 + 1e-3


def test_fedbn_keeps_norms_and_statistics_at_home():
    _, begin, state = run(FEDBN)
    equal(state.variables["batch_stats"], begin.variables["batch_stats"])
    equal(state.variables["params"]["BatchNorm_0"], begin.variables["params"]["BatchNorm_0"])
    for k, (mean, variance) in enumerate(statistics(averaged=False)):
        np.testing.assert_allclose(state.personal["leaf/batch_stats/BatchNorm_0/mean"][k], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.personal["leaf/batch_stats/BatchNorm_0/var"][k], variance, rtol=1e-5)
    scales = np.asarray(state.personal["leaf/params/BatchNorm_0/scale"])
    assert len(np.unique(scales, axis=0)) == len(SIZES)  # trained apart
    assert np.any(state.variables["params"]["Dense_0"]["kernel"] != begin.variables["params"]["Dense_0"]["kernel"])
    other = run()[2].variables["params"]["Dense_0"]["kernel"]
    assert np.max(np.abs(other - state.variables["params"]["Dense_0"]["kernel"])) > 1e-4  # FedBN is not FedAvg


def test_what_fedbn_sends_holds_zeros_where_leaves_are_local():
    client, begin, _ = run(FEDBN)

    @quick_jit
    def send(variables):
        batches = in_order({k: jnp.asarray(v) for k, v in ARRAYS.items()}, BATCH)
        local = batches(jnp.asarray(plan().train[2]), jnp.int32(10), jnp.int32(2), None)
        personal = client.init(variables)
        return client.train(variables, personal, local, jax.random.key(0), round=jnp.int32(0), broadcast={})[0].delta

    delta = send(begin.variables)
    local = (delta["batch_stats"], delta["params"]["BatchNorm_0"])
    assert all(not np.any(x) for x in jax.tree.leaves(local))
    assert all(np.any(x) for x in jax.tree.leaves(delta["params"]["Dense_0"]))


@pytest.mark.parametrize("local", [(), FEDBN])
def test_evaluation_uses_each_clients_own_leaves(local):
    client, _, state = run(local)
    index, sizes = plan().test, np.asarray(SIZES)
    data = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
    score = lambda state, index: evaluate.case_outputs(
        normed().outputs, client, data, state, index, jnp.ones(len(index)), 4
    )
    logits = quick_jit(score)(state, index)["logits"]
    assert logits.shape == (4, 10, 2)
    p = jax.tree.map(np.asarray, state.variables["params"])
    stats = jax.tree.map(np.asarray, state.variables["batch_stats"]["BatchNorm_0"])
    norm = p["BatchNorm_0"]
    for k in range(len(SIZES)):
        if local:
            own = {name: np.asarray(x[k]) for name, x in state.personal.items()}
            stats = {name: own[f"leaf/batch_stats/BatchNorm_0/{name}"] for name in ("mean", "var")}
            norm = {name: own[f"leaf/params/BatchNorm_0/{name}"] for name in ("scale", "bias")}
        x = ARRAYS["x"][index[k, : sizes[k]]]
        h = (x - stats["mean"]) / np.sqrt(stats["var"] + EPSILON) * norm["scale"] + norm["bias"]
        close(
            np.asarray(logits[k, : sizes[k]]), h @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"], rtol=1e-4, atol=1e-5
        )
