"""Synthetic data sets, and a diffusion model of slices with tumours that can be trained on any of them.

    python -m fedjax_seg.synthesis write --name=ct --out=DIR [--option=value ...]
    python -m fedjax_seg.synthesis train --data=DIR --workdir=DIR [--option=value ...]
    python -m fedjax_seg.synthesis sample --workdir=DIR --out=DIR [--option=value ...]

write    runs a generator
train    trains a diffusion model on slices with masks; the same command continues it
sample   writes a data set of a trained model, a picture of it, and how near it comes to its training slices

Every command lists its options with --help. Exit codes: 0 done, 1 bad input (one line on stderr), 130 interrupted.
"""

import ast
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from absl import flags

from fedjax_seg import synthesis
from fedjax_seg.core import checks
from fedjax_seg.synthesis import diffusion_sampling, diffusion_training

HELP = ("--help", "-help", "-h")
COMMANDS = ("write", "train", "sample")
_NUMBERS: Mapping[Any, Any] = {int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_boolean}


class Asked(NamedTuple):
    """A command line, understood: call run(**options)."""

    run: Callable[..., Any]
    options: dict[str, Any]


def parse(argv: Sequence[str]) -> Asked:
    """Every mistake is a UserError of one line; --help prints and ends the program."""
    command, *words = argv[1:] or [""]
    if command in HELP:
        print((__doc__ or "").strip())
        raise SystemExit(0)
    checks.one_of("command", command, COMMANDS)
    if command == "train":
        return _asked(command, diffusion_training.train, words, {"tell"})
    if command == "sample":
        return _asked(command, diffusion_sampling.ct_diffusion, words, {"tell"})
    name = next((w.partition("=")[2] for w in words if w.startswith(("--name=", "-name="))), "")
    if not name:
        if any(w in HELP for w in words):
            print("write --name=NAME --out=DIR; --name=NAME --help lists the options of one")
            print("names: " + ", ".join(synthesis.GENERATORS))
            raise SystemExit(0)
        raise checks.UserError(f"--name: missing; one of {', '.join(synthesis.GENERATORS)} expected")
    maker = checks.lookup(synthesis.GENERATORS, name, "--name")
    return _asked(command, maker, [w for w in words if not w.startswith(("--name=", "-name="))], {"tell"})


def _asked(command: str, maker: Callable[..., Any], words: Sequence[str], skip: set[str]) -> Asked:
    """The flags of a command are the options of its function, and --out is its folder."""
    kinds = {name: _plain(kind) for name, kind in get_type_hints(maker).items()}
    options = checks.options(maker, skip={"folder", *skip})
    if "folder" in checks.parameters(maker):
        options, kinds = {"out": "", **options}, kinds | {"out": str}
    if any(word in HELP for word in words):
        print(f"{inspect.getdoc(maker)}\n\nflags of {command!r}, with defaults:")
        print("\n".join(f"  --{name}={_text(value)}" for name, value in options.items()))
        print("  --traceback  shows Python's traceback with an error")
        raise SystemExit(0)
    values = flags.FlagValues()
    for name, default in options.items():
        define = _NUMBERS.get(kinds[name], flags.DEFINE_string)
        text = define is flags.DEFINE_string
        define(name, _text(default) if text and default is not None else default, "", flag_values=values)
    flags.DEFINE_boolean("traceback", False, "", flag_values=values)
    try:
        rest = values(["", *words])
    except flags.Error as error:
        raise checks.UserError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise checks.UserError(f"{rest[1]!r}: not a flag; write --option=value")
    given = {
        n: _value(n, values[n].value, kinds[n]) if values[n].present else default for n, default in options.items()
    }
    if "out" in options:
        given["folder"] = given.pop("out")
        if not given["folder"]:
            raise checks.UserError("--out: missing; name the folder to write")
    return Asked(maker, given)


def _plain(kind: Any) -> Any:
    """The type that an option has where it is not None."""
    return next(k for k in get_args(kind) if k is not type(None)) if type(None) in get_args(kind) else kind


def _text(value: Any) -> str:
    """As it is written on the command line: a tuple with commas, nested ones as Python."""
    flat = isinstance(value, tuple) and not any(isinstance(part, tuple) for part in value)
    return ",".join(map(str, value)) if flat else str(value)


def _value(name: str, value: Any, kind: Any) -> Any:
    """'100,50' of a tuple option as a tuple of its element type; anything else as it is."""
    elements = get_args(kind)
    if not isinstance(value, str) or get_origin(kind) not in (tuple, Sequence):
        return value
    try:
        if get_args(elements[0]):
            return tuple(ast.literal_eval(f"({value},)")) if value else ()
        return tuple(elements[0](part.strip()) for part in value.strip("()").split(",") if part.strip())
    except (ValueError, SyntaxError):
        plain = getattr(elements[0], "__name__", "value") if not get_args(elements[0]) else "tuple"
        raise checks.UserError(f"--{name}: {value!r} given, {plain}s with commas expected") from None


def main(argv: Sequence[str]) -> int:
    try:
        asked = parse(argv)
        done = asked.run(**asked.options)
    except (checks.UserError, OSError) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        told = f"{error.filename or 'file system'}: {error.strerror or error}" if isinstance(error, OSError) else error
        print(f"error: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
