"""Local training: optimisers by formula, FedProx and FedBN as the papers define them, schedules over global rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_federation import equal, in_order, quadratic, quick_jit

from fedjax_seg import clients
from fedjax_seg.clients.local_sgd import OPTIMIZERS, learning_rate, local_sgd, proximal
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError

START = np.array([0.5, 0.125, -0.25])
TARGETS = np.random.default_rng(3).normal(size=(12, 3))
STEPS = 3


def training(options, size, same_target=False):
    """Round 2 of a client with `size` cases on the quadratic task, batches of 4: w, the update, what is kept."""
    x = np.repeat(TARGETS[:1], 12, 0) if same_target else TARGETS
    client, variables = local_sgd(quadratic(), **options), quadratic().init(None, None)
    local = in_order({"x": jnp.float32(x)}, 4)(jnp.arange(12), size, jnp.int32(0), None)
    personal = client.init(variables)
    update, kept = client.train(variables, personal, local, jax.random.key(0), round=jnp.int32(2), broadcast={})
    return variables["params"]["w"] + update.delta["params"]["w"], update, kept


def trained(options, steps=STEPS, same_target=False):
    return quick_jit(lambda size: training(options, size, same_target))(jnp.int32(4 * steps))


def by_steps(rule, steps=STEPS):
    """w after applying `rule(w, gradient, t, memory) -> (w, memory)` to the quadratic's batches, in numpy."""
    w, memory = START, None
    for t in range(1, steps + 1):
        gradient = w - TARGETS[4 * (t - 1) : 4 * t].mean(0)
        w, memory = rule(w, gradient, t, memory)
    return w


# Optimisers


def adam(w, g, t, memory, lr=0.1, decay=0.0, b1=0.9, b2=0.999, eps=1e-8):
    """torch.optim.AdamW as its documentation writes it; decay 0 is Adam."""
    m, v = memory or (0, 0)
    w = w - lr * decay * w
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    return w - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), (m, v)


def lion(w, g, t, memory, lr=0.1, decay=0.0, b1=0.9, b2=0.99):
    """Chen et al. 2023, Algorithm 2."""
    m = 0 if memory is None else memory
    return w - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * w), b2 * m + (1 - b2) * g


def clipped(w, g, t, memory, lr=0.1, most=0.3):
    norm = np.linalg.norm(g)
    return w - lr * g * min(1, most / norm), None


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"optimizer": "adam"}, adam),
        ({"optimizer": "adamw"}, adam),  # a weight decay of 0 is none, not the library's default
        ({"optimizer": "adamw", "weight_decay": 0.5}, functools.partial(adam, decay=0.5)),
        (
            {"optimizer": "adam", "weight_decay": 0.5},  # coupled: the decay joins the gradient, as torch.optim.Adam
            lambda w, g, t, s: adam(w, g + 0.5 * w, t, s),
        ),
        ({"optimizer": "lion"}, lion),
        ({"clip": 0.3}, clipped),
    ],
    ids=["adam", "adamw", "adamw-decay", "adam-decay", "lion", "clip"],
)
def test_optimisers_follow_their_documented_formulas(options, rule):
    w, update, _ = trained({"lr": 0.1, **options})
    np.testing.assert_allclose(w, by_steps(rule), rtol=2e-5, atol=1e-6)
    assert (update.weight, update.steps) == (12, 3) and update.extra == {}


def test_every_optimiser_equals_optax_at_the_same_learning_rate():
    """The schedule multiplies the updates of a chain at rate 1: right only for optimisers linear in the rate."""
    names = sorted(set(OPTIMIZERS) - {"sgd", "adam", "adamw", "lion"})

    def alone(chain):
        w = {"w": jnp.float32(START)}
        state = chain.init(w)
        for t in range(2):
            gradient = {"w": w["w"] - jnp.float32(TARGETS[4 * t : 4 * t + 4].mean(0))}
            updates, state = chain.update(gradient, state, w)
            w = optax.apply_updates(w, updates)
        return w["w"]

    @quick_jit
    def both(size):
        found = [training({"lr": 0.05, "optimizer": name}, size)[0] for name in names]
        return found, [alone(getattr(optax, name)(0.05)) for name in names]

    for name, found, expected in zip(names, *both(jnp.int32(8))):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6, err_msg=name)


# FedProx


def test_the_proximal_term_is_mu_times_the_distance_from_the_server():
    grads, w, anchor = ({"a": jnp.float32(RNG.normal(size=(2, 3))), "b": jnp.float32(RNG.normal())} for RNG in _three())
    found, _ = proximal(0.3).update(grads, optax.EmptyState(), w, anchor=anchor)
    expected = jax.tree.map(lambda g, p, q: np.asarray(g) + 0.3 * (np.asarray(p) - np.asarray(q)), grads, w, anchor)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def _three():
    return (np.random.default_rng(i) for i in range(3))


def test_fedprox_on_a_quadratic_has_its_closed_form():
    """w_s - w* = (1 - lr (1 + mu))^s (w_0 - w*) with w* = (a + mu w_0) / (1 + mu): the anchor is the server's w_0."""
    lr, mu, a = 0.2, 0.7, TARGETS[0]
    w, _, _ = trained({"lr": lr, "mu": mu}, same_target=True)
    optimum = (a + mu * START) / (1 + mu)
    np.testing.assert_allclose(w, optimum + (1 - lr * (1 + mu)) ** STEPS * (START - optimum), rtol=1e-5)


def test_fedprox_joins_the_gradient_before_momentum():
    def rule(w, g, t, buffer):
        buffer = (0 if buffer is None else 0.9 * buffer) + g + 0.7 * (w - START)
        return w - 0.1 * buffer, buffer

    w, _, _ = trained({"lr": 0.1, "mu": 0.7, "momentum": 0.9})
    np.testing.assert_allclose(w, by_steps(rule), rtol=1e-5)


def test_mu_of_zero_is_fedavg_to_the_bit():
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "keep_optimizer": True}
    equal(trained({**options, "mu": 0.0}), trained(options))


# Schedules


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("constant", {}, lambda t: 0.4),
        ("cosine", {"rounds": 10}, lambda t: 0.2 * (1 + np.cos(np.pi * min(t, 10) / 10))),
        ("linear", {"rounds": 10}, lambda t: 0.4 * (1 - min(t, 10) / 10)),
        ("exponential", {"decay": 0.9}, lambda t: 0.4 * 0.9**t),
        ("step", {"decay": 0.5, "every": 3}, lambda t: 0.4 * 0.5 ** (t // 3)),
    ],
)
def test_schedules_by_formula(name, options, expected):
    rate = learning_rate(name, 0.4, **{"rounds": 0, "decay": 1.0, "every": 1} | options)
    for t in (0, 1, 2, 3, 5, 6, 10, 12):
        np.testing.assert_allclose(rate(jnp.int32(t)), expected(t), rtol=1e-6, atol=1e-8)


def test_the_rate_of_a_round_scales_its_steps():
    """Round 2 of the training above: three SGD steps at 0.4 * 0.5^2."""
    options = {"lr": 0.4, "schedule": "exponential", "schedule_decay": 0.5}
    w, update, _ = trained(options)
    np.testing.assert_allclose(w, by_steps(lambda w, g, t, s: (w - 0.1 * g, s)), rtol=1e-6)
    np.testing.assert_allclose(update.metrics["lr"], 0.1, rtol=1e-6)


# What stays at home


def test_kept_state_and_local_leaves_are_named_and_never_sent():
    options = {"lr": 0.1, "momentum": 0.9}
    variables = quadratic().init(None, None)
    assert local_sgd(quadratic(), **options).init(variables) == {}
    assert set(local_sgd(quadratic(), **options, keep_optimizer=True).init(variables)) == {"optimizer/0/0/trace/w"}
    client = local_sgd(quadratic(), **options, local=("params/w",))
    assert set(client.init(variables)) == {"leaf/params/w"}
    after, update, kept = trained({**options, "local": ("params/w",)})
    assert not np.any(update.delta["params"]["w"])  # nothing leaves
    np.testing.assert_allclose(after, START)
    moved, _, _ = trained(options)
    np.testing.assert_array_equal(kept["leaf/params/w"], moved)  # but the client has learned
    equal(client.personalise(variables, kept)["params"]["w"], kept["leaf/params/w"])


def test_no_step_changes_nothing():
    w, update, kept = trained({"lr": 0.1, "momentum": 0.9, "keep_optimizer": True}, steps=0)
    np.testing.assert_array_equal(w, np.float32(START))
    assert (update.weight, update.steps, update.metrics["loss"]) == (0, 0, 0)
    assert not np.any(kept["optimizer/0/0/trace/w"])


def test_only_sgd_commutes_with_rotations():
    for name in OPTIMIZERS:
        assert ("orthogonal" in local_sgd(quadratic(), optimizer=name).properties) == (name == "sgd")
    assert local_sgd(quadratic()).mechanism is None


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lr": float("nan")}, "client.lr: nan given"),
        ({"lr": -1.0}, "client.lr: -1.0 given"),
        ({"momentum": 2.0}, "client.momentum: 2.0 given"),
        ({"mu": float("inf")}, "client.mu: inf given"),
        ({"optimizer": "sgdm"}, "client.optimizer: 'sgdm' given, one of 'sgd'"),
        ({"optimizer": "adam", "momentum": 0.9}, "client.momentum, client.nesterov: for the optimizer 'sgd' only"),
        ({"schedule": "cosin"}, "client.schedule: 'cosin' given"),
        ({"schedule": "cosine"}, "client.schedule_rounds: 0 given, an integer in"),
        ({"schedule": "step", "schedule_every": 0}, "client.schedule_every: 0 given"),
        ({"rate": 0.1}, "client 'local_sgd': unknown option 'rate'"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        clients.make("local_sgd", quadratic(), **options)


def test_paths_of_kept_leaves_follow_the_tree():
    """fnmatch patterns select by path: a norm layer, or a whole collection."""
    variables = {"params": {"Norm_0": {"scale": jnp.ones(2)}, "w": jnp.ones(3)}, "batch_stats": {"mean": jnp.ones(2)}}
    kept = local_sgd(quadratic(), local=("batch_stats/*", "*Norm*")).init(variables)
    assert set(kept) == {"leaf/batch_stats/mean", "leaf/params/Norm_0/scale"}
    assert tree.paths(variables).keys() - {k.removeprefix("leaf/") for k in kept} == {"params/w"}
