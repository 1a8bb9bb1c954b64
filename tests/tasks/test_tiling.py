"""Tiled inference: where tiles lie by hand, a partition of unity, whole volumes, and what is executed and kept."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_federation import quick_jit

from fedjax_seg.core.checks import UserError
from fedjax_seg.tasks import tiling

RNG = np.random.default_rng(5)


def all_axes(extents, buffer, size, overlap=0.0, blend="uniform"):
    """(starts, weights) of every extent; one program for all of them."""
    along = jax.vmap(lambda extent: tiling.along(extent, buffer, size, overlap, blend))
    found = jax.tree.map(np.asarray, quick_jit(along)(np.array(extents, np.int32)))
    return [(s[:n].tolist(), w) for s, n, w in zip(found.starts, found.tiles, found.weights)]


@pytest.mark.parametrize(
    "extent, size, overlap, starts",
    [
        (4, 4, 0.0, [0]),
        (3, 4, 0.0, [0]),  # reaches over the end
        (8, 4, 0.0, [0, 4]),
        (10, 4, 0.0, [0, 3, 6]),
        (9, 4, 0.5, [0, 1, 3, 5]),
        (6, 4, 0.99, [0, 1, 2]),
        (240, 64, 0.0, [0, 58, 117, 176]),  # as many as the grid of FeTS: 0, 64, 128, 176
        (155, 64, 0.0, [0, 45, 91]),  # 0, 64, 91
    ],
)
def test_tiles_lie_where_a_hand_puts_them(extent, size, overlap, starts):
    assert all_axes([extent], max(extent, size) + 3, size, overlap)[0][0] == starts


@pytest.mark.parametrize(
    "size, buffer, overlap, blend",
    [
        (1, 7, 0.0, "uniform"),
        (4, 23, 0.0, "gaussian"),
        (5, 5, 0.5, "uniform"),
        (6, 31, 0.3, "uniform"),
        (9, 29, 0.6, "gaussian"),
        (11, 26, 0.99, "gaussian"),
    ],
)
def test_weights_are_a_partition_of_unity_and_no_tile_is_wasted(size, buffer, overlap, blend):
    step, voxel = max(1, math.floor(size * (1 - overlap) + 1e-9)), np.arange(buffer)
    for extent, (starts, weights) in enumerate(all_axes(range(1, buffer + 1), buffer, size, overlap, blend), 1):
        room = max(0, extent - size)
        assert starts[0] == 0 and starts[-1] == room and len(starts) == 1 + math.ceil(room / step)
        assert all(1 <= b - a <= step for a, b in itertools.pairwise(starts))
        assert not weights[len(starts) :].any() and not weights[:, extent:].any()
        np.testing.assert_allclose(weights[:, :extent].sum(0), 1, rtol=1e-6)
        for start, row in zip(starts, weights):
            np.testing.assert_array_equal(row > 0, (voxel >= start) & (voxel < min(start + size, extent)))


def run(predict, x, shape, **options):
    return np.asarray(quick_jit(lambda x, shape: tiling.tiled(predict, x, shape, **options))(x, jnp.array(shape)))


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.integers(1, 5)] * 3),
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.3, 0.75]),
    st.sampled_from(["uniform", "gaussian"]),
    st.sampled_from([1, 2]),
)
def test_what_looks_at_single_voxels_sees_the_whole_volume(space, tile, shapes, overlap, blend, at_once):
    """Also with tiles longer than the buffer; what lies behind the end of the volume has no influence."""
    predict = lambda tiles: jnp.concatenate([3 * tiles + 1, tiles[..., :1] ** 2], -1)
    options = {"tile": tile, "overlap": overlap, "blend": blend, "at_once": at_once}
    program = quick_jit(lambda x, shape: tiling.tiled(predict, x, shape, **options))
    for shape in (space, *shapes):
        shape = tuple(min(a, b) for a, b in zip(shape, space))
        inside = tuple(slice(n) for n in shape)
        x, expected = np.full((*space, 2), np.nan, np.float32), np.zeros((*space, 3), np.float32)
        x[inside] = RNG.normal(size=(*shape, 2))
        expected[inside] = np.concatenate([3 * x[inside] + 1, x[inside][..., :1] ** 2], -1)
        found = np.asarray(program(x, jnp.array(shape)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert found.dtype == np.float32


def test_blending_by_hand():
    """A prediction that is the position in the tile: starts 0 and 1, so that voxel v is v in one tile, v - 1 in the
    other."""
    predict = lambda tiles: jnp.broadcast_to(jnp.arange(4.0)[:, None], tiles.shape)
    x = np.zeros((7, 1), np.float32)
    for at_once in (1, 3):  # 3: a third tile, which counts nothing
        found = run(predict, x, (5,), tile=(4,), at_once=at_once)[:, 0]
        np.testing.assert_allclose(found, [0, 0.5, 1.5, 2.5, 3, 0, 0], atol=1e-6)
    g = np.exp(-0.5 * (np.array([-1.5, -0.5, 0.5, 1.5]) / 0.5) ** 2)
    own = [(v * g[v] + (v - 1) * g[v - 1]) / (g[v] + g[v - 1]) for v in (1, 2, 3)]
    found = run(predict, x, (5,), tile=(4,), blend="gaussian")[:, 0]
    np.testing.assert_allclose(found, [0, *own, 3, 0, 0], rtol=1e-5, atol=1e-6)
    assert abs(own[0] - 0.982) < 1e-3  # near the middle of the first tile


def test_inside_of_tiles_a_convolution_gives_what_it_gives_on_the_whole():
    def blur(x):  # [B, n, m, 1], zeros behind the edges
        wide = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        n, m = x.shape[1:3]
        return sum(wide[:, i : i + n, j : j + m] * (1 + i + 3 * j) for i in range(3) for j in range(3))

    x, shape, tile = RNG.normal(size=(30, 26, 1)).astype(np.float32), (29, 25), (12, 10)
    whole = np.asarray(quick_jit(blur)(x[None, :29, :25]))[0]
    found = run(blur, x, shape, tile=tile, overlap=0.3)[:29, :25]
    good = []
    for extent, size in zip(shape, tile):
        starts = all_axes([extent], extent, size, 0.3)[0][0]
        faces = set(starts[1:]) | {s + size - 1 for s in starts[:-1]}
        good.append(np.array([v not in faces for v in range(extent)]))
    inside = np.outer(*good)
    assert inside.mean() > 0.4 and not inside.all()
    np.testing.assert_allclose(found[inside], whole[inside], rtol=1e-5, atol=1e-5)
    assert np.abs(found - whole)[~inside].max() > 0.1  # a tile does not see beyond its faces


@pytest.mark.parametrize(
    "shape, at_once, calls",
    [((4, 4), 1, 1), ((5, 4), 1, 2), ((5, 5), 3, 2), ((16, 16), 1, 16), ((16, 16), 3, 6), ((1, 1), 1, 1)],
)
def test_a_small_volume_in_a_large_buffer_costs_its_own_tiles(shape, at_once, calls):
    seen = []

    def predict(tiles):
        jax.debug.callback(lambda: seen.append(1))
        return tiles

    run(predict, np.ones((16, 16, 1), np.float32), shape, tile=(4, 4), at_once=at_once)
    jax.effects_barrier()
    assert len(seen) == calls


def test_memory_does_not_grow_with_the_number_of_tiles():
    def temporary(overlap, buffer):
        function = lambda x, shape: tiling.tiled(lambda t: t, x, shape, tile=(8, 8, 8), overlap=overlap)
        x, shape = jax.ShapeDtypeStruct((*buffer, 2), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
        return jax.jit(function).lower(x, shape).compile().memory_analysis().temp_size_in_bytes

    few, many = (temporary(overlap, (32, 32, 32)) for overlap in (0.0, 0.8))  # 64 and 13,824 tiles
    volume, tile = 32**3 * 2 * 4, 8**3 * 2 * 4
    assert many < few + 4 * tile and many < 3 * volume


@pytest.mark.parametrize(
    "tile, overlap, blend, at_once, words",
    [
        ((), 0, "uniform", 1, r"task.tile: \(\)"),
        ((64, 0, 64), 0, "uniform", 1, "task.tile"),
        ((64, 8.0, 64), 0, "uniform", 1, "task.tile"),
        ((64,), 1, "uniform", 1, "task.overlap: 1 given"),
        ((64,), -0.1, "uniform", 1, "task.overlap"),
        ((64,), 0, "hann", 1, "task.blend: 'hann'"),
        ((64,), 0, "uniform", 0, "task.tiles_at_once"),
    ],
)
def test_bad_options_are_named(tile, overlap, blend, at_once, words):
    with pytest.raises(UserError, match=words):
        tiling.check(tile, overlap, blend, at_once)


def test_what_surrounds_a_volume_is_what_the_caller_says():
    """A tile of (6, 8) on a volume of 5 x 3 in a buffer of 5 x 7: 33 of its 48 voxels are fill."""
    x = np.full((5, 7, 2), np.nan, np.float32)
    x[:5, :3] = 1
    mean = lambda t: jnp.broadcast_to(jnp.mean(t, (1, 2), keepdims=True), t.shape)
    program = quick_jit(lambda x, s, f: tiling.tiled(mean, x, s, tile=(6, 8), fill=f))
    found = np.asarray(program(x, jnp.array([5, 3]), jnp.array([0.0, -2.0])))
    np.testing.assert_allclose(found[:5, :3, 0], 15 / 48, rtol=1e-6)
    np.testing.assert_allclose(found[:5, :3, 1], (15 - 2 * 33) / 48, rtol=1e-6)
