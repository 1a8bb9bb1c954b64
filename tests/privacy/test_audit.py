"""The sensitivity auditor: it finds what is known to be the worst, on true code, and catches what is broken."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import aggregation
from fedjax_seg.aggregation.lift import combine
from fedjax_seg.aggregation.similarity import similarity_weights
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import AuditedLowerBound
from fedjax_seg.privacy import audit, audit_starts, hyperbolic_bounds


def mean(x, present):
    return combine(present / jnp.sum(present), x)


def sim_agg(eps=1e-8):
    """The printed SimAgg with W = 0, and the mean where its weights are all 0."""

    def rule(x, present):
        weights = similarity_weights(x, jnp.zeros(len(x)), present, eps)
        return jnp.where(jnp.sum(weights) > 0.5, combine(weights, x), mean(x, present))

    return rule


def similarity_to(reference, tau=1.0):
    """The sum of Ref-SimAgg's messages (h/tau, a), with a reference that is released, or (the mutant) the mean."""

    def rule(x, present):
        away = x - reference(x)
        a = tau / (tau + jnp.sqrt(jnp.sum(away**2, axis=1) + 1e-24))
        return jnp.append(combine(present * a, away) / tau, jnp.sum(present * a))

    return rule


@pytest.mark.parametrize("n, expected", [(3, 1.2), (6, 0.6), (10, 5 / 13)])
def test_two_clusters_of_sim_agg(n, expected):
    found = audit.sensitivity(sim_agg(), n, 2, steps=0)
    assert isinstance(found, AuditedLowerBound)
    assert found.value == pytest.approx(expected, abs=1e-6)
    assert found.witness.start.startswith("two clusters")


def test_a_client_on_the_mean_is_found_for_many_clients():
    found = audit.sensitivity(sim_agg(), 33, 1, steps=0)
    assert found.value >= 0.3159 and found.witness.start.startswith("client on the mean")


def test_the_ascent_reaches_the_largest_singular_value():
    """sum_i M x_i / n changes by at most 2 |M| / n, in one direction that no structured start has."""
    matrix = np.random.default_rng(0).normal(size=(3, 4))
    found = audit.sensitivity(lambda x, present: matrix @ mean(x, present), 2, 4, radius=2.0, restarts=8, steps=200)
    assert found.value == pytest.approx(2 * 2 * np.linalg.norm(matrix, 2) / 2, rel=1e-4)
    still = audit.sensitivity(lambda x, present: matrix @ mean(x, present), 2, 4, radius=2.0, steps=0)
    assert still.value < 0.99 * found.value
    assert found.witness.start.startswith("climbed from: ")


def test_the_smoothed_gradient_climbs_to_the_cluster_from_random_starts(monkeypatch):
    """Without structured starts: three quarters of random ones are known to end at 0.6 for six clients."""
    zeros = [audit_starts.Start("zeros", np.zeros((6, 2)), np.zeros(2))]
    monkeypatch.setattr(audit_starts, "structured", lambda n, dim, k: zeros)
    found = audit.sensitivity(sim_agg(), 6, 2, smooth=sim_agg, restarts=24, steps=300)
    assert found.value == pytest.approx(0.6, abs=1e-3)


def test_adjacencies_and_the_witness():
    """The mean of 3: 2 C/3 for replace-one and (two others opposite) for add-remove, C/3 for zero-out."""
    for adjacency, expected in (("replace-one", 2), ("add-remove", 2), ("zero-out", 1)):
        found = audit.sensitivity(mean, 3, 2, radius=1.5, adjacency=adjacency, steps=0)
        assert found.value == pytest.approx(1.5 * expected / 3, rel=1e-9)
        (rows, present), (others, there) = found.witness.here, found.witness.there
        assert present.all() and there.tolist() == [adjacency != "add-remove", True, True]
        assert np.array_equal(rows[1:], others[1:]) and np.linalg.norm(rows, axis=1).max() <= 1.5 + 1e-12
        moved = rows[present].mean(axis=0) - others[there].mean(axis=0)
        assert np.linalg.norm(moved) == pytest.approx(found.value)


def test_every_changed_row_is_tried():
    weights = np.array([0.1, 0.7, 0.2])
    found = audit.sensitivity(lambda x, present: combine(jnp.asarray(weights), x), 3, 1, changed=(0, 1, 2), steps=0)
    assert found.value == pytest.approx(1.4) and found.witness.changed == 1


def test_a_reference_that_depends_on_the_data_is_caught():
    """Released: at most 1 and 2 (and nearly reached by long updates). The mean in its place: up to 2 (n - 2) = 8."""
    released, mutant = similarity_to(lambda x: jnp.zeros(x.shape[1])), similarity_to(lambda x: jnp.mean(x, axis=0))
    for adjacency, bound in (("add-remove", 1), ("replace-one", 2)):
        found = audit.sensitivity(released, 6, 2, radius=math.inf, adjacency=adjacency, steps=0)
        assert 0.995 * bound < found.value <= bound
    assert audit.sensitivity(mutant, 6, 2, radius=math.inf, steps=0).value > 4


@pytest.mark.slow
@pytest.mark.parametrize("n, expected", [(6, 7.9), (33, 59)])
def test_how_bad_a_reference_that_depends_on_the_data_is(n, expected):
    found = audit.sensitivity(similarity_to(lambda x: jnp.mean(x, axis=0)), n, 3, radius=math.inf)
    assert expected < found.value <= 2 * (n - 2)


def hyperbolic(name, gamma=1.0):
    made = aggregation.make(name, c=2.0, gamma=gamma, of="updates", per="model")
    return audit.rule_of(made, decoded=True)


@pytest.mark.parametrize("clip", [1.0, 4.0])
def test_the_extrinsic_mean_reaches_its_bound(clip):
    """K = 4, c = 2, gamma = 1: 0.6624 and 3.6116."""
    found = audit.sensitivity(hyperbolic("extrinsic_mean"), 4, 2, radius=clip, steps=0).value
    assert found == pytest.approx({1.0: 0.6624, 4.0: 3.6116}[clip], abs=1e-4)
    a = math.sqrt(2) * clip
    assert found == pytest.approx(clip - math.atanh(math.tanh(a) / 2) / math.sqrt(2), abs=1e-4)


def test_the_last_client_of_the_gyro_mean():
    found = audit.sensitivity(hyperbolic("gyro_mean"), 4, 2, changed=(3,), steps=0).value
    assert found == pytest.approx(0.5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gamma, clip, extrinsic, first, last",
    [
        (1.0, 0.1, 0.05025, 0.0504, 0.05),
        (1.0, 1.0, 0.6624, 0.823, 0.5),
        (1.0, 2.0, 1.6149, 2.64, 1.0),
        (1.0, 4.0, 3.6116, 6.68, 2.0),
        (100.0, 0.02, 0.01615, 0.0264, 0.01),
    ],
)
def test_the_table_of_hyperbolic_means(gamma, clip, extrinsic, first, last):
    found = audit.sensitivity(hyperbolic("extrinsic_mean", gamma), 4, 3, radius=clip).value
    assert found == pytest.approx(extrinsic, abs=1e-4 * max(1, clip))
    for k, expected in ((0, first), (3, last)):
        found = audit.sensitivity(
            hyperbolic("gyro_mean", gamma), 4, 3, radius=clip, changed=(k,), steps=1500, restarts=64
        )
        assert found.value == pytest.approx(expected, rel=1e-2)
        assert found.value <= hyperbolic_bounds.gyro(clip, 4, k + 1, 2.0, gamma).value * (1 + 1e-9)


def test_a_rule_that_is_not_finite_somewhere_has_no_bound():
    found = audit.sensitivity(lambda x, present: mean(x, present) / jnp.sum(x[0] ** 2), 2, 1, steps=0)
    assert found.value == math.inf


def test_the_noise_of_a_pair_cancels_and_float64_stays_here():
    loud, quiet = (
        audit.rule_of(aggregation.make("private_sim_agg", clip=1.0, noise_multiplier=z, smallest_cohort=3))
        for z in (5.0, 0.0)
    )
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)))
        pair = jax.jit(
            lambda x: [r(x, jnp.ones(3, bool)) - r(x.at[0].set(0.3), jnp.ones(3, bool)) for r in (loud, quiet)],
            compiler_options={"xla_backend_optimization_level": 0},
        )(x)
    assert np.linalg.norm(pair[1]) > 0.1 and np.allclose(*pair, atol=1e-12, rtol=0)
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("dim", [1, 3])
def test_structured_starts(dim):
    starts = audit_starts.structured(4, dim, 2)
    names = {s.name for s in starts}
    assert len(names) == len(starts)
    assert all(s.rows.shape == (4, dim) and s.other.shape == (dim,) for s in starts)
    assert all(np.linalg.norm(np.vstack([s.rows, s.other]), axis=1).max() <= 1 + 1e-12 for s in starts)
    on_mean = [s for s in starts if s.name.startswith("client on the mean")]
    assert all(np.allclose(s.rows[2], s.rows.mean(axis=0), atol=1e-15) for s in on_mean)
    splits = {round(float(np.sum(s.rows[[0, 1, 3]])), 6) for s in on_mean if "axis" in s.name}
    assert splits == {-3, -1, 1, 3}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clients": 0}, "clients: 0 given"),
        ({"dim": 0}, "dim: 0 given"),
        ({"radius": 0.0}, "radius: 0.0 given"),
        ({"radius": math.nan}, "radius: nan given"),
        ({"adjacency": "both"}, "adjacency: 'both' given"),
        ({"changed": ()}, "changed: no row given"),
        ({"changed": (3,)}, "changed: 3 given"),
        ({"restarts": 0}, "restarts: 0 given"),
        ({"steps": -1}, "steps: -1 given"),
    ],
)
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(UserError, match=f"^sensitivity: {message}.*expected") as error:
        audit.sensitivity(mean, **({"clients": 3, "dim": 2} | options))
    assert "\n" not in str(error.value)
