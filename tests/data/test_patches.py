"""Where patches come from: who is drawn how often, and whether places have the distribution that is promised."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import patches
from fedjax_seg.data.volume_preparation import grouped

KEY = (12, 4_000_000_000)
FAR = 1e-4  # the draws are fixed by their seeds: a test that passes always passes


def drawing(size=(3, 3, 3), per_case=4, sampling="uniform", background=0.0):
    return patches.Drawing(size, per_case, sampling, background)


def epoch(draw, cases, batch, number=0, key=KEY):
    """All entries of an epoch, batch by batch."""
    steps = patches.steps_per_epoch(cases, draw.per_case, batch)
    first = number * steps
    return [patches.entries(draw, cases, key, first + s, batch, number + 1) for s in range(steps)]


def marked(label):
    index, _, offsets = grouped(label)
    return patches.Marked(lambda n: int(index[n]), offsets)


def starts(draw, label, count):
    return [patches.start(draw, (*KEY, 0, n, 1), label.shape, marked(label)) for n in range(count)]


@settings(max_examples=40, deadline=None)
@given(cases=st.integers(1, 9), per_case=st.integers(1, 7), batch=st.integers(1, 12), number=st.integers(0, 3))
def test_every_case_has_its_patches_in_every_epoch(cases, per_case, batch, number):
    batches = epoch(drawing(per_case=per_case), cases, batch, number)
    assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1) and 1 <= len(batches[-1]) <= batch
    found = [e for b in batches for e in b]
    assert collections.Counter(e.row for e in found) == dict.fromkeys(range(cases), per_case)
    assert len({e.seed for e in found}) == len(found)


def test_nothing_beyond_the_last_epoch():
    draw = drawing(per_case=4)
    assert patches.entries(draw, 2, KEY, 5, 3, 2) and patches.entries(draw, 2, KEY, 6, 3, 2) == []
    assert patches.entries(draw, 2, KEY, 3, 3, 1) == [] and patches.entries(draw, 0, KEY, 0, 3, 1) == []


def test_the_order_depends_on_key_and_epoch():
    draw = drawing(per_case=10)
    flat = lambda **how: [e for b in epoch(draw, 5, 4, **how) for e in b]
    assert flat() == flat()
    assert flat() == [e for b in epoch(draw, 5, 1) for e in b]  # not on the batch size
    rows = [[e.row for e in flat(**how)] for how in ({}, {"number": 1}, {"key": (13, KEY[1])}, {"key": (12, 1)})]
    assert len({tuple(r) for r in rows}) == 4


def test_the_order_is_shuffled_evenly():
    """Of 6 entries each is first equally often, over 1,200 keys."""
    draw = drawing(per_case=3)
    first = [patches.entries(draw, 2, (k, 7), 0, 1, 1)[0].seed[3] for k in range(1200)]
    assert stats.chisquare(np.bincount(first, minlength=6)).pvalue > FAR


def test_uniform_places_are_uniform():
    label = np.zeros((6, 5, 4), np.uint8)
    found = np.array(starts(drawing(), label, 4800))
    counts = collections.Counter(map(tuple, found.tolist()))
    assert set(counts) == set(np.ndindex(4, 3, 2))
    assert stats.chisquare(list(counts.values())).pvalue > FAR


def test_foreground_centres_are_uniform_over_labelled_voxels():
    label = np.zeros((5, 6, 7), np.uint8)
    label[1:3, 2:4, 3:6], label[4, 5, 6], label[0, 0, :3] = 2, 1, 4
    found = collections.Counter(starts(drawing((1, 1, 1), sampling="foreground"), label, 4000))
    assert set(found) == set(zip(*(a.tolist() for a in np.nonzero(label))))
    assert stats.chisquare(list(found.values())).pvalue > FAR


def test_balanced_values_are_equally_likely():
    label = np.zeros((8, 8, 8), np.uint8)
    label[:4], label[7, 7, 7], label[6, 0, :2] = 2, 4, 1
    at = [label[s] for s in starts(drawing((1, 1, 1), sampling="balanced"), label, 3000)]
    values, counts = np.unique(at, return_counts=True)
    assert values.tolist() == [1, 2, 4] and stats.chisquare(counts).pvalue > FAR


def test_the_share_of_uniform_patches():
    label = np.zeros((8, 8, 8), np.uint8)
    label[0, 0, 0] = 1
    found = starts(drawing((1, 1, 1), sampling="balanced", background=0.25), label, 4000)
    elsewhere = sum(s != (0, 0, 0) for s in found)
    assert stats.binomtest(elsewhere, 4000, 0.25 * 511 / 512).pvalue > FAR


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    size=st.tuples(*[st.integers(1, 9)] * 3),
    sampling=st.sampled_from(patches.SAMPLINGS),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_patch_lies_inside_or_is_centred(shape, size, sampling, seed):
    label = np.random.default_rng(seed).integers(0, 3, shape).astype(np.uint8)
    first = patches.start(drawing(size, sampling=sampling), (seed, 1), shape, marked(label))
    for f, n, s in zip(first, shape, size):
        assert 0 <= f <= n - s if n >= s else f == -((s - n + 1) // 2)
    if sampling == "foreground" and label.any():
        assert patches.cut(label, first, size, 0).any()


def test_an_interior_voxel_is_the_centre():
    label = np.zeros((20, 20, 20), np.uint8)
    label[9, 10, 11] = 3
    assert starts(drawing((5, 4, 3), sampling="foreground"), label, 1) == [(7, 8, 10)]


def test_without_labels_places_are_uniform():
    label = np.zeros((5, 3, 3), np.uint8)
    for sampling in ("foreground", "balanced"):
        found = collections.Counter(starts(drawing(sampling=sampling), label, 600))
        assert set(found) == {(0, 0, 0), (1, 0, 0), (2, 0, 0)}
        assert stats.chisquare(list(found.values())).pvalue > FAR


@settings(max_examples=40, deadline=None)
@given(shape=st.tuples(*[st.integers(1, 6)] * 3), size=st.tuples(*[st.integers(1, 8)] * 3), data=st.data())
def test_cut_is_a_slice_of_the_padded_volume(shape, size, data):
    first = [data.draw(st.integers(1 - s, n - 1)) for s, n in zip(size, shape)]
    volume = np.random.default_rng(0).random((*shape, 2)).astype(np.float16)
    fill = np.array([3, -4], np.float16)
    around = np.stack([np.pad(volume[..., c], 8, constant_values=fill[c]) for c in range(2)], axis=-1)
    want = around[tuple(slice(8 + f, 8 + f + s) for f, s in zip(first, size))]
    got = patches.cut(volume, first, size, fill)
    assert got.dtype == np.float16 and got.base is None
    np.testing.assert_array_equal(got, want)


def test_a_batch_is_masked():
    spec = {"x": ((2, 2, 2, 1), np.dtype(np.float16)), "y": ((2, 2, 2), np.dtype(np.uint8))}
    part = {"x": np.ones((2, 2, 2, 1), np.float16), "y": np.full((2, 2, 2), 3, np.uint8)}
    batch = patches.stacked([part], spec, 3)
    assert batch["mask"].tolist() == [1, 0, 0] and batch["mask"].dtype == np.float32
    assert batch["x"].shape == (3, 2, 2, 2, 1) and batch["x"].dtype == np.float16
    assert (batch["y"][0] == 3).all() and not batch["y"][1:].any() and not batch["x"][1:].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"size": (8, 0, 8)}, "data.patch: 0 given, an integer in"),
        ({"size": (8, 8.5, 8)}, "data.patch: 8.5 given"),
        ({"size": ()}, "data.patch: () given"),
        ({"per_case": 0}, "data.patches: 0 given"),
        ({"sampling": "label"}, "data.sampling: 'label' given, one of 'foreground', 'balanced', 'uniform'"),
        ({"sampling": "balanced", "background": 1.5}, "data.background: 1.5 given"),
        ({"background": 0.5}, "data.background: 0.5 given, but data.sampling='uniform' does not read it"),
    ],
)
def test_impossible_options(change, message):
    with pytest.raises(UserError) as error:
        patches.check(drawing()._replace(**change))
    assert str(error.value).startswith(message)
