"""Noise on shared weights: its size by closed form, what it is added to, and that it promises nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.aggregation import make
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort
from fedjax_seg.federation import sampling
from fedjax_seg.privacy import composition

CLIENTS, WIDE, CHANNELS = 4, 40_000, 5_000
WEIGHTS = np.array([5.0, 1.0, 3.0, 1.0], np.float32)
SIGMA = 0.05
SERVER = {"params": {"w": jnp.ones(WIDE)}, "batch_stats": {"mean": jnp.zeros(CHANNELS), "var": jnp.ones(CHANNELS)}}
# Far from 0 and unlike: noise in the wrong place would be multiplied by these.
DELTAS = {
    "params": {"w": jnp.arange(1.0, 5.0)[:, None] * jnp.ones((CLIENTS, WIDE))},
    "batch_stats": {k: jnp.full((CLIENTS, CHANNELS), 2.0) for k in ("mean", "var")},
}


@functools.cache
def program(**options):
    """A round, with a key of its own for every client, as the engine gives them."""
    aggregator = make("weight_noise", **options)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(deltas, present, key):
        def encode(delta, weight, client):
            update = ClientUpdate(delta, weight, jnp.int32(1), {}, {})
            return aggregator.encode(update, {}, variables=SERVER, key=jax.random.fold_in(key, client))

        messages = jax.vmap(encode)(deltas, jnp.asarray(WEIGHTS), jnp.arange(CLIENTS))
        kept = lambda x: jnp.where(present.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
        total = jax.tree.map(lambda x: jnp.sum(kept(x), axis=0), messages)
        cohort = Cohort(jnp.arange(CLIENTS), present)
        return aggregator.decode(total, cohort, {}, variables=SERVER, round=jnp.int32(0), key=key)[0]

    return lambda deltas=DELTAS, present=(True,) * CLIENTS, seed=0: run(
        deltas, jnp.asarray(present), jax.random.key(seed)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_has_the_noise_of_its_clients_and_no_bias(weighted):
    rounds = [program(sigma=SIGMA, weighted=weighted)(seed=seed) for seed in range(8)]
    by_examples = SIGMA * np.sqrt(np.sum(WEIGHTS**2)) / np.sum(WEIGHTS)  # .03
    stddev = by_examples if weighted else SIGMA / np.sqrt(CLIENTS)  # .025
    expected = np.average([1.0, 2.0, 3.0, 4.0], weights=WEIGHTS if weighted else None)
    noise = np.stack([r["params"]["w"] for r in rounds]).astype(np.float64) - expected  # 320,000 draws
    assert np.std(noise) == pytest.approx(stddev, rel=0.01)
    assert abs(np.mean(noise)) < 4 * stddev / np.sqrt(noise.size)
    # every entry, round and client has draws of its own
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.02 and abs(np.mean(noise[:, 1:] * noise[:, :-1])) < 1e-5
    for name in ("mean", "var"):
        of_statistics = np.stack([r["batch_stats"][name] for r in rounds]) - 2.0  # 40,000 draws
        assert np.std(of_statistics) == pytest.approx(by_examples, rel=0.02)


def test_fewer_clients_leave_more_noise():
    found = program(sigma=SIGMA)(present=(True, False, False, True))["params"]["w"] - 2.5
    assert np.std(found) == pytest.approx(SIGMA / np.sqrt(2), rel=0.02)


def test_the_message_is_the_update_with_noise(compiled):
    """In float32 the same as the weights with noise, for who knows the server's weights."""
    update = ClientUpdate(jax.tree.map(lambda x: x[0], DELTAS), jnp.float32(5), jnp.int32(1), {}, {})
    encode = compiled(lambda key: make("weight_noise", sigma=2.0).encode(update, {}, variables=SERVER, key=key))
    one, two = (encode(jax.random.key(k)) for k in (0, 1))
    assert set(one) == set(make("mean").encode(update, {}, variables=SERVER, key=None))
    for message in (one, two):
        assert np.std(message["value"]["w"] - 1.0) == pytest.approx(2.0, rel=0.02)
        assert np.std(message["statistics"]["batch_stats"]["mean"] / 5 - 2.0) == pytest.approx(2.0, rel=0.05)
    assert abs(np.corrcoef(one["value"]["w"], two["value"]["w"])[0, 1]) < 0.03
    jax.tree.map(np.testing.assert_array_equal, one, encode(jax.random.key(0)))


@pytest.mark.parametrize("weighted", [False, True])
def test_without_noise_it_is_the_mean(weighted):
    plain = make("weighted_mean" if weighted else "mean")
    aggregator = make("weight_noise", sigma=0.0, weighted=weighted)
    update = ClientUpdate(jax.tree.map(lambda x: x[1], DELTAS), jnp.float32(5), jnp.int32(1), {}, {})
    messages = [a.encode(update, {}, variables=SERVER, key=jax.random.key(0)) for a in (aggregator, plain)]
    jax.tree.map(np.testing.assert_array_equal, *messages)
    assert aggregator.properties == plain.properties
    assert make("weight_noise", weighted=weighted).properties == ({"weighted"} if weighted else set())


def test_a_variance_never_falls_below_zero():
    shrunk = {**DELTAS, "batch_stats": {"mean": jnp.zeros((CLIENTS, CHANNELS)), "var": jnp.full((4, CHANNELS), -1.0)}}
    moved = program(sigma=SIGMA)(shrunk)["batch_stats"]
    variance = 1.0 + np.asarray(moved["var"])
    assert variance.min() == 0 and 0.45 < np.mean(variance == 0) < 0.55 and variance.max() > 0.05
    assert np.min(moved["mean"]) < -0.05  # a mean may
    jax.tree.map(
        np.testing.assert_array_equal, program(sigma=SIGMA)(shrunk, (False,) * 4), jax.tree.map(jnp.zeros_like, SERVER)
    )


def test_it_claims_nothing():
    aggregator = make("weight_noise", sigma=0.1)
    mechanism = aggregator.mechanism
    assert aggregator.bound is None and aggregator.reads == "sum" and mechanism.local and not mechanism.formal
    ledger = composition.round_ledger(
        mechanism, sampling.make("full", 4), clients=4, rounds=10, smallest_cohort=4, delta=1e-5
    )
    assert ledger["epsilon"] is None and ledger["sensitivity"] is None and ledger["rows"] == []
    (why,) = ledger["reasons"]
    assert "standard deviation 0.1 is added" in why and "sigma alone states no epsilon" in why
    assert make("weight_noise", sigma=0.0).mechanism.reasons == ("there is no noise",)


@pytest.mark.parametrize(("options", "wrong"), [({"sigma": -0.1}, "sigma: -0.1"), ({"weighted": 1.5}, "weighted: 1.5")])
def test_what_is_refused(options, wrong):
    with pytest.raises(UserError, match=f"aggregator weight_noise: {wrong} given, .* expected"):
        make("weight_noise", **options)
