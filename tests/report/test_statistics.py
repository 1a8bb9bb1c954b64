import itertools
import math

import numpy as np
import pytest
from synthetic_run import case, result

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import statistics
from fedjax_seg.report.runs import read_run


def columns(corrects, site="A", seeds=1):
    """Columns of per_case.csv: subject i is right in the given share of its seeds."""
    rows = [(site, f"s{i}", int(s < c * seeds)) for i, c in enumerate(corrects) for s in range(seeds)]
    return dict(zip(("site", "case", "correct"), map(np.array, zip(*rows))))


def test_holm_by_hand():
    # m = 4, sorted .005 .01 .03 .04: 4 x .005, 3 x .01, 2 x .03, and 1 x .04 raised to .06
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.5]) == [1.0, 1.0]
    adjusted = statistics.holm([0.02, math.nan, 0.03])
    assert math.isnan(adjusted[1]) and [adjusted[0], adjusted[2]] == pytest.approx([0.04, 0.04])
    assert statistics.holm([]) == []


def test_exact_p_of_a_small_case():
    # all 6 subjects better by 1: only the two patterns of equal signs are as extreme, 2 / 2^6
    test = statistics.paired_test(columns([1] * 6), columns([0] * 6))
    assert (test.difference, test.n) == (1.0, 6)
    assert test.p == pytest.approx(2 / 64)
    assert (test.low, test.high) == (1.0, 1.0)


def test_exact_p_equals_a_plain_enumeration():
    a, b = columns([1, 0.5, 0, 1, 1, 0.5, 1, 0], seeds=2), columns([0, 0, 0.5, 1, 0.5, 0, 0.5, 0], seeds=2)
    d = np.array([1, 0.5, -0.5, 0, 0.5, 0.5, 0.5, 0])
    sums = np.array([np.dot(signs, d) for signs in itertools.product((1, -1), repeat=8)])
    expected = np.mean(np.abs(sums) >= d.sum() - 1e-9)
    test = statistics.paired_test(a, b)
    assert test.p == pytest.approx(expected)
    assert test.difference == pytest.approx(d.mean())


def test_seeds_of_a_subject_are_averaged_not_counted_as_subjects():
    one = statistics.paired_test(columns([1] * 5), columns([0] * 5))
    many = statistics.paired_test(columns([1] * 5, seeds=10), columns([0] * 5, seeds=10))
    assert many.n == 5 and many.p == one.p == pytest.approx(2 / 32)


def test_no_difference_and_a_null_case():
    same = columns([1, 0, 1])
    assert statistics.paired_test(same, same) == statistics.PairedTest(0.0, 0.0, 0.0, 1.0, 3)
    # as many subjects gained as lost: the observed mean 0 is the least extreme there is
    gained = columns([1] * 30 + [0] * 30)
    lost = columns([0] * 30 + [1] * 30)
    null = statistics.paired_test(gained, lost)
    assert null.p == 1.0 and null.low < 0 < null.high


def test_false_alarms_are_as_rare_as_promised():
    rng = np.random.default_rng(0)
    p = [
        statistics.paired_test(columns(rng.integers(0, 2, 60)), columns(rng.integers(0, 2, 60)), resamples=199).p
        for _ in range(200)
    ]
    # 200 tests at .05: binomial mean 10, standard deviation 3.1; four of them above
    assert sum(x <= 0.05 for x in p) <= 22


def test_interval_is_the_usual_one_for_many_subjects():
    # 300 subjects gain 1, 100 lose 1: mean .5, std sqrt(1 - .25), normal interval .5 +- 1.96 std / 20
    test = statistics.paired_test(columns([1] * 300 + [0] * 100), columns([0] * 300 + [1] * 100))
    half = 1.96 * math.sqrt(0.75) / 20
    assert (test.low, test.high) == (pytest.approx(0.5 - half, abs=0.01), pytest.approx(0.5 + half, abs=0.01))
    assert test.p < 0.001


def test_the_seed_fixes_the_result():
    rng = np.random.default_rng(3)
    a, b = columns(rng.integers(0, 2, 50)), columns(rng.integers(0, 2, 50))
    assert statistics.paired_test(a, b, seed=1) == statistics.paired_test(a, b, seed=1)


def test_other_subjects_are_an_error_with_an_example():
    with pytest.raises(UserError, match=r"3 and 4 subjects, 1 of them in one run only, e\.g\. case s3 of A"):
        statistics.paired_test(columns([1, 1, 1]), columns([1, 1, 1, 0]))


def test_comparison_table_has_one_row_per_other_method(make_run):
    def run(label, corrects, name=None):
        cases = [case("A", f"s{i}", c) for i, c in enumerate(corrects)]
        return read_run(make_run(label, [result("fold0", 0, "A", "accuracy", 0.5)], cases, name=name))

    base = run("FedAvg", [0] * 6)
    runs = [run("Better", [1] * 6), base, run("Same", [0] * 6)]
    table = statistics.comparison_table(runs)
    assert table.labels == ("Better", "Same")
    assert [c.text for c in table.cells[0]] == ["+1.000", "+1.000", "+1.000", "0.031", "0.062", "6"]
    assert [c.text for c in table.cells[1]] == ["+0.000", "+0.000", "+0.000", "1.000", "1.000", "6"]
    with pytest.raises(UserError, match="0 runs are labelled 'Median', 1 expected"):
        statistics.comparison_table(runs, reference="Median")
    with pytest.raises(UserError, match="2 runs are labelled"):
        statistics.comparison_table([*runs, run("FedAvg", [0] * 6, name="again")])
    bare = read_run(make_run("bare", []))
    with pytest.raises(UserError, match=r"bare has no per_case\.csv"):
        statistics.comparison_table([base, bare])
