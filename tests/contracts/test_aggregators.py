"""Every registered aggregator keeps the contracts that it declares, and no others."""

import functools
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import aggregation
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import ClientUpdate, Cohort

# Random rules are held to the contracts without their noise; tests/aggregation/test_private.py looks at the noise.
REQUIRED = {
    "clipped_mean": {"clip": 1.0},
    "scaffold": {"clients": 5},
    "dp_simagg": {"clip": 1.0, "noise": False},
    "private_sim_agg": {"clip": 1.0, "noise_multiplier": 0.0, "smallest_cohort": 3},
    "dp_fedavg": {"clip": 1.0, "noise_multiplier": 0.0, "smallest_cohort": 3},
    "local_dp": {"clip": 1.0, "noise_multiplier": 0.0},
    "adaptive_dp_fedavg": {"clip": 1.0, "noise_multiplier": 0.0, "smallest_cohort": 3},
    "banded_dp_fedavg": {
        **{"clip": 1.0, "noise_multiplier": 0.0, "smallest_cohort": 3},
        **{"rounds": 20, "min_separation": 5, "max_participations": 4},
    },
    "ref_sim_agg": {"tau": 1.0, "noise_multiplier": 0.0, "smallest_cohort": 3},
    "dp_fedhavg": {"noise_multiplier": 0.0, "smallest_cohort": 3},
    "geyer": {"noise_multiplier": 0.0},
    "weight_noise": {"sigma": 0.0},
}
PARAMETERS_ONLY = {  # they refuse batch statistics
    *("private_sim_agg", "dp_fedavg", "local_dp", "adaptive_dp_fedavg", "banded_dp_fedavg", "ref_sim_agg", "dp_fedhavg")
}
PROTOCOLS = {"control_variates"}  # properties that name the client a rule belongs to: no contract
VARIANTS = [(name, REQUIRED.get(name, {})) for name in aggregation.AGGREGATORS] + [
    ("clipped_mean", {"clip": 1.0, "weighted": True}),
    ("mean", {"of": "weights"}),
    ("weighted_mean", {"of": "weights"}),
    ("weight_noise", {"sigma": 0.0, "weighted": True}),
    ("median", {"tie": "mean", "of": "weights"}),
    ("trimmed_mean", {"alpha": 0.4, "of": "weights"}),
    ("geometric_median", {"weighted": True, "per": "tensor", "of": "weights"}),
    ("krum", {"per": "tensor", "of": "weights"}),
    ("multi_krum", {"m": 2, "per": "tensor"}),
    ("extrinsic_mean", {"weighted": True, "per": "model", "of": "updates", "margin_on": "radius"}),
    ("gyro_mean", {"per": "model", "of": "updates", "order": (3, 0, 1, 2)}),
    ("gyro_mean", {"order": "cohort", "margin_on": "radius"}),
    ("sim_agg", {"shares": "counts", "per": "model", "of": "updates"}),
    ("sim_agg", {"variant": "released"}),
    ("sim_agg", {"variant": "multiplicative", "per": "model"}),
    ("reg_sim_agg", {"variant": "released"}),
    ("dp_simagg", {"clip": 1.0, "noise": False, "similarity": False, "of": "updates"}),
    ("private_sim_agg", {"clip": 1.0, "noise_multiplier": 0.0, "bound": "2C"}),
    ("ref_sim_agg", {"tau": 1.0, "noise_multiplier": 0.0, "denominator": "noisy", "reference": "zero", "cap": 5.0}),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in VARIANTS]
PROPERTIES = ("permutation", "consensus", "translation", "scale", "orthogonal", "hull", "weighted")
SHAPES = {"params": {"dense": {"kernel": (3, 4), "bias": (4,)}}, "batch_stats": {"mean": (3,)}}
CLIENTS = 5

quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # many programs, each run once
each_variant = pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)


def fitting(variant, variables):
    """The collections that this rule takes."""
    whole = VARIANTS[variant][0] not in PARAMETERS_ONLY
    return {k: v for k, v in variables.items() if whole or k == "params"}


def draw(seed, rows=None, size=1.0):
    """Variables (rows=None) or a stack of updates of that shape."""
    shapes, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(seed)
    lead = () if rows is None else (rows,)
    return structure.unflatten([jnp.asarray(size * rng.normal(size=lead + s), jnp.float32) for s in shapes])


def extra_of(aggregator, delta):
    """What the client that the rule belongs to adds to an update."""
    return {"control": delta["params"]} if PROTOCOLS & aggregator.properties else {}


def aggregate(aggregator, deltas, weights, variables, *, clients=None, present=None):
    """encode -> sum or stack -> decode, as a round does it: (delta, metrics)."""
    rows = len(weights)
    clients = jnp.arange(rows) if clients is None else jnp.asarray(clients)
    present = jnp.ones(rows, bool) if present is None else jnp.asarray(present)
    key = jax.random.key(0)
    state = aggregator.init(variables)
    broadcast = aggregator.broadcast(state)

    def encode(delta, weight):
        update = ClientUpdate(delta, weight, jnp.int32(1), extra_of(aggregator, delta), {})
        return aggregator.encode(update, broadcast, variables=variables, key=key)

    messages = jax.vmap(encode)(deltas, jnp.asarray(weights, jnp.float32))
    messages = tree.where(present, messages, tree.zeros_like(messages))
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), messages) if aggregator.reads == "sum" else messages
    cohort = Cohort(clients, present)
    delta, _, metrics = aggregator.decode(total, cohort, state, variables=variables, round=jnp.int32(0), key=key)
    return delta, metrics


@functools.cache
def compiled(variant):
    """`aggregate` of one variant, jitted once for all the tests that only look at values."""
    name, options = VARIANTS[variant]
    aggregator = aggregation.make(name, **options)

    @quick_jit
    def run(deltas, weights, variables, clients, present):
        return aggregate(aggregator, deltas, weights, variables, clients=clients, present=present)

    def call(deltas, weights, variables, *, clients=None, present=None):
        rows = len(weights)
        clients = jnp.arange(rows) if clients is None else jnp.asarray(clients)
        present = jnp.ones(rows, bool) if present is None else jnp.asarray(present)
        deltas, variables = fitting(variant, deltas), fitting(variant, variables)
        return run(deltas, jnp.asarray(weights, jnp.float32), variables, clients, present)

    return aggregator, call


def flat(delta):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(delta["params"])])


def off(a, b):
    """The largest difference, relative to the largest value."""
    return np.max(np.abs(a - b)) / max(np.max(np.abs(a)), np.max(np.abs(b)), 1e-30)


def turn(variables, seed):
    """Another orthogonal map on every (flattened) tensor of params; the last axes of stacks are turned alike."""
    leaves, structure = jax.tree.flatten(variables["params"])
    sizes = [np.prod(s) for s in jax.tree.leaves(SHAPES["params"], is_leaf=lambda x: isinstance(x, tuple))]
    rng = np.random.default_rng(seed)
    turned = []
    for leaf, size in zip(leaves, sizes):
        q, _ = np.linalg.qr(rng.normal(size=(int(size), int(size))))
        turned.append(
            jnp.asarray((np.asarray(leaf, np.float64).reshape(-1, size) @ q).reshape(leaf.shape), jnp.float32)
        )
    return {**variables, "params": structure.unflatten(turned)}


def violation(prop, aggregate, seed, size):
    """How far one example is from the contract, relative to its values: rounding if it holds."""
    deltas, variables = draw(seed, CLIENTS, size), draw(seed + 100, size=size)
    weights = jnp.asarray([3.0, 1.0, 7.0, 2.0, 5.0])
    run = lambda d, w=weights, v=variables: flat(aggregate(d, w, v)[0])
    result = run(deltas)
    if prop == "permutation":
        order = jnp.asarray([2, 4, 0, 1, 3])
        return off(result, run(tree.rows(deltas, order), weights[order]))
    if prop == "consensus":
        same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), deltas)
        return off(flat(tree.rows(deltas, 0)), run(same))
    if prop == "translation":
        shift = draw(seed + 200, size=size)
        return off(result + flat(shift), run(tree.add(deltas, shift)))
    if prop == "scale":
        by = 1e-7 if seed == 0 else 3.0
        return off(result * by, run(tree.scale(deltas, by), v=tree.scale(variables, by)))
    if prop == "orthogonal":
        moved, server = turn(deltas, seed + 300), turn(variables, seed + 300)
        expected = turn(aggregate(deltas, weights, variables)[0], seed + 300)
        return off(flat(expected), run(moved, v=server))
    if prop == "hull":
        deltas = jax.tree.map(lambda x: x + 3 * size, deltas)  # zero is outside
        # lengths differ, and some coordinates agree: who shortens the longest leaves the range of those
        dense, lengths = deltas["params"]["dense"], jnp.arange(1.0, CLIENTS + 1)[:, None, None]
        agreed = jnp.broadcast_to(dense["bias"][:1], dense["bias"].shape)
        deltas = {**deltas, "params": {"dense": {"kernel": dense["kernel"] * lengths, "bias": agreed}}}
        rows, result = np.stack([flat(tree.rows(deltas, i)) for i in range(CLIENTS)]), run(deltas)
        outside = np.maximum(rows.min(0) - result, result - rows.max(0))
        return max(outside.max(), 0) / np.abs(rows).max()
    assert prop == "weighted"
    return off(result, run(deltas, w=weights[::-1]))


@each_variant
@pytest.mark.parametrize("prop", PROPERTIES)
def test_declared_contracts_hold_and_undeclared_ones_do_not(variant, prop):
    aggregator, run = compiled(variant)
    assert aggregator.properties <= {*PROPERTIES, *PROTOCOLS}
    worst = max(violation(prop, run, seed, size) for seed, size in ((0, 0.3), (1, 10.0)))
    holds = worst < 1e-4
    assert holds or worst > 1e-3, f"{prop}: {worst} is neither rounding nor a violation"
    if prop == "weighted":
        holds = not holds
    assert holds == (prop in aggregator.properties)


@each_variant
def test_the_rows_of_the_cohort_may_come_in_any_order(variant):
    _, run = compiled(variant)
    deltas, variables, order = draw(3, CLIENTS, 0.5), draw(4), jnp.asarray([4, 1, 3, 0, 2])
    weights = jnp.asarray([3.0, 1.0, 7.0, 2.0, 5.0])
    one = flat(run(deltas, weights, variables)[0])
    two = flat(run(tree.rows(deltas, order), weights[order], variables, clients=order)[0])
    if VARIANTS[variant][1].get("order") == "cohort":
        assert off(one, two) > 1e-3
    else:
        assert off(one, two) < 1e-5


@each_variant
def test_an_absent_client_changes_nothing(variant):
    _, run = compiled(variant)
    variables, deltas = draw(1), draw(2, CLIENTS, 0.5)
    weights, ids = jnp.asarray([3.0, 1.0, 50.0, 7.0, 2.0]), jnp.asarray([0, 1, 5, 2, 3])
    present, there = jnp.ones(CLIENTS, bool).at[2].set(False), np.array([0, 1, 3, 4])
    base = run(deltas, weights, variables, clients=ids, present=present)
    garbage = jax.tree.map(lambda x: x.at[2].set(1e4), deltas)
    other = run(garbage, weights.at[2].set(9.0), variables, clients=ids, present=present)
    jax.tree.map(np.testing.assert_array_equal, base, other)
    without = run(tree.rows(deltas, there), weights[there], variables, clients=ids[there])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), base, without)


@pytest.mark.parametrize("variant", [i for i in range(len(VARIANTS)) if compiled(i)[0].reads == "each"])
def test_values_in_absent_rows_of_a_stack_do_not_matter(variant):
    aggregator, _ = compiled(variant)
    variables, deltas = draw(1), draw(2, CLIENTS, 0.5)
    cohort = Cohort(jnp.arange(CLIENTS), jnp.asarray([True, True, False, True, True]))
    weights = jnp.asarray([3.0, 1.0, 9.0, 7.0, 2.0])

    @quick_jit
    def decoded(junk):
        stack = jax.tree.map(lambda x: x.at[2].set(junk), deltas)
        statistics = {k: v for k, v in fitting(variant, stack).items() if k != "params"}
        total = {"value": stack["params"], "statistics": statistics, "examples": weights}
        server = fitting(variant, variables)
        return aggregator.decode(total, cohort, {}, variables=server, round=0, key=jax.random.key(0))[0]

    jax.tree.map(np.testing.assert_array_equal, decoded(0.0), decoded(1e3))


@each_variant
@pytest.mark.parametrize("empty", ["nobody present", "no examples"])
def test_an_empty_round_moves_nothing(variant, empty):
    _, run = compiled(variant)
    weights = jnp.zeros(CLIENTS) if empty == "no examples" else jnp.ones(CLIENTS)
    present = jnp.full(CLIENTS, empty == "no examples")
    delta, metrics = run(draw(1, CLIENTS), weights, draw(2), present=present)
    for leaf in jax.tree.leaves(delta):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    assert all(np.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("variant", [i for i, (name, _) in enumerate(VARIANTS) if name not in PARAMETERS_ONLY])
def test_batch_statistics_are_averaged_by_examples(variant):
    deltas, weights = draw(1, CLIENTS, 0.3), np.array([3.0, 1.0, 7.0, 2.0, 5.0])
    present = np.array([True, True, False, True, True])
    delta, _ = compiled(variant)[1](deltas, weights, draw(2), present=present)
    expected = np.average(np.asarray(deltas["batch_stats"]["mean"])[present], axis=0, weights=weights[present])
    np.testing.assert_allclose(delta["batch_stats"]["mean"], expected, rtol=1e-5, atol=1e-7)


@each_variant
def test_replicas_side_by_side_give_what_each_gives_alone(variant):
    aggregator, alone = compiled(variant)
    present = jnp.asarray([[True] * 5, [True, False, True, True, True], [False] * 5])
    deltas = tree.stack([fitting(variant, draw(seed, CLIENTS, 0.5)) for seed in range(3)])
    variables = tree.stack([fitting(variant, draw(seed + 10)) for seed in range(3)])
    weights = jnp.asarray([[3.0, 1.0, 7.0, 2.0, 5.0]] * 3)
    replicas = jax.vmap(lambda d, w, v, p: aggregate(aggregator, d, w, v, present=p))
    together = quick_jit(replicas)(deltas, weights, variables, present)
    same = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    for i in range(3):
        one = alone(tree.rows(deltas, i), weights[i], tree.rows(variables, i), present=present[i])
        jax.tree.map(same, one, tree.rows(together, i))


@pytest.mark.parametrize("variant", range(len(aggregation.AGGREGATORS)), ids=aggregation.AGGREGATORS)
def test_jit_changes_nothing(variant):
    aggregator, jitted = compiled(variant)
    deltas, variables = {"params": draw(1, CLIENTS, 0.5)["params"]["dense"]["bias"]}, {"params": jnp.ones(4)}
    eager = aggregate(aggregator, deltas, jnp.ones(CLIENTS), variables)
    same = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(same, eager, jitted(deltas, jnp.ones(CLIENTS), variables))


@each_variant
def test_gradients_are_finite_at_zero(variant):
    aggregator, _ = compiled(variant)
    zero, server = {"params": {"w": jnp.zeros((CLIENTS, 3))}}, {"params": {"w": jnp.zeros(3)}}

    @quick_jit
    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(deltas, variables, present):
        delta, metrics = aggregate(aggregator, deltas, jnp.ones(CLIENTS), variables, present=present)
        return sum(jnp.sum(x) + jnp.sum(x**2) for x in jax.tree.leaves(delta)), metrics

    for present in ([True] * 5, [True, False, True, True, True], [False] * 5):
        assert tree.all_finite(gradients(zero, server, jnp.asarray(present)))


@each_variant
def test_the_delta_has_the_structure_of_the_variables(variant):
    aggregator, _ = compiled(variant)
    for variables in (fitting(variant, draw(0)), {"params": draw(0)["params"]}, {"params": {"only": jnp.ones(())}}):
        deltas = jax.tree.map(lambda x: jnp.stack([x] * CLIENTS), variables)
        delta, metrics = jax.eval_shape(partial(aggregate, aggregator), deltas, jnp.ones(CLIENTS), variables)
        like = jax.eval_shape(lambda x: x, variables)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), delta) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
        assert all(m.shape == () for m in metrics.values())


@each_variant
def test_what_is_summed_does_not_grow_with_the_clients(variant):
    aggregator, _ = compiled(variant)
    variables = fitting(variant, draw(0))
    extra = extra_of(aggregator, variables)
    update = ClientUpdate(variables, jnp.float32(3), jnp.int32(1), extra, {})
    told = lambda v: aggregator.broadcast(aggregator.init(v))
    message = jax.eval_shape(
        lambda u, v: aggregator.encode(u, told(v), variables=v, key=jax.random.key(0)), update, variables
    )
    entries = sum(x.size for x in jax.tree.leaves(message))
    model = sum(x.size for x in jax.tree.leaves((variables, extra)))
    bare = VARIANTS[variant][0] in PARAMETERS_ONLY  # nothing unbounded may leave the client
    assert model + (not bare) <= entries <= model + 3  # weight, examples, one more scalar
    assert aggregator.reads in ("sum", "each")


@pytest.mark.parametrize("name", aggregation.AGGREGATORS)
def test_every_maker_refuses_what_it_does_not_know(name):
    with pytest.raises(UserError, match=f"aggregator {name}: unknown option 'gama'"):
        aggregation.make(name, gama=1.0, **REQUIRED.get(name, {}))
    numbers = [k for k, p in inspect.signature(aggregation.AGGREGATORS[name]).parameters.items() if "float" in str(p)]
    for option in numbers:
        for bad in (float("nan"), float("inf"), -1.0, "one"):
            with pytest.raises(UserError, match=f"{name}: {option}: .* given, .* expected"):
                aggregation.make(name, **{**REQUIRED.get(name, {}), option: bad})


def test_an_unknown_name_is_suggested_a_known_one():
    with pytest.raises(UserError, match="unknown name 'gyromean'; did you mean 'gyro_mean'"):
        aggregation.make("gyromean")


def test_a_missing_option_is_named():
    with pytest.raises(UserError, match="clipped_mean: missing a required argument: 'clip'"):
        aggregation.make("clipped_mean")
