"""Is a method better than the reference? A paired test per subject: five folds are too few for a test over folds."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import Cell, Table

RESAMPLES = 9999
_BATCH = 500  # resamples in memory at once


class PairedTest(NamedTuple):
    """difference: mean of a - b over n subjects; low, high: its 95% bootstrap interval; p: two-sided."""

    difference: float
    low: float
    high: float
    p: float
    n: int


def subject_means(cases: Mapping[str, np.ndarray], column: str) -> dict[tuple[str, str], float]:
    """{(site, subject): `column` averaged over all tests of the subject}: over seeds and, where a patient has several
    cases, over these (a patient's cases are no independent draws). Undefined values are left out."""
    total: dict[tuple[str, str], list[float]] = {}
    who = cases["patient"] if "patient" in cases else cases["case"]
    for site, subject, value in zip(cases["site"], who, cases[column]):
        if not math.isnan(value):
            total.setdefault((str(site), str(subject)), []).append(float(value))
    return {subject: float(np.mean(values)) for subject, values in total.items()}


def paired_test(
    cases_a: Mapping[str, np.ndarray],
    cases_b: Mapping[str, np.ndarray],
    column: str = "correct",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedTest:
    """Sign-flip permutation test of the mean per-subject difference of a column of per_case.csv, a - b.

    Under the null the two methods are exchangeable within a subject, so every sign of its difference is equally likely.
    All 2^n sign patterns are used where there are no more than `resamples`. Subjects are taken as independent; the test
    says nothing about other training sets, which all subjects of a fold share.

    Args:
      cases_a, cases_b: columns of per_case.csv of two runs on the same subjects: 'site', 'patient' or 'case', `column`.
      seed: of the resampling of both the test and the interval (percentile bootstrap over subjects).

    Raises: UserError where the two runs did not test the same subjects.
    """
    a, b = subject_means(cases_a, column), subject_means(cases_b, column)
    if not a or a.keys() != b.keys():
        one_sided = sorted(a.keys() ^ b.keys())
        example = f", e.g. case {one_sided[0][1]} of {one_sided[0][0]}" if one_sided else ""
        raise UserError(
            f"paired test: {len(a)} and {len(b)} subjects, {len(one_sided)} of them in one run only{example};"
            " both runs must test the same subjects"
        )
    differences = np.array([a[subject] - b[subject] for subject in sorted(a)])
    mean = float(differences.mean())
    if not differences.any() or len(differences) < 2:
        return PairedTest(mean, mean, mean, 1.0, len(differences))
    # One sample and permutation_type='samples' is scipy's way to ask for sign flips.
    test = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=_BATCH,
        alternative="two-sided",
        random_state=np.random.default_rng(seed),
    )
    rng = np.random.default_rng(seed)
    n = len(differences)
    sizes = [min(_BATCH, resamples - start) for start in range(0, resamples, _BATCH)]
    means = np.concatenate([differences[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [0.025, 0.975])
    return PairedTest(mean, float(low), float(high), float(test.pvalue), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order; NaN stays NaN and does not count as a test.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure": the i-th smallest of m (i = 0, ...) is
    multiplied by m - i, made monotone and cut at 1. Controls the family-wise error under any dependence.
    """
    adjusted = [math.nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def comparison_table(runs: Sequence[Run], reference: str = "FedAvg", seed: int = 0) -> Table:
    """Every run against the run labelled `reference`: difference, 95% interval, p, Holm's p, n.

    Args:
      runs: finished runs of one group, with per_case.csv; labels must differ.

    Raises: UserError where the reference is missing or not unique, or a run has no per-case results.
    """
    labels = [run.label for run in runs]
    if labels.count(reference) != 1:
        raise UserError(
            f"comparison: {labels.count(reference)} runs are labelled {reference!r}, 1 expected; labels: {labels}"
        )
    without = [run for run in runs if not len(run.cases.get("case", ()))]
    if without:
        raise UserError(f"comparison: run {without[0].folder} has no per_case.csv; run it again")
    base = runs[labels.index(reference)]
    others = [run for run in runs if run is not base]
    column = base.summary.get("paired", "correct")
    tests = [paired_test(run.cases, base.cases, column, seed) for run in others]
    rows = []
    for test, adjusted in zip(tests, holm([t.p for t in tests])):
        signed = [Cell(x, text=f"{x:+.3f}") for x in (test.difference, test.low, test.high)]
        rows.append((*signed, _p_cell(test.p), _p_cell(adjusted), Cell(test.n, text=str(test.n))))
    caption = (
        f"`{column}` against {reference}, paired by subject (averaged over a subject's cases and seeds): mean"
        f" difference, 95% percentile bootstrap interval over subjects, two-sided sign-flip permutation test"
        f" ({RESAMPLES} resamples, seed {seed}), and the p-value adjusted by Holm for {len(tests)} comparison(s);"
        " n subjects."
    )
    names = ("Difference", "95% low", "95% high", "p", "p (Holm)", "Subjects")
    columns = tuple(("", name) for name in names)
    return Table(caption, "Method", columns, tuple(r.label for r in others), tuple(rows), ("",) * len(names))


def _p_cell(p: float) -> Cell:
    return Cell(p, text="<0.001" if p < 0.001 else f"{p:.3f}")
