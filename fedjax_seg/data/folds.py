"""Cross-validation folds: stratified by diagnosis within each site, synchronised across sites, by person."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data.federated import Split

Folds = dict[str, list[list[str]]]  # site -> one list of case ids per fold; also the format of a fold file


def stratified_folds(
    case_ids: Sequence[str], patient_ids: Sequence[str], labels: Sequence[int], *, folds: int, seed: int, site: str
) -> list[list[str]]:
    """Deals the persons of one site into folds, class by class, each class in seeded random order.

    The next class is dealt on from the fold where the last one ended, so that both the folds' sizes and their counts
    of every class differ by at most one person. The result depends on the seed, the site's name and its persons only:
    not on their order, nor on which other sites take part. All the cases of a person share a fold.

    Args:
      case_ids, patient_ids, labels: N each; a person has one label.
      folds: at least 2 and at most the number of persons.
      seed: at least 0.
      site: enters the random stream.

    Returns: `folds` sorted lists of case ids.
    """
    label_of = dict(zip(patient_ids, labels))
    random = np.random.default_rng([seed, *site.encode()])
    fold_of: dict[str, int] = {}
    for label in sorted(set(labels), reverse=True):
        persons = sorted(p for p, own in label_of.items() if own == label)
        for i in random.permutation(len(persons)):
            fold_of[persons[i]] = len(fold_of) % folds
    dealt: list[list[str]] = [[] for _ in range(folds)]
    for case, patient in sorted(zip(case_ids, patient_ids)):
        dealt[fold_of[patient]].append(case)
    return dealt


def read_fold_file(path: Path, folds: int) -> Folds:
    """A JSON object {site: [list of FILE_IDs per fold]}, as in the folds.json that a run saves.

    Raises: UserError where it is unreadable, of another form, or where a site has another number of folds.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise checks.UserError(f"data.fold_file: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise checks.UserError(f"data.fold_file: {path} is not JSON ({error})") from None
    form = "an object {site: [one list of FILE_IDs per fold, ...]} expected"
    if not isinstance(given, dict):
        raise checks.UserError(f"data.fold_file: {path} holds a {type(given).__name__}, {form}")
    for site, lists in given.items():
        if not isinstance(lists, list) or not all(
            isinstance(one, list) and all(isinstance(case, str) for case in one) for one in lists
        ):
            raise checks.UserError(f"data.fold_file: {path}: site {site!r} is not a list of lists of texts, {form}")
        if len(lists) != folds:
            raise checks.UserError(
                f"data.fold_file: {path}: site {site!r} has {len(lists)} folds but data.folds is {folds};"
                " set data.folds to the number in the file"
            )
    return given


def fold_file_faults(
    given: Folds, cases: Mapping[str, Sequence[str]], patient_of: Mapping[str, str], reasons: Mapping[str, str]
) -> list[str]:
    """Where a fold file does not list exactly the cohort. Sites of the file that are not used are ignored.

    Args:
      given: the file's content.
      cases: the cohort, site -> case ids.
      patient_of: case id -> person.
      reasons: case id -> why it is not in the cohort.

    Returns: one line per fault.
    """
    faults = []
    for site, own in cases.items():
        if site not in given:
            faults.append(f"site {site}: not in the fold file; add its {len(own)} FILE_IDs")
            continue
        fold_of: dict[str, int] = {}
        fold_of_patient: dict[str, int] = {}
        for fold, listed in enumerate(given[site]):
            if not listed:
                faults.append(f"site {site}: fold {fold} is empty; move FILE_IDs there")
            for case in listed:
                if case not in own:
                    why = reasons.get(case, "not a FILE_ID of this site in the table")
                    faults.append(f"{case}: in fold {fold} of {site}, but not in the cohort ({why}); remove it")
                elif case in fold_of:
                    faults.append(f"{case}: listed twice at {site} (folds {fold_of[case]} and {fold}); keep one")
                else:
                    fold_of[case] = fold
                    if fold_of_patient.setdefault(patient_of[case], fold) != fold:
                        faults.append(
                            f"{case}: fold {fold}, another case of this person is elsewhere; put them together"
                        )
        missing = (case for case in own if case not in fold_of)
        faults += [f"{case}: in the cohort, but in no fold of {site}; add it" for case in missing]
    return faults


def synchronised_splits(folds: Folds, position: Mapping[str, int]) -> tuple[Split, ...]:
    """Split i tests fold i of every site and trains on the other folds of every site.

    Args:
      folds: site -> lists of case ids, every site with the same number of folds; their order is the client order.
      position: case id -> its index in the arrays.

    Returns: splits 'fold0', 'fold1', ... with sorted index arrays.
    """
    n = len(next(iter(folds.values())))

    def index(cases: Sequence[str]) -> np.ndarray:
        return np.array(sorted(position[c] for c in cases), np.int64)

    return tuple(
        Split(
            f"fold{i}",
            tuple(index([c for j, one in enumerate(lists) if j != i for c in one]) for lists in folds.values()),
            tuple(index(lists[i]) for lists in folds.values()),
        )
        for i in range(n)
    )
