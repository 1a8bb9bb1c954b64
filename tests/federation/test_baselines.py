"""Protocols as rearrangements of the data: who trains, who is tested, and nothing in both."""

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import federated
from fedjax_seg.federation import baselines

SITES = ("north", "east", "south")
SITE_OF = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], np.int32)


def data():
    """Twelve cases of three sites, two folds: even and odd cases of every site."""
    everyone = [np.flatnonzero(k == SITE_OF) for k in range(3)]
    halves = [tuple(p[p % 2 == odd] for p in everyone) for odd in (0, 1)]
    splits = tuple(federated.Split(f"fold{f}", halves[1 - f], halves[f]) for f in (0, 1))
    ids = tuple(f"case{i}" for i in range(12))
    arrays = {"x": np.zeros((12, 2), np.float32), "y": np.zeros(12, np.int32)}
    return federated.FederatedData(arrays, ids, ids, SITES, SITE_OF, splits, ("no", "yes"))


def listed(parts):
    return [p.tolist() for p in parts]


def test_federated_is_the_data_itself():
    given = data()
    assert baselines.arrange(given, "federated") is given


def test_centralised_trains_one_pooled_client_and_tests_per_site():
    pooled = baselines.arrange(data(), "centralised")
    assert pooled.sites == (*SITES, "pooled_training")
    first, second = pooled.splits
    assert listed(first.train) == [[], [], [], [1, 3, 5, 7, 9, 11]]
    assert listed(first.test) == [[0, 2], [4, 6], [8, 10], []]
    assert listed(second.train) == [[], [], [], [0, 2, 4, 6, 8, 10]]
    assert listed(second.test) == [[1, 3], [5], [7, 9, 11], []]


def test_local_is_a_model_per_site_and_fold_on_its_own_cases():
    local = baselines.arrange(data(), "local")
    assert [s.name for s in local.splits] == [f"fold{f}_{site}" for f in (0, 1) for site in SITES]
    assert listed(local.splits[1].train) == [[], [5], []]
    assert listed(local.splits[1].test) == [[], [4, 6], []]
    assert listed(local.splits[5].train) == [[], [], [8, 10]]
    assert listed(local.splits[5].test) == [[], [], [7, 9, 11]]


def test_cross_site_trains_on_all_of_one_site_and_tests_on_all_of_the_others():
    crossed = baselines.arrange(data(), "cross_site")
    assert [s.name for s in crossed.splits] == ["train_north", "train_east", "train_south"]
    assert listed(crossed.splits[0].train) == [[0, 1, 2, 3], [], []]
    assert listed(crossed.splits[0].test) == [[], [4, 5, 6], [7, 8, 9, 10, 11]]
    assert listed(crossed.splits[2].test) == [[0, 1, 2, 3], [4, 5, 6], []]


@pytest.mark.parametrize("protocol", baselines.PROTOCOLS)
def test_no_case_trains_and_is_tested_and_indices_stay_integers(protocol):
    arranged = baselines.arrange(data(), protocol)
    federated.validate(arranged)
    for split in arranged.splits:
        assert len(split.train) == len(split.test) == len(arranged.sites)
        for part in (*split.train, *split.test):
            assert np.issubdtype(part.dtype, np.integer)
        train, test = np.concatenate(split.train), np.concatenate(split.test)
        assert not set(train) & set(test) and len(train) and len(test)
        for k, cases in enumerate(split.test):
            assert np.all(SITE_OF[cases] == k)
    index, sizes = federated.padded_plan(arranged.splits, "train")
    assert index.dtype == np.int32 and sizes.sum() == sum(len(p) for s in arranged.splits for p in s.train)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(UserError, match="protocol: 'centralized' given, one of 'federated', 'centralised'"):
        baselines.arrange(data(), "centralized")
