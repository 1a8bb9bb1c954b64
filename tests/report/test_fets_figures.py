"""Figures of volumes: their numbers by hand, and that colours are where they should be."""

import csv
import math

import numpy as np
import pytest
from matplotlib.image import imread
from synthetic_run import result

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import fets_figures as fets
from fedjax_seg.report import scans

CLASSES = ("background", "NCR", "ED", "ET")


def numbers(path):
    with open(path.with_suffix(".csv"), newline="") as file:
        return list(csv.DictReader(file))


def pixels(path, colour):
    """How many pixels of the picture have that colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int(np.sum(np.all(np.abs(imread(path)[..., :3] - wanted) < 0.02, axis=-1)))


def case():
    """A head of 12 x 14 x 10 voxels with three classes in it; the prediction misses the enhancing one."""
    image = np.zeros((20, 22, 18))
    image[4:16, 4:18, 4:14] = np.linspace(1, 2, 12)[:, None, None]
    truth = np.zeros(image.shape, np.uint8)
    truth[6:10, 6:12, 6:10] = 2
    truth[7:9, 7:9, 7:9] = 1
    truth[9, 9, 7:9] = 3
    return image, truth, np.where(truth == 3, 0, truth)


def test_institutions_come_in_the_order_of_their_numbers(tmp_path):
    sizes = {"10": (8, 2), "2": (3, 1), "b10": (1, 1), "1": (136, 34), "b9": (2, 2)}
    path = fets.institutions(sizes, tmp_path)
    rows = numbers(path)
    assert [r["site"] for r in rows] == ["1", "2", "10", "b9", "b10"]
    assert [r["total"] for r in rows] == ["170", "4", "10", "4", "2"]
    assert rows[2] == {"site": "10", "training": "8", "validation": "2", "total": "10"}
    # the tallest bar: 136 of training to 34 of validation (hatched, so that only a part of it has the plain colour)
    training, validation = (pixels(path, c) for c in ("#0072B2", "#E69F00"))
    assert training > 2000 and 0 < validation < training


def test_modalities_show_every_channel_in_the_colours_of_the_regions(tmp_path):
    image, truth, _ = case()
    volume = np.stack([image, 2 * image, image - 7, -image], -1)
    path = fets.modalities(volume, truth, ("T1", "T1Gd", "T2", "FLAIR"), CLASSES, tmp_path, title="one")
    rows = {(r["plane"], r["class"]): int(r["pixels"]) for r in numbers(path)}
    # by hand: the volume; the first of the largest slices, z = 6: no core in it; y = 6, x = 6: oedema only
    assert [rows["volume", c] for c in CLASSES[1:]] == [8, 4 * 6 * 4 - 10, 2]
    assert [rows["axial", c] for c in CLASSES[1:]] == [0, 24, 0]
    assert [rows["coronal", c] for c in CLASSES[1:]] == [0, 16, 0]
    assert [rows["sagittal", c] for c in CLASSES[1:]] == [0, 24, 0]
    plain = fets.modalities(volume, 0 * truth, ("T1", "T1Gd", "T2", "FLAIR"), CLASSES, tmp_path, "plain")
    assert yellow(path) > 12 * 50 and yellow(plain) == 0
    with pytest.raises(ValueError, match="4 channels of a class map"):
        fets.modalities(volume[..., :3], truth, ("T1", "T1Gd", "T2", "FLAIR"), CLASSES, tmp_path)


def yellow(path):
    """Pixels that are much less blue than red and green: oedema over any grey."""
    red, green, blue = np.moveaxis(imread(path)[..., :3], -1, 0)
    return int(np.sum((red - blue > 0.2) & (green - blue > 0.2)))


def blue(path):
    red, _, blue = np.moveaxis(imread(path)[..., :3], -1, 0)
    return int(np.sum(blue - red > 0.25))


def test_segmentations_put_the_prediction_beside_the_truth(tmp_path):
    image, truth, predicted = case()
    truth[6:10, 6:12, 7:8] = 3  # the largest area is now everywhere the same; a slab of it is enhancing
    found = [fets.Case("a", image, truth, truth), fets.Case("b\nDice 0.5", image, truth, predicted, (1.0, 1.0, 2.0))]
    path = fets.segmentations(found, CLASSES, tmp_path)
    rows = {(r["case"], r["plane"], r["class"]): r for r in numbers(path)}
    assert len(rows) == 2 * 3 * 3
    for (title, _, _), row in rows.items():
        assert title != "a" or row["truth_pixels"] == row["predicted_pixels"] == row["common_pixels"]
    both = rows["b\nDice 0.5", "coronal", "ET"]
    assert (both["truth_pixels"], both["predicted_pixels"]) == ("8", "0")  # 4 voxels, two pixels high each
    one = fets.segmentations(found[:1], CLASSES, tmp_path, "one")
    missed = fets.segmentations([found[1]._replace(spacing=(1.0, 1.0, 1.0))], CLASSES, tmp_path, "missed")
    assert blue(one) > 1.3 * blue(missed) > 0  # half of the blue, and the legend's


def test_classes_that_are_no_brain_tumour_have_colours_of_their_own(tmp_path):
    image, truth, _ = case()
    names = ("background", "anterior", "ED", "posterior")
    assert set(fets._colours(names)) == {1, 2, 3} and len(set(fets._colours(names).values())) == 3
    path = fets.modalities(image[..., None], truth, ("T1",), names, tmp_path)
    assert [r["class"] for r in numbers(path)[-3:]] == list(names[1:])


def test_planes_are_drawn_by_the_overlays_of_slices(tmp_path):
    image, truth, predicted = case()
    path = scans.overlays(fets.planes("one", image, truth, predicted), tmp_path)
    rows = numbers(path)
    assert [r["case"] for r in rows] == ["one axial", "one coronal", "one sagittal"]
    assert [r["truth_pixels"] for r in rows] == ["24", "16", "24"]


def test_panels_of_several_metrics_by_hand(tmp_path):
    rows = [result("fold0", s, "pooled", m, v + 0.1 * t, round=t)
            for s, v in ((0, 0.1), (1, 0.3)) for t in (0, 1, 2) for m in ("dice", "sensitivity")]  # fmt: skip
    rows += [result("fold0", 0, "A", "dice", 9.0, round=1), result("fold0", 0, "pooled", "dice", 9.0, split="train")]
    other = [result("fold0", 0, "pooled", "dice", 0.7, round=2)]
    path = fets.metric_panels(
        {"SimAgg": rows, "DP-SimAgg": other}, ("dice", "sensitivity"), tmp_path, site="pooled", titles={"dice": "Dice"}
    )
    found = {(r["metric"], r["method"], r["round"]): r for r in numbers(path)}
    assert len(found) == 3 + 3 + 1
    last = found["dice", "SimAgg", "2"]
    assert float(last["mean"]) == pytest.approx(0.4) and last["n"] == "2"
    assert float(last["std"]) == pytest.approx(math.sqrt(2) / 10)
    assert found["dice", "DP-SimAgg", "2"]["std"] == ""
    assert pixels(path, "#000000") > 500 and pixels(path, "#E69F00") > 10
    with pytest.raises(UserError, match=r"no row with a metric of dice of 'worst_site' in split 'test'"):
        fets.metric_panels({"SimAgg": rows}, ("dice",), tmp_path, site="worst_site")


def test_utility_over_epsilon_with_the_line_without_privacy(tmp_path):
    curves = {"DP": [(10.0, 0.6, 0.02), (1.0, 0.4, math.nan), (math.inf, 0.7, 0.1)], "nothing": []}
    path = fets.epsilon_utility(curves, tmp_path, without=(0.75, math.nan), delta=1e-5)
    assert [tuple(r.values()) for r in numbers(path)] == [
        ("DP", "1.0", "0.4", ""),
        ("DP", "10.0", "0.6", "0.02"),
        ("without privacy", "", "0.75", ""),
    ]
    assert pixels(path, "#E69F00") > 100
    same = fets.epsilon_utility(curves, tmp_path, "again", without=(0.75, math.nan), delta=1e-5)
    assert same.read_bytes() == path.read_bytes()
