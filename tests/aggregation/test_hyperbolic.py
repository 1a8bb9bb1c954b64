"""Poincare-ball means: closed forms, the printed formulas in numpy, and the shares of the ordered fold.

The float64 references below write down FedHAvg, section 3.2, as printed; the ceilings are artanh in closed form.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation import make
from fedjax_seg.aggregation.hyperbolic import exp0, log0, mobius_add, mobius_scalar
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError

C = 2.0
CEILING = {
    "argument": math.atanh(1 - 1e-5) / math.sqrt(C),  # 4.31549, the paper's text
    "radius": math.atanh(1 - math.sqrt(C) * 1e-5) / math.sqrt(C),  # 4.19296, the released code
}
MEANS = ("extrinsic_mean", "gyro_mean")


def printed_exp0(v, c=C):
    r = np.linalg.norm(v)
    return np.tanh(np.sqrt(c) * r) / (np.sqrt(c) * r) * v if r else v


def printed_log0(y, c=C):
    r = np.linalg.norm(y)
    return np.arctanh(np.sqrt(c) * r) / (np.sqrt(c) * r) * y if r else y


def printed_add(x, y, c=C):
    xy, xx, yy = x @ y, x @ x, y @ y
    return ((1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c**2 * xx * yy)


def printed_scalar(r, x, c=C):
    n = np.sqrt(c) * np.linalg.norm(x)
    return np.tanh(r * np.arctanh(n)) / n * x if n else x


def printed_gyro(rows, gamma, c=C):
    m = np.zeros_like(rows[0])
    for row in rows:
        m = printed_add(m, printed_scalar(1 / len(rows), printed_exp0(gamma * row, c), c), c)
    return printed_log0(m, c) / gamma


def printed_extrinsic(rows, gamma, weights=None, c=C):
    return printed_log0(np.average([printed_exp0(gamma * row, c) for row in rows], axis=0, weights=weights), c) / gamma


def directions(seed, rows=1, size=6):
    x = np.random.default_rng(seed).normal(size=(rows, size))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(1e-6, 3.0), st.floats(0.1, 5.0), st.floats(-2.0, 2.0))
def test_maps_equal_the_printed_formulas_and_their_identities(seed, norm, c, r):
    with jax.enable_x64(True):
        a, b = norm * directions(seed, 2)
        x, y = exp0(jnp.asarray(a), c), exp0(jnp.asarray(b), c)
        close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-12)
        close(x, printed_exp0(a, c))
        close(mobius_add(x, y, c), printed_add(np.asarray(x), np.asarray(y), c))
        close(mobius_scalar(r, x, c), printed_scalar(r, np.asarray(x), c))
        close(mobius_scalar(1 / 4, x, c), exp0(jnp.asarray(a) / 4, c))  # what the gyro mean relies on
        if math.sqrt(c) * norm < 4:  # clear of the margin, and of the cancellation in 1 - c ||x||^2
            close(log0(x, c), a)
            close(mobius_add(jnp.zeros(6), x, c), x)
            close(mobius_add(x, jnp.zeros(6), c), x)
            close(mobius_add(-x, x, c), np.zeros(6))
            close(mobius_add(-x, mobius_add(x, y, c), c), y)  # left cancellation
            close(mobius_scalar(2.0, x, c), mobius_add(x, x, c))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", [lambda v: exp0(v, C), lambda v: log0(v, C), lambda v: mobius_scalar(0.25, v, C)])
def test_zero_and_tiny_vectors_have_exact_values_and_gradients(compiled, function, dtype):
    with jax.enable_x64(dtype == "float64"):
        zero = jnp.zeros(3, dtype)
        slope = function(jnp.full(3, 1e-3, dtype))[0] / 1e-3
        np.testing.assert_array_equal(function(zero), zero)
        np.testing.assert_allclose(compiled(jax.jacobian(function))(zero), slope * np.eye(3), rtol=1e-5)
        tiny = jnp.full(3, 1e-25, dtype)
        np.testing.assert_allclose(function(tiny), slope * tiny, rtol=1e-5)
        both = compiled(jax.jacobian(lambda v: mobius_add(v, function(v), C)))(zero)
        np.testing.assert_allclose(both, (1 + slope) * np.eye(3), rtol=1e-5)


@pytest.mark.parametrize("margin_on", ["argument", "radius"])
def test_log0_stops_at_the_margin_also_beyond_the_boundary(compiled, margin_on):
    rim = jnp.asarray([[1.0, 0.0], [0.999, 0.0]], jnp.float32) / math.sqrt(C)
    np.testing.assert_allclose(log0(rim, C, margin_on=margin_on)[0], [CEILING[margin_on], 0], rtol=1e-6)
    np.testing.assert_allclose(log0(rim, C, margin_on=margin_on)[1], [math.atanh(0.999) / math.sqrt(C), 0], rtol=1e-4)
    np.testing.assert_allclose(log0(5 * rim, C, margin_on=margin_on)[0], [CEILING[margin_on], 0], rtol=1e-6)
    assert tree.all_finite(compiled(jax.jacobian(lambda y: log0(y, C, margin_on=margin_on)))(rim))


def test_the_published_ceilings():
    assert CEILING["radius"] == pytest.approx(4.19296, abs=5e-6)
    assert CEILING["argument"] == pytest.approx(4.3155, abs=5e-5)
    assert math.atanh(1 - math.sqrt(4) * 1e-5) / math.sqrt(4) == pytest.approx(2.87823, abs=5e-6)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(("gamma", "margin_on"), [(1.0, "argument"), (1.0, "radius"), (100.0, "radius")])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-3)])
def test_long_identical_inputs_come_out_at_the_norm_ceiling(aggregate, name, margin_on, gamma, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        aggregator = make(name, gamma=gamma, of="updates", margin_on=margin_on)
        direction = directions(0, size=500)[0]
        for norm in (4.4, 18.5, 1e4):  # times the unit 1/gamma
            rows = jnp.asarray(np.tile(norm / gamma * direction, (4, 1)), dtype)
            delta, metrics = aggregate(aggregator, rows)
            assert delta.dtype == dtype
            assert np.linalg.norm(delta) * gamma == pytest.approx(CEILING[margin_on], abs=tolerance)
            np.testing.assert_allclose(delta / np.linalg.norm(delta), direction, atol=1e-4)
            assert metrics["clamped_fraction"] == 1
            assert metrics.get("saturated_fraction", 1) == 1


@pytest.mark.parametrize("name", MEANS)
def test_short_identical_inputs_come_out_as_they_are(aggregate, name):
    aggregator = make(name, of="updates")
    with jax.enable_x64(True):
        for norm in (1e-8, 1e-3, 0.01, 0.3, 1.0):
            row = norm * directions(1)[0]
            delta, metrics = aggregate(aggregator, jnp.asarray(np.tile(row, (5, 1))))
            np.testing.assert_allclose(delta, row, rtol=0, atol=1e-10)
            np.testing.assert_allclose(delta, row, rtol=1e-9)
            assert metrics["clamped_fraction"] == 0


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_means_equal_the_printed_formulas(aggregate, gamma):
    options = {"gamma": gamma, "of": "updates"}
    extrinsic, gyro = make("extrinsic_mean", **options), make("gyro_mean", **options)
    other = make("gyro_mean", order=(3, 1), **options)
    close = lambda got, want: np.testing.assert_allclose(got[0], want, rtol=1e-8, atol=1e-12)
    with jax.enable_x64(True):
        for seed, norm in enumerate([1e-5, 0.01, 0.3, 1.0, 2.0] * 4):
            rows = norm * np.random.default_rng(seed).uniform(0.2, 1, size=(5, 1)) * directions(seed, 5)
            x = jnp.asarray(rows)
            close(aggregate(extrinsic, x), printed_extrinsic(rows, gamma))
            close(aggregate(gyro, x), printed_gyro(rows, gamma))
            close(aggregate(other, x), printed_gyro(rows[[3, 1, 0, 2, 4]], gamma))


def test_weights_mode_per_tensor_and_whole_model(aggregate):
    rng = np.random.default_rng(5)
    server = {"a": rng.normal(size=(3, 2)) / 3, "b": rng.normal(size=4) / 3}
    deltas = {k: 0.3 * rng.normal(size=(3, *v.shape)) for k, v in server.items()}
    rows = {k: (server[k] + deltas[k]).reshape(3, -1) for k in server}
    whole = np.concatenate([rows["a"], rows["b"]], axis=1)
    with jax.enable_x64(True):
        on_device = jax.tree.map(jnp.asarray, (deltas, server))
        for name, printed in (("extrinsic_mean", printed_extrinsic), ("gyro_mean", printed_gyro)):
            delta, _ = aggregate(make(name), on_device[0], server=on_device[1])
            for k in server:
                want = printed(rows[k], 1.0).reshape(server[k].shape) - server[k]
                np.testing.assert_allclose(delta[k], want, rtol=1e-9, atol=1e-12)
            delta, _ = aggregate(make(name, per="model"), on_device[0], server=on_device[1])
            together = printed(whole, 1.0)
            np.testing.assert_allclose(np.ravel(delta["a"]), together[:6] - server["a"].ravel(), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(delta["b"], together[6:] - server["b"], rtol=1e-9, atol=1e-12)


def test_the_extrinsic_mean_by_examples(aggregate):
    rows, n = directions(7, 4) * [[0.1], [0.5], [1.0], [2.0]], np.asarray([163.0, 104.0, 50.0, 72.0])
    with jax.enable_x64(True):
        delta, _ = aggregate(make("extrinsic_mean", of="updates", weighted=True), jnp.asarray(rows), weights=n)
    np.testing.assert_allclose(delta, printed_extrinsic(rows, 1.0, n), rtol=1e-6)


def shares_in_closed_form(norm, clients=4, c=C):
    """d m / d x_k across the common direction, relative to their sum, by differentiating the printed (+) there.

    With t = tanh(k a), a = sqrt(c) norm / K, a fold step takes sideways moves of y by (1 - m^2)/(1 + m y)^2 and those
    of m by (1 + 2 m y + y^2)/(1 + m y)^2; the maps on both ends are the same for all clients.
    """
    a = math.sqrt(c) * norm / clients
    y, factors = math.tanh(a), []
    for k in range(clients):
        m = math.tanh(k * a)
        factors = [f * (1 + 2 * m * y + y**2) / (1 + m * y) ** 2 for f in factors] + [(1 - m**2) / (1 + m * y) ** 2]
    return np.asarray(factors) / sum(factors)


# the norms are those of a network's tensors, printed to two digits or fewer
SHARES = [
    (1e-4, (0.25, 0.25, 0.25, 0.25)),
    (0.22, (0.262, 0.256, 0.247, 0.235)),
    (0.805, (0.388, 0.291, 0.197, 0.124)),
    (1.0, (0.446, 0.293, 0.170, 0.091)),
    (2.0, (0.718, 0.214, 0.055, 0.014)),
    (4.19, (0.946, 0.051, 0.003, 0.000)),
]


def test_shares_of_nearly_equal_clients_in_the_fold(aggregate_inside, compiled):
    """The derivative of the result by a sideways move of each client, at equal clients of that norm."""
    gyro = make("gyro_mean", of="updates", margin_on="radius")
    slope = compiled(jax.grad(lambda x: aggregate_inside(gyro, x)[0][2]))
    for norm, printed in SHARES:
        np.testing.assert_allclose(shares_in_closed_form(norm), printed, atol=1e-3)
        with jax.enable_x64(True):
            base = jnp.tile(jnp.zeros(5).at[0].set(norm), (4, 1))
            found = np.asarray(slope(base))[:, 2]
        np.testing.assert_allclose(found, shares_in_closed_form(norm), atol=1e-9)
        assert found.sum() == pytest.approx(1, abs=1e-9)


def test_beyond_norm_nine_the_first_client_decides(aggregate):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 200)), jnp.float32)
    x = 18.5 * x / jnp.linalg.norm(x, axis=1, keepdims=True) + jnp.zeros(200).at[0].set(18.5)
    first = x[2] / jnp.linalg.norm(x[2])
    delta, metrics = aggregate(make("gyro_mean", of="updates", order=(2, 3, 0, 1), margin_on="radius"), x)
    np.testing.assert_allclose(delta, CEILING["radius"] * first, atol=2e-3)
    assert metrics == {"clamped_fraction": 1, "saturated_fraction": 1}


def test_order_is_by_client_id_whatever_the_rows(aggregate):
    rows = directions(3, 4) * 1.5
    ids = jnp.asarray([30, 10, 20, 5])
    with jax.enable_x64(True):
        run = lambda **o: aggregate(make("gyro_mean", of="updates", **o), jnp.asarray(rows), clients=ids)[0]
        for order, sequence in (
            ("ascending", [3, 1, 2, 0]),
            ("cohort", [0, 1, 2, 3]),
            ((20, 30), [2, 0, 3, 1]),
            ([30, 99, 5], [0, 3, 1, 2]),
        ):
            np.testing.assert_allclose(run(order=order), printed_gyro(rows[sequence], 1.0), rtol=1e-8)
        some = aggregate(
            make("gyro_mean", of="updates"), jnp.asarray(rows), clients=ids, present=[True, False, True, True]
        )[0]
        np.testing.assert_allclose(some, printed_gyro(rows[[3, 2, 0]], 1.0), rtol=1e-8)


def test_float32_agrees_with_float64_up_to_saturation(aggregate):
    """Where the released float32 code is on the boundary already (sqrt(c) norm > 9), the fold still is not."""
    gyro, extrinsic = make("gyro_mean", of="updates"), make("extrinsic_mean", of="updates")
    for norm in (1e-4, 0.1, 1.0, 3.0, 6.0):
        rows = norm * (directions(11, 4, 300) * 0.2 + directions(12, 1, 300))
        want = printed_gyro(rows / 2, 1.0)
        got, _ = aggregate(gyro, (rows / 2).astype(np.float32))
        np.testing.assert_allclose(got, want, atol=2e-5 * np.linalg.norm(want))
        want = printed_extrinsic(rows / 2, 1.0)
        got, _ = aggregate(extrinsic, (rows / 2).astype(np.float32))
        np.testing.assert_allclose(got, want, atol=1e-3 * np.linalg.norm(want))


@pytest.mark.parametrize("name", MEANS)
def test_opposite_clients_stay_finite_and_inside_the_ceiling(aggregate_inside, compiled, name):
    run = lambda x: aggregate_inside(make(name, of="updates"), x)[0]
    program = compiled(lambda x: (run(x), jax.grad(lambda x: jnp.sum(run(x)))(x)))
    for norm in (1.0, 20.0, 1e3, 1e8):
        x = norm * jnp.asarray(directions(2, 1, 50), jnp.float32) * jnp.asarray([[1.0], [-1.0], [1.0], [-1.0]])
        result, gradient = program(x)
        assert np.linalg.norm(result) <= CEILING["argument"] * (1 + 1e-5)
        assert tree.all_finite(gradient)
        if name == "extrinsic_mean" or norm == 1:  # the fold is ill-conditioned beyond
            np.testing.assert_allclose(result, np.zeros(50), atol=1e-5)
        nearly, gradient = program(x * (1 + 1e-6 * jnp.arange(200.0).reshape(4, 50)))
        assert np.linalg.norm(nearly) <= CEILING["argument"] * (1 + 1e-5)
        assert tree.all_finite(gradient)


def test_fractions_count_tensors_and_clients(aggregate):
    long, short = jnp.ones((3, 4)) * 10, jnp.ones((3, 2)) * 0.1
    deltas = {"long": long, "short": short, "one": short.at[0].set(4.5)}
    _, metrics = aggregate(make("gyro_mean", of="updates"), deltas)
    assert metrics["clamped_fraction"] == pytest.approx(1 / 3)
    assert metrics["saturated_fraction"] == pytest.approx((1 + 0 + 1 / 3) / 3)
    _, metrics = aggregate(make("extrinsic_mean", of="updates"), deltas)
    assert metrics == {"clamped_fraction": pytest.approx(1 / 3)}


BAD = [
    {"c": 0.0},
    {"c": float("inf")},
    {"gamma": -1},
    {"margin": 0.0},
    {"margin": 0.6},
    {"margin": 0.4, "margin_on": "radius"},
    {"margin_on": "ball"},
    {"per": "layer"},
    {"of": "gradients"},
]


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_clear_line(name, options):
    with pytest.raises(UserError, match=r"given, .*expected") as error:
        make(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("order", ["descending", (0, 0), (-1,), (0.5,), 3, None])
def test_a_bad_order_is_refused(order):
    with pytest.raises(UserError, match=r"gyro_mean: order: .* given, .* expected"):
        make("gyro_mean", order=order)
