"""One federated round, and many of them in one call. Pure; compiled once per run.

Randomness: fold_in(run key, round, client, step) and nothing else, so that neither order nor lanes nor devices nor
chunks of rounds can change it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_seg.core import tree
from fedjax_seg.core.types import (
    Aggregator,
    Array,
    Client,
    ClientUpdate,
    Cohort,
    FederatedState,
    Meeting,
    Sampler,
    SecureSum,
    Tree,
    Variables,
)
from fedjax_seg.federation import client_axis, server
from fedjax_seg.federation.dropout import Dropout
from fedjax_seg.federation.local_batches import BatchesOf

SAMPLER, CLIENTS, AGGREGATOR, INIT, SECRETS, DROPOUT, WITNESS, ROUNDING = range(8)  # streams of the run's key
SHUFFLE, TRAIN, ENCODE = range(3)  # streams of a client's key


class Plan(NamedTuple):
    """Which cases are whose in one replica. Index arrays are padded with 0 behind the sizes."""

    train: Any  # int32 [K, M]; numpy on the host, jax on the device
    train_sizes: Any  # int32 [K]
    test: Any  # int32 [K, T]
    test_sizes: Any  # int32 [K]


class Parts(NamedTuple):
    """What a federation is made of, all values."""

    client: Client
    aggregator: Aggregator
    sampler: Sampler
    server: optax.GradientTransformation
    batches_of: BatchesOf
    skip_nonfinite: bool  # True: leave a non-finite client out of the round; False: stop before the round
    # True: a round of total weight 0, or whose secure sum cannot be opened, changes nothing; False: stop before it
    skip_empty: bool
    # Of mechanisms' noise and of the secrets of secure sums: two runs with one seed and the same noise would give each
    # other's aggregates away.
    salt: int = 0
    secure: SecureSum | None = None
    dropout: Dropout | None = None


class Gathering(NamedTuple):
    """Who is there in a round.

    Attributes:
      drawn: as the sampler says.
      cohort: who trains: drawn, with training cases, and its upload will come.
      dropped: bool [C], (before, after) the exchange of secrets.
      left_out: bool [C], there, but nobody else of its cluster is: its sum would be its message.
      meeting: of the secure sum, None where there is none.
    """

    drawn: Cohort
    cohort: Cohort
    dropped: tuple[Array, Array]
    left_out: Array
    meeting: Meeting | None


def stream(key: Array, *numbers: Any) -> Array:
    """The key of a sub-stream."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def initial_state(parts: Parts, variables: Variables, key: Array, clients: int) -> FederatedState:
    """The state before round 0 of one replica. key: a typed key; its data is kept."""
    rows = parts.client.init(variables)
    personal = jax.tree.map(lambda x: jnp.broadcast_to(x, (clients, *x.shape)), rows)
    return FederatedState(
        jnp.zeros((), jnp.int32),
        variables,
        parts.server.init(variables["params"]),
        parts.aggregator.init(variables),
        personal,
        jax.random.key_data(key),
        parts.sampler.memory.init() if parts.sampler.memory else (),
    )


def gather(parts: Parts, state: FederatedState, plan: Plan, secrets: int = SECRETS) -> Gathering:
    """Draws the cohort of a round, and who of it fails. secrets: the stream of the secure sum's key."""
    key, round = jax.random.wrap_key_data(state.key), state.round
    memory = parts.sampler.memory
    if memory is None:
        # Two runs whose noise is apart must not share who is drawn either: amplified epsilons would not add up.
        drawing = stream(key, SAMPLER)
        drawn = parts.sampler.sample(_salted(parts, drawing) if _formal(parts) else drawing, round)
    else:
        drawn = memory.sample(stream(key, SAMPLER), round, state.sampler)
    able = drawn.present & (plan.train_sizes[drawn.clients] > 0)  # a site without a training case is absent
    before = after = jnp.zeros_like(able)
    if parts.dropout:
        fails = parts.dropout(drawn.clients, round, stream(key, DROPOUT, round))
        before, after = (able & failing for failing in fails)
    if parts.secure is None:
        there = able & ~before & ~after
        return Gathering(drawn, Cohort(drawn.clients, there), (before, after), jnp.zeros_like(able), None)
    meeting = parts.secure.meet(Cohort(drawn.clients, able & ~before), ~after, stream(key, secrets, parts.salt, round))
    # Not salted: protocols that sum integers sum the same ones, and give the same model to the bit.
    meeting = meeting._replace(dither=stream(key, ROUNDING, round))
    left_out = able & ~before & ~after & ~meeting.counts
    return Gathering(drawn, Cohort(drawn.clients, meeting.counts), (before, after), left_out, meeting)


def local_round(parts: Parts, state: FederatedState, plan: Plan, meeting: Meeting | None) -> Callable[..., Any]:
    """(client, present, personal) -> (upload, personal, info): one client's round, up to what leaves it.

    `info` are its scalars of the record; 'ok': whether the upload counts.
    """
    key, round = jax.random.wrap_key_data(state.key), state.round
    told = parts.aggregator.broadcast(state.aggregator)

    def train_one(client: Array, present: Array, personal: Tree) -> tuple[Tree, Tree, dict[str, Array]]:
        client_key = _salted(parts, stream(key, CLIENTS, round, client))
        local = _batches(parts, plan, client, present, client_key)
        update, personal = parts.client.train(
            state.variables, personal, local, stream(client_key, TRAIN), round=round, broadcast=told
        )
        finite = _finite(update)
        sent = update
        if parts.secure:  # weights are hidden like the rest, so they need a public range
            sent = update._replace(weight=update.weight / parts.secure.most)
        message = parts.aggregator.encode(sent, told, variables=state.variables, key=stream(client_key, ENCODE))
        noted: Mapping[str, Array] = {}
        if parts.secure:
            assert meeting is not None
            row = jnp.argmax(meeting.counts & (meeting.clients == client))
            message, noted = parts.secure.seal(message, row, meeting)
        info = {
            **update.metrics,
            **noted,
            "weight": update.weight,
            "steps": update.steps,
            "update_norm": jnp.sqrt(tree.squared_norm(update.delta["params"])),
            "finite": finite,
            "ok": present & (finite | _formal(parts)),
        }
        return message, personal, info

    return train_one


def one_round(
    parts: Parts, state: FederatedState, plan: Plan, how: client_axis.Lanes
) -> tuple[FederatedState, dict[str, Tree]]:
    """One round of one replica.

    Returns: the new state, and a record: 'cohort' and per-client values [C] (weight, steps, update_norm, finite, ok,
      loss, lr, ...), the aggregator's scalars, and the flags 'nonfinite', 'empty', 'failed', 'halt' that the host must
      look at; with dropouts or a secure sum also 'exchange' (who met whom). Where 'halt' is set the model, server and
      aggregator are the old ones.
    """
    key, round = jax.random.wrap_key_data(state.key), state.round
    there = gather(parts, state, plan)
    cohort, meeting, memory = there.cohort, there.meeting, parts.sampler.memory
    steps = steps_of(parts, state, plan, cohort)
    summed = (parts.secure.reads if parts.secure else parts.aggregator.reads) == "sum"
    total, personal, info, executed = client_axis.run(
        local_round(parts, state, plan, meeting), cohort, steps, state.personal, how, summed
    )
    counted, failed = Cohort(cohort.clients, info["ok"]), jnp.zeros((), bool)
    if parts.secure and meeting is not None:
        total, failed = parts.secure.open(total, meeting, counted.present)
    delta, aggregator, scalars = parts.aggregator.decode(
        total,
        counted,
        state.aggregator,
        variables=state.variables,
        round=round,
        key=_salted(parts, stream(key, AGGREGATOR, round)),
    )
    variables, server_opt = server.step(parts.server, state.variables, delta, state.server_opt)
    empty = jnp.sum(jnp.where(counted.present, info["weight"], 0)) <= 0
    if _formal(parts):
        empty = jnp.zeros((), bool)  # noise comes all the same: else a still model would tell that nobody came
    nonfinite = jnp.any(cohort.present & ~info["ok"])
    broken = ~empty & ~failed & ~jnp.isfinite(tree.squared_norm(delta))  # finite messages, but their aggregate is not
    halt = broken | (nonfinite & (not parts.skip_nonfinite)) | ((empty | failed) & (not parts.skip_empty))
    keep = empty | failed | halt
    variables, server_opt, aggregator = tree.where(
        keep, (state.variables, state.server_opt, state.aggregator), (variables, server_opt, aggregator)
    )
    seen = state.sampler  # an empty round is seen as well: whoever was drawn in vain has had its turn
    if memory is not None:
        seen = tree.where(halt, seen, memory.observe(seen, there.drawn, info["update_norm"], info["ok"]))
    # Rows of clients that did not count were never written; after a halt the host goes on from a checkpoint.
    new = FederatedState(round + jnp.where(halt, 0, 1), variables, server_opt, aggregator, personal, state.key, seen)
    record = {
        "round": round,
        "cohort": cohort._asdict(),
        "clients": info,
        "aggregator": dict(scalars),
        "executed": executed,
        "nonfinite": nonfinite | broken,
        "empty": empty,
        "failed": failed,
        "halt": halt,
    }
    return new, record | _exchange(parts, there, info["ok"])


def steps_of(parts: Parts, state: FederatedState, plan: Plan, cohort: Cohort) -> Array:
    """int32 [C], the local steps of every row; they do not depend on the key of the shuffle."""
    key = jax.random.wrap_key_data(state.key)
    return jax.vmap(lambda c, p: _batches(parts, plan, c, p, key).steps)(cohort.clients, cohort.present)


def _batches(parts: Parts, plan: Plan, client: Array, present: Array, client_key: Array) -> Any:
    """The local data of one client; none of an absent one."""
    size = jnp.where(present, plan.train_sizes[client], 0)
    return parts.batches_of(plan.train[client], size, client, stream(client_key, SHUFFLE))


def _formal(parts: Parts) -> bool:
    """Whether a message is bounded whatever its client does."""
    mechanism = parts.aggregator.mechanism
    return mechanism is not None and mechanism.formal


def _salted(parts: Parts, key: Array) -> Array:
    """The key of whatever may draw noise: salted in runs with a mechanism, which others would tell the noise of."""
    noisy = parts.client.mechanism is not None or parts.aggregator.mechanism is not None
    return stream(key, parts.salt) if noisy and parts.salt else key


def _finite(update: ClientUpdate) -> Array:
    """One pass over the large tree: NaN and infinity both show in its norm."""
    finite = jnp.isfinite(tree.squared_norm(update.delta["params"]))
    for name in update.delta:
        finite &= tree.all_finite(update.delta[name]) if name != "params" else True
    return finite


def _exchange(parts: Parts, there: Gathering, ok: Array) -> dict[str, Tree]:
    """What the record tells of dropouts and of a secure sum."""
    if parts.dropout is None and there.meeting is None:
        return {}
    found = {"before": there.dropped[0], "after": there.dropped[1], "left_out": there.left_out, "arrived": ok}
    if there.meeting is not None:
        met = there.meeting
        degree = jnp.sum(met.links, axis=1, dtype=jnp.int32)
        found |= {"joined": met.joined, "counts": met.counts, "group": met.group, "degree": degree}
        found |= {"place": met.place} if met.place is not None else {}
    return {"exchange": found}


def many_rounds(
    parts: Parts, how: client_axis.Lanes, capacity: int
) -> Callable[[FederatedState, Plan, Array], tuple[FederatedState, Mapping[str, Tree], Array]]:
    """(state, plan, stop) -> (state, records [capacity, ...], done): rounds until `stop` in one device loop.

    The number of rounds is a traced value, so that every chunk of a run shares one compile. A halting round ends the
    loop; its record is the last one written. `done` counts the written records.
    """

    def run(state: FederatedState, plan: Plan, stop: Array) -> tuple[FederatedState, Mapping[str, Tree], Array]:
        shape = jax.eval_shape(lambda s, p: one_round(parts, s, p, how)[1], state, plan)
        records = jax.tree.map(lambda s: jnp.zeros((capacity, *s.shape), s.dtype), shape)

        def go(carry: Any) -> Array:
            state, _, done, halted = carry
            return (state.round < stop) & ~halted & (done < capacity)

        def body(carry: Any) -> Any:
            state, records, done, _ = carry
            state, record = one_round(parts, state, plan, how)
            return state, tree.set_row(records, done, record), done + 1, record["halt"]

        zero = jnp.zeros((), jnp.int32)
        state, records, done, _ = jax.lax.while_loop(go, body, (state, records, zero, jnp.zeros((), bool)))
        return state, records, done

    return run
