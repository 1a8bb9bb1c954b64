"""Sums under masks, bit for bit against numpy's integers; who may drop out, who is linked, what an upload shows."""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_seg.core import tree
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort, Meeting
from fedjax_seg.privacy import fixed_point, neighbourhood, secagg, shamir

FRAC = 16  # sums below 2^24: what is decoded is the integer, to the bit
MAKERS = {"secagg": secagg.secagg, "secagg_plus": functools.partial(secagg.secagg_plus, neighbours=4)}
FORM = fixed_point.Format(8.0, FRAC)


quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # short runs


def made(name, places, **options):
    return MAKERS[name](clients=50, places=places, most=10.0, **({"frac": FRAC} | options))


def ids(places):
    return (np.arange(places) * 7 + 3) % 50  # neither sorted nor the rows


def messages(places, seed=0):
    rng = np.random.default_rng(seed)
    rows = {"kernel": rng.normal(size=(places, 3, 2)), "bias": rng.normal(size=(places, 4)), "p": rng.random(places)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rows)


def round_of(secure):
    """(cohort, stays, late, messages, key) -> (sum, failed, uploads, meeting, arrived); as an engine uses it."""

    def run(cohort, stays, late, rows, key):
        meeting = secure.meet(cohort, stays, key)
        places = cohort.clients.shape[0]
        uploads, _ = jax.lax.map(lambda at: secure.seal(*at, meeting), (rows, jnp.arange(places)))
        arrived = meeting.counts & ~late
        keep = lambda u: jnp.where(arrived.reshape(-1, *[1] * (u.ndim - 1)), u, jnp.uint32(0))
        total = jax.tree.map(lambda u: jnp.sum(keep(u), 0, dtype=jnp.uint32), uploads)
        return *secure.open(total, meeting, arrived), uploads, meeting, arrived

    return run


@functools.cache
def compiled(name, places):
    return quick(round_of(made(name, places)))


def played(name, places, absent=(), gone=(), late=(), seed=1):
    out = lambda rows: jnp.asarray(np.isin(np.arange(places), rows))
    cohort = Cohort(jnp.asarray(ids(places), jnp.int32), ~out(absent))
    return compiled(name, places)(cohort, ~out(gone), out(late), messages(places), jax.random.key(seed))


@functools.cache
def encoded(places):
    """int64 [C, D]: what goes into the sum, by the encoding alone; the key of `played` decides the rounding."""
    meeting = Meeting(jnp.asarray(ids(places), jnp.int32), *[jnp.zeros(places, bool)] * 4, jax.random.key(1))
    encode = lambda row, x: tree.flat(fixed_point.encode(x, fixed_point.rounding_key(meeting, row), FORM)[0])
    words = quick(jax.vmap(encode))(jnp.arange(places), messages(places))
    return np.asarray(words).view(np.int32).astype(np.int64)


def rows_of(stacked):
    """[C, D] of leaves [C, ...]."""
    return np.concatenate([np.asarray(x).reshape(x.shape[0], -1) for x in jax.tree.leaves(stacked)], 1)


def flat(sum_):
    return np.asarray(tree.flat(sum_), np.float64)


SCENES = [
    {},
    {"absent": (1,)},
    {"absent": (0, 2)},
    {"gone": (0,)},
    {"gone": (1, 2)},
    {"late": (0,)},
    {"late": (1, 2)},
    {"gone": (0,), "late": (2,)},
    {"absent": (1,), "gone": (0,)},
]


@pytest.mark.parametrize("clients", [2, 3, 7, 33])
@pytest.mark.parametrize("name, places", [("secagg", 7), ("secagg", 33), ("secagg_plus", 33)])
def test_the_sum_is_that_of_the_integers_whoever_drops_out(name, places, clients):
    """With fewer clients than rows the last rows are padding: one program for all."""
    for scene in SCENES if clients <= places else ():
        if max(itertools.chain((0,), *scene.values())) >= clients:
            continue
        padded = {**scene, "absent": (*scene.get("absent", ()), *range(clients, places))}
        total, failed, uploads, meeting, arrived = played(name, places, **padded)
        joined, arrived = np.asarray(meeting.joined), np.asarray(arrived)
        present = clients - len(scene.get("absent", ()))
        assert joined.sum() == (present if present > 1 else 0)
        assert arrived.sum() == (joined.sum() and present - len(scene.get("gone", ())) - len(scene.get("late", ())))
        # t = floor(holders / 2) + 1 of the holders of every joined row, by hand from the links.
        holders = np.asarray(meeting.links) | np.diag(joined)
        short = [(row & arrived).sum() < row.sum() // 2 + 1 for row in holders[joined]]
        assert bool(failed) == any(short), scene
        if failed:
            assert not np.any(flat(total))
            continue
        integers = encoded(places)
        np.testing.assert_array_equal(flat(total) * 2**FRAC, integers[arrived].sum(0))
        plain = rows_of(messages(places))[arrived].astype(np.float64).sum(0)
        assert np.abs(flat(total) - plain).max() <= arrived.sum() * FORM.step
        same = rows_of(uploads).view(np.int32) == integers  # no upload is its message, joined or dropped
        assert np.all(same[joined].mean(1) < 0.1)


def test_which_rounds_fail():
    """By hand: K = 3 needs 2 of 3, K = 7 needs 4 of 7, two clients need each other, one alone does not even join."""

    def failed(clients, absent=(), **scene):
        return bool(played("secagg", 7, absent=(*absent, *range(clients, 7)), **scene)[1])

    assert not failed(3, gone=(0,)) and not failed(3, late=(2,)) and failed(3, gone=(0,), late=(1,))
    assert not failed(7, gone=(0, 1), late=(2,)) and failed(7, gone=(0, 1), late=(2, 3)) and failed(7, gone=range(7))
    assert failed(2, gone=(0,)) and failed(2, late=(1,))
    assert failed(7, absent=(0, 1, 2), gone=(3, 4)) and not failed(7, absent=(0, 1, 2), gone=(3,))
    alone = played("secagg", 7, absent=range(1, 7))
    assert not alone[1] and not np.any(alone[3].joined) and not np.any(alone[3].counts)


def test_a_higher_threshold_is_exact_in_its_decimals():
    assert neighbourhood.thresholds(0.7, 10)[10] == 8 and neighbourhood.thresholds(0.6, 5)[5] == 4
    assert neighbourhood.thresholds(0.5, 4).tolist() == [1, 1, 2, 2, 3]
    for threshold in (0.5, 0.55, 2 / 3, 0.9, 0.999):
        table = neighbourhood.thresholds(threshold, 100)[2:]
        assert np.all(table <= np.arange(2, 101)) and np.all(table > np.arange(2, 101) / 2)


def test_never_both_secrets_of_one_client():
    rows = jnp.array(list(itertools.product([False, True], repeat=4)))
    joined, arrived = jnp.repeat(rows, 16, 0), jnp.tile(rows, (16, 1))
    seeds, keys = map(np.asarray, neighbourhood.requests(joined, arrived))
    assert not np.any(seeds & keys)
    np.testing.assert_array_equal(seeds | keys, joined)
    assert not np.any(keys & arrived) and not np.any(seeds & ~arrived)


def test_the_server_uses_shares_of_the_arrived_and_needs_them(monkeypatch):
    """Shares are spoilt with the holders that dropped out: nothing changes; with one that arrived: a wrong sum."""
    true_share, spoilt = shamir.share, {}

    def share(randomness, secrets, threshold, points):
        dealt = true_share(randomness, secrets, threshold, points)
        return jnp.where(jnp.isin(points, spoilt["points"])[:, None], jnp.uint32(99), dealt)

    def run(points, *arguments):
        spoilt["points"] = points
        return round_of(made("secagg", 7))(*arguments)

    monkeypatch.setattr(shamir, "share", share)
    program, points = quick(run), ids(7) + 1
    out = lambda rows: jnp.asarray(np.isin(np.arange(7), rows))
    for gone, late in (((), ()), ((1,), (4,))):
        arrived = ~np.isin(np.arange(7), gone + late)
        exact = encoded(7)[arrived].sum(0)
        for bad, right in ((np.where(arrived, 0, points), True), (points * (np.arange(7) == 0), False)):
            cohort = Cohort(jnp.asarray(ids(7), jnp.int32), ~out(()))
            whole = (cohort, ~out(gone), out(late), messages(7), jax.random.key(1))
            total, failed, *_ = program(jnp.asarray(bad, jnp.uint32), *whole)
            assert not failed
            assert np.array_equal(flat(total) * 2**FRAC, exact) == right


def test_an_aborted_round_asks_for_nothing(monkeypatch):
    seen = []

    def left(meeting, request, size):
        jax.debug.callback(lambda *ask: seen.append(np.stack(ask)), *request)
        return jnp.zeros((size,), jnp.uint32)

    monkeypatch.setattr(
        secagg.threefry_masks,
        "masks",
        lambda table: neighbourhood.Masks(lambda m, r, n: jnp.zeros(n, jnp.uint32), left),
    )
    run = quick(round_of(made("secagg", 3)))
    out = lambda rows: jnp.asarray(np.isin(np.arange(3), rows))
    for gone, asked in (((0,), [[0, 1, 1], [1, 0, 0], [0, 1, 1]]), ((0, 1), np.zeros((3, 3)))):
        jax.block_until_ready(
            run(Cohort(jnp.arange(3), out(()) | True), ~out(gone), out(()), messages(3), jax.random.key(0))
        )
        jax.effects_barrier()
        np.testing.assert_array_equal(seen.pop(), asked)


def test_uploads_are_uniform_whatever_the_message():
    secure = made("secagg", 3)

    @quick
    def seal(x, row, seed):
        meeting = secure.meet(Cohort(jnp.arange(3), jnp.ones(3, bool)), jnp.ones(3, bool), jax.random.key(seed))
        return secure.seal({"x": x}, row, meeting)[0]["x"]

    size = 64_000
    both = [np.asarray(seal(jnp.full((size,), fill), 1, 3)) for fill in (0.0, -7.5)]
    for upload, shift in itertools.product(both, (0, 8, 16, 24)):
        assert stats.chisquare(np.bincount(upload >> shift & 255, minlength=256)).pvalue > 1e-4
    # One mask for both here: it is the meeting's. Another meeting has another one.
    np.testing.assert_array_equal(both[0] - both[1], np.uint32(int(7.5 * 2**FRAC)))
    again = np.asarray(seal(jnp.zeros(size), 1, 4))
    assert stats.chisquare(np.bincount(again - both[0] >> 24, minlength=256)).pvalue > 1e-4


def test_neither_lanes_nor_the_order_of_rows_matter():
    name, places = "secagg_plus", 7
    total, failed, uploads, meeting, _ = played(name, places, absent=(6,), gone=(2,), late=(3,))
    secure = made(name, places)
    lanes = jnp.arange(places + 1)  # one lane idle: its row is none
    given = jax.tree.map(lambda x: x[jnp.minimum(lanes, places - 1)], messages(places))
    in_lanes, info = quick(jax.vmap(secure.seal, (0, 0, None)))(given, lanes, meeting)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:-1], b), in_lanes, uploads)
    assert not np.any(info["saturated"])
    # Another order of the same cohort: the same uploads and links, by client id.
    order = np.random.default_rng(5).permutation(places)
    out = lambda rows: jnp.asarray(np.isin(np.arange(places), rows))[order]
    shuffled = compiled(name, places)(
        Cohort(jnp.asarray(ids(places)[order], jnp.int32), ~out((6,))),
        ~out((2,)),
        out((3,)),
        jax.tree.map(lambda x: x[order], messages(places)),
        jax.random.key(1),
    )
    np.testing.assert_array_equal(shuffled[3].links, np.asarray(meeting.links)[order][:, order])
    real = np.asarray(meeting.joined)[order]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[real], b[order][real]), shuffled[2], uploads)
    jax.tree.map(np.testing.assert_array_equal, shuffled[0], total)
    assert not failed


GRAPH = jax.jit(neighbourhood.harary, static_argnums=3)


def connected(links, joined):
    reached = np.zeros(len(joined), bool)
    reached[np.flatnonzero(joined)[:1]] = True
    for _ in joined:
        reached |= links[reached].any(0)
    return np.array_equal(reached, joined)


@pytest.mark.parametrize("neighbours", [2, 6])
def test_the_graph_is_regular_symmetric_and_connected(neighbours):
    places = 20
    seen = set()
    for count, seed in itertools.product((0, 2, 3, 5, 7, 8, 13, 20), (0, 1)):
        joined = np.isin(np.arange(places), np.random.default_rng(count).permutation(places)[:count])
        links = np.asarray(GRAPH(ids(places), joined, jax.random.key(seed), neighbours))
        np.testing.assert_array_equal(links, links.T)
        assert not links.diagonal().any() and not links[~joined].any() and connected(links, joined)
        assert np.all(links[joined].sum(1) == min(neighbours, max(count - 1, 0)))
        seen.add(links.tobytes())
        # It stays connected whichever neighbours / 2 rows are taken away (it is k-connected).
        for lost in itertools.combinations(np.flatnonzero(joined)[:4], neighbours // 2 if neighbours < 4 else 3):
            rest = joined & ~np.isin(np.arange(places), lost)
            assert count <= neighbours + 1 or connected(links & rest[:, None] & rest, rest)
    assert len(seen) > 9  # a new graph for every key, where it is not full


def test_the_default_bits_and_saturation():
    secure = made("secagg", 3, frac=None, clip=2.0)
    assert secure.rounding == 2.0 ** -secure.facts["frac"] == secure.facts["step"]
    n, scale = 3, 2 ** secure.facts["frac"]
    assert n * (2 * scale + 1) < 2**31 <= n * (2 * 2 * scale + 1)
    rows = {"x": jnp.array([[2.0, -2.0, 9.0], [2.0, -2.0, 1.0], [2.0, -2.0, -9.0]])}
    meeting = secure.meet(Cohort(jnp.arange(3), jnp.ones(3, bool)), jnp.ones(3, bool), jax.random.key(0))
    uploads, info = quick(jax.vmap(secure.seal, (0, 0, None)))(rows, jnp.arange(3), meeting)
    assert info["saturated"].tolist() == [1, 0, 1]
    total, failed = quick(secure.open)({"x": jnp.sum(uploads["x"], 0, dtype=jnp.uint32)}, meeting, meeting.counts)
    assert not failed and total["x"].tolist() == [6.0, -6.0, 1.0]


def test_what_parties_see_and_what_reports_say():
    secure = made("secagg", 3)
    meeting = secure.meet(Cohort(jnp.arange(3), jnp.array([True, True, False])), jnp.ones(3, bool), jax.random.key(0))
    rows = jax.random.normal(jax.random.key(1), (3, 5))
    views = quick(secure.views)(rows, meeting)
    assert not np.any(views["neighbour"]) and not np.any(views["colluders"]) and not np.any(views["server"][2])
    upload = quick(secure.seal)(rows[1], 1, meeting)[0]
    np.testing.assert_array_equal(views["server"][1], np.asarray(upload).view(np.int32).astype(np.float32) / 2**FRAC)
    assert (secure.name, secure.hides, secure.reads, secure.most) == ("secagg", True, "sum", 10.0)
    facts = json.loads(json.dumps(secure.facts))
    assert facts["grade"].startswith("simulation grade") and "up to 1 of the 3 holders" in " ".join(facts["threat"])
    plus = secagg.secagg_plus(clients=50, places=33, most=1.0)
    assert (plus.facts["neighbours"], plus.facts["threshold"]) == (12, 0.5) and "SecAgg+" in plus.facts["protocol"]
    assert any("not connected" in line for line in plus.facts["threat"])


@pytest.mark.parametrize(
    "maker, options, message",
    [
        ("secagg", {"places": 1}, r"rounds of 1 client\(s\) given, at least 2 expected"),
        ("secagg", {"threshold": 0.4}, r"'secagg': threshold: 0.4 given, a finite number in \[0.5, 1\]"),
        ("secagg", {"threshold": 1.0}, r"threshold: 1 given, a number in \[0.5, 1\) expected"),
        ("secagg", {"threshold": math.nan}, "threshold: nan given"),
        ("secagg", {"prg": "rc4"}, "prg: 'rc4' given, one of 'threefry', 'chacha20', 'aes_ctr'"),
        ("secagg", {"clip": 0.0}, "clip: 0.0 given"),
        ("secagg", {"frac": 31}, "frac: 31 given"),
        ("secagg_plus", {"places": 33, "frac": 23}, "lower frac to"),
        ("secagg_plus", {"neighbours": 0}, r"neighbours: 0 given, an integer in \[2, inf\]"),
        ("secagg_plus", {"neighbours": 5}, "neighbours: 5 given, an even number expected"),
    ],
)
def test_refusals(maker, options, message):
    make = {"secagg": secagg.secagg, "secagg_plus": secagg.secagg_plus}[maker]
    with pytest.raises(UserError, match=message) as error:
        make(**({"clients": 40, "places": 3, "most": 1.0} | options))
    assert "\n" not in str(error.value)
