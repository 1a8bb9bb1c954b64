"""Means in the ball: the published table, the steps of the proofs as numbers, and searches that find nothing beyond."""

import math

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ProvenBound
from fedjax_seg.privacy import hyperbolic_bounds as bounds

# gamma, C, what an auditor reached: extrinsic mean, gyro mean first and last client; K = 4, c = 2 (published)
TABLE = [
    (1.0, 0.1, 0.05025, 0.0504, 0.05),
    (1.0, 1.0, 0.6624, 0.823, 0.5),
    (1.0, 2.0, 1.6149, 2.64, 1.0),
    (1.0, 4.0, 3.6116, 6.68, 2.0),
    (100.0, 0.02, 0.01615, 0.0264, 0.01),
]


def exp0(v, c=1.0):
    r = np.linalg.norm(v, axis=-1, keepdims=True)
    s = np.sqrt(c) * np.where(r > 0, r, 1)
    return v * np.where(r > 0, np.tanh(s) / s, 1)


def log0(y, c=1.0):
    r = np.linalg.norm(y, axis=-1, keepdims=True)
    s = np.sqrt(c) * np.where(r > 0, r, 0.5)
    return y * np.where(r > 0, np.arctanh(s) / s, 1)


def add(x, y, c=1.0):
    xy, xx, yy = (np.sum(u * v, axis=-1, keepdims=True) for u, v in ((x, y), (x, x), (y, y)))
    return ((1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c**2 * xx * yy)


def length(x):
    """The hyperbolic distance from 0 in curvature -1."""
    return 2 * np.arctanh(np.linalg.norm(x, axis=-1))


def extrinsic(u, c, gamma, weights=None):
    """[..., K, D] -> [..., D]"""
    return log0(np.average(exp0(gamma * u, c), axis=-2, weights=weights), c) / gamma


def gyro(u, c, gamma):
    m = np.zeros_like(u[..., 0, :])
    for k in range(u.shape[-2]):
        m = add(m, exp0(gamma * u[..., k, :] / u.shape[-2], c), c)
    return log0(m, c) / gamma


def found(mean, clip, clients, k, c, gamma, draws=4000, **options):
    """The largest change that client k causes: others in one direction and k in two more, at the rim or inside."""
    rng = np.random.default_rng(clients)
    angle = rng.uniform(0, 2 * math.pi, size=(draws, clients + 1))
    angle[::2, :clients] = 0
    angle[::4, clients] = math.pi
    size = clip * np.where(rng.uniform(size=(draws, clients + 1)) < 0.7, 1.0, rng.uniform(size=(draws, clients + 1)))
    size[:2] = clip
    points = size[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    moved = points[:, :clients].copy()
    moved[:, k] = points[:, clients]
    change = mean(points[:, :clients], c, gamma, **options) - mean(moved, c, gamma, **options)
    return np.max(np.linalg.norm(change, axis=-1))


@pytest.mark.parametrize(("gamma", "clip", "ext", "first", "last"), TABLE)
def test_the_published_table(gamma, clip, ext, first, last):
    bound = bounds.extrinsic(clip, 4, 2.0, gamma)
    assert isinstance(bound, ProvenBound) and bound[1:3] == ("replace-one", "client")
    assert bound.value == pytest.approx(ext, rel=1e-3)
    assert first <= bounds.gyro(clip, 4, 1, 2.0, gamma).value <= 2 * clip
    assert bounds.gyro(clip, 4, 4, 2.0, gamma).value == pytest.approx(last, rel=1e-12)


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("clip", [0.1, 1.0, 3.0])
def test_the_extrinsic_bound_is_attained_and_not_passed(clients, clip):
    for c, gamma in ((2.0, 1.0), (0.5, 1.7)):
        bound = bounds.extrinsic(clip, clients, c, gamma).value
        assert found(extrinsic, clip, clients, 0, c, gamma) == pytest.approx(bound, rel=1e-9)
        a = math.sqrt(c) * gamma * clip
        printed = 2 * clip if clients == 1 else clip - math.atanh((1 - 2 / clients) * math.tanh(a)) / (a / clip)
        assert bound == pytest.approx(printed, rel=1e-9)


def test_public_weights_in_the_ball():
    weights = np.array([0.45, 0.3, 0.15, 0.1])
    bound = bounds.extrinsic(1.0, 4, 2.0, 1.0, largest_share=0.45).value
    assert found(extrinsic, 1.0, 4, 0, 2.0, 1.0, weights=weights) == pytest.approx(bound, rel=1e-9)
    assert bounds.extrinsic(1.0, 4, 2.0, 1.0, largest_share=0.25) == bounds.extrinsic(1.0, 4, 2.0, 1.0)
    assert bounds.extrinsic(1.0, 4, 2.0, 1.0, largest_share=0.6).value == 2


def test_add_and_remove_are_within_the_extrinsic_bound_of_the_larger_number():
    rng = np.random.default_rng(1)
    for n in (2, 3, 6):
        u = rng.normal(size=(2000, n, 2))
        u /= np.linalg.norm(u, axis=-1, keepdims=True)
        change = np.linalg.norm(extrinsic(u, 2.0, 1.0) - extrinsic(u[:, 1:], 2.0, 1.0), axis=-1)
        assert 0.5 * bounds.extrinsic(1.0, n, 2.0, 1.0).value < change.max() <= bounds.extrinsic(1.0, n, 2.0, 1.0).value


def test_the_extrinsic_bound_between_its_limits():
    value = lambda clip, n, c=2.0, gamma=1.0: bounds.extrinsic(clip, n, c, gamma).value
    for n in (2, 4, 33, 10**6):
        assert value(1e-9, n) == pytest.approx(2e-9 / n, rel=1e-7)  # the plain mean
        for clip in (1e-3, 0.3, 2.0):
            a = math.sqrt(2) * clip
            assert 2 * clip / n <= value(clip, n) * (1 + 1e-9)
            assert value(clip, n) < math.sinh(2 * a) / (n * math.sqrt(2))  # by the largest slope of log0
    for clip in (50.0, 212.0, 213.0, 1e6):
        assert clip - value(clip, 4) == pytest.approx(math.log(3) / (2 * math.sqrt(2)), abs=1e-9 * clip)
    many = [value(1.0, n) for n in range(1, 40)]
    assert many == sorted(many, reverse=True) and many[0] == 2 and many[1] == pytest.approx(1)


def test_the_steps_of_the_extrinsic_proof():
    h, g = np.arctanh, lambda r: np.where(r > 0, np.arctanh(np.maximum(r, 1e-12)) / np.maximum(r, 1e-12), 1)
    change = lambda r, d, reach: (h(r) - h(r - d)) ** 2 + g(r) * g(r - d) * (reach**2 - d**2)
    for rim in (0.1, 0.6, 0.95, 0.9999):
        for clients in (2, 3, 6, 33):
            reach = 2 * rim / clients
            d = np.linspace(0, reach, 101)
            radius = d[:, None] + (rim - d[:, None]) * np.linspace(0, 1, 51)
            assert np.all(np.diff(change(radius, d[:, None], reach), axis=1) >= -1e-12)  # step 2: grows with r
            ends = change(rim, d[:-1], reach)
            product = (h(rim - d) - h(rim - reach))[:-1] * (2 * h(rim) - h(rim - d) - h(rim - reach))[:-1]
            assert np.all(product >= g(rim) * g(rim - d[:-1]) * (reach**2 - d[:-1] ** 2) * (1 - 1e-9))  # step 3
            assert np.all(ends <= (h(rim) - h(rim - reach)) ** 2 * (1 + 1e-9))
    rng = np.random.default_rng(2)
    m, other = (rng.uniform(-0.7, 0.7, size=(500, 2)) for _ in range(2))
    r, s = np.linalg.norm(m, axis=1), np.linalg.norm(other, axis=1)
    square = np.sum((m - other) ** 2, axis=1)
    expected = (h(r) - h(s)) ** 2 + g(r) * g(s) * (square - (r - s) ** 2)  # step 1, the identity
    np.testing.assert_allclose(np.sum((log0(m) - log0(other)) ** 2, axis=1), expected, rtol=1e-9)


@pytest.mark.parametrize("clip", [0.05, 0.2, 1.0])
def test_no_position_of_the_gyro_mean_is_beyond_its_bound(clip):
    for clients in (1, 2, 4):
        changes = [found(gyro, clip, clients, k - 1, 2.0, 1.0) for k in range(1, clients + 1)]
        limits = [bounds.gyro(clip, clients, k, 2.0, 1.0).value for k in range(1, clients + 1)]
        assert all(x <= y * (1 + 1e-9) for x, y in zip(changes, limits))
        assert changes[-1] == pytest.approx(limits[-1], rel=5e-3)  # the last client: 2 C/K exactly
        assert bounds.gyro(clip, clients, None, 2.0, 1.0).value == max(limits) == limits[0]
        if clients == 4 and clip == 1.0:
            assert changes[0] > 1.5 * changes[-1]  # the bound of the last one would not do for the first


def test_the_steps_of_the_gyro_proof():
    rng = np.random.default_rng(3)
    points = lambda: exp0(rng.normal(size=(2000, 2)) * rng.uniform(0, 1.5, size=(2000, 1)))
    x, other, y = points(), points(), points()
    distance = lambda p, q: length(add(-p, q))
    np.testing.assert_allclose(distance(add(y, x), add(y, other)), distance(x, other), rtol=1e-6, atol=1e-9)
    assert np.all(length(add(x, y)) <= (length(x) + length(y)) * (1 + 1e-9))
    ratio = distance(add(x, y), add(other, y)) / distance(x, other)
    assert np.all(ratio <= np.exp(length(y)) * (1 + 1e-9)) and np.max(ratio / np.exp(length(y))) > 0.9
    assert np.all(2 * np.linalg.norm(log0(x) - log0(other), axis=1) <= distance(x, other) * (1 + 1e-9))


def test_sums_in_the_ball():
    """Published: an ascent reached 0.70711 and 1.41421 for c = 2."""
    for adjacency, expected in (("zero-out", 0.70711), ("add-remove", 0.70711), ("replace-one", 1.41421)):
        bound = bounds.ball_sum(2.0, adjacency)
        assert bound.adjacency == adjacency and bound.value == pytest.approx(expected, abs=1e-5)
    ends = exp0(np.array([[9.0], [-9.0]]), 2.0)
    assert 1.4142 < abs(ends[0] - ends[1])[0] <= bounds.ball_sum(2.0, "replace-one").value
    assert bounds.gyro(1e6, 4, 1, 2.0, 1.0).value == 2e6  # no overflow


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.extrinsic(0.0, 4, 2.0, 1.0),
        lambda: bounds.extrinsic(1.0, 4, 0.0, 1.0),
        lambda: bounds.extrinsic(1.0, 4, 2.0, math.inf),
        lambda: bounds.extrinsic(1.0, 4, 2.0, 1.0, largest_share=0.0),
        lambda: bounds.gyro(1.0, 0, 1, 2.0, 1.0),
        lambda: bounds.gyro(1.0, 4, 5, 2.0, 1.0),
        lambda: bounds.gyro(1.0, 4, 0, 2.0, 1.0),
        lambda: bounds.ball_sum(-1.0),
        lambda: bounds.ball_sum(1.0, "zero"),
    ],
)
def test_bad_values_are_one_clear_line(call):
    with pytest.raises(UserError, match=r"given, .*expected") as error:
        call()
    assert "\n" not in str(error.value)


def test_an_unknown_cohort_is_refused():
    with pytest.raises(UserError, match="bound extrinsic: smallest cohort 0 found, at least 1 client"):
        bounds.extrinsic(1.0, 0, 2.0, 1.0)
