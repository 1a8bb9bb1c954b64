"""SCAFFOLD's client and aggregator together, against Algorithm 1 written out in numpy; and what goes with what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import BATCH, SIZES, cases, close, parts, plan, quadratic, runner, start

from fedjax_seg import aggregation, clients
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Batches
from fedjax_seg.federation import sampling, server

LR, DECAY, GLOBAL, ROUNDS = 0.3, 0.1, 0.7, 4
X = cases()["x"].astype(np.float64)
FIRST = np.cumsum([1, *SIZES])


def federated(option):
    """(state after ROUNDS rounds, records) of a federation in which two of four clients come to a round."""
    arrays = cases()
    client = clients.make("scaffold", quadratic(), lr=LR, weight_decay=DECAY, option=option)
    aggregator = aggregation.make("scaffold", clients=len(SIZES))
    sampler = sampling.make("uniform", len(SIZES), size=2)
    made = parts(client, arrays, aggregator=aggregator, sampler=sampler, server=server.make("sgd", lr=GLOBAL))
    state, records, _ = runner(made, capacity=ROUNDS)(start(made, quadratic(), arrays), plan(), ROUNDS)
    return state, records


def batch_means(k):
    mine = X[FIRST[k] : FIRST[k] + SIZES[k]]
    return [mine[i : i + BATCH].mean(0) for i in range(0, SIZES[k], BATCH)], mine.mean(0)


def algorithm_1(cohorts, option):
    """Karimireddy et al. 2020, Algorithm 1, with g_i(y) = y - batch mean + decay * y; lines in the comments."""
    x, c, own = np.array([0.5, 0.125, -0.25]), np.zeros(3), np.zeros((len(SIZES), 3))
    for cohort in cohorts:
        dx, dc = [], []
        for k in cohort:
            means, whole = batch_means(k)
            y = x.copy()
            for mean in means:
                y = y - LR * ((y - mean + DECAY * y) - own[k] + c)  # line 10
            if option == 1:
                new = x - whole + DECAY * x  # line 12 (i)
            else:
                new = own[k] - c + (x - y) / (len(means) * LR)  # line 12 (ii)
            dx, dc = [*dx, y - x], [*dc, new - own[k]]  # line 13
            own[k] = new
        x = x + GLOBAL * np.mean(dx, 0)  # lines 16, 17
        c = c + len(cohort) / len(SIZES) * np.mean(dc, 0)
    return x, c, own


@pytest.mark.parametrize("option", [2, 1])
def test_it_is_algorithm_1(option):
    state, records = federated(option)
    cohorts = np.asarray(records["cohort"]["clients"])
    assert len({tuple(c) for c in cohorts}) > 1 and cohorts.shape == (ROUNDS, 2)
    x, c, own = algorithm_1(cohorts, option)
    np.testing.assert_allclose(state.variables["params"]["w"], x, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.aggregator["control"]["w"], c, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.personal["control/w"], own, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(c, own.mean(0), atol=1e-12)  # the invariant behind N
    np.testing.assert_allclose(records["aggregator"]["control_norm"][-1], np.linalg.norm(c), rtol=2e-5)


def test_with_identical_clients_it_is_sgd():
    """c_i = c for all of them, so the corrections vanish and four rounds are SGD on the common batches."""
    sizes, mine = (7, 7, 7), np.random.default_rng(1).normal(size=(7, 3))
    arrays = cases(sizes)
    arrays["x"] = np.float32(np.concatenate([np.zeros((1, 3)), mine, mine, mine]))
    client = clients.make("scaffold", quadratic(), lr=LR, weight_decay=DECAY)
    made = parts(client, arrays, aggregator=aggregation.make("scaffold", clients=3), clients=3)
    state, _, _ = runner(made, capacity=ROUNDS)(start(made, quadratic(), arrays, clients=3), plan(sizes), ROUNDS)
    w = np.array([0.5, 0.125, -0.25])
    for _ in range(ROUNDS):
        for batch in (mine[:BATCH], mine[BATCH:]):
            w = w - LR * (w - batch.mean(0) + DECAY * w)
    np.testing.assert_allclose(state.variables["params"]["w"], w, rtol=1e-5, atol=1e-6)
    assert np.abs(state.aggregator["control"]["w"]).max() > 0.01


def _trained(client, steps, round):
    at = lambda step: {"x": jnp.float32(X[1:5]), "mask": jnp.ones(4)}
    batches = Batches(at, jnp.int32(steps), jnp.float32(4), jnp.int32(0))
    variables = quadratic().init(None, None)
    personal = {"control/w": jnp.array([1.0, 2.0, 3.0])}
    told = {"control": {"w": jnp.array([0.5, 0.0, -0.5])}}
    return client.train(variables, personal, batches, jax.random.key(0), round=jnp.int32(round), broadcast=told)


def test_without_a_step_or_a_rate_the_control_variate_stays():
    for option in (1, 2):
        client = clients.make("scaffold", quadratic(), option=option, schedule="linear", schedule_rounds=3)
        for steps, round in ((0, 0), (2, 3)):
            update, kept = _trained(client, steps, round)
            assert not np.any(update.extra["control"]["w"]) and not np.any(update.delta["params"]["w"])
            close(kept, {"control/w": jnp.array([1.0, 2.0, 3.0])})


def test_one_half_without_the_other_is_one_line():
    variants = {name: clients.make(name, quadratic()) for name in ("local_sgd", "scaffold")}
    rules = {"mean": aggregation.make("mean"), "scaffold": aggregation.make("scaffold", clients=4)}
    aggregation.check_pair(variants["scaffold"], rules["scaffold"])
    aggregation.check_pair(variants["local_sgd"], rules["mean"])
    with pytest.raises(UserError, match=r"client.name: 'scaffold' given without.*--config.aggregator.name=scaffold"):
        aggregation.check_pair(variants["scaffold"], rules["mean"])
    with pytest.raises(UserError, match=r"aggregator.name: 'scaffold' given without.*--config.client.name=scaffold"):
        aggregation.check_pair(variants["local_sgd"], rules["scaffold"])
    # and where nobody has checked, tracing does
    for client, rule in (("scaffold", "mean"), ("local_sgd", "scaffold")):
        made = parts(variants[client], cases(), aggregator=rules[rule])
        with pytest.raises(UserError, match="'scaffold' given without its other half"):
            runner(made)(start(made, quadratic(), cases()), plan(), 1)


def test_bad_options_are_one_line():
    with pytest.raises(UserError, match=r"client.option: 3 given, one of 1, 2"):
        clients.make("scaffold", quadratic(), option=3)
    with pytest.raises(UserError, match="unknown option 'momentum'"):
        clients.make("scaffold", quadratic(), momentum=0.9)
    with pytest.raises(UserError, match="aggregator scaffold: clients: None given"):
        aggregation.make("scaffold")
