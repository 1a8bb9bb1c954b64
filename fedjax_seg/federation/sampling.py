"""Who takes part in a round: samplers that are pure in (key, round), with the facts an accountant may rely on.

Every maker takes K, the number of clients (ids 0 .. K-1), and returns a `core.types.Sampler`. `key` is the run's key,
the same in every round; a sampler derives what it needs from it, so there is nothing to checkpoint. (`adaptive` alone
remembers: its memory is a part of the state.) Where the rule itself gives no order (full, uniform, Poisson, adaptive,
a drawn static subset), the present rows come first, in ascending ids; lists that are read by windows, and given
members, keep their order.

None of the fixed-size and windowed samplers carries a `q`: amplification by subsampling is proven here for Poisson
draws only. `max_participations(rounds)` counts the rounds 0 .. rounds-1 of a run.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Cohort, Sampler
from fedjax_seg.federation import adaptive_sampling
from fedjax_seg.federation.balls_in_bins import balls_in_bins

# Keeps the sampler's randomness apart from everything else that is derived from the run's key.
_SAMPLING_STREAM = 0x5A3D1E77


def full(clients: int) -> Sampler:
    """Everyone in every round, ascending ids.

    Args:
      clients: K.
    """
    _check_clients(clients)

    def sample(key: Array, round: Array) -> Cohort:
        del key, round
        return _everyone_present(jnp.arange(clients, dtype=jnp.int32))

    return _every_round(sample, clients)


def uniform(clients: int, size: int | None = None, rho: float | None = None) -> Sampler:
    """A fresh subset of fixed size in every round, uniform over all subsets (without replacement).

    Args:
      clients: K.
      size: clients per round, in [1, K].
      rho: instead of size; the fraction of the clients, size = floor(rho K).
    """
    size = _window_size("uniform", clients, size, rho)

    def sample(key: Array, round: Array) -> Cohort:
        return _everyone_present(jnp.sort(_permutation(key, round, clients)[:size]))

    return _every_round(sample, size)._replace(drawn=(size, clients))


def poisson(clients: int, q: float, capacity: int = 0) -> Sampler:
    """Every client joins every round with probability q, independently; the round may be empty.

    The probability is q rounded down to a multiple of 2^-32, so an accountant that uses q is on the safe side.

    Args:
      clients: K.
      q: in [0, 1].
      capacity: 0 (or K) = K rows, so that a draw is never cut. A smaller one keeps a uniformly random subset of that
        many of those drawn; clients are then no longer independent, and `truncated` says so.
    """
    _check_clients(clients)
    checks.number("sampler poisson: q", q, low=0, high=1)
    checks.number("sampler poisson: capacity (0 = all clients)", capacity, low=0, high=clients, integer=True)
    capacity = capacity or clients
    threshold = math.floor(q * 2**32)

    def sample(key: Array, round: Array) -> Cohort:
        key = jax.random.fold_in(_stream(key), round)
        ids = jnp.arange(clients, dtype=jnp.int32)
        if threshold == 2**32:
            joined = jnp.ones(clients, bool)
        else:
            joined = jax.random.bits(jax.random.fold_in(key, 0), (clients,), jnp.uint32) < jnp.uint32(threshold)
        if capacity < clients:
            # Those drawn, in random order, before those not drawn: the cut falls on nobody in particular.
            rank = jax.random.permutation(jax.random.fold_in(key, 1), ids)
            ids = jnp.argsort(jnp.where(joined, rank, rank + clients))[:capacity].astype(jnp.int32)
            joined = joined[ids]
        # Present rows first, so that whole groups of lanes are empty and cost nothing.
        order = jnp.argsort(jnp.where(joined, ids, ids + clients))
        return Cohort(ids[order], joined[order])

    return Sampler(
        sample=sample,
        capacity=capacity,
        q=float(q),
        truncated=capacity < clients,
        max_participations=lambda rounds: rounds,
        min_cohort=0,
        min_separation=1,
    )


def static(
    clients: int, size: int | None = None, rho: float | None = None, members: Sequence[int] | None = None
) -> Sampler:
    """The same subset in all rounds.

    Source: DP-SimAgg, section III-C and Fig. 3 (a). How the subset is chosen is not stated there; here it is drawn
    once from the run's key, or given.

    Args:
      clients: K.
      size: clients of the subset, in [1, K].
      rho: instead of size; the fraction of the clients, size = floor(rho K).
      members: instead of both; client ids, whose order is kept.
    """
    if not members:
        size = _window_size("static", clients, size, rho)

        def sample(key: Array, round: Array) -> Cohort:
            del round
            return _everyone_present(jnp.sort(_permutation(key, 0, clients)[:size]))

        return _every_round(sample, size)

    _check_clients(clients)
    if size is not None or rho is not None:
        raise checks.UserError("sampler static: members given together with size or rho, only one of them expected")
    for member in members:
        checks.number("sampler static: members (client ids)", member, low=0, high=clients - 1, integer=True)
    if len(set(members)) != len(members):
        raise checks.UserError(f"sampler static: members {tuple(members)} name a client twice, distinct ids expected")
    given = np.array(members, np.int32)

    def sample_given(key: Array, round: Array) -> Cohort:
        del key, round
        return _everyone_present(jnp.asarray(given))

    return _every_round(sample_given, len(given))


def randomized_order(clients: int, size: int | None = None, rho: float | None = None) -> Sampler:
    """Windows over one random order that is never refreshed, read cyclically.

    Source: DP-SimAgg, section III-C and Fig. 3 (b). Round t reads the places t size .. t size + size - 1 modulo K, so
    a client is read every K places. The size is at most K, hence nobody is twice in one window; among rounds * size
    places in a row a client has at most ceil(rounds size / K); and two of its places are in rounds at least
    floor(K / size) apart.

    Args:
      clients: K.
      size: clients per round, in [1, K].
      rho: instead of size; the fraction of the clients, size = floor(rho K).
    """
    size = _window_size("randomized_order", clients, size, rho)
    period = clients // math.gcd(clients, size)
    # A table made in 64 bits: round * size would overflow int32 in a long run.
    starts = (np.arange(period, dtype=np.int64) * size % clients).astype(np.int32)

    def sample(key: Array, round: Array) -> Cohort:
        places = jnp.asarray(starts)[jnp.asarray(round) % period] + jnp.arange(size, dtype=jnp.int32)
        return _everyone_present(_permutation(key, 0, clients)[places % clients])

    return Sampler(
        sample=sample,
        capacity=size,
        q=None,
        truncated=False,
        max_participations=lambda rounds: -(-rounds * size // clients),
        min_cohort=size,
        min_separation=clients // size,
    )


def sliding_window(clients: int, size: int | None = None, rho: float | None = None, released: bool = False) -> Sampler:
    """Consecutive windows over a list of the clients that is shuffled anew in every cycle.

    Source: DP-SimAgg, section III-C and Fig. 3 (c). A cycle has ceil(K / size) rounds and its own permutation. Where
    size does not divide K the paper fills the last window across the boundary, by "integer rounding" that it does not
    spell out; here the last window is short (rows with present False). So a client is in exactly one window of every
    cycle, in at most ceil(rounds / ceil(K / size)) rounds, and never twice in one window. It can be the last of one
    cycle and the first of the next: separation 1.

    released: what the public FeTS 2021/2022 code does instead. The first names are appended to the list until size
    divides its length, the first cycle is read unshuffled, later ones shuffle the padded list. An appended client can
    be in two windows of a cycle. Deviations: (1) the code can put it twice in one window; here the second of these
    rows has present False, as a client trains once per round. (2) the unshuffled order is that of the client ids,
    which the data decides; the code sorts names as strings. (3) a cycle is length / size rounds; the code divides by
    the unrounded rho K, which agrees for the partitions of that challenge (K = 23, 33) but not for every K. (4) the
    shuffles come from the run's key, not from the round number.

    Args:
      clients: K.
      size: clients per round, in [1, K].
      rho: instead of size; the fraction of the clients, size = floor(rho K), the paper's form (0.2 of 33 = 6).
      released: see above.
    """
    size = _window_size("sliding_window", clients, size, rho)
    checks.one_of("sampler sliding_window: released", released, (False, True))
    cycle_rounds = -(-clients // size)
    if released:
        return _released_window(clients, size, cycle_rounds)

    def sample(key: Array, round: Array) -> Cohort:
        round = jnp.asarray(round)
        places = round % cycle_rounds * size + jnp.arange(size, dtype=jnp.int32)
        order = _permutation(key, round // cycle_rounds, clients)
        return Cohort(order[jnp.minimum(places, clients - 1)], places < clients)

    return Sampler(
        sample=sample,
        capacity=size,
        q=None,
        truncated=False,
        max_participations=lambda rounds: -(-rounds // cycle_rounds),
        min_cohort=clients - (cycle_rounds - 1) * size,
        min_separation=1,
    )


def _released_window(clients: int, size: int, cycle_rounds: int) -> Sampler:
    """The released variant of sliding_window; see there."""
    length = cycle_rounds * size
    appended = length - clients  # less than size, so nobody is listed three times
    padded = np.arange(length, dtype=np.int32) % clients

    def sample(key: Array, round: Array) -> Cohort:
        round = jnp.asarray(round)
        cycle = round // cycle_rounds
        order = jnp.where(cycle == 0, jnp.arange(length), _permutation(key, cycle, length))
        window = jnp.asarray(padded)[order[round % cycle_rounds * size + jnp.arange(size)]]
        repeat = jnp.any(jnp.tril(window[:, None] == window[None, :], k=-1), axis=1)
        return Cohort(window, ~repeat)

    def max_participations(rounds: int) -> int:
        cycles, rest = divmod(rounds, cycle_rounds)
        if appended == 0 or cycles == 0:
            # In the unshuffled first cycle the appended names are read by its last window only.
            return cycles + (rest > 0)
        return 2 * cycles + min(2, rest)

    return Sampler(
        sample=sample,
        capacity=size,
        q=None,
        truncated=False,
        max_participations=max_participations,
        min_cohort=size - min(appended, size // 2),
        min_separation=1,
    )


def adaptive(
    clients: int, size: int | None = None, rho: float | None = None, temperature: float = 1.0, explore: float = 0.1
) -> Sampler:
    """Sites whose last update moved furthest come more often; the rule is ours, see adaptive_sampling.py.

    Args:
      clients: K.
      size: clients per round, in [1, K].
      rho: instead of size; the fraction of the clients, size = floor(rho K).
      temperature: > 0; the larger, the nearer to a uniform choice.
      explore: in (0, 1]; the share of a uniform choice in every place of the cohort.
    """
    size = _window_size("adaptive", clients, size, rho)
    checks.number("sampler adaptive: temperature", temperature, above=0)
    checks.number("sampler adaptive: explore", explore, above=0, high=1)
    memory = adaptive_sampling.by_divergence(clients, size, temperature, explore)
    first = lambda key, round: memory.sample(key, round, memory.init())
    return _every_round(first, size)._replace(memory=memory)


SAMPLERS = {
    "full": full,
    "uniform": uniform,
    "poisson": poisson,
    "static": static,
    "randomized_order": randomized_order,
    "sliding_window": sliding_window,
    "adaptive": adaptive,
    "balls_in_bins": balls_in_bins,
}


def make(name: str, clients: int, **options: Any) -> Sampler:
    """The sampler of that name over K = clients clients; UserError for an unknown name or a bad option."""
    maker = checks.lookup(SAMPLERS, name, "sampler")
    return checks.call(maker, f"sampler {name}", (clients,), options)


def _stream(key: Array) -> Array:
    return jax.random.fold_in(key, _SAMPLING_STREAM)


def _permutation(key: Array, number: Any, length: int) -> Array:
    """int32 [length]; the number-th random order of this run."""
    return jax.random.permutation(jax.random.fold_in(_stream(key), number), jnp.arange(length, dtype=jnp.int32))


def _everyone_present(ids: Array) -> Cohort:
    return Cohort(ids, jnp.ones(ids.shape, bool))


def _every_round(sample: Any, size: int) -> Sampler:
    """A sampler of fixed size that may draw a client in every round."""
    return Sampler(
        sample=sample,
        capacity=size,
        q=None,
        truncated=False,
        max_participations=lambda rounds: rounds,
        min_cohort=size,
        min_separation=1,
    )


def _check_clients(clients: int) -> None:
    checks.number("sampler: number of clients", clients, low=1, integer=True)


def _window_size(name: str, clients: int, size: int | None, rho: float | None) -> int:
    """The number of clients per round from exactly one of size and rho."""
    _check_clients(clients)
    if (size is None) == (rho is None):
        given = "neither" if size is None else "both"
        raise checks.UserError(f"sampler {name}: {given} of size and rho given, exactly one expected")
    if rho is None:
        checks.number(f"sampler {name}: size", size, low=1, high=clients, integer=True)
        assert size is not None
        return int(size)
    checks.number(f"sampler {name}: rho", rho, above=0, high=1)
    # 0.29 * 100 is 28.999...96 in floating point: the floor of the number that was meant is 29.
    floor = math.floor(rho * clients + 1e-9)
    if floor < 1:
        raise checks.UserError(
            f"sampler {name}: rho {rho!r} of {clients} clients is less than one client, at least 1/{clients} expected"
        )
    return floor
