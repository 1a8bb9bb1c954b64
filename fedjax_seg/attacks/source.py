"""Which hospital: whose case is this (source inference), and did a hospital take part at all (client membership)?

Source: Hu et al., "Source inference attacks in federated learning" (2021): an honest-but-curious server holds every
client's model, and the client whose model has the least loss on a case is named as its source.
Client membership is LiRA with hospitals in place of cases: shadow federations are trained with hospitals left out.
"""

from typing import Any

import numpy as np

from fedjax_seg.attacks import lira, membership_scores
from fedjax_seg.core import checks


def attribution(losses: np.ndarray, owner: np.ndarray, present: np.ndarray | None = None) -> dict[str, Any]:
    """Attributes every case to the client whose model has the least loss on it.

    Args:
      losses: [n, K], of case i under the model of client k, or any increasing function of it, the same for all models.
      owner: int [n], the true client of every case.
      present: bool [K] or [n, K], which models the server has; None: all. Losses that are not finite count as absent.

    A tie of t models counts 1 / t for each of them, so that equal models are right as often as a blind guess.

    Returns:
      accuracy: share that is right; low, high: its exact (Clopper-Pearson) interval over cases; cases of one patient
        are no independent trials, and then it is too narrow.
      chance: of always naming the client of most cases; chance_uniform: 1 / (number of models, on average).
      n: number of cases; left_out: further ones, whose owner's model is absent.
      confusion: [K][K], cases of client (row) by client named (column).
      words: one sentence.
      None in place of numbers where no case is left.
    Raises: UserError for shapes that do not fit or owners outside 0..K-1.
    """
    losses, owner = np.asarray(losses, np.float64), np.asarray(owner, np.int64)
    if losses.ndim != 2 or owner.shape != losses.shape[:1]:
        raise checks.UserError(
            f"source attack: losses {losses.shape} and owner {owner.shape} given, [n, K] and [n] expected"
        )
    count = losses.shape[1]
    if len(owner) and (owner.min() < 0 or owner.max() >= count):
        raise checks.UserError(f"source attack: owners {owner.min()} to {owner.max()} given, 0 to {count - 1} expected")
    there = np.isfinite(losses) & np.broadcast_to(True if present is None else np.asarray(present, bool), losses.shape)
    kept = there[np.arange(len(owner)), owner]
    losses, owner, there = losses[kept], owner[kept], there[kept]
    confusion = np.zeros((count, count))
    found: dict[str, Any] = {"n": len(owner), "left_out": int(np.sum(~kept)), "confusion": confusion.tolist()}
    empty = dict.fromkeys(("accuracy", "low", "high", "chance", "chance_uniform"))
    if not len(owner):
        return {**empty, **found, "words": "no reading: no case has its own client's model"}
    losses = np.where(there, losses, np.inf)
    least = losses == losses.min(1, keepdims=True)
    named = least / least.sum(1, keepdims=True)
    np.add.at(confusion, owner, named)
    hits = float(np.trace(confusion))
    interval = membership_scores.clopper_pearson(hits, len(owner))  # type: ignore[arg-type]  # a beta quantile takes ties
    chance = float(np.bincount(owner).max() / len(owner))
    found |= {"accuracy": interval.value, "low": interval.low, "high": interval.high, "chance": chance}
    found |= {"chance_uniform": float(np.mean(1 / there.sum(1))), "confusion": confusion.tolist()}
    better = interval.low > max(chance, found["chance_uniform"])
    verdict = "hospitals are told apart" if better else "no better than a guess"
    span = f"[{interval.low:.3f}, {interval.high:.3f}]"
    return {**found, "words": f"{verdict}: {interval.value:.3f} {span} of the cases are traced, {chance:.3f} by chance"}


def client_scores(confidences: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """Mean confidence of a model in every hospital's cases: one number per hospital to run LiRA on.

    Held-out cases of the hospital give away its taking part without any of its training cases.

    Args:
      confidences: [..., n], as lira.confidence gives them; owner: int [n], the hospital of every case.
      clients: K.

    Returns: float64 [..., K]; NaN for a hospital without cases.
    """
    confidences, owner = np.asarray(confidences, np.float64), np.asarray(owner, np.int64)
    if confidences.shape[-1:] != owner.shape:
        raise checks.UserError(f"client attack: confidences {confidences.shape} and owner {owner.shape} do not fit")
    chosen = (owner[:, None] == np.arange(clients)).astype(np.float64)
    sizes = chosen.sum(0)
    return confidences @ chosen / np.where(sizes > 0, sizes, np.nan)


def client_lira(target: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Whether each hospital took part: lira.online, or lira.offline where no hospital is both in and out of shadows.

    Args:
      target: [K], `client_scores` of the attacked model; shadows: [M, K], of shadow federations.
      inside: bool [M, K], whether a hospital took part in a shadow federation.

    Returns: float64 [K], higher claims that it took part. With few hospitals a single score says little: one would pool
      them over several attacked federations.
    """
    known, inside = np.isfinite(np.asarray(shadows, np.float64)), np.asarray(inside, bool)
    both = (inside & known).any(0) & (~inside & known).any(0)
    return (lira.online if both.any() else lira.offline)(target, shadows, inside)
