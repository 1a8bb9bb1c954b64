"""Bootstrap intervals: every resample against scikit-learn with weights, widths against closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedjax_seg.core.checks import UserError
from fedjax_seg.tasks import classification_intervals
from fedjax_seg.tasks.classification import intervals, score


def outputs(n, classes, seed=0, signal=1.0, rounded=False):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) + signal * np.eye(classes)[label]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if rounded:  # many ties
        p = np.round(p * 8) + 0.5
        p /= p.sum(1, keepdims=True)
    p = p.astype(np.float32)
    return {"probability": p, "loss": -np.log(p[np.arange(n), label]), "label": label.astype(np.int32)}


def by_name(rows):
    return {row["metric"]: row for row in rows}


def of_scikit_learn(out, weight):
    """The metrics that scikit-learn has, of weighted cases; cases of weight 0 are left out."""
    kept = weight > 0
    y, p, w = out["label"][kept], out["probability"][kept].astype(np.float64), weight[kept]
    predicted, classes = p.argmax(1), np.arange(p.shape[1])
    named = {"y_true": y, "y_pred": predicted, "sample_weight": w}
    found = {
        "accuracy": sk.accuracy_score(**named),
        "cross_entropy": np.average(out["loss"][kept].astype(np.float64), weights=w),
    }
    if len(classes) == 2:
        recall = {c: sk.recall_score(**named, pos_label=c) if c in y else np.nan for c in classes}
        found |= {"f1": sk.f1_score(**named), "sensitivity": recall[1], "specificity": recall[0]}
        both = len(np.unique(y)) == 2
        found["balanced_accuracy"] = sk.balanced_accuracy_score(**named) if both else np.nan
        found["auc"] = sk.roc_auc_score(y, p[:, 1], sample_weight=w) if both else np.nan
        return found
    recalls = sk.recall_score(**named, labels=np.unique(y), average=None)
    found["balanced_accuracy"] = np.mean(recalls) if len(recalls) > 1 else np.nan
    found["f1"] = sk.f1_score(**named, average="macro", zero_division=0)
    p /= p.sum(1, keepdims=True)
    every = len(recalls) == len(classes)
    found["auc"] = sk.roc_auc_score(y, p, sample_weight=w, multi_class="ovr") if every else np.nan
    return found


@settings(deadline=None, max_examples=12)
@given(st.integers(4, 40), st.integers(2, 4), st.integers(1, 9), st.booleans(), st.integers(0, 10**6))
def test_every_resample_has_the_metrics_of_its_weighted_cases(n, classes, groups, rounded, seed):
    out = outputs(n, classes, seed, rounded=rounded)
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, n)
    drawn = rng.integers(0, 4, (4, groups))
    drawn[:, group[0]] += 1  # somebody is drawn
    drawn[0] = 1
    found = classification_intervals.resampled(out, group, drawn)
    for r, counts in enumerate(drawn):
        expected = of_scikit_learn(out, counts[group].astype(float))
        assert set(found) == set(expected) | {"ece"}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][r], value, rtol=1e-9, atol=1e-12, err_msg=f"{name} {r}")
        copies = np.repeat(np.arange(n), counts[group])  # what is not in scikit-learn: by copies of the cases
        copied = by_name(score(out, copies))
        assert set(found) == set(copied)
        for name, row in copied.items():
            np.testing.assert_allclose(found[name][r], row["value"], rtol=1e-9, atol=1e-12, err_msg=f"{name} {r}")


@pytest.mark.parametrize("classes", [2, 3])
def test_values_are_those_of_score(classes):
    out, cases = outputs(60, classes), np.arange(7, 50)
    rows = intervals(out, cases, [f"p{i % 20}" for i in cases], resamples=50)
    told = [{k: row[k] for k in ("metric", "value", "n")} for row in rows]
    assert told == score(out, cases)
    assert all(row["patients"] == 20 and row["resamples"] <= 50 and row["low"] <= row["high"] for row in rows)
    assert by_name(rows)["accuracy"]["resamples"] == 50


def test_independent_cases_have_the_normal_interval():
    out, n = outputs(1000, 3), 1000
    row = by_name(intervals(out, np.arange(n), np.arange(n), resamples=4000))["accuracy"]
    p = row["value"]
    half = 1.959964 * np.sqrt(p * (1 - p) / n)
    np.testing.assert_allclose([row["low"] - p, row["high"] - p], [-half, half], rtol=0.06)
    # Hanley and McNeil's error of an area under the curve, exact for pairs: DeLong's components
    two = outputs(800, 2, seed=1)
    area = by_name(intervals(two, np.arange(800), np.arange(800), resamples=4000))["auc"]
    positive = two["probability"][:, 1].astype(float)
    above = positive[two["label"] == 1][:, None] > positive[two["label"] == 0][None]
    error = np.sqrt(above.mean(1).var(ddof=1) / len(above) + above.mean(0).var(ddof=1) / above.shape[1])
    np.testing.assert_allclose(area["high"] - area["low"], 2 * 1.959964 * error, rtol=0.06)


def test_copies_of_a_case_add_no_certainty():
    """10 copies of each of 100 cases: drawn by patient the width is that of 100 cases, sqrt(10) times the naive one."""
    one = outputs(100, 2, seed=3)
    ten = {name: np.repeat(x, 10, axis=0) for name, x in one.items()}
    patients, everyone = np.repeat([f"p{i:03}" for i in range(100)], 10), np.arange(1000)
    grouped = by_name(intervals(ten, everyone, patients, resamples=4000))
    naive = by_name(intervals(ten, everyone, everyone, resamples=4000))
    single = by_name(intervals(one, np.arange(100), patients[::10], resamples=4000))
    for name in ("accuracy", "auc", "cross_entropy"):
        width = {k: of[name]["high"] - of[name]["low"] for k, of in (("g", grouped), ("n", naive), ("s", single))}
        assert width["g"] / width["n"] == pytest.approx(np.sqrt(10), rel=0.1)
        assert width["g"] == pytest.approx(width["s"], rel=1e-6)
    assert grouped["accuracy"]["n"] == 1000 and grouped["accuracy"]["patients"] == 100


def test_resamples_where_a_metric_is_not_defined_are_left_out_and_counted():
    """One case of class 1 among 8 patients: (1 - 1/8)^8 = 34 % of the resamples are without it."""
    out = outputs(8, 2, seed=5)
    out["label"][:] = [1] + [0] * 7
    found = by_name(intervals(out, np.arange(8), np.arange(8), resamples=3000))
    assert found["accuracy"]["resamples"] == 3000
    for name in ("auc", "balanced_accuracy", "sensitivity"):
        assert found[name]["resamples"] == pytest.approx(3000 * (1 - (7 / 8) ** 8), rel=0.05)
        assert np.isfinite(found[name]["low"])


def test_where_nothing_can_be_said_nothing_is():
    out = outputs(6, 2)
    out["label"][:] = 0
    found = by_name(intervals(out, np.arange(6), np.arange(6), resamples=20))
    assert np.isnan([found["auc"][k] for k in ("value", "low", "high")]).all() and found["auc"]["resamples"] == 0
    alone = by_name(intervals(out, np.arange(6), ["p"] * 6, resamples=20))["accuracy"]
    assert np.isfinite(alone["value"]) and np.isnan([alone["low"], alone["high"]]).all()
    assert alone["patients"] == 1 and alone["resamples"] == 0
    assert intervals(out, np.zeros(0, int), []) == []
    lost = {"probability": np.full((6, 3), np.nan), "loss": np.full(6, np.nan), "label": np.arange(6) % 3}
    assert np.isnan(by_name(intervals(lost, np.arange(6), np.arange(6), resamples=20))["auc"]["low"])
    single = classification_intervals.resampled(outputs(3, 3), np.arange(3), np.array([[0, 2, 0]]))
    assert np.isnan([single["balanced_accuracy"], single["auc"]]).all() and np.isfinite(single["f1"]).all()
    with pytest.raises(UserError, match="patients: 2 names given, 6 expected"):
        intervals(out, np.arange(6), ["a", "b"])
    with pytest.raises(UserError, match="resamples: 0 given"):
        intervals(out, np.arange(6), np.arange(6), resamples=0)


def test_the_seed_decides_and_blocks_do_not(monkeypatch):
    out, cases = outputs(30, 3), np.arange(30)
    ends = lambda **given: [(row["low"], row["high"]) for row in intervals(out, cases, cases, resamples=40, **given)]
    first = ends(seed=1)
    assert ends(seed=1) == first != ends(seed=2)
    monkeypatch.setattr(classification_intervals, "_BLOCK", 7 * 30)
    np.testing.assert_allclose(ends(seed=1), first, rtol=1e-12)
