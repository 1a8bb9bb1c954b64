"""Cluster based secure multi-party computation as published: shares are a message times a random number.

Faithful to the paper, and hiding nothing: a share has the direction, signs, zeros and ratios of the message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Meeting, SecureSum, Tree
from fedjax_seg.privacy import clusters as dealing

_BETA = 0xBE7A  # stream of a meeting's key
LEAST = 2.0**-22  # of every beta: float32 would round the smallest ones to 0, and then another one to 1
LAWS = ("dirichlet", "uniform")
_EXACT = jax.lax.Precision.HIGHEST  # accelerators multiply float32 matrices with 10 bits otherwise


def smc_scalar(
    *,
    clients: int,
    places: int,
    most: float,
    site_columns: Mapping[str, Sequence[Any]] | None = None,
    law: str = "dirichlet",
    concentration: float = 1.0,
    clusters: int = 0,
    size: int = 0,
    sizes: tuple[int, ...] = (),
    column: str = "",
    redraw: bool = False,
    seed: int = 0,
) -> SecureSum:
    """Every hospital of a cluster sends every other one a random portion of its message and keeps the rest.

    Source: "Cluster based secure multi-party computation in federated learning for histopathology images", Algorithm 1,
    equations 1 to 4: hospital k draws N numbers 0 < beta_kj < 1 that sum to one and sends beta_kj w_k to j; hospital k
    then sends R_k = sum_j beta_jk w_j to the server, which adds up. Deviations: the printed equations were
    reconstructed from the text; the law of beta, which the paper does not state, is an option; messages are whatever
    the aggregator sums, weights included, where the paper sums model weights. Without recovery: if somebody leaves, the
    exchange is repeated among the rest.

    Args:
      clients, places, most, site_columns: K, C, the largest number of examples and the facts of sites.
      law: 'dirichlet': (beta_k1, ..., beta_kN) ~ Dirichlet(concentration); 'uniform': N uniform numbers over their sum.
      concentration: > 0, of the Dirichlet law; 1 = uniform on the simplex.
      clusters, size, sizes, column, redraw, seed: as clusters.chosen.
    Returns: a SecureSum with hides=False.
    """
    what = "secure_sum 'smc_scalar'"
    checks.one_of(f"{what}: law", law, LAWS)
    checks.number(f"{what}: concentration", concentration, above=0.0, low=0.0)
    if law == "uniform" and concentration != 1:
        raise checks.UserError(f"{what}: concentration: {concentration:g} given with law 'uniform', which has none")
    dealt = dealing.chosen(
        what,
        clients,
        places,
        site_columns,
        clusters=clusters,
        size=size,
        sizes=sizes,
        column=column,
        redraw=redraw,
        seed=seed,
    )

    def meet(cohort: Any, stays: Array, key: Array) -> Meeting:
        return dealing.meet(dealt, cohort, stays, key)

    def open_(total: Tree, meeting: Meeting, arrived: Array) -> tuple[Tree, Array]:
        beta = shares(meeting, arrived, law=law, concentration=concentration)
        beta = jnp.where(arrived[None, :], beta, 0)  # only who arrived sends its mixture
        return jax.tree.map(lambda w: jnp.sum(mixed(beta, w), axis=0), total), dealing.alone(meeting, arrived)

    def views(messages: Array, meeting: Meeting) -> Mapping[str, Array]:
        beta = shares(meeting, meeting.counts, law=law, concentration=concentration)
        first = jnp.argmax(dealing.partners(meeting, meeting.counts), axis=1)
        given = jnp.take_along_axis(beta, first[:, None], axis=1)
        sent = jnp.sum(jnp.where(jnp.eye(len(beta), dtype=bool), 0, beta), axis=1, keepdims=True)
        counted = jnp.where(meeting.counts[:, None], messages, 0)
        return {"neighbour": given * counted, "colluders": sent * counted, "server": mixed(beta, counted)}

    facts = {
        "protocol": "scalar shares in clusters",
        "source": "Cluster based SMC in federated learning for histopathology images, Algorithm 1",
        "hides": False,
        "grade": "none needed: its random numbers hide nothing, whatever their quality",
        "threat": [
            "Semi-honest parties; nothing is hidden from a neighbour: one share has the direction of the message, its"
            " signs, zeros and ratios, and with one known entry or the last global model its size as well.",
            "All other members of a cluster together learn a message up to one factor.",
            "The server receives as many mixtures of a cluster's messages as there are members: they span the same"
            " space, and independent component analysis finds the messages in it.",
            "No message is checked: a hospital can send what it likes.",
            "The sum itself still tells about the data; only differential privacy covers that.",
        ],
        "law": law,
        "concentration": float(concentration) if law == "dirichlet" else None,
        **dealt.facts,
    }
    return SecureSum("smc_scalar", False, "each", meet, _seal, open_, views, float(most), 0.0, facts)


def _seal(message: Tree, row: Array, meeting: Meeting) -> tuple[Tree, Mapping[str, Array]]:
    """The message as it is: the exchange mixes messages of several hospitals, so `open` does it for all at once."""
    del row, meeting
    return message, {"saturated": jnp.zeros((), jnp.int32)}


def shares(
    meeting: Meeting, among: Array | None = None, *, law: str = "dirichlet", concentration: float = 1.0
) -> Array:
    """beta, float32 [C, C]: the portion of row k's message that goes to row j, 0 < beta < 1 inside a group.

    Source: equation 1 of the paper: rows sum to one over the members of the own group.

    Args:
      among: bool [C], who exchanges; None = meeting.joined. A portion among fewer is the same draw over a smaller sum:
        a part of a Dirichlet vector over its sum is Dirichlet again, so the law stays.
    Returns: zeros in rows and columns that are not `among`; a row alone in its group keeps all (beta = 1).
    """
    among = meeting.joined if among is None else among
    rows = jnp.arange(among.shape[0])
    inside = dealing.partners(meeting, among) | ((rows[:, None] == rows[None, :]) & among[:, None])
    key = jax.random.fold_in(meeting.key, _BETA)

    def log_draw(sender: Array, receiver: Array) -> Array:
        pair = jax.random.fold_in(jax.random.fold_in(key, sender), receiver)
        if law == "uniform":
            return jnp.log(jax.random.uniform(pair, minval=2.0**-24))
        if concentration == 1:
            return jnp.log(jax.random.exponential(pair) + 2.0**-40)  # an exponential draw can be 0
        return jax.random.loggamma(pair, concentration)

    drawn = jax.vmap(lambda k: jax.vmap(lambda j: log_draw(k, j))(meeting.clients))(meeting.clients)
    drawn = jnp.where(inside, drawn, -jnp.inf)
    highest = jnp.max(drawn, axis=1, keepdims=True)
    raw = jnp.where(inside, jnp.exp(drawn - jnp.where(jnp.isfinite(highest), highest, 0)), 0)
    portion = raw / jnp.maximum(jnp.sum(raw, axis=1, keepdims=True), 1)  # the largest is 1, so the sum is at least 1
    members = jnp.sum(inside, axis=1, keepdims=True)
    return jnp.where(inside, (1 - members * LEAST) * portion + LEAST, 0)


def mixed(beta: Array, messages: Array) -> Array:
    """R, of the shape of messages [C, ...]: row k is sum_j beta_jk w_j, what hospital k sends (equation 2)."""
    flat = messages.reshape(messages.shape[0], -1)
    return jnp.matmul(beta.T, flat, precision=_EXACT).reshape(messages.shape)
