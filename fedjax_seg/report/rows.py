"""Rows of the files a run writes, from the arrays of the device. Pure functions on the host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

SERVER = "server"  # the site name of what happens after the aggregation


def training(records: Mapping[str, Any], done: np.ndarray, replicas: Sequence[Any], sites: Sequence[str]) -> list[dict]:
    """Metrics rows of split 'train', one per round, replica, present client and metric, and the aggregator's scalars.

    Args:
      records: leaves [R, capacity, ...] of federation.round.one_round's record.
      done: int [R], valid records of each replica.
      replicas: R values with 'fold' and 'seed'.
      sites: client names.
    """
    out: list[dict[str, Any]] = []
    cohort, info = records["cohort"], records["clients"]
    per_client = [name for name in info if name not in ("finite", "ok", "weight", "lr")]
    for r, replica in enumerate(replicas):
        for i in range(int(done[r])):
            tag = {"round": int(records["round"][r, i]) + 1, "fold": replica.fold, "seed": replica.seed}
            present = np.flatnonzero(cohort["present"][r, i])
            for c in present:
                where = {"site": sites[cohort["clients"][r, i, c]], "split": "train"}
                n = int(info["weight"][r, i, c])
                out += [{**tag, **where, "metric": m, "value": float(info[m][r, i, c]), "n": n} for m in per_client]
            server = {m: float(v[r, i]) for m, v in records["aggregator"].items()}
            if "lr" in info and len(present):
                server["lr"] = float(info["lr"][r, i, present[0]])
            where = {"site": SERVER, "split": "train"}
            out += [{**tag, **where, "metric": m, "value": v, "n": len(present)} for m, v in server.items()]
    return out


def participation(rows: Iterable[Mapping[str, Any]], sites: Sequence[str]) -> dict[str, int]:
    """{site: rounds in which it trained, summed over replicas}, counted in all rows of metrics.jsonl."""
    counts = dict.fromkeys(sites, 0)
    for row in rows:
        if row["split"] == "train" and row["metric"] == "update_norm":
            counts[row["site"]] += 1
    return counts


def timing(records: Mapping[str, Any], done: np.ndarray, start: int, seconds: float) -> dict[str, Any]:
    """One line of timing.jsonl: the rounds of a device call, its seconds (compilation included), and the local steps.

    'executed_steps' counts what the hardware ran, idle lanes included; 'real_steps' what the clients needed.
    """
    valid = np.arange(records["round"].shape[1])[None] < np.asarray(done)[:, None]
    return {
        "event": "rounds",
        "from": start,
        "to": start + int(np.max(done)),
        "seconds": seconds,
        "real_steps": int(np.sum(records["clients"]["steps"] * valid[..., None])),
        "executed_steps": int(np.sum(records["executed"] * valid)),
    }


def cases(
    task: Any,
    outputs: Mapping[str, np.ndarray],
    sizes: np.ndarray,
    index: np.ndarray,
    data: Any,
    tag: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """per_case.csv rows of one replica: fold, seed, site, case, patient, and the task's own columns.

    Args:
      task: the Task.
      outputs: its outputs, {name: [K, T, ...]}.
      sizes: int [K], real cases.
      index: int [K, T], positions in data.case_ids.
      data: FederatedData.
      tag: fold and seed.
    """
    out = []
    for k, n in enumerate(sizes):
        mine = {name: x[k] for name, x in outputs.items()}
        columns = {name: np.asarray(v).tolist() for name, v in task.case_values(mine, np.arange(n)).items()}
        for t in range(int(n)):
            who = {"case": data.case_ids[index[k, t]], "patient": data.patient_ids[index[k, t]]}
            out.append({**tag, "site": data.sites[k], **who, **{name: v[t] for name, v in columns.items()}})
    return out
