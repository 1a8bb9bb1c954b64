import csv
import io
import math

import numpy as np
import pytest
from synthetic_run import case, result

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import tables
from fedjax_seg.report.runs import read_run
from fedjax_seg.report.tables import Cell, Table

NAN = math.nan


def replicas(site, metric, values):
    """Values of (fold0, seed 0), (fold0, seed 1), (fold1, seed 0), ..."""
    return [result(f"fold{i // 2}", i % 2, site, metric, v) for i, v in enumerate(values)]


@pytest.fixture
def two_runs(make_run):
    first = replicas("A", "accuracy", [0.5, 0.6, 0.7, 0.8]) + replicas("B", "accuracy", [0.9, 0.9, 0.5, 0.5])
    first += replicas("A", "auc", [0.5, None, 0.7, None]) + replicas("B", "auc", [None] * 4)
    second = replicas("A", "accuracy", [0.65] * 4) + replicas("B", "accuracy", [0.8, 0.8, 0.8, 0.6])
    second += replicas("A", "auc", [0.4, None, 0.4, None]) + replicas("B", "auc", [None] * 4)
    return [read_run(make_run("FedAvg", first)), read_run(make_run("Median", second))]


def test_a_run_is_read_back(make_run):
    rows = [result("fold0", 0, "A", "auc", None, round=1)]
    run = read_run(make_run("FedAvg", [result("fold0", 0, "A", "accuracy", 0.5)], [case("A", "s1", 1)], rows))
    assert (run.label, run.group, run.summary["round"]) == ("FedAvg", "paper", 2)
    assert len(run.rows) == 1 and math.isnan(run.rows[0]["value"]) and run.rows[0]["round"] == 1
    assert run.cases["correct"].tolist() == [1.0] and run.cases["case"].tolist() == ["s1"]
    assert run.cases["probability"].tolist() == [0.75] and run.cases["seed"].tolist() == [0]


def test_unfinished_and_damaged_runs_are_named(make_run, tmp_path):
    with pytest.raises(UserError, match=r"no summary\.json; the run has not finished"):
        read_run(tmp_path / "nothing")
    folder = make_run("x", [], [case("A", "s1", 1)])
    (folder / "per_case.csv").write_text("fold,seed\nfold0,0\n")
    with pytest.raises(UserError, match=r"per_case\.csv: no column 'site'"):
        read_run(folder)
    (folder / "metrics.jsonl").write_text('{"round": 1\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl.*: not JSON"):
        read_run(folder)
    (folder / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="no 'results' in it"):
        read_run(folder)


def test_cells_are_the_mean_and_sample_std_over_folds_and_seeds(two_runs):
    table = tables.site_table(two_runs, metrics=("accuracy", "auc"))
    assert table.columns == (
        *(("A", "accuracy"), ("A", "auc"), ("B", "accuracy"), ("B", "auc")),
        *(("Mean over sites", "accuracy"), ("Mean over sites", "auc")),
    )
    a, auc, b, none, mean, _ = table.cells[0]
    # by hand: .5 .6 .7 .8 has mean .65 and squares .0225 + .0025 + .0025 + .0225 = .05 over 3
    assert (a.mean, a.std, a.n) == (pytest.approx(0.65), pytest.approx(math.sqrt(0.05 / 3)), 4)
    assert (b.mean, b.std) == (pytest.approx(0.7), pytest.approx(math.sqrt(0.16 / 3)))
    # by hand: the AUC has two values, .5 and .7
    assert (auc.mean, auc.std, auc.n) == (pytest.approx(0.6), pytest.approx(math.sqrt(0.02)), 2)
    assert math.isnan(none.mean) and none.n == 0 and tables.cell_text(none, table) == "n/a"
    # by hand: replica means over A and B are .7, .75, .6, .65
    assert (mean.mean, mean.std) == (pytest.approx(0.675), pytest.approx(math.sqrt(0.0125 / 3)))
    assert tables.cell_text(a, table) == "0.650 ± 0.129" and tables.cell_text(auc, table) == "0.600 ± 0.141 (n=2)"
    assert "sample standard deviation over folds and seeds; n = 4" in table.caption
    assert "accuracy: share of cases with the right class" in table.caption


def test_an_unknown_metric_lists_the_known_ones(two_runs):
    with pytest.raises(UserError, match="no metric 'f1'; it has accuracy, auc"):
        tables.site_table(two_runs)


def plain_table(columns, directions, digits=3):
    cells = tuple(zip(*[[Cell(v, 0.01, 5) for v in column] for column in columns]))
    names = tuple(("", f"m{j}") for j in range(len(columns)))
    return Table("a & b ± c_d", "Method", names, tuple(f"r{i}" for i in range(len(cells))), cells, directions, digits)


def test_best_and_second_by_direction_with_ties_as_printed():
    table = plain_table(
        [[0.7, 0.8, 0.8001, 0.6], [3.0, 1.0, 2.0, 1.0], [0.5] * 4, [NAN, 0.1, NAN, 0.2], [1.0, 2.0, 3.0, 4.0]],
        ("max", "min", "max", "max", ""),
    )
    assert list(zip(*tables.marks(table))) == [
        ("second", "best", "best", ""),  # .8 and .8001 print alike
        ("", "best", "second", "best"),
        ("", "", "", ""),  # nothing is best among equals
        ("", "second", "", "best"),
        ("", "", "", ""),
    ]


def test_csv_has_all_digits_and_n(two_runs):
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(tables.site_table(two_runs, metrics=("accuracy", "auc"))))))
    assert [row["Method"] for row in rows] == ["FedAvg", "Median"]
    assert float(rows[0]["A accuracy std"]) == pytest.approx(math.sqrt(0.05 / 3), rel=1e-12)
    assert rows[0]["A auc n"] == "2" and rows[0]["B auc"] == "" and rows[0]["B auc n"] == "0"


def test_markdown_and_latex(two_runs):
    table = tables.site_table(two_runs, metrics=("accuracy",))
    markdown = tables.to_markdown(table).splitlines()
    assert markdown[0] == "| Method | A accuracy | B accuracy | Mean over sites accuracy |"
    # by hand: Median has A .65 (a tie as printed), B .75 with squares .0075 + .0225 over 3
    assert markdown[3].startswith("| Median | 0.650 ± 0.000 | **0.750 ± 0.100** | **0.700 ± 0.050** |")
    assert markdown[2].startswith("| FedAvg | 0.650 ± 0.129 | <u>0.700 ± 0.231</u> | <u>0.675 ± 0.065</u> |")
    latex = tables.to_latex(table)
    assert "\\multicolumn{1}{c}{Mean over sites}" in latex and "\\cmidrule(lr){4-4}" in latex
    assert "Median & 0.650 $\\pm$ 0.000 & \\textbf{0.750 $\\pm$ 0.100}" in latex
    for line in ("\\begin{tabular}{lrrr}", "\\toprule", "\\midrule", "\\bottomrule", "\\end{tabular}", "\\end{table}"):
        assert line in latex.splitlines()


def test_special_characters_are_escaped():
    table = plain_table([[0.5, 0.6]], ("max",))._replace(labels=("a|b", "x_1 & 50 % on Δ"))
    assert "| a\\|b |" in tables.to_markdown(table)
    assert "x\\_1 \\& 50 \\% on $\\Delta$ &" in tables.to_latex(table)
    assert "\\caption{a \\& b $\\pm$ c\\_d}" in tables.to_latex(table)


def test_cross_site_table_is_trained_by_tested(make_run):
    # the numbers of FedHAvg's Table 2
    paper = {"NYU": [NAN, 0.606, 0.667], "UM": [0.663, NAN, 0.597], "UCLA": [0.650, 0.529, NAN]}
    sites = list(paper)
    results = [
        result(f"train_{trained}", seed, tested, "accuracy", None if math.isnan(v) else v + (2 * seed - 1) * 0.01)
        for trained, row in paper.items()
        for tested, v in zip(sites, row)
        for seed in (0, 1)
    ]
    table = tables.cross_site_table(read_run(make_run("single", results, sites=sites)))
    assert table.labels == ("NYU-trained", "UM-trained", "UCLA-trained")
    np.testing.assert_allclose([[c.mean for c in row] for row in table.cells], list(paper.values()), rtol=1e-12)
    # by hand: two values .01 on either side of the mean
    assert table.cells[0][1].std == pytest.approx(0.01 * math.sqrt(2))
    assert tables.cell_text(table.cells[0][0], table) == "-"
    with pytest.raises(UserError, match="no fold named train_<site>"):
        tables.cross_site_table(read_run(make_run("other", [result("fold0", 0, "A", "accuracy", 0.5)])))


def test_cohort_table_is_table_1_of_the_paper():
    counts = {"NYU": (66, 97), "UM": (41, 63), "UCLA": (33, 39), "USM": (31, 19)}
    table = tables.cohort_table({s: {"ASD": a, "HC": h} for s, (a, h) in counts.items()}, ("ASD", "HC"))
    texts = [[label, *(tables.cell_text(c, table) for c in row)] for label, row in zip(table.labels, table.cells)]
    assert texts[0] == ["NYU", "163", "66 (40.5 %)", "97 (59.5 %)"]
    assert texts[3] == ["USM", "50", "31 (62.0 %)", "19 (38.0 %)"]
    assert texts[4] == ["Total", "389", "171 (44.0 %)", "218 (56.0 %)"]
    assert tables.to_csv(table).splitlines()[-1] == "Total,389,171,218"


def test_a_runs_table_has_sites_summaries_counts_and_cases(make_run):
    values = {"A": 0.5, "far": 0.9, "mean_of_sites": 0.5, "worst_site": 0.5, "pooled": 0.5}
    rows = [result("f", s, site, "accuracy", v + s / 10, n=7) for s in (0, 1) for site, v in values.items()]
    rows += [result("f", s, site, "n_missed", 2 + s, n=7) for s in (0, 1) for site in values]
    run = read_run(make_run("x", rows, sites=("A", "far")))
    summary = {**run.summary, "external": ["far"], "metrics": {"accuracy": ["max", ""], "n_missed": ["", ""]}}
    table = tables.run_table(run._replace(summary=summary), ["accuracy"], ["A", "far"])
    assert table.labels == ("A", "far (external)", "mean of sites", "worst site", "pooled cases")
    assert [name for _, name in table.columns] == ["accuracy", "n_missed", "cases"]
    assert [tables.cell_text(c, table) for c in table.cells[0]] == ["0.550 ± 0.071", "2.5", "7"]
    assert [tables.cell_text(c, table) for c in table.cells[2]][1:] == ["-", "7 sites"]
