"""What one round's updates tell about a case, against the closed form of a quadratic task."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import BATCH, SIZES, cases, owner, parts, plan, quadratic, quick_jit, start

from fedjax_seg import aggregation
from fedjax_seg.attacks.membership_scores import mann_whitney_auc
from fedjax_seg.core.types import Cohort
from fedjax_seg.federation import client_axis
from fedjax_seg.federation.update_evidence import update_evidence

FEATURES, LR = 40, 0.1
ARRAYS = cases(features=FEATURES)
OWNER = owner()
# Of every client: its own cases, and cases that nobody trains on (fresh ones follow the others).
FRESH = np.random.default_rng(1).normal(size=(len(SIZES), 10, FEATURES)).astype(np.float32)
MOST = max(SIZES)


def asked():
    """int [K, MOST + 10]: own cases (repeated to fill up), then fresh ones; and the arrays that hold both."""
    own = np.stack([np.resize(np.flatnonzero(np.equal(OWNER, k)), MOST) for k in range(len(SIZES))])
    fresh = len(OWNER) + np.arange(FRESH.size // FEATURES).reshape(len(SIZES), -1)
    x = np.concatenate([ARRAYS["x"], FRESH.reshape(-1, FEATURES)])
    return np.concatenate([own, fresh], 1), {"x": jnp.asarray(x)}


def task():
    def evidence(variables, batch):
        squares = jnp.sum((variables["params"]["w"] - batch["x"]) ** 2, axis=1)
        return {"log_loss": jnp.log(squares / 2 + 1e-8)}

    return quadratic(FEATURES)._replace(evidence=evidence)


def looker(hidden=False, aggregator="mean", **rest):
    """(the clients' numbers of cases) -> (what is seen, the model)."""
    made, (index, arrays) = parts(task(), ARRAYS, aggregator=aggregator, **rest), asked()
    state = start(made, task(), ARRAYS)
    jitted = quick_jit(
        lambda s, p: update_evidence(made, task(), arrays, s, p, jnp.asarray(index), client_axis.Lanes(), hidden=hidden)
    )

    def look(sizes=SIZES):
        seen = jitted(state, plan()._replace(train_sizes=np.asarray(sizes, np.int32)))
        return {name: np.asarray(x) for name, x in seen.items()}, np.asarray(state.variables["params"]["w"], np.float64)

    return look


def deltas(w):
    """The updates of one epoch of SGD in the order of the cases, batches of 4."""
    result = []
    for k in range(len(SIZES)):
        mine, now = ARRAYS["x"][np.equal(OWNER, k)].astype(np.float64), w.copy()
        for first in range(0, len(mine), BATCH):
            now -= LR * (now - mine[first : first + BATCH].mean(0))
        result.append(now - w)
    return np.stack(result)


def aligned(w, direction):
    """(cosine, product) of every asked case with minus its client's direction [K, D]."""
    index, arrays = asked()
    gradient = w - np.asarray(arrays["x"], np.float64)[index]
    product = -np.einsum("kad,kd->ka", gradient, direction)
    return product / np.linalg.norm(gradient, axis=-1) / np.linalg.norm(direction, axis=-1)[:, None], product


@pytest.fixture(scope="module")
def look():
    return looker()


@pytest.fixture(scope="module")
def plain(look):
    return look()


def test_cosine_and_product_are_those_of_the_closed_form(plain):
    seen, w = plain
    cosine, product = aligned(w, deltas(w))
    np.testing.assert_allclose(seen["cosine"], cosine, atol=2e-6)
    np.testing.assert_allclose(seen["product"], product, rtol=1e-4, atol=1e-5)
    assert seen["sent"].all()


def test_the_gradient_of_a_member_points_along_its_clients_update(plain):
    seen, _ = plain
    # Four cases of 40 features: each is a quarter of the mean, which no fresh case is.
    assert mann_whitney_auc(seen["cosine"][1, :4], seen["cosine"][1, MOST:]) > 0.9
    np.testing.assert_allclose(seen["cosine"][3, :MOST], 1, atol=1e-5)  # a single case is the update


def test_losses_are_those_of_the_models_that_the_clients_send(plain):
    seen, w = plain
    index, arrays = asked()
    local = w + deltas(w)
    squares = np.sum((np.asarray(arrays["x"], np.float64)[index][:, :, None] - local) ** 2, -1)
    np.testing.assert_allclose(seen["losses"], np.log(squares / 2 + 1e-8), rtol=1e-5)
    own = seen["losses"][:, :MOST].argmin(-1) == np.arange(len(SIZES))[:, None]
    assert own.mean() > 0.5  # chance is a quarter


def test_a_sum_shows_its_own_direction_and_no_clients_model():
    rows = jnp.array([2, 0]), jnp.array([True, True])
    sampler = parts(task(), ARRAYS).sampler._replace(sample=lambda key, round: Cohort(*rows), capacity=2)
    seen, w = looker(hidden=True, sampler=sampler)()
    cosine, _ = aligned(w, np.broadcast_to(deltas(w)[[0, 2]].mean(0), (len(SIZES), FEATURES)))
    np.testing.assert_allclose(seen["cosine"], cosine, atol=2e-6)
    assert "losses" not in seen and seen["sent"].tolist() == [True, False, True, False]


def test_noise_of_the_server_comes_after_its_look_at_the_sum():
    """A curious server adds the noise itself. Clipped to a ball that holds all: the plain sum's direction."""
    rule = aggregation.make("dp_fedavg", clip=1e3, noise_multiplier=5.0, smallest_cohort=4)
    seen, w = looker(hidden=True, aggregator=rule)()
    cosine, _ = aligned(w, np.broadcast_to(deltas(w).sum(0), (len(SIZES), FEATURES)))
    np.testing.assert_allclose(seen["cosine"], cosine, atol=2e-6)


def test_noise_of_the_clients_is_in_what_is_seen():
    seen, w = looker(aggregator=aggregation.make("local_dp", clip=1.0, noise_multiplier=3.0))()
    assert np.abs(aligned(w, deltas(w))[0]).max() > 0.99 and np.abs(seen["cosine"]).max() < 0.9


def test_a_client_that_is_not_there_is_not_seen(look, plain):
    seen, _ = look((7, 0, 10, 1))
    assert seen["sent"].tolist() == [True, False, True, True]
    assert np.isnan(seen["losses"][..., 1]).all()
    for name, rest in (("cosine", np.s_[[0, 2, 3]]), ("losses", np.s_[:, :, [0, 2, 3]])):
        np.testing.assert_array_equal(seen[name][rest], plain[0][name][rest])
