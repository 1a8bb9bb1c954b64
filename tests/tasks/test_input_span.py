"""Training in the span of the cases gives the model of full dimension; where it would not, it is switched off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import distance, network, parts, plan, quick_jit, start

from fedjax_seg import aggregation, config, experiment
from fedjax_seg.clients import local_sgd
from fedjax_seg.core.types import Aggregator, ClientUpdate
from fedjax_seg.data import federated
from fedjax_seg.federation import client_axis, round, server
from fedjax_seg.tasks import input_span

SIZES, WIDTH, ROUNDS = (6, 5, 4, 3, 4), 40, 3
CASES = 1 + sum(SIZES)


def inputs(dtype):
    rng = np.random.default_rng(2)
    y = rng.integers(0, 2, CASES).astype(np.int32)
    return {"x": (rng.normal(size=(CASES, 5, 8)) + 0.3 * y[:, None, None]).astype(dtype), "y": y}


RULES = {
    "mean": ("mean", {}),
    "weighted mean": ("weighted_mean", {}),
    "extrinsic on weights": ("extrinsic_mean", {"of": "weights"}),
    "extrinsic on updates": ("extrinsic_mean", {"of": "updates", "gamma": 10.0}),
    "gyro on weights": ("gyro_mean", {"of": "weights"}),
    "gyro on updates": ("gyro_mean", {"of": "updates", "gamma": 10.0}),
    "geometric median": ("geometric_median", {}),
    "krum": ("krum", {}),
    "clipped mean": ("clipped_mean", {"clip": 0.1}),
    "median": ("median", {}),
}


def any_of(rules, which):
    """The aggregator number `which`, chosen inside the program: all rules share one compile of the training."""

    def encode(update, broadcast, *, variables, key):
        return {"delta": update.delta, "weight": update.weight}

    def by(rule):
        def decode(total, cohort, state, variables, key):
            def message(delta, weight):
                update = ClientUpdate(delta, weight, jnp.int32(1), {}, {})
                return rule.encode(update, {}, variables=variables, key=key)

            messages = jax.vmap(message)(total["delta"], total["weight"])
            if rule.reads == "sum":
                messages = jax.tree.map(lambda x: jnp.sum(x, 0), messages)
            return rule.decode(messages, cohort, {}, variables=variables, round=0, key=key)[0]

        return decode

    def decode(total, cohort, state, *, variables, round, key):
        return jax.lax.switch(which, [by(r) for r in rules], total, cohort, state, variables, key), state, {}

    nothing = lambda _: {}
    return Aggregator(nothing, nothing, encode, decode, reads="each")


@functools.cache
def program(dtype, reduced, names):
    """(run, begin, expand): rounds with momentum kept, weight decay, FedProx and a momentum server."""
    arrays, task = inputs(dtype), network(dtype)
    full_start = task.init(jax.random.key(0), {"x": arrays["x"][:1]})
    expand = lambda v: v
    if reduced:
        spanned = input_span.in_span(task, arrays["x"])
        assert spanned.x.shape == (CASES, CASES + 1) and spanned.x.dtype == dtype
        arrays, task, expand = {**arrays, "x": spanned.x}, spanned.task, lambda v: spanned.expand(v, full_start)
    client = local_sgd(task, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.05, mu=0.3, keep_optimizer=True)
    rules = [aggregation.make(RULES[name][0], **RULES[name][1]) for name in names]

    def made(which):
        rule = any_of(rules, which)
        return parts(client, arrays, aggregator=rule, server=server.make(momentum=0.5), clients=len(SIZES))

    @quick_jit
    def run(state, plan, which):
        one = lambda t, s: round.one_round(made(which), s, plan, client_axis.Lanes())[0]
        return jax.lax.fori_loop(0, ROUNDS, one, state)

    return run, start(made(0), task, arrays, clients=len(SIZES)), expand


def trained(rule, dtype, reduced):
    """(start, end), both in full dimension."""
    names = tuple(RULES) if dtype == np.float64 else (rule,)
    run, begin, expand = program(dtype, reduced, names)
    end = run(begin, plan(SIZES), jnp.int32(names.index(rule)))
    return jax.tree.map(np.asarray, (expand(begin.variables), expand(end.variables)))


@pytest.mark.parametrize("rule", [r for r in RULES if r != "median"])
def test_float64_runs_agree_to_1e_9(rule):
    with jax.enable_x64(True):
        start_full, full = trained(rule, np.float64, False)
        start_span, span = trained(rule, np.float64, True)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves((full, span)))
    assert distance(start_full, start_span) < 1e-12
    assert distance(full, start_full) > 1e-2  # it has learned something
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(span)):
        assert distance(a, b) < 1e-9


def test_float32_runs_agree_to_1e_4():
    full, span = (trained("extrinsic on weights", np.float32, reduced)[1] for reduced in (False, True))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(span))
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(span)):
        assert distance(a, b) < 1e-4


def test_a_coordinate_wise_rule_does_not_agree():
    with jax.enable_x64(True):
        full, span = (trained("median", np.float64, reduced)[1] for reduced in (False, True))
    assert distance(full, span) > 1e-3


# The basis


@pytest.mark.parametrize("dtype, error", [(np.float64, 1e-13), (np.float32, 1e-6)])
def test_the_basis_is_orthonormal_and_exact(dtype, error):
    x = inputs(dtype)["x"]
    z, q = input_span.basis(x)
    assert z.dtype == q.dtype == dtype and q.shape == (CASES, WIDTH)
    np.testing.assert_allclose(q @ q.T, np.eye(CASES), atol=error)
    np.testing.assert_allclose(z @ q, x.reshape(CASES, -1), atol=20 * error)


def test_dependent_cases_need_fewer_coordinates():
    x = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    z, q = input_span.basis(np.concatenate([x, x, x[:1] + x[1:2]]))
    assert z.shape == (7, 3) and q.shape == (3, 20)
    z, q = input_span.basis(np.zeros((4, 20), np.float32))
    assert z.shape == (4, 1) and not np.any(z)


def test_no_learned_number_depends_on_cases_that_do_not_train():
    """The basis holds all cases; adding one that nobody trains on changes nothing but rounding."""
    with jax.enable_x64(True):
        x, task = inputs(np.float64)["x"], network(np.float64)
        batch = {"x": x[:4], "y": inputs(np.float64)["y"][:4], "mask": np.ones(4)}
        full = task.init(jax.random.key(0), batch)

        def step(cases):
            spanned = input_span.in_span(task, cases)
            mine = {**batch, "x": jnp.asarray(spanned.x[:4])}
            variables = spanned.task.init(jax.random.key(0), mine)
            grads = jax.jit(jax.grad(lambda v: task.loss(v, mine, None)[0]))(variables)
            return spanned.expand(jax.tree.map(lambda w, g: w - 0.5 * g, variables, grads), full)

        few, many = step(x[:4]), step(x)
    assert distance(few, many) < 1e-12
    assert distance(few, full) > 1e-3


# Where experiment.build uses it


def federation(width):
    rng = np.random.default_rng(0)
    ids = tuple(f"case{i}" for i in range(12))
    train = tuple(np.arange(12).reshape(3, 4))
    arrays = {"x": rng.normal(size=(12, width)).astype(np.float32), "y": np.tile([0, 1], 6).astype(np.int32)}
    split = federated.Split("fold0", train, train)
    return federated.FederatedData(arrays, ids, ids, ("A", "B", "C"), np.repeat(np.arange(3), 4), (split,), ("n", "y"))


def built(width=30, **changes):
    c = config.base()
    c.model, c.task = config.slot("model", "mlp", hidden=(4,)), config.slot("task", "classification")
    for name, value in changes.items():
        if name == "corruption":
            c.corruption.kind, c.corruption.site = value, "B"
        elif name == "input_span":
            c.input_span = value
        else:
            c[name] = config.slot(name, **value)
    return experiment.build(c, federation(width))


ON = "first layer in the span of the cases (30 -> 13 inputs)"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregator": {"name": "gyro_mean"}},
        {"client": {"name": "local_sgd", "momentum": 0.9, "weight_decay": 0.01, "mu": 0.1, "keep_optimizer": True}},
        {"server": {"name": "sgd", "momentum": 0.9}},
        {"corruption": "label_flip"},
        {"corruption": "scale"},
    ],
)
def test_build_switches_it_on_where_every_part_commutes_with_rotations(changes):
    made = built(**changes)
    assert ON in made.how.text
    assert jax.eval_shape(made.initial).variables["params"]["Dense_0"]["kernel"].shape == (1, 13, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregator": {"name": "median"}},
        {"aggregator": {"name": "trimmed_mean"}},
        {"client": {"name": "local_sgd", "optimizer": "adam"}},
        {"server": {"name": "adam"}},
        {"server": {"name": "adagrad"}},
        {"corruption": "random"},
        {"input_span": "off"},
        {"width": 23},  # fewer than two inputs per case: it would not pay
    ],
)
def test_build_leaves_it_off_elsewhere(changes):
    made = built(**changes)
    assert "span" not in made.how.text
    width = changes.get("width", 30)
    assert jax.eval_shape(made.initial).variables["params"]["Dense_0"]["kernel"].shape == (1, width, 4)


def test_a_task_without_a_linear_first_layer_is_left_alone():
    assert not input_span.applies(network(np.float32)._replace(linear_input=""), {"orthogonal"})
    assert input_span.applies(network(np.float32), {"orthogonal"}, {"orthogonal", "hull"})
    assert not input_span.applies(network(np.float32), {"orthogonal"}, {"hull"})
