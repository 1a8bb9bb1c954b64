"""Whether a run's folder holds all the rounds that are asked for."""

import sys
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.report import checkpoint
from fedjax_seg.report.writer import RunFolder


def finished(
    folder: RunFolder, rounds: int, max_sim_hours: float = 0.0, privacy_budget: float = 0.0
) -> dict[str, Any] | None:
    """The summary of a run that has done `rounds` rounds or more (said on stderr); None where there is something to do.

    A run that its budget of simulated time, or of privacy, has ended is finished until that is raised (0 = no budget).

    A finished run stays finished without its checkpoint; an unfinished one that is past `rounds` has no summary: {}.

    Raises: UserError where the run finished earlier than `rounds` and its checkpoint is gone: starting over would
      destroy results.
    """
    reached = checkpoint.latest(folder.path / "checkpoints")
    summary = folder.read_json("summary.json") if (folder.path / "DONE").exists() else None
    stopped = summary.get("stopped") if summary else ""
    if summary is not None and stopped:
        before = (float(summary["config"].get(key) or 0) for key in ("max_sim_hours", "privacy.budget"))
        raised = (old > 0 and not 0 < new <= old for old, new in zip(before, (max_sim_hours, privacy_budget)))
        if not any(raised):
            if not folder.quiet:
                print(f"stopped at round {summary['round']}: {stopped}; nothing to do", file=sys.stderr)
            return summary
    if reached is None and summary is not None:
        reached = summary["round"]
        if reached < rounds:
            raise checks.UserError(
                f"{folder.path}: finished at round {reached}, its checkpoint is gone and it cannot go on to {rounds};"
                " put checkpoints/ back, or use another --workdir"
            )
    if reached is None or reached < rounds or (reached == rounds and summary is None):
        return None
    if not folder.quiet:
        print(f"already at round {reached} of {rounds}: nothing to do", file=sys.stderr)
    return summary or {}
