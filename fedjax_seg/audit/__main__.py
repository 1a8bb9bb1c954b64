"""Audits of privacy mechanisms.

    python -m fedjax_seg.audit --workdir=RUN
    python -m fedjax_seg.audit --mechanism=NAME [--n=6 --dim=50 --clip=1 --epsilon=1 --delta=1e-5 --out=FILE.json]

How far one client can move the aggregate (a search, against the proven bound), and what an adversary really tells apart
(many noisy releases, against the claimed epsilon). --mechanism=all lists the names. Of a finished run the mechanisms
are its own, and privacy.json and the privacy section of its report are made anew.

flags:
  --workdir=RUN      the folder of a finished run
  --mechanism=NAME   what to audit, or all
  --n=6              clients of the round
  --dim=50           parameters
  --clip=1           length of updates
  --epsilon=1        of one release, that the noise is made for
  --delta=1e-5       of the same
  --trials=N         releases of each input; 0 = no canaries; default 20000, more against a claim without a proof
  --restarts=48      climbs of the search
  --steps=400        of every climb; 0 = structured inputs only
  --seed=0           of starts and noise
  --out=FILE.json    writes the findings there as well
  --traceback        shows Python's traceback with an error

Exit codes: 0 done, 1 bad input (one line on stderr), 2 something contradicts a proof (VIOLATION), 130 interrupted.
"""

import inspect
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from fedjax_seg import main as command_line
from fedjax_seg.core import checks

HELP = ("--help", "-help", "-h")
VIOLATION = 2
OPTIONS: dict[str, Any] = {
    "n": 6, "dim": 50, "clip": 1.0, "epsilon": 1.0, "delta": 1e-5, "restarts": 48, "steps": 400,
    "seed": 0,
}  # fmt: skip


def parse(argv: Sequence[str]) -> flags.FlagValues:
    """Every mistake is a UserError of one line; --help prints and ends the program."""
    if any(word in HELP for word in argv[1:]):
        print((__doc__ or "").strip())
        raise SystemExit(0)
    values = flags.FlagValues()
    for name in ("mechanism", "workdir", "out"):
        flags.DEFINE_string(name, "", "", flag_values=values)
    for name, default in OPTIONS.items():
        define = flags.DEFINE_integer if isinstance(default, int) else flags.DEFINE_float
        define(name, default, "", flag_values=values)
    flags.DEFINE_integer("trials", None, "", flag_values=values)
    flags.DEFINE_boolean("traceback", False, "", flag_values=values)
    try:
        rest = values(["", *argv[1:]])
    except flags.Error as error:
        raise checks.UserError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise checks.UserError(f"{rest[1]!r}: not a flag; write --mechanism=NAME --n=6")
    if values.out and not Path(values.out).absolute().parent.is_dir():
        raise checks.UserError(f"--out: {values.out}: its folder does not exist; an existing one expected")
    if bool(values.mechanism) == bool(values.workdir):
        found = "both" if values.mechanism else "neither"
        raise checks.UserError(
            f"--mechanism, --workdir: {found} given, one of them expected: a name (all lists them), or a run's folder"
        )
    return values


def command(argv: Sequence[str]) -> int:
    asked = parse(argv)
    command_line.prepare_jax(1)
    from fedjax_seg import audit

    if asked.workdir:
        return _of_run(asked)
    if asked.mechanism == "all":
        print(names(audit.MECHANISMS))
        return 0
    sizes: dict[str, Any] = {name: asked[name].value for name in (*OPTIONS, "trials")}
    found = audit.audit_mechanism(asked.mechanism, **sizes)
    print(found.text)
    if asked.out:
        Path(asked.out).write_text(json.dumps(finite(found.as_json()), indent=2) + "\n")
    return VIOLATION if found.violations else 0


def _of_run(asked: flags.FlagValues) -> int:
    from fedjax_seg.audit import run_audit

    names = ("dim", "trials", "restarts", "steps", "seed")
    options: dict[str, Any] = {name: asked[name].value for name in names if asked[name].present}
    found = run_audit.audit_run(asked.workdir, **options)
    print(found.text)
    if asked.out:
        Path(asked.out).write_text(json.dumps(finite(found.card["audit"]), indent=2) + "\n")
    return VIOLATION if found.violations else 0


def names(mechanisms: Any) -> str:
    """A line per mechanism, with what its maker says of it."""
    told = {name: (inspect.getdoc(maker) or "").partition("\n")[0] for name, maker in mechanisms.items()}
    return "\n".join(f"{name:24}{text}".rstrip() for name, text in told.items())


def finite(value: Any) -> Any:
    """JSON has no infinity: null in its place."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    sys.exit(command_line.guarded(command, sys.argv))


if __name__ == "__main__":
    main()
