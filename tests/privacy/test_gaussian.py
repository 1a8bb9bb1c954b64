"""privatize: only a proven bound calibrates noise, and the noise comes once, before what follows the sum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_seg import aggregation
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.noise import add as add_noise
from fedjax_seg.core.types import AuditedLowerBound, Cohort, ProvenBound
from fedjax_seg.privacy import gaussian
from fedjax_seg.privacy.gaussian import multiplier, privatize

BOUND = ProvenBound(0.5, "zero-out", "client", "by assumption")
VARIABLES = {"params": {"w": jnp.zeros(2000), "s": jnp.zeros(())}}


def root_of_sum(bound=BOUND):
    """A sum whose decode shows whether the noise came before it: the square root of |total|, twice if applied twice."""
    square = lambda t: (jax.tree.map(lambda x: jnp.sqrt(jnp.abs(x)), t), {})
    return aggregation.lift_sum(lambda t: (t, {}), square, bare=True, bound=bound)


def released(aggregator, value, key):
    total = {"value": jax.tree.map(lambda x: x + value, VARIABLES["params"])}
    cohort = Cohort(jnp.arange(1), jnp.ones(1, bool))
    return aggregator.decode(total, cohort, {}, variables=VARIABLES, round=jnp.int32(0), key=jax.random.key(key))[0]


def test_noise_is_added_to_the_total_once_before_decode():
    private = privatize(root_of_sum(), noise_multiplier=3.0)
    out = released(private, 100.0, 1)["params"]
    noise = np.append(np.asarray(out["w"]) ** 2, float(out["s"]) ** 2) - 100.0  # undone: |100 + noise|
    assert 1e-4 < scipy.stats.chi2.sf(np.sum((noise / 1.5) ** 2), noise.size) < 1 - 1e-4
    assert private.mechanism[:5] == ("client", 0.5, 3.0, "zero-out", True)


def test_no_noise_changes_nothing_and_promises_nothing():
    private = privatize(root_of_sum(), noise_multiplier=0.0)
    np.testing.assert_array_equal(released(private, 4.0, 1)["params"]["w"], 2.0)
    assert not private.mechanism.formal


def test_the_same_key_gives_the_same_noise_and_another_key_another():
    private = privatize(root_of_sum(), noise_multiplier=1.0)
    one, same, other = (released(private, 100.0, key)["params"]["w"] for key in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert abs(np.corrcoef(np.asarray(one) ** 2, np.asarray(other) ** 2)[0, 1]) < 0.1


@pytest.mark.parametrize("bound", [None, AuditedLowerBound(0.5, "two clusters"), 0.5])
def test_only_a_proven_bound_calibrates(bound):
    with pytest.raises(UserError, match=r"privatize: bound .* found, a ProvenBound expected"):
        privatize(root_of_sum()._replace(bound=bound), noise_multiplier=1.0)


def test_an_unclipped_mean_is_refused_and_a_clipped_one_taken():
    with pytest.raises(UserError, match="privatize: bound none found"):
        privatize(aggregation.make("mean"), noise_multiplier=1.0)
    private = privatize(aggregation.make("clipped_mean", clip=2.0, statistics="refuse"), noise_multiplier=1.0)
    assert private.mechanism[:5] == ("client", 2.0, 1.0, "zero-out", True)
    with pytest.raises(UserError, match="one without expected"):
        privatize(private, noise_multiplier=1.0)


def test_noise_of_every_leaf_is_its_own():
    noisy = add_noise({"a": jnp.zeros(500), "b": jnp.zeros(500)}, jax.random.key(0), 2.0)
    assert abs(np.corrcoef(noisy["a"], noisy["b"])[0, 1]) < 0.2
    assert np.std(np.concatenate([noisy["a"], noisy["b"]])) == pytest.approx(2, rel=0.1)


def test_the_multiplier_meets_its_target_exactly():
    """delta(epsilon) of Balle and Wang (2018), Theorem 8, written out."""
    phi = scipy.stats.norm.cdf
    for epsilon, delta in ((0.1, 1e-6), (1.0, 1e-5), (10.0, 1e-5), (20.0, 1e-3)):
        z = multiplier("x", None, epsilon, delta)
        found = phi(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * phi(-1 / (2 * z) - epsilon * z)
        assert found == pytest.approx(delta, rel=1e-4)
    assert multiplier("x", 1.25, None, 1e-5) == 1.25


def test_rounding_raises_the_sensitivity_and_may_end_the_claim():
    """Entries off by a step lengthen a message by step sqrt(D): once under zero-out, twice where it is replaced."""
    one = gaussian.mechanism_of("client", 2.0, 1.5, "zero-out")
    found = gaussian.rounded(one, 0.01, 400)
    assert found.sensitivity == pytest.approx(2.2) and found.noise_multiplier == pytest.approx(1.5 * 2 / 2.2)
    assert found.formal and gaussian.rounded(one._replace(local=True), 0.01, 400).sensitivity == 2.0
    other = gaussian.mechanism_of("client", 2.0, 1.5, "replace-one")
    assert gaussian.rounded(other, 0.01, 400).sensitivity == pytest.approx(2.4)
    weak = gaussian.rounded(gaussian.mechanism_of("client", 1.0, 0.26, "zero-out"), 2.0**-8, 100_000)
    assert not weak.formal and weak.reasons  # below the noise that may carry a claim
