"""The shape of a run's configuration: every key, its default and its meaning. Configs in configs/ start from `base()`.

A slot is a part with options, e.g. `aggregator = {name: 'median', tie: 'lower'}`: the keyword arguments of the maker
that the room's table holds under `name`. `slot` fills in the maker's defaults, so that every option is visible in
config.json and can be overridden on the command line; an unknown key is an error and an unread one cannot exist.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_collections

from fedjax_seg import aggregation, clients, data, models, synthesis, tasks
from fedjax_seg.core import checks
from fedjax_seg.federation import baselines, sampling, server

ROOMS: dict[str, Mapping[str, Any]] = {
    "data": data.DATASETS,
    "synthesis": synthesis.GENERATORS,
    "task": tasks.TASKS,
    "model": models.MODELS,
    "client": clients.CLIENTS,
    "aggregator": aggregation.AGGREGATORS,
    "sampler": sampling.SAMPLERS,
    "server": dict.fromkeys(server.OPTIMIZERS, server.make),
}
# Keys that may differ between a run and its continuation: none of them changes a number that is already written.
FREE_ON_RESUME = frozenset(
    ("rounds", "lanes", "devices", "replicas", "checkpoint", "label", "group", "grid", "require_gpu", "data.root")
)


def slot(room: str, name: str, **options: Any) -> ml_collections.ConfigDict:
    """A slot with all options of its maker; `options` override the defaults.

    Args:
      room: a key of ROOMS.
      name: the maker's name in that room's table.
    """
    maker = checks.lookup(ROOMS[room], name, f"{room}.name")
    known = {k: v for k, v in checks.options(maker, skip=("name",)).items() if v is not None}
    unknown = [k for k in options if k not in known and k not in checks.parameters(maker)]
    if unknown:
        raise checks.UserError(f"{room} {name!r}: unknown option {unknown[0]!r};{checks.suggestion(unknown[0], known)}")
    return ml_collections.ConfigDict({"name": name, **known, **options})


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
    c.grid = ()  # what launch.sweep runs: strings handed to get_config, one run each
    c.synthesis = ml_collections.ConfigDict({"name": ""})  # a generator that writes the data first ('' = none)
    c.sampler = slot("sampler", "full")
    c.server = slot("server", "sgd")
    c.client = slot("client", "local_sgd")
    c.aggregator = slot("aggregator", "mean")
    return c


def validate(c: ml_collections.ConfigDict) -> None:
    """Raises UserError for values that no maker would see: wrong ranges, NaN anywhere, unknown modes."""
    for path, value in flat(c).items():
        if isinstance(value, float) and not math.isfinite(value):
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
    checks.one_of("config.replicas", c.replicas, ("auto", "map", "vmap"))
    checks.one_of("config.corruption.kind", c.corruption.kind, clients.CORRUPTIONS)
    for name in ("on_nonfinite", "on_empty"):
        checks.one_of(f"config.{name}", c[name], ("stop", "skip"))
    for name in ("data", "task", "model"):
        if name not in c:
            raise checks.UserError(f"config.{name}: missing; a slot {{'name': ...}} expected (fedjax_seg.config.slot)")


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
    """As JSON writes it: tuples become lists."""
    return json.loads(json.dumps(c.to_dict()))


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first key in which a continuation differs from the run, in words; None where it may go on."""
    a, b = flat(old), flat(new)
    for key in sorted(a.keys() | b.keys()):
        if key in FREE_ON_RESUME or key.split(".")[0] in FREE_ON_RESUME:
            continue
        if a.get(key) != b.get(key):
            return f"config.{key} was {a.get(key)!r} and is now {b.get(key)!r}"
    return None
