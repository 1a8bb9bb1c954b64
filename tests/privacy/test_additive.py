"""Additive shares: exact sums whoever leaves, and words that look like nothing at all."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sums import check_exact, encoded, flat, form_of, least_p, made, messages, quick_jit, summed

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort
from fedjax_seg.privacy import additive, clusters

SPLITS = [  # clusters of 2, of 3, uneven ones, full mesh; a cluster of 1 by absence
    [0, 1, 0, 1, 2, 2, 2],
    [0, 0, 0, 0, 0, 1, 1],
    [0] * 7,
    [3, 3, 0, 1, 1, 1, 0],
]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_sum_is_exact_whoever_leaves(data):
    gone = data.draw(st.lists(st.integers(0, 6), max_size=2, unique=True))
    way = data.draw(st.sampled_from(["present", "stays", "late"]))
    given = messages(7, seed=data.draw(st.integers(0, 99)))
    of = data.draw(st.sampled_from(SPLITS))
    out = summed("additive", given, key=data.draw(st.integers(0, 99)), of=of, **{way: gone})
    check_exact("additive", given, out)
    assert not set(gone) & set(np.flatnonzero(out.arrived))
    members = np.bincount(out.meeting.group[out.arrived], minlength=7)
    assert out.failed == bool((members == 1).any()) and (way == "late" or not out.failed)


def test_33_hospitals():
    given, of = messages(33), np.arange(33) // 4  # the last one has a cluster of its own, and does not join
    for way in ({}, {"stays": [0, 5]}, {"late": [0, 5, 6]}):
        out = summed("additive", given, of=of, **way)
        check_exact("additive", given, out)
        assert out.arrived.sum() == 32 - len([*way.values(), []][0]) and not out.failed


def test_a_late_dropout_leaves_its_shares_in_the_uploads_and_they_are_taken_off():
    given = messages(7)
    out = summed("additive", given, late=[2])
    raw = out.uploads["kernel"][out.arrived].astype(np.int64).sum(0) % 2**32
    words = encoded(form_of(made("additive", 7)), given, out.meeting)["kernel"][out.arrived]
    assert (raw != words.astype(np.int64).sum(0) % 2**32).all()  # without the repetition the sum means nothing
    check_exact("additive", given, out)
    assert not out.failed


def test_dropouts_before_after_and_late():
    """{0, 1}, {2, ..., 6}: whoever is left alone does not upload; if it is known too late, the round fails."""
    given, of = messages(7), [0, 0, 1, 1, 1, 1, 1]
    for way, gone, arrived, failed in [
        ("present", [], [0, 1, 2, 3, 4, 5, 6], False),
        ("present", [0], [2, 3, 4, 5, 6], False),
        ("present", [2, 6], [0, 1, 3, 4, 5], False),
        ("stays", [0], [2, 3, 4, 5, 6], False),
        ("stays", [0, 3], [2, 4, 5, 6], False),
        ("late", [0], [1, 2, 3, 4, 5, 6], True),
        ("late", [0, 1], [2, 3, 4, 5, 6], False),
        ("late", [2, 3, 4, 5], [0, 1, 6], True),
        ("late", [2, 3, 4], [0, 1, 5, 6], False),
        ("late", range(7), [], False),
    ]:
        out = summed("additive", given, of=of, **{way: gone})
        assert (np.flatnonzero(out.arrived).tolist(), out.failed) == (arrived, failed), (way, gone)
        check_exact("additive", given, out)


def test_saturated_entries_are_counted():
    given = messages(7)
    given["bias"][:3] = [[0.0, 9.0, -8.5], [1.0, 8.0, np.inf], [0.5, 0.25, np.nan]]
    out = summed("additive", given)
    np.testing.assert_array_equal(out.saturated, [2, 1, 0, 0, 0, 0, 0])
    bias = given["bias"].copy()
    bias[:3] = [[0.0, 8.0, -8.0], [1.0, 8.0, 8.0], [0.5, 0.25, 0.0]]
    np.testing.assert_allclose(out.total["bias"], bias.sum(0), atol=1e-5)


def test_uploads_follow_clients_and_not_rows():
    """The same three clients in other rows, absent rows between them: the same words."""
    given, first, second = messages(7), [0, 1, 2], [6, 0, 3]
    moved = {name: rows * np.float32(np.nan) for name, rows in given.items()}
    for name in given:
        moved[name][second] = given[name][first]
    one = summed("additive", given, clients=[4, 0, 2, 0, 0, 0, 0], present=[3, 4, 5, 6])
    two = summed("additive", moved, clients=[0, 1, 1, 2, 1, 1, 4], present=[1, 2, 4, 5])
    jax.tree.map(np.testing.assert_array_equal, one.total, two.total)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[first], b[second]), one.uploads, two.uploads)


def test_lanes_and_replicas_change_no_word():
    """Rows one after the other, rounds side by side, against rows side by side."""
    secure, given, of = made("additive", 7), messages(7), SPLITS[0]
    lone = np.asarray([np.zeros(7, bool), np.arange(7) == 5])

    def one_round(seed, late):
        cohort = Cohort(jnp.arange(7), jnp.ones(7, bool))
        dealt = clusters.Clusters(np.asarray(of), (), False, 0, "")
        meeting = clusters.meet(dealt, cohort, jnp.ones(7, bool), jax.random.key(seed))
        seal = lambda each: secure.seal(*each, meeting)[0]
        uploads = jax.lax.map(seal, (jax.tree.map(jnp.asarray, given), jnp.arange(7)))
        keep = lambda u: jnp.where(late.reshape(-1, *[1] * (u.ndim - 1)), 0, u).sum(0, dtype=u.dtype)
        return uploads, *secure.open(jax.tree.map(keep, uploads), meeting, meeting.counts & ~late)

    found = jax.tree.map(np.asarray, quick_jit(jax.vmap(one_round))(np.arange(2), lone))
    for r in range(2):
        out = summed("additive", given, of=of, key=r, late=np.flatnonzero(lone[r]))
        mine = jax.tree.map(lambda leaf, r=r: leaf[r], found)
        jax.tree.map(np.testing.assert_array_equal, mine, (out.uploads, out.total, np.asarray(out.failed)))


def test_shares_add_up_and_any_but_one_are_uniform():
    n, secret = 4, np.arange(4096, dtype=np.uint32) // 64  # far from uniform
    parts = np.asarray(quick_jit(additive.shares, static_argnums=2)(jax.random.key(5), jnp.asarray(secret), n))
    np.testing.assert_array_equal(parts.astype(np.int64).sum(0) % 2**32, secret)
    for some in itertools.combinations(range(n), n - 1):
        together = parts[list(some)]
        assert least_p(together) > 1e-4 and least_p(together.sum(0, dtype=np.uint32)) > 1e-4
        for part in together:
            assert abs(np.corrcoef(part, secret)[0, 1]) < 5 / np.sqrt(4096)
    assert least_p(secret) < 1e-10 and abs(np.corrcoef(parts.sum(0, dtype=np.uint32), secret)[0, 1]) > 0.99


SHARE = quick_jit(additive.share, static_argnums=3)


def test_the_upload_is_the_sum_of_the_shares_received():
    """The table of everything that is sent, in int64: rows add up to the messages, columns are the uploads."""
    tree = messages(7)
    tree["kernel"][:] = 0.5  # a crafted message: all entries alike
    out, size = summed("additive", tree, present=[4, 5, 6]), 4100
    words = flat(encoded(form_of(made("additive", 7)), tree, out.meeting)).astype(np.int64)
    uploads = flat(out.uploads)
    sent = np.zeros((4, 4, size), np.int64)
    for k, j in itertools.permutations(range(4), 2):
        sent[k, j] = np.asarray(SHARE(out.meeting, k, j, size))
    for k in range(4):
        sent[k, k] = (words[k] - sent[k].sum(0)) % 2**32  # what it keeps
    np.testing.assert_array_equal(uploads[:4], sent.sum(0) % 2**32)
    np.testing.assert_array_equal(sent.sum((0, 1)) % 2**32, words[:4].sum(0) % 2**32)
    assert least_p(words[0].astype(np.uint32)) < 1e-10
    for k in range(4):
        received = np.delete(sent[k], k, axis=0).astype(np.uint32)
        assert least_p(received) > 1e-4 and least_p(received.sum(0, dtype=np.uint32)) > 1e-4
        assert least_p(uploads[k]) > 1e-4 and least_p(sent[k, k].astype(np.uint32)) > 1e-4
    alike = np.corrcoef(uploads[:4].astype(np.float64)) - np.eye(4)
    assert np.abs(alike).max() < 5 / np.sqrt(size)


def test_views():
    tree, secure = messages(7), made("additive", 7)
    out, given = summed("additive", tree, of=SPLITS[1], stays=[0]), flat(tree)
    shown = jax.tree.map(np.asarray, quick_jit(secure.views)(given, out.meeting))
    scale = np.float32(2.0 ** -secure.facts["frac"])
    signed = lambda words: ((np.asarray(words, np.int64) + 2**31) % 2**32 - 2**31).astype(np.float32) * scale
    for k in range(7):
        if not out.meeting.counts[k]:
            assert k == 0 and not any(view[k].any() for view in shown.values())
            continue
        others = np.flatnonzero(out.meeting.links[k] & out.meeting.counts)
        parts = np.asarray([SHARE(out.meeting, k, int(j), given.shape[1]) for j in others], np.int64)
        np.testing.assert_array_equal(shown["neighbour"][k], signed(parts[0]))
        np.testing.assert_array_equal(shown["colluders"][k], signed(parts.sum(0)))
        np.testing.assert_array_equal(shown["server"][k], signed(flat(out.uploads)[k]))
        for view in shown.values():
            assert abs(np.corrcoef(view[k], given[k])[0, 1]) < 5 / 64


def test_what_it_says_of_itself():
    secure = made("additive", 7, size=3, transport="seeds")
    assert secure.hides and secure.reads == "sum" and secure.rounding == 2.0 ** -secure.facts["frac"]
    facts = json.loads(json.dumps(dict(secure.facts)))
    assert facts["grade"] == "simulation: threefry2x32, 64-bit keys" and facts["transport"] == "seeds"
    assert facts["cluster_sizes"] == [4, 3] and (facts["clip"], facts["frac"]) == (8.0, 25)
    threat = " ".join(facts["threat"])
    assert "a message is one of 3 to 4" in threat and "only differential privacy" in threat
    assert "full mesh" in made("additive", 4).facts["protocol"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "paper"}, "transport: 'paper' given, one of 'vectors', 'seeds'"),
        ({"clip": 0.0}, "clip: 0.0 given"),
        ({"frac": 31}, "frac: 31 given"),
        ({"clusters": 4}, "clusters: M = 4 given for 6 clients, at most 3 expected: a cluster of 1 hides nothing"),
        ({"size": 7}, "size: N = 7 given for 6 clients"),
        ({"sizes": (5, 1)}, "sizes: 1 given"),
        ({"column": "region"}, "column: unknown name 'region'"),
    ],
)
def test_faults_are_one_line(options, message):
    with pytest.raises(UserError, match=f"^secure_sum 'additive': {message}") as error:
        made("additive", 6, **options)
    assert "\n" not in str(error.value)
