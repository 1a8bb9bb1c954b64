"""A run's folder: one process at a time, whole files atomically, metrics appended and flushed at once.

metrics.jsonl and metrics.csv hold no clock, so that two identical runs write identical bytes; seconds go to
timing.jsonl and train.log.
"""

import contextlib
import csv
import errno
import fcntl
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedjax_seg.core.checks import UserError

ROW_KEYS = ("round", "fold", "seed", "site", "split", "metric", "value", "n")
CASE_KEYS = ("fold", "seed", "site", "case", "patient")  # and the columns of the task
METRICS_FILES = ("metrics.jsonl", "metrics.csv")  # rewound on resume

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, a used-up quota or a refused write under `path` into a UserError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(path) from error
        if error.errno in _REFUSED:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); choose a --workdir you may write to"
            ) from error
        raise


def disk_full(path: Path) -> UserError:
    return UserError(
        f"{path}: no space left on the disk (or quota used up); what was written before is intact:"
        " free some space and give the same command again to continue"
    )


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """The same for named arrays, as an .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **dict(arrays))
    write_atomic(path, buffer.getvalue())


def write_atomic(path: Path, data: bytes) -> None:
    """Writes the whole file or nothing: a reader, or a kill at any moment, sees the old or the new bytes.

    Raises: UserError where the disk is full or the folder refuses writes; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storage_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def plain(value: Any) -> Any:
    """A JSON-able copy: NaN and infinities become None, numpy values and arrays Python ones, keys strings."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def csv_text(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """CSV with '\\n' ends; None, NaN and infinities are empty cells, floats have all their digits."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(header)
    table.writerows([_cell(v) for v in row] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    value = plain(value)
    return "" if value is None else value


class RunFolder:
    """The folder of one run, held by one process from construction to `close` (or the end of `with`).

    Args:
      workdir: created where missing; made absolute once, so a later chdir does not matter.
      quiet: log lines go to train.log only, not to stderr.

    Raises: UserError where the folder cannot be created or written, or another process holds it.
    """

    def __init__(self, workdir: str | os.PathLike[str], quiet: bool = False):
        self.path = Path(os.path.abspath(os.path.expanduser(os.fspath(workdir))))
        self.quiet = quiet
        self._lock: int | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno in _FULL:
                raise disk_full(self.path) from error
            raise UserError(
                f"workdir {self.path} cannot be created or written ({error.strerror});"
                " choose a --workdir you may write to"
            ) from error
        try:
            self._take_lock()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, host = os.pread(self._lock, 300, 0).decode("utf-8", "replace").strip().partition(" ")
            raise UserError(
                f"workdir {self.path} is in use by pid {pid or 'unknown'} on {host or 'unknown host'};"
                " wait for it to end or choose another --workdir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.log(f"warning: the file system of {self.path} has no locks; do not start a second run on it")
        with storage_errors(self.path / "LOCK"):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Releases the lock. The LOCK file stays: removing it could let two processes hold two different ones."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def file(self, name: str) -> Path:
        """The absolute path of a file or sub-folder of the run; a name that leads out of the folder is a bug."""
        path = Path(os.path.normpath(self.path / name))
        if self.path not in path.parents:
            raise ValueError(f"{name!r} is not a name inside the run's folder")
        return path

    def log(self, text: str, console: bool = True) -> None:
        """Writes `text` to train.log with the local time, and plainly to stderr unless quiet (or not `console`)."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        if console and not self.quiet:
            print(text, file=sys.stderr, flush=True)
        self._append("train.log", "".join(f"{stamp} {line}\n" for line in text.splitlines() or [""]))

    def write_text(self, name: str, text: str) -> Path:
        """Writes a whole file atomically and returns its path; sub-folders are created."""
        path = self.file(name)
        write_atomic(path, text.encode())
        return path

    def write_json(self, name: str, obj: Any) -> Path:
        """The same for JSON: sorted keys, NaN and infinities as null."""
        text = json.dumps(plain(obj), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        return self.write_text(name, text + "\n")

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote, or None where there is no such file. Raises: UserError where it is no JSON."""
        path = self.file(name)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: not readable as JSON ({error}); restore it or use another --workdir") from None

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends metrics rows to metrics.jsonl and metrics.csv, flushed; both files get all of them or neither.

        Args:
          rows: mappings with exactly the keys of ROW_KEYS; a `value` or `n` that is None or not finite is null.
        """
        table = [{k: plain(row[k]) for k in ROW_KEYS} for row in rows if _has_keys(row, ROW_KEYS)]
        if not table:
            return
        before = self.position()
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in table)
        header, _, body = csv_text(ROW_KEYS, (row.values() for row in table)).partition("\n")
        try:
            self._append("metrics.jsonl", lines)
            self._append("metrics.csv", body if before["metrics.csv"] else f"{header}\n{body}")
        except BaseException:
            self._cut(before)
            raise

    def add_timing(self, record: Mapping[str, Any]) -> None:
        """Appends one record to timing.jsonl, the one place for seconds."""
        self._append("timing.jsonl", json.dumps(plain(record), sort_keys=True, allow_nan=False) + "\n")

    def position(self) -> dict[str, int]:
        """Bytes written so far to each metrics file; kept in a checkpoint and given back to `rewind`."""
        paths = {name: self.path / name for name in METRICS_FILES}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Cuts the metrics files back to `position`, so that a resumed run has every round once.

        A file that `position` does not name is cut to nothing: `rewind({})` starts over.

        Raises: UserError where a file is shorter than its position; nothing is cut then.
        """
        there = self.position()
        for name in METRICS_FILES:
            if there[name] < position.get(name, 0):
                raise UserError(
                    f"{self.path / name}: {there[name]} bytes found, {position[name]} expected at the checkpoint:"
                    " it was edited or lost since; put it back or start in a new --workdir"
                )
        self._cut({name: position.get(name, 0) for name in METRICS_FILES})

    def write_cases(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes per_case.csv as a whole: CASE_KEYS and the task's columns; one row per tested case, fold and seed."""
        keys = (*CASE_KEYS, *(k for k in (rows[0] if rows else ()) if k not in CASE_KEYS))
        table = ([row[k] for k in keys] for row in rows if _has_keys(row, keys))
        return self.write_text("per_case.csv", csv_text(keys, table))

    def start(self) -> None:
        """Removes the DONE of an earlier, shorter run in this folder."""
        with storage_errors(self.path / "DONE"):
            (self.path / "DONE").unlink(missing_ok=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, then DONE: whoever sees DONE sees a whole run."""
        self.write_json("summary.json", summary)
        self.write_text("DONE", "done\n")

    def _append(self, name: str, text: str) -> None:
        """Appends all of `text` or, where the disk is full, none of it."""
        path = self.path / name
        with storage_errors(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(fd).st_size
                data = memoryview(text.encode())
                try:
                    while data:
                        data = data[os.write(fd, data) :]
                except BaseException:
                    os.ftruncate(fd, size)
                    raise
            finally:
                os.close(fd)

    def _cut(self, position: Mapping[str, int]) -> None:
        for name, size in position.items():
            path = self.path / name
            if path.exists() and path.stat().st_size > size:
                with storage_errors(path):
                    os.truncate(path, size)


def _has_keys(row: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    if set(row) != set(keys):
        raise ValueError(f"a row has the keys {sorted(row)}; {sorted(keys)} expected")
    return True
