"""GF(2^31 - 1) against Python's integers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.privacy import field31

P = 2**31 - 1
EDGES = [0, 1, 2, 3, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**16 + 1, 2**30 - 1, 2**30, P - 2**16, P - 2, P - 1]
ELEMENTS = st.lists(st.one_of(st.integers(0, P - 1), st.sampled_from(EDGES)), min_size=64, max_size=64)
PAIRS = {
    "add": (field31.add, lambda a, b: (a + b) % P),
    "subtract": (field31.subtract, lambda a, b: (a - b) % P),
    "multiply": (field31.multiply, lambda a, b: a * b % P),
    "power": (field31.power, lambda a, b: pow(a, b, P)),
}
COMPILED = {name: jax.jit(ours) for name, (ours, _) in PAIRS.items()}


def check(name, a, b):
    found = COMPILED[name](jnp.array(a, jnp.uint32), jnp.array(b, jnp.uint32))
    assert found.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(found), [PAIRS[name][1](x, y) for x, y in zip(a, b)])


@pytest.mark.parametrize("name", PAIRS)
def test_edges(name):
    check(name, *zip(*itertools.product(EDGES, EDGES)))


@pytest.mark.parametrize("name", PAIRS)
@given(a=ELEMENTS, b=ELEMENTS)
@settings(max_examples=20, deadline=None)
def test_any_elements(name, a, b):
    check(name, a, b)


def test_any_word_is_reduced():
    words = [*EDGES, P, P + 1, 2**32 - 2, 2**32 - 1, 2 * P - 1, 2 * P, 2 * P + 1]
    np.testing.assert_array_equal(field31.reduce(jnp.array(words, jnp.uint32)), [w % P for w in words])


def test_inverses():
    a = jnp.array(EDGES[1:], jnp.uint32)
    np.testing.assert_array_equal(field31.inverse(a), [pow(x, -1, P) for x in EDGES[1:]])
    assert field31.inverse(jnp.uint32(0)) == 0


def test_the_generator_generates_the_whole_group():
    factors = [2, 3, 7, 11, 31, 151, 331]
    assert P - 1 == 2 * 3**2 * 7 * 11 * 31 * 151 * 331
    assert all(pow(field31.GENERATOR, (P - 1) // q, P) != 1 for q in factors)


def test_draws_are_uniform_elements():
    drawn = np.asarray(field31.draw(jax.random.key(0), (32_000,)))
    assert drawn.max() < P
    counts = np.bincount(drawn >> 26, minlength=32)  # 32 cells: chi-square has mean 31, standard deviation 7.9
    assert ((counts - 1000) ** 2 / 1000).sum() < 31 + 5 * 7.9
