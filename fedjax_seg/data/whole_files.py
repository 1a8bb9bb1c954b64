"""Files of the data room that appear whole or not at all."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes its name when it is complete. Two processes may write the same one."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clean(folder: Path) -> None:
    """Removes what processes of this machine left behind that no longer run."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.tmp"):
        number = int(path.name.split(".")[-2])
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:
            pass
