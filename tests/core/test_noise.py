"""Noise for privacy claims: normal, independent, reproducible, and with tails that reach far enough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_seg.core import noise


def drawn(count, seed=0):
    return np.asarray(jax.jit(noise.normal, static_argnums=1)(jax.random.key(seed), count), np.float64)


def test_it_is_normal():
    x = drawn(400_000)
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert stats.kstest(np.abs(x[np.abs(x) > 2]), lambda v: 1 - stats.norm.sf(v) / stats.norm.sf(2)).pvalue > 1e-3
    assert abs(np.corrcoef(x[:200_000], x[200_000:])[0, 1]) < 0.01  # cosines and sines of one radius
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.01


def test_the_tail_goes_on_where_float32_draws_usually_end():
    """Of 3e7 draws about 1.8 lie beyond 5.4: with the smallest radii of 64 random bits the reach is 9.4."""
    assert pytest.approx(9.419, abs=1e-3) == noise.REACH
    low = jnp.zeros((3, 1), jnp.uint32)  # the rarest bits there are: the largest radius

    def bits(key, shape, dtype):
        return jnp.broadcast_to(low, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", bits)
        far = np.asarray(noise.normal(jax.random.key(0), 2))
    assert far[0] == pytest.approx(np.sqrt(-2 * np.log(0.5 * 2.0**-64)), rel=1e-5) and np.isfinite(far).all()
    full = jnp.full((3, 1), 2**32 - 1, jnp.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.broadcast_to(full, shape))
        near = np.asarray(noise.normal(jax.random.key(0), 2))
    assert np.isfinite(near).all() and np.abs(near).max() < 1e-3


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_draws(count):
    assert drawn(count).shape == (count,) and np.isfinite(drawn(count)).all()
    np.testing.assert_array_equal(drawn(count), drawn(count))
    assert not np.array_equal(drawn(count), drawn(count, seed=1))


def test_a_tree_gets_noise_of_its_own_everywhere():
    tree = {"a": jnp.ones((30, 40)), "b": {"c": jnp.zeros(500), "d": jnp.zeros((), jnp.bfloat16)}}
    found = noise.add(tree, jax.random.key(0), 2.0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    a, c = np.asarray(found["a"]).ravel() - 1, np.asarray(found["b"]["c"])
    assert np.std(a) == pytest.approx(2, rel=0.1) and np.std(c) == pytest.approx(2, rel=0.15)
    assert len({*a.tolist(), *c.tolist()}) > 1690  # no draw is used twice
    assert noise.add(tree, jax.random.key(0), 0) is tree and noise.add(tree, jax.random.key(0), 0.0) is tree


@pytest.mark.parametrize("multiplier, word", [(0.0, "no noise"), (0.1, "below 0.35"), (0.35, ""), (3.0, "")])
def test_too_little_noise_carries_no_claim(multiplier, word):
    found = noise.objections(multiplier)
    assert (not found) == (not word) and (not word or word in found[0])
    # what cannot be reached at the least multiplier has a probability far below delta
    assert 1e4 * stats.norm.sf(noise.REACH - 1 / noise.LEAST) < 1e-6  # of ten thousand releases
