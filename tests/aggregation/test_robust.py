"""Robust rules against numpy, scipy and cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.spatial.distance
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.aggregation import make
from fedjax_seg.aggregation.robust import comparators, krum_order, sort_rows
from fedjax_seg.core.checks import UserError

LINE = jnp.asarray([[0.0], [1.0], [3.0], [7.0], [100.0]])


@st.composite
def masked_rows(draw, clients=7):
    """Rows with many equal values, and who is present (somebody)."""
    seed = draw(st.integers(0, 2**31 - 1))
    present = draw(st.lists(st.booleans(), min_size=clients, max_size=clients).filter(any))
    x = np.random.default_rng(seed).integers(-4, 5, size=(clients, 6)).astype(np.float32)
    return x * np.asarray(present)[:, None], np.asarray(present)


def lower_median(rows):
    return np.sort(rows, axis=0)[(len(rows) - 1) // 2]


RULES = [
    ("median", {}, lower_median),
    ("median", {"tie": "mean"}, lambda rows: np.median(rows, axis=0)),
    *(
        ("trimmed_mean", {"alpha": alpha}, lambda rows, alpha=alpha: scipy.stats.trim_mean(rows, alpha, axis=0))
        for alpha in (0.0, 0.25, 0.375)
    ),
]


@pytest.mark.parametrize(("name", "options", "expected"), RULES)
def test_coordinate_rules_equal_numpy_and_scipy_on_those_present(aggregate, name, options, expected):
    aggregator = make(name, **options)

    @settings(deadline=None, max_examples=40)
    @given(masked_rows())
    def check(case):
        x, present = case
        np.testing.assert_allclose(
            aggregate(aggregator, x, present=present)[0], expected(x[present]), rtol=1e-6, atol=1e-6
        )

    check()


def test_at_four_clients_a_quarter_trimmed_is_the_median_and_torch_takes_the_second_smallest(aggregate):
    x = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    median = np.median(x, axis=0)
    np.testing.assert_allclose(aggregate(make("trimmed_mean"), x)[0], median, rtol=1e-5)
    np.testing.assert_allclose(aggregate(make("median", tie="mean"), x)[0], median, rtol=1e-5)
    np.testing.assert_array_equal(aggregate(make("median"), x)[0], np.partition(x, 1, axis=0)[1])


def test_alpha_is_read_as_it_is_written(aggregate):
    """.29 * 100 is 28.999999999999996 in binary; 29 of 0^3 ... 99^3 are to go on each side."""
    x = jnp.arange(100.0)[:, None] ** 3
    expected = np.mean(np.arange(29.0, 71.0) ** 3)
    np.testing.assert_allclose(aggregate(make("trimmed_mean", alpha=0.29), x)[0], [expected], rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17, 33, 65])
def test_rows_are_sorted_for_any_number_of_clients(rows):
    x = np.random.default_rng(rows).normal(size=(rows, 30)).astype(np.float32)
    np.testing.assert_array_equal(np.stack(sort_rows(jnp.asarray(x))), np.sort(x, axis=0))


@pytest.mark.parametrize("rows", range(1, 13))
def test_the_network_sorts_all_zero_one_inputs(rows):
    """The 0-1 principle (Knuth, 5.3.4): a network that sorts those sorts everything."""
    x = ((np.arange(2**rows)[None, :] >> np.arange(rows)[:, None]) & 1).astype(np.int8)
    expected = np.sort(x, axis=0)
    for low, high in comparators(rows):
        x[low], x[high] = np.minimum(x[low], x[high]), np.maximum(x[low], x[high])
    np.testing.assert_array_equal(x, expected)


def summed_distance(v, x, w):
    return np.sum(w * np.linalg.norm(x - v, axis=1))


@pytest.mark.parametrize("weighted", [False, True])
def test_geometric_median_is_the_minimum_that_scipy_finds(aggregate, weighted):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(6, 3)), 50 + rng.normal(size=(2, 3))])  # two far away
    n = np.asarray([1.0, 2.0, 3.0, 1.0, 5.0, 1.0, 2.0, 1.0])
    w = n if weighted else np.ones(8)
    found = scipy.optimize.minimize(
        summed_distance, np.median(x, axis=0), (x, w), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    ).x
    with jax.enable_x64(True):
        run = lambda steps: aggregate(
            make("geometric_median", steps=steps, weighted=weighted), jnp.asarray(x), weights=n
        )[0]
        np.testing.assert_allclose(run(3000), found, rtol=1e-5, atol=1e-5)
        ten = summed_distance(run(10), x, w)
    assert ten <= 1.02 * summed_distance(found, x, w) < summed_distance(np.average(x, axis=0, weights=w), x, w)


def test_one_weiszfeld_step_by_hand(aggregate):
    """From the mean (0, 1) of (-3, 0), (3, 0), (0, 3): distances sqrt 10, sqrt 10, 2."""
    x = jnp.asarray([[-3.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    expected = [0, 3 * 0.5 / (0.5 + 2 / np.sqrt(10))]
    np.testing.assert_allclose(aggregate(make("geometric_median", steps=1), x)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_wide_smoothing_gives_the_mean(aggregate):
    np.testing.assert_allclose(aggregate(make("geometric_median", eps=1e4), LINE)[0], [22.2], rtol=1e-5)


def test_krum_by_hand(aggregate):
    """K=5, f=1, two neighbours: scores of 0, 1, 3, 7 are 1+9, 1+4, 4+9, 16+36."""
    assert aggregate(make("krum", f=1), LINE)[0] == 1
    assert aggregate(make("multi_krum", f=1, m=2), LINE)[0] == 0.5
    np.testing.assert_allclose(aggregate(make("multi_krum", f=1), LINE)[0], [2.75], rtol=1e-6)  # all but the 100
    # without the client at 1 (K=4, one neighbour): 0 and 3 tie at 9; 3 is nearer to all together (9 + 16 + 97^2)
    assert aggregate(make("krum", f=1), LINE * jnp.asarray([[1], [0], [1], [1], [1]]),
                     present=[True, False, True, True, True])[0] == 3  # fmt: skip


def test_krum_scores_equal_scipy_distances():
    x = np.random.default_rng(2).normal(size=(9, 5))
    distance = scipy.spatial.distance.cdist(x, x, "sqeuclidean")
    for f in (0, 1, 2, 3):
        scores = np.sort(distance, axis=1)[:, 1 : 9 - f - 2 + 1].sum(axis=1)
        np.testing.assert_array_equal(krum_order(jnp.asarray(x @ x.T), jnp.ones(9, bool), f), np.argsort(scores))


@pytest.mark.parametrize("present", [[True, False, False, False], [True, True, False, False]])
def test_krum_of_one_or_two_clients_is_one_of_them(aggregate, present):
    x = jnp.asarray([[5.0], [6.0], [0.0], [0.0]])
    assert aggregate(make("krum", f=1), x, present=present)[0] == 5


def test_one_bad_client_moves_no_robust_rule(aggregate):
    x = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    x[4] = 1e5
    for name in ("median", "trimmed_mean", "geometric_median", "krum", "multi_krum"):
        assert np.max(np.abs(aggregate(make(name), jnp.asarray(x))[0])) < 4, name


BAD = [
    ("median", {"tie": "upper"}),
    ("median", {"of": "gradients"}),
    ("trimmed_mean", {"alpha": 0.5}),
    ("geometric_median", {"steps": 0}),
    ("geometric_median", {"eps": 0.0}),
    ("geometric_median", {"per": "coordinate"}),
    ("krum", {"f": -1}),
    ("krum", {"f": 1.5}),
    ("multi_krum", {"m": 0}),
]


@pytest.mark.parametrize(("name", "options"), BAD)
def test_bad_options_are_one_clear_line(name, options):
    with pytest.raises(UserError, match=r"given, .*expected") as error:
        make(name, **options)
    assert "\n" not in str(error.value)


def test_a_cohort_too_small_for_krum_is_refused_when_the_round_is_built(aggregate_inside):
    with pytest.raises(UserError, match="a cohort of 5 found, at least 6 clients expected for f=3"):
        jax.eval_shape(lambda x: aggregate_inside(make("krum", f=3), x), LINE)
