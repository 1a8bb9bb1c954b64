"""The published protocol: sums to 1e-6, portions on the simplex, and shares that hide nothing."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_sums import flat, made, messages, quick_jit, summed

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Meeting
from fedjax_seg.privacy import scalar_shares

SPLITS = [  # clusters of 2, of 3, uneven ones, one of all; a cluster of 1 by absence
    [0, 1, 0, 1, 2, 2, 2],
    [0, 0, 0, 0, 0, 1, 1],
    [0] * 7,
    [3, 3, 0, 1, 1, 1, 0],
]


def check_sum(given, out):
    """1e-6, relative to the sum of the absolute values."""

    def leaf(found, rows):
        rows = rows[out.arrived].astype(np.float64)
        assert (np.abs(found - rows.sum(0)) <= 1e-6 * np.abs(rows).sum(0)).all()

    jax.tree.map(leaf, out.total, given)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_sum_is_the_plain_sum(data):
    gone = data.draw(st.lists(st.integers(0, 6), max_size=2, unique=True))
    way = data.draw(st.sampled_from(["present", "stays", "late"]))
    given = messages(7, seed=data.draw(st.integers(0, 99)), scale=10.0 ** data.draw(st.integers(-4, 4)))
    of = data.draw(st.sampled_from(SPLITS))
    out = summed("smc_scalar", given, key=data.draw(st.integers(0, 99)), of=of, **{way: gone})
    check_sum(given, out)
    assert not set(gone) & set(np.flatnonzero(out.arrived)) and (way == "late" or not out.failed)


@pytest.mark.parametrize("size", [0, 4])
def test_33_hospitals(size):
    given = messages(33)
    of = np.arange(33) // size if size else None  # the last one has a cluster of its own, and does not join
    out = summed("smc_scalar", given, of=of)
    assert out.arrived.sum() == (32 if size else 33) and not out.failed
    check_sum(given, out)


def test_dropouts_before_after_and_late():
    """{0, 1}, {2, ..., 6}: whoever is left alone does not upload; if it is known too late, the round fails."""
    given, of = messages(7), [0, 0, 1, 1, 1, 1, 1]
    for way, gone, arrived, failed in [
        ("present", [0], [2, 3, 4, 5, 6], False),
        ("stays", [0], [2, 3, 4, 5, 6], False),
        ("stays", [2, 6], [0, 1, 3, 4, 5], False),
        ("late", [0], [1, 2, 3, 4, 5, 6], True),
        ("late", [0, 1], [2, 3, 4, 5, 6], False),
        ("late", [2, 3, 4, 5], [0, 1, 6], True),
        ("late", [2, 3, 4], [0, 1, 5, 6], False),
        ("late", range(7), [], False),
    ]:
        out = summed("smc_scalar", given, of=of, **{way: gone})
        assert (np.flatnonzero(out.arrived).tolist(), out.failed) == (arrived, failed), (way, gone)
        check_sum(given, out)


def test_how_clusters_are_dealt_leaves_the_sum():
    given = messages(7)
    first, second = (summed("smc_scalar", given, of=of).total["kernel"] for of in SPLITS[:2])
    assert not np.array_equal(first, second)  # other numbers were mixed
    assert (np.abs(first - second) <= 1e-6 * np.abs(given["kernel"]).sum(0)).all()


@functools.cache
def portions(law, concentration, seeds):
    """beta [seeds, 7, 7] of the group and those joined, below."""

    def draw(seed, among):
        meeting = Meeting(jnp.arange(7), jnp.asarray(JOINED), None, jnp.asarray(GROUP), None, jax.random.key(seed))
        return scalar_shares.shares(meeting, among, law=law, concentration=concentration)

    several = quick_jit(jax.vmap(draw, (0, None)))
    return lambda among: np.asarray(several(np.arange(seeds), among))


GROUP, JOINED = np.asarray([0, 1, 0, 1, 0, 5, 0]), np.asarray([1, 1, 1, 1, 1, 1, 0], bool)
SAME = (GROUP[:, None] == GROUP) & JOINED & JOINED[:, None]


def ratio_of_uniforms(x):
    """P(U / (U + V) <= x), in closed form."""
    return np.where(x <= 0.5, x / (2 * (1 - x)), 1 - (1 - x) / (2 * x))


LAWS = [  # (law, concentration, seeds, marginal law among 2, marginal law among 3)
    ("dirichlet", 1.0, 1500, stats.beta(1, 1).cdf, stats.beta(1, 2).cdf),
    ("dirichlet", 0.02, 300, None, None),  # nearly a choice of one: betas as small as may be
    ("uniform", 1.0, 1500, ratio_of_uniforms, None),
]


@pytest.mark.parametrize(("law", "concentration", "seeds", "of_two", "of_three"), LAWS, ids=[f"{r[:2]}" for r in LAWS])
def test_portions_are_on_the_simplex_and_have_their_law(law, concentration, seeds, of_two, of_three):
    """Equation 1 of the paper; who leaves makes the portions larger and leaves their law."""
    draw = portions(law, concentration, seeds)
    for among in (JOINED, JOINED & (np.arange(7) != 4)):
        beta = draw(among).astype(np.float64)
        same = SAME & among & among[:, None]
        assert (beta[:, ~same] == 0).all()
        np.testing.assert_allclose(beta.sum(axis=2), np.broadcast_to(among, (seeds, 7)), atol=3e-7)
        assert (beta[:, 5, 5] == 1).all()  # alone, it keeps everything
        same[5, 5] = False
        assert (beta[:, same] > 0).all() and (beta[:, same] < 1).all()
        for sender, receiver in [(0, 2), (2, 0), (2, 2), (3, 1)]:  # its own portion has the same law
            n, found = (3 if among[4] and sender != 3 else 2), beta[:, sender, receiver]
            cdf = of_three if n == 3 else of_two
            assert cdf is None or stats.kstest(found, cdf).pvalue > 1e-3
            if law == "dirichlet":
                variance = (1 / n) * (1 - 1 / n) / (n * concentration + 1)  # of Dirichlet's marginals
                assert abs(found.mean() - 1 / n) < 4 * np.sqrt(variance / seeds)
                assert found.var() == pytest.approx(variance, rel=0.2)
        assert abs(np.corrcoef(beta[:, 0, 2], beta[:, 2, 0])[0, 1]) < 5 / np.sqrt(seeds)  # each draws for itself


def test_mixtures_and_views():
    """What the paper sends: beta_kj w_k to a neighbour, R_k to the server; R adds up to the sum."""
    tree, of = messages(7), np.asarray([0, 0, 1, 1, 1, 1, 1])
    out, secure = summed("smc_scalar", tree, of=of, stays=[6]), made("smc_scalar", 7)
    given = flat(tree)
    seen = quick_jit(lambda w, m: (secure.views(w, m), scalar_shares.shares(m, m.counts)))
    shown, beta = jax.tree.map(np.asarray, seen(given, out.meeting))
    expected = beta.T.astype(np.float64) @ given
    np.testing.assert_allclose(shown["server"], expected, atol=1e-5)
    np.testing.assert_allclose(shown["server"].sum(0), given[:6].sum(0), atol=1e-5)
    for k in range(6):
        j = next(j for j in range(6) if j != k and of[j] == of[k])
        np.testing.assert_allclose(shown["neighbour"][k], beta[k, j] * given[k], rtol=1e-6)
        np.testing.assert_allclose(shown["colluders"][k], (1 - beta[k, k]) * given[k], rtol=1e-4, atol=1e-6)
        share = shown["neighbour"][k].astype(np.float64)
        assert share @ given[k] / np.linalg.norm(share) / np.linalg.norm(given[k]) == pytest.approx(1, abs=1e-6)
    assert not any(view[6].any() for view in shown.values())
    jax.tree.map(np.testing.assert_array_equal, out.uploads, tree)


def test_what_it_says_of_itself():
    secure = made("smc_scalar", 6, size=3, concentration=2.0)
    assert not secure.hides and secure.reads == "each" and secure.rounding == 0 and secure.most == 10
    facts = json.loads(json.dumps(dict(secure.facts)))
    assert facts["hides"] is False and facts["concentration"] == 2 and facts["cluster_sizes"] == [3, 3]
    assert "Algorithm 1" in facts["source"] and "nothing is hidden from a neighbour" in facts["threat"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"law": "normal"}, "law: 'normal' given, one of 'dirichlet', 'uniform'"),
        ({"concentration": 0.0}, "concentration: 0.0 given"),
        ({"law": "uniform", "concentration": 2.0}, "concentration: 2 given with law 'uniform', which has none"),
        ({"clusters": 6}, "clusters: M = 6 given for 6 clients, at most 3"),
        ({"size": 7}, "size: N = 7 given for 6 clients"),
    ],
)
def test_faults_are_one_line(options, message):
    with pytest.raises(UserError, match=f"^secure_sum 'smc_scalar': {message}") as error:
        made("smc_scalar", 6, **options)
    assert "\n" not in str(error.value)
