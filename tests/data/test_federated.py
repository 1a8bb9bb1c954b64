"""The cases of a federation: leaks are found, the digest sees everything that matters, plans are rectangular."""

from dataclasses import replace

import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import federated
from fedjax_seg.data.federated import Split


def parts(*lists):
    return tuple(np.array(p, np.int64) for p in lists)


def data(train=((0, 1), (4,)), test=((2,), (5, 6)), patients=None):
    ids = tuple(f"c{i}" for i in range(7))
    arrays = {"x": np.arange(14, dtype=np.float32).reshape(7, 2), "y": np.array([0, 1, 0, 1, 0, 1, 0], np.int32)}
    split = Split("fold0", parts(*train), parts(*test))
    patients = tuple(patients or ids)
    return federated.FederatedData(arrays, ids, patients, ("A", "B"), np.array([0] * 4 + [1] * 3), (split,), ("n", "y"))


def test_a_clean_split_passes():
    assert federated.validate(data()) is None
    assert federated.validate(data(test=((), ()))) is None  # nothing to test is no leak


@pytest.mark.parametrize(
    "options, text",
    [
        ({"train": ((), ())}, "data: split 'fold0' has no training case at any site"),
        ({"train": ((0, 0), (4,))}, "data: split 'fold0' lists a case twice"),
        ({"train": ((0, 4), (4,))}, "data: split 'fold0' lists a case twice"),
        ({"test": ((2,), (2, 6))}, "data: split 'fold0' lists a case twice"),
        ({"train": ((0, 1), (5,))}, r"data: patient 'c5' is in training and test of split 'fold0' \(1 such patients\)"),
        ({"patients": ["p", "q", "p", "r", "s", "s", "t"]}, r"patient 'p' .* \(2 such patients\); split by patient"),
    ],
)
def test_leaks_and_repeats_are_one_line(options, text):
    with pytest.raises(UserError, match=text) as error:
        federated.validate(data(**options))
    assert "\n" not in str(error.value)


def test_the_digest_sees_every_number_that_decides_a_run():
    base = data()
    assert federated.digest(base) == federated.digest(data())
    x, y = base.arrays["x"].copy(), base.arrays["y"]
    x[3, 1] = np.nextafter(x[3, 1], np.float32(np.inf))
    split = base.splits[0]
    changed = [
        replace(base, arrays={"x": x, "y": y}),
        replace(base, arrays={"x": base.arrays["x"].astype(np.float64), "y": y}),
        replace(base, arrays={"x": base.arrays["x"].reshape(7, 1, 2), "y": y}),
        replace(base, arrays={"x": base.arrays["x"], "y": 1 - y}),
        replace(base, case_ids=base.case_ids[::-1]),
        replace(base, sites=("B", "A")),
        replace(base, splits=(split._replace(name="fold1"),)),
        replace(base, splits=(split._replace(train=parts((0,), (1, 4))),)),
        replace(base, splits=(split._replace(train=split.test, test=split.train),)),
        replace(base, splits=(split, split)),
    ]
    assert len({federated.digest(d) for d in [base, *changed]}) == 1 + len(changed)
    described = replace(base, about={"atlas": "other"}, summary=("a line",), files={"flow.csv": "text"})
    assert federated.digest(described) == federated.digest(base)


def test_plans_are_padded_to_the_largest_client_of_any_split():
    splits = (
        Split("f0", parts((5, 3), (), (1,)), parts((0,), (2,), (4,))),
        Split("f1", parts((0,), (6, 2, 7), ()), parts((1,), (), ())),
    )
    index, sizes = federated.padded_plan(splits, "train")
    assert index.dtype == np.int32 and sizes.dtype == np.int32
    assert index.tolist() == [[[5, 3, 0], [0, 0, 0], [1, 0, 0]], [[0, 0, 0], [6, 2, 7], [0, 0, 0]]]
    assert sizes.tolist() == [[2, 0, 1], [1, 3, 0]]
    index, sizes = federated.padded_plan(splits, "test")
    assert index.tolist() == [[[0], [2], [4]], [[1], [0], [0]]]
    assert sizes.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_plan_of_nothing_still_has_a_column():
    index, sizes = federated.padded_plan((Split("f", parts((), ()), parts((), ())),), "test")
    assert index.shape == (1, 2, 1) and sizes.tolist() == [[0, 0]]
