"""What makes two configs one run: which keys a continuation may change, and the salt of a run's noise."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import ml_collections

from fedjax_seg.config import flat, plain

# Keys that may differ between a run and its continuation: none of them changes a number that is already written.
# (Where files lie is free: the checkpoint holds a hash of the data themselves.)
FREE_ON_RESUME = frozenset(
    (
        *("rounds", "lanes", "devices", "replicas", "checkpoint", "label", "group", "grid", "require_gpu"),
        *("on_nonfinite", "on_empty", "data.root", "data.phenotypic", "data.series", "data.fold_file"),
        *("published", "show_scans", "max_sim_hours", "predictions", "data.cache", "data.workers", "data.ahead"),
        *("data.partition", "network", "privacy.budget"),
    )
)


def salt(c: ml_collections.ConfigDict, digest: str) -> int:
    """31 bits of what decides a run's numbers, but for how long and how it runs: the salt of its noise."""
    kept = {key: value for key, value in flat(plain(c)).items() if not _free(key)}
    if fixed_length(c):
        kept["rounds"] = c.rounds
    text = json.dumps([kept, digest], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def fixed_length(c: ml_collections.ConfigDict) -> str:
    """The key whose noise is computed for all of the rounds, so that their number may not change; '' where none is."""
    if c.privacy.target_epsilon:
        return "config.privacy.target_epsilon"
    return "config.aggregator.name=banded_dp_fedavg" if c.aggregator.name == "banded_dp_fedavg" else ""


def _free(key: str) -> bool:
    """Whether a key, or its whole group, may differ between a run and its continuation."""
    return key in FREE_ON_RESUME or key.split(".")[0] in FREE_ON_RESUME


def first_difference(old: Mapping[str, Any], new: ml_collections.ConfigDict) -> str | None:
    """The first key in which a continuation differs from the run, in words; None where it may go on.

    Args:
      old: config.json of the run.
      new: the config of its continuation.
    """
    a, b = flat(old), flat(plain(new))
    for key in sorted(a.keys() | b.keys()):
        if not _free(key) and a.get(key) != b.get(key):
            return f"config.{key} was {a.get(key)!r} and is now {b.get(key)!r}"
    why = fixed_length(new)
    if why and a["rounds"] != b["rounds"]:
        return f"config.rounds was {a['rounds']} and is now {b['rounds']}, and the noise for {why} was computed for all"
    return None
