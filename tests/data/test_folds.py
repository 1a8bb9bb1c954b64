import json

import numpy as np
import pytest

from fedjax_seg.core import checks
from fedjax_seg.data import folds


def _site(asd, hc):
    ids = [f"NYU_{i:07d}" for i in range(asd + hc)]
    return ids, [i[4:] for i in ids], [1] * asd + [0] * hc


@pytest.mark.parametrize("asd, hc", [(66, 97), (31, 19), (3, 3), (0, 7), (4, 1)])
def test_folds_are_a_partition_stratified_to_within_one(asd, hc):
    ids, persons, labels = _site(asd, hc)
    dealt = folds.stratified_folds(ids, persons, labels, folds=5, seed=3, site="NYU")
    label = dict(zip(ids, labels))
    assert sorted(c for one in dealt for c in one) == ids
    for per_fold in (
        [len(one) for one in dealt],
        [sum(label[c] == 1 for c in one) for one in dealt],
        [sum(label[c] == 0 for c in one) for one in dealt],
    ):
        assert max(per_fold) - min(per_fold) <= 1


def test_folds_depend_on_seed_and_site_but_not_on_the_order_of_rows():
    ids, persons, labels = _site(20, 20)

    def deal(seed=0, site="NYU", order=slice(None)):
        return folds.stratified_folds(ids[order], persons[order], labels[order], folds=4, seed=seed, site=site)

    assert deal() == deal(order=slice(None, None, -1))
    assert deal() != deal(seed=1)
    assert deal() != deal(site="UM")


def test_all_scans_of_a_person_share_a_fold():
    ids = [f"s{i}_{run}" for i in range(10) for run in "ab"]
    persons = [c[:-2] for c in ids]
    labels = [int(p[1:]) % 2 for p in persons]
    dealt = folds.stratified_folds(ids, persons, labels, folds=3, seed=0, site="X")
    homes = [{c[:-2] for c in one} for one in dealt]
    assert all(not (homes[i] & homes[j]) for i in range(3) for j in range(i))
    assert sorted(c for one in dealt for c in one) == sorted(ids)


def test_split_i_tests_fold_i_of_every_site_and_trains_on_the_rest():
    dealt = {"B": [["b0"], ["b1", "b2"]], "A": [["a1"], ["a0"]]}
    position = {"b0": 0, "b1": 1, "b2": 2, "a0": 3, "a1": 4}
    first, second = folds.synchronised_splits(dealt, position)
    assert (first.name, second.name) == ("fold0", "fold1")
    assert [i.tolist() for i in first.test] == [[0], [4]] and [i.tolist() for i in first.train] == [[1, 2], [3]]
    assert [i.tolist() for i in second.test] == [[1, 2], [3]] and [i.tolist() for i in second.train] == [[0], [4]]
    assert all(i.dtype == np.int64 for i in first.test)


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        ('{"NYU": {"0": []}}', "not a list of lists"),
        ('{"NYU": [[1], [2]]}', "not a list of lists of texts"),
        ('{"NYU": [["a"], ["b"], ["c"]]}', "3 folds but data.folds is 2"),
    ],
)
def test_a_fold_file_of_another_form_is_one_line(tmp_path, content, says):
    path = tmp_path / "folds.json"
    path.write_text(content)
    with pytest.raises(checks.UserError, match=says) as error:
        folds.read_fold_file(path, 2)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_fold_file_is_named(tmp_path):
    with pytest.raises(checks.UserError, match=r"nowhere\.json cannot be read"):
        folds.read_fold_file(tmp_path / "nowhere.json", 5)


def test_every_disagreement_of_a_fold_file_is_a_fault():
    cases = {"NYU": ["a", "b", "c", "d"], "UM": ["u", "v"]}
    patients = {"a": "1", "b": "2", "c": "3", "d": "3", "u": "4", "v": "5"}
    given = {"NYU": [["a", "b", "z"], ["b", "d"], ["w"]], "OTHER": [["q"], [], []]}
    faults = folds.fold_file_faults(given, cases, patients, {"z": "func_mean_fd > 0.15"})
    assert [f.split(":")[0] for f in faults] == ["z", "b", "w", "c", "site UM"]
    assert "func_mean_fd > 0.15" in faults[0] and "folds 0 and 1" in faults[1] and "no fold of NYU" in faults[3]
    assert folds.fold_file_faults({"NYU": [["c"], ["d", "a", "b"]], "UM": [["u"], ["v"]]}, cases, patients, {}) == [
        "d: fold 1, another case of this person is elsewhere; put them together"
    ]
    good = json.loads(json.dumps({"NYU": [["c", "d"], ["a", "b"]], "UM": [["u"], ["v"]]}))
    assert folds.fold_file_faults(good, cases, patients, {}) == []
    assert folds.fold_file_faults({**good, "UM": [["u", "v"], []]}, cases, patients, {}) == [
        "site UM: fold 1 is empty; move FILE_IDs there"
    ]
