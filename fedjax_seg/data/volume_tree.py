"""Folders of volumes: which file is which channel of which subject. Names only; no voxel is read here."""

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core import checks
from fedjax_seg.data import nifti

CHANNELS = ("t1", "t1ce", "t2", "flair")
# The end of a file's name -> what it is. The one place: FeTS, BraTS until 2022, BraTS 2023 and later, FeTS tool, TCGA.
ALIASES = {
    "t1": "t1",
    "t1n": "t1",
    "t1ce": "t1ce",
    "t1c": "t1ce",
    "t1gd": "t1ce",
    "t2": "t2",
    "t2w": "t2",
    "flair": "flair",
    "t2f": "flair",
    "seg": "seg",
    "final_seg": "seg",
    "seg_fused": "seg",
    "segm": "seg",  # BraTS20_Training_355 of BraTS 2020 has W39_1998.09.19_Segm.nii
}
_SPELLINGS = {kind: tuple(a for a, k in ALIASES.items() if k == kind) for kind in (*CHANNELS, "seg")}
_LEVELS = 3  # root / site / subject / files


class Subject(NamedTuple):
    """The files of one subject.

    Attributes:
      images: one file per channel, in the tree's order; in an MSD folder ONE file that holds all of them.
      label: None where there is none.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None


class Tree(NamedTuple):
    """What a folder holds.

    Attributes:
      subjects: sorted by id; only those without a fault.
      faults: one line each.
      notes: what was left out on purpose, one line per kind.
      labels: {id: label} of subjects with a fault that have one label all the same.
    """

    subjects: tuple[Subject, ...]
    channels: tuple[str, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    labels: Mapping[str, Path] = {}


class _Folder(NamedTuple):
    """What a folder holds, sorted; hidden files and those that macOS adds are passed over.

    broken: (link, why) of links that lead nowhere and have no NIfTI name; fault: why the folder itself is unreadable.
    """

    path: Path
    volumes: tuple[Path, ...]  # NIfTI files
    folders: tuple[Path, ...]
    others: tuple[Path, ...]
    broken: tuple[tuple[Path, str], ...] = ()
    fault: str = ""


def fets_tree(root: Path | str, wanted: Collection[str] | None = None, labels: bool = False) -> Tree:
    """Subject folders of FeTS or BraTS, `root/subject/` or `root/site/subject/`, in any of the namings of ALIASES.

    A file is told by the end of its name after the folder's name, in any case, with '-' or '_': `A/A_brain_t1ce.nii`
    is the t1ce of A. A subject's id is its folder's name.

    Args:
      wanted: ids; other folders are not judged, and a missing one is a fault. None = all there are.
      labels: whether a subject without a segmentation is a fault.

    Raises: UserError where there is no such folder or it holds no subject. All else is collected in `faults`.
    """
    root = existing(root, "subject folders such as FeTS2022_00000/FeTS2022_00000_t1.nii.gz")
    folders: dict[str, list[_Folder]] = {}
    unread: list[_Folder] = []
    for folder in _subject_folders(_top(root), _LEVELS):
        if folder.fault:
            unread.append(folder)
        else:
            folders.setdefault(folder.path.name, []).append(folder)
    if not folders and not unread:
        raise checks.UserError(
            f"{root}: no folder with NIfTI files; SUBJECT/SUBJECT_t1.nii.gz or SITE/SUBJECT/SUBJECT_t1.nii.gz in it"
            f" expected, found: {_found(root)}"
        )
    ids = sorted(folders) if wanted is None else sorted(i for i in set(wanted) if i in folders)
    subjects: list[Subject] = []
    missing = set(wanted or ()) - set(folders)
    # A folder that nobody asked for may be locked; one of a site may hide who is missing.
    told = [f for f in unread if wanted is None or f.path.name in missing or missing - {u.path.name for u in unread}]
    faults = [f"{os.path.relpath(f.path, root)}: {f.fault}" for f in told]
    missing -= {f.path.name for f in told}
    extras: dict[str, list[str]] = {}
    labelled: dict[str, Path] = {}
    for name in ids:
        if len(folders[name]) > 1:
            places = " and ".join(os.path.relpath(f.path, root) for f in folders[name])
            faults.append(f"{name}: two folders of that name, {places}; one folder per subject expected")
            continue
        subject, wrong, extra = _subject(folders[name][0], labels)
        if not wrong:
            subjects.append(subject)
        elif subject.label is not None:
            labelled[name] = subject.label
        faults += wrong
        for kind in extra:
            extras.setdefault(kind, []).append(name)
    empty = sorted(name for name in missing if (root / name).is_dir())
    faults += [f"{name}: no NIfTI file in its folder; found: {_found(root / name)}" for name in empty]
    faults += _missing(missing - set(empty), folders, root)
    return Tree(tuple(subjects), CHANNELS, tuple(faults), tuple(_notes(extras, folders, wanted)), labelled)


def msd_tree(root: Path | str, wanted: Collection[str] | None = None, labels: bool = True) -> Tree:
    """A folder of the Medical Segmentation Decathlon: `imagesTr/ID.nii.gz`, `labelsTr/ID.nii.gz`.

    The channels' names come from `dataset.json` where there is one, else they are counted in the first image's header.
    Files of macOS (`._*`) and other hidden ones are passed over, and so is `imagesTs`, which has no labels.

    Args:
      wanted: ids; other files are not judged, and a missing image is a fault. None = all there are.
      labels: whether an image without a label is a fault.

    Raises: UserError where there is no such folder or no image, or `dataset.json` is unreadable.
    """
    root = existing(root, "imagesTr/ and labelsTr/")
    images, label_of = (_by_id(root / name) for name in ("imagesTr", "labelsTr"))
    _check_msd(root, images, label_of)
    ids = sorted(set(images) | set(label_of)) if wanted is None else sorted(set(wanted) & set(images))
    subjects, faults = [], []
    for i in ids:
        own, marks = images.get(i, []), label_of.get(i, [])
        wrong = [
            f"{i}: {' and '.join(p.name for p in two)} in {two[0].parent.name}/; delete one"
            for two in (own, marks)
            if len(two) > 1
        ]
        if not own:
            wrong.append(f"{i}: labelsTr/{marks[0].name} has no image in imagesTr/")
        elif not marks and labels:
            wrong.append(f"{i}: imagesTr/{own[0].name} has no label in labelsTr/")
        faults += wrong
        if not wrong:
            subjects.append(Subject(i, (own[0],), marks[0] if marks else None))
    faults += _missing(set(wanted or ()) - set(images), images, root)
    notes = _notes({}, images, wanted)
    return Tree(tuple(subjects), _channel_names(root, images[min(images)][0]), tuple(faults), tuple(notes))


def _check_msd(root: Path, images: Mapping[str, list[Path]], label_of: Collection[str]) -> None:
    if not images:
        near = sorted(p.parent.name for p in root.glob("*/imagesTr"))
        hint = f"; {near[0]} in it has one, give that folder" if near else ""
        raise checks.UserError(
            f"{root}: no image in imagesTr/; imagesTr/ID.nii.gz expected, found: {_found(root)}{hint}"
        )
    split = [i for i in sorted(images) if i not in label_of and i[:-5] in label_of and re.search(r"_\d{4}$", i)]
    if split:
        raise checks.UserError(
            f"{root}: a file per channel ({images[split[0]][0].name}, as nnU-Net has them); one file per subject that"
            " holds all its channels expected"
        )


def _subject(folder: _Folder, labels: bool) -> tuple[Subject, list[str], list[str]]:
    """A subject, its faults, and the names' ends of files that are nothing we know."""
    name = folder.path.name
    files: dict[str, list[Path]] = {}
    extra: list[str] = []
    for path in folder.volumes:
        rest = _rest(path, name)
        kind = _kind(rest)
        if kind:
            files.setdefault(kind, []).append(path)
        else:
            extra.append(rest[-1] if rest else path.name)
    faults = [
        f"{name}: {' and '.join(p.name for p in files[kind])} are both {kind}; delete or rename one"
        for kind in _SPELLINGS
        if len(files.get(kind, ())) > 1
    ]
    needed = (*CHANNELS, "seg") if labels else CHANNELS
    if missing := [kind for kind in needed if kind not in files]:
        named = ", ".join(f"{kind} ({'|'.join(_SPELLINGS[kind])})" for kind in missing)
        there = ", ".join(p.name for p in folder.volumes)
        faults.append(f"{name}: no {named}; found: {there}")
    label = files["seg"][0] if len(files.get("seg", ())) == 1 else None
    return Subject(name, tuple(files[c][0] for c in CHANNELS if c in files), label), faults, extra


def _rest(path: Path, subject: str) -> list[str]:
    """The parts of a file's name that follow the subject's id."""
    stem = _stem(path.name).lower()
    rest = stem.removeprefix(subject.lower())
    if rest and rest[0] not in "-_.":
        rest = stem  # the folder's name is no whole part of the file's name: FeTS_1/FeTS_12_t1
    return [part for part in re.split(r"[-_. ]+", rest) if part]


def _kind(parts: Sequence[str]) -> str:
    for many in (2, 1):
        if len(parts) >= many and (kind := ALIASES.get("_".join(parts[-many:]))):
            return kind
    return ""


def _subject_folders(folder: _Folder, levels: int) -> list[_Folder]:
    """Folders that hold NIfTI files, below the given one but not below each other; and all that cannot be read.

    A folder with other folders in it is a subject's only if one of its files is a known kind: an atlas may lie beside
    the subjects of a site.
    """
    found = [_Folder(path, (), (), (), fault=why) for path, why in folder.broken]
    for path in folder.folders:
        inner = _listing(path)
        if inner.fault:
            found.append(inner)
            continue
        known = any(_kind(_rest(volume, path.name)) for volume in inner.volumes)
        if known or (inner.volumes and not inner.folders):
            found.append(inner)
        elif levels > 1:
            found += _subject_folders(inner, levels - 1)
    return found


def _missing(missing: Collection[str], there: Collection[str], root: Path, most: int = 10) -> list[str]:
    """One line for all of them, with the name that the first one is mistaken for: other zeros, capitals, a typo."""
    if not missing:
        return []
    some = sorted(missing)
    names = ", ".join(some[:most]) + (", ..." if len(some) > most else "")
    plain = [name for name in there if name.lower().lstrip("0") == some[0].lower().lstrip("0")]
    near = plain or difflib.get_close_matches(some[0], there, n=1)
    hint = f"; close to {some[0]}: {near[0]}" if near else ""
    return [f"{len(some)} subject(s) wanted but not found in {root}: {names}{hint}"]


def _notes(extras: Mapping[str, list[str]], folders: Collection[str], wanted: Collection[str] | None) -> list[str]:
    notes = []
    if extras:
        kinds = ", ".join(f"{kind} ({len(names)})" for kind, names in sorted(extras.items()))
        notes.append(f"files that are none of {', '.join(_SPELLINGS)} ignored (subjects): {kinds}")
    if wanted is not None and (rest := len(set(folders) - set(wanted))):
        notes.append(f"{rest} subject(s) ignored: not wanted")
    return notes


def _channel_names(root: Path, image: Path) -> tuple[str, ...]:
    path = root / "dataset.json"
    if not path.is_file():
        shape = nifti.read_shape(image)
        return ("image",) if len(shape) == 3 else tuple(f"channel{c}" for c in range(shape[3]))
    try:
        about = json.loads(path.read_text(encoding="utf-8-sig"))
        names = about.get("modality") or about["channel_names"]
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise checks.UserError(
            f'{path}: no \'modality\' that can be read ({error}); {{"modality": {{"0": "T1", ...}}}} expected, or no'
            " dataset.json at all"
        ) from None


def _by_id(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in _top(folder).volumes if folder.is_dir() else ():
        found.setdefault(_stem(path.name), []).append(path)
    return found


def existing(root: Path | str, expected: str) -> Path:
    """The folder. Raises: UserError where there is none, with what is there instead."""
    root = Path(root).expanduser()
    if not root.is_dir():
        near = root.parent
        there = f"{near} holds {_found(near)}" if near.is_dir() else f"{near} is not there either"
        raise checks.UserError(f"{root}: no such folder; one with {expected} expected ({there})")
    return root


def _top(path: Path) -> _Folder:
    folder = _listing(path)
    if folder.fault:
        raise checks.UserError(f"{path}: {folder.fault}")
    return folder


def _listing(path: Path) -> _Folder:
    kinds: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
    broken: list[tuple[Path, str]] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith((".", "__MACOSX")):
                    continue
                own = path / entry.name
                # os.path says False of a link in a circle, where DirEntry raises.
                if os.path.isdir(own) if entry.is_symlink() else entry.is_dir():
                    kinds[1].append(own)
                elif entry.name.lower().endswith((".nii", ".nii.gz")):
                    kinds[0].append(own)
                elif entry.is_symlink() and not os.path.exists(own):
                    broken.append((own, f"is a broken link (to {os.readlink(own)}); mend it"))
                else:
                    kinds[2].append(own)
    except OSError as error:
        return _Folder(path, (), (), (), fault=f"cannot be read ({error.strerror}); mend its permissions")
    volumes, folders, others = (tuple(sorted(kind)) for kind in kinds)
    return _Folder(path, volumes, folders, others, tuple(sorted(broken)))


def _stem(name: str) -> str:
    return re.sub(r"\.nii(\.gz)?$", "", name, flags=re.IGNORECASE)


def _found(folder: Path, most: int = 6) -> str:
    inner = _listing(folder)
    names = sorted([p.name + "/" for p in inner.folders] + [p.name for p in inner.volumes + inner.others])
    return (", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")) or "nothing"
