"""python -m fedjax_seg.main --config=configs/x.py --workdir=runs/x [--config.key=value ...]

Exit codes: 0 done (or nothing to do), 1 bad input or a stopped run (one line on stderr), 75 preempted (SIGTERM or
SIGUSR1: the state is saved, the same command continues), 130 interrupted (Ctrl-C: as after a kill, it continues from
the last checkpoint).
"""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

PREEMPTED = 75  # EX_TEMPFAIL: schedulers requeue it
PATIENCE = 7 * 24 * 3600  # seconds that a CPU device waits for another one
FLAGS = """flags:
  --config=FILE[:WORDS]  a Python file with a function get_config, and the words to hand to it
  --workdir=DIR          folder of the run; the same command continues it
  --config.KEY=VALUE     overrides a key of the config, after --config; of a key given twice the last value counts
  --check_data           only reads and checks the data and prints the flow of cases; where the config has a generator
                         and no data.root, the generated data are written to DIR/synthetic
  --traceback            shows Python's traceback with an error
  --flagfile=FILE        reads more flags from a file, one a line
  --help                 this text; with --config=FILE the keys of that config"""
HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")


class Command(NamedTuple):
    """A command line, understood."""

    config: Any  # ml_collections.ConfigDict, overrides applied
    workdir: str
    check_data: bool
    file: str  # of the config, without words
    overrides: tuple[str, ...]  # '--config.key=value'


def parse(argv: Sequence[str], usage: str) -> Command:
    """Flags and config from the command line; every mistake is a UserError of one line."""
    try:
        words = flags.FlagValues().read_flags_from_files(list(argv[1:]), force_gnu=False)
    except flags.Error as error:
        raise checks.UserError(f"--flagfile: {_one_line(error).removeprefix('ERROR:: ')}") from error
    file, rest = _config_file([w for w in words if w not in HELP])
    if any(word in HELP for word in words):
        print(f"{usage.strip()}\n\n{FLAGS}\n\n{_keys(file)}")
        raise SystemExit(0)
    values, overrides = _overridden(_loaded(file) if file else ml_collections.ConfigDict(), rest)
    for name, given in (("config", file), ("workdir", values.workdir)):
        if not given:
            raise checks.UserError(f"--{name}: missing; usage: --config=configs/x.py --workdir=runs/x")
    return Command(values.config, values.workdir, values.check_data, file.partition(":")[0], overrides)


def configured(file: str, overrides: Sequence[str] = ()) -> Any:
    """The config of 'x.py' or 'x.py:words' with overrides '--config.key=value' applied."""
    return _overridden(_loaded(file), overrides)[0].config


def _loaded(file: str) -> Any:
    path, colon, words = file.partition(":")
    return configuration.load(path, words if colon else None)


def _config_file(words: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --config ('' where it is missing), and the other words; 'a b' of an override becomes 'a=b'."""
    file, rest, i = "", [], 0
    while i < len(words):
        word, i = words[i], i + 1
        if re.match(r"--?(no)?config\.", word) and not file:
            raise checks.UserError(f"{word}: give --config=FILE before its overrides")
        takes_next = i < len(words) and not re.match(r"-[^\d.]", words[i])
        if takes_next and re.fullmatch(r"--?config(\.[^=]*)?", word) and words[i] not in ("true", "false"):
            word, i = f"{word}={words[i]}", i + 1
        name, _, value = word.partition("=")
        if name not in ("--config", "-config"):
            rest.append(word)
        elif not value or file:
            raise checks.UserError(
                f"--config: {'given twice' if file else 'no file given'}; write --config=configs/x.py"
            )
        else:
            file = value
    return file, rest


def _overridden(config: Any, words: Sequence[str]) -> tuple[flags.FlagValues, tuple[str, ...]]:
    """Parses all flags but --config itself, and applies the overrides to `config`."""
    overrides = [m for word in words if (m := re.fullmatch(r"--?(no)?config\.([^=]*)=?(.*)", word, re.DOTALL))]
    last = {m[2]: m[0] for m in overrides}  # of a key given twice, also where the library would join two tuples
    words = [w for w in words if w in last.values() or not re.match(r"--?(no)?config\.", w)]
    for _, path, value in (m.groups() for m in overrides):
        room, _, key = path.partition(".")
        if key == "name" and value and room in configuration.ROOMS and config.get(room, {}).get("name") != value:
            configuration.rename(config, room, value)
    for _, path, _ in (m.groups() for m in overrides):
        configuration.check_path(config, path)
    words = [_quoted(word, config) for word in words]
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_boolean("check_data", False, "", flag_values=values)
    flags.DEFINE_boolean("traceback", False, "", flag_values=values)
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=list(words))
        rest = values(["", *words])
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError) as error:
        raise checks.UserError(_explained(error, config)) from error
    if len(rest) > 1:
        raise checks.UserError(f"{rest[1]!r}: not a flag; write --config=FILE --workdir=DIR --config.key=value")
    given = config_flags.get_override_values(values["config"])
    for path, value in given.items():  # NYU,UM without quotes and brackets, which the library leaves as one text
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str) and path != "grid":
            given[path] = tuple(part.strip() for part in value[0].split(",") if part.strip())
            config.update_from_flattened_dict({path: given[path]})
    return values, tuple(f"--config.{path}={value}" for path, value in given.items())


def _quoted(word: str, config: Any) -> str:
    """--config.a=1:x,2:y of a tuple as the library reads it, which takes a colon for Python's."""
    found = re.fullmatch(r"(--?config\.([^=]*)=)([^'\"(\[]*:[^'\"(\[]*)", word)
    if not found or not isinstance(configuration.flat(config).get(found[2]), tuple):
        return word
    return found[1] + repr(tuple(part.strip() for part in found[3].split(",") if part.strip()))


def _explained(error: BaseException, config: Any) -> str:
    text = _one_line(error)
    found = re.match(r"flag --(config\.([\w.]+)=.*?): ", text)
    if found and isinstance(error, flags.IllegalFlagValueError):
        return f"--{found[1]}: a value of type {configuration.type_name(config, found[2])} expected"
    return text


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    return text or type(error).__name__


def _keys(file: str) -> str:
    """The keys of a config with their values, or of every config with the options of every slot."""
    shown = configuration.flat(_loaded(file) if file else configuration.base())
    lines = ["keys of this config:" if file else "keys of every config, with defaults:"]
    lines += [f"  --config.{key}={value!r}" for key, value in shown.items()]
    if not file:
        lines.append("options of the slots, by name:")
        for room, table in configuration.ROOMS.items():
            for name in table:
                options = configuration.flat(configuration.slot(room, name))
                told = " ".join(f"{k}={v!r}" for k, v in options.items() if k != "name")
                lines.append(f"  --config.{room}.name={name}: {told}")
    return "\n".join(lines)


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command; bad input becomes one line and exit code 1, a traceback only where asked for (or for a bug)."""
    try:
        return command(argv)
    except (checks.UserError, OSError) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print(f"error: {told(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    return 1


def told(error: Exception) -> str:
    """An error in words: those of a UserError, the file and the reason of an error of the file system."""
    if isinstance(error, OSError):
        return f"{error.filename or 'file system'}: {error.strerror or error}"
    return str(error) if isinstance(error, checks.UserError) else f"{type(error).__name__}: {_one_line(error)}"


def prepare_jax(devices: int) -> None:
    """Before the backend starts: a CPU device per core (or as many as asked for), patience between them, and the
    persistent compile cache.

    XLA's CPU devices warn when one waits 20 s for another and end the process a little later. At the end of a round
    they wait for the client with the most to do, which takes longer than that with volumes and is no fault.
    """
    import jax

    kinds = ("call_warn_stuck_timeout", "call_terminate_timeout", "timeout")
    patience = [f"--xla_cpu_collective_{kind}_seconds={PATIENCE}" for kind in kinds]
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([*(p for p in patience if p.partition("=")[0] not in given), given]).strip()

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(RuntimeError):  # started already, e.g. in a notebook: its devices stay as they are
        jax.config.update("jax_num_cpu_devices", devices or cores)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "fedjax_seg" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def stop_on_signals() -> Callable[[], bool]:
    """A poll that turns True once SIGTERM or SIGUSR1 came."""
    seen: list[int] = []
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda number, frame: seen.append(number))
    return lambda: bool(seen)


def command(argv: Sequence[str]) -> int:
    asked = parse(argv, __doc__ or "")
    configuration.validate(asked.config)
    stop = stop_on_signals()
    prepare_jax(asked.config.devices)
    from fedjax_seg import experiment

    if asked.check_data:
        print("\n".join(experiment.check_data(asked.config, asked.workdir)))
        return 0
    try:
        experiment.run(asked.config, asked.workdir, stop, argv=[Path(argv[0]).name, *argv[1:]])
    except experiment.Preempted:
        return PREEMPTED
    return 0


def main() -> None:
    sys.exit(guarded(command, sys.argv))


if __name__ == "__main__":
    main()
