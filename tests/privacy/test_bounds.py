"""Proven sensitivities: the steps of the proofs as numbers, no input found beyond a bound, and how near one comes."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ProvenBound
from fedjax_seg.privacy import bounds

KAPPA_BALL = ((math.sqrt(5) - 1) / 2) ** 2.5  # 0.30028, the largest drift from the mean that two clusters show


def sim_agg(rows, w, eps=1e-8, xp=np):
    """DP-SimAgg, Algorithm 1, lines 10-18, without the eps of the normaliser; xp = jnp can be climbed."""
    mean = xp.mean(rows, axis=0)
    square = xp.sum((rows - mean) ** 2, axis=1)
    distance = xp.where(square > 0, xp.sqrt(xp.where(square > 0, square, 1)), 0)
    weights = w + xp.sum(distance) / (eps + distance)
    total = xp.sum(weights)
    return xp.where(total > 0, weights @ rows / xp.where(total > 0, total, 1), mean)


def inside(rows, xp=np):
    return rows / xp.maximum(1, xp.linalg.norm(rows, axis=-1, keepdims=True))


@functools.cache
def climber(n, dimension=2, restarts=16, steps=60):
    """(w) -> the largest ||A(T) - A(T')|| that random starts and projected gradient ascent find in the unit ball."""

    def change(point, w, eps):
        rows, other = point[:n], point[n]
        moved = sim_agg(rows, w, eps, jnp) - sim_agg(rows.at[0].set(other), w, eps, jnp)
        return jnp.sqrt(jnp.sum(moved**2) + 1e-12)

    def climb(point, w):
        def step(_, carry):
            point, best = carry
            slope = jnp.nan_to_num(jax.grad(change)(point, w, 1e-3))  # smoothed: the gradient is singular
            point = inside(point + 0.1 * slope, jnp)
            return point, jnp.maximum(best, change(point, w, 1e-8))

        return jax.lax.fori_loop(0, steps, step, (inside(point, jnp), jnp.zeros(())))[1]

    starts = 1.5 * jax.random.normal(jax.random.key(n), (restarts, n + 1, dimension))
    quick = {"xla_backend_optimization_level": 0}  # a few runs, each short: compiling would be most of it
    run = jax.jit(lambda w: jnp.max(jax.vmap(lambda start: climb(start, w))(starts)), compiler_options=quick)
    return lambda w: float(run(jnp.asarray(w)))


def two_clusters(n):
    """k of n clients at -1, the others at +1, and one of them moved over: the largest change over k."""
    aggregate = [sim_agg(np.where(np.arange(n) < k, 1.0, -1.0)[:, None], np.zeros(n))[0] for k in range(n + 1)]
    return max(abs(b - a) for a, b in itertools.pairwise(aggregate))


@pytest.mark.parametrize("n", [2, 3, 6, 12])
@pytest.mark.parametrize("uniform", [False, True])
def test_no_input_is_beyond_the_tight_bound(n, uniform):
    found = max(climber(n)(np.full(n, 1 / n if uniform else 0.0)), two_clusters(n))
    bound = bounds.simagg_tight(1.0, n).value
    assert found <= bound * (1 + 1e-5) <= bounds.convex_combination(1.0).value * (1 + 1e-5)
    if n >= 3:
        assert found >= 0.3 * bound  # a search that finds next to nothing would prove nothing


def test_what_two_clusters_reach():
    """Published with the bounds: 1.2 C, 0.8 C, 0.6 C and 0.385 C for 3, 4, 6 and 10 clients."""
    for n, expected in ((3, 1.2), (4, 0.8), (6, 0.6), (10, 5 / 13)):
        assert two_clusters(n) == pytest.approx(expected, abs=1e-6)
    assert two_clusters(6) <= bounds.simagg_tight(1.0, 6).value


def test_a_client_on_the_mean_may_leave_it_so_there_is_no_factor_one_over_n():
    """p others at +1, n - 1 - p at -1, one client exactly at their mean (weight 1), then moved to +1."""
    for n, expected in ((12, 0.345), (33, 0.316), (100, 0.3055)):
        found = 0.0
        for p in range(1, n - 1):
            others = np.where(np.arange(n - 1) < p, 1.0, -1.0)
            rows = [np.array([[k], *others[:, None]]) for k in (others.mean(), 1.0)]
            here, there = (sim_agg(r, np.zeros(n), 1e-12)[0] for r in rows)
            found = max(found, abs(here - there))
        assert found == pytest.approx(expected, abs=2e-3)
        assert KAPPA_BALL < found <= bounds.simagg_tight(1.0, n).value


def test_the_inequality_that_the_proof_rests_on():
    """|1 - l e| <= kappa/e + mu (e^2 - 1), with equality at r1 and r2 only."""
    kappa = bounds.KAPPA
    r1, r2 = 2 * math.sin(math.pi / 12), 2 * math.cos(math.pi / 12)
    assert r1 * r2 == pytest.approx(1) and r1**2 + r2**2 == pytest.approx(4)
    mu = 2 * kappa / (r1 + r2)
    assert mu == pytest.approx(1 / (2 * math.sqrt(3)))
    slope = kappa / r1**2 - 2 * mu * r1
    gap = lambda e: kappa / e + mu * (e**2 - 1) - abs(1 - slope * e)
    assert all(gap(e) >= -1e-12 for e in np.geomspace(1e-3, 50, 20001))
    assert abs(gap(r1)) < 1e-12 and abs(gap(r2)) < 1e-12
    smaller = lambda e: (0.999 * kappa) / e + mu * (e**2 - 1) - abs(1 - slope * e)
    assert smaller(r1) < 0  # kappa cannot be lowered in this argument


def test_the_drift_from_the_mean_stays_below_kappa():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, d = rng.integers(2, 9), rng.integers(1, 5)
        rows = inside(rng.normal(size=(n, d)) * rng.choice([0.3, 3.0]))
        assert np.linalg.norm(sim_agg(rows, np.zeros(n)) - rows.mean(axis=0)) < bounds.KAPPA
    up = round(1000 * (1 + math.sqrt(math.sqrt(5) - 2)) / 2)  # the proportion of the worst two clusters
    rows = np.where(np.arange(1000) < up, 1.0, -1.0)[:, None]
    drift = np.abs(sim_agg(rows, np.zeros(1000)) - rows.mean(axis=0))[0]
    assert drift == pytest.approx(KAPPA_BALL, abs=1e-4)


def test_values():
    for n, expected in ((6, 1.0404), (10, 0.907), (33, 0.768)):
        found = bounds.simagg_tight(1.0, n)
        assert isinstance(found, ProvenBound) and found.unit == "client" and found.adjacency == "replace-one"
        assert found.value == pytest.approx(expected, abs=5e-4)
    assert bounds.simagg_tight(100.0, 6).value == pytest.approx(104.04, abs=5e-2)
    assert bounds.simagg_tight(1.0, 1).value == 2  # the tight bound is never above 2 C
    assert bounds.simagg_tight(1.0, 6, adjacency="add-remove").adjacency == "add-remove"
    assert bounds.simagg_tight(1.0, 6, adjacency="zero-out").value == pytest.approx(1 / math.sqrt(2) + 1 / 6, abs=1e-6)
    assert (bounds.convex_combination(3.0).value, bounds.paper_four_c(3.0).value) == (6, 12)
    assert bounds.mean_replace_one(3.0, 6).value == 1
    assert bounds.mean_zero_out(3.0, 6).value == 0.5 and bounds.mean_zero_out(3.0, 6).adjacency == "zero-out"
    assert bounds.clipped_sum(3.0).value == 3
    assert bounds.convex_combination(1.0, "zero-out") == bounds.convex_combination(1.0)._replace(adjacency="zero-out")
    assert bounds.weighted_mean(3.0, 0.25).value == 1.5
    assert bounds.weighted_mean(3.0, 1 / 6).value == pytest.approx(bounds.mean_replace_one(3.0, 6).value)
    # published: 171 of 293 patients at one site: 1.17 C
    assert bounds.weighted_mean(1.0, 171 / 293).value == pytest.approx(1.17, abs=5e-3)


@pytest.mark.parametrize("n", [2, 3, 6, 12])
def test_a_client_that_sends_zero_moves_simagg_by_less_than_its_own_bound(n):
    """Random points of the ball, and two clusters with a client on their mean."""
    rng, found = np.random.default_rng(n), 0.0
    for p in range(400):
        rows = inside(rng.normal(size=(n, 2)) * 3)
        if p < n:
            rows[1:] = np.where(np.arange(n - 1) < p, 1.0, -1.0)[:, None] * np.eye(2)[:1]
            rows[0] = rows[1:].mean(axis=0) if n > 2 else rows[0]
        left = rows.copy()
        left[0] = 0
        found = max(found, np.linalg.norm(sim_agg(rows, np.full(n, 1 / n)) - sim_agg(left, np.full(n, 1 / n))))
    assert 0.1 < found <= bounds.simagg_tight(1.0, n, adjacency="zero-out").value


def test_a_weighted_mean_moves_by_twice_its_largest_share():
    rng = np.random.default_rng(2)
    p = np.array([171.0, 60, 30, 20, 8, 4]) / 293
    for _ in range(100):
        rows, k = inside(rng.normal(size=(6, 3)) * 3), rng.integers(6)
        assert np.linalg.norm(p[k] * (rows[k] - inside(rng.normal(size=3)))) <= bounds.weighted_mean(1.0, p.max()).value
    assert abs(p[0] - p[0] * -1) == pytest.approx(bounds.weighted_mean(1.0, p.max()).value)  # attained


def test_medians_are_no_convex_combinations_of_clients():
    """Why they have no 2 C here: three points of the unit ball whose coordinate-wise median is outside it."""
    rows = inside(np.array([[1.0, 1, 0], [1, 0, 1], [0, 1, 1]]))
    assert np.linalg.norm(np.median(rows, axis=0)) > 1.2


ADJACENCIES = [("zero-out", 1.0), ("add-remove", 1.0), ("replace-one", 2.0)]


@pytest.mark.parametrize(("adjacency", "value"), ADJACENCIES)
def test_messages_of_ref_sim_agg(adjacency, value):
    found = bounds.ref_sim_agg(adjacency)
    assert found[:3] == (value, adjacency, "client")
    rng = np.random.default_rng(3)
    corners = list(itertools.product([(0, 0), (0, 1), (1, 0)], repeat=2))  # of the convex function of the proof
    assert max((t + u) ** 2 + (s - v) ** 2 for (s, t), (v, u) in corners) == 4
    for _ in range(300):
        p, x = rng.uniform(size=2), rng.normal(size=(2, 3)) * 10.0 ** rng.uniform(-3, 4)
        a = 1 / (1 + np.linalg.norm(x, axis=1))
        q = np.concatenate([p[:, None] * a[:, None] * x, (p * a)[:, None]], axis=1)
        assert np.linalg.norm(q[0] - q[1] if adjacency == "replace-one" else q[0]) <= value


@pytest.mark.parametrize(("adjacency", "value"), ADJACENCIES)
def test_steps_from_released_references_compose_as_one_release(adjacency, value):
    assert bounds.weiszfeld_steps(9, adjacency).value == 3 * value
    assert bounds.weiszfeld_steps(1, adjacency).value == value


def test_adaptive_steps_are_no_easier_to_tell_apart_than_one_release_of_their_joint_bound():
    """4 steps, sigma 2, each moved by 1 or 1/2 depending on the step before; delta at epsilon 1 by 2e5 runs."""
    rng, sigma, runs = np.random.default_rng(4), 2.0, 200_000

    def delta_of(shift):
        loss, last = np.zeros(runs), np.zeros(runs)
        for _ in range(4):
            v = shift(last)
            last = v + sigma * rng.normal(size=runs)
            loss += (v * last - v**2 / 2) / sigma**2
        return np.mean(np.maximum(0, 1 - np.exp(1 - loss)))

    def gaussian(mu):  # Balle and Wang, Theorem 8, at epsilon 1
        phi = lambda t: (1 + math.erf(t / math.sqrt(2))) / 2
        return phi(mu / 2 - 1 / mu) - math.e * phi(-mu / 2 - 1 / mu)

    joint = gaussian(bounds.weiszfeld_steps(4).value / sigma)
    assert delta_of(lambda last: np.ones(runs)) == pytest.approx(joint, abs=2e-3)
    adaptive = delta_of(lambda last: np.where(last > 0, 1.0, 0.5))
    assert gaussian(bounds.ref_sim_agg().value / sigma) < 0.05 < adaptive < joint  # one step's bound is not enough


def test_public_weights():
    """Published: W = (171, 60, 30, 20, 8, 4) normalised 1.071 C, raw counts 2.0 C; uniform weights add nothing."""
    sizes = np.array([171.0, 60, 30, 20, 8, 4])
    assert bounds.simagg_public_weights(1.0, sizes / sizes.sum()).value == pytest.approx(1.071, abs=1e-3)
    assert bounds.simagg_public_weights(1.0, sizes).value == 2
    uniform = bounds.simagg_public_weights(1.0, np.full(6, 1 / 6)).value
    assert uniform == pytest.approx(bounds.simagg_tight(1.0, 6).value, abs=1e-6)
    rng = np.random.default_rng(1)
    for w in (sizes / sizes.sum(), sizes / 10, np.array([3.0, 1, 1])):
        bound = bounds.simagg_public_weights(1.0, w).value
        for _ in range(100):
            rows = inside(rng.normal(size=(len(w) + 1, 2)) * 2)
            other = rows[:-1].copy()
            other[rng.integers(len(w))] = rows[-1]
            assert np.linalg.norm(sim_agg(rows[:-1], w) - sim_agg(other, w)) <= bound


@pytest.mark.parametrize("smallest", [0, None])
def test_an_unknown_cohort_gives_no_tight_bound(smallest):
    with pytest.raises(UserError, match=r"simagg_tight: smallest cohort (none known|0 found), at least 1 client"):
        bounds.simagg_tight(1.0, smallest)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.simagg_tight(0.0, 6),
        lambda: bounds.convex_combination(float("nan")),
        lambda: bounds.convex_combination(1.0, "zero"),
        lambda: bounds.weighted_mean(1.0, 0.0),
        lambda: bounds.weighted_mean(1.0, 1.5),
        lambda: bounds.ref_sim_agg("zero"),
        lambda: bounds.weiszfeld_steps(0),
        lambda: bounds.weiszfeld_steps(2, "one"),
        lambda: bounds.paper_four_c(-1.0),
        lambda: bounds.mean_zero_out(1.0, 0.0),
        lambda: bounds.simagg_public_weights(1.0, [0.0, 0.0]),
        lambda: bounds.simagg_public_weights(1.0, [1.0, -1.0]),
        lambda: bounds.simagg_public_weights(1.0, []),
    ],
)
def test_bad_values_are_one_clear_line(call):
    with pytest.raises(UserError, match=r"given, .*expected") as error:
        call()
    assert "\n" not in str(error.value)
