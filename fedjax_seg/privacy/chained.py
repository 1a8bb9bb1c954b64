"""The chained secure sum: a running total goes from hospital to hospital, hidden by a word that only the server has."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array, Cohort, Meeting, SecureSum, Tree
from fedjax_seg.privacy import clusters, fixed_point

_START = 0x57A7  # stream of a meeting's key: the server's random words


def chained(
    *, clients: int, places: int, most: float, clip: float = fixed_point.CLIP, frac: int | None = None
) -> SecureSum:
    """The server gives r to the first hospital; each adds its message and hands on; the last one returns the total.

    Source: the chained SMC that "Cluster based secure multi-party computation in federated learning for histopathology
    images" compares with (its reference [10]): "the central server sends one of the participants a random number. Then
    participants sequentially communicate with each other". Deviations: r is a vector of uniform words modulo 2^32 and
    messages are fixed point, so that the sum is exact and one curious hospital sees uniform words; one random number
    for all entries would give every difference between entries away. The order is drawn anew in every round.

    In the simulation r is left out of the uploads, since the server adds and subtracts it itself; `views` shows it.
    Somebody who leaves breaks the chain: it is repeated among the rest.

    Args:
      clients, places, most: K, C and the largest number of examples.
      clip, frac: as fixed_point.chosen.
    Returns: a SecureSum; hides=True against one party alone.
    """
    form = fixed_point.chosen("secure_sum 'chained'", clip, frac, places)
    everybody = clusters.mesh(clients)

    def meet(cohort: Cohort, stays: Array, key: Array) -> Meeting:
        meeting = clusters.meet(everybody, cohort, stays, key)
        place = clusters.chain(meeting, meeting.joined)
        next_to = jnp.abs(place[:, None] - place[None, :]) == 1
        return meeting._replace(
            links=meeting.links & next_to, place=place
        )  # only neighbours in the chain speak to each other

    def seal(message: Tree, row: Array, meeting: Meeting) -> tuple[Tree, Mapping[str, Array]]:
        words, saturated = fixed_point.words_of(message, row, meeting, form)
        return words, {"saturated": saturated}

    def open_(total: Tree, meeting: Meeting, arrived: Array) -> tuple[Tree, Array]:
        return fixed_point.decode(total, form.frac), clusters.alone(meeting, arrived)

    def views(messages: Array, meeting: Meeting) -> Mapping[str, Array]:
        """neighbour: the running total that the row hands on. colluders: what the hospitals before and behind it know
        together, the difference of two running totals (of the first row: its total; of the last: nothing). server: what
        the last row returns."""
        return _views(messages, meeting, form)

    facts: dict[str, Any] = {
        "protocol": "chained",
        "source": "reference [10] of Cluster based SMC in federated learning for histopathology images",
        "hides": True,
        "grade": "simulation: threefry2x32, 64-bit keys",
        "threat": [
            "Semi-honest parties: one hospital sees uniform words, the server sees the sum of all and nothing else.",
            "The hospitals before and behind another one learn its message if they compare notes.",
            "The server learns the message of the first hospital from the second, and that of the last from the one"
            " before it.",
            "With two members each learns the other's message from the sum.",
            "A hospital that leaves breaks the chain, which is repeated among the rest.",
            "No message is checked: a hospital can send what it likes.",
            "The sum itself still tells about the data; only differential privacy covers that.",
            "This is one process, which holds the secrets of all hospitals: it shows the protocol and protects nobody.",
        ],
        "clip": form.clip,
        "frac": form.frac,
        "step": form.step,
        **everybody.facts,
    }
    return SecureSum("chained", True, "sum", meet, seal, open_, views, float(most), form.step, facts)


def _views(messages: Array, meeting: Meeting, form: fixed_point.Format) -> Mapping[str, Array]:
    counts = meeting.counts
    words = jax.lax.map(
        lambda each: fixed_point.words_of(each[0], each[1], meeting, form)[0], (messages, jnp.arange(len(messages)))
    )
    words = jnp.where(counts[:, None], words, 0)
    place = jnp.where(counts, clusters.chain(meeting, counts), len(messages))
    order = jnp.argsort(place)
    start = fixed_point.stream(jax.random.fold_in(meeting.key, _START), messages.shape[1])
    running = start + jnp.cumsum(words[order], axis=0, dtype=jnp.uint32)
    handed = jnp.zeros_like(running).at[order].set(running)
    last = (place == jnp.sum(counts) - 1)[:, None] & counts[:, None]
    first, middle = (place == 0)[:, None] & counts[:, None], (place > 0)[:, None] & counts[:, None] & ~last
    shown = {
        "neighbour": jnp.where(counts[:, None] & ~last, handed, 0),
        "colluders": jnp.where(middle, words, jnp.where(first & ~last, handed, 0)),
        "server": jnp.where(last, handed, 0),
    }
    return fixed_point.decode(shown, form.frac)
