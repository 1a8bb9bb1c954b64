"""Data sets that TensorFlow Datasets prepared on this disk: where they lie, and reading them without TensorFlow."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import image_cohort, records

_IDS = ("filename", "file_name", "id")  # features that name a case


class Known(NamedTuple):
    """What its description tells of a data set: splits, where its cases are from, and what keeps them apart."""

    splits: str
    origin: str
    cure: str


KNOWN = {
    "colorectal_histology": Known(
        "train (5,000 tiles of 150x150x3, 8 classes)",
        "the tiles are of 10 slides only (Kather et al. 2016)",
        "the file names tell the slide: set data.group_pattern='CRC-Prim-HE-[0-9]+'",
    ),
    "patch_camelyon": Known(
        "train, validation, test (262,144 + 32,768 + 32,768 patches of 96x96x3, 2 classes)",
        "many patches are of one slide of Camelyon16, none tells of which (Veeling et al. 2018)",
        "its splits share no slide: set data.external=('test',) and data.test_share=0",
    ),
}


class Part(NamedTuple):
    """What is read of one split.

    Attributes:
      split: its name.
      at: int [n], cases of it, ascending.
      labels: int [n].
      ids: n strings, '<split>/<file name, id or number>'.
      stored: how many cases the split has.
    """

    split: str
    at: np.ndarray
    labels: np.ndarray
    ids: tuple[str, ...]
    stored: int


def located(name: str, data_dir: str) -> Path:
    """The newest version of a prepared data set. Raises: UserError with the expected tree and how to make it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise checks.UserError(f"data.dataset: {name!r} given, a TFDS name such as {next(iter(KNOWN))!r} expected")
    given = data_dir or os.environ.get("TFDS_DATA_DIR", "") or "~/tensorflow_datasets"
    base = Path(given).expanduser()
    own = base / name
    versions = [path.parent for path in own.glob("**/dataset_info.json")]
    if not versions:
        near = next((p for p in (own, base) if p.is_dir()), None)
        found = f"{near} holds {image_cohort.listed(near)}" if near else f"{base} does not exist"
        hint = checks.suggestion(name, KNOWN).split(" known:")[0] if name not in KNOWN else ""
        splits = f" (splits: {KNOWN[name].splits})" if name in KNOWN else ""
        raise checks.UserError(
            f"data.data_dir: no prepared {name} in {base};{hint} {own}/2.0.0/ with dataset_info.json, features.json and"
            f" {name}-train.array_record-* expected{splits}, {found}. Nothing is downloaded here: run, where TensorFlow"
            f" is installed too, {preparation(name, base)}"
        )
    folder = max(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    files = [p.name for p in folder.iterdir()]
    if not any(".array_record" in f for f in files):
        told = _format(folder)
        raise checks.UserError(
            f"data.data_dir: {folder} holds {told} files, which cannot be read without TensorFlow; where it is"
            f" installed, run tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record, or"
            f" prepare it in another data_dir: {preparation(name, Path('DATA_DIR'))}"
        )
    return folder


def preparation(name: str, base: Path) -> str:
    """The command that downloads and prepares a data set. Source: TFDS documentation, 'TFDS for Jax and PyTorch'."""
    make = f"tfds.builder('{name}', data_dir='{base}', file_format='array_record').download_and_prepare()"
    return f'python -c "import tensorflow_datasets as tfds; {make}"'


def _format(folder: Path) -> str:
    try:
        return str(
            json.loads((folder / "dataset_info.json").read_text(encoding="utf-8")).get("fileFormat", "no record")
        )
    except (ValueError, AttributeError):
        return "no record"


def opened(folder: Path, name: str, wanted: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The builder and the names of the labels."""
    library = records.tfds_library()
    try:
        builder = library.builder_from_directory(str(folder))
        features = builder.info.features
        stored = {split: described.num_examples for split, described in builder.info.splits.items()}
    except Exception as error:  # whatever a foreign or damaged description raises there
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise checks.UserError(f"data.data_dir: {folder} cannot be opened by TFDS ({text}); prepare it again") from None
    for feature, kind in (("image", "Image"), ("label", "ClassLabel")):
        held = type(features[feature]).__name__ if feature in features else "nothing"
        if held != kind:
            raise checks.UserError(
                f"data.dataset: {name} has {held} as feature {feature!r} (features: {', '.join(sorted(features))});"
                f" {kind} expected: a set for the classification of images"
            )
    for split in wanted:
        checks.lookup(stored, split, "data.splits")
        if not stored[split]:
            raise checks.UserError(f"data.splits: split {split!r} of {folder} is empty; prepare it again")
    return builder, tuple(features["label"].names)


def evenly(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """int, ascending: at most `most` cases, as many of every class as there are, drawn by the seed; most 0 = all."""
    if not most or most >= len(labels):
        return np.arange(len(labels))
    random = np.random.default_rng(seed)
    rank = np.empty(len(labels), int)
    for label in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == label))
        rank[own] = np.arange(len(own))
    return np.sort(np.lexsort((labels, rank))[:most])


def drawn(builder: Any, split: str, most: int, seed: int) -> Part:
    """The cases of a split that are read; only labels and ids are decoded. Raises: UserError on damaged files."""
    features = builder.info.features
    name = next((n for n in _IDS if n in features and type(features[n]).__name__ == "Text"), "")
    skip = {"image": records.tfds_library().decode.SkipDecoding()}
    labels, ids = [], []
    for n, case in enumerate(_cases(builder, split, None, skip)):
        labels.append(int(case["label"]))
        ids.append(f"{split}/{case[name].decode() if name else f'{n:06d}'}")
    found = np.array(labels, np.int32)
    unlabelled = int((found < 0).sum())
    if unlabelled:
        raise checks.UserError(
            f"data.splits: {unlabelled} of {len(found)} cases of split {split!r} have no label; leave it out"
        )
    at = evenly(found, most, seed)
    return Part(split, at, found[at], tuple(ids[n] for n in at), len(found))


def images(builder: Any, part: Part) -> Iterator[np.ndarray]:
    """The stored images [H, W, C] of a part, in order."""
    for case in _cases(builder, part.split, part.at, None):
        yield np.asarray(case["image"])


def _cases(builder: Any, split: str, at: np.ndarray | None, decoders: Any) -> Iterator[Any]:
    try:
        source = builder.as_data_source(split, decoders=decoders)
        for n in range(len(source)) if at is None else at.tolist():
            yield source[n]
    except checks.UserError:
        raise
    except Exception as error:  # missing or cut files
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise checks.UserError(
            f"data.data_dir: split {split!r} of {builder.data_dir} cannot be read ({text}); copy or prepare it again"
        ) from None
