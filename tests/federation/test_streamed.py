"""Cases behind a callback: the device sees what the store gives, whatever the lanes and devices; every case once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_federation import SIZES, cases, owner, plan, quadratic, quick_jit

from fedjax_seg.aggregation import make as aggregator_of
from fedjax_seg.clients import local_sgd
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import CaseStore, Client, FederatedState
from fedjax_seg.federation import evaluate, replicas, round, sampling, server, streamed

PER_CASE = 3


class Asked(NamedTuple):
    rows: tuple
    step: int


def store(log=None, sizes=SIZES):
    """Case i of `cases` as a 'volume' of its 3 features; patch e of it is the features times (1 + e)."""
    held = cases(sizes)

    def patches(rows, size, key, step, batch_size, epochs):
        assert key.dtype == np.uint32 and key.shape == (2,)
        if log is not None:
            log.append(Asked(tuple(rows[:size]), step))
        per_epoch = -(-size * PER_CASE // batch_size) if size else 0
        entries = np.zeros((0,), int)
        if step < per_epoch * epochs:
            order = np.random.Generator(np.random.Philox(key=[int(k) for k in key])).permutation(size * PER_CASE)
            entries = order[step % per_epoch * batch_size :][:batch_size]
        x = np.zeros((batch_size, 3), np.float16)
        x[: len(entries)] = held["x"][rows[entries // PER_CASE]] * (1 + entries % PER_CASE)[:, None]
        y = np.zeros(batch_size, np.uint8)
        mask = (np.arange(batch_size) < len(entries)).astype(np.float32)
        return {"x": x, "y": y, "mask": mask}

    def whole(case):
        return {"x": held["x"][case].astype(np.float16), "y": held["y"][case].astype(np.uint8)}

    spec = {"x": ((3,), np.float16), "y": ((), np.uint8)}
    return CaseStore(patches, whole, spec, spec, PER_CASE, None, lambda: (0.0, 0), lambda: None)


def federation(where, batch_size=4, epochs=2):
    task = quadratic()
    return round.Parts(
        local_sgd(task, lr=0.1),
        aggregator_of("weighted_mean"),
        sampling.make("full", clients=len(SIZES)),
        server.make(),
        streamed.patches(where, batch_size, epochs),
        False,
        False,
    )


def run(parts, lanes=1, shards=1, rounds=2):
    how = replicas.layout(1, len(SIZES), lanes, shards, None)
    state = round.initial_state(parts, parts_start(), jax.random.key(0), len(SIZES))
    state = jax.tree.map(lambda x: x[None], state)
    mine = jax.tree.map(lambda x: np.asarray(x)[None], plan())
    many = replicas.over_replicas(how, lambda s, p, stop: round.many_rounds(parts, how.lanes, rounds)(s, p, stop))
    state, records, _ = many(state, mine, jnp.asarray(rounds, jnp.int32))
    return np.asarray(state.variables["params"]["w"][0]), records


def parts_start():
    return quadratic().init(jax.random.key(0), {})


def test_a_round_trains_on_what_the_store_gives():
    """The quadratic task has a closed form: every step moves w by lr times its distance to the mean of the batch."""
    held, parts = store(), federation(store())
    found, records = run(parts, rounds=1)
    w0 = np.asarray(parts_start()["params"]["w"])
    deltas, steps = [], []
    for k, size in enumerate(SIZES):
        key = round.stream(jax.random.key(0), round.CLIENTS, 0, k, round.SHUFFLE)
        w, count = w0, 2 * -(-size * PER_CASE // 4)
        for step in range(count):
            batch = held.patches(plan().train[k], size, np.asarray(jax.random.key_data(key)), step, 4, 2)
            mean = (batch["x"].astype(np.float32) * batch["mask"][:, None]).sum(0) / batch["mask"].sum()
            w = w - 0.1 * (w - mean)
        deltas.append(w - w0)
        steps.append(count)
    expected = w0 + np.average(deltas, axis=0, weights=SIZES)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert records["clients"]["steps"][0, 0].tolist() == steps
    assert records["clients"]["weight"][0, 0].tolist() == list(SIZES)


def test_every_client_asks_for_its_own_cases_and_every_step_once():
    log = []
    run(federation(store(log)), rounds=1)
    mine = owner()
    for asked in log:
        assert len({mine[i] for i in asked.rows}) == 1
    steps = sorted((int(mine[a.rows[0]]), a.step) for a in log)
    assert steps == [(k, s) for k, n in enumerate(SIZES) for s in range(2 * -(-n * PER_CASE // 4))]


@pytest.mark.parametrize("lanes, shards", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_lanes_and_devices_change_nothing(lanes, shards):
    alone, together = run(federation(store()))[0], run(federation(store()), lanes, shards)[0]
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [(0, 1), (2.5, 1), (1, 0)])
def test_bad_sizes_are_refused(options):
    with pytest.raises(UserError, match=r"batch_size|local_epochs"):
        streamed.patches(store(), *options)


def test_the_example_has_the_shape_of_a_batch():
    batch = streamed.example(store())
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "x": ((1, 3), jnp.float32), "y": ((1,), jnp.uint8), "mask": ((1,), jnp.float32),
    }  # fmt: skip


# ---- whole cases ----


def personal_client():
    """Predicts with w + what the client keeps."""
    start = lambda variables: {"shift": jnp.zeros(3)}
    moved = lambda variables, own: {"params": {"w": variables["params"]["w"] + own["shift"]}}
    return Client(start, None, moved)


def state_of(seed=0):
    rng = np.random.default_rng(seed)
    kept = {"shift": jnp.asarray(rng.normal(size=(len(SIZES), 3)), jnp.float32)}
    empty = jnp.zeros((), jnp.int32)
    return FederatedState(empty, parts_start(), {}, {}, kept, jnp.zeros(2, jnp.uint32))


def test_cases_one_by_one_equal_those_in_memory():
    """Same function, same variables: what a batch in memory gives, up to the half precision of the volumes."""
    held = cases()
    arrays = {"x": jnp.asarray(held["x"].astype(np.float16).astype(np.float32)), "y": jnp.asarray(held["y"])}
    one, sizes, function = plan(), jnp.array([7, 0, 10, 1]), quadratic().outputs
    whole = evaluate.case_outputs(function, personal_client(), arrays, state_of(), jnp.asarray(one.test), sizes, 4)
    clients, which = np.repeat(np.arange(len(SIZES)), SIZES), np.concatenate([np.arange(n) for n in SIZES])
    listed = one.test[clients, which]
    pad = lambda x: jnp.asarray(np.concatenate([x, [0, 0]]).astype(np.int32))
    pairs = evaluate.Pairs(pad(clients), pad(listed), jnp.array([len(clients)]))
    cases_of = streamed.whole(store())
    found = quick_jit(
        lambda s, p, n: evaluate.pair_outputs(function, personal_client(), cases_of, s, p, n)
    )(state_of(), pairs, sizes)  # fmt: skip
    assert found["distance"].shape == (len(clients) + 2,)
    np.testing.assert_allclose(found["distance"][:-2], np.asarray(whole["distance"])[clients, which], rtol=1e-6)
    assert found["distance"][-2:].tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=3).filter(
        lambda rows: any(map(any, rows))
    ),
    shards=st.integers(1, 3),
    width=st.integers(1, 4),
)
def test_every_test_case_is_looked_at_once(sizes, shards, width):
    sizes = np.array(sizes)
    index = np.arange(sizes.size * 5).reshape(*sizes.shape, 5).astype(np.int32)
    seen = []

    def call(pairs):
        assert pairs.clients.shape == (len(sizes), shards * width) and pairs.count.shape == (len(sizes), shards)
        real = np.concatenate([np.arange(width) < pairs.count[:, s : s + 1] for s in range(shards)], 1)
        return {"value": np.where(real, 10 * pairs.cases + pairs.clients, -1)}

    reduce = lambda outputs: {"twice": 2 * outputs["value"]}
    each = lambda r, k, t, outputs: seen.append((r, k, t, int(outputs["value"][0])))
    found = evaluate.case_by_case(call, index, sizes, shards, width, reduce, each)
    expected = [
        (r, k, t, 10 * int(index[r, k, t]) + k)
        for r, row in enumerate(sizes) for k, n in enumerate(row) for t in range(n)
    ]  # fmt: skip
    assert sorted(seen) == expected
    for r, k, t, value in expected:
        assert found["twice"][r, k, t] == 2 * value
    assert int((found["twice"] != 0).sum()) <= len(expected)


def test_a_fault_while_scoring_reaches_the_caller():
    def reduce(outputs):
        raise UserError("a bad case")

    call = lambda pairs: {"value": pairs.cases}
    with pytest.raises(UserError, match="a bad case"):
        evaluate.case_by_case(call, np.zeros((1, 1, 2), np.int32), np.array([[2]]), 1, 1, reduce)


def test_the_devices_of_a_replica_share_its_cases():
    """Two devices, five cases: the same values as on one."""
    found = []
    for devices in (1, 2):
        how = replicas.layout(1, len(SIZES), 1, devices, None)
        call = replicas.over_cases(
            how,
            lambda s, p, n: evaluate.pair_outputs(
                quadratic().outputs, personal_client(), streamed.whole(store()), s, p, n
            ),
        )
        state = jax.tree.map(lambda x: x[None], state_of())
        one, train = plan(), np.array([SIZES])
        reduce = lambda outputs: {"distance": outputs["distance"]}
        of = lambda pairs, call=call, state=state, train=train: call(state, pairs, train)
        found.append(evaluate.case_by_case(of, one.test[None], one.test_sizes[None], how.lanes.shards, 2, reduce))
    assert how.lanes.shards == 2
    np.testing.assert_array_equal(found[0]["distance"], found[1]["distance"])
    assert np.all(found[0]["distance"][0, 0, : SIZES[0]] > 0)
