"""What ran, from the objects that run it: every sampler's event, and no amplification that it did not earn."""

import json

import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Mechanism
from fedjax_seg.federation import sampling
from fedjax_seg.privacy import events

K, T = 33, 20
CENTRAL = Mechanism("client", 2.0, 1.5, "zero-out", True)
BINS = sampling.full(K)._replace(bins=5, max_participations=lambda rounds: -(-rounds // 5), min_separation=5)


def of(sampler, mechanism=CENTRAL, tensors=1):
    (event,) = events.of_rounds(mechanism, sampler, T, K, tensors)
    kept = {k: v for k, v in events.described(event).items() if k not in ("sentence", "noise_multiplier", "adjacency")}
    return kept, event


@pytest.mark.parametrize(
    "sampler, expected",
    [
        (sampling.full(K), {"event": "gaussian", "count": 20}),
        (sampling.static(K, 6), {"event": "gaussian", "count": 20}),
        (sampling.sliding_window(K, 6), {"event": "gaussian", "count": 4}),  # 20 rounds are 3.3 cycles of 6
        (sampling.randomized_order(K, 6), {"event": "gaussian", "count": 4}),  # 120 places among 33
        (sampling.poisson(K, 0.25), {"event": "poisson", "count": 20, "q": 0.25}),
        (sampling.poisson(K, 1.0), {"event": "gaussian", "count": 20}),
        (
            sampling.poisson(K, 0.25, 10),
            {"event": "truncated_poisson", "count": 20, "q": 0.25, "population": K, "capacity": 10},
        ),
        (sampling.uniform(K, 6), {"event": "fixed_size", "count": 20, "sample": 6, "population": K}),
        (sampling.uniform(K, K), {"event": "gaussian", "count": 20}),
        (BINS, {"event": "balls_in_bins", "count": 20, "bins": 5}),
    ],
    ids=["full", "static", "window", "order", "poisson", "all", "cut", "uniform", "everyone", "bins"],
)
def test_events_of_samplers(sampler, expected):
    kept, event = of(sampler)
    assert kept == expected and event.noise_multiplier == 1.5 and event.adjacency == "zero-out"
    assert json.loads(json.dumps(events.described(event)))["sentence"].startswith(f"{event.count} releases with")


@pytest.mark.parametrize(
    "sampler", [sampling.full(K), sampling.sliding_window(K, 6), BINS], ids=["full", "win", "bins"]
)
def test_a_window_that_is_given_a_q_is_refused(sampler):
    """Windows of a permutation are no Poisson draws: the field alone must not buy amplification."""
    if sampler.max_participations(T) == T:
        assert of(sampler._replace(q=0.2))[0]["event"] == "poisson"  # nothing here could tell it from one
        return
    with pytest.raises(UserError, match="q None expected, as Poisson draws have no such bound"):
        of(sampler._replace(q=0.2))


def test_tensors_of_a_round_and_correlated_rounds():
    for sampler in (sampling.full(K), sampling.poisson(K, 0.25)):
        assert of(sampler, tensors=4)[1].noise_multiplier == 0.75  # one draw of clients, four releases
    banded = CENTRAL._replace(span=T, participations=4)
    for sampler in (sampling.sliding_window(K, 6), sampling.poisson(K, 0.25), BINS):
        assert of(sampler, banded)[0] == {"event": "gaussian", "count": 1}


def test_what_one_client_can_be_in():
    for sampler, count in ((sampling.poisson(K, 0.25), 20), (BINS, 4), (sampling.sliding_window(K, 6), 4)):
        assert events.by_participations(CENTRAL, sampler, T).count == count
    for given in ({"rounds": 0}, {"clients": 0}, {"tensors": 0}):
        arguments = {"rounds": 1, "clients": 1, "tensors": 1} | given
        with pytest.raises(UserError, match="0 given"):
            events.of_rounds(CENTRAL, BINS, **arguments)


def test_noise_of_the_clients_own_is_not_amplified_by_sampling():
    """The server that it protects from sees who sends."""
    local = CENTRAL._replace(local=True, adjacency="replace-one")
    for sampler in (sampling.uniform(K, 6), sampling.poisson(K, 0.25), BINS):
        assert of(sampler, local)[0]["event"] == "gaussian"
    assert of(sampling.uniform(K, 6), local)[0]["count"] == T and of(BINS, local)[0]["count"] == 4
