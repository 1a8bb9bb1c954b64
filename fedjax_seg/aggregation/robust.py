"""Rules that withstand a few bad clients: coordinate-wise median, trimmed mean, geometric median, Krum.

All of them are masked: shapes are static, the number K of present clients is counted inside the program.
"""

from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_seg.aggregation.lift import Rule, combine, gram, lift
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, Array

_LARGEST_NETWORK = 64  # rows; beyond it the program of a sorting network gets long

_COORDINATE = frozenset({"permutation", "consensus", "translation", "scale", "hull"})


def median(*, tie: str = "lower", of: str = "updates") -> Aggregator:
    """Coordinate-wise median over the present clients. Per tensor and on the whole model are the same thing.

    Source: Yin et al. 2018; FedHAvg, section 4.3.1 ("Coordinate-wise Median").

    Args:
      tie: for an even K, 'lower' takes the lower of the two middle values (torch.median, hence the released FedHAvg
        code), 'mean' their mean (numpy.median).
      of: 'updates' or 'weights'; equal up to rounding.
    """
    checks.one_of("aggregator median: tie", tie, ("lower", "mean"))

    def ranks(clients: int) -> np.ndarray:
        table = np.zeros((clients + 1, clients))
        for k in range(1, clients + 1):
            for rank in ((k - 1) // 2, k // 2) if tie == "mean" else ((k - 1) // 2,) * 2:
                table[k, rank] += 0.5
        return table

    return lift(_mean_of_ranks(ranks), per="coordinate", of=of, properties=_COORDINATE)


def trimmed_mean(*, alpha: float = 0.25, of: str = "updates") -> Aggregator:
    """Coordinate-wise mean without the floor(alpha K) lowest and as many highest of the K present values.

    Source: FedHAvg, section 4.3.1 ("Trimmed-mean", alpha = .25); Yin et al. 2018. At K=4 and alpha=.25 it equals the
    median with tie='mean'. alpha is read as the decimal it is written as: floor(.29 * 100) is 29.

    Args:
      alpha: the fraction cut on each side, in [0, .499].
      of: 'updates' or 'weights'; equal up to rounding.
    """
    checks.number("aggregator trimmed_mean: alpha", alpha, low=0.0, high=0.499)

    def ranks(clients: int) -> np.ndarray:
        table = np.zeros((clients + 1, clients))
        for k in range(1, clients + 1):
            cut = int(Fraction(str(float(alpha))) * k)
            table[k, cut : k - cut] = 1 / (k - 2 * cut)
        return table

    return lift(_mean_of_ranks(ranks), per="coordinate", of=of, properties=_COORDINATE)


def geometric_median(
    *, steps: int = 10, eps: float = 1e-6, weighted: bool = False, per: str = "model", of: str = "updates"
) -> Aggregator:
    """The point of least summed distance to the clients, by the smoothed Weiszfeld iteration.

    Source: RFA (Pillutla et al. 2022), algorithm 2, started at the mean: v <- sum b_k x_k / sum b_k with
    b_k = w_k / max(eps, ||v - x_k||). The iteration runs on the inner products of the centred clients, so that the data
    are read three times whatever the number of steps; in float32 distances below about 3e-4 of the clients' spread
    are rounding, which only matters where v meets a client.

    Args:
      steps: Weiszfeld steps, T >= 1.
      eps: the smoothing, in the units of the distance, > 0.
      weighted: w_k are examples per client, otherwise 1.
      per: 'model' (as RFA) or 'tensor'.
      of: 'updates' or 'weights'; equal up to rounding.
    """
    checks.number("aggregator geometric_median: steps", steps, low=1, integer=True)
    checks.number("aggregator geometric_median: eps", eps, above=0.0, low=0.0)
    checks.one_of("aggregator geometric_median: weighted", weighted, (False, True))
    checks.one_of("aggregator geometric_median: per", per, ("tensor", "model"))

    def rule(x: Array, w: Array, present: Array) -> Array:
        w = jnp.where(present, w, 0).astype(x.dtype)
        start = w / jnp.where(jnp.sum(w) > 0, jnp.sum(w), 1)
        products = gram(x, centre=combine(start, x))
        squares = jnp.diagonal(products)

        def step(_: int, a: Array) -> Array:
            pull = combine(a, products)  # <x_k, v>, from the centre
            distance = jnp.sqrt(jnp.maximum(jnp.sum(a * pull) - 2 * pull + squares, eps * eps))
            b = w / distance
            return b / jnp.where(jnp.sum(b) > 0, jnp.sum(b), 1)

        return combine(jax.lax.fori_loop(0, steps, step, start), x)

    kept = frozenset({"permutation", "consensus", "translation", "orthogonal", "hull"})  # eps has units: no 'scale'
    return lift(rule, per=per, of=of, weighted=weighted, properties=kept)


def krum(*, f: int = 1, per: str = "model", of: str = "updates") -> Aggregator:
    """The one client that is closest to its K - f - 2 nearest others.

    Source: Blanchard et al. 2017. Its guarantee needs K >= 2 f + 3; a cohort too small for any neighbour (C < f + 3) is
    a UserError when the round is built, and a round with fewer present clients falls back to one neighbour.
    Equal scores (two clients that are each other's only neighbour) go to the smaller sum of squared distances to all
    present clients, then to the lower row.

    Args:
      f: clients taken to be bad, >= 0.
      per: 'model' (as published) or 'tensor'.
      of: 'updates' or 'weights'; equal up to rounding.
    """
    return _krum("krum", f, 1, per, of)


def multi_krum(*, f: int = 1, m: int | None = None, per: str = "model", of: str = "updates") -> Aggregator:
    """The uniform mean of the m clients with the best Krum scores.

    Source: Blanchard et al. 2017, section 4. See `krum` for f, ties and small cohorts.

    Args:
      m: clients kept, at least 1, at most those present; None keeps all present ones but f.
    """
    if m is not None:
        checks.number("aggregator multi_krum: m", m, low=1, integer=True)
    return _krum("multi_krum", f, m, per, of)


def _krum(name: str, f: int, m: int | None, per: str, of: str) -> Aggregator:
    checks.number(f"aggregator {name}: f", f, low=0, integer=True)
    checks.one_of(f"aggregator {name}: per", per, ("tensor", "model"))

    def rule(x: Array, w: Array, present: Array) -> Array:
        del w
        clients = x.shape[0]
        if clients < (fewest := max(f + 3, m or 0)):
            raise checks.UserError(
                f"aggregator {name}: a cohort of {clients} found, at least {fewest} clients expected for f={f}, m={m}; "
                "lower f or m, or enlarge the cohort"
            )
        k = jnp.sum(present)
        centre = combine(present / jnp.maximum(k, 1), x)
        order = krum_order(gram(x, centre), present, f)
        kept = jnp.maximum(jnp.minimum(k - f if m is None else m, k), 1)
        share = jnp.where(jnp.arange(clients) < kept, 1 / kept, 0)
        chosen = jnp.zeros(clients).at[order].set(share)
        return combine(jnp.where(present, chosen, 0), x)

    kept = frozenset({"permutation", "consensus", "translation", "scale", "orthogonal", "hull"})
    return lift(rule, per=per, of=of, properties=kept)


def krum_order(products: Array, present: Array, f: int) -> Array:
    """Rows from the best Krum score to the worst, absent ones last: inner products [C, C], bool [C] -> int [C]."""
    products = jax.lax.stop_gradient(products)
    squares = jnp.diagonal(products)
    others = present[:, None] & present[None, :] & ~jnp.eye(len(present), dtype=bool)
    distance = jnp.maximum(squares[:, None] + squares[None, :] - 2 * products, 0)
    k = jnp.sum(present)
    neighbours = jnp.minimum(jnp.maximum(k - f - 2, 1), k - 1)
    nearest = jnp.sort(jnp.where(others, distance, jnp.inf), axis=1)
    score = jnp.sum(jnp.where(jnp.arange(len(present)) < neighbours, nearest, 0), axis=1)
    everyone = jnp.sum(jnp.where(others, distance, 0), axis=1)
    return jnp.lexsort((everyone, jnp.where(present, score, jnp.inf)))


def _mean_of_ranks(ranks: Callable[[int], np.ndarray]) -> Rule:
    """The rule sum_i table[K, i] * (i-th smallest of the K present values); table = ranks(C), [C + 1, C]."""

    def rule(x: Array, w: Array, present: Array) -> Array:
        del w
        table = jnp.asarray(ranks(x.shape[0]), x.dtype)
        share = table[jnp.sum(present)]
        ordered = sort_rows(jnp.where(present[:, None], x, jnp.inf))
        # absent rows are the infinities at the end; they have share 0, and 0 * inf must not happen
        terms = (jnp.where(share[i] > 0, row, 0) * share[i] for i, row in enumerate(ordered))
        return sum(terms, jnp.zeros((), x.dtype))

    return rule


def sort_rows(x: Array) -> list[Array]:
    """The rows of [C, D] sorted in every column, smallest first.

    By Batcher's odd-even merge network: minima and maxima of whole rows, which vectorise and fuse. jnp.sort along the
    first axis gives the same, but sorts column by column: on a CPU 50 to 250 times slower for 4 to 33 rows.
    """
    if x.shape[0] > _LARGEST_NETWORK:
        return list(jnp.sort(x, axis=0))
    rows = list(x)
    for low, high in comparators(len(rows)):
        rows[low], rows[high] = jnp.minimum(rows[low], rows[high]), jnp.maximum(rows[low], rows[high])
    return rows


def comparators(n: int) -> list[tuple[int, int]]:
    """Pairs (low, high) that sort n rows in place. Source: Batcher 1968, odd-even merging.

    Built for the next power of two: rows beyond n would be infinities, which never move, so their pairs are dropped.
    """

    def merge(rows: range) -> list[tuple[int, int]]:
        if len(rows) == 2:
            return [(rows[0], rows[1])]
        return merge(rows[::2]) + merge(rows[1::2]) + list(zip(rows[1:-1:2], rows[2::2]))

    def ordered(rows: range) -> list[tuple[int, int]]:
        middle = len(rows) // 2
        return ordered(rows[:middle]) + ordered(rows[middle:]) + merge(rows) if middle else []

    full = 1 << max(n - 1, 0).bit_length()
    return [(low, high) for low, high in ordered(range(full)) if high < n]
