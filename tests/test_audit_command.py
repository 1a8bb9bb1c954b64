"""The command and the registry of audits: found at most what is proven, for the code that runs; and what is broken."""

import json

import jax.numpy as jnp
import pytest

from fedjax_seg import audit
from fedjax_seg.aggregation import lift, lift_sum
from fedjax_seg.audit import __main__ as command_line
from fedjax_seg.core.checks import UserError
from fedjax_seg.main import guarded
from fedjax_seg.privacy import bounds, gaussian

GRID = (2, 3, 6, 12, 33)
ROW = {"name", "n", "dim", "found", "proven", "share", "start"}
CANARY = {
    "name", "statistic", "epsilon_low", "mu_low", "epsilon_claimed", "trials", "confidence", "above", "words",
}  # fmt: skip
UNPROVEN = ("dp_simagg", "geyer")


def same(params):
    return params, {}


@pytest.mark.parametrize("name, n, share", [("dp_fedavg", 3, 1.0), ("ref_sim_agg", 2, 0.99), ("sim_agg", 3, 0.5)])
def test_found_is_at_most_what_is_proven(name, n, share):
    found = audit.audit_mechanism(name, n=n, dim=2, trials=0, steps=0)
    assert not found.violations and set(found.sensitivity) == ROW
    assert share * (1 - 1e-6) <= found.sensitivity["share"] <= 1 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("n", GRID)
@pytest.mark.parametrize("name", [name for name in audit.MECHANISMS if name not in UNPROVEN])
def test_found_is_at_most_what_is_proven_on_the_whole_grid(name, n):
    if name == "krum" and n < 3:
        pytest.skip("Krum needs three clients")
    found = audit.audit_mechanism(name, n=n, dim=4, clip=1.0, trials=0)
    print(f"{name:24}{n:4}{found.sensitivity['found']:10.4f}{found.sensitivity['proven']:10.4f}")
    assert not found.violations
    assert 0.05 < found.sensitivity["share"] <= 1 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
@pytest.mark.parametrize("name", [name for name, made in audit.MECHANISMS.items() if name not in UNPROVEN])
def test_canaries_stay_below_every_proven_claim(name, epsilon):
    found = audit.audit_mechanism(name, n=6, dim=4, epsilon=epsilon, steps=100)
    assert not found.violations
    if found.canaries:
        assert not found.canaries["above"] and found.canaries["epsilon_low"] > 0


def test_the_literal_row_audits_above_its_claim(capsys, tmp_path):
    out = tmp_path / "found.json"
    words = ["audit", "--mechanism=dp_simagg", "--n=3", "--dim=2", "--trials=600", "--steps=0", f"--out={out}"]
    assert guarded(command_line.command, words) == 0  # expected: nobody has proven it
    told = capsys.readouterr().out
    assert "above the 1 that is claimed and has no proof" in told and "no bound is proven" in told
    assert "VIOLATION" not in told
    found = json.loads(out.read_text())
    assert set(found) == {"sensitivity", "canaries", "violations", "text"} and found["violations"] == []
    assert set(found["sensitivity"][0]) == ROW and set(found["canaries"][0]) == CANARY
    assert found["canaries"][0]["above"] and found["canaries"][0]["epsilon_low"] > 1
    assert found["sensitivity"][0]["proven"] is None


def unclipped(n, dim, clip, epsilon, delta):
    """A sum with the bound of a clipped one, and no clip."""
    made = lift_sum(same, same, bare=True, divisor=float(n), bound=bounds.clipped_sum(clip))
    return audit.of_aggregator(made, n, clip)


def half_noise(n, dim, clip, epsilon, delta):
    """A clipped sum with half of the noise that it claims."""
    made = audit.MECHANISMS["dp_fedavg"](n, dim, clip, 2.15, delta)  # epsilon 2.15: half of the noise for 1
    return made._replace(claimed=(epsilon, delta))


@pytest.mark.parametrize(
    "maker, trials, words",
    [(unclipped, 0, "above the proven bound of 1"), (half_noise, 20000, "above the 1 that is claimed")],
)
def test_a_violation_has_an_exit_code_of_its_own(monkeypatch, capsys, maker, trials, words):
    monkeypatch.setitem(audit.MECHANISMS, "broken", maker)
    asked = ["audit", "--mechanism=broken", "--n=2", "--dim=2", f"--trials={trials}", "--steps=0"]
    assert guarded(command_line.command, asked) == command_line.VIOLATION == 2
    told = capsys.readouterr().out
    assert "VIOLATION" in told and words in told and "nothing contradicts" not in told


def test_an_aggregator_of_ones_own():
    """The longest update: one client decides, so it moves by up to 2 C; its bound of C is refuted."""

    def longest(x, w, present):
        return x[jnp.argmax(jnp.where(present, jnp.sum(x**2, axis=1), -1))]

    found = audit.audit_mechanism(lift(longest, per="model"), n=3, dim=2, clip=1.0, steps=0)
    assert found.sensitivity["found"] == pytest.approx(2) and found.canaries is None and not found.violations
    wrong = lift(longest, per="model")._replace(bound=bounds.mean_replace_one(1.0, 2))
    made = audit.of_aggregator(gaussian.privatize(wrong, noise_multiplier=0.0), 3, 1.0)
    assert audit.audit_mechanism(made._replace(radius=1.0), n=3, dim=2, steps=0).violations


@pytest.mark.parametrize(
    "words, message",
    [
        (["--mechanism=ref_simagg"], "did you mean 'ref_sim_agg'"),
        ([], "--mechanism, --workdir: neither given"),
        (["--mechanism=krum", "--n=2"], "n: 2 given, at least 3"),
        (["--mechanism=mean", "--n=0"], "n: 0 given"),
        (["--mechanism=mean", "--clip=-1"], "clip: -1.0 given"),
        (["--mechanism=mean", "--n=many"], "many"),
        (["--mechanism=mean", "more"], "'more': not a flag"),
        (["--mechanism=mean", "--dims=3"], "dims"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert guarded(command_line.command, ["audit", *words]) == 1
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""


def test_all_lists_the_names_and_help_the_flags(capsys):
    assert command_line.command(["audit", "--mechanism=all"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == list(audit.MECHANISMS)
    assert all(len(line.split()) > 1 for line in told.splitlines())  # every maker says what it is
    with pytest.raises(SystemExit):
        command_line.command(["audit", "--help"])
    assert "--epsilon=1" in capsys.readouterr().out


def test_a_mechanism_with_no_noise_for_so_few_clients_says_why():
    made = audit.MECHANISMS["adaptive_dp_fedavg"](6, 2, 1.0, 1.0, 1e-5)
    assert made.release is None and "carries no signal" in made.note
    with pytest.raises(UserError, match="unknown name"):
        audit.audit_mechanism("nothing")
