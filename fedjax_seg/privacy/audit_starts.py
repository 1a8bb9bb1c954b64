"""Where a search for the largest change begins: inputs at which weightings of clients are known to break, and others.

Random starts alone are no audit: a weighting by closeness to the mean changes most where one client is exactly on the
mean, a set of measure zero that no random start is near (at 33 clients plain ascent finds 0.12, this one 0.32).
All lengths are in units of the ball's radius; the changed client is row `changed`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_SMALL = 1e-3


class Start(NamedTuple):
    """One pair of neighbouring inputs: `rows`, and `rows` with row `changed` replaced by `other`."""

    name: str
    rows: np.ndarray  # float64 [n, dim]
    other: np.ndarray  # float64 [dim]


def structured(clients: int, dim: int, changed: int) -> list[Start]:
    """All structured starts of one changed row, along the first axis and along the diagonal.

    Two antipodal clusters of every size, filled from the first and from the last row on; the changed client on the
    mean of such clusters; all alike; all but one at 0; one dominant; lengths over three decades; a client per axis.
    """
    axes = [("axis", np.eye(dim)[0])]
    if dim > 1:
        axes.append(("diagonal", np.full(dim, dim**-0.5)))
    return [
        Start(f"{name}, {along}", rows, other) for along, u in axes for name, rows, other in _along(u, clients, changed)
    ]


def random(clients: int, dim: int, count: int, seed: int) -> list[Start]:
    """Gaussian rows of lengths from a tenth to three, drawn anew for every start; some of one direction only."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        points = rng.normal(size=(clients + 1, dim)) / np.sqrt(dim)
        if i % 4 == 3:  # collinear: the worst case of many rules has one direction
            points = rng.normal(size=(clients + 1, 1)) * points[0] / np.linalg.norm(points[0])
        points = points * 10 ** rng.uniform(-1, 0.5)
        found.append(Start(f"random {i}", points[:-1], points[-1]))
    return found


def _along(u: np.ndarray, clients: int, changed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    others = [i for i in range(clients) if i != changed]
    signs = []
    for up in range(len(others) + 1):
        for order, filled in (("first", others[:up]), ("last", others[len(others) - up :])):
            if order == "first" or 0 < up < len(others):
                sign = np.full(clients, -1.0)
                sign[filled] = 1.0
                signs.append((f"{up} of {len(others)} others at +, the {order}", sign))
    for name, sign in signs:
        rows = sign[:, None] * u
        yield f"two clusters, {name}; the client from - to +", rows, u
        yield f"two clusters, {name}; the client from 0 to +", _with(rows, changed, 0 * u), u
        if others:
            middle = _with(rows, changed, rows[others].mean(axis=0))
            yield f"client on the mean, {name}; moved to +", middle, u
            yield f"client on the mean, {name}; moved to -", middle, -u
    alike = np.tile(u, (clients, 1))
    yield "all alike; the client to 0", alike, 0 * u
    yield "all alike, short; the client to the rim", _SMALL * alike, u
    yield "all at 0; the client to the rim", 0 * alike, u
    yield "one at the rim, all others at 0; flipped", _with(0 * alike, changed, u), -u
    yield "one at the rim, all others short; flipped", _with(_SMALL * alike, changed, u), -u
    lengths = np.geomspace(_SMALL, 1, clients)[:, None]
    yield "lengths over three decades; the client flipped", lengths * alike, -u
    yield "lengths over three decades, reversed; the client flipped", lengths[::-1] * alike, -u
    if len(u) >= clients > 1:
        axes = np.eye(len(u))[:clients]
        yield "a client per axis; the client flipped", axes, -axes[changed]


def _with(rows: np.ndarray, k: int, row: np.ndarray) -> np.ndarray:
    changed = np.array(rows)
    changed[k] = row
    return changed
