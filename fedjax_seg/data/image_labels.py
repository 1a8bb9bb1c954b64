"""Labels of whole images: their numbers, and names that were probably meant to be one."""

from collections.abc import Sequence

import numpy as np

from fedjax_seg.data.image_table import Row
from fedjax_seg.data.partition import by_value

_SHORT = 4  # MSS and MSI are two labels


def numbered(rows: Sequence[Row], classes: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray, list[str]]:
    """The names of the labels in order (given, or sorted), int32 [N] labels, and a fault per line or folder."""
    names = tuple(classes) or by_value([r.label for r in rows])[0]
    strange = dict.fromkeys(
        f"line {r.line}: {r.image}: label {r.label!r}" if r.line else f"{r.image.rpartition('/')[0]}: label {r.label!r}"
        for r in rows
        if r.label and r.label not in names
    )
    faults = [f"{text} found, one of {', '.join(names)} expected (data.classes)" for text in strange]
    number = {name: n for n, name in enumerate(names)}
    return names, np.array([number.get(r.label, 0) for r in rows], np.int32), faults


def twins(rows: Sequence[Row], site_column: str, classes: Sequence[str]) -> list[str]:
    """Faults: two labels that differ in case or separators only, or by one letter where no site has both.

    Args:
      rows: of all sites.
      site_column: whose cells name the sites; '' = letters are not compared.
      classes: labels that are named here are what they are.
    """
    at: dict[str, dict[str, int]] = {}
    for r in rows:
        own, site = at.setdefault(r.label, {}), r.cells[site_column] if site_column else ""
        own[site] = own.get(site, 0) + 1
    names = sorted((n for n in at if n), key=lambda n: (len(at[n]), sum(at[n].values()), n))
    faults = []
    for i, rare in enumerate(names):
        for usual in names[i + 1 :]:
            if rare in classes and usual in classes:
                continue
            how = ""
            if _plain(rare) == _plain(usual):
                how = "in case or separators only"
            elif site_column and len(at[rare]) == 1 and not set(at[rare]) & set(at[usual]) and _one_slip(rare, usual):
                how = "by one letter, and no site has both"
            if how:
                faults.append(
                    f"labels {rare!r} ({_places(at[rare])}) and {usual!r} ({_places(at[usual])}) differ {how};"
                    " rename one, or name both in data.classes"
                )
    return faults


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c not in " _-.")


def _one_slip(a: str, b: str) -> bool:
    """One letter more, less or other, or two neighbours exchanged; numbers are no slips."""
    a, b = a.casefold(), b.casefold()
    if min(len(a), len(b)) < _SHORT:
        return False
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    if any(c.isdigit() for c in a + b):
        return False
    return max(len(a), len(b)) == 1 or (len(a) == 2 and a == b[::-1])


def _places(at: dict[str, int]) -> str:
    images = f"{sum(at.values())} images"
    sites = [site for site in at if site]
    if not sites:
        return images
    more = ", ..." if len(sites) > 3 else ""
    return f"{images} at {', '.join(sites[:3])}{more}"
