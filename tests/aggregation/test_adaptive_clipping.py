"""DP-FedAvg with a clip that follows a quantile: its bound, its two noises, where the clip goes, what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation.adaptive_clipping import adaptive_dp_fedavg, joint_bound
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort

VARIABLES = {"params": {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4)}}


def quick(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def message_of(aggregator, delta, clip, weight=7.0):
    update = ClientUpdate({"params": delta}, jnp.float32(weight), jnp.int32(1), {}, {})
    told = {"clip": jnp.float32(clip)}
    return aggregator.encode(update, told, variables=VARIABLES, key=jax.random.key(0))


def norm_of(values):
    return math.sqrt(sum(float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(values)))


# z, sigma_b -> z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2 of Andrew et al. (2021), Theorem 1.
NOISES = [
    (1.0, 2.0, 1 / math.sqrt(1 - 1 / 16)),
    (1.0, 0.6, 1 / math.sqrt(1 - 1 / 1.44)),
    (3.0, 5.0, 3 / math.sqrt(0.91)),
]


def test_the_table_has_the_values_of_the_notes():
    assert [round(z_delta, 3) for *_, z_delta in NOISES[:2]] == [1.033, 1.809]


@pytest.mark.parametrize("z, sigma, z_delta", NOISES)
def test_one_mechanism_puts_the_papers_noise_on_both_parts(z, sigma, z_delta):
    """The standard deviation is one number; on the update it is z_delta, and divided by s (the bit's) it is sigma_b."""
    made = adaptive_dp_fedavg(1.0, noise_multiplier=z, count_noise=sigma, expected_clients=100.0)
    bit = 2 * float(message_of(made, VARIABLES["params"], 1.0)["bit"])  # an update of 0 is within every clip: s/2
    stddev = made.mechanism.noise_multiplier * made.mechanism.sensitivity
    assert stddev == pytest.approx(z_delta, rel=1e-6)
    assert stddev / bit == pytest.approx(sigma, rel=1e-6)
    assert made.bound.value == made.mechanism.sensitivity == pytest.approx(math.sqrt(1 + bit**2 / 4), rel=1e-6)
    assert made.mechanism[:5] == ("client", pytest.approx(z_delta / z), z, "zero-out", True)
    assert made.bound == joint_bound(z_delta / sigma)._replace(value=made.bound.value, proof=made.bound.proof)


def test_the_noise_of_a_release_has_both_scales():
    made = adaptive_dp_fedavg(1.0, noise_multiplier=1.0, count_noise=2.0, expected_clients=40.0, rate=0.5)
    variables = {"params": {"w": jnp.zeros(50)}}
    bit = 2 * float(message_of(made, VARIABLES["params"], 1.0)["bit"])
    total = {"value": {"w": jnp.full(50, 3.0)}, "bit": jnp.float32(bit * 10)}  # 30 of 40 within

    @quick
    @jax.vmap
    def release(key):
        state = {"clip": jnp.float32(0.2)}
        cohort = Cohort(jnp.arange(1), jnp.ones(1, bool))
        return made.decode(total, cohort, state, variables=variables, round=jnp.int32(0), key=key)

    delta, state, metrics = release(jax.vmap(jax.random.key)(jnp.arange(400)))
    on_update = (np.asarray(delta["params"]["w"]) * 40 / 0.2 - 3.0) / (1 / math.sqrt(1 - 1 / 16))
    share = 0.5 - np.log(np.asarray(state["clip"]) / 0.2) / 0.5  # C exp(-rate (b~ - quantile)) solved for b~
    on_count = (share - 0.75) * 40 / 2.0
    for noise in (on_update.ravel(), on_count):
        assert 1e-4 < scipy.stats.chi2.sf(np.sum(noise**2), noise.size) < 1 - 1e-4
        assert scipy.stats.kstest(noise, "norm").pvalue > 1e-4
    np.testing.assert_array_equal(metrics["clip"], np.float32(0.2))


HOSTILE = (0.0, 1.0, -1e30, 3e38, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("clip", [1e-10, 0.3, 1e10])
def test_whatever_a_client_does_its_message_is_within_the_bound(clip):
    made = adaptive_dp_fedavg(1.0, noise_multiplier=1.0, count_noise=0.6, expected_clients=100.0)
    send = quick(lambda delta: message_of(made, delta, clip))
    for value in HOSTILE:
        message = send({"a": jnp.full((3, 2), value), "b": jnp.arange(4.0)})
        assert norm_of(message) <= made.bound.value * (1 + 1e-6)
        assert set(message) == {"value", "bit"}  # neither the norm nor the number of examples leaves the client
        inside = clip == 1e10 and value not in (-1e30, float(np.float32(3e38)), 3e38)
        assert np.sign(message["bit"]) == (1 if inside else -1)
        if not inside:
            assert norm_of(message["value"]) == pytest.approx(1, rel=1e-5)
            assert norm_of(message) == pytest.approx(made.bound.value, rel=1e-5)  # the bound is tight


def test_a_client_without_examples_sends_zeros():
    made = adaptive_dp_fedavg(1.0, noise_multiplier=0.0, expected_clients=10.0)
    assert norm_of(message_of(made, {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}, 1.0, weight=0.0)) == 0


@settings(deadline=None, max_examples=20)
@given(st.floats(-8, 8), st.floats(-8, 8), st.integers(0, 99))
def test_the_value_is_the_clipped_update_over_the_clip_and_the_bit_says_whether(power, clip_power, seed):
    made = adaptive_dp_fedavg(1.0, noise_multiplier=0.0, expected_clients=10.0)
    rng, clip = np.random.default_rng(seed), np.float32(10.0**clip_power)
    delta = {"a": rng.normal(size=(3, 2)) * 10.0**power, "b": rng.normal(size=4) * 10.0**power}
    delta = {k: x.astype(np.float32) for k, x in delta.items()}
    message = message_of(made, jax.tree.map(jnp.asarray, delta), clip)
    whole = np.concatenate([delta["a"].ravel(), delta["b"]]).astype(np.float64)
    norm = np.linalg.norm(whole)
    expected = whole * min(1, clip / norm) / clip
    found = np.concatenate([np.ravel(message["value"]["a"]), message["value"]["b"]])
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=1e-30)
    assert message["bit"] == (0.5 if norm <= clip else -0.5)  # s = 1 without noise


def test_a_round_without_noise_is_algorithm_1():
    """By hand: norms 1, 2, 2.4, 10 and C = 2.5: three of four within; sum of clipped / 4; C exp(-0.2 (3/4 - 0.6))."""
    made = adaptive_dp_fedavg(2.5, noise_multiplier=0.0, smallest_cohort=4, quantile=0.6)
    variables = {"params": {"w": jnp.zeros(2)}}
    state = made.init(variables)
    assert made.broadcast(state) == {"clip": 2.5}
    send = quick(lambda w: message_of(made, {"w": w}, 2.5))
    messages = [send(jnp.array(w)) for w in ([1.0, 0], [0, 2.0], [2.4, 0], [6.0, 8.0])]
    total = jax.tree.map(lambda *x: sum(x), *messages)
    cohort = Cohort(jnp.arange(4), jnp.ones(4, bool))
    delta, after, metrics = made.decode(
        total, cohort, state, variables=variables, round=jnp.int32(0), key=jax.random.key(0)
    )
    np.testing.assert_allclose(delta["params"]["w"], np.array([1 + 2.4 + 1.5, 2.0 + 2.0]) / 4, rtol=1e-6)
    assert float(after["clip"]) == pytest.approx(2.5 * math.exp(-0.2 * 0.15), rel=1e-6)
    assert float(metrics["clip"]) == 2.5 and not made.mechanism.formal and made.mechanism.reasons


@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("quantile", [0.5, 0.8])
def test_the_clip_goes_to_the_quantile_of_the_norms(z, quantile):
    """400 clients whose norms are the quantiles of a log-normal law: the clip ends at exp(1.5 Phi^-1(quantile))."""
    made = adaptive_dp_fedavg(0.01, noise_multiplier=z, expected_clients=400.0, quantile=quantile)
    norms = np.exp(1.5 * scipy.stats.norm.ppf((np.arange(400) + 0.5) / 400))
    deltas = {"w": jnp.asarray(norms[:, None] * [0.6, 0.8], jnp.float32)}
    variables = {"params": {"w": jnp.zeros(2)}}
    cohort = Cohort(jnp.arange(400), jnp.ones(400, bool))

    def one(state, round):
        told = made.broadcast(state)
        send = lambda d: made.encode(
            ClientUpdate({"params": d}, jnp.float32(1), jnp.int32(1), {}, {}), told, variables=variables, key=None
        )
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(send)(deltas))
        key = jax.random.fold_in(jax.random.key(5), round)
        _, state, _ = made.decode(total, cohort, state, variables=variables, round=round, key=key)
        return state, state["clip"]

    clips = quick(lambda: jax.lax.scan(one, made.init(variables), jnp.arange(200))[1])()
    target = np.exp(1.5 * scipy.stats.norm.ppf(quantile))
    # Started 0.01: far below. Noise of n/20 on the count moves log C by 0.01 a round, which the pull holds together.
    assert np.exp(np.mean(np.log(clips[-60:]))) == pytest.approx(target, rel=0.02 if z == 0 else 0.1)
    assert (np.std(np.log(clips[-60:])) < 5e-3) == (z == 0)


def test_the_clip_stays_a_number_when_counts_are_one_sided():
    made = adaptive_dp_fedavg(1e10, noise_multiplier=0.0, expected_clients=1.0, rate=2.0)
    variables, cohort = {"params": {"w": jnp.zeros(1)}}, Cohort(jnp.arange(1), jnp.ones(1, bool))
    for bits, start, end in ((-400.0, 1e10, 1e10), (400.0, 1e-10, 1e-10), (400.0, 1.0, 1e-10)):
        total = {"value": {"w": jnp.zeros(1)}, "bit": jnp.float32(bits)}
        state = {"clip": jnp.float32(start)}
        key = jax.random.key(0)
        after = made.decode(total, cohort, state, variables=variables, round=jnp.int32(0), key=key)[1]
        assert float(after["clip"]) == pytest.approx(end, rel=1e-6)


def test_the_count_gets_the_papers_noise_unless_the_model_would_pay_too_much():
    for n, z, sigma in ((400.0, 1.0, 20.0), (40.0, 4.0, 4 / math.sqrt(2)), (100.0, 1.0, 5.0)):
        made = adaptive_dp_fedavg(1.0, noise_multiplier=z, expected_clients=n)
        z_delta = (z**-2 - (2 * sigma) ** -2) ** -0.5
        assert made.mechanism.sensitivity == pytest.approx(z_delta / z)
        assert z_delta <= math.sqrt(2) * z * (1 + 1e-9)
    assert adaptive_dp_fedavg(1.0, epsilon=1.0, expected_clients=60.0).mechanism.noise_multiplier == pytest.approx(
        3.7306, abs=1e-4
    )


REFUSED = [
    ({"expected_clients": 6.0, "noise_multiplier": 3.73}, "no signal for the clip; take a fixed clip .dp_fedavg.,"),
    ({"expected_clients": 6.0, "epsilon": 1.0}, "found on a count of 6 clients, at most 0.1 of them = 0.6 expected"),
    ({"expected_clients": 100.0, "noise_multiplier": 1.0, "count_noise": 20.0}, "no signal"),
    ({"noise_multiplier": 1.0, "count_noise": 0.5}, "count_noise: 0.5 given, a number above .* a fixed clip"),
    ({"noise_multiplier": 1.0, "clip": 0.0}, "clip: 0.0 given"),
    ({"noise_multiplier": 1.0, "quantile": 1.0}, "quantile: 1.0 given"),
    ({"noise_multiplier": 1.0, "rate": 0.0}, "rate: 0.0 given"),
    ({"noise_multiplier": 1.0, "expected_clients": None, "smallest_cohort": 0}, "expected_clients: None given"),
    ({}, "neither of noise_multiplier and epsilon"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_says_why(options, message):
    with pytest.raises(UserError, match=message) as error:
        adaptive_dp_fedavg(**{"clip": 1.0, "expected_clients": 200.0, **options})
    assert "\n" not in str(error.value) and str(error.value).startswith("aggregator adaptive_dp_fedavg: ")


def test_few_hospitals_may_do_it_where_the_noise_is_small():
    assert adaptive_dp_fedavg(1.0, noise_multiplier=0.5, smallest_cohort=6).mechanism.formal


def test_batch_statistics_are_refused_with_advice():
    delta = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    update = ClientUpdate(delta, jnp.float32(1), jnp.int32(1), {}, {})
    made = adaptive_dp_fedavg(1.0, noise_multiplier=1.0, expected_clients=100.0)
    with pytest.raises(UserError, match=r"batch_stats found, only 'params' expected, .*tracked=False"):
        made.encode(update, {"clip": jnp.float32(1)}, variables=delta, key=jax.random.key(0))
