"""What the values of a label map mean. The same tumour is 4 in one year's files and 3 in the next one's."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedjax_seg.core import checks

SETTING = "data.label_scheme"


class Scheme(NamedTuple):
    """The classes of a data set and how its files write them.

    Attributes:
      name: as in SCHEMES, or 'plain'.
      values: the value in the files of class 0 (background), 1, 2, ...
      classes: their names.
      regions: (name, class ids) of unions of classes that are scored as one.
    """

    name: str
    values: tuple[int, ...]
    classes: tuple[str, ...]
    regions: tuple[tuple[str, tuple[int, ...]], ...] = ()


_TUMOUR = ("background", "NCR", "ED", "ET")
_REGIONS = (("ET", (3,)), ("TC", (1, 3)), ("WT", (1, 2, 3)))
SCHEMES = {
    # FeTS 2021/2022 and BraTS until 2022: 1 = necrotic core, 2 = oedema, 4 = enhancing tumour
    "brats2021": Scheme("brats2021", (0, 1, 2, 4), _TUMOUR, _REGIONS),
    "brats2023": Scheme("brats2023", (0, 1, 2, 3), _TUMOUR, _REGIONS),
    # after treatment: 4 = resection cavity, which is no part of the whole tumour
    "brats2024_post": Scheme("brats2024_post", (0, 1, 2, 3, 4), (*_TUMOUR, "RC"), (*_REGIONS, ("RC", (4,)))),
    # Medical Segmentation Decathlon, Task01: 1 = oedema, 2 = non-enhancing tumour, 3 = enhancing tumour
    "msd_brats": Scheme("msd_brats", (0, 2, 1, 3), _TUMOUR, _REGIONS),
}
NAMES = ("auto", *SCHEMES, "plain")


def plain(values: Iterable[int]) -> Scheme:
    """A class per value, named by it; 0 is the background.

    Raises: UserError where a value is outside 0..255 (predictions are written as uint8) or there is none but 0.
    """
    found = sorted({0, *map(int, values)})
    if found[0] < 0 or found[-1] > 255:
        raise checks.UserError(f"label values {_list(found)} found, 0 to 255 allowed")
    if found == [0]:
        raise checks.UserError("no label but 0 (background) found; at least one other value expected")
    return Scheme("plain", tuple(found), ("background", *map(str, found[1:])))


def find(
    found: Mapping[str, Collection[int]],
    asked: str = "auto",
    *,
    layout: str = "fets",
    site_of: Mapping[str, str] | None = None,
) -> Scheme:
    """The scheme of a data set: the one asked for, or with 'auto' the only one that its values allow.

    'auto' never finds brats2024_post: one stray voxel of 3 among labels 0, 1, 2, 4 would change what all values mean.

    Args:
      found: {subject or file: the values present in its label map}.
      asked: one of NAMES.
      layout: 'fets' or 'msd'; in an MSD folder the same values mean two things, so 'auto' is refused there.
      site_of: {the same names: site}, so that messages can tell sites.

    Raises:
      UserError: 'auto' and more than one scheme fits, 3 and 4 in one file, or sites written in two schemes.
      DataFaults: values that the scheme does not have, a line per file; each line tells all by itself.
    """
    checks.one_of(SETTING, asked, NAMES)
    values = set().union(*map(set, found.values()))
    if asked == "plain":
        _check(found, tuple(range(256)), "plain", "")
        return plain(values)
    if asked != "auto":
        fits = [name for name, scheme in SCHEMES.items() if values <= set(scheme.values)]
        _check(found, SCHEMES[asked].values, asked, f"; all files fit {', '.join(fits)}" if fits else "")
        return SCHEMES[asked]
    if layout == "msd":
        raise checks.UserError(
            f"{SETTING}: 'auto' cannot tell the label values {_list(values)} of an MSD folder: set msd_brats (Task01:"
            " 1 = oedema, 2 = non-enhancing tumour, 3 = enhancing tumour), brats2023 (1 = necrotic core, 2 = oedema,"
            " 3 = enhancing tumour) or plain (any other organ)"
        )
    known = set(SCHEMES["brats2024_post"].values)
    rest = {name: own for name, own in found.items() if set(own) <= known}
    strange = len(found) - len(rest)
    try:
        name = _unique(rest, site_of or {})
    except checks.UserError as error:
        _check(found, tuple(known), asked, f"; beside that, {error}" if rest else "")
        raise
    _check(found, SCHEMES[name].values, name, f"; the other {len(rest)} file(s) fit it" if strange else "")
    return SCHEMES[name]


def to_classes(labels: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Class ids, uint8, of label values (any integers, any shape). Raises: UserError at a value it does not have."""
    table = np.zeros(max(scheme.values) + 1, np.uint8)
    table[list(scheme.values)] = range(len(scheme.values))
    inside = labels.size == 0 or (labels.min() >= 0 and labels.max() < len(table))
    known = np.isin(np.arange(len(table)), scheme.values)
    if not inside or not known[labels].all():
        raise checks.UserError(f"label values {_list(np.unique(labels))} found, {_allowed(scheme.values, scheme.name)}")
    return table[labels]


def to_values(classes: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The values, uint8, that the input's files have for these class ids: the inverse of to_classes."""
    return np.array(scheme.values, np.uint8)[classes]


def _unique(found: Mapping[str, Collection[int]], site_of: Mapping[str, str]) -> str:
    values = set().union(*map(set, found.values()))
    if both := [name for name, own in found.items() if 3 in own and 4 in own]:
        some = ", ".join(both[:4]) + (", ..." if len(both) > 4 else "")
        raise checks.UserError(
            f"{SETTING}: 3 and 4 together in {len(both)} of {len(found)} files ({some}): mend them, or set"
            f" {SETTING}=brats2024_post"
        )
    if 3 in values and 4 in values:
        sides = [_who([name for name in found if value in found[name]], site_of) for value in (3, 4)]
        raise checks.UserError(
            f"{SETTING}: two schemes in one data set: value 3 without 4 (brats2023) in {sides[0]}; value 4 without 3"
            f" (brats2021) in {sides[1]}; rewrite one side, or set brats2024_post if 4 is the resection cavity"
        )
    if 4 in values:
        return "brats2021"
    if 3 in values:
        return "brats2023"
    raise checks.UserError(
        f"{SETTING}: only the values {_list(values) or 'none'} found, neither 3 nor 4: 'auto' cannot tell how enhancing"
        f" tumour is written; set one of {', '.join(SCHEMES)}, or plain where these are no BraTS labels"
    )


def _check(found: Mapping[str, Collection[int]], allowed: tuple[int, ...], name: str, hint: str) -> None:
    faults = [
        f"{file}: label values {_list(own)} found, {_allowed(allowed, name)}{hint}"
        for file, own in found.items()
        if not set(own) <= set(allowed)
    ]
    if faults:
        raise checks.DataFaults(f"{SETTING}={name}: labels that it does not have", faults)


def _allowed(values: tuple[int, ...], name: str) -> str:
    return f"0 to 255 allowed ({name})" if len(values) == 256 else f"{_list(values)} allowed ({name})"


def _who(names: list[str], site_of: Mapping[str, str], most: int = 4) -> str:
    """'2 files (a, b)', or 'sites 1, 7 (12 files: a, b, ...)'."""
    some = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    if not site_of:
        return f"{len(names)} file(s) ({some})"
    sites = list(dict.fromkeys(site_of.get(name, "?") for name in names))
    return f"site(s) {', '.join(sites)} ({len(names)} file(s): {some})"


def _list(values: Iterable[int], most: int = 8) -> str:
    ordered = sorted({int(v) for v in values})
    return ", ".join(map(str, ordered[:most])) + (f", ... ({len(ordered)} values)" if len(ordered) > most else "")
