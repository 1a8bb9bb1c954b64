"""FedNova against its paper's formulas: equal steps, unequal steps, momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import aggregation
from fedjax_seg.aggregation.normalised import accumulated
from fedjax_seg.core.types import ClientUpdate, Cohort


def aggregated(compiled, name, deltas, weights, steps, present=None, **options):
    """The delta of [C, D] updates."""
    aggregator = aggregation.make(name, **options)
    present = np.ones(len(weights), bool) if present is None else present

    @compiled
    def run(deltas, weights, steps, present):
        encode = lambda d, w, s: aggregator.encode(
            ClientUpdate({"params": {"w": d}}, w, s, {}, {}), {}, variables={}, key=None
        )
        messages = jax.vmap(encode)(deltas, weights, steps)
        total = jax.tree.map(lambda m: jnp.tensordot(present.astype(jnp.float32), m, 1), messages)
        cohort, server = Cohort(jnp.arange(len(weights)), present), {"params": {"w": jnp.zeros(deltas.shape[1])}}
        return aggregator.decode(total, cohort, {}, variables=server, round=0, key=None)

    delta, _, metrics = run(np.float32(deltas), np.float32(weights), np.int32(steps), present)
    return np.asarray(delta["params"]["w"]), metrics


DELTAS = np.random.default_rng(2).normal(size=(3, 5))


def test_equal_steps_are_the_weighted_mean(compiled):
    found, metrics = aggregated(compiled, "fednova", DELTAS, [3, 1, 8], [5, 5, 5])
    plain, _ = aggregated(compiled, "weighted_mean", DELTAS, [3, 1, 8], [5, 5, 5])
    np.testing.assert_allclose(found, plain, rtol=1e-6)
    assert metrics["effective_steps"] == 5


def test_unequal_steps_by_hand(compiled):
    """p = (1/4, 3/4), tau = (2, 10): tau_eff = 8, and the delta is 8 (p_1 d_1 / 2 + p_2 d_2 / 10)."""
    found, metrics = aggregated(compiled, "fednova", DELTAS[:2], [10, 30], [2, 10])
    np.testing.assert_allclose(found, 8 * (0.25 * DELTAS[0] / 2 + 0.75 * DELTAS[1] / 10), rtol=1e-6)
    assert metrics["effective_steps"] == 8


def test_absent_and_idle_clients_do_not_count(compiled):
    both = np.array([True, True, False])
    found, _ = aggregated(compiled, "fednova", DELTAS, [10, 30, 7], [2, 10, 4], present=both)
    np.testing.assert_allclose(found, 8 * (0.25 * DELTAS[0] / 2 + 0.75 * DELTAS[1] / 10), rtol=1e-6)
    idle, metrics = aggregated(compiled, "fednova", DELTAS * [[1], [1], [0]], [10, 30, 0], [2, 10, 0])
    np.testing.assert_allclose(idle, found, rtol=1e-6)
    assert np.isfinite(metrics["effective_steps"])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_what_momentum_accumulates(momentum):
    """||a||_1 is how far SGD of rate 1 goes on a constant gradient of 1."""
    for steps in (0, 1, 2, 7, 60):
        buffer = way = 0.0
        for _ in range(steps):
            buffer = momentum * buffer + 1
            way += buffer
        np.testing.assert_allclose(accumulated(jnp.int32(steps), momentum), way, rtol=1e-5, atol=1e-6)


def test_it_finds_the_optimum_that_fedavg_misses(compiled):
    """Clients f_i = (w - m_i)^2 / 2 with m = (0, 1), equal shares, 1 and 10 steps of rate 0.02: the optimum is 0.5.

    A round moves client i by -r_i (w - m_i), r_i = 1 - 0.98^tau_i, so the mean of the updates rests at
    r_2 / (r_1 + r_2) = 0.90, and FedNova at the same with r_i / tau_i: 0.48, off by the order of the rate.
    """
    m, tau = np.array([0.0, 1.0]), np.array([1, 10])
    r = 1 - 0.98**tau
    for name, rests, near in (("fednova", (r[1] / 10) / (r[0] + r[1] / 10), True), ("mean", r[1] / r.sum(), False)):
        deltas = -r * (rests - m)
        delta, _ = aggregated(compiled, name, deltas[:, None], [1, 1], tau)
        np.testing.assert_allclose(delta, 0, atol=1e-7)  # at rest where the closed form says
        moved, _ = aggregated(compiled, name, -r[:, None] * (0.5 - m[:, None]), [1, 1], tau)
        assert (abs(rests - 0.5) < 0.03) == near and (abs(moved[0]) < 0.005) == near
