"""Simulated time of a run: its rows, its budget, and the projected score, by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_seg import hospital_time
from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import clock

FOLD = {"fold": "split0", "seed": 0}


def experiment(name="sites", hours=0.0, file=""):
    sites = ("near", "far", "outside")
    plan = SimpleNamespace(train_sizes=np.array([[8, 4, 0]]), test_sizes=np.array([[2, 1, 5]]))
    slot = {"name": name} | ({"file": file} if file else {})
    config = SimpleNamespace(clock=SimpleNamespace(**slot), max_sim_hours=hours, local_epochs=2)
    config.clock = type("Slot", (dict,), {"name": property(lambda self: self["name"])})(slot)
    data = SimpleNamespace(sites=sites, external=("outside",))
    return SimpleNamespace(config=config, data=data, plan=plan, replicas=(SimpleNamespace(**FOLD),))


@pytest.fixture
def times(tmp_path):
    path = tmp_path / "times.csv"
    head = "site,train_seconds_per_sample,val_seconds_per_sample,download_seconds,upload_seconds"
    path.write_text(f"{head}\nnear,3,10,100,50\nfar,30,20,200,80\n")
    return str(path)


def records(cohorts):
    """One replica; cohorts: ids of who trains, by round."""
    clients = np.zeros((1, len(cohorts), 2), int)
    present = np.zeros((1, len(cohorts), 2), bool)
    for i, ids in enumerate(cohorts):
        clients[0, i, : len(ids)], present[0, i, : len(ids)] = ids, True
    return {"round": np.arange(len(cohorts))[None], "cohort": {"clients": clients, "present": present}}


def test_a_round_lasts_as_long_as_its_slowest_site(times):
    made = hospital_time.clocks(experiment(file=times))
    found = hospital_time.rows(made, records([[0], [1], []]), np.array([3]), [SimpleNamespace(**FOLD)])
    # near trains: 100 + 2*10 + 8*2*3 + 2*10 + 50 = 238, far only validates: 200 + 20 = 220; then far trains:
    # 200 + 20 + 4*2*30 + 20 + 80 = 560; then nobody: 220. The external site takes no time.
    assert [(row["round"], row["value"], row["n"]) for row in found] == [(1, 238, 1), (2, 560, 1), (3, 220, 0)]
    assert {(row["metric"], row["split"], row["fold"]) for row in found} == {("simulated_seconds", "train", "split0")}
    assert hospital_time.spent(found, {}) == {("split0", 0): 1018.0}


def test_the_budget_is_over_once_it_is_passed():
    spent = {("split0", 0): 3599.0, ("split0", 1): 3601.0}
    assert not hospital_time.over(SimpleNamespace(max_sim_hours=0.0), spent)
    assert not hospital_time.over(SimpleNamespace(max_sim_hours=1.0), {("split0", 0): 3600.0})
    text = hospital_time.over(SimpleNamespace(max_sim_hours=1.0), spent)
    assert "1.00 h" in text and "seed 1" in text


def test_a_budget_without_a_clock_is_refused():
    with pytest.raises(UserError, match=r"config.max_sim_hours: 2 given without a clock.*clock.name=fets"):
        hospital_time.clocks(experiment("none", hours=2.0))
    assert hospital_time.clocks(experiment("none")) == ()


def rows(seconds, scores):
    time = [{**FOLD, "metric": "simulated_seconds", "round": r + 1, "value": s} for r, s in enumerate(seconds)]
    place = {**FOLD, "site": "pooled", "split": "test", "metric": "round_score"}
    return time + [{**place, "round": r, "value": v} for r, v in scores.items()]


def with_place(found):
    return [{"site": "server", "split": "train", **row} for row in found]


def test_the_projected_score_counts_the_model_before_each_round():
    """Two rounds of 1000 and 3000 s; the initial model scores .2, the first aggregate .5, the last is not counted."""
    written = with_place(rows([1000.0, 3000.0], {0: 0.2, 1: 0.5, 2: 0.9}))
    (found,) = hospital_time.summary(written, 2)
    area = 0.2 * 1000 + 0.5 * 3000
    assert found["minutes"] == pytest.approx(4000 / 60)
    assert found["projected_score"] == pytest.approx(((clock.WEEK - 4000) * 0.5 + area) / clock.WEEK)


def test_without_a_score_of_every_round_there_is_no_projection():
    (found,) = hospital_time.summary(with_place(rows([1000.0, 3000.0], {0: 0.2, 2: 0.9})), 2)
    assert found["projected_score"] is None and not math.isnan(found["minutes"])
