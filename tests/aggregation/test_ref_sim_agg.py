"""Ref-SimAgg: what leaves a client, the release and the next reference in NumPy, the noise, and why r is released."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation.ref_sim_agg import ref_sim_agg, shrunk, similarity_message
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort

SHAPES = {"a": (3, 2), "b": (4,)}
SIZE, N, TAU = 10, 5, 0.7
COHORT = Cohort(np.arange(N), np.ones(N, bool))
KINDS = ("zero-out", "add-remove", "replace-one")
ZERO = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}


def tree_of(vector):
    return {"a": vector[..., :6].reshape(*vector.shape[:-1], 3, 2), "b": vector[..., 6:]}


def flat(params):
    return np.concatenate([np.reshape(params[k], (*np.shape(params[k])[: -len(s)], -1)) for k, s in SHAPES.items()], -1)


PLAIN = ref_sim_agg(TAU, noise_multiplier=1.0, expected_clients=N)
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def encoder(aggregator):
    """(deltas of several clients, reference, weights) -> messages; compiled once."""

    def one(delta, reference, weight):
        update = ClientUpdate({"params": delta}, weight, jnp.int32(1), {}, {})
        told = aggregator.broadcast({"reference": reference})
        return aggregator.encode(update, told, variables={"params": ZERO}, key=jax.random.key(0))

    return quick_jit(jax.vmap(one, in_axes=(0, None, 0)))


@functools.cache
def decoder(aggregator):
    def run(total, reference, key):
        state = {"reference": reference}
        made = aggregator.decode(total, COHORT, state, variables={"params": ZERO}, round=jnp.int32(0), key=key)
        return made[0]["params"], made[1].get("reference", {}), made[2]

    return quick_jit(jax.vmap(run, in_axes=(None, None, 0)))


def messages_of(rows, r=0.0, weight=7.0, aggregator=PLAIN):
    """What clients send for updates [M, 10] and a reference [10]: [M, 11], the weight last."""
    rows = np.float32(rows)
    reference = tree_of(np.broadcast_to(np.float32(r), SIZE))
    sent = encoder(aggregator)(tree_of(rows), reference, jnp.broadcast_to(jnp.float32(weight), len(rows)))
    assert set(sent) == {"value", "weight"}  # neither statistics nor the number of examples
    return np.concatenate([flat(sent["value"]), np.asarray(sent["weight"])[:, None]], axis=1)


def released(aggregator, total, r=0.0, keys=1):
    """decode of a total [11] under several keys: (deltas [M, 10], next references [M, 10], metrics [M])."""
    total = {"value": tree_of(np.float32(total[:-1])), "weight": jnp.float32(total[-1])}
    reference = tree_of(np.broadcast_to(np.float32(r), SIZE))
    delta, following, metrics = decoder(aggregator)(total, reference, jax.vmap(jax.random.key)(np.arange(keys)))
    return flat(delta), flat(following) if following else None, metrics


def printed(u, r, tau=TAU, p=1.0):
    """q of the rows u [..., D], in float64."""
    x = np.asarray(u, np.float64) - np.asarray(r, np.float64)
    a = tau / (tau + np.linalg.norm(x, axis=-1, keepdims=True))
    return p * np.concatenate([a * x / tau, a], axis=-1)


def test_whatever_a_client_does_its_message_is_no_longer_than_one():
    rows = np.zeros((7, SIZE), np.float32)
    rows[:, :6] = np.array([0.0, 1.0, -1e30, 3e38, np.inf, -np.inf, np.nan])[:, None]
    rows[:, 6:] = np.arange(4.0)
    kept = np.nan_to_num(rows, nan=0, posinf=0, neginf=0)
    for size in (0.0, 1.0, 1e30):
        r = np.float32(size * np.random.default_rng(0).normal(size=SIZE))
        sent = messages_of(rows, r)
        np.testing.assert_allclose(sent, printed(kept, r), rtol=1e-5, atol=1e-6)
        assert np.max(np.linalg.norm(sent, axis=1)) <= 1 + 1e-6
        assert not np.any(messages_of(rows, r, weight=0.0))  # also where r is not 0


message = quick_jit(similarity_message)


@settings(deadline=None, max_examples=25)
@given(st.floats(-30, 30), st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 99))
def test_messages_are_the_printed_ones_at_every_scale(power, centre, tau, seed):
    rng = np.random.default_rng(seed)
    u, r = (np.float32(10.0**k * rng.normal(size=SIZE)) for k in (power, centre))
    value, weight = message({"w": u}, {"w": r}, 10.0**tau)
    sent = np.append(value["w"], weight)
    np.testing.assert_allclose(sent, printed(u, r, 10.0**tau), rtol=1e-4, atol=2e-6)
    assert np.linalg.norm(sent) <= 1 + 1e-6


def test_with_the_mean_as_reference_it_is_simagg():
    """r = mean, tau = eps_safe, den = sum a, W = 0: DP-SimAgg, Algorithm 1, lines 10-18, to 1e-9."""
    rows = np.random.default_rng(1).normal(size=(6, SIZE)) * [[1], [1], [1], [2], [3], [9]]
    mean = rows.mean(axis=0)
    distance = np.linalg.norm(rows - mean, axis=1)
    weights = distance.sum() / (1e-8 + distance)
    made = ref_sim_agg(1e-8, noise_multiplier=0.0, denominator="noisy")

    def round_of(rows, mean):
        send = jax.vmap(lambda u: similarity_message({"w": u}, {"w": mean}, 1e-8))
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), dict(zip(("value", "weight"), send(rows))))
        state, variables = {"reference": {"w": mean}}, {"params": {"w": mean}}
        return made.decode(total, COHORT, state, variables=variables, round=0, key=jax.random.key(0))[0]["params"]["w"]

    with jax.enable_x64(True):
        found = quick_jit(round_of)(jnp.asarray(rows), jnp.asarray(mean))
    np.testing.assert_allclose(found, weights @ rows / weights.sum(), rtol=1e-9, atol=1e-9)


RELEASES = [  # denominator, noise multiplier, adjacency, lr
    ("constant", 0.0, "zero-out", 1.0),
    ("constant", 0.3, "replace-one", 0.5),
    ("noisy", 0.0, "zero-out", 1.0),
    ("noisy", 40.0, "replace-one", 1.0),
]


@pytest.mark.parametrize(("denominator", "z", "adjacency", "lr"), RELEASES)
def test_the_release_and_the_next_reference(denominator, z, adjacency, lr):
    rng = np.random.default_rng(2)
    rows, r = rng.normal(size=(N, SIZE)), np.float32(rng.normal(size=SIZE))
    q = np.sum(printed(rows, r), axis=0)
    options = {"adjacency": adjacency, "denominator": denominator, "expected_clients": 6, "lr": lr}
    made = ref_sim_agg(TAU, noise_multiplier=z, **options)
    delta, following, metrics = released(made, np.sum(messages_of(rows, r), axis=0), r)
    den, noise = float(metrics["denominator"][0]), z * (2 if adjacency == "replace-one" else 1)
    if denominator == "constant":
        assert den == 3
    else:
        assert den >= noise * (1 - 1e-6)
    if z == 0:
        expected = r + TAU * q[:-1] / (3 if denominator == "constant" else q[-1])
        np.testing.assert_allclose(delta[0], expected, rtol=1e-4)
    centre = np.float64(delta[0]) / lr  # the next reference follows from what was released, and nothing else
    shrink = max(0, 1 - SIZE * (TAU * noise / den) ** 2 / np.sum(centre**2))
    np.testing.assert_allclose(following[0], shrink * centre, rtol=1e-4, atol=1e-5)
    assert metrics["reference_norm"][0] == pytest.approx(np.linalg.norm(following), rel=1e-5)


def test_shrinking_by_hand():
    shrink = quick_jit(shrunk)
    values = {"w": np.float32([3.0, 0.0]), "b": np.float32([4.0])}
    np.testing.assert_allclose(shrink(values, 1.0)["w"], [3 * (1 - 3 / 25), 0], rtol=1e-6)
    np.testing.assert_allclose(shrink(values, 0.0)["b"], [4.0])
    assert not np.any(shrink(values, 3.0)["w"])  # 3 * 9 > 25
    zero = {k: np.zeros_like(x) for k, x in values.items()}
    assert not np.any(shrink(zero, 0.0)["w"])
    noise = np.float32(2 * np.random.default_rng(0).normal(size=10_000))
    assert np.linalg.norm(shrink({"w": noise}, 2.0)["w"]) < 0.2 * np.linalg.norm(noise)


def test_a_released_reference_comes_to_clients_that_agree_and_zero_does_not():
    goal, off = np.float32(10 * TAU * np.ones(SIZE) / np.sqrt(SIZE)), {}
    for reference in ("released", "zero"):
        made = ref_sim_agg(TAU, noise_multiplier=0.0, reference=reference, expected_clients=N, expected_weight=1.0)
        r = np.zeros(SIZE)
        for _ in range(30):
            delta, following, _ = released(made, N * messages_of([goal], r)[0], r)
            r = r if following is None else following[0]
        off[reference] = np.linalg.norm(delta[0] - goal) / np.linalg.norm(goal)
    assert off["released"] < 0.05 and off["zero"] > 0.85
    assert made.init({"params": ZERO}) == {}


@pytest.mark.parametrize(("adjacency", "scale"), [("zero-out", 1), ("replace-one", 2)])
def test_the_noise_of_the_total_has_the_calibrated_scale(adjacency, scale):
    made = ref_sim_agg(TAU, noise_multiplier=1.5, adjacency=adjacency, denominator="noisy")
    delta, _, metrics = released(made, np.append(np.zeros(SIZE), 100.0), keys=150)
    den = np.asarray(metrics["denominator"])
    noise = np.concatenate([delta * den[:, None] / TAU, den[:, None] - 100], axis=1) / (1.5 * scale)
    assert 1e-4 < scipy.stats.chi2.sf(np.sum(noise**2), noise.size) < 1 - 1e-4
    assert 1e-4 < scipy.stats.chi2.sf(np.sum(noise[:, -1] ** 2), len(noise)) < 1 - 1e-4
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    assert np.max(np.abs(np.corrcoef(noise.T) - np.eye(SIZE + 1))) < 5 / np.sqrt(150)
    assert made.properties == {"permutation"}  # no 'orthogonal': a change of basis would leave part of the noise out


def test_mechanisms_and_bounds():
    for adjacency, value in zip(KINDS, (1, 1, 2)):
        made = ref_sim_agg(TAU, epsilon=1.0, adjacency=adjacency, smallest_cohort=4)
        assert made.mechanism[:5] == ("client", value, pytest.approx(3.7306, abs=1e-4), adjacency, True)
        assert made.bound.value == value and made.mechanism.proof and made.reads == "sum"
    assert not ref_sim_agg(TAU, noise_multiplier=0.0, smallest_cohort=4).mechanism.formal


def test_a_round_without_clients_releases_noise():
    made = ref_sim_agg(TAU, noise_multiplier=1.0, smallest_cohort=4)
    delta, _, metrics = released(made, np.zeros(SIZE + 1))
    assert np.all(delta != 0) and metrics["denominator"][0] == 2  # 4 clients times the expected weight of 0.5
    quiet, following, _ = released(ref_sim_agg(TAU, noise_multiplier=0.0, smallest_cohort=4), np.zeros(SIZE + 1))
    assert not np.any(quiet) and not np.any(following)


def test_examples_count_up_to_the_cap():
    whole = printed(np.arange(SIZE), 0)
    made = ref_sim_agg(TAU, noise_multiplier=1.0, expected_clients=5, cap=40.0)
    weights, p = [10.0, 40.0, 4000.0, np.inf, np.nan, -3.0], np.array([0.25, 1, 1, 1, 0, 0])
    sent = messages_of([np.arange(SIZE)] * 6, weight=weights, aggregator=made)
    np.testing.assert_allclose(sent, p[:, None] * whole, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(messages_of([np.arange(SIZE)], weight=1.0)[0], whole, rtol=1e-5, atol=1e-7)
    kept = [ref_sim_agg(TAU, noise_multiplier=0.0, expected_clients=5, cap=cap).properties for cap in (0.0, 3.0)]
    assert "weighted" not in kept[0] and "weighted" in kept[1]


def test_one_client_moves_the_sum_by_its_bound_unless_the_reference_is_the_mean_of_the_round():
    """All others at one point, one client from far on this side to far on that one: 2, but 2 (n - 2) with a mean."""
    n = 6
    here, there = np.zeros((n, SIZE)), np.zeros((n, SIZE))
    here[0, 0], there[0, 0] = 1e5, -1e5
    total = lambda rows, r: np.sum(messages_of(rows, r), axis=0)
    limit = {a: ref_sim_agg(TAU, noise_multiplier=1.0, expected_clients=n, adjacency=a).bound.value for a in KINDS}
    assert 1.999 < np.linalg.norm(total(here, 0) - total(there, 0)) <= limit["replace-one"] + 1e-5
    away = np.concatenate([np.zeros((1, SIZE)), here[1:]])
    gone = total(here, 0) - (total(away, 0) - messages_of(away[:1])[0])
    assert 0.999 < np.linalg.norm(gone) <= limit["zero-out"] + 1e-5
    mutant = np.linalg.norm(total(here, here.mean(axis=0)) - total(there, there.mean(axis=0)))
    assert 7.9 < mutant <= 2 * (n - 2)


def test_no_random_pair_is_beyond_the_bound():
    rng = np.random.default_rng(5)
    u, v, r = (rng.normal(size=(2000, SIZE)) * 10.0 ** rng.uniform(-3, 3, size=(2000, 1)) for _ in range(3))
    send = quick_jit(jax.vmap(lambda x, y: similarity_message({"w": x}, {"w": y}, TAU)))
    q, other = (send(jnp.float32(x), jnp.float32(r)) for x in (u, v))
    p = rng.uniform(size=(2, 2000, 1))
    q, other = (k * np.concatenate([x["w"], np.asarray(a)[:, None]], axis=1) for k, (x, a) in zip(p, (q, other)))
    assert np.max(np.linalg.norm(q, axis=1)) <= 1 and np.max(np.linalg.norm(q - other, axis=1)) <= 2


def test_batch_statistics_are_refused_with_advice():
    delta = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    update = ClientUpdate(delta, jnp.float32(1), jnp.int32(1), {}, {})
    with pytest.raises(UserError, match=r"ref_sim_agg: collections batch_stats found, only 'params' .*tracked=False"):
        ref_sim_agg(1.0, epsilon=1.0, smallest_cohort=4).encode(
            update, {"reference": {"w": jnp.ones(2)}}, variables=delta, key=jax.random.key(0)
        )


REFUSED = [
    ({"tau": 0.0}, "tau: 0.0 given"),
    ({"smallest_cohort": 0}, "expected_clients: None given and the smallest cohort is 0, a number above 0 expected"),
    ({"expected_clients": 0.0}, "expected_clients: 0.0 given"),
    ({"expected_weight": 1.5}, "expected_weight: 1.5 given"),
    ({"cap": -1.0}, "cap: -1.0 given"),
    ({"lr": 0.0}, "lr: 0.0 given"),
    ({"reference": "mean"}, "reference: 'mean' given, one of 'released', 'zero' expected"),
    ({"denominator": "exact"}, "denominator: 'exact' given, one of 'constant', 'noisy' expected"),
    ({"adjacency": "one"}, "adjacency: 'one' given, one of"),
    ({"noise_multiplier": None}, "neither of noise_multiplier and epsilon"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        ref_sim_agg(**{"tau": 1.0, "noise_multiplier": 1.0, "smallest_cohort": 4, **options})
    assert "\n" not in str(error.value) and str(error.value).startswith("aggregator ref_sim_agg: ")
