"""The flags a round sets on the device, in words on the host: which site, which round, what to do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.core import checks


def check(records: Mapping[str, Any], done: np.ndarray, replicas: Sequence[Any], sites: Sequence[str]) -> Iterator[str]:
    """Yields a line for every round that skipped a client, was empty, or whose secure sum could not be opened.

    Args:
      records: leaves [R, capacity, ...] of federation.round.one_round's record, on the host.
      done: int [R], valid records of each replica.
      replicas: R values with 'fold' and 'seed'.
      sites: client names.

    Raises: UserError for a round that halted.
    """
    for r, replica in enumerate(replicas):
        for i in range(int(done[r])):
            nonfinite, empty, failed, halt = (
                bool(records[name][r, i]) for name in ("nonfinite", "empty", "failed", "halt")
            )
            where = f"round {int(records['round'][r, i]) + 1}, {replica.fold}, seed {replica.seed}"
            yield from _notes(records, r, i, where, sites)
            if not (nonfinite or empty or failed):
                continue
            what, key, cure = "total weight 0 (nobody took part)", "on_empty", "sample more clients"
            if failed:
                came, met = (int(records["exchange"][name][r, i].sum()) for name in ("arrived", "joined"))
                what = f"the secure sum was aborted ({came} of {met} uploads came, too few to open it)"
                cure = "lower config.dropout.probability, or take larger clusters or a lower threshold"
            if nonfinite:
                cohort = records["cohort"]
                bad = cohort["present"][r, i] & ~records["clients"]["finite"][r, i]
                names = ", ".join(sites[c] for c in cohort["clients"][r, i][bad])
                bare = f"non-finite values from {names}" if names else "the aggregate is not finite"
                what = f"{bare}; {what}" if failed else bare
                key, cure = "on_nonfinite", "lower config.client.lr"
            if halt and nonfinite and not names:
                raise checks.UserError(f"{where}: {what}; {cure}, or choose another aggregator")
            if halt:
                raise checks.UserError(f"{where}: {what}; {cure}, or set --config.{key}=skip")
            yield f"{where}: {what}; skipped"


def _notes(records: Mapping[str, Any], r: int, i: int, where: str, sites: Sequence[str]) -> Iterator[str]:
    """What a secure sum left out or cut in one round; the round counts all the same."""
    clients = records["cohort"]["clients"][r, i]
    left_out = records.get("exchange", {}).get("left_out")
    if left_out is not None and left_out[r, i].any():
        names = ", ".join(sites[c] for c in clients[left_out[r, i]])
        yield f"{where}: {names} left out: nobody else of its cluster was there, and its sum would be its message"
    cut = records["clients"].get("saturated")
    if cut is not None:
        cut = np.where(records["clients"]["ok"][r, i], cut[r, i], 0)
        if cut.any():
            names = ", ".join(f"{sites[c]} {n}" for c, n in zip(clients, cut) if n)
            yield f"{where}: entries beyond config.secure_sum.clip were cut ({names}); raise it"
