"""Which client has which case of an image folder, and what every case is for; patients are never divided."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import partition as parting
from fedjax_seg.data.image_table import Row


class Division(NamedTuple):
    """The rule of the clients and of the split.

    Attributes:
      maker: name of the data set, for messages.
      column: whose cells name the clients; '' = they are drawn.
      rule: how they are drawn, see partition.py: 'dirichlet', 'quantity', 'lesion_size' or 'iid'.
      clients, alpha: number of drawn clients, and the Dirichlet parameter.
      sites, external: names of the clients in client order (() = all, sorted), and of those that only test.
      min_site_size: clients with fewer units are dropped.
      test_share, aside_share: of the units of each client.
      unit: what is never divided, as messages call it.
      per_site: the option that tells that ids of units start again at every site.
    """

    maker: str
    column: str
    rule: str
    clients: int
    alpha: float
    sites: tuple[str, ...]
    external: tuple[str, ...]
    min_site_size: int
    test_share: float
    aside_share: float
    seed: int
    unit: str = "patient"
    per_site: str = "data.patients_per_site"


class Clients(NamedTuple):
    """names: K; of: int32 [N], the client of every case; external: the last names, which only test."""

    names: tuple[str, ...]
    of: np.ndarray
    external: tuple[str, ...]
    dropped: Mapping[str, int]  # {client: patients} too small to take part


def chosen(rows: Sequence[Row], division: Division) -> tuple[Row, ...]:
    """The rows of the wanted sites, before any image is read. Raises: UserError on a site that is in no row."""
    if not division.column or not division.sites:
        return tuple(rows)
    known = {r.cells[division.column] for r in rows}
    wanted = (*division.sites, *division.external)
    for name in wanted:
        checks.lookup(dict.fromkeys(known), name, "data.sites")
    return tuple(r for r in rows if r.cells[division.column] in wanted)


def divided(rows: Sequence[Row], division: Division) -> list[str]:
    """Faults of the clients that a column names: units of two of them, and clients of too few units for their parts.

    One person in two hospitals, or two persons of one number? Empty cells are faults of their own.
    """
    at: dict[str, dict[str, None]] = {}
    for r in rows if division.column else ():
        if r.patient and r.cells[division.column]:
            at.setdefault(r.patient, {})[r.cells[division.column]] = None
    cure = f"one client per {division.unit} expected; set {division.per_site} if ids start again at every site"
    faults = [f"{division.unit} {p}: at {' and '.join(own)}; {cure}" for p, own in at.items() if len(own) > 1]
    return faults + _too_small(rows, division)


def _too_small(rows: Sequence[Row], division: Division) -> list[str]:
    need = parting.needed(division.test_share, division.aside_share)
    own: dict[str, list[Row]] = {}
    for r in rows if division.column else ():
        own.setdefault(r.cells[division.column], []).append(r)
    parts = "training" + ", test" * (division.test_share > 0) + ", aside" * (division.aside_share > 0)
    faults = []
    for name in parting.by_value([name for name in own if name and name not in division.external])[0]:
        units = {r.patient for r in own[name]}
        told = any(r.split for r in own[name]) or "" in units  # nothing is drawn, or the empty cell is the fault
        if not told and division.min_site_size <= len(units) < need:
            faults.append(
                f"client {name}: {len(units)} {division.unit}(s), {need} needed for {parts};"
                f" set data.min_site_size={need} to drop such clients"
            )
    return faults


def divide(
    rows: Sequence[Row], y: np.ndarray, lesion: np.ndarray | None, division: Division
) -> tuple[Clients, tuple[str, ...]]:
    """The client and the role of every case.

    Args:
      rows: N.
      y: int [N] labels; not read where there is `lesion`.
      lesion: [N], lesion pixels of cases with masks: clients then differ by them, not by labels.

    Returns: the clients in client order (`of` is -1 for cases of dropped ones), and N of 'train', 'test', 'aside',
      'unused'.
    Raises: UserError where a client would be too small. Those that a column names are checked by `divided` before.
    """
    assigned = _ordered(_assigned(rows, y, lesion, division), rows, division)
    return assigned, _roles(rows, assigned, division)


def _assigned(rows: Sequence[Row], y: np.ndarray, lesion: np.ndarray | None, division: Division) -> Clients:
    if division.column:
        names, of = parting.by_value([r.cells[division.column] for r in rows])
        return Clients(names, of, (), {})
    clients = division.clients
    checks.number("data.clients", clients, low=1, integer=True)
    patients, unit = np.unique([r.patient for r in rows], return_inverse=True)
    least = max(division.min_site_size, parting.needed(division.test_share, division.aside_share))
    drawn: dict[str, Any] = {"seed": division.seed, "min_units": least, "unit": division.unit}
    mean = np.zeros(len(patients)) if lesion is None else np.bincount(unit, lesion) / np.bincount(unit)
    if division.rule == "iid":
        of = parting.iid(len(patients), clients, **drawn)
    elif division.rule == "quantity":
        of = parting.quantity(len(patients), clients, alpha=division.alpha, **drawn)
    elif division.rule == "lesion_size":
        of = parting.by_order(mean, clients, min_units=least, unit=division.unit)
    else:
        labels = parting.thirds(mean)
        if lesion is None:
            counts = np.zeros((len(patients), int(y.max()) + 1), int)
            np.add.at(counts, (unit, y), 1)
            labels = counts.argmax(1)
        of = parting.dirichlet(labels, clients, alpha=division.alpha, **drawn)
    digits = len(str(clients - 1))
    return Clients(tuple(f"client_{k:0{digits}d}" for k in range(clients)), of[unit], (), {})


def _ordered(own: Clients, rows: Sequence[Row], division: Division) -> Clients:
    """Clients in the wanted order, external ones last, small ones without cases (their `of` is -1)."""
    sites, external, least = division.sites, division.external, division.min_site_size
    for what, some in (("data.sites", sites), ("data.external", external)):
        if len(set(some)) != len(some):
            raise checks.UserError(f"{what}: {tuple(some)} given, distinct names expected")
        for name in some:
            checks.lookup(dict.fromkeys(own.names), name, what)
    persons: dict[str, set[str]] = {name: set() for name in own.names}
    for r, k in zip(rows, own.of):
        persons[own.names[k]].add(r.patient)
    wanted = [n for n in (sites or own.names) if n not in external] + list(external)
    small = {n: len(persons[n]) for n in wanted if len(persons[n]) < least and n not in external}
    names = tuple(n for n in wanted if n not in small)
    if not set(names) - set(external):
        sizes = ", ".join(f"{n} {len(p)}" for n, p in persons.items())
        raise checks.UserError(f"data.min_site_size: no client of {least} {division.unit}s ({sizes}); lower it")
    place = {n: k for k, n in enumerate(names)}
    of = np.array([place.get(own.names[k], -1) for k in own.of], np.int32)
    return Clients(names, of, tuple(external), small)


def _roles(rows: Sequence[Row], assigned: Clients, division: Division) -> tuple[str, ...]:
    shares = {"test_share": division.test_share, "aside_share": division.aside_share}
    role: dict[str, str] = {}
    for k, name in enumerate(assigned.names):
        own = [r for r, client in zip(rows, assigned.of) if client == k]
        patients = sorted({r.patient for r in own})
        if name in assigned.external:
            role |= dict.fromkeys(patients, parting.TEST)
            continue
        given = {r.patient: r.split for r in own if r.split}
        role |= parting.roles(patients, given, **shares, seed=division.seed, site=name)
    return tuple(role.get(r.patient, parting.UNUSED) for r in rows)
