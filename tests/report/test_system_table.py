"""The table of costs and scores: what is summed, what is the largest, what is not known."""

import json

import pytest
from synthetic_run import result

from fedjax_seg.report import system_table
from fedjax_seg.report.runs import read_run


def spent(wall, memory, energy, event="resources"):
    return {"event": event, "wall_seconds": wall, "peak_memory_gb": memory, "energy_wh": energy}


@pytest.fixture
def run(make_run):
    def made(lines=(), simulated=(), published=(), metrics=("soft_dice_0", "soft_dice_4")):
        rows = [result("f", s, "pooled", m, v + s / 10) for s in (0, 1) for m, v in zip(metrics, (0.9, 0.5))]
        rows += [result("f", 0, "A", m, 0.0) for m in metrics]
        folder = make_run("SimAgg", rows)
        summary = json.loads((folder / "summary.json").read_text())
        summary["metrics"] = {m: ["max", "soft"] for m in metrics}
        summary["simulated"] = list(simulated)
        summary["config"] = {f"published.{k}": v for k, v in dict(published).items()}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_run(folder)

    return made


def table(*runs):
    made = system_table.system_table(runs)
    return [dict(zip((" ".join(c) for c in made.columns), row)) for row in made.cells]


def test_times_add_up_over_processes_and_memory_is_the_largest(run):
    (row,) = table(run([spent(1800, 2.0, 10.0), spent(5400, 1.5, 5.0), spent(9, 9, 9, event="rounds")]))
    assert row["ours wall-clock (h)"].mean == 2.0 and row["ours memory (GB)"].mean == 2.0
    assert row["ours energy (Wh)"].mean == 15.0


def test_energy_that_one_process_could_not_measure_is_not_known(run):
    (row,) = table(run([spent(1800, 2.0, 10.0), spent(1800, 2.0, None)]))
    assert row["ours energy (Wh)"].mean != row["ours energy (Wh)"].mean and row["ours wall-clock (h)"].mean == 1.0


def test_scores_are_over_all_cases_and_beside_them_stands_the_paper(run):
    simulated = [{"fold": "f", "seed": s, "minutes": 100.0 + s, "projected_score": p} for s, p in ((0, 0.5), (1, None))]
    (row,) = table(run(simulated=simulated, published={"soft_dice_4": 0.79, "minutes": 8484.0}))
    assert row["ours soft_dice_0"].mean == pytest.approx(0.95) and row["ours soft_dice_4"].mean == pytest.approx(0.55)
    assert row["ours simulated time (min)"].mean == 100.5
    assert (row["ours projected score"].mean, row["ours projected score"].n) == (0.5, 1)
    assert row["paper soft_dice_4"].text == "0.79" and row["paper simulated time (min)"].text == "8484"
    assert "paper soft_dice_0" not in row


def test_it_is_for_runs_with_a_clock_or_labels(run):
    assert system_table.applies([run()])
    assert not system_table.applies([run(metrics=("accuracy", "auc"))])
    assert system_table.applies([run(metrics=("accuracy", "auc"), simulated=[{"minutes": 1}])])
