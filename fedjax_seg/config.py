"""The shape of a run's configuration: every key, its default and its meaning. Configs in configs/ start from `base()`.

A slot is a part with options, e.g. `aggregator = {name: 'median', tie: 'lower'}`: the keyword arguments of the maker
that the room's table holds under `name`. `slot` fills in the maker's defaults, so that every option is visible in
config.json and can be overridden on the command line; an unknown key is an error and an unread one cannot exist.
"""

import importlib.util
import inspect
import json
import math
import os
import traceback
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from fedjax_seg import aggregation, attacks, clients, data, models, synthesis, tasks
from fedjax_seg.core import checks
from fedjax_seg.data import augment
from fedjax_seg.federation import baselines, clock, local_batches, sampling, server
from fedjax_seg.privacy import secure_sum

ROOMS: dict[str, Mapping[str, Any]] = {
    "data": data.DATASETS,
    "synthesis": synthesis.GENERATORS,
    "task": tasks.TASKS,
    "model": models.MODELS,
    "client": clients.CLIENTS,
    "aggregator": aggregation.AGGREGATORS,
    "sampler": sampling.SAMPLERS,
    "server": dict.fromkeys(server.OPTIMIZERS, server.make),
    "augment": augment.AUGMENTATIONS,
    "secure_sum": secure_sum.SECURE_SUMS,
    "attack": attacks.ATTACKS,
    "clock": clock.CLOCKS,
}
# What the engine itself hands to a room's makers: no option of the slot.
FROM_ENGINE = {
    "sampler": ("clients",),
    "client": ("task",),
    "task": ("model",),
    "synthesis": ("folder",),
    "aggregator": ("clients", "smallest_cohort", "rounds", "min_separation", "max_participations"),
    "clock": ("sites", "train_sizes", "val_sizes", "epochs"),
    "secure_sum": ("aggregator", "rule", "clients", "places", "most", "site_columns"),
}


def slot(room: str, name: str, **options: Any) -> ml_collections.ConfigDict:
    """A slot with all options of its maker; `options` override the defaults.

    Options that are None by default, or have no default, are placeholders of their type: the command line can set them.

    Args:
      room: a key of ROOMS.
      name: the maker's name in that room's table.
    """
    known = _options(room, name)
    unknown = [k for k in options if k not in known]
    if unknown:
        raise checks.UserError(f"{room} {name!r}: unknown option {unknown[0]!r};{checks.suggestion(unknown[0], known)}")
    filled = ml_collections.ConfigDict({"name": name, **known})
    for key, value in options.items():
        _set(filled, key, value, f"{room}.{key}")
    return filled


def _set(c: ml_collections.ConfigDict, key: str, value: Any, what: str) -> None:
    try:
        c[key] = tuple(value) if isinstance(value, list) else value
    except TypeError:
        expected = c.get_type(key).__name__
        raise checks.UserError(f"config.{what}: {value!r} given, a value of type {expected} expected") from None


def _options(room: str, name: str) -> dict[str, Any]:
    """{option: default} of a maker; a placeholder where there is no default, or None."""
    maker = checks.lookup(ROOMS[room], name, f"{room}.name")
    own = {
        k: p for k, p in inspect.signature(maker).parameters.items() if k not in ("name", *FROM_ENGINE.get(room, ()))
    }
    return {k: _placeholder(p.annotation) if p.default in (None, p.empty) else p.default for k, p in own.items()}


def _placeholder(annotation: Any) -> Any:
    """An empty value that takes the annotated type: `int | None` -> int, any sequence -> tuple."""
    found = [t for t in (typing.get_args(annotation) or (annotation,)) if t is not type(None)]
    if isinstance(annotation, types.UnionType):
        annotation = found[0]
    kind = typing.get_origin(annotation) or annotation
    return config_dict.placeholder(kind if kind in (bool, int, float, str) else tuple)


def rename(c: ml_collections.ConfigDict, room: str, name: str) -> None:
    """Puts another maker into a slot: options that both makers have, of the same type, stay; the others take the new
    maker's defaults.

    A label names the rule that the config's file had chosen: another aggregator drops it.
    """
    new = slot(room, name)
    for key, value in c[room].items():
        if key in new and key != "name" and new.get_type(key) is c[room].get_type(key):
            new[key] = value
    c[room] = new
    if room == "aggregator":
        c.label = ""


def base() -> ml_collections.ConfigDict:
    """Every key of a run with its default. Slots are filled in by the configs (see `slot`)."""
    c = ml_collections.ConfigDict()
    c.label = ""  # the row name in tables; default: the aggregator's name
    c.group = ""  # e.g. a profile: tables of a sweep are made per group
    c.seeds = (0,)  # one replica per fold and seed, all in one process and one compile
    c.folds = ()  # numbers of the data's splits to run; () = all
    c.protocol = "federated"  # or 'centralised', 'local', 'cross_site' (federation/baselines.py)
    c.rounds = 10  # an absolute total: raising it later continues the run
    c.local_epochs = 1
    c.batch_size = 16
    c.eval_every = 1  # rounds between evaluations; the initial and the last model are always scored
    c.eval_batch = 256  # cases per evaluation step, bounds the memory
    c.batch_sampling = "shuffled"  # epochs in shuffled order; 'poisson': every case joins every step by chance (DP-SGD)
    c.predictions = False  # True: saves the last model's segmentations of the test volumes (predictions/*.nii.gz)
    c.show_scans = "auto"  # pictures of cases in the report: 'on', 'off', or 'auto' (only of synthetic data)
    c.on_nonfinite = "stop"  # a client returns NaN or infinity: 'stop' the run, or 'skip' that client in that round
    c.on_empty = "skip"  # a round of total weight 0 (nobody came): 'skip' it, or 'stop'
    c.input_span = (
        "auto"  # 'auto': first layers in the span of the cases where that changes nothing but rounding; 'off'
    )
    c.lanes = 0  # clients at once on a device; 0 = auto. Performance only
    c.devices = 0  # devices to use; 0 = auto. Performance only
    c.replicas = "auto"  # folds x seeds: 'map', 'vmap' or 'auto' (vmap unless on a CPU). Performance only
    c.require_gpu = False  # True: fail rather than fall back to the CPU
    c.checkpoint = ml_collections.ConfigDict({"every_rounds": 0, "keep": 1})  # 0 = about every 5 minutes
    c.corruption = ml_collections.ConfigDict({"kind": "none", "site": "", "factor": 1.0})
    # Clients that fail, by chance or by a schedule of 'ROUND:SITE' entries (federation/dropout.py)
    c.dropout = ml_collections.ConfigDict({"probability": 0.0, "when": "after", "schedule": ()})
    # Between sites, for the latency model of the cost ledger; `file`: a CSV of site,rtt_ms,mbit_s
    c.network = ml_collections.ConfigDict({"rtt_ms": 50.0, "mbit_s": 100.0, "file": ""})
    c.privacy = ml_collections.ConfigDict(
        {
            "delta": 1e-5,  # of every (epsilon, delta) that is printed
            # > 0: of the whole run; the noise multiplier of dp_sgd (for the worst client) or of the aggregator follows
            "target_epsilon": 0.0,
            "budget": 0.0,  # > 0: the run ends before a round that would take its epsilon beyond this
        }
    )
    c.published = ml_collections.ConfigDict()  # {metric: value} of the paper, printed beside ours in tables
    c.grid = ()  # what launch.sweep runs: strings handed to get_config, one run each
    c.synthesis = ml_collections.ConfigDict({"name": ""})  # a generator that writes the data first ('' = none)
    c.sampler = slot("sampler", "full")
    c.server = slot("server", "sgd")
    c.client = slot("client", "local_sgd")
    c.aggregator = slot("aggregator", "mean")
    c.augment = slot("augment", "none")
    c.secure_sum = slot("secure_sum", "none")
    c.attack = slot("attack", "none")
    c.clock = slot("clock", "none")  # simulated hospital time
    c.max_sim_hours = 0.0  # > 0: no further round begins once simulated time is beyond it
    return c


def validate(c: ml_collections.ConfigDict) -> None:
    """Raises UserError for what no maker would see: keys that nothing reads, wrong ranges, NaN, unknown modes."""
    _check_keys(c)
    for path, value in flat(c).items():
        # Data, and their generators, may take an infinite limit (no limit); their makers check their own options.
        limit = value == math.inf and path.startswith(("data.", "synthesis."))
        if isinstance(value, float) and not (math.isfinite(value) or limit):
            raise checks.UserError(f"config.{path}: {value!r} given, a finite number expected")
    for name in ("rounds", "local_epochs", "batch_size", "eval_every", "eval_batch", "checkpoint.keep"):
        checks.number(f"config.{name}", flat(c)[name], low=1, integer=True)
    for name in ("lanes", "devices", "checkpoint.every_rounds"):
        checks.number(f"config.{name}", flat(c)[name], low=0, integer=True)
    if not c.seeds:
        raise checks.UserError("config.seeds: () given, at least one seed expected, e.g. (0,)")
    for name in ("seeds", "folds"):
        for value in c[name]:
            checks.number(f"config.{name}", value, low=0, high=2**31 - 1, integer=True)
        if len(set(c[name])) != len(c[name]):
            raise checks.UserError(f"config.{name}: {tuple(c[name])} given, distinct numbers expected")
    checks.one_of("config.protocol", c.protocol, baselines.PROTOCOLS)
    checks.one_of("config.input_span", c.input_span, ("auto", "off"))
    checks.one_of("config.show_scans", c.show_scans, ("auto", "on", "off"))
    checks.one_of("config.batch_sampling", c.batch_sampling, local_batches.SAMPLINGS)
    checks.number("config.privacy.delta", c.privacy.delta, above=0.0, low=0.0, high=0.5)
    for name in ("privacy.target_epsilon", "privacy.budget", "max_sim_hours"):
        checks.number(f"config.{name}", flat(c)[name], low=0.0)
    for name in ("network.rtt_ms", "network.mbit_s"):
        checks.number(f"config.{name}", flat(c)[name], low=0.0, above=0.0)
    checks.one_of("config.replicas", c.replicas, ("auto", "map", "vmap"))
    checks.one_of("config.corruption.kind", c.corruption.kind, clients.CORRUPTIONS)
    for name in ("on_nonfinite", "on_empty"):
        checks.one_of(f"config.{name}", c[name], ("stop", "skip"))


def _check_keys(c: ml_collections.ConfigDict) -> None:
    """Exactly the keys of `base` and the slots of the data, the task and the model."""
    default = base()
    for name in ROOMS:
        if name not in c or "name" not in c[name]:
            raise checks.UserError(f"config.{name}: missing; a slot {{'name': ...}} expected (fedjax_seg.config.slot)")
    groups = ("checkpoint", "corruption", "dropout", "network", "privacy")
    for path, expected in (("", (*default.keys(), *ROOMS)), *((p, default[p]) for p in groups)):
        part = c[path] if path else c
        for key in expected:
            if key not in part:
                raise checks.UserError(
                    f"config.{path}{'.' * bool(path)}{key}: missing; start from fedjax_seg.config.base()"
                )
        for key in part:
            if key not in expected:
                near = checks.suggestion(key, expected)
                raise checks.UserError(f"config.{path}{'.' * bool(path)}{key}: nothing reads this key;{near}")


def load(file: str | os.PathLike[str], words: str | None = None) -> ml_collections.ConfigDict:
    """The config that a Python file's `get_config` returns.

    Args:
      file: e.g. configs/fedhavg_quickstart.py.
      words: handed to get_config where given ('configs/x.py:words' on the command line).

    Raises: UserError for whatever is wrong with the file, with the line where Python tells one.
    """
    file = os.fspath(file)
    if not os.path.isfile(file):
        raise checks.UserError(f"--config: {file}: no such file; a Python file with a function get_config expected")
    spec = importlib.util.spec_from_file_location("fedjax_seg_config_file", file)
    if spec is None or spec.loader is None:
        raise checks.UserError(f"--config: {file}: not a Python file; its name must end in .py")
    module, origin = importlib.util.module_from_spec(spec), spec.origin
    given = () if words is None else (words,)
    try:
        spec.loader.exec_module(module)
        maker = getattr(module, "get_config", None)
        if maker is None:
            raise checks.UserError(f"--config: {file}: has no function get_config")
        _check_words(file, maker, given)
        config = maker(*given)
    except checks.UserError:
        raise
    except SyntaxError as error:
        raise checks.UserError(f"--config: {error.filename or file}, line {error.lineno}: {error.msg}") from error
    except Exception as error:  # a config is input: its faults are the user's, and told with their place
        here = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == origin]
        text = " ".join(str(error).split())
        raise checks.UserError(
            f"--config: {file}, line {here[-1] if here else '?'}: {type(error).__name__}: {text}"
        ) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise checks.UserError(f"--config: {file}: get_config returns {type(config).__name__}, a ConfigDict expected")
    return config


def restored(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config that `plain` made these values of; keys that they lack have their defaults.

    Raises: UserError for a value that its key does not take.
    """

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(read(v) for v in value)
        return math.inf if value == "inf" else value

    c = base()
    for key, value in values.items():
        if key in ROOMS and value.get("name"):
            options = {k: read(v) for k, v in value.items() if k != "name" and v is not None}
            c[key] = slot(key, value["name"], **options)
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                c[key][name] = read(inner)
        else:
            _set(c, key, read(value), key)
    return c


def check_path(c: ml_collections.ConfigDict, path: str) -> None:
    """Raises UserError unless `path` ('a.b') is a key that can be overridden: a value, no group of keys."""
    at: Any = c
    *groups, last = path.split(".")
    for depth, key in enumerate((*groups, last)):
        above = "".join(f"{g}." for g in groups[:depth])
        if not isinstance(at, ml_collections.ConfigDict):
            raise checks.UserError(f"--config.{path}: {above[:-1]} is a value, it has no keys")
        if key not in at:
            raise checks.UserError(f"--config.{path}: unknown key {above}{key};{checks.suggestion(key, at.keys())}")
        at = at[key]
    if isinstance(at, ml_collections.ConfigDict):
        inside = ", ".join(f"{path}.{key}" for key in at)
        raise checks.UserError(f"--config.{path}: a group of keys; override one of {inside}")


def type_name(c: ml_collections.ConfigDict, path: str) -> str:
    """The type that the key `path` takes, e.g. 'int'."""
    *groups, last = path.split(".")
    for key in groups:
        c = c[key]
    return c.get_type(last).__name__


def _check_words(file: str, maker: Any, given: tuple[str, ...]) -> None:
    try:
        inspect.signature(maker).bind(*given)
    except TypeError:
        raise checks.UserError(
            f"--config: {file}: takes no words after a colon, {given[0]!r} given"
            if given
            else f"--config: {file}: needs words after a colon, --config={file}:WORDS"
        ) from None


def flat(c: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a.b': value}, sorted by key."""
    out: dict[str, Any] = {}
    for key in sorted(c.keys()):
        value = c[key]
        if isinstance(value, ml_collections.ConfigDict | dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def plain(c: ml_collections.ConfigDict) -> dict[str, Any]:
    """As JSON writes it: tuples become lists, infinity (which JSON lacks) the text 'inf'."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(v) for key, v in value.items()}
        if isinstance(value, float) and math.isinf(value):
            return str(value)
        return value

    return json.loads(json.dumps(written(c.to_dict())))
