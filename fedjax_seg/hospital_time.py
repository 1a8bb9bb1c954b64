"""Simulated hospital time of a run: seconds of every round, the budget they may use up, and the projected score."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.assembly import Experiment
from fedjax_seg.core import checks
from fedjax_seg.federation import clock, evaluate
from fedjax_seg.report.rows import SERVER

SECONDS, SCORED, PROJECTED = "simulated_seconds", "round_score", "projected_score"


def clocks(experiment: Experiment) -> tuple[clock.Clock, ...]:
    """A clock for every replica (folds differ in their cases); () where the config asks for none."""
    config, data, plan = experiment.config, experiment.data, experiment.plan
    if config.clock.name == "none":
        if config.max_sim_hours:
            raise checks.UserError(
                f"config.max_sim_hours: {config.max_sim_hours:g} given without a clock; set --config.clock.name=fets"
            )
        return ()
    inside = len(data.sites) - len(data.external)
    made = []
    for train, test in zip(plan.train_sizes, plan.test_sizes):
        sizes = {"train_sizes": train[:inside].tolist(), "val_sizes": test[:inside].tolist()}
        one = clock.make(sites=data.sites[:inside], epochs=config.local_epochs, **sizes, **config.clock)
        assert one is not None
        made.append(one)
    return tuple(made)


def rows(
    made: Sequence[clock.Clock], records: Mapping[str, Any], done: np.ndarray, replicas: Sequence[Any]
) -> list[dict[str, Any]]:
    """A metrics row per round and replica; `records` as in report.rows.training."""
    found = []
    for r, (one, replica) in enumerate(zip(made, replicas)):
        for i in range(int(done[r])):
            number, cohort = int(records["round"][r, i]), records["cohort"]
            trained = cohort["clients"][r, i][cohort["present"][r, i]].tolist()
            place = {"round": number + 1, "fold": replica.fold, "seed": replica.seed, "site": SERVER, "split": "train"}
            found.append({**place, "metric": SECONDS, "value": one.seconds(number, trained), "n": len(trained)})
    return found


def spent(written: Iterable[Mapping[str, Any]], found: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """`found` = {(fold, seed): simulated seconds}, with those of the given metrics rows added."""
    for row in written:
        if row["metric"] == SECONDS:
            key = (row["fold"], row["seed"])
            found[key] = found.get(key, 0.0) + row["value"]
    return found


def over(config: Any, seconds: Mapping[tuple[str, int], float]) -> str:
    """Why the run ends here: the first replica whose time is used up; '' where it goes on."""
    if not config.max_sim_hours:
        return ""
    for (fold, seed), total in seconds.items():
        if clock.exceeded(total, config.max_sim_hours):
            return (
                f"simulated time {total / 3600:.2f} h is beyond max_sim_hours={config.max_sim_hours:g}"
                f" ({fold}, seed {seed})"
            )
    return ""


def summary(written: Sequence[Mapping[str, Any]], reached: int) -> list[dict[str, Any]]:
    """Per replica: fold, seed, 'minutes' of simulated time, and the 'projected_score' (None where a round's score is
    missing). The score of a round is the mean over all held-out cases, sites weighted by their numbers of them."""
    found = []
    for (fold, seed), total in spent(written, {}).items():
        mine = [row for row in written if (row["fold"], row["seed"]) == (fold, seed)]
        seconds = {row["round"]: row["value"] for row in mine if row["metric"] == SECONDS}
        values = {
            row["round"]: row["value"]
            for row in mine
            if (row["metric"], row["site"], row["split"]) == (SCORED, evaluate.POOLED, "test")
        }
        projected = None
        if all(r in values for r in range(reached)) and len(seconds) == reached > 0:
            scores = clock.fets_scores(values, reached)
            projected = clock.scores(zip((seconds[r + 1] for r in range(reached)), scores))[-1].projected
        found.append({"fold": fold, "seed": seed, "minutes": total / 60, PROJECTED: projected})
    return found
