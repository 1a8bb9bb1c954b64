"""Server optimisers against the formulas of Reddi et al. (Algorithm 2), written out in numpy, over three rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import server

ROUNDS = 3
RNG = np.random.default_rng(4)
START = {"kernel": RNG.normal(size=(3, 2)), "bias": RNG.normal(size=2)}
DELTAS = [{name: 0.1 * RNG.normal(size=x.shape) for name, x in START.items()} for _ in range(ROUNDS)]


def fedavg(d, t, s, lr):
    return lr * d, s


def fedavgm(d, t, s, lr, momentum):
    s = momentum * s.get("m", 0) + d
    return lr * s, {"m": s}


def fedadam(d, t, s, lr, b1, b2, eps):
    m, v = b1 * s.get("m", 0) + (1 - b1) * d, b2 * s.get("v", 0) + (1 - b2) * d**2
    return lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), {"m": m, "v": v}


def fedyogi(d, t, s, lr, b1, b2, eps):
    # optax starts both accumulators at 1e-6; m holds gradients, which are -d
    m = b1 * s.get("m", np.full_like(d, -1e-6)) + (1 - b1) * d
    v = s.get("v", np.full_like(d, 1e-6))
    v = v - (1 - b2) * d**2 * np.sign(v - d**2)
    return lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), {"m": m, "v": v}


def fedadagrad(d, t, s, lr, eps):
    v = s.get("v", np.full_like(d, eps**2)) + d**2
    return lr * d / np.sqrt(v), {"v": v}


CASES = {
    "FedAvg": ("sgd", fedavg, {"lr": 1.0}),
    "FedAvgM": ("sgd", fedavgm, {"lr": 0.7, "momentum": 0.9}),
    "FedAdam": ("adam", fedadam, {"lr": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3}),
    "FedYogi": ("yogi", fedyogi, {"lr": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3}),
    "FedAdagrad": ("adagrad", fedadagrad, {"lr": 0.1, "eps": 1e-3}),
}


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_formulas(name):
    optimizer_name, rule, options = CASES[name]
    optimizer = server.make(optimizer_name, **options)
    variables = {"params": jax.tree.map(jnp.float32, START), "batch_stats": {"mean": jnp.ones(3), "var": jnp.ones(3)}}
    state = optimizer.init(variables["params"])
    expected, memory = dict(START), {name: {} for name in START}
    for t, delta in enumerate(DELTAS, 1):
        statistics = {"mean": 0.5 * jnp.ones(3), "var": jnp.array([-0.25, 0.0, 1.0])}
        change = {"params": jax.tree.map(jnp.float32, delta), "batch_stats": statistics}
        variables, state = server.step(optimizer, variables, change, state)
        for leaf in START:
            moved, memory[leaf] = rule(delta[leaf], t, memory[leaf], **options)
            expected[leaf] = expected[leaf] + moved
    for leaf in START:
        np.testing.assert_allclose(variables["params"][leaf], expected[leaf], rtol=2e-5, atol=1e-6)
    # batch statistics move by their plain delta, whatever the optimiser
    np.testing.assert_allclose(variables["batch_stats"]["mean"], np.full(3, 2.5), rtol=1e-6)
    np.testing.assert_allclose(variables["batch_stats"]["var"], [0.25, 1.0, 4.0], rtol=1e-6)


def test_the_state_of_the_optimiser_holds_parameters_only():
    variables = {"params": {"w": jnp.ones(3)}, "batch_stats": {"mean": jnp.ones(5)}}
    shapes = {x.shape for x in jax.tree.leaves(server.make("adam").init(variables["params"]))}
    assert shapes == {(), (3,)}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"name": "adma"}, "server.name: 'adma' given, one of 'sgd', 'adam', 'yogi', 'adagrad' expected"),
        ({"lr": float("nan")}, "server.lr: nan given"),
        ({"momentum": 1.5}, "server.momentum: 1.5 given"),
        ({"name": "adam", "momentum": 0.9}, "server.momentum: for 'sgd' only, 'adam' given"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        server.make(**options)
