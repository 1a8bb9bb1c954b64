"""All the faults of an image or bag folder as one error: many of one kind are counted."""

import re
from collections.abc import Sequence

from fedjax_seg.core import checks

FILE = "faults.txt"
_SHOWN = 20
_NAMED = re.compile(r"'[^']*'|\([^)]*\)|\S*[/\\._\d]\S*")  # what differs between faults of one cause


def collected(what: str, faults: Sequence[str]) -> checks.DataFaults:
    """The error. Its text has the first 20 faults of a kind and counts the others; `faults` are all, as FILE then is.

    Args:
      what: data set and folder.
      faults: one line each.
    """
    kinds: dict[tuple[str, ...], list[str]] = {}
    for fault in faults:
        kinds.setdefault(kind(fault), []).append(fault)
    if all(len(own) <= _SHOWN for own in kinds.values()):
        return checks.DataFaults(what, faults)
    error = checks.DataFaults(what, faults, {FILE: "".join(f"{fault}\n" for fault in faults)})
    lines = [f"{what}: {len(faults)} fault(s)"]
    for own in kinds.values():
        lines += [f"  - {fault}" for fault in own[:_SHOWN]]
        if len(own) > _SHOWN:
            lines.append(f"  - ... and {len(own) - _SHOWN} more of this kind (--check_data writes all into {FILE})")
    error.args = ("\n".join(lines),)
    return error


def kind(fault: str) -> tuple[str, ...]:
    """What faults of one cause have in common: the first and the last word of what was found, and what to do.

    Names come before the last ': ', in quotes or brackets, or have a digit, dot, slash or underscore.
    """
    found, _, cure = fault.rpartition(": ")[2].partition(";")
    words = _NAMED.sub(" ", found).split()
    return (*words[:1], *words[1:][-1:], *_NAMED.sub(" ", cure).split())
