"""Secret sharing against Python's integers: t shares give the secret, t - 1 fit to every secret."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_seg.privacy import shamir

P = 2**31 - 1
N = 6
ELEMENT = st.integers(0, P - 1)
share, reconstruct = jax.jit(shamir.share), jax.jit(shamir.reconstruct)
words = functools.partial(np.asarray, dtype=np.uint32)


def value(coefficients, x):
    return sum(c * pow(x, i, P) for i, c in enumerate(coefficients)) % P


def coefficients_through(points):
    """The polynomial of lowest degree through points [(x, y)], by Gauss-Jordan elimination modulo p."""
    n = len(points)
    rows = [[pow(x, i, P) for i in range(n)] + [y] for x, y in points]
    for i in range(n):
        at = next(r for r in range(i, n) if rows[r][i])
        rows[i], rows[at] = rows[at], rows[i]
        rows[i] = [v * pow(rows[i][i], -1, P) % P for v in rows[i]]
        rows = [row if r == i else [(v - row[i] * w) % P for v, w in zip(row, rows[i])] for r, row in enumerate(rows)]
    return [row[n] for row in rows]


@st.composite
def sharings(draw):
    threshold = draw(st.integers(1, N))
    points = draw(st.lists(st.integers(1, P - 1), min_size=N, max_size=N, unique=True))
    secrets = draw(st.lists(ELEMENT, min_size=2, max_size=2))
    randomness = draw(st.lists(st.tuples(ELEMENT, ELEMENT), min_size=N - 1, max_size=N - 1))
    return threshold, points, secrets, randomness, draw(st.permutations(range(N)))


@given(sharings())
@settings(max_examples=20, deadline=None)
def test_shares_are_values_and_any_t_of_them_give_the_secret(given_):
    threshold, points, secrets, randomness, order = given_
    found = np.asarray(share(words(randomness), words(secrets), threshold, words(points)))
    for limb in range(2):
        used = [secrets[limb], *(r[limb] for r in randomness[: threshold - 1])]
        assert found[:, limb].tolist() == [value(used, x) for x in points]
    for count in range(threshold, N + 1):
        which = np.isin(np.arange(N), order[:count])
        spoilt = np.where(which[:, None], found, 12345).astype(np.uint32)  # what the others hold does not matter
        assert np.asarray(reconstruct(words(points), spoilt, which)).tolist() == secrets


@given(sharings(), st.tuples(ELEMENT, ELEMENT))
@settings(max_examples=15, deadline=None)
def test_fewer_than_t_shares_fit_to_any_other_secret_just_as_well(given_, other):
    """For every other secret there is one choice of the coefficients that deals the very same t - 1 shares."""
    threshold, points, secrets, randomness, order = given_
    seen = list(order[: threshold - 1])
    found = np.asarray(share(words(randomness), words(secrets), threshold, words(points)))
    instead = np.zeros((N - 1, 2), np.uint32)
    for limb in range(2):
        through = [(0, other[limb]), *((points[i], int(found[i, limb])) for i in seen)]
        instead[: threshold - 1, limb] = coefficients_through(through)[1:]
    np.testing.assert_array_equal(
        share(instead, words(other), threshold, words(points))[np.array(seen, int)], found[seen]
    )


@pytest.mark.parametrize("secret", [0, P - 1])
def test_a_share_is_uniform_whatever_the_secret(secret):
    deal = jax.jit(jax.vmap(lambda key: shamir.share(key, words([secret]), 3, words([1, 2, 3, 4]))[:2, 0]))
    found = np.asarray(deal(jax.random.split(jax.random.key(7), 16_000)))
    for column in found.T:
        assert stats.chisquare(np.bincount(column >> 26, minlength=32)).pvalue > 1e-4
    assert abs(np.corrcoef(found.T.astype(float))[0, 1]) < 5 / np.sqrt(16_000)  # two of the three needed


def test_too_few_shares_give_something_else():
    points = words([3, 9, 27, 81])
    shares = share(jax.random.key(1), words([5]), 3, points)
    for which, right in (([1, 1, 0, 0], False), ([0, 0, 0, 0], False), ([1, 0, 1, 1], True), ([1, 1, 1, 1], True)):
        assert (int(reconstruct(points, shares, np.array(which, bool))[0]) == 5) == right


def test_a_single_holder_has_the_secret():
    assert shamir.share(jax.random.key(0), words([5, 6]), 1, words([4])).tolist() == [[5, 6]]


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=30, deadline=None)
def test_limbs(secret):
    found = shamir.limbs(secret)
    assert found.shape == (9,) and found.max() < 2**30
    assert sum(int(w) * 2 ** (30 * i) for i, w in enumerate(found)) == int.from_bytes(secret, "little")
    assert shamir.from_limbs(found, 32) == secret
    assert len(shamir.from_limbs(np.full(9, P - 1, np.uint32), 32)) == 32


def test_a_secret_of_256_bits_comes_back():
    secret = bytes(range(200, 232))
    points = words([1, 2, 3, 4, 5])
    shares = share(jax.random.key(3), jnp.asarray(shamir.limbs(secret)), 3, points)
    found = reconstruct(points, shares, np.array([0, 1, 0, 1, 1], bool))
    assert shamir.from_limbs(np.asarray(found), 32) == secret
