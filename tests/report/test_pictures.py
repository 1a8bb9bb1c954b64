"""Which cases a report shows, and that pictures are drawn where they should be."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread

from fedjax_seg.report import pictures, scans
from fedjax_seg.report.scans import Scan

SIZE = 8


def federation(tested=12):
    """Three sites; the last is external. Case i has image value i / 100 and a mask of i + 1 pixels."""
    n = 8 + tested
    x = np.arange(n, dtype=np.float32)[:, None, None, None] / 100 * np.ones((1, SIZE, SIZE, 1), np.float32)
    y = (np.arange(SIZE * SIZE).reshape(1, SIZE, SIZE) <= np.arange(n)[:, None, None]).astype(np.uint8)
    data = SimpleNamespace(sites=("a", "b", "far"), external=("far",), arrays={"x": x, "y": y}, about={}, store=None)
    train = np.array([[0, 1, 2], [3, 0, 0], [0, 0, 0]])
    test = np.zeros((3, tested), int)
    test[0, 0], test[2] = 4, 8 + np.arange(tested)
    sizes = np.array([3, 1, 0]), np.array([1, 0, tested])
    return data, SimpleNamespace(train=train, train_sizes=sizes[0], test=test, test_sizes=sizes[1])


def chosen(values):
    data, plan = federation(len(values))
    outputs = {"value": np.tile(values, (3, 1))}
    masks = lambda out, cases: (np.ones((1, SIZE, SIZE)), np.zeros((1, SIZE, SIZE)))
    return pictures.choose(data, plan, outputs, masks, lambda out, cases: {"dice": out["value"][cases]}, "dice")


def test_the_worst_the_middle_and_the_best_cases_of_the_external_site():
    values = np.array([0.5, 0.1, np.nan, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6, 0.0, 1.0, 0.55, 0.45, 0.35, 0.65])
    made = chosen(values)
    shown = [float(scan.title.split()[-1]) for scan in made.overlays]
    ranked = sorted(v for v in values if np.isfinite(v))
    assert shown == [round(v, 2) for v in (*ranked[:4], *ranked[5:9], *ranked[-4:])]
    assert all(scan.title.startswith("far") for scan in made.overlays)
    case = 8 + int(np.flatnonzero(values == 0.0)[0])
    np.testing.assert_allclose(made.overlays[0].image, case / 100)  # the image belongs to the score


def test_few_cases_are_shown_once():
    assert len(chosen(np.array([0.2, 0.4])).overlays) == 2


def test_examples_are_training_cases_of_every_site_that_trains():
    made = chosen(np.linspace(0, 1, 12))
    assert [site for site, _ in made.examples] == ["a", "b"]
    assert [float(scan.image[0, 0]) for scan in made.examples[0][1]] == pytest.approx([0.0, 0.01, 0.02])
    assert [int(scan.truth.sum()) for scan in made.examples[0][1]] == [1, 2, 3]


@pytest.mark.parametrize(
    "mode, synthetic, shown", [("auto", False, False), ("auto", True, True), ("on", False, True), ("off", True, False)]
)
def test_real_scans_are_not_shown_unless_asked(mode, synthetic, shown):
    data, _ = federation()
    data.about = {"synthetic": synthetic}
    assert pictures.allowed(mode, data) is shown


def test_features_are_no_pictures():
    arrays = {"x": np.zeros((2, 44)), "y": np.zeros(2)}
    assert not pictures.allowed("on", SimpleNamespace(store=None, about={"synthetic": True}, arrays=arrays))


def test_classified_tiles_are_shown_in_their_own_colours():
    """The network's input is standardised; the picture is not."""
    tiles = np.random.default_rng(0).random((3, SIZE, SIZE, 3))
    mean, std = np.array([0.7, 0.5, 0.6]), np.array([0.2, 0.3, 0.1])
    data = SimpleNamespace(
        store=None,
        about={"synthetic": True, "normalise": {"mean": mean.tolist(), "std": std.tolist()}},
        arrays={"x": (tiles - mean) / std, "y": np.array([1, 0, 1])},
        sites=("north", "south"),
        classes=("benign", "squamous"),
        external=(),
    )
    assert pictures.allowed("auto", data)
    plan = SimpleNamespace(
        train=np.array([[0, 1], [2, 0]]), train_sizes=[2, 1], test=np.zeros((2, 1), int), test_sizes=[0, 0]
    )
    shown = pictures.choose(data, plan, {}, None, lambda *unused: {}, "correct")
    assert [(site, [scan.title for scan in scans_]) for site, scans_ in shown.examples] == [
        ("north", ["squamous", "benign"]),
        ("south", ["squamous"]),
    ]
    np.testing.assert_allclose(shown.examples[0][1][1].image, tiles[1], atol=1e-12)
    assert not shown.overlays and not np.any(shown.examples[0][1][0].truth)


def coloured(path, colour):
    """Pixels near a colour '#rrggbb'."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int(np.sum(np.all(np.abs(imread(path)[..., :3] - wanted) < 0.12, axis=-1)))


def test_contours_of_truth_and_prediction_are_drawn_and_counted(tmp_path):
    truth, predicted = np.zeros((2, SIZE, SIZE), int)
    truth[2:5, 2:5], predicted[3:6, 3:7] = 1, 1
    image = np.linspace(0, 1, SIZE * SIZE).reshape(SIZE, SIZE)
    both = scans.overlays([Scan("one", image, truth, predicted)], tmp_path, "both")
    none = scans.overlays([Scan("one", image, 0 * truth, 0 * predicted)], tmp_path, "none")
    for colour in (scans.TRUTH, scans.PREDICTION):
        assert coloured(both, colour) > coloured(none, colour) + 50  # both figures have the legend
    assert (tmp_path / "both.csv").read_text().splitlines()[1] == "one,9,12,4"


def test_a_row_per_site(tmp_path):
    image = np.zeros((SIZE, SIZE, 3))
    rows = [("a", [Scan("", image, image[..., 0])] * 3), ("b", [Scan("x", image, image[..., 0] + 1)])]
    path = scans.examples(rows, tmp_path)
    assert path.stat().st_size > 1000
    assert path.with_suffix(".csv").read_text().splitlines()[1:] == ["a,,0"] * 3 + ["b,x,64"]
