"""One secure sum of a few small messages, as the engine uses it, and what numpy says it should be."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from fedjax_seg import aggregation
from fedjax_seg.core.types import Cohort, Meeting, SecureSum
from fedjax_seg.privacy import clusters, fixed_point, secure_sum

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
MEAN = aggregation.make("mean")


class Summed(NamedTuple):
    """What came out, and who was there; numpy."""

    total: Any
    failed: bool
    meeting: Meeting
    arrived: np.ndarray
    uploads: Any
    saturated: np.ndarray


@functools.cache
def made(name: str, clients: int, **options: Any) -> SecureSum:
    return secure_sum.make(name, MEAN, clients=clients, places=clients, most=10.0, **options)


@functools.cache
def program(name: str, clients: int, dealt: bool, **options: Any):
    """(messages, clients [C], cluster of every client [K], present, stays, late, key) -> Summed; the late ones are
    counted and do not arrive. dealt: clusters are the protocol's own, and not those that are given."""
    secure = made(name, clients, **options)

    def run(messages, clients, of, present, stays, late, key):
        cohort, given = Cohort(clients, present), clusters.Clusters(of, (), False, 0, "")
        meeting = secure.meet(cohort, stays, key) if dealt else clusters.meet(given, cohort, stays, key)
        arrived = meeting.counts & ~late
        uploads, info = jax.vmap(lambda m, k: secure.seal(m, k, meeting))(messages, jnp.arange(len(clients)))
        kept = jax.tree.map(lambda u: jnp.where(arrived.reshape(-1, *[1] * (u.ndim - 1)), u, 0), uploads)
        total = jax.tree.map(lambda u: u.sum(0, dtype=u.dtype), kept) if secure.reads == "sum" else kept
        total, failed = secure.open(total, meeting, arrived)
        return Summed(total, failed, meeting, arrived, uploads, info["saturated"])

    return quick_jit(run)


def summed(name, messages, *, clients=None, of=None, present=(), stays=(), late=(), key=0, dealt=False, **options):
    """Rows of `messages` are those of the cohort; absent (present), leaving (stays) and late ones are lists of rows.

    of: the cluster of every client; None = all in one.
    """
    size = len(jax.tree.leaves(messages)[0])
    rows = np.arange(size)
    out = program(name, size, dealt, **options)(
        messages,
        np.asarray(rows if clients is None else clients, np.int32),
        np.asarray(0 * rows if of is None else of, np.int32),
        ~np.isin(rows, present),
        ~np.isin(rows, stays),
        np.isin(rows, late),
        jax.random.key(key),
    )
    plain = jax.tree.map(np.asarray, out._replace(meeting=out.meeting._replace(key=0)))
    return plain._replace(meeting=plain.meeting._replace(key=out.meeting.key), failed=bool(plain.failed))


def messages(size, seed=0, scale=1.0):
    """Trees with a matrix, a vector and a scalar (a weight in [0, 1]), float32, rows [size]; 4096 + 3 + 1 entries."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (scale * rng.normal(size=shape)).astype(np.float32)
    return {"kernel": normal(size, 64, 64), "bias": normal(size, 3), "weight": rng.random(size, dtype=np.float32)}


def flat(tree):
    """[C, D], the leaves in their order."""
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)], axis=1)


def encoded(form, messages, meeting):
    """The words of every row, uint32 numpy: what a protocol sums."""
    words = _encoded(form)(messages, np.arange(len(meeting.clients)), meeting.clients, meeting.key)
    return jax.tree.map(np.asarray, words)


@functools.cache
def _encoded(form):
    def run(messages, rows, clients, key):
        meeting = Meeting(clients, *[None] * 4, key)
        return jax.vmap(lambda m, k: fixed_point.words_of(m, k, meeting, form)[0])(messages, rows)

    return quick_jit(run)


def ring_sum(words, arrived, frac):
    """The signed sum of the arrived rows modulo 2^32 in int64 arithmetic, over 2^frac as float32."""

    def leaf(w):
        total = w[arrived].astype(np.int64).sum(axis=0) % 2**32
        return (np.where(total >= 2**31, total - 2**32, total).astype(np.float32) * np.float32(2.0**-frac)).astype("f4")

    return jax.tree.map(leaf, words)


def form_of(secure):
    return fixed_point.Format(secure.facts["clip"], secure.facts["frac"])


def check_exact(name, given, out, **options):
    """Bit for bit the modular sum of the encoded integers, and within n steps (and float32) of the float sum."""
    secure = made(name, len(out.arrived), **options)
    expected = ring_sum(encoded(form_of(secure), given, out.meeting), out.arrived, secure.facts["frac"])
    jax.tree.map(np.testing.assert_array_equal, out.total, expected)
    bound = out.arrived.sum() * secure.rounding

    def near(found, rows):
        plain = rows[out.arrived].astype(np.float64).sum(axis=0)
        assert np.all(np.abs(found - plain) <= bound + 2.0**-24 * np.abs(plain) + bound * 2.0**-24)

    jax.tree.map(near, out.total, given)


def least_p(words):
    """The least chi-square p-value of the four bytes of uint32 words against the uniform law."""
    octets = np.ascontiguousarray(words, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return min(stats.chisquare(np.bincount(octets[:, i], minlength=256)).pvalue for i in range(4))
