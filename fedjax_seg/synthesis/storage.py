"""Files that are written whole or not at all, and the folder of a data set that can be written on."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_seg.core import checks

NOTE = "generator.json"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a kill at any moment, meets the old or the new bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def prepared(root: Path, about: Mapping[str, Any]) -> Path:
    """The folder, made; the options are written first, so that a stopped output can be told from foreign files.

    Raises: UserError where it holds anything else, or cannot be written.
    """
    text = json.dumps(about, indent=1) + "\n"
    note = root / NOTE
    if root.is_dir() and any(root.iterdir()) and (not note.is_file() or note.read_text(encoding="utf-8") != text):
        held = "a data set of other options" if note.is_file() else "other files"
        raise checks.UserError(f"synthesis: {root} holds {held}; name a new or empty folder")
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_whole(note, text.encode())
    except OSError as error:
        raise checks.UserError(f"synthesis: {root} cannot be written ({error.strerror}); name another") from None
    return root
