"""What stands in a run's report beside its tables: rounds that changed nothing, warnings, words of its protocol."""

from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_run import result

from fedjax_seg.report import run_report, secrecy_report
from fedjax_seg.report.runs import Run

NAN = float("nan")


def rows_of(*norms, seed=0, aborted=()):
    """A row for each round that has a norm, and the ledger's of the aborted ones."""
    found = [
        result("f", seed, "A", "update_norm", norm, split="train", round=t)
        for t, norm in enumerate(norms, 1)
        if norm is not None
    ]
    return found + [
        result("f", seed, "server", "aborted", float(t in aborted), split="communication", round=t)
        for t in range(1, len(norms) + 1)
    ]


def summary(seeds=(0,), rounds=3, **changes):
    found = {
        "round": rounds,
        "label": "SMC",
        "group": "",
        "protocol": "federated",
        "sites": ["A"],
        "external": [],
        "metrics": {"accuracy": ["max", "share of right ones"]},
        "headline": ["accuracy"],
        "results": [result("f", seed, "A", "accuracy", 0.5, round=rounds) for seed in seeds],
        "participation": {"A": 3},
        "cohort": [],
        "config": {"sampler.name": "full"},
    }
    return found | changes


@pytest.mark.parametrize(
    "rows, result, expected",
    [
        (rows_of(1.0, 1.0, 1.0), summary(), (3, 3)),
        (rows_of(1.0, None, 1.0), summary(), (2, 3)),  # empty: nobody trained
        (rows_of(1.0, 1.0, 1.0, aborted=(2, 3)), summary(), (1, 3)),
        (rows_of(1.0, NAN, 1.0), summary(), (2, 3)),  # what was trained cannot be used
        (rows_of(1.0, None, 1.0), summary(privacy={"formal": True}), (3, 3)),  # noise comes all the same
        (rows_of(1.0, 1.0, 1.0, aborted=(1,)), summary(privacy={"formal": True}), (2, 3)),
        (rows_of(1.0, None, 1.0) + rows_of(1.0, 1.0, 1.0, seed=1, aborted=(3,)), summary((0, 1)), (4, 6)),
        ([], summary(rounds=0), (0, 0)),
    ],
    ids=["all", "empty", "aborted", "nan", "noise", "aborted noise", "two seeds", "no rounds"],
)
def test_rounds_that_changed_the_model(rows, result, expected):
    assert run_report.changed(result, rows) == expected


WARNINGS = ["WARNING: NO GROUPS. Scores are too high", "WARNING: 2 pictures have different labels"]


@pytest.fixture
def report(tmp_path, monkeypatch):
    """(result, rows, about) -> report.md, without figures."""
    monkeypatch.setattr(run_report, "_course", lambda *unused: [])
    monkeypatch.setattr(run_report, "_institutions", lambda *unused: [])
    monkeypatch.setattr(run_report.confusion, "confusion_figure", lambda *unused: tmp_path / "figures" / "none.png")
    monkeypatch.setattr("fedjax_seg.report.html._figure", lambda *unused: "")

    def write(result, rows, about):
        run_report.write(SimpleNamespace(path=tmp_path), result, rows, about, ["flow"])
        return (tmp_path / "report.md").read_text()

    return write


def test_warnings_stand_under_the_result(report):
    about = {"warnings": WARNINGS, "patients": "none told: tiles of one slide can be in training and in test"}
    interval = {"site": "A", "metric": "accuracy", "value": 0.5, "low": 0.4, "high": 0.6}
    interval |= {"n": 9, "patients": 9, "resamples": 1000}
    shown = {"intervals": [interval], "confusion": {}, "classes": []}
    text = report(summary(rounds=1, **shown), rows_of(1.0, aborted=(1,)), about)
    assert "0 of 1 rounds changed the model." in text
    before, after = text.split("## Classes")
    assert before.index("| A | 0.500") < before.index(WARNINGS[0]) < before.index(WARNINGS[1])
    assert "Patients: none told: tiles of one slide" in before
    assert "| tiles |" in after and "TOO NARROW" in after


def test_a_sound_run_is_not_warned_of(report):
    text = report(summary(), rows_of(1.0, 1.0, 1.0), {"warnings": [], "patients": "column 'patient'"})
    assert "changed the model" not in text and "WARNING" not in text and "Patients:" not in text


@pytest.mark.parametrize(
    "patients, alone",
    [
        ("column 'patient'", None),
        ("none told: tiles of one slide can be in training and in test, scores are too high", ("tile", "slide")),
        ("none named: every slide counts as a patient of its own", ("slide", "patient")),
        ("none named: every image counts as a patient of its own", ("image", "patient")),
    ],
    ids=["told", "tiles", "slides", "images"],
)
def test_what_a_case_is_where_nobody_tells_the_patients(patients, alone):
    assert run_report._alone({"patients": patients}) == alone and run_report._alone({}) is None


def secret(protocol="none", error=0.0, received=0.0, own="none", **totals):
    """A run with two numbers of one update, and what was lost of it."""
    leak = {"site": "A", "viewer": "server", "cosine": 0.24, "error": error, "of": "weights", "hides": False}
    picture = {"site": "A", "true": [1.0, 2.0], "received": [received, 0.0], "reconstructed": None, "cosine": None}
    told = {"protocol": protocol, "rows": [leak], "picture": picture, "own": own, "totals": totals}
    return Run("", "SMC", "", {"secrecy": told | {"facts": {"clip": 8.0}}}, [], {})


def test_the_servers_view_is_the_update_unless_there_is_noise():
    plain = secrecy_report._exchange(secret())
    assert plain.viewer == "server" and plain.cosine == 0.24
    np.testing.assert_array_equal(plain.received, [1, 2])
    noisy = secrecy_report._exchange(secret(error=5.0))
    assert noisy.viewer == "server" and noisy.received is None and noisy.reconstructed is None
    assert secrecy_report._exchange(secret("smc_scalar", received=1.0)).viewer == "neighbour"


@pytest.mark.parametrize(
    "run, words",
    [
        (secret(), "what the server receives of it"),
        (secret("secagg", own="secagg"), "other hospitals receive nothing"),
        (secret("chained", received=1.0, own="chained"), "the next hospital of the chain"),
        (secret("additive", received=1.0, own="mesh"), "what another hospital received"),
        (secret("smc_scalar", received=1.0, own="clusters"), "a neighbour of its cluster"),
    ],
    ids=["none", "secagg", "chained", "mesh", "clusters"],
)
def test_captions_fit_the_protocol(run, words):
    text = secrecy_report._picture_text(run.summary["secrecy"])
    assert words in text and ("cluster" in text) == ("cluster" in words)


def test_what_was_lost_is_told_in_the_right_number():
    losses = lambda **totals: secrecy_report._losses(secret(**totals).summary["secrecy"])
    one, many = losses(dropped=1.0, aborted=1.0, saturated=1.0), losses(dropped=2.0, aborted=3.0, saturated=4.0)
    for words in ("1 update was lost", "1 round was aborted", "1 entry beyond the range of the encoding (clip 8) was"):
        assert words in one
    for words in ("2 updates were lost", "3 rounds were aborted", "4 entries beyond"):
        assert words in many
    assert losses() == ""
