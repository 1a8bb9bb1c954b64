"""Slices and masks in the form of a TFDS data set (array_record): writing one, and reading it into FederatedData.

Needs the extra `tfds` (tensorflow-datasets and array_record), which is imported only when a function runs.
TensorFlow is not needed, neither to write nor to read.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.slice_cohort import SHADOW, TEST, assemble

_VERSION = "1.0.0"
_REQUIRED = ("image", "mask")
_TREE = "dataset_info.json, features.json and *.array_record-* files, in it or below"

Columns = Mapping[str, Any]  # {feature: a row per case}


def write(
    folder: str | Path,
    splits: Mapping[str, Columns | Iterable[Columns]],
    *,
    name: str,
    about: Mapping[str, Any],
) -> Path:
    """Writes a TFDS data set that `tfds.builder_from_directory(folder).as_data_source(split)` opens.

    Arrays of two axes and more are stored as raw bytes (integers would be widened to 64 bits otherwise), strings as
    text. The metadata with `about` are on disk before the first case, so that an interrupted output is recognised.

    Args:
      folder: new, empty, or holding an earlier output with the same name and `about` (which is written again).
      splits: {split: columns, or an iterable of columns that come in parts}; columns are 'image' [n, H, W(, C)] of an
        integer or float type, 'mask' uint8 [n, H, W], and any others: n strings ('case', 'patient', 'site') or an
        array [n, ...] ('spacing' float32 [n, 2], mm per row and column). All splits have the same columns.
      name: of the data set, a lower-case identifier.
      about: JSON-able facts (generator, seed, options), read back by `tfds`.

    Returns: the folder.
    Raises: UserError where the folder holds anything else or cannot be written, or tfds is not installed.
    """
    library = tfds_library()
    about = json.loads(json.dumps(about))
    root = _prepared(Path(folder), name, about)
    parts = {split: _parts(columns) for split, columns in splits.items()}
    first = next(iter(parts))
    head = next(parts[first])
    parts[first] = itertools.chain([head], parts[first])
    info = library.core.DatasetInfo(
        builder=library.core.DatasetIdentity(
            name=name, version=library.core.Version(_VERSION), data_dir=str(root), module_name=""
        ),
        features=library.features.FeaturesDict(_features(library, head)),
        description=f"Slices and masks; generator: {about.get('generator', 'not stated')}",
        metadata=library.core.MetadataDict({"about": about}),
    )
    writer = library.core.SequentialWriter(info, max_examples_per_shard=2**31 - 1, file_format="array_record")
    writer.initialize_splits(list(splits))
    for split, stream in parts.items():
        for columns in stream:
            writer.add_examples({split: _cases(columns)})
        writer.close_splits([split])
    return root


def tfds_library() -> Any:
    """The module tensorflow_datasets. Raises: UserError where the extra is not installed."""
    try:
        import tensorflow_datasets  # type: ignore[import-untyped, unused-ignore]
        from array_record.python import array_record_module  # noqa: F401  (absent on some platforms)
    except ImportError as error:
        raise checks.UserError(
            f"data.tfds: {error.name or error} cannot be imported; pip install 'fedjax-seg[tfds]'"
        ) from None
    return tensorflow_datasets


def _prepared(root: Path, name: str, about: Mapping[str, Any]) -> Path:
    if root.is_dir() and any(root.iterdir()):
        note = root / "metadata.json"
        same = note.is_file() and _json(note).get("about") == about
        if not same:
            held = "a data set of other options" if note.is_file() else "other files"
            raise checks.UserError(f"synthesis: {root} holds {held}; name a new or empty folder")
        for old in root.glob(f"{name}-*.array_record-*"):
            old.unlink()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise checks.UserError(f"synthesis: {root} cannot be written ({error.strerror}); name another") from None
    return root


def _parts(columns: Columns | Iterable[Columns]) -> Iterator[Columns]:
    return iter([columns] if isinstance(columns, Mapping) else columns)


def _features(library: Any, columns: Columns) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for feature, values in columns.items():
        if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
            encoding = "bytes" if values.ndim > 2 else "none"
            out[feature] = library.features.Tensor(shape=values.shape[1:], dtype=values.dtype, encoding=encoding)
        else:
            out[feature] = library.features.Text()
    return out


def _cases(columns: Columns) -> list[dict[str, Any]]:
    sizes = {feature: len(values) for feature, values in columns.items()}
    if len(set(sizes.values())) != 1:
        raise checks.UserError(f"records: columns of unequal length: {sizes}")
    return [{feature: values[i] for feature, values in columns.items()} for i in range(next(iter(sizes.values())))]


def tfds(
    *,
    root: str,
    window: tuple[float, ...] = (40.0, 400.0),
    size: int | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Reads a TFDS data set of slices and masks in array_record files, one split per client.

    Every split is a client but 'test' (an external site, which never trains) and 'shadow' (an attacker's own slices:
    set aside, each under the client that its feature 'site' names; dealt out in turn where there is no such feature).
    Source: FedOnco-Bench, data section (80/20 at each client, a global test set, other slices for shadow models).

    Args:
      root: the folder of the data set, or one above it that holds only this one.
      window: (centre, width) in Hounsfield units: x = clip((HU - (centre - width / 2)) / width, 0, 1). () = none.
        Unsigned images are no Hounsfield units: they are divided by the largest value of their type instead.
      size: pixels per side after averaging over whole blocks of pixels; a divisor of the stored size. None = as stored.
        A pixel of the reduced mask is tumour where half of its block is.
      test_share: in [0, 1); of each client's patients, rounded, at least one where there are two.
      seed: of that draw.

    Returns: x float32 [N, H, W, 1] in [0, 1], y uint8 [N, H, W] (1 = tumour; any label above 0 counts) and, where
      stored, spacing float32 [N, 2] in mm.
    Raises: UserError on an option, a folder that is no such data set, a missing feature, an empty split.
    """
    checks.number("data.test_share", test_share, low=0.0, high=0.95)
    checks.number("data.seed", seed, low=0, integer=True)
    _check_window(window)
    folder = find(root)
    columns, about = read(folder)
    clients = tuple(split for split in columns if split not in (TEST, SHADOW))
    if not clients:
        raise checks.UserError(f"data.root: {folder} has splits {', '.join(columns)}; one split per client expected")
    prepared = {split: _prepare(split, parts, window, size) for split, parts in columns.items()}
    how = {"window": list(window), "size": size, "test_share": test_share, "split_seed": seed}
    return assemble(prepared, clients, about, how)


def _check_window(window: Sequence[float]) -> None:
    if len(window) not in (0, 2):
        raise checks.UserError(f"data.window: {window!r} given, (centre, width) in Hounsfield units or () expected")
    for what, value in zip(("centre", "width"), window):
        checks.number(f"data.window: {what}", value, above=0.0 if what == "width" else None)


def find(root: str | Path) -> Path:
    """The one TFDS data set at or below a folder (at most three levels). Raises: UserError with what was found."""
    if not root:
        raise checks.UserError(f"data.root: no folder given; name one with {_TREE}")
    base = Path(root).expanduser()
    if not base.is_dir():
        what = "is a file" if base.exists() else "does not exist"
        raise checks.UserError(f"data.root: {base} {what}; a folder with {_TREE} expected")
    for pattern in ("", "*/", "*/*/", "*/*/*/"):
        found = sorted(path.parent for path in base.glob(f"{pattern}dataset_info.json"))
        if len(found) == 1:
            return found[0]
        if found:
            raise checks.UserError(f"data.root: several data sets below {base}: {', '.join(map(str, found))}; name one")
    held = sorted(path.name for path in base.iterdir())
    listed = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "") if held else "nothing"
    raise checks.UserError(f"data.root: {base} is no TFDS data set: {_TREE} expected, found {listed}")


def read(folder: str | Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """All splits of a TFDS data set as columns, texts as str, and its `about` ({} where it has none).

    Raises: UserError that names the split and the feature.
    """
    library = tfds_library()
    folder = Path(folder)
    if not (folder / "features.json").is_file():
        raise checks.UserError(f"data.root: {folder} has no features.json; fetch it, or write the data set again")
    try:
        builder = library.builder_from_directory(str(folder))
    except Exception as error:  # whatever a foreign or damaged description raises there
        raise checks.UserError(f"data.root: {folder} cannot be opened by TFDS ({_first_line(error)})") from None
    stored = sorted(builder.info.features)
    missing = [feature for feature in _REQUIRED if feature not in stored]
    if missing:
        raise checks.UserError(
            f"data.root: {folder} has no feature {missing[0]!r}; it has {', '.join(stored)};"
            f" {' and '.join(_REQUIRED)} expected"
        )
    if not builder.info.splits:
        raise checks.UserError(f"data.root: {folder} has no splits; it was not written to the end, write it again")
    columns = {}
    for split, described in builder.info.splits.items():
        if described.num_examples == 0:
            raise checks.UserError(
                f"data.root: split {split!r} of {folder} is empty; leave it out, or write the data set to its end"
            )
        columns[split] = _columns(builder, split, stored, folder)
    return columns, dict((builder.info.metadata or {}).get("about") or {})


def _columns(builder: Any, split: str, features: Sequence[str], folder: Path) -> dict[str, Any]:
    try:
        source = builder.as_data_source(split)
        cases = [source[i] for i in range(len(source))]
    except Exception as error:  # missing or cut files, or files of another format
        raise checks.UserError(
            f"data.root: split {split!r} of {folder} cannot be read ({_first_line(error)}); array_record files expected"
        ) from None
    out: dict[str, Any] = {}
    for feature in features:
        values = [case[feature] for case in cases]
        if isinstance(values[0], bytes | str):
            out[feature] = [v.decode() if isinstance(v, bytes) else v for v in values]
        elif len({np.shape(v) for v in values}) > 1 and feature in _REQUIRED:
            shapes = ", ".join(map(str, sorted({np.shape(v) for v in values})[:3]))
            raise checks.UserError(f"data.root: {feature!r} of split {split!r} has shapes {shapes}; one size expected")
        elif feature in _REQUIRED or not isinstance(values[0], dict):
            out[feature] = np.array(values) if len({np.shape(v) for v in values}) == 1 else values
    return out


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _prepare(split: str, columns: Mapping[str, Any], window: Sequence[float], size: int | None) -> dict[str, Any]:
    image, mask = np.asarray(columns["image"]), np.asarray(columns["mask"])
    image = image[..., None] if image.ndim == 3 else image
    mask = mask[..., 0] if mask.ndim == 4 and mask.shape[-1] == 1 else mask
    if image.ndim != 4 or image.shape[-1] != 1 or mask.shape != image.shape[:3]:
        raise checks.UserError(
            f"data.root: split {split!r} has images {columns['image'].shape[1:]} and masks {columns['mask'].shape[1:]};"
            " [H, W] or [H, W, 1] of the same size expected"
        )
    x, y = _scaled(image, window), mask > 0
    n, height, width, _ = x.shape
    factor = 1
    if size is not None:
        checks.number("data.size", size, low=1, high=min(height, width), integer=True)
        factor = height // size
        if height != width or factor * size != height:
            raise checks.UserError(
                f"data.size: {size} given, images are {height} x {width}; a divisor of a square's side expected"
            )
        x = x.reshape(n, size, factor, size, factor, 1).mean((2, 4), dtype=np.float32)
        y = y.reshape(n, size, factor, size, factor).mean((2, 4)) >= 0.5
    out = {"x": x, "y": y.astype(np.uint8)}
    if "spacing" in columns:
        out["spacing"] = np.asarray(columns["spacing"], np.float32) * factor
    cases = columns.get("case") or [f"{split}_{i:05d}" for i in range(n)]
    return out | {"case": cases, "patient": columns.get("patient") or cases, "site": columns.get("site") or []}


def _scaled(image: np.ndarray, window: Sequence[float]) -> np.ndarray:
    """float32, [0, 1] under a window or for unsigned images."""
    if image.dtype.kind == "u":
        return image.astype(np.float32) / np.float32(np.iinfo(image.dtype).max)
    x = image.astype(np.float32)
    if not window:
        return x
    centre, width = window
    return np.clip((x - np.float32(centre - width / 2)) / np.float32(width), 0, 1)
