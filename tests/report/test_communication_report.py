"""Tables, words and the figure of communication costs, from rows by hand."""

import csv
import io

import numpy as np
import pytest
from matplotlib.image import imread

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import communication_figures, communication_table, tables


def row(key, name, size, hops, seconds, *, messages=10, ratio=1.0, computed=False):
    source = "Published: 3 MB" if computed else ""
    return {"key": key, "name": name, "hides": "nobody", "bytes": size, "ratio": ratio, "messages": messages,
            "hops": hops, "bytes_up": size - 1, "bytes_peer": 1, "bytes_down": 2_000_000, "seconds": seconds,
            "computed": computed, "source": source}  # fmt: skip


ROWS = [
    row("none", "FedAvg", 158_400_000, 1, 0.82, messages=33),
    row("chained", "a chain", 163_200_000, 34, 15.14, messages=34, ratio=1.0303),
    row("mesh", "a mesh", 5_227_200_000, 2, 7200.0, messages=1089, ratio=33.0),
    row("secagg", "SecAgg", 158_879_622, 4, 0.97, messages=231, ratio=1.003028),
    row("homomorphic", "CKKS", 1_268_621_145, 1, 372.0, ratio=8.009, computed=True),
]


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (158_400_000, "158.4 MB"), (5_227_200_000, "5.227 GB"),
     (999_960, "1 MB"), (1.44e14, "144 TB"), (12_345.6, "12.35 kB")],
    ids=str,
)  # fmt: skip
def test_sizes_have_four_digits(size, text):
    assert communication_table.size_text(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0, "0 s"), (0.0632, "0.063 s"), (9.94, "9.9 s"), (15.14, "15 s"), (99.0, "99 s"), (120.0, "2 min"),
     (371.3, "6.2 min"), (3600.0, "1 h"), (7200.0, "2 h"), (360000.0, "100 h")],
    ids=str,
)  # fmt: skip
def test_times_have_the_unit_one_speaks_of(seconds, text):
    assert communication_table.time_text(seconds) == text


def test_the_comparison_as_a_table():
    table = communication_table.comparison_table(ROWS, "secagg")
    assert table.labels == ("FedAvg", "a chain", "a mesh", "SecAgg (this run)", "CKKS (computed)")
    cells = [[cell.text for cell in row] for row in table.cells]
    assert cells[0] == ["158.4 MB", "1.000", "33", "1", "0.82 s", "2 MB", "nobody"]
    assert cells[2][:5] == ["5.227 GB", "33", "1,089", "2", "2 h"] and (cells[1][1], cells[3][1]) == ("1.030", "1.003")
    assert "Published: 3 MB" in table.caption and "Computed, not run: CKKS" in table.caption
    assert table.cells[2][0].mean == 5_227_200_000  # the CSV has all digits
    assert "SecAgg (this run) | 158.9 MB" in tables.to_markdown(table) and "158879622" in tables.to_csv(table)


def test_an_own_protocol_that_is_not_there(tmp_path):
    for made in (
        lambda: communication_table.comparison_table(ROWS, "clusters"),
        lambda: communication_table.lines(ROWS, "clusters", 33, 10),
        lambda: communication_figures.protocol_costs(ROWS, tmp_path, own="clusters"),
    ):
        with pytest.raises(UserError, match=r"communication: own: .*'clusters'"):
            made()
    assert not list(tmp_path.iterdir())


def test_words():
    text = communication_table.lines(ROWS, "secagg", 33, 1_200_000)
    assert text == (
        "A round of 33 hospitals, 1,200,000 numbers each. SecAgg: 158.9 MB sent in 231 messages and 4 steps in a row,"
        " about 0.97 s. That is 1.003 times what a round without a secure sum sends (158.4 MB, 1 step, 0.82 s)."
    )
    plain = communication_table.lines(ROWS, "none", 33, 1_200_000)
    assert plain.endswith("and 1 step, about 0.82 s. The server sees every single update.")


@pytest.mark.parametrize(
    "own, protocol, name, hides",
    [
        ("mesh", "smc_scalar", "scalar portions to everybody", "nobody"),
        ("clusters", "smc_scalar", "scalar portions in clusters of 4", "nobody"),
        ("mesh", "additive", "shares to everybody", "server and any one neighbour"),
        ("none", "none", "no secure sum", "nobody"),
        ("none", "assumed", "a secure sum, assumed", "server, by assumption"),
        ("mesh", "", "shares to everybody", "server and any one neighbour; with scalar portions: nobody"),
    ],
    ids=str,
)
def test_the_runs_own_row_speaks_of_its_own_protocol(tmp_path, own, protocol, name, hides):
    both = "server and any one neighbour; with scalar portions: nobody"
    rows = [
        row("none", "FedAvg, no secure sum", 100, 1, 0.1),  # as older runs named it
        row("mesh", "shares to everybody", 300, 2, 0.2) | {"hides": both},
        row("clusters", "shares in clusters of 4", 200, 2, 0.2) | {"hides": both},
    ]
    table = communication_table.comparison_table(rows, own, protocol)
    found = {label: cells[-1].text for label, cells in zip(table.labels, table.cells)}
    assert found[f"{name} (this run)"] == hides
    others = [text for label, text in found.items() if "this run" not in label and label.startswith("shares")]
    assert set(others) == {both}  # the other rows stay
    assert ("a secure sum, assumed" if protocol == "assumed" else name) in communication_table.lines(
        rows, own, 8, 25, protocol
    )
    if protocol == "smc_scalar":
        path = communication_figures.protocol_costs(rows, tmp_path, own=own, protocol=protocol)
        assert name in path.with_suffix(".csv").read_text()


def test_an_assumed_sum_is_not_said_to_be_open():
    text = communication_table.lines(ROWS, "none", 33, 10, "assumed")
    assert "every single update" not in text and "assumed sum would send" in text


def ledger(**first):
    base = dict.fromkeys(communication_table.LEDGER, 0)
    return [base | {"round": 1} | first, base | {"round": 2, "messages": 3, "bytes_up": 1000, "seconds": 0.5}]


def test_the_ledger_is_a_line_per_round():
    rows = ledger(messages=6, bytes_up=4000, seconds=1.25, repeated=1, dropped=2, saturated=5)
    found = list(csv.DictReader(io.StringIO(communication_table.ledger_csv(rows))))
    assert list(found[0]) == ["round", *communication_table.LEDGER]  # no fold, no seed: rows have none
    assert (found[0]["bytes_up"], found[0]["seconds"], found[1]["round"]) == ("4000", "1.25", "2")
    with_seeds = communication_table.ledger_csv([row | {"fold": "a", "seed": 1} for row in rows])
    assert with_seeds.startswith("round,fold,seed,messages,")


def test_the_ledger_in_three_rows():
    table = communication_table.ledger_table(ledger(messages=6, bytes_up=4000, seconds=1.5, dropped=1))
    names = [name for _, name in table.columns]
    found = {label: dict(zip(names, (c.text for c in row))) for label, row in zip(table.labels, table.cells)}
    mean, most, total = found.values()
    assert (mean["messages"], mean["up"], mean["seconds"], mean["dropped"]) == ("4.5", "2.5 kB", "1 s", "0.5")
    assert (most["messages"], total["messages"], total["up"], total["seconds"]) == ("6", "9", "5 kB", "2 s")
    assert "2 rounds, as counted" in table.caption
    assert "of 1 round, as counted" in communication_table.ledger_table(ledger()[:1]).caption
    with pytest.raises(UserError, match="no round in the ledger"):
        communication_table.ledger_table([])


def filled(image, colour):
    """Whether there is a square of some 12 x 12 pixels of that colour, more than any letter or line has."""
    here = (image[::3, ::3] == colour).all(-1)
    return np.lib.stride_tricks.sliding_window_view(here, (4, 4)).all((-1, -2)).any()


def test_the_figure_shows_every_protocol(tmp_path):
    path = communication_figures.protocol_costs(ROWS, tmp_path, own="secagg", title="33 hospitals")
    with open(path.with_suffix(".csv"), newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["key"], r["own"], r["computed"]) for r in found] == [
        ("none", "0", "0"), ("chained", "0", "0"), ("mesh", "0", "0"), ("secagg", "1", "0"), ("homomorphic", "0", "1"),
    ]  # fmt: skip
    assert (found[3]["bytes"], found[3]["hops"], found[3]["seconds"]) == ("158879622", "4", "0.97")
    image = np.round(imread(path)[..., :3] * 255).astype(int)
    half = image.shape[1] // 2
    left, right = image[:, :half], image[:, half:]
    for panel in (left, right):  # the run's own points are filled, the computed ones are outlines
        assert filled(panel, [0, 114, 178]) and not filled(panel, [213, 94, 0])
        assert (panel == [213, 94, 0]).all(-1).any()
    grey = (right == [107, 107, 107]).all(-1)  # no bar: a length from an arbitrary end of a log axis means nothing
    assert 0 < grey.sum(1).max() < 120
    unmarked = communication_figures.protocol_costs(ROWS[:4], tmp_path, "unmarked")
    assert not (np.round(imread(unmarked)[..., :3] * 255) == [0, 114, 178]).all(-1).any()


def test_one_protocol_alone_can_be_drawn_and_the_same_bytes_come_out(tmp_path):
    pair = [communication_figures.protocol_costs(ROWS[:1], tmp_path, name).read_bytes() for name in ("a", "b")]
    assert pair[0] == pair[1]
