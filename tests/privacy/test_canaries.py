"""Canary audits: bounds that cover, on releases of known epsilon; and what they must catch."""

import math

import numpy as np
import pytest
from scipy import stats

from fedjax_seg.core import noise
from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import canaries

DELTA = 1e-5
Z = {1.0: 3.73063, 4.38: 1.0, 10.0: 0.49989}  # noise multipliers of one Gaussian release at delta 1e-5, published


def gaussian(z, size=1):
    """A release with noise of standard deviation z; its input is what is released."""
    return lambda key, value: noise.add(value, key, z)


def pair(size=1):
    return np.zeros(size, np.float32), np.eye(1, size, dtype=np.float32)[0]


@pytest.mark.parametrize("hits, count", [(0, 50), (1, 50), (17, 50), (49, 50), (50, 50)])
def test_clopper_pearson_is_the_exact_interval(hits, count):
    exact = stats.binomtest(hits, count).proportion_ci(confidence_level=0.95, method="exact")
    low, high = canaries.clopper_pearson(hits, count, 0.025)
    assert (low, high) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_bounds_of_rates():
    assert canaries.epsilon_bound(0.5 + DELTA, 0.1, DELTA) == pytest.approx(math.log(5))
    assert canaries.epsilon_bound(0.1, 0.5, DELTA) == 0
    assert canaries.mu_bound(stats.norm.cdf(1), stats.norm.cdf(-1)) == pytest.approx(2)
    assert canaries.mu_bound(0.1, 0.5) < 0  # signed: nothing is rounded up to 0 before it is compared


@pytest.mark.parametrize("epsilon, lowest", [(1.0, 0.63), (4.38, 3.79), (10.0, 8.45)])
def test_coverage_on_gaussians(epsilon, lowest):
    """40 audits of 2e4 releases: never above the truth by more than chance allows, and near it on average."""
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        scores = {"projection": (rng.normal(size=20000), rng.normal(1 / Z[epsilon], size=20000))}
        found.append(canaries.from_scores(scores, delta=DELTA, gaussian=True))
    assert sum(f.epsilon_low > epsilon for f in found) <= 4  # P(5 or more of 40 at 5 %) = 5 %; they are wider than that
    assert lowest - 0.15 < np.mean([f.epsilon_gdp for f in found]) < epsilon
    assert all(f.epsilon_cp < epsilon for f in found)


def test_nothing_to_tell_apart_is_zero():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = {name: (rng.normal(size=1000), rng.normal(size=1000)) for name in canaries.STATISTICS}
        found = canaries.from_scores(scores, delta=DELTA, gaussian=True)
        assert found.epsilon_low < 0.3  # not 8.5, as a bound of mu without sign gives
    constant = {"projection": (np.zeros(100), np.zeros(100))}
    assert canaries.from_scores(constant, delta=DELTA, gaussian=True).epsilon_low == 0


def test_the_general_bound_saturates_where_it_should():
    """All of 1000 right and none of 1000 wrong: ln(0.025^(1/500) / (1 - 0.025^(1/500)))."""
    apart = {"projection": (np.arange(1000.0), 5000 + np.arange(1000.0))}
    edge = 0.025 ** (1 / 500)
    found = canaries.from_scores(apart, delta=DELTA)
    assert found.epsilon_cp == pytest.approx(math.log(edge / (1 - edge)), abs=1e-3)
    assert found.mu is None and found.epsilon_gdp is None and found.epsilon_low == found.epsilon_cp


def test_halved_noise_is_caught_and_the_right_noise_is_not():
    here, there = pair(3)
    right, half = (
        canaries.audit_releases(gaussian(f * Z[1.0]), here, there, delta=DELTA, gaussian=True, means=(here, there))
        for f in (1.0, 0.5)
    )
    assert 0.3 < right.epsilon_low < 1
    assert 1.2 < half.epsilon_low < 2.3  # half of the noise for epsilon = 1 is worth 2.15; about 1.6 is published
    assert right.statistic in canaries.STATISTICS and right.trials == 20000


def test_the_scale_of_the_noise_gives_inputs_away():
    """Standard deviations 1 and 1.1 in 50 dimensions: epsilon from the scale alone is above 2.57 (1.05) by far."""
    release = lambda key, scale: scale * noise.normal(key, 50)
    found = canaries.audit_releases(release, np.float32(1), np.float32(1.1), trials=4000, delta=DELTA)
    assert found.statistic == "scale" and found.epsilon_low > 1


def test_a_coordinate_without_noise_decides_alone():
    release = lambda key, value: value + noise.normal(key, 3) * np.array([1, 1, 0], np.float32)
    here, there = np.zeros(3, np.float32), np.array([0, 0, 1e-3], np.float32)
    found = canaries.audit_releases(release, here, there, trials=1000, delta=DELTA, gaussian=True)
    assert found.epsilon_low > 3
    same = canaries.audit_releases(release, here, here, trials=1000, delta=DELTA, gaussian=True)
    assert same.epsilon_low < 0.5


@pytest.mark.parametrize("options", [{"trials": 10}, {"trials": 1.5}, {"delta": 1.0}, {"confidence": 1.0}])
def test_bad_options_are_one_clear_line(options):
    with pytest.raises(UserError, match=r"^audit_releases: \w+: .* given, .* expected") as error:
        canaries.audit_releases(gaussian(1.0), *pair(), **options)
    assert "\n" not in str(error.value)
