"""Balls in bins: the arithmetic bound against closed forms, an integral, other samples and the published values."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import balls_in_bins, composition

DELTA = 1e-5


@pytest.mark.parametrize("z, published", [(3.7306316, 1.02), (0.5, 22.6), (1.0, 8.32), (2.0, 2.80)])
def test_published_monte_carlo_values(z, published):
    """4e5 samples at delta = 1e-5 are four events: their values scatter by a few percent."""
    proven = balls_in_bins.proven_epsilon(z, 5, 20, DELTA)
    assert proven == pytest.approx(published, rel=0.03)
    found, supported, words = balls_in_bins.epsilon(z, 5, 20, DELTA, samples=100_000)
    assert found == pytest.approx(published, rel=0.12)
    assert supported > 1.5e-4 and words.startswith("Monte Carlo: 100000 samples show delta 1e-05")


def test_one_bin_is_the_gaussian_mechanism():
    for z, rounds, delta in ((1.0, 4, 1e-5), (3.0, 1, 1e-8), (0.5, 20, 1e-3)):
        found = balls_in_bins.delta_of(balls_in_bins.ratio(z, 1, rounds), 2.0)
        exact = composition.gaussian_delta(z / math.sqrt(rounds), 2.0)
        assert exact <= found <= exact * 1.001
        epsilon = balls_in_bins.proven_epsilon(z, 1, rounds, delta)
        assert composition.gaussian_delta(z / math.sqrt(rounds), epsilon) == pytest.approx(delta, rel=2e-3)


@pytest.mark.parametrize("z, epsilon", [(1.0, 1.0), (0.7, 4.0), (3.0, 0.1)])
def test_two_bins_are_an_integral(z, epsilon):
    """E (S/2 - e^epsilon)+ and E (1 - e^epsilon S/2)+, S = X_1 + X_2, by quadrature over X_1 and closed form in X_2."""
    mu, at = math.sqrt(3) / z, math.exp(epsilon)
    phi = stats.norm.cdf

    def call(strike):  # E (X - strike)+, X log-normal of mean 1
        if strike <= 0:
            return 1 - strike
        first = -math.log(strike) / mu + mu / 2
        return phi(first) - strike * phi(first - mu)

    def over(payoff):
        x = lambda y: math.exp(mu * y - mu * mu / 2)
        return integrate.quad(lambda y: stats.norm.pdf(y) * payoff(x(y)), -12, 12, limit=400, epsabs=1e-13)[0]

    gone = over(lambda x: call(2 * at - x) / 2)
    come = over(lambda x: (call(2 / at - x) - (1 - (2 / at - x))) * at / 2 if x < 2 / at else 0.0)
    exact, found = max(gone, come), balls_in_bins.delta_of(balls_in_bins.ratio(z, 2, 6), epsilon)
    assert exact <= found * (1 + 1e-9) and found <= exact * 1.001 + 1e-12


def test_the_library_samples_the_same_losses():
    """jax_privacy draws every release, here it is one number per bin: the same deltas within their errors."""
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import sample_generation

    z, bins, rounds, count = 1.5, 3, 6, 800
    how = batch_selection.BallsInBinsSampling(iterations=rounds, cycle_length=bins)
    ratio = balls_in_bins.ratio(z, bins, rounds)
    for present in (True, False):
        losses, _ = sample_generation.get_privacy_loss_sample(how, z, np.ones(1), 0, present, count)
        for epsilon in (0.1, 0.5, 1.0):
            shown = np.maximum(0, -np.expm1(np.minimum(epsilon - losses, 0)))
            error = shown.std() / math.sqrt(count)
            assert shown.mean() < balls_in_bins.delta_of(ratio, epsilon) + 4 * error
            if present:  # the larger direction here: the bound is no looser than what is seen
                assert abs(shown.mean() - balls_in_bins.delta_of(ratio, epsilon)) < 4 * error


def test_the_bound_is_above_a_finer_one_and_falls_with_the_bins(monkeypatch):
    coarse = [balls_in_bins.proven_epsilon(z, 5, 20, DELTA) for z in (0.5, 2.0)]
    monkeypatch.setattr(balls_in_bins, "_CELLS", 2500)
    fine = [balls_in_bins.proven_epsilon(z, 5, 20, DELTA) for z in (0.5, 2.0)]
    assert all(f <= c <= f * 1.001 for f, c in zip(fine, coarse))
    monkeypatch.setattr(balls_in_bins, "_CELLS", 400)
    many = [balls_in_bins.proven_epsilon(1.0, bins, 2 * bins, DELTA) for bins in (1, 2, 5, 16)]
    assert many == sorted(many, reverse=True) and many[0] == pytest.approx(6.57, abs=0.02)  # two Gaussians
    unfinished = [balls_in_bins.proven_epsilon(1.0, 5, rounds, DELTA) for rounds in (6, 10, 11)]
    assert unfinished[0] == unfinished[1] < unfinished[2]


def test_what_samples_support():
    """Notes: 4e5 samples at 1e-5 support 6.3e-5; 1.1e7 at 5e-6 support 1e-5."""
    assert balls_in_bins.delta_supported(400_000, 1e-5) == pytest.approx(6.3e-5, rel=0.01)
    assert balls_in_bins.delta_supported(11_000_000, 5e-6) == pytest.approx(1e-5, rel=0.02)


def test_limits():
    assert balls_in_bins.proven_epsilon(0.0, 5, 20, DELTA) == math.inf == balls_in_bins.epsilon(0.0, 5, 20, DELTA)[0]
    assert balls_in_bins.proven_epsilon(1e4, 5, 20, 0.5) == 0
    for bad in ((-1.0, 5, 20, DELTA), (1.0, 0, 20, DELTA), (1.0, 5, 0, DELTA), (1.0, 5, 20, 0.0)):
        with pytest.raises(UserError, match="given"):
            balls_in_bins.proven_epsilon(*bad)
