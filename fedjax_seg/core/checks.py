"""Error messages: what was given, what was expected, what to do. One line each.

Commands print a UserError as one line and exit with 1; everything else is a bug and keeps its traceback.
"""

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class UserError(ValueError):
    """Bad input: one clear line (field or file, what was found, what was expected, what to do)."""


class DataFaults(UserError):
    """All the faults of a data tree at once.

    Attributes:
      faults: one line per fault.
      files: {file name: text} of what was found all the same, for the folder of a check (voxels per label, ...).
    """

    def __init__(self, what: str, faults: Iterable[str], files: Mapping[str, str] | None = None):
        self.faults, self.files = tuple(faults), dict(files or {})
        super().__init__("\n".join([f"{what}: {len(self.faults)} fault(s)", *(f"  - {f}" for f in self.faults)]))


def suggestion(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' where a known name is close, and the known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f" did you mean {close[0]!r}?" if close else "") + f" known: {', '.join(known) or 'none'}"


def lookup(table: Mapping[str, Any], name: str, what: str) -> Any:
    """table[name], or a UserError that lists what there is."""
    if name not in table:
        raise UserError(f"{what}: unknown name {name!r};{suggestion(str(name), table)}")
    return table[name]


def options(maker: Callable[..., Any], skip: Iterable[str] = ()) -> dict[str, Any]:
    """The keyword options of a maker with their defaults (required ones are left out)."""
    return {
        k: p.default
        for k, p in inspect.signature(maker).parameters.items()
        if p.default is not inspect.Parameter.empty and k not in skip
    }


def parameters(maker: Callable[..., Any]) -> tuple[str, ...]:
    """The names of all parameters of a maker."""
    return tuple(inspect.signature(maker).parameters)


def call(maker: Callable[..., Any], what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """maker(*args, **kwargs); an unknown or missing option is a UserError naming it."""
    known = parameters(maker)
    unknown = [k for k in kwargs if k not in known]
    if unknown:
        raise UserError(f"{what}: unknown option {unknown[0]!r};{suggestion(unknown[0], known)}")
    try:
        inspect.signature(maker).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{what}: {error}; options: {', '.join(known)}") from None
    return maker(*args, **kwargs)


def number(
    what: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    integer: bool = False,
) -> None:
    """Raises unless value is a finite number in [low, high] (and > above), an integer where asked."""
    span = f"in [{low:g}, {high:g}]" if above is None else f"in ({above:g}, {high:g}]"
    kind = "an integer" if integer else "a finite number"
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if integer:
        good = good and isinstance(value, numbers.Integral)
    good = good and low <= value <= high and (above is None or value > above)
    if not good:
        raise UserError(f"{what}: {value!r} given, {kind} {span} expected")


def one_of(what: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises unless value is among the allowed ones."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise UserError(f"{what}: {value!r} given, one of {', '.join(map(repr, allowed))} expected")
