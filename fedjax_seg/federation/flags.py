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
            if not (nonfinite or empty or failed):
                continue
            where = f"round {int(records['round'][r, i]) + 1}, {replica.fold}, seed {replica.seed}"
            what, key, cure = "total weight 0 (nobody took part)", "on_empty", "sample more clients"
            if failed:
                came, met = (int(records["exchange"][name][r, i].sum()) for name in ("arrived", "joined"))
                what = f"the secure sum was aborted ({came} of {met} uploads came, too few to open it)"
                cure = "lower config.secure_sum.threshold or config.dropout.probability"
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
