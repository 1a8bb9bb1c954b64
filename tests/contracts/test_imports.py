"""Who may import whom, read from the source; and that importing has no side effects.

The arrows are those of the README's "How it is built". `faults` is itself tested on snippets that break each rule.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fedjax_seg"
MAX_LINES = 350

# A room may import itself and core; and
ARROWS = {
    "core": set(),
    "data": set(),
    "synthesis": {"data", "models"},
    "models": set(),
    "tasks": {"models"},
    "clients": set(),
    "aggregation": {"privacy"},
    "privacy": set(),
    "federation": set(),
    "attacks": set(),
    "report": set(),
    "config": {
        "data", "synthesis", "models", "tasks", "clients", "aggregation", "federation", "privacy", "attacks",
    },
    "same_run": {"config"},
    "consistency": {"data"},
    "assembly": {"consistency", "data", "tasks", "clients", "aggregation", "privacy", "federation", "attacks"},
    "rehearsal": {"assembly"},
    "guarantee": {"assembly", "data", "federation", "privacy", "rehearsal"},
    "inverting": {
        "assembly", "attacks", "consistency", "data", "federation", "models", "privacy", "report", "tasks",
    },
    "privacy_card": {"assembly", "attacks", "guarantee", "privacy", "rehearsal"},
    "audit": {
        "aggregation", "assembly", "clients", "config", "experiment", "guarantee", "main", "privacy", "privacy_card",
        "report",
    },
    "privacy_budget": {"assembly", "data", "federation", "guarantee", "privacy"},
    "secrecy": {"assembly", "attacks", "data", "privacy", "rehearsal", "report"},
    "shadows": {"assembly", "attacks", "data", "federation", "report"},
    "attacking": {"assembly", "attacks", "data", "federation", "report", "shadows"},
    "attack_verdict": {"assembly", "attacking", "attacks", "shadows"},
    "volume_outputs": {"assembly", "report"},
    "hospital_time": {"assembly", "federation", "report"},
    "training": {"assembly", "attacking", "federation", "hospital_time", "report", "secrecy", "volume_outputs"},
    "outcome": {
        "assembly", "attack_verdict", "attacking", "attacks", "config", "guarantee", "hospital_time", "inverting",
        "privacy_card", "report", "secrecy", "training", "volume_outputs",
    },
    "experiment": {
        "assembly", "attacking", "guarantee", "config", "data", "synthesis", "federation", "report",
        "hospital_time", "inverting", "outcome", "rehearsal", "same_run", "secrecy", "training", "attacks",
        "privacy_card", "privacy_budget",
    },
    "main": {"config", "experiment"},
}  # fmt: skip
# Third-party packages that only some files may import: {package: which paths below fedjax_seg/}.
HOMES = {
    "orbax": lambda path: path == "report/checkpoint.py",
    "dp_accounting": lambda path: path == "privacy/accounting.py",
    "flax": lambda path: path.startswith(("models/", "tasks/")),
    "jax": lambda path: not path.startswith("data/") or path == "data/augment.py",
    "jaxlib": lambda path: not path.startswith("data/") or path == "data/augment.py",
    "jax_privacy": lambda path: path in JAX_PRIVACY,
    "tensorflow_datasets": lambda path: path == "data/records.py",
    "PIL": lambda path: path == "data/raster.py",
    "cryptography": lambda path: path == "privacy/key_agreement.py",
    "h5py": lambda path: path == "data/bag_files.py",
    "nibabel": lambda path: path == "data/nifti.py",
    "tensorflow": lambda path: False,
    "torch": lambda path: False,
    "absl.flags": lambda path: is_command(path),
    "ml_collections.config_flags": lambda path: is_command(path),
}
JAX_PRIVACY = ("clients/dp_sgd.py", "privacy/balls_in_bins.py", "privacy/matrix_noise.py", "attacks/one_run.py")
BANNED_WORDS = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def is_command(path):
    return path == "main.py" or path.endswith("__main__.py")


def sources():
    """{path below fedjax_seg/: source} of every module."""
    base = ROOT / PACKAGE
    return {p.relative_to(base).as_posix(): p.read_text() for p in sorted(base.rglob("*.py"))}


def module_name(path):
    return ".".join([PACKAGE, *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def imported(path, tree):
    """Every absolute dotted name a module imports, anywhere in it: names of `from` imports appended."""
    package = module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = package.split(".")
                origin = ".".join([*parents[: len(parents) - node.level + 1], *([origin] if origin else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and node.args:
                # A computed name cannot be checked, so it is a fault of its own.
                yield node.args[0].value if isinstance(node.args[0], ast.Constant) else "?"


def within(name, package):
    return name == package or name.startswith(package + ".")


def import_faults(path, tree):
    room = path.split("/")[0].removesuffix(".py")
    for name in imported(path, tree):
        if name == "?":
            yield "imports a computed module name"
        if within(name, PACKAGE):
            target = [*name.split("."), ""][1]
            if room == "__init__":
                yield f"the package itself imports {name}"
            elif target in ARROWS and target not in {room, "core"} | ARROWS[room]:
                yield f"{room} may not import {target} ({name})"
            elif target == "*":
                yield f"{name}: names expected"
        for package, allowed in HOMES.items():
            if within(name, package) and not allowed(path):
                yield f"{package} may not be imported here ({name})"


def is_table(value):
    """A dict literal with string keys, or another plain literal."""
    if isinstance(value, ast.Dict):
        return all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in value.keys)
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def contents_faults(tree):
    """A room's __init__ is a table of contents: imports, dict literals and functions; nothing runs on import."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(isinstance(t, ast.Name) for t in targets):
                yield f"line {node.lineno}: assigns into something on import"
            elif node.value is not None and not is_table(node.value):
                yield f"line {node.lineno}: a dict literal expected"
        elif isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                yield f"line {node.lineno}: a decorator"
        elif not (
            isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ):
            yield f"line {node.lineno}: a statement that runs on import"


def faults(path, source):
    """All the rules a module breaks, one line each."""
    room, *rest = path.removesuffix(".py").split("/")
    if room not in ARROWS and path != "__init__.py":
        return [f"unknown room or module {room!r}: add it to the arrows (and to the README)"]
    tree = ast.parse(source)
    found = list(import_faults(path, tree))
    if rest and rest[-1] == "__init__":
        found += contents_faults(tree)
    if len(source.splitlines()) > MAX_LINES:
        found.append(f"{len(source.splitlines())} lines, at most {MAX_LINES} expected")
    found += [f"file name with {word!r}" for word in BANNED_WORDS & set("_".join([room, *rest]).split("_"))]
    return found


def test_the_package_keeps_its_rules():
    modules = sources()
    assert {"core/types.py", "data/federated.py", "federation/sampling.py"} <= set(modules)
    assert [f"{path}: {fault}" for path, source in modules.items() for fault in faults(path, source)] == []


BAD = [
    ("core/tree.py", "from fedjax_seg.data import federated", "core may not import data"),
    ("federation/round.py", "from fedjax_seg import clients", "federation may not import clients"),
    ("federation/round.py", "import fedjax_seg.aggregation.lift as lift", "federation may not import aggregation"),
    ("federation/round.py", "from ..tasks import classification", "federation may not import tasks"),
    ("federation/__init__.py", "from .. import report", "federation may not import report"),
    ("privacy/bounds.py", "from fedjax_seg.aggregation import lift", "privacy may not import aggregation"),
    ("models/mlp.py", "from fedjax_seg.tasks import make", "models may not import tasks"),
    ("data/abide.py", "from fedjax_seg.synthesis import connectomes", "data may not import synthesis"),
    ("report/html.py", "def f():\n    from fedjax_seg.data import abide", "report may not import data"),
    ("report/html.py", "import importlib\nimportlib.import_module('fedjax_seg.data')", "report may not import data"),
    ("report/html.py", "import importlib\nimportlib.import_module(name)", "a computed module name"),
    ("experiment.py", "from fedjax_seg.models import mlp", "experiment may not import models"),
    ("experiment.py", "from fedjax_seg import main", "experiment may not import main"),
    ("main.py", "from fedjax_seg import report", "main may not import report"),
    ("config.py", "from fedjax_seg import experiment", "config may not import experiment"),
    ("tasks/classification.py", "from fedjax_seg import experiment", "tasks may not import experiment"),
    ("clients/local_sgd.py", "from fedjax_seg import config", "clients may not import config"),
    ("__init__.py", "from fedjax_seg import core", "the package itself imports"),
    ("tasks/x.py", "from fedjax_seg import *", "names expected"),
    ("report/tables.py", "import orbax.checkpoint as ocp", "orbax may not be imported"),
    ("privacy/audit.py", "import dp_accounting", "dp_accounting may not be imported"),
    ("clients/local_sgd.py", "from flax import linen", "flax may not be imported"),
    ("data/abide.py", "import jax.numpy as jnp", "jax may not be imported"),
    ("data/records.py", "import tensorflow as tf", "tensorflow may not be imported"),
    ("experiment.py", "from absl import app, flags", "absl.flags may not be imported"),
    ("report/writer.py", "from absl.flags import FLAGS", "absl.flags may not be imported"),
    ("experiment.py", "from ml_collections import config_flags", "config_flags may not be imported"),
    ("tasks/__init__.py", "TASKS = dict(a=1)", "a dict literal expected"),
    ("tasks/__init__.py", "TASKS = {**OTHER, 'a': 1}", "a dict literal expected"),
    ("tasks/__init__.py", "TASKS: dict = {k: 1 for k in 'ab'}", "a dict literal expected"),
    ("tasks/__init__.py", "TASKS = {}\nTASKS['a'] = 1", "assigns into something"),
    ("tasks/__init__.py", "TASKS = {}\nTASKS.update(a=1)", "runs on import"),
    ("tasks/__init__.py", "@register('a')\ndef make(): ...", "a decorator"),
    ("core/utils.py", "", "file name with 'utils'"),
    ("data/base_reader.py", "", "file name with 'base'"),
    ("extras/x.py", "", "unknown room"),
    ("core/tree.py", "x = 1\n" * (MAX_LINES + 1), "351 lines"),
]


@pytest.mark.parametrize("path, source, message", BAD)
def test_a_broken_rule_is_found(path, source, message):
    found = faults(path, source)
    assert len(found) == 1 and message in found[0], found


GOOD = [
    ("aggregation/lift.py", "from fedjax_seg.core import tree\nfrom fedjax_seg.privacy import bounds"),
    ("tasks/segmentation.py", "import flax\nfrom fedjax_seg import models\nfrom . import classification"),
    ("synthesis/connectomes.py", "from fedjax_seg.data import abide\nfrom ..models import mlp\nimport jax"),
    ("assembly.py", "from fedjax_seg import aggregation, attacks, clients, data, federation, privacy, tasks"),
    (
        "main.py",
        "from absl import app, flags\nfrom ml_collections import config_flags\nfrom fedjax_seg import experiment",
    ),
    ("synthesis/__main__.py", "from absl import flags"),
    ("report/checkpoint.py", "import orbax.checkpoint"),
    ("data/augment.py", "import jax"),
    ("clients/dp_sgd.py", "from absl import logging\nfrom fedjax_seg import __version__"),
    ("tasks/__init__.py", "'doc'\nfrom .a import b\nTASKS = {'b': b}\nNAMES = ('b',)\ndef make(name): ..."),
    ("core/tree.py", "x = 1\n" * MAX_LINES),
]


@pytest.mark.parametrize("path, source", GOOD)
def test_an_allowed_module_passes(path, source):
    assert faults(path, source) == []


BARE = """
import importlib, json, os, sys
import jax
from absl import flags
before = dict(jax.config.values)
modules = json.loads(sys.argv[1])
library, commands = modules["library"], modules["commands"]
for name in library:
    importlib.import_module(name)
defined = [m for m in flags.FLAGS.flags_by_module_dict() if m.startswith("fedjax_seg")]
for name in commands:
    importlib.import_module(name)
changed = [k for k, v in jax.config.values.items() if k in before and before[k] != v]
try:
    # Only a backend that does not exist yet lets a command choose its host devices.
    jax.config.update("jax_num_cpu_devices", 3)
    devices = len(jax.devices("cpu"))
except RuntimeError as error:
    devices = str(error)
print(json.dumps({"flags": defined, "config": changed, "devices": devices, "files": os.listdir()}))
"""


def in_bare_interpreter(modules, folder, path=ROOT):
    """What importing these modules has left behind in a fresh process that starts in an empty folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(modules)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # anything else printed on import would break this


def test_importing_everything_does_nothing(tmp_path):
    paths = [p for p in sources() if not p.endswith("__main__.py")]
    modules = {
        "library": [module_name(p) for p in paths if not is_command(p)],
        "commands": [module_name(p) for p in paths if is_command(p)],
    }
    assert "fedjax_seg.federation.sampling" in modules["library"]
    left = in_bare_interpreter(modules, tmp_path)
    assert left == {"flags": [], "config": [], "devices": 3, "files": []}


@pytest.mark.parametrize(
    "source, trace",
    [
        ("from absl import flags\nflags.DEFINE_integer('n', 1, 'n')", {"flags": ["fedjax_seg_snippet"]}),
        ("import jax\njax.config.update('jax_enable_x64', True)", {"config": ["jax_enable_x64"]}),
        ("open('left_behind', 'w').close()", {"files": ["left_behind"]}),
    ],
)
def test_a_side_effect_is_seen(tmp_path, source, trace):
    (tmp_path / "path").mkdir()
    (tmp_path / "cwd").mkdir()
    (tmp_path / "path" / "fedjax_seg_snippet.py").write_text(source)
    left = in_bare_interpreter({"library": ["fedjax_seg_snippet"], "commands": []}, tmp_path / "cwd", tmp_path / "path")
    assert left == {"flags": [], "config": [], "devices": 3, "files": []} | trace


def test_an_array_made_on_import_is_seen(tmp_path):
    (tmp_path / "path").mkdir()
    (tmp_path / "cwd").mkdir()
    (tmp_path / "path" / "fedjax_seg_snippet.py").write_text("import jax.numpy as jnp\nTABLE = jnp.arange(3)")
    left = in_bare_interpreter({"library": ["fedjax_seg_snippet"], "commands": []}, tmp_path / "cwd", tmp_path / "path")
    assert isinstance(left["devices"], str) and "before" in left["devices"]
