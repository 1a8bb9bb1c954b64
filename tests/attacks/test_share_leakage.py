"""Scalar shares give the update away, uniform ones nothing; numbers of the project's measurement, and closed forms."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_seg import attacks
from fedjax_seg.attacks import share_attacks
from fedjax_seg.attacks.share_leakage import Seen, means, picture, run
from fedjax_seg.core import checks
from fedjax_seg.core.checks import UserError

D, N = 200_000, 4
CLIP_BITS = 22  # fixed point: words are value * 2^22


def federation(seed=0, sites=N, size=D, law="laplace"):
    """(last global model, weights of the sites): update and weight of rms 0.002 and 0.05."""
    rng = np.random.default_rng(seed)
    model = rng.normal(0, 0.05, size)
    draw = {"laplace": lambda: rng.laplace(0, 0.002 / np.sqrt(2), (sites, size)), "normal": None}[law]
    return model.astype(np.float32), (model + draw()).astype(np.float32)


def scalar_shares(vectors, groups, seed=1):
    """beta on the simplex of every group: {'neighbour', 'colluders', 'server'} and beta, Algorithm 1 by hand.

    Also the shares of updates. beta[k, j] is what k sends to j.
    """
    rng = np.random.default_rng(seed)
    c = len(vectors)
    beta = np.zeros((c, c), np.float32)
    for g in np.unique(groups):
        members = np.flatnonzero(groups == g)
        beta[np.ix_(members, members)] = rng.dirichlet(np.ones(len(members)), len(members))
    next_one = [np.flatnonzero((groups == groups[k]) & (np.arange(c) != k))[0] for k in range(c)]
    own = np.diag(beta)[:, None]
    return {
        "neighbour": beta[np.arange(c), next_one][:, None] * vectors,
        "colluders": (1 - own) * vectors,
        "server": (beta.T @ vectors).astype(np.float32),
    }, beta


def additive_shares(vectors, seed=2, leak=None):
    """uint32 [C, C, D]: share [k, j] of k's words for j, and the words; made as privacy notes 4.2 say."""
    words = np.round(vectors.astype(np.float64) * 2**CLIP_BITS).astype(np.int64).astype(np.uint32)
    c, d = words.shape
    shares = np.random.default_rng(seed).integers(0, 2**32, (c, c, d), dtype=np.uint32)
    for k in range(c):
        if leak is not None:
            shares[k, (k + 1) % c] = leak(shares[k, (k + 1) % c], words[k])
        shares[k, k] = words[k] - (shares[k].sum(0, dtype=np.uint32) - shares[k, k])
    return shares, words


def signed(words):
    return (words.view(np.int32) / 2.0**CLIP_BITS).astype(np.float32)


def seen_of(model, vectors, views, groups=None, **changes):
    c = len(vectors)
    groups = np.zeros(c, int) if groups is None else groups
    names = tuple(f"site{k}" for k in range(c))
    seen = Seen(vectors, views["server"], views["neighbour"], views["colluders"], model, "weights", groups,
                np.ones(c, bool), names, False, "smc_scalar")  # fmt: skip
    return seen._replace(**changes)


@pytest.fixture(scope="module")
def scalar():
    """Two clusters of four, scalar shares of weights: (Seen, beta)."""
    model, weights = federation(sites=2 * N)
    groups = np.repeat([0, 1], N)
    views, beta = scalar_shares(weights, groups)
    return seen_of(model, weights, views, groups), beta


@pytest.fixture(scope="module")
def scalar_rows(scalar):
    return run(scalar[0])


@pytest.fixture(scope="module")
def additive():
    """One cluster of four, additive shares of weights: (Seen, shares, words)."""
    model, weights = federation()
    shares, words = additive_shares(weights)
    views = {
        "neighbour": np.stack([signed(shares[k, (k + 1) % N]) for k in range(N)]),
        "colluders": np.stack([signed(words[k] - shares[k, k]) for k in range(N)]),
        "server": np.stack([signed(shares[:, j].sum(0, dtype=np.uint32)) for j in range(N)]),
    }
    return seen_of(model, weights, views, hides=True, protocol="additive"), shares, words


@pytest.fixture(scope="module")
def additive_rows(additive):
    return run(additive[0])


def of(rows, viewer, mean=False):
    return [r for r in rows if r["viewer"] == viewer and (r["site"] == "mean") == mean]


def test_a_neighbour_has_the_direction_and_the_update(scalar, scalar_rows):
    seen, beta = scalar
    for k in range(2 * N):
        share = seen.neighbour[k]
        assert share_attacks.direction(share, seen.true[k]) >= 0.9999995
        true_beta = beta[k, {0: 1, N: N + 1}.get(k, k - k % N)]
        found = share_attacks.recover_scale(share, seen.model)
        # cos(update, model) has deviation 1 / sqrt(D); times 0.002 / 0.05 it is the relative error of beta: 9e-5.
        assert abs(found / true_beta - 1) < 4 * 0.04 / np.sqrt(D)
    for row in of(scalar_rows, "neighbour"):
        assert row["received"] >= 0.9999995
        assert row["error"] < 0.01 and row["weights_error"] < 4e-4 and row["cosine"] > 0.9999
        assert row["verdict"] == "the update itself" and row["how"] == "projection"
    assert np.mean([r["error"] for r in of(scalar_rows, "neighbour")]) == pytest.approx(2.0e-3, abs=1.5e-3)


def test_colluding_neighbours_have_it_too(scalar, scalar_rows):
    seen, beta = scalar
    parts = [beta[0, j] * seen.true[0] for j in (1, 2, 3)]
    for shares in (np.stack(parts), seen.colluders[0]):
        weights, scale = share_attacks.colluding(shares, seen.model)
        assert scale.value == pytest.approx(1 - beta[0, 0], rel=4e-4)
        assert share_attacks.relative_error(weights - seen.model, seen.true[0] - seen.model) < 0.01
    assert all(r["error"] < 0.01 and r["verdict"] == "the update itself" for r in of(scalar_rows, "colluders"))


def test_the_server_tells_members_from_outsiders(scalar, scalar_rows):
    seen, _ = scalar
    outsider = seen.model + np.random.default_rng(9).laplace(0, 0.002 / np.sqrt(2), D)
    uploads = seen.server[:N]
    assert all(share_attacks.span_test(uploads, w) < 1e-5 for w in seen.true[:N])
    # What an outsider has in common with a group is the model, and that with the error of the group's mean update:
    # 0.04 * sqrt(1 + 1 / N) = 0.0447.
    assert share_attacks.span_test(uploads, outsider) == pytest.approx(0.0447, abs=0.001)
    for row in of(scalar_rows, "server"):
        assert row["member"] < 1e-5 and row["outsider"] == pytest.approx(0.0447, abs=0.001)


def test_the_server_unmixes_updates_with_sign_and_size(scalar, scalar_rows):
    for row in of(scalar_rows, "server"):
        assert row["cosine"] > 0.99 and row["how"] == "unmixed" and row["verdict"] == "the update itself"
        assert row["error"] < 0.05
    seen, beta = scalar
    found = share_attacks.unmix(seen.server[:N], seen.model, seed=3, entries=50_000)
    order = share_attacks.matched(found.vectors, seen.true[:N] - seen.model)
    np.testing.assert_allclose(found.mixing[:, order], beta[:N, :N].T, atol=0.02)


def test_the_sum_alone_shows_what_a_mean_of_independent_updates_shows(scalar_rows, additive_rows):
    for row in of(scalar_rows, "sum") + of(additive_rows, "sum"):
        assert row["cosine"] == pytest.approx(1 / np.sqrt(N), abs=0.02)  # and the error of a mean of four is:
        assert row["error"] == pytest.approx(np.sqrt(1 - 1 / N), abs=0.02)
        assert row["verdict"] == "what the sum tells everybody"


def test_additive_shares_show_nothing_above_chance(additive, additive_rows):
    seen, shares, words = additive
    for k in (0, N - 1):
        for j in range(N):  # j = k: the share a client keeps is uniform as well
            found = share_attacks.uniformity(shares[k, j], words[k])
            assert found.nothing and found.p > 1e-4 and abs(found.correlation) < 4 / np.sqrt(D)
            assert abs(stats.pearsonr(shares[k, j].view(np.int32), seen.true[k])[0]) < 4 / np.sqrt(D)
    for row in additive_rows:
        if row["viewer"] != "sum":
            assert row["verdict"] == "nothing above chance", row
            assert row["error"] >= 0.99 and abs(row["cosine"]) < row["chance"]
            assert abs(row["received"]) < 4 / np.sqrt(D)
        if row["viewer"] in ("neighbour", "server"):
            assert row["uniform"] > 1e-4
        if row["viewer"] == "server" and row["site"] != "mean":
            assert row["member"] > 0.9  # the sums of words do not span the weights


def low_byte(share, word):
    return (share & np.uint32(0xFFFFFF00)) | (word & np.uint32(0xFF))


def even(byte):
    """The byte with its lowest bit set so that the number of ones is even: no single bit tells anything."""
    ones = np.bitwise_count(byte >> np.uint32(1)).astype(np.uint32)
    return (byte & np.uint32(0xFE)) | (ones & np.uint32(1))


LEAKS = {
    "a high bit in a low one": lambda share, word: (share & ~np.uint32(1)) | (word >> np.uint32(7) & np.uint32(1)),
    "parity of the mask": lambda share, word: (share & np.uint32(0xFFFFFF00)) + word + even(share & np.uint32(0xFF)),
    "parity of the low byte": lambda share, word: (share & np.uint32(0xFFFFFF00)) | even(share & np.uint32(0xFF)),
    "low byte": low_byte,
    "lowest bit": lambda share, word: (share & ~np.uint32(1)) | (word & np.uint32(1)),
    "sign in the lowest bit": lambda share, word: (share & ~np.uint32(1)) | (word >> np.uint32(31)),
    "not masked above": lambda share, word: (share & np.uint32(0xFFFF)) | (word & np.uint32(0xFFFF0000)),
    "multiplied": lambda share, word: word * np.uint32(3),
    "16 bits of mask": lambda share, word: word + (share >> np.uint32(16)),
    "no carry": lambda share, word: (word & np.uint32(0xFF)) + (share & np.uint32(0xFFFFFF00)),
    "one value twice as likely": lambda share, word: np.where(share >> np.uint32(24) == 7, share ^ (1 << 24), share),
}


@pytest.mark.parametrize("leak", sorted(LEAKS))
def test_a_leaking_share_is_caught(additive, leak):
    _, shares, words = additive
    bad = LEAKS[leak](shares[0, 1], words[0]).astype(np.uint32)
    assert not share_attacks.uniformity(bad, words[0]).nothing
    assert share_attacks.uniformity(shares[0, 1], words[0]).nothing


def test_words_read_as_numbers_keep_their_top_byte(additive):
    """Engines hand over float32 forms of words: the top byte and the correlation are still tested."""
    seen, shares, _ = additive
    found = share_attacks.uniformity(seen.neighbour[0], seen.true[0])
    assert found.nothing
    exact = share_attacks.uniformity(shares[0, 1], seen.true[0])
    assert found.correlation == pytest.approx(exact.correlation, abs=1e-6)
    top = np.bincount(shares[0, 1] >> 24, minlength=256)
    assert found.p == pytest.approx(stats.chisquare(top).pvalue, rel=0.01)
    assert not share_attacks.uniformity(seen.true[0], seen.true[0]).nothing
    weak = seen.neighbour[0] + 20 * np.abs(seen.neighbour[0]).max() * seen.true[0]
    assert not share_attacks.uniformity(weak, seen.true[0]).nothing


def test_p_values_are_those_of_chance():
    """No more false alarms on fresh uniform words than said; p spreads over [0, 1]."""
    rng = np.random.default_rng(4)
    secret = rng.normal(size=3000)
    found = [share_attacks.uniformity(rng.integers(0, 2**32, 3000, dtype=np.uint32), secret) for _ in range(60)]
    assert all(f.nothing for f in found) and np.mean([f.p < 0.2 for f in found]) < 0.4
    few = share_attacks.uniformity(rng.integers(0, 2**32, 40, dtype=np.uint32), secret[:40])
    assert few.nothing and few.limit == pytest.approx(3.89 / np.sqrt(40), rel=1e-3)
    assert share_attacks.chance(D) == pytest.approx(stats.norm.isf(5e-5) / np.sqrt(D))


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 1.0), st.integers(0, 2**31), st.floats(0.02, 1.0))
def test_entries_that_training_left_alone_give_the_scale_exactly(beta, seed, moved):
    """Closed form: the share of such an entry is beta times a number everybody knows."""
    rng = np.random.default_rng(seed)
    model = rng.normal(0, 0.05, 2000).astype(np.float32)
    change = np.where(rng.random(2000) < moved, 0.01 * np.sign(model), 0)  # all along the model: projection is biased
    change[:40] = 0
    weights = (model + change).astype(np.float32)
    share = np.float32(beta) * weights
    found = share_attacks.best_scale(share, model)
    assert found.how == "unchanged" and found.value == pytest.approx(np.float32(beta), rel=3e-7)
    biased = share_attacks.recover_scale(share, model)
    along = np.sum(change * model) / np.sum(model.astype(float) ** 2)
    assert biased == pytest.approx(np.float32(beta) * (1 + along), rel=1e-5)
    if np.mean(change == 0) > 0.75:
        assert share_attacks.recover_scale(share, model, "median") == pytest.approx(np.float32(beta), rel=3e-7)


def test_the_median_ratio_by_hand():
    """Ratios 1, 2, 3 with weights 2, 1, 2: half of 5 is reached at 2. The known zero says nothing."""
    model, share = np.array([2.0, 0.0, -1.0, 2.0]), np.array([6.0, 9.0, -2.0, 2.0])
    assert share_attacks.recover_scale(share, model, "median") == 2


def test_without_a_scale_nothing_is_invented():
    model = np.zeros(50, np.float32)
    for how in ("projection", "median", "unchanged"):
        assert np.isnan(share_attacks.recover_scale(np.ones(50), model, how))
    assert share_attacks.rescaled(np.ones(3), -0.1) is None and share_attacks.rescaled(np.ones(3), np.nan) is None
    assert share_attacks.direction(np.zeros(3), np.ones(3)) == 0
    assert share_attacks.unmix(np.ones((1, 500)), None) is None  # one sum of one vector
    assert share_attacks.unmix(np.ones((3, 500)), None) is None  # three times the same


def test_updates_give_their_direction_but_not_their_length():
    model, weights = federation()
    updates = weights - model
    views, beta = scalar_shares(updates, np.zeros(N, int))
    views["neighbour"][0] = updates[0] / N  # the mean beta: the guess happens to be right, and nobody can know
    rows = run(seen_of(model, updates, views, of="updates"))
    assert of(rows, "neighbour")[0]["error"] < 1e-6
    for row, own in zip(of(rows, "colluders"), np.diag(beta)):
        assert row["error"] == pytest.approx(abs((1 - own) / (1 - 1 / N) - 1), rel=1e-4)
    for viewer in ("neighbour", "colluders"):
        for row in of(rows, viewer):
            assert row["cosine"] >= 0.9999995 and row["verdict"] == "its direction" and row["how"] == "guess"
    # The server has lengths as well: a client's shares add up to one update.
    assert all(r["verdict"] == "the update itself" and r["error"] < 0.05 for r in of(rows, "server"))


def test_factors_are_undone():
    """Weighted means share p_k w_k: a neighbour does not even notice; the server solves for p."""
    model, weights = federation()
    p = np.array([0.2, 1.0, 0.55, 0.8], np.float32)
    views, _ = scalar_shares(p[:, None] * weights, np.zeros(N, int))
    rows = run(seen_of(model, p[:, None] * weights, views, factor=p))
    for viewer in ("neighbour", "server"):
        assert all(r["error"] < 0.05 and r["verdict"] == "the update itself" for r in of(rows, viewer))
    mean = np.average(weights - model, axis=0, weights=p)
    for row, w in zip(of(rows, "sum"), weights):
        assert row["cosine"] == pytest.approx(share_attacks.direction(mean, w - model), abs=1e-6)


def test_other_protocols_in_words():
    model, weights = federation(size=5000)
    silent = np.zeros_like(weights)
    plain = seen_of(model, weights, {"neighbour": silent, "colluders": silent, "server": weights}, protocol="none")
    rows = run(plain)
    assert {r["verdict"] for r in of(rows, "neighbour")} == {"nothing is sent"}
    assert all(r["cosine"] == 1 and r["error"] < 1e-6 and r["how"] == "as sent" for r in of(rows, "server"))
    # By assumption: what the server might have read is not looked at.
    rows = run(plain._replace(protocol="assumed", hides=True))
    assert {r["verdict"] for r in rows if r["viewer"] != "sum"} == {"nothing, by assumption"}
    assert all(r["cosine"] is None for r in of(rows, "server")) and all(r["cosine"] for r in of(rows, "sum"))
    # Noise of the client's own, three times as large as its update: the cosine is 1 / sqrt(1 + 3^2) = 0.316.
    noise = np.random.default_rng(5).normal(0, 0.006, weights.shape)
    noisy = (weights + noise).astype(np.float32)
    rows = run(plain._replace(true=noisy, server=noisy, clean=weights))
    for row in of(rows, "server"):
        assert row["cosine"] == pytest.approx(1 / np.sqrt(10), abs=0.03) and row["verdict"] == "a part of it"
        assert row["error"] == pytest.approx(3, rel=0.05)
    # A chain: one upload, the whole sum.
    last = silent.copy()
    last[-1] = weights.sum(0)
    rows = of(run(plain._replace(protocol="chained", server=last)), "server")
    assert [r["verdict"] for r in rows] == ["nothing is sent"] * 3 + ["no more than the sum tells"]
    assert rows[-1]["cosine"] == pytest.approx(0.5, abs=0.05)


def test_who_did_not_take_part_is_left_out_and_rows_are_plain(scalar, scalar_rows):
    seen, _ = scalar
    counts = np.arange(2 * N) != 3
    rows = run(seen._replace(counts=counts), entries=4000, seed=7)
    assert {r["site"] for r in rows} == {"mean", *(f"site{k}" for k in range(2 * N) if k != 3)}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows == run(seen._replace(counts=counts), entries=4000, seed=7)
    assert rows != run(seen._replace(counts=counts), entries=4000, seed=8)
    # a false alarm among 7 sites and 3 viewers once in 10,000 runs
    assert rows[0]["chance"] == pytest.approx(stats.norm.isf(5e-5 / 21) / np.sqrt(4000), rel=1e-3)
    (mean,) = of(scalar_rows, "neighbour", mean=True)
    assert mean["error"] == pytest.approx(np.mean([r["error"] for r in of(scalar_rows, "neighbour")]))
    mixed = means([{**scalar_rows[0], "verdict": v} for v in ("nothing above chance", "its direction")])
    assert mixed[0]["verdict"] == "its direction (1 of 2 sites)"


def test_a_picture_of_the_attack(scalar, additive):
    drawn = picture(scalar[0], 1, start=10, count=100)
    seen = scalar[0]
    np.testing.assert_allclose(drawn["true"], (seen.true[1] - seen.model)[10:110], atol=1e-8)
    np.testing.assert_array_equal(drawn["received"], seen.neighbour[1][10:110])
    np.testing.assert_allclose(drawn["reconstructed"], drawn["true"], atol=2e-4)
    assert (drawn["site"], drawn["protocol"]) == ("site1", "smc_scalar") and drawn["error"] < 0.01
    assert picture(additive[0], 1)["error"] > 1
    silent = seen._replace(neighbour=np.zeros_like(seen.neighbour))
    assert picture(silent, 0)["reconstructed"] is None


def test_the_table_makes_the_attack(scalar):
    made = attacks.make("share_leakage", entries=3000, seed=2)
    assert made.run(scalar[0]) == run(scalar[0], entries=3000, seed=2)
    assert made.picture(scalar[0], 0)["site"] == "site0"
    assert checks.options(attacks.ATTACKS["share_leakage"]) == {"entries": 200_000, "seed": 0}


@pytest.mark.parametrize(
    "options, words",
    [({"entries": 10}, "attack.entries"), ({"seed": -1}, "attack.seed"), ({"entry": 5}, "did you mean 'entries'")],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        attacks.make("share_leakage", **options)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"of": "gradients"}, "seen.of"),
        ({"model": np.zeros(3)}, r"seen.model: shape \(3,\) given, \(200000,\) expected"),
        ({"names": ("a",)}, "seen.names: 1 names given"),
        ({"factor": np.ones(2)}, "seen.factor"),
    ],
)
def test_arrays_that_do_not_fit_are_named(scalar, changes, words):
    with pytest.raises(UserError, match=words):
        run(scalar[0]._replace(**changes))
