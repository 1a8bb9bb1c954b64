"""Folders as a table: a folder per class, below a folder per site or above a folder per slide, if there are such."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core import checks
from fedjax_seg.data.image_cohort import listed
from fedjax_seg.data.image_table import ImageTable, Row, is_junk
from fedjax_seg.data.raster import ENDINGS

TEMPLATES = ("class", "site/class", "class/group", "site/class/group")
_SLIDES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif")
_BY_DEPTH = {1: "class", 2: "site/class", 3: "site/class/group"}


class ClassFolders(NamedTuple):
    """table: a row per image, in the order of their paths; notes: lines to print, e.g. of empty class folders."""

    table: ImageTable
    notes: tuple[str, ...]


def read_class_folders(base: Path, template: str, columns: Sequence[str]) -> ClassFolders:
    """The rows that a table would have.

    Files that are no images by their names are not read; whole-slide formats are not either. Links to folders elsewhere
    are followed, those to folders that are read anyway are not.

    Args:
      base: the folder.
      template: one of TEMPLATES, the meaning of the folders below base from the outermost; 'auto' = 'class',
        'site/class' or 'site/class/group' by their number.
      columns: names of the cells for site and group.

    Raises: UserError where there is no image, or the folders are not of one depth.
    """
    images, slides, folders, links = _walk(base)
    depths: dict[int, list[str]] = {}
    for name in images:
        depths.setdefault(name.count("/"), []).append(name)
    expected = f"<{'>/<'.join(template.split('/'))}>/*.png"
    if template == "auto":
        expected = "<class>/*.png or <site>/<class>/*.png"
    if not images:
        raise checks.UserError(
            f"data.root: no table and no image in folders of {base} (found: {listed(base)}); a metadata.csv, or"
            f" {expected} expected{'; cut whole-slide files into tiles first' * slides}"
        )
    if template == "auto":
        template = _BY_DEPTH.get(min(depths), "")
    levels = template.split("/") if template else []
    if set(depths) != {len(levels)}:
        told = "; ".join(f"{len(own)} in {d} folder(s), e.g. {own[0]}" for d, own in sorted(depths.items()))
        raise checks.UserError(f"data.folders: images of {base}: {told}; all as {expected} expected")
    rows = [_row(name, dict(zip(levels, name.split("/"))), columns) for name in images]
    sha = hashlib.sha256("\n".join(images).encode()).hexdigest()
    table = ImageTable(None, sha, ",", "group" in levels, tuple(rows), (), ())
    return ClassFolders(table, (*_links_told(links), *_missing(rows, levels, folders, columns[0])))


def _walk(base: Path) -> tuple[list[str], bool, list[str], dict[str, str]]:
    """Paths of images in folders below base, whether whole-slide files lie there, the folders, and links that are not
    followed, {link: the folder that is read in its place}."""
    images, slides, folders = [], False, []
    links, outside, root = dict[str, str](), dict[str, str](), os.path.realpath(base)
    for folder, inner, names in os.walk(base, followlinks=True):
        here = os.path.realpath(folder)
        below = os.path.relpath(folder, base).replace(os.sep, "/")
        start = "" if below == "." else f"{below}/"
        for name in sorted(d for d in inner if os.path.islink(f"{folder}/{d}")):
            real, link = os.path.realpath(f"{folder}/{name}"), start + name
            if _above(root, real):  # it lies in the tree itself
                links[link] = os.path.relpath(real, root).replace(os.sep, "/")
            elif outside.setdefault(real, link) != link:
                links[link] = outside[real]
        inner[:] = sorted(
            d for d in inner if start + d not in links and not _above(os.path.realpath(f"{folder}/{d}"), here)
        )
        folders += [below] if start and not is_junk(f"{below}/x") else []
        slides |= any(name.lower().endswith(_SLIDES) for name in names)
        if start:
            images += [n for name in names if name.lower().endswith(ENDINGS) and not is_junk(n := start + name)]
    return sorted(images), slides, folders, links


def _above(folder: str, here: str) -> bool:
    """Whether `folder` is `here` or a folder above it, to which a link leads back up."""
    return os.path.commonpath([folder, here]) == folder


def _links_told(links: Mapping[str, str]) -> list[str]:
    told = [f"{link} is a link to {folder if folder != '.' else 'the whole'}" for link, folder in sorted(links.items())]
    more = f" and {len(told) - 3} more" if len(told) > 3 else ""
    return [f"WARNING: {', '.join(told[:3])}{more}: not read"] if told else []


def _row(name: str, told: dict[str, str], columns: Sequence[str]) -> Row:
    cells = {column: told[level] for column, level in zip(columns, ("site", "group")) if level in told}
    return Row(0, name, "", told["class"], told.get("group", name), "", None, cells)


def _missing(rows: Sequence[Row], levels: Sequence[str], folders: Sequence[str], site_column: str) -> tuple[str, ...]:
    """Lines on sites without an image, or without classes of other sites: it may be so, or a folder was forgotten."""
    classes = sorted({r.label for r in rows})
    depth = 1 + levels.index("class")
    empty = {f for f in folders if f.count("/") == depth - 1} - {"/".join(r.image.split("/")[:depth]) for r in rows}
    notes = []
    if levels[0] == "site":
        at: dict[str, set[str]] = {}
        for r in rows:
            at.setdefault(r.cells[site_column], set()).add(r.label)
        for site, own in sorted(at.items()):
            lost = [f"{c} (an empty folder)" if f"{site}/{c}" in empty else c for c in classes if c not in own]
            empty -= {f"{site}/{c}" for c in classes}
            if lost:
                notes.append(f"WARNING: site {site} has no image of class {', '.join(lost)}, which other sites have")
        bare = {f for f in folders if "/" not in f} - at.keys()
        empty = {f for f in empty if f.partition("/")[0] not in bare}
        notes += _without("site", bare)
    return (*notes, *_without("class", empty))


def _without(what: str, folders: Iterable[str]) -> list[str]:
    some = sorted(folders)
    more = ", ..." if len(some) > 3 else ""
    return [f"WARNING: {len(some)} {what} folder(s) without an image: {', '.join(some[:3])}{more}"] if some else []
