"""From an epsilon of the whole run to what may run: the noise that it needs, or the rounds that it pays for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_seg.core import checks, noise
from fedjax_seg.core.types import Mechanism, Sampler
from fedjax_seg.privacy import accounting, curves, events


def rounds_within(
    mechanism: Mechanism,
    sampler: Sampler,
    *,
    clients: int,
    rounds: int,
    delta: float,
    budget: float,
    tensors: int = 1,
) -> int:
    """The most of `rounds` rounds of an aggregator's mechanism whose epsilon is at most the budget.

    0 where one round is beyond it, and for a mechanism without a guarantee (epsilon is infinite then). Noise that is
    correlated over rounds is one release: all rounds or none.

    Args: as of composition.round_ledger; `rounds` are those that the config asks for.
    """
    checks.number("privacy.budget", budget, low=0.0, above=0.0)
    found = curves.ways(mechanism, sampler, clients=clients, rounds=rounds, delta=delta, tensors=tensors)
    return _most(lambda number: curves.after(found, number, delta) <= budget, rounds)


def client_rounds_within(
    rows: Sequence[Mapping[str, Any]],
    *,
    local_epochs: int,
    sampler: Sampler,
    rounds: int,
    delta: float,
    budget: float,
) -> int:
    """The same for DP-SGD, for every client: after so many rounds the worst one's epsilon is at most the budget.

    Args:
      rows: of accounting.client_ledger, for `rounds` rounds.
      local_epochs: of a round.
    """
    checks.number("privacy.budget", budget, low=0.0, above=0.0)
    kept = {tuple(row[k] for k in ("sampling", "q", "steps", "epsilon_pld")): row for row in rows if row["steps"]}
    most = rounds
    for row in kept.values():
        way = curves.of_client(row, local_epochs=local_epochs, sampler=sampler, rounds=rounds, delta=delta)
        if way is None:
            return 0
        within = lambda number, way=way: curves.after([way], number, delta) <= budget
        most = _most(within, most) if row["epsilon_pld"] > budget else most
    return most


def multiplier_for(
    mechanism: Mechanism,
    sampler: Sampler,
    *,
    clients: int,
    rounds: int,
    delta: float,
    target: float,
    tensors: int = 1,
) -> float:
    """The least noise multiplier of an aggregator with which the whole run has at most the target epsilon.

    At least core.noise.LEAST, the least that carries a claim.

    Args:
      mechanism: as it is but for its noise multiplier, which is not read (and may be 0).
    Raises: UserError where no noise gives a guarantee: the mechanism has no proof, or the sampler allows none.
    """
    checks.number("privacy.target_epsilon", target, low=0.01)
    noisy = mechanism._replace(noise_multiplier=1.0)
    if mechanism.reasons and mechanism.reasons == noise.objections(mechanism.noise_multiplier):
        noisy = noisy._replace(formal=True, reasons=())  # noise is all that it lacked
    if why := events.objections(noisy, sampler, rounds):
        raise checks.UserError(f"privacy.target_epsilon: {target:g} given, but no noise gives a guarantee: {why[0]}")

    def epsilon(z: float) -> float:
        asked = noisy._replace(noise_multiplier=z)
        found = curves.ways(asked, sampler, clients=clients, rounds=rounds, delta=delta, tensors=tensors)
        return curves.best(found, delta)[0]

    return accounting.least_multiplier(epsilon, target)


def _most(within: Callable[[int], bool], rounds: int) -> int:
    """The largest number in 0 .. rounds with within(number), which holds up to some number and not beyond."""
    if within(rounds):
        return rounds
    low, high = 0, rounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
