"""One corrupted client: only that client, and exactly the damage that is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg import clients
from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Batches, Client, ClientUpdate

LABELS = np.array([0, 2, 1, 1], np.int32)


def honest():
    """A client whose update tells which labels it saw."""

    def train(variables, personal, batches, key, *, round, broadcast):
        del variables, key, broadcast
        seen = batches.at(jnp.int32(0))["y"].astype(jnp.float32)
        delta = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.float32(round)}, "batch_stats": {"m": seen}}
        update = ClientUpdate(delta, batches.examples, batches.steps, {}, {"loss": jnp.float32(0.5)})
        return update, {"own": personal["own"] + 1}

    return Client(lambda v: {}, train, lambda v, p: v, properties=frozenset({"orthogonal"}))


def update_of(client, who, round=1, seed=0):
    batches = Batches(lambda step: {"y": jnp.asarray(LABELS)}, jnp.int32(1), jnp.float32(4), jnp.int32(who))
    key = jax.random.fold_in(jax.random.key(seed), round)
    return client.train({}, {"own": jnp.float32(7)}, batches, key, round=jnp.int32(round), broadcast={})


def corrupted(kind, factor=1.0):
    return clients.corrupt(honest(), kind=kind, which=2, factor=factor, classes=3)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("kind", clients.CORRUPTIONS)
def test_only_the_named_client_is_corrupted_and_keeps_its_own_state(kind):
    client = corrupted(kind, -5.0)
    for who in (0, 1, 3):
        same(update_of(client, who), update_of(honest(), who))
    bad, personal = update_of(client, 2)
    good, kept = update_of(honest(), 2)
    same(personal, kept)
    same((bad.weight, bad.steps, bad.metrics), (good.weight, good.steps, good.metrics))
    assert (kind == "none") == bool(jnp.all(bad.delta["batch_stats"]["m"] == good.delta["batch_stats"]["m"]))


def test_labels_are_flipped_to_the_other_end():
    bad, _ = update_of(corrupted("label_flip"), 2)
    np.testing.assert_array_equal(bad.delta["batch_stats"]["m"], [2, 0, 1, 1])


def test_a_scaled_update_is_the_true_one_times_the_factor():
    bad, good = update_of(corrupted("scale", -5.0), 2)[0], update_of(honest(), 2)[0]
    same(bad.delta, jax.tree.map(lambda x: -5.0 * x, good.delta))


def test_a_random_update_has_factor_times_the_true_norm():
    client, norm = corrupted("random", 10.0), lambda u: float(jnp.sqrt(tree.squared_norm(u.delta)))
    draws = [update_of(client, 2, round, seed)[0] for round, seed in ((1, 0), (2, 0), (1, 1))]
    for bad, round in zip(draws, (1, 2, 1)):
        np.testing.assert_allclose(norm(bad), 10 * norm(update_of(honest(), 2, round)[0]), rtol=1e-5)
    unit = [bad.delta["params"]["w"] / norm(bad) for bad in draws]
    assert not np.allclose(unit[0], unit[1]) and not np.allclose(unit[0], unit[2])  # drawn per round and run
    same(update_of(client, 2)[0], update_of(client, 2)[0])


def test_noise_in_all_directions_is_no_rotation_invariant():
    assert "orthogonal" not in corrupted("random").properties
    for kind in ("none", "label_flip", "scale"):
        assert "orthogonal" in corrupted(kind).properties


def test_bad_options_are_one_line():
    with pytest.raises(UserError, match=r"corruption\.kind: 'flip' given, one of 'none', 'label_flip'"):
        corrupted("flip")
    with pytest.raises(UserError, match=r"corruption\.factor: nan given"):
        corrupted("scale", float("nan"))
