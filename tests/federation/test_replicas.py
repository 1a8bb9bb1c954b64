"""How runs are laid out over devices, and functions over the replica axis. The tests see four CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_federation import equal

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import replicas


@pytest.mark.parametrize(
    "count, cohort, devices, over, shards",
    [
        (10, 4, 0, 2, 2),  # 4 of 4 devices: replicas first, what is left shares the clients
        (4, 4, 0, 4, 1),
        (1, 4, 0, 1, 4),
        (1, 2, 0, 1, 2),  # a third device would have nothing to do
        (3, 1, 0, 3, 1),
        (5, 1, 0, 1, 1),  # five replicas do not divide over 2, 3 or 4
        (5, 3, 0, 1, 3),
        (6, 4, 3, 3, 1),
        (3, 4, 2, 1, 2),
        (8, 4, 1, 1, 1),
    ],
)
def test_layouts_by_hand(count, cohort, devices, over, shards):
    how = replicas.layout(count, cohort, 0, devices, None)
    assert dict(how.mesh.shape) == {"replica": over, "client": shards}
    assert how.lanes == (1, shards, "client" if shards > 1 else None)
    assert not how.vmap  # on a CPU
    assert f"{over * shards} of 4 device(s)" in how.text and f"{count} replica(s) over {over}" in how.text
    assert f"clients over {shards}, 1 lane(s) each, replicas mapped" in how.text


def test_performance_flags_are_taken_as_given():
    how = replicas.layout(2, 4, 3, 1, True)
    assert how.lanes.lanes == 3 and how.vmap and "3 lane(s) each, replicas vmapped" in how.text


@pytest.mark.parametrize(
    "lanes, devices, text",
    [
        (0, 5, r"devices: 5 given, 4 cpu device\(s\) visible; 0 picks"),
        (5, 0, r"lanes: 5 given, an integer in \[0, 4\] expected"),
        (-1, 0, "lanes: -1 given"),
        (0, -1, "devices: -1 given"),
    ],
)
def test_impossible_layouts_are_one_line(lanes, devices, text):
    with pytest.raises(UserError, match=text):
        replicas.layout(1, 4, lanes, devices, None)


@pytest.mark.parametrize("count, devices, vmap", [(3, 1, False), (3, 1, True), (4, 2, False), (2, 4, False)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_function_over_replicas_is_the_function_of_every_row(count, devices, vmap, donate):
    how = replicas.layout(count, 4, 0, devices, vmap)
    state = {"a": np.arange(count * 2.0).reshape(count, 2), "n": np.arange(count)}
    plan = np.linspace(1, 2, count)

    def step(state, plan, shared):
        new = {"a": state["a"] * plan + shared["by"], "n": state["n"] + 1}
        return new, jnp.sum(state["a"])

    run = replicas.over_replicas(how, step, donate=donate)
    shared = replicas.share(how, {"by": jnp.float32(10)})
    new, total = run(replicas.place(how, state), replicas.place(how, plan), shared)
    np.testing.assert_allclose(new["a"], state["a"] * plan[:, None] + 10, rtol=1e-6)
    np.testing.assert_array_equal(new["n"], state["n"] + 1)
    np.testing.assert_allclose(total, state["a"].sum(1), rtol=1e-6)


def test_placing_shards_rows_and_sharing_copies():
    how = replicas.layout(4, 4, 0, 0, None)
    rows = replicas.place(how, {"a": np.arange(8.0).reshape(4, 2)})
    assert rows["a"].sharding.spec == PartitionSpec("replica")
    assert {s.data.shape for s in rows["a"].addressable_shards} == {(1, 2)}
    shared = replicas.share(how, jnp.arange(3.0))
    assert shared.sharding.is_fully_replicated and len(shared.addressable_shards) == 4
    equal(jax.tree.map(np.asarray, rows), {"a": np.arange(8.0, dtype=np.float32).reshape(4, 2)})
