"""The ring: words against exact rational arithmetic, and the guard against sums that wrap."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sums import quick_jit

from fedjax_seg.core import tree as trees
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Meeting
from fedjax_seg.privacy import fixed_point
from fedjax_seg.privacy.fixed_point import Format

ENCODE = quick_jit(fixed_point.encode, static_argnums=2)


def encode(x, form, seed=0):
    """(signed integers, saturated), numpy."""
    words, saturated = ENCODE(jnp.asarray(x, jnp.float32), jax.random.key(seed), form)
    return np.asarray(words).view(np.int32), int(saturated)


FORMS = [Format(8.0, 22), Format(1.0, 25), Format(100.0, 0), Format(float(np.float32(0.1)), 30), Format(2.0**20, 9)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_entry_becomes_one_of_its_two_neighbours(form):
    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8), st.integers(0, 99))
    def check(unit, seed):
        x = np.clip(np.float32(form.clip) * np.asarray(unit, np.float32), -form.clip, form.clip)
        found, saturated = encode(x, form, seed)
        assert saturated == 0
        for value, integer in zip(x, found):
            exact = Fraction(float(value)) * 2**form.frac
            low = math.floor(exact)
            assert integer == low or (integer == low + 1 and exact != low)
            assert abs(Fraction(int(integer), 2**form.frac) - Fraction(float(value))) < Fraction(form.step)

    check()


def test_rounding_has_mean_zero_even_where_float32_has_no_bits_left():
    """At |x| 2^frac = 2^22 + 1/2 one bit of the mantissa is the fraction: a dither added first would be lost."""
    form, draws = Format(8.0, 20), 40_000
    for x in (0.3, -1.7, (2.0**22 + 0.5) * 2.0**-20, -(2.0**22 + 0.5) * 2.0**-20):
        exact = float(np.float32(x)) * 2**20
        up = exact - math.floor(exact)
        found = encode(np.full(draws, x, np.float32), form, seed=1)[0].astype(np.float64)
        assert 0 < up < 1
        assert abs(found.mean() - exact) < 5 * math.sqrt(up * (1 - up) / draws)


def test_what_is_beyond_the_range_is_cut_and_counted():
    x = [8.0, -8.0, 8.001, -9.0, np.inf, -np.inf, np.nan, 0.0, -0.0]
    found, saturated = encode(x, Format(8.0, 10))
    top = 8 * 2**10
    np.testing.assert_array_equal(found, [top, -top, top, -top, top, -top, 0, 0, 0])
    assert saturated == 4


# (clip, clients, the most bits): n (clip 2^f + 1) < 2^31, by hand: e.g. 33 (2^25 + 1) < 2^31 <= 33 (2^26 + 1).
GUARD = [(1.0, 33, 25), (8.0, 33, 22), (8.0, 2, 26), (8.0, 8, 24), (1.0, 2, 29), (100.0, 1000, 14), (2.0**29, 2, 0)]


@pytest.mark.parametrize(("clip", "places", "bits"), GUARD)
def test_one_bit_too_many_is_refused(clip, places, bits):
    worst = lambda frac: places * (math.ceil(Fraction(clip) * 2**frac))
    assert places * (Fraction(clip) * 2**bits + 1) < 2**31 <= places * (Fraction(clip) * 2 ** (bits + 1) + 1)
    assert worst(bits) < 2**31
    form = fixed_point.chosen("secure_sum 'additive'", clip, None, places)
    assert form == fixed_point.chosen("secure_sum 'additive'", clip, bits, places) == Format(clip, bits)
    assert form.step == 2.0**-bits
    with pytest.raises(
        UserError, match=rf"frac: {bits + 1} bits given .*at most {bits} expected.*lower frac to {bits}"
    ):
        fixed_point.chosen("secure_sum 'additive'", clip, bits + 1, places)


def test_without_the_guard_the_sum_would_wrap():
    """33 clients that all send 1: with 26 bits their sum is 33 - 64."""
    for frac, expected in ((25, 33.0), (26, -31.0)):
        word = encode([1.0], Format(1.0, frac))[0].view(np.uint32)
        total = jnp.sum(jnp.asarray(np.repeat(word, 33)), dtype=jnp.uint32)
        assert float(fixed_point.decode(total, frac)) == expected


FAULTS = [
    (0.0, None, 3, r"clip: 0.0 given, a finite number in \(0, "),
    (-1.0, None, 3, "clip: -1.0 given"),
    (math.nan, None, 3, "clip: nan given"),
    (math.inf, None, 3, "clip: inf given"),
    (True, None, 3, "clip: True given"),
    (1e-60, None, 3, "clip as float32: 0.0 given"),
    (2.0**30, None, 2, "clip: .* given for 2 clients, whose sum does not fit into 32 bits; less than .*: lower clip"),
    (8.0, -1, 3, r"frac: -1 given, an integer in \[0, 30\] expected"),
    (8.0, 31, 3, "frac: 31 given"),
    (8.0, 2.5, 3, "frac: 2.5 given"),
    (8.0, 28, 3, "frac: 28 bits given with clip 8 and 3 clients, at most 26 expected"),
]


@pytest.mark.parametrize(("clip", "frac", "places", "message"), FAULTS, ids=[f[3][:24] for f in FAULTS])
def test_faults_are_one_line(clip, frac, places, message):
    with pytest.raises(UserError, match=f"^secure_sum 'x': {message}") as error:
        fixed_point.chosen("secure_sum 'x'", clip, frac, places)
    assert "\n" not in str(error.value)


def test_the_guard_holds_for_the_clip_that_the_device_uses():
    """0.1 is larger as float32; at the finest format a sum of full messages must still fit."""
    form = fixed_point.chosen("x", 0.1, None, 31)
    assert form.clip == float(np.float32(0.1)) > 0.1
    found, saturated = encode([np.float32(0.1)], form, seed=3)
    assert saturated == 0 and 31 * int(found[0]) < 2**31


def test_sums_are_exact_in_any_order_where_floats_are_not():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(16, 200)) * 10.0 ** rng.integers(-6, 1, size=(16, 1))).astype(np.float32)
    form = fixed_point.chosen("x", 8.0, None, 16)
    words = encode(x, form)[0].view(np.uint32)
    exact = words.astype(np.int64).sum(axis=0) % 2**32
    orders = [rng.permutation(16) for _ in range(5)]
    for order in orders:
        total = words[order[0]].copy()
        for row in order[1:]:
            total += words[row]
        np.testing.assert_array_equal(total, exact.astype(np.uint32))
    floats = {np.add.reduce(x[order], axis=0).tobytes() for order in orders}
    assert len(floats) > 1


def test_trees_of_words():
    tree = {"a": jnp.arange(6, dtype=jnp.uint32).reshape(2, 3), "b": jnp.uint32(7), "c": jnp.zeros((0,), jnp.uint32)}
    flat = trees.flat(tree)
    np.testing.assert_array_equal(flat, [0, 1, 2, 3, 4, 5, 7])
    assert trees.size(tree) == 7
    masked = fixed_point.add(tree, jnp.full(7, 2**32 - 1, jnp.uint32))  # adding -1
    np.testing.assert_array_equal(masked["a"], [[2**32 - 1, 0, 1], [2, 3, 4]])
    assert masked["b"].shape == () and int(masked["b"]) == 6 and masked["c"].shape == (0,)
    decoded = fixed_point.decode({"a": jnp.asarray([2**32 - 3, 2**31, 5], jnp.uint32)}, 1)
    np.testing.assert_array_equal(decoded["a"], [-1.5, -(2.0**30), 2.5])


def test_the_dither_follows_client_and_round_and_not_the_row():
    x, form = jnp.full(64, 0.3, jnp.float32), Format(1.0, 4)
    dithered = quick_jit(
        lambda clients, seed, row: fixed_point.words_of(
            x, row, Meeting(clients, *[None] * 4, jax.random.key(seed)), form
        )[0]
    )
    words = lambda seed, row, *clients: np.asarray(dithered(jnp.asarray(clients), seed, row))
    first = words(0, 0, 5, 9)
    np.testing.assert_array_equal(first, words(0, 1, 2, 5))
    for other in (words(0, 1, 5, 9), words(1, 0, 5, 9)):
        assert (first != other).any()
