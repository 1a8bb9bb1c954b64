"""Rounds whose messages are summed in secret: the model of plain rounds whoever is lost; aborted rounds change none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import CLIENTS, SIZES, cases, distance, equal, network, parts, plan, runner, start

from fedjax_seg import aggregation
from fedjax_seg.clients import local_sgd
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import dropout, flags, replicas, round, sampling
from fedjax_seg.privacy import secure_sum

SITES = ("north", "east", "south", "west")
PROTOCOLS = {
    "smc_scalar": {"clusters": 2},
    "chained": {},
    "additive": {"clusters": 2},
    "secagg": {},
    "secagg_plus": {"neighbours": 2},
}
ARRAYS, TASK = cases(), network()


def secure_of(name, aggregator, **options):
    given = PROTOCOLS[name] | options
    return secure_sum.make(name, aggregator, clients=CLIENTS, places=CLIENTS, most=float(max(SIZES)), **given)


@functools.cache
def program(protocol=None, rule="weighted_mean", *, lanes=1, schedule=(), options=(), of_rule=(), skip_empty=True):
    """(state before round 0, stop -> (state, records, done)); compiled once, whatever the number of rounds."""
    aggregator = aggregation.make(rule, clients=CLIENTS, smallest_cohort=CLIENTS, **dict(of_rule))
    secure = secure_of(protocol, aggregator, **dict(options)) if protocol else None
    fails = dropout.make(SITES, schedule=schedule)
    made = parts(TASK, ARRAYS, aggregator=aggregator, secure=secure, dropout=fails, skip_empty=skip_empty)
    begin, run = start(made, TASK, ARRAYS), runner(made, lanes)
    return begin, lambda stop: jax.tree.map(np.asarray, run(begin, plan(), stop))


LOST = ("1:east:before", "2:west:after", "3:north:after", "3:south:before")


SLOW = ("chained", "secagg_plus")  # as additive and secagg, in other orders


@pytest.mark.parametrize("protocol", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in PROTOCOLS])
def test_the_model_is_that_of_plain_rounds_whoever_is_lost(protocol):
    begin, plain = program(schedule=LOST)
    expected, alone, _ = plain(4)
    options = (("clusters", 1),) if protocol in ("additive", "smc_scalar") else ()
    state, records, done = program(protocol, schedule=LOST, options=options)[1](4)
    # four rounds of a sum that is rounded at 2^-25 or in float32, through two layers of training
    assert distance(state.variables, expected.variables) < 3e-6
    assert distance(begin.variables, expected.variables) > 1e-2
    assert done == 4 and not records["failed"].any()
    arrived = [[True, False, True, True], [True, True, True, False], [False, True, False, True], [True] * 4]
    np.testing.assert_array_equal(records["exchange"]["arrived"][:4], arrived)
    np.testing.assert_array_equal(alone["exchange"]["arrived"][:4], arrived)
    np.testing.assert_array_equal(records["exchange"]["joined"][2], [True, True, False, True])
    np.testing.assert_array_equal(records["clients"]["weight"][3], SIZES)  # records tell counts, messages do not
    if protocol != "smc_scalar":  # the same integers, so the same model to the bit
        same = program("additive", schedule=LOST, options=(("clusters", 1),))[1](4)[0]
        equal(state.variables, same.variables)


@pytest.mark.parametrize(
    "rule, options",
    [
        ("fednova", ()),
        pytest.param("mean", (("of", "weights"),), marks=pytest.mark.slow),
        pytest.param("extrinsic_mean", (("of", "weights"),), marks=pytest.mark.slow),
    ],
)
def test_any_rule_that_reads_a_sum(rule, options):
    expected, _, _ = program(None, rule, of_rule=options)[1](2)
    state, _, _ = program("additive", rule, of_rule=options)[1](2)
    assert distance(state.variables, expected.variables) < 3e-6


def test_lanes_devices_and_replicas_change_nothing():
    """Two replicas over two devices each, two lanes a device, against one client after the other."""
    options = {"schedule": LOST, "options": (("clusters", 1),)}
    begin, run = program("additive", **options)
    expected, _, _ = run(4)
    aggregator = aggregation.make("weighted_mean")
    secure, fails = secure_of("additive", aggregator, clusters=1), dropout.make(SITES, schedule=LOST)
    made = parts(TASK, ARRAYS, aggregator=aggregator, secure=secure, dropout=fails, skip_empty=True)
    how = replicas.layout(2, CLIENTS, lanes=2, devices=4, vmap=False)
    assert dict(how.mesh.shape) == {"replica": 2, "client": 2}
    other = start(made, TASK, ARRAYS, seed=1)
    both = jax.tree.map(lambda a, b: np.stack([a, b]), *(jax.tree.map(np.asarray, s) for s in (begin, other)))
    where = jax.tree.map(lambda x: np.stack([x, x]), plan())
    rounds = lambda state, plan: round.many_rounds(made, how.lanes, 4)(state, plan, jnp.int32(4))[:1]
    many = replicas.over_replicas(how, rounds, once=True)
    state = many(replicas.place(how, both), replicas.place(how, where))[0]
    # the sums are exact; training differs in the last bits
    assert distance(tree.rows(state.variables, 0), expected.variables) < 1e-6
    assert distance(tree.rows(state.variables, 1), expected.variables) > 1e-3


def test_who_is_left_alone_in_a_cluster_is_left_out():
    columns = {"region": ["a", "b", "a", "b"]}
    aggregator = aggregation.make("mean")
    secure = secure_sum.make(
        "additive", aggregator, clients=4, places=4, most=10.0, site_columns=columns, column="region"
    )
    fails = dropout.make(SITES, schedule=("1:south:after",))
    made = parts(TASK, ARRAYS, aggregator=aggregator, secure=secure, dropout=fails, skip_empty=True)
    state, records, _ = runner(made)(start(made, TASK, ARRAYS), plan(), 1)
    np.testing.assert_array_equal(records["exchange"]["arrived"][0], [False, True, False, True])
    # north's sum would be its own message: only the other cluster's two count
    both = dropout.make(SITES, schedule=("1:south", "1:north"))
    other = parts(TASK, ARRAYS, aggregator=aggregator, dropout=both, skip_empty=True)
    expected, _, _ = runner(other)(start(other, TASK, ARRAYS), plan(), 1)
    assert distance(state.variables, expected.variables) < 1e-6


def test_below_the_threshold_the_round_is_aborted_and_nothing_is_lost():
    schedule = ("2:north:after", "2:east:after")  # 2 of 4 are left, 3 are needed
    run = program("secagg", schedule=schedule)[1]
    state, records, done = run(3)
    np.testing.assert_array_equal(records["failed"][:3], [False, True, False])
    assert done == 3 and state.round == 3
    equal(run(1)[0]._replace(round=0), run(2)[0]._replace(round=0))
    assert distance(run(2)[0].variables, state.variables) > 1e-3  # and it goes on
    replica = [type("Replica", (), {"fold": "fold0", "seed": 0})]
    said = lambda records, done: list(
        flags.check(jax.tree.map(lambda x: x[None], records), np.array([done]), replica, SITES)
    )
    assert said(records, 3) == [
        "round 2, fold0, seed 0: the secure sum was aborted (2 of 4 uploads came, too few to open it); skipped"
    ]
    halted, records, done = program("secagg", schedule=schedule, skip_empty=False)[1](3)
    assert done == 2 and halted.round == 1
    with pytest.raises(UserError, match=r"round 2, .*aborted .*or set --config.on_empty=skip"):
        said(records, int(done))


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_client_that_fails_after_the_others_have_sealed(protocol):
    """Its NaN is known only once it has trained: what the others have masked against it must go."""
    client = local_sgd(TASK, lr=0.1)

    def train(variables, personal, batches, key, **given):
        update, personal = client.train(variables, personal, batches, key, **given)
        wrong = jnp.where(batches.client == 1, jnp.nan, 0.0)
        return update._replace(delta=jax.tree.map(lambda x: x + wrong, update.delta)), personal

    aggregator = aggregation.make("mean")
    options = {"clusters": 1} if protocol != "secagg" else {}
    found = {}
    for name in (None, protocol):
        secure = secure_of(name, aggregator, **options) if name else None
        made = parts(client._replace(train=train), ARRAYS, aggregator=aggregator, secure=secure, skip_nonfinite=True)
        found[name], records, _ = runner(made)(start(made, TASK, ARRAYS), plan(), 2)
        np.testing.assert_array_equal(records["clients"]["ok"][1], [True, False, True, True])
    assert distance(found[None].variables, found[protocol].variables) < 1e-6


def test_saturated_entries_are_counted():
    narrow = (("clusters", 1), ("clip", 1e-3), ("frac", 10))
    _, records, _ = program("additive", schedule=LOST, options=narrow)[1](1)
    assert (records["clients"]["saturated"][0, [0, 2, 3]] > 0).all()
    _, records, _ = program("additive", schedule=LOST, options=(("clusters", 1),))[1](1)
    assert not records["clients"]["saturated"][0].any()


def test_a_sampled_cohort_with_padding():
    aggregator = aggregation.make("weighted_mean")
    secure = secure_of("secagg", aggregator)
    found = []
    for one in (None, secure):
        sampler = sampling.make("poisson", CLIENTS, q=0.6)
        made = parts(TASK, ARRAYS, aggregator=aggregator, sampler=sampler, secure=one, skip_empty=True)
        state, records, _ = runner(made)(start(made, TASK, ARRAYS, seed=3), plan(), 6)
        found.append((state, np.asarray(records["cohort"]["present"][:6]).sum(1)))
    # a lone client is not summed in secret: its sum would be its message; with seed 3 no round has exactly one
    assert set(found[0][1]) & {2, 3} and 1 not in found[0][1]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert distance(found[0][0].variables, found[1][0].variables) < 3e-6
