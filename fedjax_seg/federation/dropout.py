"""Clients that fail in a round: before it begins, or after they have exchanged secrets and before their upload."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array

WHEN = ("before", "after", "either")

Dropout = Callable[[Array, Array, Array], tuple[Array, Array]]


def make(
    sites: Sequence[str], *, probability: float = 0.0, when: str = "after", schedule: Sequence[str] = ()
) -> Dropout | None:
    """Who fails when. Two runs with one seed lose the same clients, whatever they do with their messages.

    Args:
      sites: names of the clients, in the order of their ids.
      probability: of every client in every round, in [0, 1), independently.
      when: 'before' the exchange of a secure sum (as if never sampled), 'after' it, or 'either' by the toss of a coin.
        Without a secure sum there is no difference: the update is lost.
      schedule: what happens for certain, besides: 'ROUND:SITE' or 'ROUND:SITE:before', rounds counted from 1.

    Returns: (clients int32 [C], round int32 from 0, key) -> (before bool [C], after bool [C]), disjoint, pure; None
      where nobody ever fails.
    Raises: UserError on an entry that is out of range or names nobody.
    """
    checks.number("dropout.probability", probability, low=0.0, high=0.999)
    checks.one_of("dropout.when", when, WHEN)
    events = [_event(entry, sites, when) for entry in schedule]
    if not probability and not events:
        return None
    rounds, who, early = (np.array(column) for column in zip(*events)) if events else (np.zeros(0, int),) * 3

    def scheduled(clients: Array, round: Array, which: np.ndarray) -> Array:
        hit = (rounds[which] == round + 1) & (who[which] == clients[:, None])
        return jnp.any(hit, axis=1)

    def drawn(clients: Array, key: Array) -> tuple[Array, Array]:
        of_client = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(key, k), (2,)))(clients)
        fails = of_client[:, 0] < probability
        first = of_client[:, 1] < {"before": 1.0, "after": 0.0, "either": 0.5}[when]
        return fails & first, fails & ~first

    def failing(clients: Array, round: Array, key: Array) -> tuple[Array, Array]:
        before = scheduled(clients, round, np.flatnonzero(early))
        after = scheduled(clients, round, np.flatnonzero(np.logical_not(early)))
        if probability:
            by_chance = drawn(clients, key)
            before, after = before | by_chance[0], after | by_chance[1]
        return before, after & ~before

    return failing


def _event(entry: str, sites: Sequence[str], when: str) -> tuple[int, int, bool]:
    """(round from 1, client, whether before the exchange)."""
    number, _, rest = str(entry).partition(":")
    site, moment = rest, "" if when == "either" else when
    for end in ("before", "after"):
        if rest not in sites and rest.endswith(f":{end}"):
            site, moment = rest.removesuffix(f":{end}"), end
    if not number.isdecimal() or int(number) < 1 or not site or not moment:
        raise checks.UserError(
            f"dropout.schedule: {entry!r} given, 'ROUND:SITE' or 'ROUND:SITE:before|after' expected, e.g."
            f" '3:{sites[0]}:after' (rounds from 1{'; when=either leaves the moment open' if not moment else ''})"
        )
    if site not in sites:
        raise checks.UserError(f"dropout.schedule: {entry!r}: unknown site {site!r};{checks.suggestion(site, sites)}")
    return int(number), list(sites).index(site), moment == "before"
