"""Who is attacked, and on which cases the attacker trains models of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_seg.core import checks

Clients = tuple[np.ndarray, ...]  # cases of every client


class Candidates(NamedTuple):
    """Cases whose membership is guessed; as many non-members as members of every site."""

    members: np.ndarray  # int [n]
    non_members: np.ndarray  # int [n]


class ShadowPlan(NamedTuple):
    """The attacker's federation: K index arrays each. No patient is in both."""

    train: Clients
    out: Clients


def choose_cases(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], site_of: Sequence[int], count: int, seed: int = 0
) -> Candidates:
    """Members from the training cases, non-members from the test cases, matched by site.

    Matched, because an attack that tells two hospitals apart would otherwise pass for one that tells members apart.
    Members and non-members have no patient in common where training and test have none (data.federated.validate).

    Args:
      train, test: index arrays, in any grouping (by client, or one for all in a centralised run).
      site_of: int [N], site of every case.
      count: members and non-members together, at most.

    Returns: Candidates, at most count // 2 of each kind; fewer where sites lack cases, in proportion to what they have.
    Raises: UserError where no site has both kinds.
    """
    rng = np.random.default_rng(seed)
    pools = [np.sort(np.concatenate([np.zeros(0, np.int64), *side])).astype(np.int64) for side in (train, test)]
    sites = np.asarray(site_of)
    inside, outside = [[p[sites[p] == k] for k in range(int(sites.max()) + 1)] for p in pools]
    room = np.array([min(len(a), len(b)) for a, b in zip(inside, outside)])
    if room.sum() == 0:
        raise checks.UserError(
            "attack: no site has both training and test cases, which members and non-members are taken from; "
            "give the sites test cases of their own, or set the attack to 'none'"
        )
    takes = _shares(room, min(count // 2, int(room.sum())))
    members, non_members = (
        np.concatenate([np.sort(rng.choice(pool, n, replace=False)) for pool, n in zip(side, takes)])
        for side in (inside, outside)
    )
    return Candidates(members, non_members)


def _shares(room: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to total, in proportion to room and at most room: largest remainders, first come at ties."""
    exact = room * (total / room.sum())
    result = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(-(exact - result), kind="stable")
    for k in order[: total - result.sum()]:
        result[k] += 1
    return result


def shadow_plan(
    aside: np.ndarray, site_of: Sequence[int], patient_ids: Sequence[str], sites: int, share: float = 0.5, seed: int = 0
) -> ShadowPlan:
    """Divides the attacker's cases into those that shadow models train on and those they never see, by patient.

    Args:
      aside: int [A], the attacker's cases; none of the patients of the attacked federation (validate holds this).
      site_of: int [N], the shadow client that every case belongs to.
      patient_ids: N strings.
      sites: K, the number of clients.
      share: of the cases of every client, to be trained on; met as closely as whole patients allow.

    Returns: ShadowPlan; a client with one patient trains on it and has nothing out, a client without cases has neither.
    Raises: UserError where nothing is left to train on or nothing is out.
    """
    cases, where, patients = np.sort(np.asarray(aside)), np.asarray(site_of), np.asarray(patient_ids)
    rng = np.random.default_rng(seed)
    inside: set[str] = set()
    home = {patient: int(where[case]) for patient, case in zip(patients[cases][::-1], cases[::-1])}  # its first case's
    sizes = dict(zip(*np.unique(patients[cases], return_counts=True)))
    for k in range(sites):
        names = sorted(p for p, site in home.items() if site == k)
        goal, taken = share * sum(sizes[p] for p in names), 0
        for name in rng.permutation(names)[: max(len(names) - 1, 1)]:
            if taken and taken + sizes[name] / 2 > goal:
                break
            inside.add(str(name))
            taken += int(sizes[name])
    trained = np.isin(patients[cases], sorted(inside))
    plan = ShadowPlan(*(tuple(cases[side & (where[cases] == k)] for k in range(sites)) for side in (trained, ~trained)))
    if not any(map(len, plan.train)) or not any(map(len, plan.out)):
        raise checks.UserError(
            f"attack: {len(sizes)} patient(s) set aside for shadow models, at least 2 at one site expected; set more "
            "cases aside, or the attack's shadow option to False"
        )
    return plan


def shadow_halves(pool: Sequence[np.ndarray], patient_ids: Sequence[str], models: int, seed: int = 0) -> list[Clients]:
    """What each of many shadow federations trains on: half of every client's pool, by patient, drawn at random.

    Models come in pairs that share the pool between them, so that every patient is in exactly half of the models; the
    patients of a client, in random order, join whichever side of the pair has fewer cases of it so far.

    Source: Carlini et al., "Membership inference attacks from first principles" (2022), section V.A: N models, each
    example in N/2 of them. Deviation: halves of every client, and by patient.

    Args:
      pool: K arrays of cases, one per client. A patient with cases at several clients is on one side with all of them.
      patient_ids: N strings.
      models: M, even.

    Returns: M times K sorted arrays.
    """
    patients, rng = np.asarray(patient_ids), np.random.default_rng(seed)
    home: dict[str, int] = {}
    for k, cases in reversed(list(enumerate(pool))):
        home.update(dict.fromkeys(patients[cases].tolist(), k))
    mine = [np.array(sorted(name for name, at in home.items() if at == k)) for k in range(len(pool))]
    sizes = [dict(zip(*np.unique(patients[cases], return_counts=True))) for cases in pool]
    halves: list[Clients] = []
    for _ in range(models // 2):
        first: list[str] = []
        for k, names in enumerate(mine):
            taken = [0, 0]
            for name in rng.permutation(names):
                side = int(rng.integers(2)) if taken[0] == taken[1] else int(taken[1] < taken[0])
                taken[side] += int(sizes[k][name])
                first += [str(name)] * (side == 0)
        inside = [np.isin(patients[cases], first) for cases in pool]
        halves.append(tuple(np.sort(cases[side]) for cases, side in zip(pool, inside)))
        halves.append(tuple(np.sort(cases[~side]) for cases, side in zip(pool, inside)))
    return halves


def shadow_pool(train: Sequence[np.ndarray], non_members: np.ndarray, site_of: Sequence[int] | np.ndarray) -> Clients:
    """The cases that shadow federations draw from: each client's training cases, and the non-members of its site(s).

    A site that several clients train on gives its non-members to the first of them.
    """
    sites, taken, found = np.asarray(site_of), np.zeros(len(non_members), bool), []
    for cases in train:
        fits = np.isin(sites[non_members], np.unique(sites[cases])) & ~taken
        taken |= fits
        found.append(np.concatenate([cases, non_members[fits]]))
    return tuple(found)


def population(
    aside: np.ndarray,
    test: Sequence[np.ndarray],
    chosen: Candidates,
    site_of: Sequence[int] | np.ndarray,
    patient_ids: Sequence[str],
    *,
    count: int = 500,
    fewest: int = 20,
    seed: int = 0,
) -> np.ndarray:
    """Cases that no model trains on and nobody asks about, for attacks that compare with a population.

    The attacker's own cases where there are any; else test cases of the candidates' sites whose patients are no
    candidates. None at all where fewer than `fewest` are left.

    Returns: sorted int array, at most `count`.
    """
    sites, patients = np.asarray(site_of), np.asarray(patient_ids)
    found = np.asarray(aside)
    if not len(found):
        asked = np.concatenate(chosen)
        spare = np.concatenate([np.zeros(0, np.int64), *test]).astype(np.int64)
        known = np.isin(patients[spare], patients[asked]) | ~np.isin(sites[spare], sites[asked])
        found = np.setdiff1d(spare[~known], asked)
    if len(found) < fewest:
        return found[:0].astype(np.int64)
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(found, min(count, len(found)), replace=False)).astype(np.int64)
