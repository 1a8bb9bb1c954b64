"""Which client gets which patient, and which patients train, test, or are an attacker's. Pure functions, numpy only.

A unit is what is never divided: a patient with all the cases of that patient.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_seg.core import checks

TRAIN, TEST, ASIDE, UNUSED = "train", "test", "aside", "unused"


def by_value(values: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """A client per value.

    Returns: the names, sorted (as numbers where all of them are whole numbers), and int32 [U].
    """
    whole = all(v.isdecimal() for v in values)
    names = tuple(sorted(set(values), key=(lambda v: (int(v), v)) if whole else None))
    position = {name: k for k, name in enumerate(names)}
    return names, np.array([position[v] for v in values], np.int32)


def iid(units: int, clients: int, *, seed: int, min_units: int = 1, unit: str = "patient") -> np.ndarray:
    """int32 [units]: a random permutation dealt out; sizes differ by at most one. Raises: UserError."""
    _enough(units, clients, min_units, "iid", unit)
    out = np.empty(units, np.int32)
    out[np.random.default_rng(seed).permutation(units)] = np.arange(units) % clients
    return out


def by_order(values: np.ndarray, clients: int, *, min_units: int = 1, unit: str = "patient") -> np.ndarray:
    """int32 [U]: units in ascending order of their values, cut into equal parts; client 0 has the smallest values.

    Ties are cut in the order given. Raises: UserError where a part would have fewer than min_units.
    """
    _enough(len(values), clients, min_units, "lesion_size", unit)
    out = np.empty(len(values), np.int32)
    order = np.argsort(values, kind="stable")
    for k, part in enumerate(np.array_split(order, clients)):
        out[part] = k
    return out


def thirds(values: np.ndarray) -> np.ndarray:
    """int32 [U]: 0, 1, 2 for values up to the first tertile, up to the second, and above."""
    return np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values).astype(np.int32)


def dirichlet(
    labels: np.ndarray,
    clients: int,
    *,
    alpha: float,
    seed: int,
    min_units: int = 1,
    tries: int = 100,
    unit: str = "patient",
    rule: str = "dirichlet",
) -> np.ndarray:
    """Label skew: the units of every label are shared out by proportions drawn from a symmetric Dirichlet(alpha).

    Source: Yurochkin et al. 2019 and Li et al. 2022 (NIID-Bench). A draw that leaves a client with fewer than min_units
    is repeated. Proportions are drawn as logarithms, so that no alpha is too small for the floating point range.

    Args:
      labels: int [U].
      clients: K.
      alpha: small = every label at few clients, large = the same mixture everywhere.
      min_units: of every client.
      tries: after so many draws the best one is told in an error.
      unit, rule: what the units and this partition are called there.

    Returns: int32 [U], client ids.
    Raises: UserError naming the smallest client.
    """
    checks.number("data.alpha", alpha, above=0)
    _enough(len(labels), clients, min_units, rule, unit)
    random = np.random.default_rng(seed)
    best: np.ndarray = np.zeros(clients, int)
    for _ in range(tries):
        out = _one_draw(np.asarray(labels), clients, alpha, random)
        sizes = np.bincount(out, minlength=clients)
        if sizes.min() >= min_units:
            return out
        if sizes.min() > best.min() or not best.any():
            best = sizes
    k = int(best.argmin())
    raise checks.UserError(
        f"data.partition: {rule} over {len(labels)} {unit}s, {clients} clients, alpha {alpha:g}: in {tries} draws"
        f" some client always has fewer than {min_units} {unit}(s); in the best draw the smallest, client {k}, has"
        f" {best[k]}; raise data.alpha or lower data.clients"
    )


def quantity(
    units: int, clients: int, *, alpha: float, seed: int, min_units: int = 1, unit: str = "patient"
) -> np.ndarray:
    """Quantity skew: sizes of the clients are drawn from a symmetric Dirichlet(alpha), whatever the labels.

    Source: Li et al. 2022 (NIID-Bench), quantity skew. Draws are repeated as in `dirichlet`.

    Returns: int32 [units], client ids. Raises: UserError naming the smallest client.
    """
    labels = np.zeros(units, int)
    return dirichlet(labels, clients, alpha=alpha, seed=seed, min_units=min_units, unit=unit, rule="quantity")


def _one_draw(labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    out = np.empty(len(labels), np.int32)
    for label in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == label))
        # G(a) = G(a + 1) U^(1/a) in distribution
        logs = np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
        share = np.exp(logs - logs.max())
        ends = np.rint(np.cumsum(share)[:-1] / share.sum() * len(own)).astype(int)
        for k, part in enumerate(np.split(own, ends)):
            out[part] = k
    return out


def _enough(units: int, clients: int, min_units: int, what: str, unit: str) -> None:
    checks.number("data.clients", clients, low=1, integer=True)
    if units < clients * max(min_units, 1):
        raise checks.UserError(
            f"data.partition: {what}: {units} {unit}s for {clients} clients of at least {max(min_units, 1)}; the"
            f" smallest client would have {units // clients}; lower data.clients"
        )


def needed(test_share: float, aside_share: float) -> int:
    """Patients a client needs so that none of its parts is empty."""
    return 1 + (test_share > 0) + (aside_share > 0)


def roles(
    patients: Sequence[str],
    given: Mapping[str, str],
    *,
    test_share: float,
    aside_share: float,
    seed: int,
    site: str,
) -> dict[str, str]:
    """Deals the patients of one client into training, test and set aside.

    The result depends on the seed, the site's name and its patients only, not on their order nor on other sites. The
    test patients do not depend on aside_share.

    Args:
      patients: of one client, each once.
      given: roles that are fixed, {patient: role}; only the others are drawn.
      test_share, aside_share: shares of the drawn patients, rounded; at least one patient where the share is above 0
        and nothing is given, and at least one is left to train.

    Returns: {patient: TRAIN | TEST | ASIDE | as given}.
    """
    free = sorted(p for p in patients if p not in given)
    order = np.random.default_rng([seed, *site.encode()]).permutation(len(free))
    least = 0 if len(free) < len(patients) else 1
    test = _count(len(free), test_share, least)
    aside = _count(len(free), aside_share, least)
    most = len(free) - least
    test = min(test, max(most - least * (aside_share > 0), 0))
    aside = min(aside, max(most - test, 0))
    out = {p: given[p] for p in patients if p in given}
    for place, i in enumerate(order):
        out[free[i]] = TEST if place < test else ASIDE if place >= len(free) - aside else TRAIN
    return out


def _count(units: int, share: float, least: int) -> int:
    return max(math.floor(share * units + 0.5), least) if share > 0 else 0
