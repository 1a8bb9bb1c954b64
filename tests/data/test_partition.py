"""Partitions and splits by patient: hand-made tables, the closed form of the Dirichlet, and clients too small."""

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import partition
from fedjax_seg.data.partition import ASIDE, TEST, TRAIN


@pytest.mark.parametrize(
    "values, names, clients",
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["10", "2", "1", "2"], ("1", "2", "10"), [2, 1, 0, 1]),
        (["10", "2", "x"], ("10", "2", "x"), [0, 1, 2]),
    ],
)
def test_a_client_per_value(values, names, clients):
    found, of = partition.by_value(values)
    assert found == names and of.tolist() == clients


def test_iid_deals_out_everybody_evenly():
    of = partition.iid(17, 5, seed=3)
    assert sorted(np.bincount(of, minlength=5)) == [3, 3, 3, 4, 4]
    assert np.array_equal(of, partition.iid(17, 5, seed=3)) and not np.array_equal(of, partition.iid(17, 5, seed=4))


def test_by_order_gives_the_smallest_to_the_first_client():
    assert partition.by_order(np.array([5.0, 1, 9, 3, 7]), 2).tolist() == [0, 0, 1, 0, 1]


def test_thirds():
    assert partition.thirds(np.array([9, 1, 2, 3, 4, 5, 6, 7, 8])).tolist() == [2, 0, 0, 0, 1, 1, 1, 2, 2]
    assert partition.thirds(np.zeros(4)).tolist() == [0] * 4


def test_a_large_alpha_is_the_same_mixture_everywhere():
    labels = np.repeat([0, 1, 2], [300, 90, 30])
    of = partition.dirichlet(labels, 3, alpha=1e8, seed=0)
    for label, share in ((0, 100), (1, 30), (2, 10)):
        assert np.bincount(of[labels == label], minlength=3).tolist() == [share] * 3


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_the_skew_is_that_of_the_dirichlet(alpha):
    # E[sum p^2] = (alpha + 1) / (K alpha + 1), and Var[p_k] = (1/K)(1 - 1/K) / (K alpha + 1)
    clients, units = 4, 2000
    draws = [
        np.bincount(partition.dirichlet(np.zeros(units, int), clients, alpha=alpha, seed=s, min_units=0), minlength=4)
        for s in range(400)
    ]
    shares = np.array(draws) / units
    assert np.mean((shares**2).sum(1)) == pytest.approx((alpha + 1) / (clients * alpha + 1), abs=0.03)
    assert shares.mean(0) == pytest.approx(np.full(clients, 1 / clients), abs=0.07)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_the_sizes_of_a_quantity_skew_are_those_of_the_dirichlet(alpha):
    # E[sum p^2] as above; the smallest client shrinks as alpha does
    draws = [
        np.bincount(partition.quantity(2000, 4, alpha=alpha, seed=s, min_units=0), minlength=4) for s in range(400)
    ]
    shares = np.array(draws) / 2000
    assert np.mean((shares**2).sum(1)) == pytest.approx((alpha + 1) / (4 * alpha + 1), abs=0.03)
    assert {int(sizes.sum()) for sizes in draws} == {2000}


def test_quantity_keeps_the_least_size():
    sizes = [np.bincount(partition.quantity(60, 4, alpha=0.3, seed=s, min_units=5), minlength=4) for s in range(20)]
    assert min(map(min, sizes)) >= 5 and max(map(max, sizes)) > 30


def test_an_alpha_beyond_floating_point_gives_a_label_to_one_client():
    labels = np.repeat([0, 1, 2], 10)
    of = partition.dirichlet(labels, 5, alpha=1e-300, seed=1, min_units=0)
    assert all(len(set(of[labels == label])) == 1 for label in range(3))


def test_dirichlet_is_seeded_and_keeps_the_least_size():
    labels = np.arange(60) % 3
    draw = lambda seed: partition.dirichlet(labels, 4, alpha=0.3, seed=seed, min_units=5)
    assert np.array_equal(draw(7), draw(7)) and not np.array_equal(draw(7), draw(8))
    assert min(np.bincount(draw(seed), minlength=4).min() for seed in range(20)) >= 5


@pytest.mark.parametrize(
    "make, text",
    [
        # flower #4377, FL-bench #110: no 0/0, no endless loop, no empty client
        (
            lambda: partition.dirichlet(np.arange(30) % 3, 10, alpha=0.05, seed=0),
            r"30 patients, 10 clients, alpha 0.05: in 100 draws .* the smallest, client \d, has 0; raise data.alpha",
        ),
        (lambda: partition.dirichlet(np.zeros(9, int), 10, alpha=1, seed=0), r"9 patients for 10 clients .* have 0"),
        (lambda: partition.dirichlet(np.zeros(9, int), 2, alpha=0, seed=0), r"data.alpha: 0 given"),
        (
            lambda: partition.quantity(30, 10, alpha=0.05, seed=0, unit="group"),
            r"quantity over 30 groups, 10 clients, alpha 0.05: .* fewer than 1 group\(s\); .* has 0; raise data.alpha",
        ),
        (lambda: partition.iid(9, 5, seed=0, min_units=2), r"9 patients for 5 clients of at least 2; .* would have 1"),
        (lambda: partition.by_order(np.arange(3), 4), r"3 patients for 4 clients .* lower data.clients"),
        (lambda: partition.iid(9, 0, seed=0), r"data.clients: 0 given"),
    ],
)
def test_a_client_too_small_is_an_error(make, text):
    with pytest.raises(UserError, match=text):
        make()


def dealt(n, test_share, aside_share, given=None, seed=0, reverse=False):
    patients = [f"p{i:02d}" for i in range(n)]
    return partition.roles(
        patients[::-1] if reverse else patients, given or {},
        test_share=test_share, aside_share=aside_share, seed=seed, site="A",
    )  # fmt: skip


@pytest.mark.parametrize(
    "n, test_share, aside_share, counts",
    [
        (10, 0.2, 0.1, (7, 2, 1)),
        (10, 0.2, 0.0, (8, 2, 0)),
        (10, 0.0, 0.5, (5, 0, 5)),
        (7, 0.5, 0.0, (3, 4, 0)),
        (2, 0.2, 0.0, (1, 1, 0)),
        (2, 0.9, 0.0, (1, 1, 0)),
        (3, 0.01, 0.01, (1, 1, 1)),
        (4, 0.5, 0.45, (1, 2, 1)),
        (1, 0.2, 0.0, (1, 0, 0)),
    ],
)
def test_shares_of_patients(n, test_share, aside_share, counts):
    found = list(dealt(n, test_share, aside_share).values())
    assert tuple(found.count(role) for role in (TRAIN, TEST, ASIDE)) == counts


def test_a_split_depends_on_the_patients_and_the_seed_only():
    assert dealt(30, 0.2, 0.1) == dealt(30, 0.2, 0.1, reverse=True)
    assert dealt(30, 0.2, 0.1) != dealt(30, 0.2, 0.1, seed=1)
    tested = [{p for p, role in dealt(30, 0.2, aside).items() if role == TEST} for aside in (0.0, 0.1, 0.6)]
    assert tested[0] == tested[1] == tested[2]


def test_given_roles_win():
    given = {"p00": TEST, "p01": "unused", "p02": TRAIN}
    found = dealt(13, 0.2, 0.1, given)
    assert {p: found[p] for p in given} == given
    drawn = [role for p, role in found.items() if p not in given]
    assert (drawn.count(TRAIN), drawn.count(TEST), drawn.count(ASIDE)) == (7, 2, 1)
    assert dealt(2, 0.2, 0.1, {"p00": TRAIN, "p01": TEST}) == {"p00": TRAIN, "p01": TEST}
