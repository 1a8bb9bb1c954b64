"""What shares and uploads of a secure sum give away: one small function per attack, each told what its attacker knows.

A share beta * w of a vector is that vector but for one number, and that number follows from any vector that w is close
to, such as the last global model, which is public. N sums of the same N vectors with other coefficients are as many
equations as unknowns. Shares that hide are uniform words: `uniformity` says how far that can be checked.

Vectors are float [D], sums are taken in float64. Nothing here is trained and nothing is told the truth, but for
`direction`, `relative_error` and `matched`, which only measure.
"""

import math
import warnings
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2, norm
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning

Vector = np.ndarray
SAME, AROUND = 1e-6, 1e-4  # relative widths: of ratios that differ by float32 rounding alone, of their surroundings
FEWEST = 8  # entries that have to agree on a ratio before they count as unchanged
LEVEL = 1e-4  # two-sided probability of a false alarm of everything called 'above chance'
CONSTANT = 1e-6  # of the largest singular value: below it there are fewer vectors than sums


class Scale(NamedTuple):
    """The number that a share was multiplied with, as an attacker estimates it; how: see `best_scale`."""

    value: float
    how: str


class Unmixed(NamedTuple):
    """Vectors recovered from N sums of them.

    Attributes:
      vectors: float64 [N, D], sign and size included; in no order: which is whose stays open.
      mixing: float64 [N, N]; the sums were mixing @ vectors.
    """

    vectors: np.ndarray
    mixing: np.ndarray


class Uniformity(NamedTuple):
    """How far shares look like uniform words that know nothing of the secret.

    Attributes:
      p: the smallest p-value of chi-square tests of a byte's 256 values, times the number of tests; 1 at most.
      correlation: with the secret, of the whole word.
      strongest: the largest |correlation| of one bit of the words with the secret, its sign or one of its bits.
      limit, strongest_limit: what chance alone stays below but for a probability of 1e-4.
      nothing: p > 1e-4 and both correlations below their limits.
    """

    p: float
    correlation: float
    strongest: float
    limit: float
    strongest_limit: float
    nothing: bool


def chance(entries: int, looks: int = 1) -> float:
    """What |cosine| of independent vectors of that many entries exceeds with probability 1e-4, over all the looks.

    The cosine with any fixed vector of independent entries of mean 0 is close to normal of deviation 1 / sqrt(D): for
    one look about 4 / sqrt(D). Leaks below it cannot be told from chance by D entries.
    """
    return float(min(1.0, norm.isf(LEVEL / 2 / looks) / math.sqrt(max(entries, 1))))


def direction(received: Vector, true: Vector) -> float:
    """Cosine between what was received and the truth, 0 where one of them is 0. A measurement, not an attack."""
    a, b = _double(received), _double(true)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(a @ b / size, -1.0, 1.0)) if size > 0 else 0.0


def relative_error(found: Vector, true: Vector) -> float:
    """||found - true|| / ||true||. A measurement, not an attack."""
    b = _double(true)
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(_double(found) - b) / size) if size > 0 else math.inf


def recover_scale(share: Vector, model: Vector, how: str = "projection") -> float:
    """beta of a share beta * w, by an attacker who knows the last global model, which w is close to.

    Args:
      share: [D], as received.
      model: [D], the weights that every client started from.
      how: 'projection': <share, model> / <model, model>; off by the part of the update along the model.
        'median': the beta of least sum |share - beta * model|, the median of the ratios weighted by |model|; not moved
        by large changes of few entries, and exact where most entries have not changed.
        'unchanged': the ratio that most entries share up to float32 rounding, of entries that training left alone
        (frozen layers, dead units, pixels that are always 0); exact; NaN where no ratio stands out.

    Returns: beta, 0 or NaN where there is no estimate.
    Source: follows from the shares of cluster-based SMC (Hosseini et al. 2022, Algorithm 1), which are scalar multiples
      of the weights; the paper does not discuss it.
    """
    s, w = _double(share), _double(model)
    if how == "projection":
        power = float(w @ w)
        return float(s @ w) / power if power > 0 else math.nan
    known = w != 0
    ratio, weight = s[known] / w[known], np.abs(w[known])
    if not len(ratio):
        return math.nan
    order = np.argsort(ratio)
    ratio, weight = ratio[order], weight[order]
    if how == "median":
        total = np.cumsum(weight)
        return float(ratio[np.searchsorted(total, total[-1] / 2)])
    return _shared_ratio(ratio)


def _shared_ratio(ratio: np.ndarray) -> float:
    """The value that stands out of sorted ratios as a spike; NaN where none does. 0 is what masked entries give."""
    ratio = ratio[ratio > 0]
    if len(ratio) < FEWEST:
        return math.nan
    place = np.arange(len(ratio))
    same = np.searchsorted(ratio, ratio * (1 + SAME), side="right") - place
    first = int(np.argmax(same))
    peak = int(same[first])
    value = float(np.median(ratio[first : first + peak]))
    low, high = np.searchsorted(ratio, [value * (1 - AROUND / 2), value * (1 + AROUND / 2)])
    # Smooth ratios have AROUND / SAME = 100 times as many neighbours as equals.
    return value if peak >= max(FEWEST, (high - low) / 10) else math.nan


def best_scale(share: Vector, model: Vector) -> Scale:
    """'unchanged' where there is such a ratio, else the projection: what an attacker would do without the truth."""
    value = recover_scale(share, model, "unchanged")
    return Scale(value, "unchanged") if math.isfinite(value) else Scale(recover_scale(share, model), "projection")


def rescaled(share: Vector, beta: float) -> np.ndarray | None:
    """The weights share / beta; None where beta is no positive number."""
    return _double(share) / beta if math.isfinite(beta) and beta > 0 else None


def colluding(shares: np.ndarray, model: Vector) -> tuple[np.ndarray | None, Scale]:
    """Weights of a client by all the others of its group together, who know the last global model.

    Args:
      shares: [N - 1, D], what each of them received; or [D], their sum. It is (1 - beta_kk) * w_k.
      model: [D].

    Returns: (weights [D] or None, the scale 1 - beta_kk as estimated).
    """
    total: np.ndarray = np.atleast_2d(shares).astype(np.float64).sum(0)
    scale = best_scale(total, model)
    return rescaled(total, scale.value), scale


def span_test(uploads: np.ndarray, candidate: Vector) -> float:
    """Was this vector one of those whose sums a group uploaded? By the server, who suspects a hospital's weights.

    Args:
      uploads: [N, D], of one group: N combinations of its N vectors span those vectors.
      candidate: [D], such as weights trained by the server itself on data that a hospital may hold.

    Returns: the part of the candidate outside the span, relative to its length: 0 up to rounding for a member (or any
      combination of members), clearly more for an outsider.
    """
    return outside(span(uploads), candidate)


def span(uploads: np.ndarray) -> np.ndarray:
    """Orthonormal columns, float64 [D, up to N], that span the rows of uploads [N, D]."""
    left, strength, _ = np.linalg.svd(np.asarray(uploads, np.float64).T, full_matrices=False)
    return left[:, strength > 1e-12 * max(float(strength.max(initial=0)), 1e-300)]


def outside(span: np.ndarray, candidate: Vector) -> float:
    """The part of a vector outside a span (orthonormal columns), relative to its length; 0 for a vector of zeros."""
    c = _double(candidate)
    size = float(np.linalg.norm(c))
    rest = c - span @ (span.T @ c)
    return float(np.linalg.norm(rest - span @ (span.T @ rest)) / size) if size > 0 else 0.0


def unmix(
    uploads: np.ndarray, model: Vector | None = None, *, seed: int = 0, entries: int = 200_000, weighted: bool = False
) -> Unmixed | None:
    """The updates behind the uploads of a group, by the server, who knows the last global model.

    Where weights were shared, the model's part of every upload is removed by projection; what is left are mixtures of
    updates. FastICA (Hyvarinen 1999) tells them apart by their not being normal, up to sign and size; since the shares
    of a client add up to its vector, columns of the mixing matrix must sum to 1, which gives both.

    Args:
      uploads: [N, D], of one group: row j is sum_k beta_kj v_k, sum_j beta_kj = 1.
      model: [D] where the v_k are weights, None where they are updates.
      seed: of FastICA's first guess and of the entries it learns from.
      entries: at most so many entries are learned from, 4 * entries / N in large groups; all are unmixed.
      weighted: whether the v_k were multiplied with numbers p_k the server does not know (such as a share of the
        examples). The projections give sum_k beta_kj p_k, which are as many equations; without a model, the vectors
        keep their p_k.

    Returns: Unmixed, or None where there are no N different vectors (N < 2, or nothing was sent).
    """
    rows = np.asarray(uploads, np.float64)
    n, size = rows.shape
    totals = None
    if model is not None:
        w = _double(model)
        totals = rows @ w / max(float(w @ w), 1e-300)
        rows = rows - totals[:, None] * w
    rng = np.random.default_rng(seed)
    few = min(entries, max(10_000, 4 * entries // n))
    learned = rows[:, np.sort(rng.choice(size, few, replace=False))] if few < size else rows
    strength = np.linalg.svd(learned, compute_uv=False)
    if n < 2 or learned.shape[1] <= n or strength[-1] <= CONSTANT * strength[0]:
        return None
    ica = FastICA(n, whiten="unit-variance", fun="logcosh", max_iter=200, tol=1e-5, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        ica.fit(learned.T)
    size_of = ica.mixing_.sum(0)
    size_of = np.where(np.abs(size_of) > 1e-12, size_of, 1e-12)
    mixing, vectors = ica.mixing_ / size_of, (ica.components_ * size_of[:, None]) @ rows
    if weighted and totals is not None:
        factor = np.linalg.lstsq(mixing, totals, rcond=None)[0]
        factor = np.where(np.abs(factor) > 1e-6, factor, 1.0)
        mixing, vectors = mixing * factor, vectors / factor[:, None]
    return Unmixed(vectors, mixing)


def matched(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The order of `found` [N, D] that fits `true` [N, D] best (Hungarian method on |cosine|). A measurement."""
    a, b = (_unit(rows) for rows in (found, true))
    rows, columns = linear_sum_assignment(-np.abs(b @ a.T))
    return columns[np.argsort(rows)]


def uniformity(shares: np.ndarray, secret: np.ndarray) -> Uniformity:
    """Do the shares tell anything of the secret? Passing proves nothing; failing proves a leak.

    Args:
      shares: uint32 [D], all 4 bytes are tested; or float [D], words read as signed fixed point, whose range is taken
        to be the next power of 2 above the largest: their float32 form keeps the top byte only.
      secret: float [D], or the uint32 words that were shared: then every bit of a share is held against every bit of
        the secret, and the difference of the words must be uniform too.
    """
    words, exact = _words(shares)
    known, encoded = _words(secret) if np.asarray(secret).dtype == np.uint32 else (None, False)
    tested = [words >> np.uint32(8 * i) & np.uint32(255) for i in ((3, 2, 1, 0) if exact else (3,))]
    bits = _signs(words, 32 if exact else 8)
    value = _double(known.view(np.int32) if known is not None else secret)
    against = np.stack([value, np.sign(value)], 1)
    if known is not None and exact and encoded:
        tested += [(words - known) >> np.uint32(8 * i) & np.uint32(255) for i in range(4)]
        against = np.concatenate([against, _signs(known, 32)], 1)
    p = min(1.0, len(tested) * min(_chi_square(byte) for byte in tested))
    tied = np.abs(_unit(_centred(bits).T) @ _unit(_centred(against).T).T)
    correlation = direction(_centred(_double(words.view(np.int32))), _centred(value))
    strongest, n = float(tied.max()), len(words)
    limit, strongest_limit = chance(n), chance(n, tied.size)
    nothing = p > LEVEL and abs(correlation) < limit and strongest < strongest_limit
    return Uniformity(p, correlation, strongest, limit, strongest_limit, bool(nothing))


def _words(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """(uint32 words, whether all their bits are known)."""
    array = np.asarray(values)
    if array.dtype == np.uint32:
        return array, True
    largest = float(np.abs(array).max(initial=0))
    span = 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
    scaled = np.clip(np.floor(array.astype(np.float64) / span * 2.0**31), -(2.0**31), 2.0**31 - 1)
    return scaled.astype(np.int64).astype(np.uint32), False


def _chi_square(byte: np.ndarray) -> float:
    """p-value of the 256 values being equally likely; of their leading bits only where there are few bytes."""
    bits = int(np.clip(math.floor(math.log2(max(len(byte), 1) / FEWEST)), 1, 8))
    counts, expected = np.bincount(byte >> np.uint32(8 - bits), minlength=2**bits), len(byte) / 2**bits
    return float(chi2.sf(np.sum((counts - expected) ** 2) / expected, 2**bits - 1))


def _signs(words: np.ndarray, bits: int) -> np.ndarray:
    """float64 [D, bits] of -1 and 1, the highest bit first."""
    places = np.arange(31, 31 - bits, -1, dtype=np.uint32)
    return 2.0 * (words[:, None] >> places & np.uint32(1)) - 1.0


def _centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(0)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows [N, D] of length 1; a row of zeros stays."""
    rows = np.asarray(rows, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)


def _double(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).ravel()
