"""Synthetic histology: the folder and its bytes, the stain of each hospital, and classes that the colour hides."""

import csv
import importlib
import io
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedjax_seg import data, synthesis
from fedjax_seg.core.checks import UserError
from fedjax_seg.synthesis import (
    histology_fields,
    histology_nuclei,
    histology_stain,
    histology_stroma,
    histology_tissue,
    png,
)

histology = importlib.import_module("fedjax_seg.synthesis.histology")  # synthesis.histology is its maker
CLASSES = ("benign", "adenocarcinoma", "squamous")
HOSPITALS = (90, 90, 90, 90)
SMALL = {"size": 32, "hospitals": (7, 5), "regions": 2}


def rows_of(folder):
    with (folder / "metadata.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def kept(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthesis.make("histology", tmp_path_factory.mktemp("histology") / "data", size=48, hospitals=HOSPITALS)


@pytest.fixture(scope="module")
def rows(folder):
    return rows_of(folder)


@pytest.fixture(scope="module")
def tiles(folder, rows):
    return np.stack([np.asarray(Image.open(folder / row["image"])) for row in rows])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return synthesis.make("histology", tmp_path_factory.mktemp("histology") / "small", **SMALL)


def test_tiles_are_8_bit_rgb_where_the_table_says(folder, rows, tiles):
    assert tiles.shape == (360, 48, 48, 3) and tiles.dtype == np.uint8
    assert list(rows[0]) == ["image", "label", "group", "site", "region"]
    for row in rows:
        site, label, name = row["image"].split("/")
        assert (site, label) == (row["site"], row["label"]) and name.startswith(row["group"] + "_")
    pictures = {p.relative_to(folder).as_posix() for p in folder.rglob("*.png")}
    assert pictures == {row["image"] for row in rows} | {"contact_sheet.png"}


def test_every_hospital_has_its_number_of_tiles_and_balanced_classes(rows):
    assert Counter(r["site"] for r in rows) == {f"hospital_{k + 1}": n for k, n in enumerate(HOSPITALS)}
    assert set(Counter((r["site"], r["label"]) for r in rows).values()) == {30}
    assert {r["region"] for r in rows} == {f"region_{k}" for k in range(1, 5)}
    assert len({(r["site"], r["region"]) for r in rows}) == 4


def test_a_group_is_a_slide_of_one_hospital_and_one_class(rows):
    assert all(len(homes) == 1 for homes in homes_of(rows).values())
    sizes = Counter(r["group"] for r in rows)
    last = {group for group in sizes if group[:-2] + f"{int(group[-2:]) + 1:02d}" not in sizes}
    assert {n for group, n in sizes.items() if group not in last} == {3, 4, 5, 6}
    assert all(1 <= sizes[group] <= 6 for group in last)


def homes_of(rows):
    homes = {}
    for row in rows:
        homes.setdefault(row["group"], set()).add((row["site"], row["label"], row["region"]))
    return homes


@settings(max_examples=30, deadline=None)
@given(
    hospitals=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    slides=st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1])),
    classes=st.sampled_from([CLASSES, CLASSES[1:], CLASSES[::-1]]),
    skew=st.sampled_from([math.inf, 100.0, 1.0, 0.05]),
)
def test_a_plan_has_every_tile_once_and_whole_slides(hospitals, slides, classes, skew):
    tiles = histology.plan(hospitals, slides, classes, skew, 3)
    assert len(set(tiles)) == len(tiles)
    assert Counter(t.hospital for t in tiles) == dict(enumerate(hospitals))
    of_slide = Counter(t[:3] for t in tiles)
    for (hospital, kind, slide), n in of_slide.items():
        is_last = (hospital, kind, slide + 1) not in of_slide
        assert n <= slides[1] and (is_last or n >= slides[0])
    counts = np.zeros((len(hospitals), len(classes)), int)
    np.add.at(counts, ([t.hospital for t in tiles], [t.kind for t in tiles]), 1)
    if skew == math.inf:
        assert (np.ptp(counts, 1) <= 1).all()


def test_a_small_skew_gives_hospitals_of_one_class():
    tiles = histology.plan([200] * 30, (3, 6), CLASSES, 0.05, 0)
    largest = [max(Counter(t.kind for t in tiles if t.hospital == k).values()) / 200 for k in range(30)]
    # Dirichlet(0.05) on 3 classes: E[p^2] = (a + 1) / (3 (3a + 1)) each, so E[sum p^2] = 1.05 / 1.15 <= E[max p]
    assert np.mean(largest) > 1.05 / 1.15 - 0.05
    mixed = histology.plan([200] * 30, (3, 6), CLASSES, 1000.0, 0)
    assert max(Counter((t.hospital, t.kind) for t in mixed).values()) < 200 * 0.5


def test_the_same_options_give_the_same_bytes(small, tmp_path):
    again = synthesis.make("histology", tmp_path / "again", **SMALL)
    assert kept(again) == kept(small)
    other = kept(synthesis.make("histology", tmp_path / "other", **SMALL, seed=1))
    shared = [name for name in kept(small) if name.startswith("hospital_1/") and other.get(name) == kept(small)[name]]
    assert shared == []


def test_no_two_tiles_are_alike(tiles):
    assert len({tile.tobytes() for tile in tiles}) == len(tiles)
    flat = tiles.reshape(len(tiles), -1).astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    assert np.sort(flat @ flat.T - 2 * np.eye(len(flat)), None)[-1] < 0.85  # nor nearly


def test_a_tile_does_not_depend_on_the_others(small, tmp_path):
    fewer = synthesis.make("histology", tmp_path / "fewer", size=32, hospitals=(3, 1), classes=CLASSES[::-1])
    same = [r["image"] for r in rows_of(fewer) if kept(small).get(r["image"]) == (fewer / r["image"]).read_bytes()]
    assert {r["image"] for r in rows_of(fewer)} & set(kept(small)) == set(same) and len(same) >= 3


def test_a_stopped_output_is_completed_and_a_whole_one_left_alone(small, tmp_path, monkeypatch):
    target, left = tmp_path / "data", iter(range(5))
    real, stopping = histology.draw, lambda *given: (next(left), real(*given))[1]
    monkeypatch.setattr(histology, "draw", stopping)
    with pytest.raises(StopIteration):
        synthesis.make("histology", target, **SMALL)
    found = kept(target)
    assert len([name for name in found if name.endswith(".png")]) == 5 and "metadata.csv" not in found
    monkeypatch.undo()
    assert kept(synthesis.make("histology", target, **SMALL)) == kept(small)
    monkeypatch.setattr(histology, "draw", stopping)  # would stop at once
    synthesis.make("histology", target, **SMALL)


def test_other_content_is_refused(small, tmp_path):
    with pytest.raises(UserError, match="holds a data set of other options; name a new or empty folder"):
        synthesis.make("histology", small, **SMALL, seed=1)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="holds other files; name a new or empty folder"):
        synthesis.make("histology", tmp_path, **SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written"):
        synthesis.make("histology", tmp_path / "file", **SMALL)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 16}, "synthesis.size: 16 given"),
        ({"size": 64.5}, "synthesis.size: 64.5 given, an integer"),
        ({"hospitals": ()}, "synthesis.hospitals: () given"),
        ({"hospitals": (5, 0)}, "synthesis.hospitals: hospital 2: 0 given"),
        ({"slides": (3,)}, "synthesis.slides: (3,) given, least and greatest"),
        ({"slides": (0, 6)}, "synthesis.slides: least: 0 given"),
        ({"slides": (4, 3)}, "synthesis.slides: greatest: 3 given"),
        ({"classes": ("benign", "squamos")}, "unknown name 'squamos'; did you mean 'squamous'?"),
        ({"classes": ("benign",)}, "synthesis.classes: ('benign',) given, at least two"),
        ({"classes": ("benign", "benign")}, "at least two, each once"),
        ({"skew": 0.0}, "synthesis.skew: 0.0 given"),
        ({"skew": math.nan}, "synthesis.skew: nan given"),
        ({"stain": -0.1}, "synthesis.stain: -0.1 given"),
        ({"stain": 3}, "synthesis.stain: 3 given"),
        ({"regions": 0}, "synthesis.regions: 0 given"),
        ({"seed": -1}, "synthesis.seed: -1 given"),
        ({"stian": 1.0}, "unknown option 'stian'; did you mean 'stain'?"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        synthesis.make("histology", tmp_path / "new", **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_the_folder_is_what_data_reads(small):
    options = {"target": "label", "channels": "rgb", "size": (32, 32), "patient_column": "group", "test_share": 0.0}
    read = data.make("images2d", root=str(small), **options)
    assert read.sites == ("hospital_1", "hospital_2") and read.classes == tuple(sorted(CLASSES))
    assert len(read.arrays["x"]) == 12 and set(read.patient_ids) == {r["group"] for r in rows_of(small)}
    assert read.about["synthetic"] is True and "procedural" in read.about["generator"]
    first = np.asarray(Image.open(small / read.case_ids[0])) / 255
    np.testing.assert_allclose(read.arrays["x"][0], first, atol=1e-6)


def test_facts_of_the_generator_are_strict_json(small, tmp_path):
    def refuse(name):
        raise AssertionError(name)

    facts = json.loads((small / "generator.json").read_text(), parse_constant=refuse)
    assert facts["synthetic"] is True and facts["skew"] == "balanced" and facts["hospitals"] == [7, 5]
    for stain in facts["stain_values"].values():
        assert len(stain["haematoxylin"]) == 3 and max(stain["light"]) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_png_is_decoded_to_its_pixels(height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    picture = Image.open(io.BytesIO(png.encode(pixels)))
    picture.verify()  # every check sum
    picture = Image.open(io.BytesIO(png.encode(pixels)))
    assert (picture.format, picture.mode) == ("PNG", "RGB")
    np.testing.assert_array_equal(np.asarray(picture), pixels)


@pytest.mark.parametrize(
    "shape, kind", [((4, 4), np.uint8), ((4, 4, 4), np.uint8), ((4, 4, 3), float), ((0, 4, 3), np.uint8)]
)
def test_a_png_of_anything_else_is_refused(shape, kind):
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\] expected"):
        png.encode(np.zeros(shape, kind))


def test_beer_and_lambert():
    """By hand: amounts 0.5 and 0.25 before light of 0.9 are 255 * 0.9 * 10^-(sum of the densities)."""
    vectors = np.array([[0.6, 0.7, 0.3], [0.1, 0.9, 0.2]])
    stain = histology_stain.Stain(vectors, np.full(3, 0.9), blur=0.0, noise=0.0)
    seen = histology_stain.scan(np.random.default_rng(0), stain, np.full((2, 2), 0.5), np.full((2, 2), 0.25), 1.0)
    density = [0.5 * 0.6 + 0.25 * 0.1, 0.5 * 0.7 + 0.25 * 0.9, 0.5 * 0.3 + 0.25 * 0.2]  # 0.325, 0.575, 0.2
    assert seen.dtype == np.uint8 and (seen == np.rint([229.5 * 10**-d for d in density])).all()


def test_without_differences_every_hospital_has_the_textbook_stain():
    alike = [histology_stain.hospital(np.random.default_rng(seed), 0.0) for seed in (1, 2)]
    for stain in alike:
        unit = stain.vectors / np.linalg.norm(stain.vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(unit, [[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]], atol=0.005)
    assert str(alike[0]) == str(alike[1])
    far = [
        np.ptp([histology_stain.hospital(np.random.default_rng(s), d).vectors for s in range(20)], 0) for d in (0.5, 1)
    ]
    assert (far[1] > 1.3 * far[0]).all() and (far[0] > 0).all()


@pytest.mark.parametrize("size", [48, 64, 160])
def test_a_nucleus_covers_its_area_at_its_place_in_any_size(size):
    where = histology_fields.grid(size, 64.0)
    one = histology_nuclei.Nuclei(*(np.array([v]) for v in (30.3, 33.1, 8.0, 5.0, 0.7, 1.0, 0.0)))
    none = histology_nuclei.Nuclei(*(column[:0] for column in one))
    (_, cover), (_, empty) = histology_nuclei.paint(where, [one, none], np.zeros((size, size), np.float32))
    assert cover.sum() * where.pixel**2 == pytest.approx(np.pi * 8 * 5, rel=0.02) and not empty.any()
    right, down = (float((cover * axis).sum() / cover.sum()) for axis in (where.x, where.y))
    assert (right, down) == (pytest.approx(30.3, abs=0.05), pytest.approx(33.1, abs=0.05))


def test_points_kept_apart():
    points = np.random.default_rng(0).uniform(0, 30, (80, 2))
    keep = histology_fields.apart(points, 4.0, points[:1] + 50)
    away = np.hypot(*(points[:, None] - points[keep]).transpose(2, 0, 1)) + 9 * (points[:, None] == points[keep]).all(
        -1
    )
    assert away[keep].min() > 4.0 and away[~keep].min(1).max() <= 4.0  # none too near; none left out without a reason
    assert not histology_fields.apart(points, 4.0, points).any()


def accuracy(features, target, groups):
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, C=10))
    return cross_val_score(model, features, target, groups=groups, cv=GroupKFold(4)).mean()


def structure(tile):
    """Features that a pathologist could name; the threshold between nuclei and the rest is the tile's own."""
    density = -np.log10(np.maximum(tile.astype(float), 4) / 255)
    white, red = density.sum(-1) < 0.25, density[..., 0]  # haematoxylin takes red away, eosin does not
    nuclei = red > np.percentile(red, [20, 95]).mean()
    away = ndimage.distance_transform_edt(~white) if white.any() else np.full(white.shape, 99.0)
    rings = [(away > low) & (away <= high) for low, high in ((0, 2), (2, 5), (5, 10), (10, 100))]
    around = [nuclei[ring].mean() if ring.any() else 0.0 for ring in rings]
    sizes = [ndimage.binary_opening(nuclei, iterations=n).mean() for n in (1, 2)]
    depth = ndimage.distance_transform_edt(nuclei)
    air = ndimage.distance_transform_edt(white).max()
    return [
        white.mean(),
        nuclei.mean(),
        *sizes,
        sizes[1] / nuclei.mean(),
        depth[nuclei].mean(),
        depth.max(),
        *around,
        air,
    ]


def test_classes_differ_in_structure_and_not_in_colour_hospitals_in_colour_and_not_in_structure(rows, tiles):
    label, site, group = (np.array([r[c] for r in rows]) for c in ("label", "site", "group"))
    colour, features = tiles.mean((1, 2)), np.array([structure(tile) for tile in tiles])
    found = {
        "class of colour": accuracy(colour, label, group),
        "class of structure": accuracy(features, label, group),
        "hospital of colour": accuracy(colour, site, group),
        "hospital of structure": accuracy(features, site, group),
    }
    assert found["class of colour"] < 0.72, found
    assert found["class of structure"] > 0.78, found
    assert found["class of structure"] > found["class of colour"] + 0.12, found
    assert found["hospital of colour"] > 0.55, found  # chance: 0.25
    assert found["hospital of structure"] < 0.50, found


def test_stain_of_hospitals_is_measured_on_their_tiles(folder, rows, tiles):
    """Glass has the colour of the hospital's light."""
    facts = json.loads((folder / "generator.json").read_text())["stain_values"]
    for site, stain in facts.items():
        own = tiles[[r["site"] == site and r["label"] == "adenocarcinoma" for r in rows]]
        brightest = np.percentile(own.reshape(-1, 3), 99, axis=0) / 255
        np.testing.assert_allclose(brightest, stain["light"], atol=0.04)


def test_amounts_are_finite_and_not_negative():
    where = histology_fields.grid(32, 96.0)
    for label in histology_tissue.TISSUES:
        for seed in range(6):
            random = np.random.default_rng(seed)
            slide = histology_stroma.slide(random)
            for amount in histology_tissue.amounts(random, where, slide, label):
                assert np.isfinite(amount).all() and amount.min() >= 0
