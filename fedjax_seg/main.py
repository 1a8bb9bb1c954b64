"""python -m fedjax_seg.main --config=configs/x.py --workdir=runs/x [--config.key=value ...]

Exit codes: 0 done (or nothing to do), 1 bad input or a stopped run (one line on stderr), 75 preempted (SIGTERM or
SIGUSR1: the state is saved, the same command continues).
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from fedjax_seg.core import checks

PREEMPTED = 75  # EX_TEMPFAIL: schedulers requeue it


def define_flags(values: flags.FlagValues) -> None:
    """The flags of every command that runs a config."""
    text = "configs/x.py, or configs/x.py:words where its get_config takes some"
    config_flags.DEFINE_config_file("config", None, text, flag_values=values)
    flags.DEFINE_string("workdir", None, "folder of the run; the same command continues it", flag_values=values)
    flags.DEFINE_boolean("check_data", False, "only read and check the data, print the flow of cases", values)
    flags.DEFINE_boolean("traceback", False, "show Python's traceback with an error", values)


def parse(argv: Sequence[str], usage: str) -> flags.FlagValues:
    """Flags and config from the command line; every mistake is a UserError."""
    values = flags.FlagValues()
    define_flags(values)
    if any(word in ("--help", "-h", "--helpfull", "-help") for word in argv[1:]):
        print(f"{usage}\n\nflags:\n{values.main_module_help() or values.get_help()}\n{_keys()}")
        raise SystemExit(0)
    for number, word in enumerate(argv[1:]):
        if word.startswith("--config.") and not any(w.split("=")[0] == "--config" for w in argv[1 : number + 1]):
            raise checks.UserError(f"{word}: give --config=FILE before its overrides")
    try:
        rest = values(list(argv))
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError, SyntaxError, ImportError) as error:
        raise checks.UserError(_one_line(error)) from error
    if len(rest) > 1:
        raise checks.UserError(f"{rest[1]!r}: not a flag; write --config=FILE --workdir=DIR --config.key=value")
    for name in ("config", "workdir"):
        if not values[name].value:
            raise checks.UserError(f"--{name}: missing; usage: --config=configs/x.py --workdir=runs/x")
    return values


def _keys() -> str:
    from fedjax_seg import config

    lines = [f"  --config.{key}={value!r}" for key, value in config.flat(config.base()).items()]
    return "keys of every config (and those of its data, task and model slots), with defaults:\n" + "\n".join(lines)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    return text or type(error).__name__


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command; bad input becomes one line and exit code 1, a traceback only where asked for (or for a bug)."""
    try:
        return command(argv)
    except checks.UserError as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print(f"error: {error.filename or 'file system'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    return 1


def prepare_jax(devices: int) -> None:
    """Before the backend starts: a CPU device per core (or as many as asked for), and the persistent compile cache."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
    values = parse(argv, __doc__ or "")
    config: Any = values.config
    stop = stop_on_signals()
    prepare_jax(config.get("devices", 0))
    from fedjax_seg import experiment

    if values.check_data:
        print("\n".join(experiment.check_data(config, values.workdir)))
        return 0
    try:
        experiment.run(config, values.workdir, stop, argv=[Path(argv[0]).name, *argv[1:]])
    except experiment.Preempted:
        return PREEMPTED
    return 0


def main() -> None:
    sys.exit(guarded(command, sys.argv))


if __name__ == "__main__":
    main()
