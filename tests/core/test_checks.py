"""Error messages: what was given, what was expected, what to do; one line each."""

import numpy as np
import pytest

from fedjax_seg.core import checks
from fedjax_seg.core.checks import UserError


def maker(task, *, lr=0.1, steps: int = 3, name="x"):
    return (task, lr, steps, name)


def test_lookup_suggests_a_close_name_and_lists_the_known_ones():
    table = {"median": 1, "mean": 2}
    assert checks.lookup(table, "median", "aggregator") == 1
    with pytest.raises(UserError) as error:
        checks.lookup(table, "medain", "aggregator")
    assert str(error.value) == "aggregator: unknown name 'medain'; did you mean 'median'? known: mean, median"
    with pytest.raises(UserError, match=r"unknown name 'zzz'; known: none$"):
        checks.lookup({}, "zzz", "aggregator")


def test_call_passes_options_and_names_what_it_does_not_know():
    assert checks.call(maker, "client", ("t",), {"lr": 0.5}) == ("t", 0.5, 3, "x")
    with pytest.raises(UserError, match="client: unknown option 'step'; did you mean 'steps'"):
        checks.call(maker, "client", ("t",), {"step": 1})
    with pytest.raises(UserError, match="client: missing a required argument: 'task'; options: task, lr, steps, name"):
        checks.call(maker, "client", (), {})


def test_a_type_error_inside_the_maker_is_a_bug_and_keeps_its_traceback():
    def broken(*, a=1):
        return a + "text"

    with pytest.raises(TypeError):
        checks.call(broken, "client", (), {})


def test_options_and_parameters():
    assert checks.options(maker, skip=("name",)) == {"lr": 0.1, "steps": 3}
    assert checks.parameters(maker) == ("task", "lr", "steps", "name")


@pytest.mark.parametrize("value", [0.0, 1, 0.5, np.float32(0.25), np.int64(1)])
def test_number_accepts_finite_numbers_in_range(value):
    checks.number("lr", value, low=0.0, high=1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1, True, "1", None, [1]])
def test_number_refuses_everything_else(value):
    with pytest.raises(UserError) as error:
        checks.number("lr", value, low=0.0, high=1.0)
    assert str(error.value) == f"lr: {value!r} given, a finite number in [0, 1] expected"


def test_open_ends_and_integers():
    checks.number("rounds", np.int32(3), low=1, integer=True)
    with pytest.raises(UserError, match=r"rounds: 3.0 given, an integer in \[1, inf\] expected"):
        checks.number("rounds", 3.0, low=1, integer=True)
    with pytest.raises(UserError, match=r"c: 0 given, a finite number in \(0, inf\] expected"):
        checks.number("c", 0, above=0.0)
    with pytest.raises(UserError):
        checks.number("c", -1, above=0.0)


def test_one_of():
    checks.one_of("tie", "lower", ("lower", "mean"))
    with pytest.raises(UserError, match="tie: 'upper' given, one of 'lower', 'mean' expected"):
        checks.one_of("tie", "upper", ("lower", "mean"))


def test_all_faults_of_a_data_tree_at_once():
    error = checks.DataFaults("folder", ["a.1D: no rows", "b.1D: NaN"])
    assert isinstance(error, UserError) and error.faults == ("a.1D: no rows", "b.1D: NaN")
    assert str(error) == "folder: 2 fault(s)\n  - a.1D: no rows\n  - b.1D: NaN"
