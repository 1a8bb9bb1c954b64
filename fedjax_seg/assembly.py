"""From a config and its data to the values a run is made of; all option errors come from here, before any compile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_seg import aggregation, attacks, clients, consistency, tasks
from fedjax_seg.core import checks, tree
from fedjax_seg.core.types import Aggregator, Array, Client, FederatedState, Sampler, Task
from fedjax_seg.data import augment, federated
from fedjax_seg.federation import (
    dropout,
    evaluate,
    local_batches,
    replicas,
    round,
    sampling,
    server,
    streamed,
    update_evidence,
    witness,
)
from fedjax_seg.privacy import secure_sum
from fedjax_seg.tasks import input_span

SPAN_PAYS = 2  # inputs per case from which the change of basis is worth its set-up
LONGEST_CHUNK = 64  # rounds in one device call: bounds the record buffer and the wait after SIGTERM
VOLUMES_AT_ONCE = 4  # whole volumes a device predicts in one call: bounds what waits for the host
AUGMENT = 2**31 - 2  # stream of a client's batches; no epoch has this number


class Preempted(Exception):
    """The run was asked to stop; its state is saved and the same command continues it."""


class Replica(NamedTuple):
    """One fold under one seed."""

    split: int
    fold: str
    seed: int


class Experiment(NamedTuple):
    """A run, ready to go. Leaves of `plan` have the leading axis R of `replicas`.

    Attributes:
      initial: (stream) -> state before round 0; another number is another independent start (a shadow model).
      rounds: (state, plan, stop) -> (state, records, done).
      outputs, evidence: (state, index [R, K, T], train_sizes [R, K]) -> {name: [R, K, T, ...]}; `evidence` is None
        where no attack asks for it. Of cases that stay on disk, `outputs` gives what `task.reduce` makes of them, and
        takes `each`: (replica, client, position, outputs of one case) -> None, for what must see the masks.
      witness: (state, plan, entries) -> federation.witness of the first replica and, where replicas have devices of
        their own, of the next ones; leaves [at least 1, ...].
      updates: (state, plan, index [R, K, A]) -> federation.update_evidence of all replicas; None where no attack asks.
    """

    config: ml_collections.ConfigDict
    data: federated.FederatedData
    task: Task
    client: Client
    parts: round.Parts
    replicas: tuple[Replica, ...]
    plan: round.Plan
    how: replicas.Layout
    attack: Any
    initial: Callable[..., FederatedState]
    rounds: Callable[..., Any]
    outputs: Callable[..., Any]
    evidence: Callable[..., Any] | None
    witness: Callable[..., Any]
    updates: Callable[..., Any] | None = None


def build(config: ml_collections.ConfigDict, loaded: federated.FederatedData, salt: int = 0) -> Experiment:
    """Makes every part of the run.

    Args:
      salt: of the noise of mechanisms (`same_run.salt`): other runs with the same seed have other noise.
    """
    inside = clients_of(loaded)
    sampler = sampling.make(clients=inside, **config.sampler)
    task = tasks.make(model=consistency.model_of(config, loaded), **config.task)
    client = _corrupted(clients.make(task=task, **config.client), config, loaded)
    which = replicas_of(config, loaded)
    how = replicas.layout(
        len(which), sampler.capacity, config.lanes, config.devices, {"map": False, "vmap": True}.get(config.replicas)
    )
    aggregator = aggregator_of(config, sampler, inside)
    plan = plan_of(loaded, which)
    secure = secure_sum.make(
        aggregator=aggregator,
        rule=config.aggregator.name,
        clients=inside,
        places=sampler.capacity,
        most=float(plan.train_sizes.max()),
        site_columns={name: values[:inside] for name, values in loaded.about.get("site_columns", {}).items()},
        **config.secure_sum,
    )
    aggregation.check_pair(client, aggregator)
    consistency.check_range(config, secure, int(plan.train_sizes.max()))
    consistency.check_together(config, client, aggregator, sampler, loaded)
    attack = attacks.make(**config.attack)
    if loaded.store is None:
        task, features, about = _in_span(config, task, client, aggregator, loaded)
        how = how._replace(text=how.text + about)
        arrays = replicas.share(how, {**loaded.arrays, "x": features, "unit": patient_numbers(loaded)})
    else:
        arrays = {}
    make_batches = _batches(config, client, plan, loaded)
    parts = round.Parts(
        client,
        aggregator,
        sampler,
        server.make(**config.server),
        make_batches(arrays),
        config.on_nonfinite == "skip",
        config.on_empty == "skip",
        salt,
        secure,
        dropout.make(loaded.sites[:inside], **config.dropout),
    )
    functions = _functions(config, task, parts, make_batches, how, arrays, which, plan, attack, loaded.store)
    return Experiment(config, loaded, task, client, parts, which, plan, how, attack, *functions)


def clients_of(loaded: federated.FederatedData) -> int:
    """All sites of the federation, whoever has training cases (that is not public); those that only test come last."""
    return 1 + max(k for k, site in enumerate(loaded.sites) if site not in loaded.external)


def aggregator_of(config: ml_collections.ConfigDict, sampler: Sampler, clients: int, **options: Any) -> Aggregator:
    """The config's aggregator, told what its sampler guarantees; `options` override its own."""
    return aggregation.make(
        clients=clients,
        smallest_cohort=places(sampler),
        rounds=config.rounds,
        min_separation=sampler.min_separation,
        max_participations=sampler.max_participations(config.rounds),
        **{**config.aggregator, **options},
    )


def places(sampler: Sampler) -> int:
    """The public number of clients of a round: a place that nobody fills (a short last window, a site without data, a
    client that failed) counts as an update of 0 in the rules that promise something. 0 where chance decides it (Poisson
    sampling, balls in bins)."""
    return sampler.capacity if sampler.q is None and sampler.bins <= 1 else 0


def plan_of(loaded: federated.FederatedData, which: tuple[Replica, ...]) -> round.Plan:
    """The index plan of the replicas' splits."""
    splits = tuple(loaded.splits[r.split] for r in which)
    return round.Plan(*federated.padded_plan(splits, "train"), *federated.padded_plan(splits, "test"))


def patient_numbers(loaded: federated.FederatedData) -> np.ndarray:
    """int32 [N]; equal numbers are one patient."""
    return np.unique(np.asarray(loaded.patient_ids), return_inverse=True)[1].astype(np.int32)


def _batches(
    config: ml_collections.ConfigDict, client: Client, plan: round.Plan, loaded: federated.FederatedData
) -> Callable[[Any], Any]:
    """arrays -> BatchesOf: as the config samples and augments them."""
    augmentation = augment.make(**config.augment)
    unit = client.mechanism.unit if client.mechanism else "example"
    numbers = patient_numbers(loaded) if unit == "patient" else None

    def plain_batches(arrays: Any) -> local_batches.BatchesOf:
        if loaded.store is not None:
            return streamed.patches(loaded.store, config.batch_size, config.local_epochs)
        return local_batches.make(
            config.batch_sampling,
            arrays,
            batch_size=config.batch_size,
            epochs=config.local_epochs,
            unit=unit,
            longest=int(local_batches.unit_counts(plan.train, plan.train_sizes, numbers).max()),
        )

    def make(arrays: Any) -> local_batches.BatchesOf:
        plain = plain_batches(arrays)
        if config.augment.name == "none":
            return plain

        def batches_of(plan: Array, size: Array, client: Array, key: Array) -> Any:
            batches, own = plain(plan, size, client, key), jax.random.fold_in(key, AUGMENT)
            return batches._replace(at=lambda step: augmentation(batches.at(step), jax.random.fold_in(own, step)))

        return batches_of

    return make


def _functions(config, task, parts, make_batches, how, arrays, which, plan, attack, store) -> tuple[Any, ...]:
    """The jitted functions of a run. `arrays` is an argument of each, so that no data is baked into a program."""
    capacity = min(config.eval_every, LONGEST_CHUNK)
    clients = plan.train.shape[1]

    def initialise(pair: Any, unused: Any, shared: Any) -> FederatedState:
        key = round.stream(jax.random.key(pair["seed"]), pair["split"])
        key = jax.lax.cond(pair["stream"] > 0, lambda k: round.stream(k, pair["stream"]), lambda k: k, key)
        example = {name: x[:1] for name, x in shared.items()} | {"mask": jnp.ones((1,))}
        example = streamed.example(store) if store else example
        variables = dict(task.init(round.stream(key, round.INIT), example))
        return round.initial_state(parts, variables, key, clients)

    def many(state: FederatedState, plan: Any, shared: Any, stop: Any) -> Any:
        parts_now = parts._replace(batches_of=make_batches(shared))
        return round.many_rounds(parts_now, how.lanes, capacity)(state, plan, stop)

    def of_cases(function: Callable[..., Any]) -> Callable[..., Any]:
        def values(state: FederatedState, asked: tuple[Any, Any], shared: Any) -> Any:
            index, train_sizes = asked
            return evaluate.case_outputs(function, parts.client, shared, state, index, train_sizes, config.eval_batch)

        jitted = replicas.over_replicas(how, values)
        return lambda state, index, train_sizes: jitted(state, (index, train_sizes), arrays)

    start = replicas.over_replicas(how, initialise, once=True)
    go = replicas.over_replicas(how, many, donate=True)
    seeds = {
        "seed": np.array([r.seed for r in which], np.uint32),
        "split": np.array([r.split for r in which], np.uint32),
    }

    def initial(stream: int = 0) -> FederatedState:
        own = seeds | {"stream": np.full(len(which), stream, np.uint32)}
        return start(own, np.zeros(len(which), np.int32), arrays)

    return (
        initial,
        lambda state, plan, stop: go(state, plan, arrays, jnp.asarray(stop, jnp.int32)),
        _of_stored_cases(config, task, parts.client, how, store, plan) if store else of_cases(task.outputs),
        of_cases(task.evidence) if attack and task.evidence else None,
        _witness(parts, make_batches, how, arrays),
        _updates(config, task, parts, make_batches, how, arrays) if attack and task.evidence and not store else None,
    )


def _witness(parts, make_batches, how, arrays) -> Callable[..., Any]:
    def of_replicas(state: FederatedState, plan: Any, entries: int) -> Any:
        def seen(state: FederatedState, plan: Any, shared: Any) -> Any:
            return witness.witness(parts._replace(batches_of=make_batches(shared)), state, plan, how.lanes, entries)

        few = slice(how.mesh.shape["replica"])  # one on each of their devices: only the first is looked at
        return replicas.over_replicas(how, seen)(tree.rows(state, few), tree.rows(plan, few), arrays)

    return of_replicas


def _updates(config, task, parts, make_batches, how, arrays) -> Callable[..., Any]:
    hidden = parts.secure.hides if parts.secure else config.secure_sum.name == "assumed"

    def seen(state: FederatedState, asked: tuple[Any, Any], shared: Any) -> Any:
        plan, index = asked
        now = parts._replace(batches_of=make_batches(shared))
        return update_evidence.update_evidence(now, task, shared, state, plan, index, how.lanes, hidden=hidden)

    jitted = replicas.over_replicas(how, seen)
    return lambda state, plan, index: jitted(state, (plan, index), arrays)


def _of_stored_cases(config, task, client, how, store, plan) -> Callable[..., Any]:
    """The outputs of cases that stay on disk, reduced on the host as they come."""
    cases_of = streamed.whole(store)
    jitted = replicas.over_cases(
        how, lambda state, pairs, sizes: evaluate.pair_outputs(task.outputs, client, cases_of, state, pairs, sizes)
    )

    def outputs(state: FederatedState, index: Any, train_sizes: Any, sizes: Any = None, each: Any = None) -> Any:
        call = lambda pairs: jitted(state, pairs, train_sizes)
        sizes = plan.test_sizes if sizes is None else sizes
        width = min(config.eval_batch, VOLUMES_AT_ONCE)
        return evaluate.case_by_case(call, np.asarray(index), sizes, how.lanes.shards, width, task.reduce, each)

    return outputs


def replicas_of(config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> tuple[Replica, ...]:
    """Folds x seeds."""
    numbers = config.folds or range(len(loaded.splits))
    for number in numbers:
        if number >= len(loaded.splits):
            raise checks.UserError(f"config.folds: {number} given, the data has splits 0..{len(loaded.splits) - 1}")
    return tuple(Replica(f, loaded.splits[f].name, s) for s in config.seeds for f in numbers)


def _in_span(
    config: ml_collections.ConfigDict, task: Task, client: Client, aggregator: Aggregator, loaded: Any
) -> tuple[Task, np.ndarray, str]:
    """The task and its features in the span of the cases where every part allows it and it pays."""
    x = loaded.arrays["x"]
    width = int(np.prod(x.shape[1:]))
    server_rotates = frozenset({"orthogonal"} if config.server.name == "sgd" else ())
    if config.input_span == "off" or width < SPAN_PAYS * len(x):
        return task, x, ""
    if not input_span.applies(task, client.properties, aggregator.properties, server_rotates):
        return task, x, ""
    reduced = input_span.in_span(task, x)
    return reduced.task, reduced.x, f", first layer in the span of the cases ({width} -> {reduced.x.shape[1]} inputs)"


def _corrupted(client: Client, config: ml_collections.ConfigDict, loaded: federated.FederatedData) -> Client:
    wrong = config.corruption
    if wrong.kind == "none":
        return client
    if wrong.site not in loaded.sites:
        raise checks.UserError(
            f"config.corruption.site: unknown site {wrong.site!r};{checks.suggestion(wrong.site, loaded.sites)}"
        )
    which = loaded.sites.index(wrong.site)
    return clients.corrupt(client, kind=wrong.kind, which=which, factor=wrong.factor, classes=len(loaded.classes))
