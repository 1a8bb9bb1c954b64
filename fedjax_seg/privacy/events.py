"""What ran, as data: the releases of a run, read from its sampler and its mechanism and from nothing else.

An `Event` says how often noise of which size was added, and how the units behind it were drawn. `objection` tells for
which of them an epsilon is proven; `accounting` computes it. Nothing here needs an accountant's library.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.core.types import Mechanism, Sampler

KINDS = ("gaussian", "poisson", "truncated_poisson", "fixed_size", "balls_in_bins")
ADJACENCIES = ("zero-out", "add-remove", "replace-one")
ACCOUNTANTS = ("pld", "rdp")


@dataclass(frozen=True)
class Event:
    """`count` releases with Gaussian noise, of one kind.

    Attributes:
      kind: 'gaussian' (the unit is in all of them), 'poisson' (in each with probability q, independently),
        'truncated_poisson' (so, and a draw beyond `capacity` is cut to a uniform subset of it), 'fixed_size' (`sample`
        of `population` units, uniform, drawn anew for each), 'balls_in_bins' (in those r with r mod bins = its bin,
        which it drew once).
      noise_multiplier: standard deviation / sensitivity, the sensitivity being that of `adjacency`.
      count: releases: those the unit can be in for 'gaussian', all of them for the other kinds.
      q, sample, population, capacity, bins: of the kinds that have them, else None.
      adjacency: what the noise multiplier refers to.
    """

    kind: str
    noise_multiplier: float
    count: int
    q: float | None = None
    sample: int | None = None
    population: int | None = None
    capacity: int | None = None
    bins: int | None = None
    adjacency: str = "zero-out"


def of_rounds(mechanism: Mechanism, sampler: Sampler, rounds: int, clients: int, tensors: int = 1) -> tuple[Event, ...]:
    """What `rounds` rounds of a mechanism with noise once per round were.

    A mechanism whose noise is correlated over rounds (span > 0) is one release. `tensors` releases of one round share
    the draw of its clients: together they are one Gaussian with noise_multiplier / sqrt(tensors).

    Args:
      mechanism: of the aggregator.
      sampler: of the run, over `clients` clients.
      tensors: releases per round where the rule adds noise tensor by tensor.
    """
    _check(rounds, clients, tensors)
    z = mechanism.noise_multiplier / math.sqrt(tensors)
    made = Event("gaussian", z, int(rounds), adjacency=mechanism.adjacency)
    if mechanism.span:
        return (replace(made, count=1),)
    if mechanism.local:  # the server sees who comes, and nothing is drawn in its eyes
        return (by_participations(mechanism, sampler, rounds, tensors),)
    if sampler.q is not None and sampler.q < 1:
        _check_independent(sampler, rounds)
        made = replace(made, kind="poisson", q=sampler.q)
        if sampler.truncated:
            made = replace(made, kind="truncated_poisson", capacity=sampler.capacity, population=clients)
        return (made,)
    if sampler.drawn is not None and sampler.drawn[0] < sampler.drawn[1]:
        return (replace(made, kind="fixed_size", sample=sampler.drawn[0], population=sampler.drawn[1]),)
    if sampler.bins > 1:
        return (replace(made, kind="balls_in_bins", bins=sampler.bins),)
    return (by_participations(mechanism, sampler, rounds, tensors),)


def by_participations(mechanism: Mechanism, sampler: Sampler, rounds: int, tensors: int = 1) -> Event:
    """The releases that one client can be in, without amplification: proven for samplers that do not read the data.

    A client that is in k of the rounds moves k of the releases; the others are post-processing.
    """
    _check(rounds, 1, tensors)
    times = 1 if mechanism.span else min(int(sampler.max_participations(int(rounds))), int(rounds))
    z = mechanism.noise_multiplier / math.sqrt(tensors)
    return Event("gaussian", z, times, adjacency=mechanism.adjacency)


def objections(mechanism: Mechanism, sampler: Sampler, rounds: int) -> tuple[str, ...]:
    """Why a mechanism under this sampler promises nothing; () where it does."""
    noise, found = mechanism.noise_multiplier > 0, list[str]()
    if not mechanism.formal:
        found += mechanism.reasons or ("the mechanism has no proof" if noise else "there is no noise",)
    elif math.isinf(mechanism.sensitivity):
        found.append("nothing is clipped: the sensitivity is infinite")
    elif not noise:
        found.append("there is no noise")
    elif not mechanism.sensitivity > 0:
        found.append("the sensitivity depends on the data")
    if sampler.memory is not None:
        found.append("the sampler chooses clients by their private updates")
    if mechanism.span:
        times, apart = min(sampler.max_participations(int(rounds)), int(rounds)), sampler.min_separation
        if rounds > mechanism.span:
            found.append(f"the noise is made for {mechanism.span} rounds, {rounds} are run")
        if times > mechanism.participations or (times > 1 and apart < mechanism.separation):
            found.append(
                f"the noise is made for clients in at most {mechanism.participations} rounds, {mechanism.separation}"
                f" apart; the sampler allows {times}, {apart} apart"
            )
    return tuple(dict.fromkeys(found))


def objection(event: Event, adjacency: str, accountant: str) -> str:
    """Why this accountant proves no epsilon of the event under that adjacency; '' where it does. One line.

    A noise multiplier of replace-one bounds what replacing a unit moves, not what its absence moves: neither another
    adjacency nor a theorem about independent draws follows.
    """
    own, name = event.adjacency, event.kind.replace("_", " ")
    if own == "replace-one" and adjacency != "replace-one":
        return f"adjacency: {adjacency!r} given for a mechanism that is stated for replace-one, 'replace-one' expected"
    if event.kind == "poisson":
        if own == "replace-one":
            return (
                "amplification by Poisson sampling: it is proven here for add-remove and zero-out, the mechanism is"
                " stated for replace-one"
            )
        if adjacency == "replace-one" and accountant == "rdp":
            return "accountant: 'rdp' given for replace-one under Poisson sampling, 'pld' expected"
    if event.kind == "truncated_poisson" and (own, adjacency, accountant) != ("zero-out", "zero-out", "pld"):
        return f"{name}: {adjacency}, {accountant!r} given; zero-out (the number of units is public), 'pld' expected"
    if event.kind == "fixed_size" and (adjacency, accountant) != ("replace-one", "rdp"):
        return f"{name}: {adjacency}, {accountant!r} given; it is proven here for replace-one by 'rdp'"
    if event.kind == "balls_in_bins" and (adjacency == "replace-one" or accountant != "pld"):
        return f"{name}: {adjacency}, {accountant!r} given; it is proven here for zero-out and add-remove by 'pld'"
    return ""


def described(event: Event) -> dict[str, Any]:
    """JSON-able: {'event': kind, its fields that are not None, 'sentence'}."""
    fields = {k: v for k, v in asdict(event).items() if v is not None and k != "kind"}
    return {"event": event.kind, **fields, "sentence": _sentence(event)}


def _sentence(event: Event) -> str:
    times = "1 release" if event.count == 1 else f"{event.count} releases"
    noise = f"{times} with Gaussian noise of {event.noise_multiplier:.4g} times the {event.adjacency} sensitivity"
    who = {
        "gaussian": "the unit can be in every one",
        "poisson": f"the unit is in each with probability {event.q}, independently",
        "truncated_poisson": f"each of {event.population} units is drawn with probability {event.q}, independently, and"
        f" a draw of more than {event.capacity} is cut to a random {event.capacity}",
        "fixed_size": f"{event.sample} of {event.population} units are drawn anew for each, uniformly",
        "balls_in_bins": f"the unit draws one of {event.bins} bins once and is in every {event.bins}th release",
    }
    return f"{noise}; {who[event.kind]}"


def _check_independent(sampler: Sampler, rounds: int) -> None:
    """Clients that join independently may join every round: a sampler that knows better does not draw them so."""
    most, apart = sampler.max_participations(rounds), sampler.min_separation
    if most < rounds or apart > 1 or sampler.drawn is not None or sampler.bins:
        raise checks.UserError(
            f"sampler: q = {sampler.q:g} given with at most {most} of {rounds} rounds per client, {apart} apart; q None"
            " expected, as Poisson draws have no such bound"
        )


def _check(rounds: int, clients: int, tensors: int) -> None:
    checks.number("rounds", rounds, low=1, integer=True)
    checks.number("clients", clients, low=1, integer=True)
    checks.number("tensors", tensors, low=1, integer=True)
