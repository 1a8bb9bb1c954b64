"""From a total epsilon to noise and to rounds: published multipliers, closed forms, and nothing beyond the budget."""

import math

import pytest

from fedjax_seg.core import noise
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Mechanism
from fedjax_seg.federation import sampling
from fedjax_seg.privacy import accounting, budget, curves

DELTA, K = 1e-5, 33
CENTRAL = Mechanism("client", 1.0, 1.0, "zero-out", True)
FULL, WINDOW, POISSON = sampling.full(K), sampling.sliding_window(K, 6), sampling.poisson(K, 6 / 33)
GIVEN = {"clients": K, "rounds": 20, "delta": DELTA}
# Published z for a total of 1, 4, 8, 20 over 20 rounds.
COUNTED, WINDOWS, DRAWN = (16.68, 4.84, 2.69, 1.30), (7.46, 2.16, 1.20, 0.58), (3.39, 1.28, 0.86, 0.54)


def multiplier(sampler, target, mechanism=CENTRAL, **options):
    return budget.multiplier_for(mechanism, sampler, target=target, **(GIVEN | options))


def test_published_multipliers():
    for sampler, values in ((FULL, COUNTED), (WINDOW, WINDOWS)):
        for target, value in zip((1, 4, 8, 20), values):
            z = multiplier(sampler, target)
            assert abs(z - value) < 0.006
            found = curves.best(curves.ways(CENTRAL._replace(noise_multiplier=z), sampler, **GIVEN), DELTA)[0]
            assert target * (1 - 1e-3) < found <= target


@pytest.mark.parametrize(
    "target, value",
    [
        pytest.param(target, value, marks=() if target == 8 else pytest.mark.slow)
        for target, value in zip((1, 4, 8, 20), DRAWN)
    ],
)
def test_published_multipliers_of_poisson_draws(target, value):
    z = multiplier(POISSON, target)
    assert abs(z - value) < 0.006
    found = curves.best(curves.ways(CENTRAL._replace(noise_multiplier=z), POISSON, **GIVEN), DELTA)[0]
    assert target * (1 - 2e-3) < found <= target


def test_multipliers_of_other_mechanisms():
    """One release is one Gaussian, a mechanism without noise gets some, and no less than carries a claim."""
    banded = CENTRAL._replace(span=20, participations=4)
    assert multiplier(WINDOW, 1.0, banded) == pytest.approx(3.73063, abs=2e-4)
    silent = CENTRAL._replace(noise_multiplier=0.0, formal=False, reasons=noise.objections(0.0))
    assert multiplier(WINDOW, 4.0, silent) == multiplier(WINDOW, 4.0)
    assert multiplier(WINDOW, 4000.0) == noise.LEAST
    for mechanism, sampler, words in (
        (CENTRAL._replace(formal=False, reasons=("Df is data",)), WINDOW, "no noise gives a guarantee: Df is data"),
        (CENTRAL._replace(sensitivity=math.inf), WINDOW, "nothing is clipped"),
        (silent._replace(sensitivity=math.inf), WINDOW, "nothing is clipped"),
        (CENTRAL, sampling.adaptive(K, 6), "by their private updates"),
    ):
        with pytest.raises(UserError, match=rf"privacy\.target_epsilon: 4 given, .*{words}"):
            multiplier(sampler, 4.0, mechanism)
    with pytest.raises(UserError, match=r"target_epsilon: 0 given"):
        multiplier(WINDOW, 0)


def rounds_within(sampler, limit, z=1.0, mechanism=CENTRAL, **options):
    mechanism = mechanism._replace(noise_multiplier=z)
    return budget.rounds_within(mechanism, sampler, budget=limit, **(GIVEN | options))


def test_rounds_of_a_budget():
    """z = 1: one release 4.377, two 6.57, three 8.39, four 9.997; a cycle of six windows has one round per client."""
    for limit, everyone, windows in ((4.3, 0, 0), (4.4, 1, 6), (6.6, 2, 12), (8.39, 3, 18), (9.9, 3, 18), (99, 20, 20)):
        assert (rounds_within(FULL, limit), rounds_within(WINDOW, limit)) == (everyone, windows)
    assert rounds_within(WINDOW, 100, z=0.0) == 0  # infinite, not nothing
    banded = CENTRAL._replace(span=20, participations=4)
    assert (rounds_within(WINDOW, 4.4, mechanism=banded), rounds_within(WINDOW, 4.3, mechanism=banded)) == (20, 0)
    with pytest.raises(UserError, match="budget: 0 given"):
        rounds_within(FULL, 0)


def test_rounds_of_a_budget_under_poisson_draws():
    most = rounds_within(POISSON, 5.0)
    under, over = (accounting.poisson_epsilon(1.0, 6 / 33, most + k, DELTA) for k in (0, 1))
    assert under <= 5.0 < over


def rows_of(sampling_name, units, rounds, z=1.2):
    return accounting.client_ledger(
        Mechanism("example", 1.0, z, "zero-out", z > 0),
        sampling=sampling_name, batch_size=16, local_epochs=2, participations=rounds, units=units, delta=DELTA,
    )  # fmt: skip


def test_rounds_of_a_budget_of_dp_sgd():
    given = {"local_epochs": 2, "sampler": sampling.full(2), "rounds": 8, "delta": DELTA}
    shuffled = rows_of("shuffled", {"a": 800}, 8)  # two epochs per round: sqrt(2 T) / 1.2
    most = budget.client_rounds_within(shuffled, budget=10.0, **given)
    under, over = (accounting.any_order_epsilon(1.2, 2 * (most + k), DELTA) for k in (0, 1))
    assert under <= 10 < over
    drawn = rows_of("poisson", {"a": 160, "b": 80, "none": 0}, 8)  # 20 and 10 steps per round with 0.1 and 0.2
    most = budget.client_rounds_within(drawn, budget=6.0, **given)
    worst = lambda r: max(accounting.poisson_epsilon(1.2, q, n * r, DELTA) for q, n in ((0.1, 20), (0.2, 10)))
    assert 0 < most < 8 and worst(most) <= 6 * 1.001 and worst(most + 1) > 6 * 0.999
    assert budget.client_rounds_within(drawn, budget=100.0, **given) == 8
    assert budget.client_rounds_within(rows_of("poisson", {"a": 800}, 8, z=0.0), budget=1e6, **given) == 0
