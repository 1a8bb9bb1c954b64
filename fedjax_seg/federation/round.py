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
from fedjax_seg.core.types import Aggregator, Array, Client, Cohort, FederatedState, Sampler, Tree, Variables
from fedjax_seg.federation import client_axis, server
from fedjax_seg.federation.local_batches import BatchesOf

SAMPLER, CLIENTS, AGGREGATOR, INIT = range(4)  # streams of the run's key
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
    skip_empty: bool  # True: a round of total weight 0 changes nothing; False: stop before it
    # Of the mechanisms' noise: two runs with one seed and the same noise would give each other's aggregates away.
    salt: int = 0


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


def one_round(
    parts: Parts, state: FederatedState, plan: Plan, how: client_axis.Lanes
) -> tuple[FederatedState, dict[str, Tree]]:
    """One round of one replica.

    Returns: the new state, and a record: 'cohort' and per-client values [C] (weight, steps, update_norm, finite, ok,
      loss, lr, ...), the aggregator's scalars, and the flags 'nonfinite', 'empty', 'halt' that the host must look at.
      Where 'halt' is set the model, server and aggregator are the old ones.
    """
    key, round = jax.random.wrap_key_data(state.key), state.round
    memory = parts.sampler.memory
    if memory is None:
        drawn = parts.sampler.sample(stream(key, SAMPLER), round)
    else:
        drawn = memory.sample(stream(key, SAMPLER), round, state.sampler)
    sizes = plan.train_sizes[drawn.clients]
    cohort = Cohort(drawn.clients, drawn.present & (sizes > 0))  # a site without a training case is absent
    told = parts.aggregator.broadcast(state.aggregator)

    def batches(client: Array, present: Array, client_key: Array) -> Any:
        size = jnp.where(present, plan.train_sizes[client], 0)
        return parts.batches_of(plan.train[client], size, client, stream(client_key, SHUFFLE))

    mechanism = parts.aggregator.mechanism
    formal = mechanism is not None and mechanism.formal  # then a message is bounded whatever the client does
    salted = lambda key: stream(key, parts.salt) if parts.salt else key

    def train_one(client: Array, present: Array, personal: Tree) -> tuple[Tree, Tree, dict[str, Array]]:
        client_key = salted(stream(key, CLIENTS, round, client))
        local = batches(client, present, client_key)
        update, personal = parts.client.train(
            state.variables, personal, local, stream(client_key, TRAIN), round=round, broadcast=told
        )
        message = parts.aggregator.encode(update, told, variables=state.variables, key=stream(client_key, ENCODE))
        norm = jnp.sqrt(tree.squared_norm(update.delta["params"]))
        finite = jnp.isfinite(norm)  # one pass over the large tree; NaN and infinity both show in the norm
        for name in update.delta:
            finite &= tree.all_finite(update.delta[name]) if name != "params" else True
        info = {
            **update.metrics,
            "weight": update.weight,
            "steps": update.steps,
            "update_norm": norm,
            "finite": finite,
            "ok": present & (finite | formal),
        }
        return message, personal, info

    steps = jax.vmap(lambda c, p: batches(c, p, key).steps)(cohort.clients, cohort.present)
    total, personal, info, executed = client_axis.run(
        train_one, cohort, steps, state.personal, how, parts.aggregator.reads == "sum"
    )
    counted = Cohort(cohort.clients, info["ok"])
    delta, aggregator, scalars = parts.aggregator.decode(
        total,
        counted,
        state.aggregator,
        variables=state.variables,
        round=round,
        key=salted(stream(key, AGGREGATOR, round)),
    )
    variables, server_opt = server.step(parts.server, state.variables, delta, state.server_opt)
    empty = jnp.sum(jnp.where(counted.present, info["weight"], 0)) <= 0
    if formal:
        empty = jnp.zeros((), bool)  # noise comes all the same: else a still model would tell that nobody came
    nonfinite = jnp.any(cohort.present & ~info["ok"])
    broken = ~empty & ~jnp.isfinite(tree.squared_norm(delta))  # finite messages, but their aggregate is not
    halt = broken | (nonfinite & (not parts.skip_nonfinite)) | (empty & (not parts.skip_empty))
    keep = empty | halt
    variables, server_opt, aggregator = tree.where(
        keep, (state.variables, state.server_opt, state.aggregator), (variables, server_opt, aggregator)
    )
    seen = state.sampler  # an empty round is seen as well: whoever was drawn in vain has had its turn
    if memory is not None:
        seen = tree.where(halt, seen, memory.observe(seen, drawn, info["update_norm"], info["ok"]))
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
        "halt": halt,
    }
    return new, record


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
