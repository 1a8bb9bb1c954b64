"""What the engine promises whatever the algorithm: lanes, devices, replicas and chunks of rounds change no result; one
compile per run; no idle step at one lane; memory flat in the clients.

The federations are built by experiment.build, as a run builds them.
"""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import (
    CLIENTS,
    SIZES,
    cases,
    distance,
    equal,
    logged,
    network,
    parts,
    plan,
    quadratic,
    quick_jit,
    start,
)

from fedjax_seg import config, experiment
from fedjax_seg.clients import local_sgd
from fedjax_seg.core import tree
from fedjax_seg.data import federated
from fedjax_seg.federation import client_axis, replicas, round, sampling, server

SITES = ("north", "east", "south", "west", "centre")
TRAINING = (7, 4, 10, 1, 6)  # batches of 4: 2, 1, 3, 1, 2 steps
ROUNDS = 2


def federation():
    """Five uneven sites, two folds that differ in who tests; well separated classes."""
    rng = np.random.default_rng(5)
    per_site = [n + 2 for n in TRAINING]
    ends = np.cumsum(per_site)
    total = int(ends[-1])
    y = rng.integers(0, 2, total).astype(np.int32)
    x = (rng.normal(size=(total, 6)) + y[:, None]).astype(np.float32)
    everyone = [np.arange(end - n, end) for n, end in zip(per_site, ends)]
    splits = (
        federated.Split("fold0", tuple(p[:-2] for p in everyone), tuple(p[-2:] for p in everyone)),
        federated.Split("fold1", tuple(p[2:] for p in everyone), tuple(p[:2] for p in everyone)),
    )
    ids = tuple(f"case{i}" for i in range(total))
    site_of = np.repeat(np.arange(5), per_site).astype(np.int32)
    return federated.FederatedData({"x": x, "y": y}, ids, ids, SITES, site_of, splits, ("no", "yes"))


def settings(aggregator="weighted_mean", **changes):
    c = config.base()
    c.model = config.slot("model", "mlp", hidden=())
    c.task = config.slot("task", "classification")
    c.client = config.slot(
        "client",
        "local_sgd",
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        keep_optimizer=True,
        schedule="exponential",
        schedule_decay=0.5,
    )
    c.aggregator = config.slot("aggregator", aggregator)
    c.batch_size, c.eval_every, c.folds, c.seeds = 4, 16, (0,), (0, 1, 2)
    for name, value in changes.items():
        c[name] = value
    return c


def built(**changes):
    made = experiment.build(settings(**changes), federation())
    return made, replicas.place(made.how, made.plan)


# Lanes, devices, replicas: fully optimised programs, as in a run.

SEEDS = 3
# replicas, lanes, devices, vmapped: every number of each, with both kinds of aggregator
LAYOUTS = {
    "weighted_mean": [(3, 2, 1, False), (1, 5, 4, False), (2, 1, 2, True)],
    "geometric_median": [(3, 5, 1, False), (1, 2, 2, False), (2, 1, 4, True)],
}


@functools.cache
def two_rounds(aggregator, count, lanes, devices, vmapped):
    """(state before, state after two rounds) of `count` seeds on the host; clients keep their momentum."""
    arrays, task, how = cases(TRAINING), network(), replicas.layout(count, len(TRAINING), lanes, devices, vmapped)
    assert (how.lanes.lanes, how.mesh.size, how.vmap) == (lanes, devices, vmapped)
    client = local_sgd(task, lr=0.1, momentum=0.9, weight_decay=0.01, keep_optimizer=True)
    made = parts(client, arrays, aggregator=aggregator, clients=len(TRAINING), server=server.make(momentum=0.5))
    one = lambda state, plan: round.one_round(made, state, plan, how.lanes)[0]
    both = lambda state, plan: (jax.lax.fori_loop(0, ROUNDS, lambda _, s: one(s, plan), state),)
    run = replicas.over_replicas(how, both, donate=True)
    begin = tree.stack([start(made, task, arrays, seed, len(TRAINING)) for seed in range(count)])
    begin, where = jax.tree.map(np.asarray, begin), jax.tree.map(lambda x: np.stack([x] * count), plan(TRAINING))
    (state,) = run(replicas.place(how, begin), replicas.place(how, where))
    return begin, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("aggregator, layout", [(name, how) for name, hows in LAYOUTS.items() for how in hows])
def test_lanes_devices_and_replicas_change_no_result(aggregator, layout):
    begin, expected = two_rounds(aggregator, SEEDS, 1, 1, False)
    _, state = two_rounds(aggregator, *layout)
    some = slice(0, layout[0])
    for part in ("variables", "server_opt", "personal"):
        now, then, was = getattr(state, part), getattr(expected, part), getattr(begin, part)
        assert distance(now, tree.rows(was, some)) > 1e-2  # something has been learned
        for leaf, other in zip(jax.tree.leaves(now), jax.tree.leaves(tree.rows(then, some)), strict=True):
            assert distance(leaf, other) < 1e-6


# Whole experiments: shuffles, folds and seeds, schedules.


@pytest.fixture(scope="module")
def four(compile_cache):
    """Folds 0, 1 x seeds 0, 1 on one device: six rounds in calls of 1, 3 and 2, and what each call had to lower."""
    with quick():
        made, where = built(folds=(0, 1), seeds=(0, 1), lanes=1, devices=1)
        begin, lowered, records = jax.tree.map(np.asarray, made.initial()), [], []
        state = replicas.place(made.how, begin)
        for stop in (1, 4, 6):
            with lowerings() as seen:
                state, chunk, done = made.rounds(state, where, stop)
            lowered.append(len(seen))
            records.append(tree.rows(jax.tree.map(np.asarray, chunk), np.s_[:, : int(done[0])]))
        return SimpleNamespace(
            made=made, where=where, begin=begin, end=jax.tree.map(np.asarray, state), records=records, lowered=lowered
        )


@contextlib.contextmanager
def quick():
    """Compiles without the costly passes; for comparisons to the bit, which hold for any program."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def lowerings():
    """Collects an item for every program that is lowered for the compiler inside the block."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **rest: seen.append(event) if "jaxpr_to_mlir" in event else None
    )
    yield seen
    jax.monitoring.clear_event_listeners()


def advance(made, where, begin, *stops):
    """The state on the host after calls that end at `stops`."""
    state = replicas.place(made.how, begin)
    for stop in stops:
        state, _, _ = made.rounds(state, where, stop)
    return jax.tree.map(np.asarray, state)


def test_one_compile_per_run(four):
    """The first call compiles one program; calls of another length compile nothing."""
    assert four.lowered == [1, 0, 0]


def test_any_chunks_of_rounds_give_the_same_run_to_the_bit(four):
    whole, at_once, done = four.made.rounds(replicas.place(four.made.how, four.begin), four.where, 6)
    assert done.tolist() == [6] * 4
    equal(jax.tree.map(np.asarray, whole), four.end)
    joined = jax.tree.map(lambda *x: np.concatenate(x, 1), *four.records)
    equal(tree.rows(jax.tree.map(np.asarray, at_once), np.s_[:, :6]), joined)
    # the schedule follows the global round through every chunk: 0.1 * 0.5^t
    rates = np.broadcast_to(0.1 * 0.5 ** np.arange(6)[:, None], (4, 6, 5))
    np.testing.assert_allclose(joined["clients"]["lr"], rates, rtol=1e-6)
    np.testing.assert_array_equal(joined["round"], [list(range(6))] * 4)


def test_ten_rounds_are_three_and_seven_and_ten_times_one(four):
    once = advance(four.made, four.where, four.begin, 10)
    equal(once, advance(four.made, four.where, four.begin, 3, 10))
    equal(once, advance(four.made, four.where, four.begin, *range(1, 11)))
    assert np.all(once.round == 10)


def test_two_identical_runs_are_equal_to_the_bit(four):
    with quick():
        again = experiment.build(four.made.config, federation())
        begin = jax.tree.map(np.asarray, again.initial())
        equal(begin, four.begin)
        equal(advance(again, replicas.place(again.how, again.plan), begin, 6), four.end)


def test_a_replica_alone_is_its_row_in_a_run_of_all(four):
    names = [(r.fold, r.seed) for r in four.made.replicas]
    assert sorted(names) == [("fold0", 0), ("fold0", 1), ("fold1", 0), ("fold1", 1)]
    mine = names.index(("fold0", 1))
    with quick():
        made, where = built(folds=(0,), seeds=(1,), lanes=1, devices=1)
        begin = jax.tree.map(np.asarray, made.initial())
        equal(tree.row(begin, 0), tree.row(four.begin, mine))
        equal(tree.row(advance(made, where, begin, 1, 6), 0), tree.row(four.end, mine))
    for other in set(range(4)) - {mine}:
        assert distance(tree.row(four.end, other).variables, tree.row(four.end, mine).variables) > 1e-3


def test_an_experiment_over_lanes_and_devices_is_the_same(four):
    """Shuffles depend on the client, not on the lane or device that runs it; fully optimised, so not to the bit."""
    made, where = built(folds=(0, 1), seeds=(0, 1), lanes=5, devices=4)
    assert dict(made.how.mesh.shape) == {"replica": 4, "client": 1}
    state = advance(made, where, four.begin, 2)
    expected = advance(four.made, four.where, four.begin, 2)
    assert distance(state.variables, expected.variables) < 1e-6


# Costs that can be counted


def test_the_loss_is_traced_once_and_the_state_is_reused_in_place():
    traces, arrays, task = [], cases(), quadratic()

    def loss(variables, batch, key):
        traces.append(None)
        return task.loss(variables, batch, key)

    made = parts(local_sgd(task._replace(loss=loss), lr=0.1, momentum=0.9, keep_optimizer=True), arrays)
    how = replicas.layout(2, CLIENTS, 1, 1, None)
    many = lambda state, plan, stop: round.many_rounds(made, how.lanes, 8)(state, plan, stop)
    run = replicas.over_replicas(how, many, donate=True)
    state = replicas.place(how, tree.stack([start(made, task, arrays, seed) for seed in (0, 1)]))
    where = replicas.place(how, jax.tree.map(lambda x: np.stack([x, x]), plan()))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    before = state
    memory = run.lower(state, where, jnp.int32(2)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    once = len(traces)
    for stop in (2, 3, 8, 9):
        state, _, _ = run(state, where, jnp.int32(stop))
    assert len(traces) == once > 0
    assert all(x.is_deleted() for x in jax.tree.leaves(before))  # donated


@pytest.mark.parametrize("lanes, executed", [(1, 2 + 1 + 3 + 1), (CLIENTS, CLIENTS * 3)])
def test_executed_steps_against_an_independent_count(lanes, executed):
    """The program counts how often a loss is evaluated; clients of 7, 4, 10 and 1 cases in a plan 40 cases wide."""
    log, arrays, task = [], cases(), quadratic()
    made = parts(local_sgd(logged(task, log), lr=0.1), arrays)

    @quick_jit
    def run(state, plan):
        new, record = round.one_round(made, state, plan, client_axis.Lanes(lanes))
        return new.variables, record["clients"]["steps"], record["executed"]

    _, steps, counted = run(start(made, task, arrays), plan(longest=40))
    jax.effects_barrier()
    assert steps.tolist() == [2, 1, 3, 1]
    assert len(log) == counted == executed
    if lanes == 1:
        assert executed / sum(steps.tolist()) == 1.0  # no idle step, no padded one
        assert sum(int(mask.sum()) for _, mask in log) == sum(SIZES)
    else:
        assert executed / sum(steps.tolist()) > 1.0


MODEL = 20_000


def temporary_bytes(aggregator, clients):
    """Scratch memory of one compiled round of a model of MODEL parameters."""
    sizes = tuple(1 + k % 3 for k in range(clients))
    arrays = {"x": jnp.zeros((4, MODEL)), "y": jnp.zeros(4, jnp.int32)}
    task = quadratic(MODEL)
    made = parts(task, arrays, aggregator=aggregator, sampler=sampling.make("full", clients))
    one = quick_jit(lambda s, p: round.one_round(made, s, p, client_axis.Lanes())[0], donate_argnums=0)
    state = start(made, task, arrays, clients=clients)
    return one.lower(state, plan(sizes)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("aggregator, stacks", [("extrinsic_mean", False), ("geometric_median", True)])
def test_memory_does_not_grow_with_the_clients_of_a_sum(aggregator, stacks):
    few, many = (temporary_bytes(aggregator, clients) for clients in (5, 1000))
    per_client = (many - few) / 995
    if stacks:
        assert per_client >= 4 * MODEL  # a stack of models, as it must be: the count is sharp
    else:
        assert per_client < 4 * MODEL / 100  # scalars of the record, no model
        assert few < 16 * 4 * MODEL
