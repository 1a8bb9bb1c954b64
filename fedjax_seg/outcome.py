"""What a finished run leaves: the cases, the attack's verdict, the summary, figures and the report."""

import time
from typing import Any

import numpy as np

from fedjax_seg import (
    attack_verdict,
    attacking,
    guarantee,
    hospital_time,
    inverting,
    privacy_card,
    secrecy,
    training,
    volume_outputs,
)
from fedjax_seg import config as configuration
from fedjax_seg.assembly import Experiment
from fedjax_seg.core import tree
from fedjax_seg.report import communication_table, inversion_report, pictures, rows, run_report, runs, secrecy_report
from fedjax_seg.training import Going, Trained


def _cases(experiment: Experiment, outputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of per_case.csv of all replicas."""
    found: list[dict[str, Any]] = []
    for r, replica in enumerate(experiment.replicas):
        mine, plan, tag = (
            tree.rows(outputs, r),
            tree.rows(experiment.plan, r),
            {"fold": replica.fold, "seed": replica.seed},
        )
        found += rows.cases(experiment.task, mine, plan.test_sizes, plan.test, experiment.data, tag)
    return found


def _attack(going: Going, trained: Trained, promised: dict[str, Any]) -> dict[str, Any]:
    """The attack's verdict; its AUC of every round goes to the metrics."""
    experiment, folder, watch = going.experiment, going.folder, going.watch
    if watch is None:
        return {}
    target, shadow = attacking.recall(folder.path, trained.reached), {}
    told = (tuple(target), going.stop, folder.log)
    clock = time.monotonic()
    if watch.shadow is not None:
        shadow = attacking.shadow_evidence(experiment, watch, *told, lambda at: training.target(experiment.config, at))
        folder.add_timing({"event": "shadow", "seconds": time.monotonic() - clock})
    clock = time.monotonic()
    many = attacking.many_evidence(experiment, watch, folder.path, *told)
    if many:
        folder.add_timing({"event": "shadows", "seconds": time.monotonic() - clock})
    updates = attacking.update_evidence(experiment, watch, trained.state, trained.plan)
    seen = attack_verdict.Evidence(target, shadow, many, updates)
    found = attack_verdict.verdict(experiment, watch, seen, promised)
    found = attack_verdict.with_ceilings(experiment, found, promised)
    place = {"site": "all", "split": "attack"}
    folder.add_rows(
        {"round": row["round"], "fold": row["fold"], "seed": row["seed"], **place}
        | {"metric": f"auc_{row['attack']}", "value": row["auc"], "n": row["n"]}
        for row in found["curve"]
    )
    return found


def finish(going: Going, trained: Trained) -> dict[str, Any]:
    """Writes all of it; the content of summary.json."""
    experiment, folder, config = going.experiment, going.folder, going.experiment.config
    task, loaded, outputs = experiment.task, experiment.data, trained.outputs
    folder.write_cases(_cases(experiment, outputs))
    # Of the rounds that were run, which may be fewer than planned.
    promised = guarantee.of_run(experiment, trained.reached) if trained.stopped else going.promised
    attack = _attack(going, trained, promised)
    written = runs.read_rows(folder.path / "metrics.jsonl")
    if going.ledger:
        text = communication_table.ledger_csv(secrecy_report.ledger_rows(written))
        folder.write_text("communication.csv", text)
    inverted, recovered = inverting.recover(experiment, trained.state, trained.plan)
    inversion_report.keep(folder.path, recovered, pictures.allowed(config.show_scans, loaded))
    result: dict[str, Any] = {
        "label": config.label or config.aggregator.name,
        "group": config.group,
        "round": trained.reached,
        "stopped": trained.stopped,
        "protocol": config.protocol,
        "sites": list(loaded.sites),
        "external": list(loaded.external),
        "classes": list(loaded.classes),
        "metrics": {name: list(rule) for name, rule in task.metrics.items()},
        "headline": list(task.headline),
        "paired": task.paired,
        "cohort": loaded.about.get("table1", []),
        "participation": rows.participation(written, loaded.sites),
        "results": trained.scored,
        **_classified(experiment, outputs),
        "privacy": promised,
        "attack": attack,
        "inversion": inverted,
        "secrecy": secrecy.summary(experiment, going.ledger, written)
        | secrecy.leakage(experiment, trained.state, trained.plan),
        "simulated": hospital_time.summary(written, trained.reached) if going.clocks else [],
        "config": configuration.flat(configuration.plain(config)),
    }
    result["privacy_card"] = privacy_card.card(experiment, promised, written=written, result=result)
    folder.write_json("privacy.json", result["privacy_card"])
    folder.add_timing({"event": "resources", **going.meter()})
    run_report.write(folder, result, written, loaded.about, loaded.summary, _pictures(going, trained))
    folder.finish(result)
    folder.log(f"done: {folder.path / 'report.html'}")
    return result


def _classified(experiment: Experiment, outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Bootstrap intervals of every site and of all cases, of the first replica, and confusion matrices of all."""
    task, loaded = experiment.task, experiment.data
    found: dict[str, Any] = {"intervals": [], "confusion": {}}
    if task.intervals is None or task.confusion is None:
        return found
    for r in range(len(experiment.replicas)):
        mine, plan = tree.rows(outputs, r), tree.rows(experiment.plan, r)
        inside = [k for k, n in enumerate(plan.test_sizes) if n and loaded.sites[k] not in loaded.external]
        together = {name: np.concatenate([x[k, : plan.test_sizes[k]] for k in inside]) for name, x in mine.items()}
        cases = np.concatenate([plan.test[k, : plan.test_sizes[k]] for k in inside])
        of_sites = {loaded.sites[k]: (tree.rows(mine, k), plan.test[k, :n]) for k, n in enumerate(plan.test_sizes) if n}
        for site, (values, which) in {**of_sites, "pooled": (together, cases)}.items():
            rows, patients = np.arange(len(which)), [loaded.patient_ids[i] for i in which]
            if r == 0:
                found["intervals"] += [{"site": site, **row} for row in task.intervals(values, rows, patients)]
            matrix = np.asarray(task.confusion(values, rows))
            found["confusion"][site] = found["confusion"].get(site, 0) + matrix
    found["confusion"] = {site: matrix.tolist() for site, matrix in found["confusion"].items()}
    return found


def _pictures(going: Going, trained: Trained) -> pictures.Pictures | pictures.VolumePictures | None:
    experiment, task, loaded = going.experiment, going.experiment.task, going.experiment.data
    if not pictures.allowed(experiment.config.show_scans, loaded):
        return None
    if loaded.store is not None:
        return volume_outputs.choose(experiment, trained.state, trained.plan, trained.outputs)
    one = tree.rows(experiment.plan, 0)
    return pictures.choose(loaded, one, tree.rows(trained.outputs, 0), task.masks, task.case_values, task.paired)
