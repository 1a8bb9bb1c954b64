"""Scores of candidates from many shadow models: LiRA (online, offline, over all rounds) and RMIA."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_seg.attacks import lira, rmia


class Losses(NamedTuple):
    """Evidence 'log_loss' of n candidates in T rounds, the attacked one last.

    Attributes:
      target: [T, n], under the attacked model.
      shadows: [T, M, n], under the shadow models of the same rounds.
      inside: bool [M, n], who was trained on by which shadow.
      member: bool [n], the truth.
      patients: n ids.
      population: of cases that no model trained on, in the last round: (target [z], shadows [M, z]); None where there
        are none.
    """

    target: np.ndarray
    shadows: np.ndarray
    inside: np.ndarray
    member: np.ndarray
    patients: Sequence[str]
    population: tuple[np.ndarray, np.ndarray] | None


def scores(losses: Losses, kind: str) -> dict[str, np.ndarray]:
    """{attack: [n]}, the higher, the more a member.

    Args:
      kind: of the task, see lira.confidence.

    Returns: 'lira_online', 'lira_offline', 'rmia' (left out where there is nothing to compare with) and, from two
      rounds on, 'trajectory'.
    """
    sure, surest = lira.confidence(losses.target, kind), lira.confidence(losses.shadows, kind)
    found = {
        "lira_online": lira.online(sure[-1], surest[-1], losses.inside),
        "lira_offline": lira.offline(sure[-1], surest[-1], losses.inside),
    }
    compared = _rmia(losses)
    if compared is not None:
        found["rmia"] = compared
    if len(sure) > 1:
        found["trajectory"] = lira.trajectory(sure, surest, losses.inside)
    return found


def _rmia(losses: Losses) -> np.ndarray | None:
    """Against the population; where there is none, against the non-members of other patients.

    Then two halves of the patients take turns: a half is compared with the non-members of the other one, under the
    shadow models that did not train on these. Deviation: the paper has cases of its own for this.
    """
    target, shadows = losses.target[-1], losses.shadows[-1]
    if losses.population is not None:
        return rmia.rmia(target, shadows, losses.inside, *losses.population)
    names, owner = np.unique(np.asarray(losses.patients), return_inverse=True)
    side = np.zeros(len(names), int)
    for members in (True, False):  # every second patient of each kind
        mine = np.unique(owner[losses.member == members])
        side[mine] = np.arange(len(mine)) % 2
    found = np.full(len(target), np.nan)
    for half in (0, 1):
        own, others = side[owner] == half, (side[owner] != half) & ~losses.member
        if not others.any():
            return None
        unseen = np.where(losses.inside[:, others], np.nan, shadows[:, others])
        if own.any():
            found[own] = rmia.rmia(target[own], shadows[:, own], losses.inside[:, own], target[others], unseen)
    return found
