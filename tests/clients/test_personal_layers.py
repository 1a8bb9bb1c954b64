"""FedPer: named layers never leave a client; the rest is averaged as ever."""

import functools

import jax.numpy as jnp
import numpy as np
from tiny_federation import SIZES, cases, equal, network, parts, plan, runner, start

from fedjax_seg import clients
from fedjax_seg.core import tree

HEAD = ("params/head/*",)


def headed():
    """tiny_federation's network with its last layer in a module of its own, {'trunk': {'w'}, 'head': {'v'}}."""
    task = network()

    def init(key, batch):
        params = task.init(key, batch)["params"]
        return {"params": {"trunk": {"w": params["w"]}, "head": {"v": params["v"]}}}

    def loss(variables, batch, key):
        params = variables["params"]
        return task.loss({"params": {"w": params["trunk"]["w"], "v": params["head"]["v"]}}, batch, key)

    return task._replace(init=init, loss=loss, linear_input="")


@functools.cache
def federation(local=HEAD):
    """(client, start, (rounds) -> state after so many rounds of all four clients)."""
    client = clients.make("local_sgd", headed(), lr=0.3, local=local)
    made = parts(client, cases())
    begin, go = start(made, headed(), cases()), runner(made, capacity=2)
    return client, begin, lambda rounds: go(begin, plan(), rounds)[0]


def test_the_head_stays_at_home_and_the_trunk_is_shared():
    _, begin, after = federation()
    state = after(2)
    equal(state.variables["params"]["head"], begin.variables["params"]["head"])
    assert np.any(state.variables["params"]["trunk"]["w"] != begin.variables["params"]["trunk"]["w"])
    assert set(state.personal) == {"leaf/params/head/v"}
    heads = np.asarray(state.personal["leaf/params/head/v"])
    assert len(np.unique(heads, axis=0)) == len(SIZES)  # each learned its own
    assert np.all(np.any(heads != np.asarray(begin.variables["params"]["head"]["v"]), axis=1))


def test_a_client_predicts_with_its_own_head_and_the_common_trunk():
    client, _, after = federation()
    state = after(2)
    for k in range(len(SIZES)):
        mine = client.personalise(state.variables, tree.rows(state.personal, k))["params"]
        np.testing.assert_array_equal(mine["head"]["v"], state.personal["leaf/params/head/v"][k])
        equal(mine["trunk"], state.variables["params"]["trunk"])


def test_the_second_round_starts_from_the_own_head():
    """By hand for client 1 (4 cases, one step a round): its head after two rounds, given the trunks it was sent."""
    _, begin, after = federation()
    one, state = after(1), after(2)
    x, y = cases()["x"][8:12].astype(np.float64), cases()["y"][8:12]
    v = np.asarray(begin.variables["params"]["head"]["v"], np.float64)
    for trunk in (begin.variables, one.variables):
        h = np.tanh(x @ np.asarray(trunk["params"]["trunk"]["w"], np.float64))
        v = v - 0.3 * ((1 / (1 + np.exp(-h @ v)) - y) @ h) / 4
    np.testing.assert_allclose(state.personal["leaf/params/head/v"][1], v, rtol=1e-5)


def test_without_patterns_everything_is_shared():
    _, begin, after = federation(local=())
    state = after(2)
    assert state.personal == {}
    assert np.any(np.asarray(state.variables["params"]["head"]["v"] != begin.variables["params"]["head"]["v"]))
    assert jnp.all(jnp.isfinite(state.variables["params"]["head"]["v"]))
