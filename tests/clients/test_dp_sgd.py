"""DP-SGD: clipping per example, noise of the stated size, padding that does nothing, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny_federation import BATCH, SIZES, cases, close, equal, parts, plan, quadratic, quick_jit, runner, start

from fedjax_seg import clients
from fedjax_seg.clients.dp_sgd import private_gradient
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Batches, Mechanism
from fedjax_seg.federation import local_batches

CLIP, ROWS = 0.7, 6
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32) * np.array([0.1, 0.2, 1, 2, 4, 8], np.float32)[:, None]
W = np.array([0.5, 0.125, -0.25], np.float32)


def loss_of(params, batch, key):
    return quadratic().loss({"params": params}, batch, key)


@quick_jit
def sums(x, mask):
    """Sums of clipped gradients of the quadratic, {way of running it: (gradient * B, measured)}; no noise."""
    batch, params, found = {"x": x, "mask": mask}, {"w": jnp.asarray(W)}, {}
    for at_once in ("one", "all"):
        (loss, measured), gradient = private_gradient(
            loss_of, params, batch, jax.random.key(0), clip=CLIP, noise=0.0, expected=None, at_once=at_once
        )
        found[at_once] = gradient["w"] * x.shape[0], {**measured, "loss": loss}
    return found


def by_hand(x):
    """sum_i g_i min(1, C / ||g_i||) with g_i = w - x_i, in float64."""
    g = W.astype(np.float64) - x
    return (g * np.minimum(1, CLIP / np.linalg.norm(g, axis=1))[:, None]).sum(0)


# Clipping


def test_the_sum_is_that_of_the_clipped_gradients():
    norms = np.linalg.norm(W - X, axis=1)
    assert 0 < (norms > CLIP).sum() < ROWS  # some are clipped, some are not
    for total, measured in sums(X, np.ones(ROWS, np.float32)).values():
        np.testing.assert_allclose(total, by_hand(X), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(measured["clipped_fraction"], (norms > CLIP).mean(), rtol=1e-6)
        np.testing.assert_allclose(measured["loss"], (norms**2 / 2).mean(), rtol=1e-5)


def test_rows_that_are_not_real_do_nothing():
    mask = np.array([1, 1, 1, 0, 0, 0], np.float32)
    expected = by_hand(X[:3])
    for filling in (0.0, 1e6, np.nan):
        x = X.copy()
        x[3:] = filling
        for total, measured in sums(x, mask).values():
            np.testing.assert_allclose(total, expected, rtol=1e-6, atol=1e-6)
            assert np.isfinite(measured["loss"])
    for total, measured in sums(X, np.zeros(ROWS, np.float32)).values():  # nobody was drawn
        assert not np.any(total) and measured["loss"] == 0 and measured["clipped_fraction"] == 0


def test_a_broken_example_counts_as_none():
    x = X.copy()
    x[4], x[5] = np.nan, np.inf
    for total, measured in sums(x, np.ones(ROWS, np.float32)).values():
        np.testing.assert_allclose(total, by_hand(X[:4]), rtol=1e-6, atol=1e-6)
        assert measured["clipped_fraction"] >= 2 / ROWS - 1e-6  # and shows


def clipped_mean_of_the_batch(x, mask):
    """A mutant: clips the gradient of the mean instead of each example's."""
    g = ((W - x) * mask[:, None]).sum(0) / max(mask.sum(), 1)
    return g * min(1, CLIP / np.linalg.norm(g)) * len(x)


def moved_by_one(sum_of, outlier):
    """How far the sum moves when an example joins, is left out, or is an outlier; the largest of all."""
    moved = []
    for who in range(ROWS):
        x, without = X.copy(), np.ones(ROWS, np.float32)
        x[who], without[who] = x[who] * outlier, 0
        moved.append(np.linalg.norm(sum_of(x, np.ones(ROWS, np.float32)) - sum_of(x, without)))
    return max(moved)


def test_one_example_moves_the_sum_by_at_most_the_clip():
    ours = lambda x, mask: np.asarray(sums(x, mask)["one"][0])
    for outlier in (1.0, 1e3, 1e8):
        assert moved_by_one(ours, outlier) <= CLIP * (1 + 1e-5)
    assert moved_by_one(ours, 1e3) > 0.99 * CLIP  # the bound is met
    assert moved_by_one(clipped_mean_of_the_batch, 1e3) > 1.5 * CLIP  # a clipped mean fails the same check


# Noise


@pytest.mark.parametrize("expected", [None, 25.0], ids=["shuffled: B rows", "Poisson: q n"])
def test_the_noise_of_a_step_has_the_stated_size(expected):
    """Sum of squares against chi-square with D degrees of freedom, within 5 standard deviations: 4.6 % of the std."""
    features, sigma, lr, rows = 6000, 1.3, 0.5, 4
    task = quadratic(features)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, features)), jnp.float32)
    divisor = rows if expected is None else expected

    @quick_jit
    def noise_of(seed):
        mean = None if expected is None else jnp.float32(expected)
        at = lambda step: {"x": x, "mask": jnp.array([1.0, 1, 1, 0])}
        batches = Batches(at, jnp.int32(1), jnp.float32(4), jnp.int32(0), expected=mean)
        variables, deltas = task.init(None, None), []
        for noise in (sigma, 0.0):
            client = clients.make("dp_sgd", task, noise_multiplier=noise, clip=CLIP, lr=lr)
            update, _ = client.train(variables, {}, batches, jax.random.key(seed), round=jnp.int32(0), broadcast={})
            deltas.append(update.delta["params"]["w"])
        return deltas[0] - deltas[1], deltas[1]

    noise, signal = (np.asarray(v, np.float64) for v in noise_of(1))
    units = noise / (lr * sigma * CLIP / divisor)
    assert abs(np.sum(units**2) - features) < 5 * np.sqrt(2 * features)
    assert abs(np.sum(units)) < 5 * np.sqrt(features)
    assert np.linalg.norm(signal) <= lr * 3 * CLIP / divisor * (1 + 1e-5)  # three clipped gradients, the same divisor
    other = np.asarray(noise_of(2)[0]) / (lr * sigma * CLIP / divisor)
    assert abs(np.dot(units, other)) < 5 * np.sqrt(features)  # a fresh draw for another key


def test_steps_and_leaves_draw_noise_of_their_own():
    @quick_jit
    def draws(key):
        batch, params = {"x": jnp.zeros((2, 3)), "mask": jnp.zeros(2)}, {"a": jnp.zeros(300), "b": jnp.zeros(300)}
        loss = lambda p, batch, key: (jnp.sum(p["a"] + p["b"]) * jnp.sum(batch["mask"]), {})
        draw = lambda k: private_gradient(loss, params, batch, k, clip=1.0, noise=1.0, expected=jnp.float32(1))[1]
        return [draw(jax.random.fold_in(key, s)) for s in (0, 1)]

    one, two = draws(jax.random.key(0))
    vectors = [np.asarray(v) for v in (*one.values(), *two.values())]
    for i, v in enumerate(vectors):
        for u in vectors[:i]:
            assert abs(np.dot(u, v)) < 5 * np.sqrt(300)


# The client


def trained(options, steps=3, rows=2):
    client = clients.make("dp_sgd", quadratic(), clip=CLIP, **options)
    variables = quadratic().init(None, None)
    start = lambda step: (step * rows) % ROWS
    at = lambda step: {"x": jax.lax.dynamic_slice_in_dim(jnp.asarray(X), start(step), rows), "mask": jnp.ones(rows)}
    batches = Batches(at, jnp.int32(steps), jnp.float32(ROWS), jnp.int32(0), expected=jnp.float32(rows))
    run = quick_jit(lambda key: client.train(variables, {}, batches, key, round=jnp.int32(0), broadcast={}))
    return run(jax.random.key(3))


def test_momentum_decay_and_the_proximal_term_come_after_the_clipping():
    update, kept = trained({"noise_multiplier": 0.0, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "mu": 0.3})
    w, buffer, losses = W.astype(np.float64), 0.0, []
    for step in range(3):
        g = w - X[2 * step : 2 * step + 2].astype(np.float64)
        losses.append((np.linalg.norm(g, axis=1) ** 2 / 2).mean())
        clipped = (g * np.minimum(1, CLIP / np.linalg.norm(g, axis=1))[:, None]).sum(0) / 2
        buffer = 0.9 * buffer + clipped + 0.3 * (w - W) + 0.2 * w
        w = w - 0.1 * buffer
    np.testing.assert_allclose(W + update.delta["params"]["w"], w, rtol=1e-5)
    np.testing.assert_allclose(update.metrics["loss"], np.mean(losses), rtol=1e-5)
    assert (update.weight, update.steps, kept) == (ROWS, 3, {})
    assert set(update.metrics) == {"loss", "lr", "clipped_fraction"}


def test_the_same_key_gives_the_same_run():
    options = {"noise_multiplier": 1.2, "lr": 0.1}
    equal(trained(options), trained(options))


def test_lanes_and_the_way_of_clipping_change_nothing():
    """Two rounds of Poisson batches in a federation of uneven clients."""
    arrays, results = cases(), []
    for lanes, at_once in ((1, "one"), (4, "all")):
        client = clients.make("dp_sgd", quadratic(), clip=CLIP, lr=0.1, momentum=0.9, at_once=at_once)
        batches = local_batches.make("poisson", {"x": jnp.asarray(arrays["x"])}, BATCH, 1, longest=max(SIZES))
        made = parts(client, arrays)._replace(batches_of=batches)
        begin = start(made, quadratic(), arrays)
        results.append(runner(made, lanes, capacity=2)(begin, plan(), 2)[:2])
    (state, records), (other, _) = results
    close(state.variables, other.variables, rtol=1e-6, atol=1e-7)
    assert np.any(np.asarray(state.variables["params"]["w"]) != W)
    np.testing.assert_array_equal(records["clients"]["steps"][0], [2, 1, 3, 1])


def test_the_mechanism_is_data():
    client = clients.make("dp_sgd", quadratic(), unit="patient", clip=0.5)
    assert client.mechanism._replace(proof="") == Mechanism("patient", 0.5, 1.2, "zero-out", True)
    assert "one patient" in client.mechanism.proof
    assert not clients.make("dp_sgd", quadratic(), noise_multiplier=0.0).mechanism.formal
    assert client.properties == frozenset()  # clipping knows no lazy first layer, noise no rotation


class Net(nn.Module):
    norm: str

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train)(x) if self.norm == "batch" else nn.GroupNorm(2)(x)
        return nn.Dense(1)(nn.relu(x))[:, 0]


def gradients_of_each(norm):
    """The gradient of every example's loss within one batch, by vmap of a masked loss; [rows, entries]."""
    model, x = Net(norm), jnp.asarray(X[:4])
    variables = model.init(jax.random.key(0), x)

    @quick_jit
    def all_of(x):
        def loss(params, row):
            return jnp.square(model.apply({**variables, "params": params}, x, mutable=["batch_stats"])[0])[row]

        gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0))(variables["params"], jnp.arange(4))
        return jnp.concatenate([g.reshape(4, -1) for g in jax.tree.leaves(gradient)], 1)

    return variables, np.asarray(all_of(x)), np.asarray(all_of(x.at[3].mul(50)))


def test_batch_norm_is_refused_since_examples_mix_and_group_norm_is_not():
    variables, before, after = gradients_of_each("batch")
    assert np.abs(before[:3] - after[:3]).max() > 1e-3  # another example changes their gradients: nothing bounds it
    with pytest.raises(UserError, match=r"client 'dp_sgd': the model has batch_stats.*--config.model.norm=group"):
        clients.make("dp_sgd", quadratic()).init(variables)
    variables, before, after = gradients_of_each("group")
    np.testing.assert_allclose(before[:3], after[:3], rtol=1e-5, atol=1e-6)
    assert clients.make("dp_sgd", quadratic()).init(variables) == {}
    kept = clients.make("dp_sgd", quadratic(), local=("params/Dense_1/*",)).init(variables)
    assert set(kept) == {f"leaf/{p}" for p in tree.paths(variables) if "Dense_1" in p}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"noise_multiplier": -1.0}, "client.noise_multiplier: -1.0 given"),
        ({"noise_multiplier": float("nan")}, "client.noise_multiplier: nan given"),
        ({"clip": 0.0}, "client.clip: 0.0 given"),
        ({"unit": "slice"}, "client.unit: 'slice' given, one of 'example', 'patient'"),
        ({"at_once": "two"}, "client.at_once: 'two' given"),
        ({"optimizer": "sgdm"}, "client.optimizer: 'sgdm' given"),
        ({"sigma": 1.0}, "client 'dp_sgd': unknown option 'sigma'"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(UserError, match=text):
        clients.make("dp_sgd", quadratic(), **options)
