"""One round against an independent implementation in numpy; absence, faults and skipped rounds."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import (
    BATCH,
    SIZES,
    cases,
    close,
    distance,
    equal,
    logged,
    owner,
    parts,
    plan,
    quadratic,
    quick_jit,
    runner,
)
from tiny_federation import start as start_of

from fedjax_seg import aggregation, tasks
from fedjax_seg.clients import local_sgd
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort
from fedjax_seg.federation import client_axis, flags, round, sampling, server

SITES = ("north", "east", "south", "west")


# An independent FedAvg: a two-layer network with hand-written gradients, PyTorch's SGD, in float64.


def gradients(w, x, y):
    """Gradients of the mean cross entropy of softmax(tanh(x A + a) B + b), by hand."""
    hidden = np.tanh(x @ w["A"] + w["a"])
    logits = hidden @ w["B"] + w["b"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    d_logits = p / len(y)
    d_hidden = (d_logits @ w["B"].T) * (1 - hidden**2)
    return loss, {"A": x.T @ d_hidden, "a": d_hidden.sum(0), "B": hidden.T @ d_logits, "b": d_logits.sum(0)}


def torch_sgd(w, g, buffer, lr, momentum, nesterov, weight_decay):
    """One step of torch.optim.SGD as its documentation writes it; buffer None = the first step."""
    new, kept = {}, {}
    for name in w:
        d = g[name] + weight_decay * w[name]
        b = d if buffer is None else momentum * buffer[name] + d
        kept[name] = b
        new[name] = w[name] - lr * (d + momentum * b if nesterov else b)
    return new, kept


def reference(w, steps, arrays, options, keep, weighted):
    """Rounds of FedAvg; steps[t][k] = the cases of every local step of client k in round t."""
    buffers = [None] * len(SIZES)
    losses = []
    for of_round in steps:
        total, mass = dict.fromkeys(w, 0.0), 0.0
        for k, batches in enumerate(of_round):
            local = w
            if not keep:
                buffers[k] = None
            seen = []
            for ids in batches:
                loss, g = gradients(local, arrays["x"][ids].astype(np.float64), arrays["y"][ids])
                seen.append(loss)
                local, buffers[k] = torch_sgd(local, g, buffers[k], **options)
            losses.append(np.mean(seen))
            share = SIZES[k] if weighted else 1.0
            mass += share
            total = {name: total[name] + share * (local[name] - w[name]) for name in w}
        w = {name: w[name] + total[name] / mass for name in w}
    return w, losses


def named(variables):
    p = variables["params"]
    return {
        "A": np.asarray(p["Dense_0"]["kernel"], np.float64),
        "a": np.asarray(p["Dense_0"]["bias"], np.float64),
        "B": np.asarray(p["Dense_1"]["kernel"], np.float64),
        "b": np.asarray(p["Dense_1"]["bias"], np.float64),
    }


def by_round_and_client(log, rounds, epochs):
    """The logged steps as steps[round][client] = [ids, ...]; checks that every epoch visits each case exactly once."""
    whose = owner()
    queue = [[] for _ in SIZES]
    for ids, mask in log:
        real = ids[mask > 0]
        assert len(set(whose[real])) == 1
        queue[whose[real[0]]].append(real)
    steps = [[[] for _ in SIZES] for _ in range(rounds)]
    for k, size in enumerate(SIZES):
        per_epoch = -(-size // BATCH)
        assert len(queue[k]) == rounds * epochs * per_epoch
        for e in range(rounds * epochs):
            batches = queue[k][e * per_epoch : (e + 1) * per_epoch]
            np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.flatnonzero(whose == k))
            assert [len(b) for b in batches[:-1]] == [BATCH] * (per_epoch - 1)
            steps[e // epochs][k] += batches
    return steps


@pytest.mark.parametrize(
    "nesterov, keep, weighted, epochs", [(False, False, True, 2), (True, True, False, 1)], ids=["reset", "kept"]
)
def test_three_rounds_of_fedavg_equal_numpy(nesterov, keep, weighted, epochs):
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.05}
    arrays, log = cases(), []
    task = tasks.make("classification", {"name": "mlp", "hidden": (5,), "norm": False, "activation": "tanh"})
    client = local_sgd(logged(task, log), keep_optimizer=keep, **options)
    made = parts(client, arrays, aggregator="weighted_mean" if weighted else "mean", epochs=epochs, shuffled=True)
    begin = start_of(made, task, arrays)
    state, records, done = runner(made)(begin, plan(), 3)
    jax.effects_barrier()
    steps = by_round_and_client(log, 3, epochs)

    expected, losses = reference(named(begin.variables), steps, arrays, options, keep, weighted)
    close(named(state.variables), expected, rtol=2e-5, atol=2e-6)
    assert done == 3 and state.round == 3
    np.testing.assert_allclose(records["clients"]["loss"][:3].ravel(), losses, rtol=1e-5)
    np.testing.assert_array_equal(records["clients"]["weight"][0], SIZES)
    np.testing.assert_array_equal(records["clients"]["steps"][0], [epochs * -(-n // BATCH) for n in SIZES])

    # the comparison is sharp: resetting the state, or decay outside of momentum, would have been seen
    other, _ = reference(named(begin.variables), steps, arrays, options, not keep, weighted)
    assert distance(other, expected) > 1e-3
    undecayed, _ = reference(named(begin.variables), steps, arrays, {**options, "weight_decay": 0.0}, keep, weighted)
    assert distance(undecayed, expected) > 1e-3


# Absence and faults. One program per aggregator and policy: who comes and who fails is an argument of the program.

NEVER = 99


class Fate(NamedTuple):
    """Who is in the cohort of every round, and who returns a NaN."""

    clients: tuple = (0, 1, 2, 3, 0)
    present: tuple = (True, True, True, True, False)
    bad_client: int = NEVER
    bad_round: int = NEVER
    bad_aggregate: int = NEVER  # the round in which the aggregate is not finite though every client is


def spoiled(tree_, condition):
    return jax.tree.map(lambda x: jnp.where(condition, jnp.nan, x), tree_)


@functools.cache
def federation(aggregator, skip):
    """(run, begin): clients keep their momentum, the server has one; run(state, stop, sizes=, **fate)."""
    arrays, task = cases(), quadratic()
    rule = aggregation.make(aggregator)
    honest = local_sgd(task, lr=0.1, momentum=0.9, keep_optimizer=True)
    base = sampling.make("full", len(SIZES))
    options = {"server": server.make(momentum=0.5), "skip_nonfinite": skip, "skip_empty": skip}

    def made(fate):
        cohort = Cohort(jnp.asarray(fate.clients, jnp.int32), jnp.asarray(fate.present))

        def train(variables, personal, batches, key, *, round, broadcast):
            update, rest = honest.train(variables, personal, batches, key, round=round, broadcast=broadcast)
            bad = (batches.client == fate.bad_client) & (round == fate.bad_round)
            return update._replace(delta=spoiled(update.delta, bad)), spoiled(rest, bad)

        def decode(total, cohort, state, *, variables, round, key):
            delta, state, scalars = rule.decode(total, cohort, state, variables=variables, round=round, key=key)
            return spoiled(delta, round == fate.bad_aggregate), state, scalars

        sampler = base._replace(sample=lambda key, round: cohort, capacity=len(fate.clients))
        client = honest._replace(train=train)
        return parts(client, arrays, aggregator=rule._replace(decode=decode), sampler=sampler, **options)

    @quick_jit
    def many(state, plan, stop, fate):
        return round.many_rounds(made(fate), client_axis.Lanes(), 4)(state, plan, stop)

    def run(state, stop, sizes=SIZES, index=None, **fate):
        whole = plan()
        whole = whole._replace(train_sizes=np.asarray(sizes, np.int32), train=whole.train if index is None else index)
        arguments = Fate(*(np.asarray(field) for field in Fate(**fate)))
        return many(state, whole, jnp.int32(stop), arguments)

    return run, start_of(made(Fate()), task, arrays)


class Replica:
    fold, seed = "fold0", 3


def lines_of(records, done):
    return flags.check(jax.tree.map(lambda x: np.asarray(x)[None], records), np.array([done]), [Replica()], SITES)


def server_side(state):
    return state.variables, state.server_opt, state.aggregator


@pytest.mark.parametrize("aggregator", ["weighted_mean", "median"])
def test_absent_rows_change_nothing(aggregator):
    run, begin = federation(aggregator, True)
    expected, _, _ = run(begin, 2, clients=(2, 0, 3, 0, 0), present=(True, True, True, False, False))
    for clients, present in (
        ((2, 0, 3, 1, 1), (True, True, True, False, False)),
        ((2, 1, 0, 1, 3), (True, False, True, False, True)),
        ((1, 2, 2, 0, 3), (False, True, False, True, True)),
    ):
        equal(run(begin, 2, clients=clients, present=present)[0], expected)


def test_absence_is_not_a_weight_of_zero():
    run, begin = federation("weighted_mean", True)
    state, records, _ = run(begin, 1, clients=(3, 1, 2, 0, 0), present=(True, False, False, False, False))
    x, w = cases()["x"].astype(np.float64), np.asarray(begin.variables["params"]["w"], np.float64)
    expected = w - 0.1 * (w - x[owner() == 3][0])  # the only client's one step on its only case
    np.testing.assert_allclose(state.variables["params"]["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(records["clients"]["update_norm"][0, 0], np.linalg.norm(expected - w), rtol=1e-5)
    moved = np.any(np.asarray(jax.tree.leaves(state.personal)[0]) != 0, axis=1)
    np.testing.assert_array_equal(moved, [False, False, False, True])  # only its own momentum was written


@pytest.mark.parametrize("aggregator", ["weighted_mean", "median"])
def test_a_site_without_training_cases_is_absent(aggregator):
    run, begin = federation(aggregator, True)
    state, records, _ = run(begin, 2, sizes=(7, 0, 10, 1))
    np.testing.assert_array_equal(records["cohort"]["present"][:2], [[True, False, True, True, False]] * 2)
    np.testing.assert_array_equal(records["clients"]["steps"][0, :4], [2, 0, 3, 1])
    equal(state, run(begin, 2, present=(True, False, True, True, False))[0])
    elsewhere = plan().train.copy()
    elsewhere[1] = 3  # where its index rows point is never read
    equal(state, run(begin, 2, sizes=(7, 0, 10, 1), index=elsewhere)[0])


@pytest.mark.parametrize("skip", [True, False])
def test_an_empty_round_is_flagged_and_leaves_the_model_alone(skip):
    run, begin = federation("weighted_mean", skip)
    moved, _, _ = run(begin, 2)
    assert all(np.any(np.asarray(v) != 0) for v in jax.tree.leaves(moved.server_opt))  # the server would coast on
    state, records, done = run(moved, 4, sizes=(0, 0, 0, 0))
    equal((server_side(state), state.personal), (server_side(moved), moved.personal))
    if skip:
        assert state.round == 4 and done == 2
        text = "round {}, fold0, seed 3: total weight 0 (nobody took part); skipped"
        assert list(lines_of(records, 2)) == [text.format(3), text.format(4)]
    else:
        assert state.round == 2 and done == 1
        with pytest.raises(UserError, match=r"^round 3, fold0, seed 3: total weight 0 .*--config\.on_empty=skip$"):
            list(lines_of(records, 1))


@pytest.mark.parametrize("aggregator", ["weighted_mean", "median"])
def test_a_skipped_nonfinite_client_is_named_and_as_if_absent(aggregator):
    run, begin = federation(aggregator, True)
    skipped, records, done = run(begin, 3, bad_client=2, bad_round=1)
    assert done == 3
    np.testing.assert_array_equal(records["clients"]["ok"][:3, 2], [True, False, True])
    assert list(lines_of(records, 3)) == ["round 2, fold0, seed 3: non-finite values from south; skipped"]
    state, _, _ = run(begin, 1)
    state, _, _ = run(state, 2, present=(True, True, False, True, False))
    equal(skipped, run(state, 3)[0])
    assert tree.all_finite(skipped._replace(key=0.0))


def test_a_nonfinite_client_stops_the_run_before_the_round():
    run, begin = federation("weighted_mean", False)
    stopped, records, done = run(begin, 3, bad_client=2, bad_round=1)
    before, _, _ = run(begin, 1)
    assert stopped.round == 1 and done == 2
    equal(server_side(stopped), server_side(before))
    with pytest.raises(UserError, match=r"^round 2, fold0, seed 3: non-finite values from south; .*on_nonfinite=skip$"):
        list(lines_of(records, 2))


@pytest.mark.parametrize("skip", [True, False])
def test_a_nonfinite_aggregate_of_finite_clients_always_stops(skip):
    run, begin = federation("weighted_mean", skip)
    stopped, records, done = run(begin, 3, bad_aggregate=1)
    assert stopped.round == 1 and done == 2
    equal(server_side(stopped), server_side(run(begin, 1)[0]))
    with pytest.raises(UserError, match=r"^round 2, fold0, seed 3: the aggregate is not finite; .*another aggregator$"):
        list(lines_of(records, 2))


def test_all_clients_nonfinite_and_skipped_is_an_empty_round():
    run, begin = federation("weighted_mean", True)
    state, records, done = run(
        begin, 1, clients=(2, 0, 0, 0, 0), present=(True,) + (False,) * 4, bad_client=2, bad_round=0
    )
    assert state.round == 1 and done == 1 and records["empty"][0] and records["nonfinite"][0]
    equal((server_side(state), state.personal), (server_side(begin), begin.personal))
