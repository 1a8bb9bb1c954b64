"""What is needed to run it again: versions, command, git revision, devices. Read from the process and the checkout."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("fedjax-seg", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "scikit-learn")


def of_process(argv: Sequence[str] = ()) -> dict[str, Any]:
    """The part of manifest.json that no config holds."""
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "argv": list(argv) or [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_revision": git_revision(),
        "backend": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def git_revision() -> str:
    """The revision of the checkout this package lies in, with '+' where it has local changes; '' outside one."""

    def git(*words: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *words)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
