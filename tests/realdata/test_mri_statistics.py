"""Synthetic tumours beside 368 label maps of BraTS 2020 and the published partitions of FeTS 2022.

The maps have 128 x 128 x 128 voxels over the whole field of view of 240 x 240 x 155 mm, 4.258 mm^3 each: only so do
their tumours lie within a brain, and have the volumes that BraTS is known for (median 90 ml).
"""

import csv
from collections import Counter

import numpy as np
import pytest
from scipy import ndimage, stats

from fedjax_seg.synthesis import mri_fields, mri_lesions, mri_subjects
from fedjax_seg.synthesis.mri import PARTITIONS

pytestmark = pytest.mark.slow

STEP = 2  # every second voxel of the real maps
SIZE = (64, 64, 64)
SPACING = np.array(mri_fields.FIELD) / SIZE
N = 64


@pytest.fixture(scope="module")
def archive(real):
    path = real / "brats" / "brats20_seg_368_128.npz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in the folder of real data")
    return np.load(path)


@pytest.fixture(scope="module")
def volumes(archive):
    """ml, [368, 3]: NCR, ED, ET; as counted in the full maps."""
    return archive["voxels_l1_l2_l4"] * (np.prod(mri_fields.FIELD) / 128**3 / 1000)


@pytest.fixture(scope="module")
def laws():
    random = np.random.default_rng(1)
    drawn = [mri_lesions.volumes(random) for _ in range(2000)]
    return np.array([(v.core, v.oedema, v.rim) for v in drawn])


def _shares(v):
    whole, middle = v.sum(1), v[:, 0] + v[:, 2]
    return {
        "whole": whole,
        "core": middle / whole,
        "rim": v[:, 2] / middle,
        "NCR": v[:, 0],
        "ED": v[:, 1],
        "ET": v[:, 2],
    }


@pytest.mark.parametrize("name", ["whole", "core", "rim", "NCR", "ED", "ET"])
def test_volumes_and_shares_follow_the_real_ones(volumes, laws, name):
    a, b = _shares(volumes)[name], _shares(laws)[name]
    assert stats.ks_2samp(a, b).statistic < 0.10
    for q in (0.25, 0.5, 0.75, 0.95):
        assert np.quantile(b, q) == pytest.approx(np.quantile(a, q), rel=0.25)


def test_missing_rims_and_links_between_shares(volumes, laws):
    assert (laws[:, 2] == 0).mean() == pytest.approx((volumes[:, 2] == 0).mean(), abs=0.02)
    a, b = _shares(volumes), _shares(laws)
    for one, other in (("whole", "core"), ("whole", "rim"), ("core", "rim")):
        links = [stats.spearmanr(s[one], s[other]).statistic for s in (a, b)]
        assert links[1] == pytest.approx(links[0], abs=0.15)


def _shape(label):
    """Contacts (shares of a part's surface), compactness, pieces, elongation, place."""
    out = {}
    pairs = np.zeros((5, 5))
    for axis in range(3):
        area = np.prod(np.delete(SPACING, axis))
        a, b = (np.moveaxis(label, axis, 0)[s] for s in (slice(None, -1), slice(1, None)))
        for p, q in ((a, b), (b, a)):
            pairs += area * np.bincount((5 * p + q).ravel(), minlength=25).reshape(5, 5)
    np.fill_diagonal(pairs, 0)
    for part, name in ((1, "NCR"), (4, "ET")):
        if (label == part).sum() * np.prod(SPACING) > 1000 and (label == 5 - part).any():
            share = pairs[part] / pairs[part].sum()
            out |= {f"{name}-ED": share[2], f"{name}-{'ET' if part == 1 else 'NCR'}": share[5 - part]}
            out[f"{name}-none"] = share[0]
    for name, mask in (("whole", label > 0), ("middle", np.isin(label, (1, 4)))):
        surface = sum(
            np.prod(np.delete(SPACING, axis)) * np.abs(np.diff(mask.astype(np.int8), axis=axis)).sum()
            for axis in range(3)
        )
        volume = mask.sum() * np.prod(SPACING)
        # of a ball, whose surface counted in faces of voxels is 3/2 of the true one: 1
        out[f"{name}: compactness"] = 1.5 * (36 * np.pi) ** (1 / 3) * volume ** (2 / 3) / surface
        pieces, count = ndimage.label(mask, np.ones((3, 3, 3)))
        out[f"{name}: pieces"] = count
        out[f"{name}: largest piece"] = np.bincount(pieces.ravel())[1:].max() / mask.sum()
    where = np.argwhere(label > 0) * SPACING
    spread = where.std(0)
    out["length: width"], out["height: width"] = spread[1] / spread[0], spread[2] / spread[0]
    middle = where.mean(0)
    out["from the middle"], out["from the front"], out["height"] = abs(middle[0] - 119), middle[1], middle[2]
    return out


@pytest.fixture(scope="module")
def shapes(archive):
    at = mri_fields.grid(SIZE)
    ours = []
    for number in range(N):
        _, head, lesion = mri_subjects.drawn(2, 0, number, at)
        box = np.zeros(at.shape, np.uint8)
        box.reshape(-1)[head.flat] = lesion.label
        label = np.zeros(SIZE, np.uint8)
        label[at.window] = box
        ours.append(_shape(label))
    thin = archive["seg"][::4, ::STEP, ::STEP, ::STEP]
    return [_shape(m) for m in thin if m.any()], ours


# (quantity, most that the medians differ, largest Kolmogorov-Smirnov distance)
@pytest.mark.parametrize(
    "name, median, distance",
    [
        ("NCR-ET", 0.15, 0.38),
        ("NCR-ED", 0.12, 0.38),
        ("NCR-none", 0.10, 0.38),
        ("ET-NCR", 0.15, 0.38),
        ("ET-ED", 0.20, 0.38),
        ("ET-none", 0.10, 0.38),
        ("whole: compactness", 0.10, 0.38),
        ("middle: compactness", 0.10, 0.38),
        ("whole: pieces", 1.0, 0.40),
        ("whole: largest piece", 0.05, 0.38),
        ("middle: largest piece", 0.05, 0.35),
        ("length: width", 0.25, 0.30),
        ("height: width", 0.25, 0.30),
        ("from the middle", 8.0, 0.30),
        ("from the front", 12.0, 0.30),
        ("height", 10.0, 0.30),
    ],
)
def test_shapes_are_like_the_real_ones(shapes, name, median, distance):
    a, b = (np.array([s[name] for s in side if name in s]) for side in shapes)
    assert np.median(b) == pytest.approx(np.median(a), abs=median)
    assert stats.ks_2samp(a, b).statistic < distance


@pytest.mark.parametrize("name", ["1", "2"])
def test_partitions_are_the_published_ones(real, name):
    path = real / "fets" / f"partitioning_{name}.csv"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in the folder of real data")
    with path.open(newline="") as file:
        counts = Counter(int(row["Partition_ID"]) for row in csv.DictReader(file))
    assert PARTITIONS[name] == tuple(counts[k + 1] for k in range(len(counts)))
