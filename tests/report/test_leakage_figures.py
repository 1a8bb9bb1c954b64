"""The figure and the table of who sees what: numbers drawn, sentences that fit them, definitions in the caption."""

import csv
import itertools
import math

import numpy as np
import pytest
from matplotlib.image import imread

from fedjax_seg.report import leakage_figures as leak
from fedjax_seg.report.tables import to_markdown

TRUE = np.random.default_rng(0).normal(size=90)
MODEL = np.random.default_rng(1).normal(size=90)


def exchange(**changes):
    given = leak.Exchange("scalar shares", "Hospital 1", TRUE, 0.3 * (MODEL + TRUE), TRUE * 1.001, 0.9999)
    return given._replace(**changes)


def noise(**changes):
    random = np.random.default_rng(2).uniform(-1, 1, 90)
    return exchange(protocol="additive", received=random, reconstructed=random, cosine=-0.01, hides=True, **changes)


COSINES = {
    "scalar shares": {"neighbour": 0.9999, "colluders": 0.9998, "server": 0.97, "sum": 0.5},
    "additive": {"neighbour": 0.01, "colluders": 0.02, "server": 0.0, "sum": 0.5},
    "FedAvg": {"neighbour": None, "colluders": None, "server": 1.0, "sum": 0.5},
}


def pixels(path, colour):
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int(np.sum(np.all(np.abs(imread(path)[..., :3] - wanted) < 0.02, axis=-1)))


def test_every_number_drawn_is_in_the_csv(tmp_path):
    path = leak.leakage([exchange(), noise()], COSINES, tmp_path)
    with open(path.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    for shown in (exchange(), noise()):
        for kind in ("true", "received", "reconstructed"):
            mine = [r for r in rows if (r["protocol"], r["what"]) == (shown.protocol, kind)]
            assert [int(r["entry"]) for r in mine] == list(range(90))
            np.testing.assert_allclose([float(r["value"]) for r in mine], getattr(shown, kind))
    for protocol, found in COSINES.items():
        mine = {r["what"]: r["value"] for r in rows if r["protocol"] == protocol and "cosine" in r["what"]}
        assert mine == {f"cosine: {v}": "" if x is None else repr(float(x)) for v, x in found.items()}
    assert len(rows) == 2 * 3 * 90 + 12
    again = leak.leakage([exchange(), noise()], COSINES, tmp_path, "again")
    assert path.read_bytes() == again.read_bytes()


def test_pictures_and_dots_are_there(tmp_path):
    """A block of the highest value is a block of the darkest violet; as many dots of a colour as there are values."""
    block = np.zeros((10, 10))
    block[:5] = 1.0
    path = leak.leakage([exchange(true=block, received=-block, reconstructed=block)], COSINES, tmp_path)
    violet, orange = pixels(path, "#2d004b"), pixels(path, "#7f3b08")
    assert violet > 20_000 and violet == pytest.approx(2 * orange, rel=0.05)
    alone = leak.leakage([exchange(true=block, received=-block, reconstructed=None)], {}, tmp_path, "alone")
    assert pixels(alone, "#2d004b") == pytest.approx(pixels(alone, "#7f3b08"), rel=0.05)
    server = "#0072B2"
    less = {p: found | {"server": None} for p, found in COSINES.items()}
    fewer = leak.leakage([exchange(true=block, received=-block, reconstructed=block)], less, tmp_path, "fewer")
    assert pixels(path, server) > 100 and pixels(fewer, server) == 0  # nor is a marker of none in the legend


def panels(monkeypatch, tmp_path, shown):
    """(title, texts, width over height of the box) of the pictures of one protocol, and the question above them."""
    found = []

    def save(chart, *rest):
        chart.canvas.draw()
        axes = chart.subfigs[0].axes
        found.append((chart.subfigs[0].get_suptitle(), axes))
        return original(chart, *rest)

    original = leak.canvas.save
    monkeypatch.setattr(leak.canvas, "save", save)
    leak.leakage([shown], COSINES, tmp_path)
    return found[0]


def test_without_a_secure_sum_the_servers_picture_is_drawn(monkeypatch, tmp_path):
    """Two empty panels would read as all clear, where the server has everything."""
    by_server = exchange(received=TRUE, reconstructed=TRUE, cosine=1.0, viewer="server")
    question, axes = panels(monkeypatch, tmp_path, by_server)
    assert question.startswith("Can the server see") and [len(axis.images) for axis in axes] == [1, 1, 1]
    assert axes[1].get_title() == "The server receives this from Hospital 1:\nthe update itself"
    assert "secret" not in axes[0].get_title()


def test_panels_have_one_height_and_noise_is_named(monkeypatch, tmp_path):
    noisy = exchange(received=None, reconstructed=None, cosine=0.24, viewer="server")
    _, axes = panels(monkeypatch, tmp_path, noisy)
    assert [[t.get_text() for t in axis.texts] for axis in axes] == [[], ["not drawn"], ["not drawn"]]
    assert "noise added" in axes[1].get_title() and "cosine 0.240" in axes[2].get_title()
    assert len({round(axis.get_window_extent().height, 3) for axis in axes}) == 1


def test_titles_of_long_names_do_not_overlap(monkeypatch, tmp_path):
    name = "Memorial Sloan Kettering Cancer Center New York"
    _, axes = panels(monkeypatch, tmp_path, exchange(site=name))
    boxes = [axis.title.get_window_extent() for axis in axes]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes)) and boxes[0].x0 >= 0
    assert "Memorial Slo…er New York" in axes[1].get_title().replace("\n", " ")


@pytest.mark.parametrize(
    "shown, words",
    [
        (exchange(), ("What Hospital 1 learned", "its model, times one secret number", "can undo it")),
        (exchange(of="updates"), ("secret", "its update, times one secret number", "cosine 1.000")),
        (exchange(cosine=0.6), ("secret", "its model", "recovers a part of the update\n(cosine 0.600)")),
        (noise(), ("secret", "looks like random numbers", "cannot undo it: noise\n(cosine 0.010)")),
        (
            exchange(received=np.zeros(90), reconstructed=None, cosine=None),
            ("secret", "A neighbour receives nothing", "nothing to reconstruct"),
        ),
    ],
    ids=["scalar", "updates", "part", "additive", "silent"],
)
def test_sentences_say_what_the_numbers_say(shown, words):
    for sentence, part in zip(leak.sentences(shown), words):
        assert part in sentence


def row(site, viewer, cosine, error=None, verdict="a part of it", member=None, outsider=None):
    numbers = {"cosine": cosine, "error": error, "member": member, "outsider": outsider}
    return {"site": site, "viewer": viewer, "verdict": verdict} | numbers


def test_the_table_has_means_the_largest_and_definitions():
    rows = [
        row("a", "neighbour", -0.9),
        row("b", "neighbour", 0.5),
        row("mean", "neighbour", 0.7, 0.12345, "its direction (1 of 2 sites)"),
        row("a", "server", 0.2, 3.0),
        row("mean", "server", 0.2, 3.0, "a part of it", 2e-7, 0.0447),
        row("a", "colluders", None),
        row("mean", "colluders", None, None, "nothing is sent"),
    ]
    assert leak.mean_cosines(rows) == {"neighbour": 0.7, "server": 0.2, "colluders": None}
    table = leak.leakage_table({"scalar": rows, "other": rows[3:5]})
    assert table.labels[0] == "scalar: one neighbouring hospital" and table.labels[3] == "other: the server"
    printed = [[cell.text for cell in line] for line in table.cells]
    assert printed[0] == ["0.7000", "0.9000", "0.1235", "-", "-", "its direction (1 of 2 sites)"]
    assert printed[1] == ["0.2000", "0.2000", "> 1", "2e-07", "0.045", "a part of it"]
    assert printed[2] == ["-", "-", "-", "-", "-", "nothing is sent"] and math.isnan(table.cells[2][0].mean)
    for name in (name for _, name in table.columns):
        assert f"{name}:" in table.caption or f"{name}," in table.caption
    assert "over 2 hospitals" in table.caption and "its direction" in to_markdown(table)
