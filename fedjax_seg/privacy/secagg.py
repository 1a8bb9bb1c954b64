"""Secure sums by masks that cancel: SecAgg (Bonawitz et al., 2017) and SecAgg+ (Bell et al., 2020).

Every two linked clients agree on a mask that one adds and the other subtracts, and every client adds a mask of its own.
Shares of the secrets behind the masks lie with the linked clients, so that the server can take out of the sum what does
not cancel: the own masks of those whose upload arrived, the pair masks of those whose upload did not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Array, Cohort, Meeting, SecureSum, Tree
from fedjax_seg.privacy import fixed_point, key_agreement, neighbourhood, threefry_masks
from fedjax_seg.privacy.neighbourhood import Masks, Request

PRGS = ("threefry", *key_agreement.CIPHERS)
Links = Callable[[Cohort, Array, Array], Array]


def secagg(
    *,
    clients: int,
    places: int,
    most: float,
    threshold: float = 0.5,
    clip: float = fixed_point.CLIP,
    frac: int | None = None,
    prg: str = "threefry",
) -> SecureSum:
    """Every two clients of a round are linked.

    Source: Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (2017), Figure 4
    without the consistency check of its version against an active server.

    Args:
      clients: K, of the federation.
      places: C, the most clients of a round, at least 2.
      most: the public largest number of examples of a client.
      threshold: in [0.5, 1): shares of floor(threshold * holders) + 1 clients give a secret.
      clip: > 0, entries of a message beyond it are cut, and counted.
      frac: bits behind the point of the encoding; None = as many as fit.
      prg: 'threefry' (in jit, simulation grade), or 'chacha20' or 'aes_ctr' with X25519 keys (on the host).

    Raises: UserError where an option is out of range, a sum could wrap, or the extra of a real cipher is missing.
    """
    links = lambda cohort, joined, key: neighbourhood.full(joined)
    facts = {
        "protocol": "SecAgg: pairwise masks and self masks, Shamir recovery of dropped clients",
        "source": "Bonawitz et al. (2017), Figure 4, semi-honest version",
        "neighbours": places - 1,
    }
    return _masked_sum("secagg", facts, links, places, clients, places, most, threshold, clip, frac, prg)


def secagg_plus(
    *,
    clients: int,
    places: int,
    most: float,
    threshold: float = 0.5,
    clip: float = fixed_point.CLIP,
    frac: int | None = None,
    prg: str = "threefry",
    neighbours: int = 12,
) -> SecureSum:
    """A client is linked with `neighbours` others only, anew in every round: a random Harary graph.

    Source: Bell et al., "Secure single-server aggregation with (poly)logarithmic overhead" (2020), Algorithms 2 and 3.

    The clients that arrive must stay connected, and every neighbourhood must keep t of its holders: else sums of parts
    come out, or nothing does. Bell et al. choose neighbours = O(log K), about 40 to 100 for hundreds of clients with
    many dropouts. With at most neighbours + 1 clients in a round the graph is full and this is `secagg`; below about
    33 clients nothing is gained by fewer links.

    Args: as `secagg`, and
      neighbours: even, at least 2.
    """
    checks.number("secure_sum 'secagg_plus': neighbours", neighbours, low=2, integer=True)
    if neighbours % 2:
        raise checks.UserError(
            f"secure_sum 'secagg_plus': neighbours: {neighbours} given, an even number expected, half of them on each"
            f" side of a client; use {neighbours + 1}"
        )
    links = lambda cohort, joined, key: neighbourhood.harary(cohort.clients, joined, key, neighbours)
    facts = {
        "protocol": "SecAgg+: SecAgg on a random k-regular graph of links",
        "source": "Bell et al. (2020), Algorithms 2 and 3, semi-honest version",
        "neighbours": min(int(neighbours), places - 1),
    }
    held = min(places, int(neighbours) + 1)
    return _masked_sum("secagg_plus", facts, links, held, clients, places, most, threshold, clip, frac, prg)


def _masked_sum(
    name: str,
    facts: Mapping[str, Any],
    links: Links,
    held: int,
    clients: int,
    places: int,
    most: float,
    threshold: float,
    clip: float,
    frac: int | None,
    prg: str,
) -> SecureSum:
    """held: H, the most holders of a client's shares, itself among them."""
    what = f"secure_sum {name!r}"
    if places < 2:
        raise checks.UserError(
            f"{what}: rounds of {places} client(s) given, at least 2 expected: the sum of one message is that message"
        )
    checks.number(f"{what}: threshold", threshold, low=0.5, high=1.0)
    if threshold == 1:
        raise checks.UserError(f"{what}: threshold: 1 given, a number in [0.5, 1) expected")
    checks.one_of(f"{what}: prg", prg, PRGS)
    form = fixed_point.chosen(what, clip, frac, places)
    table = neighbourhood.thresholds(threshold, held)
    real = prg != "threefry"
    masks = key_agreement.masks(what, prg, table) if real else threefry_masks.masks(table)
    described = {
        **facts,
        "grade": key_agreement.grade(prg) if real else _SIMULATION,
        "prg": prg,
        "threshold": float(threshold),
        "clip": form.clip,
        "frac": form.frac,
        "step": form.step,
        "threat": _threat(int(table[held]), held, real, facts["neighbours"] < places - 1),
    }
    seal = _seal(masks, form)
    return SecureSum(
        name=name,
        hides=True,
        reads="sum",
        meet=_meet(links),
        seal=seal,
        open=_open(masks, form, table),
        views=_views(seal, form),
        most=float(most),
        rounding=form.step,
        facts=described,
    )


def _meet(links: Links) -> Callable[[Cohort, Array, Array], Meeting]:
    def meet(cohort: Cohort, stays: Array, key: Array) -> Meeting:
        joined = cohort.present & (jnp.sum(cohort.present) > 1)
        group = jnp.zeros(joined.shape, jnp.int32)
        return Meeting(cohort.clients, joined, joined & stays, group, links(cohort, joined, key), key)

    return meet


def _seal(masks: Masks, form: fixed_point.Format) -> Callable[[Tree, Array, Meeting], tuple[Tree, Mapping[str, Array]]]:
    def seal(message: Tree, row: Array, meeting: Meeting) -> tuple[Tree, Mapping[str, Array]]:
        row = jnp.clip(row, 0, meeting.clients.shape[0] - 1)  # a lane without a client is outside
        words, saturated = fixed_point.words_of(message, row, meeting, form)
        return fixed_point.add(words, masks.of(meeting, row, tree.size(message))), {"saturated": saturated}

    return seal


def _open(
    masks: Masks, form: fixed_point.Format, table: np.ndarray
) -> Callable[[Tree, Meeting, Array], tuple[Tree, Array]]:
    def open_(total: Tree, meeting: Meeting, arrived: Array) -> tuple[Tree, Array]:
        arrived = arrived & meeting.joined
        request = Request(*neighbourhood.requests(meeting.joined, arrived), arrived)
        failed = neighbourhood.below_threshold(meeting, request, table)
        request = Request(*(ask & ~failed for ask in request))  # an aborted round asks for nothing
        left = masks.left(meeting, request, tree.size(total))
        summed = fixed_point.decode(fixed_point.add(total, -left), form.frac)
        return tree.where(failed, tree.zeros_like(summed), summed), failed

    return open_


def _views(seal: Callable[..., Any], form: fixed_point.Format) -> Callable[[Array, Meeting], Mapping[str, Array]]:
    def views(messages: Array, meeting: Meeting) -> Mapping[str, Array]:
        upload = jax.lax.map(lambda at: seal(*at, meeting)[0], (messages, jnp.arange(messages.shape[0])))
        server = jnp.where(meeting.joined[:, None], fixed_point.decode(upload, form.frac), 0.0)
        nothing = jnp.zeros_like(server)
        return {"neighbour": nothing, "colluders": nothing, "server": server}

    return views


_SIMULATION = (
    "simulation grade: threefry streams with keys of at most 64 bits, Diffie-Hellman in GF(2^31 - 1), which anybody can"
    " break; fit to study a protocol, not to protect data"
)


def _threat(least: int, held: int, real: bool, sparse: bool) -> list[str]:
    lines = [
        "the server and the clients follow the protocol and are curious (semi-honest); nothing holds against a server"
        " that lies about who arrived",
        f"the server together with up to {least - 1} of the {held} holders of a client's shares learns nothing of its"
        " message but what the sum tells (of a full round; fewer with fewer clients)",
        "messages are not validated: one client can send anything and spoil the sum unseen",
        "the sum itself is not protected: only noise (differential privacy) bounds what it tells about one client",
        "who takes part and who drops out is public",
        "this is one process, which holds the secrets of all clients: it shows the protocol and protects nobody",
    ]
    if sparse:
        lines.append("where the clients that arrive are not connected by links the server sees the sums of the parts")
    return lines if real else [*lines, "random numbers of simulation grade: see the grade"]
