"""Every shipped config, with every word it takes: it builds, validates, has no unread key, and can be overridden."""

import ast
import inspect
import itertools
import json
import math
import re
import sys

import numpy as np
import pytest
import tiny_runs
from PIL import Image
from tiny_runs import ROOT

from fedjax_seg import config as configuration
from fedjax_seg import experiment, guarantee, main, privacy_card, same_run
from fedjax_seg.core.checks import UserError
from fedjax_seg.report import writer

sys.path.append(str(ROOT / "tests" / "data"))
from volume_folder import msd_folder

FILES = sorted((ROOT / "configs").glob("*.py"))


def words_of(name):
    """Every word a config takes, alone or with what it needs; None = no words."""
    if name in ("quickstart", "fedhavg_quickstart"):
        return [None]
    if name == "fedonco_bench":
        methods = ("fedavg", "fedprox", "fedbn", "dp_sgd", "centralised", "local", "fedper", "scaffold", "fednova")
        return [None, "small", "lidc", "ci", "fedbn,lidc", *(f"ci,{m}" for m in methods)]
    if name == "dp_simagg_fets":
        groups = ("table2", "table1", "similarity", "sound", "ablation", "budgets")
        swept = [f"{v},{g}" for v in ("paper", "small", "ci", "hippocampus") for g in groups]
        grids = (configuration.load(ROOT / "configs" / f"{name}.py", f"ci,{g}").grid for g in groups)
        return [None, *swept, *dict.fromkeys(w for grid in grids for w in grid), "simagg,paper"]
    if name == "smc_histopathology":
        grid = configuration.load(ROOT / "configs" / f"{name}.py", "ci").grid
        return [None, "folder,K=3", "small", "lc25000", "ci", *grid, "lc25000,additive,M=3", "small,smc,K=6,N=3"]
    if name == "privacy_utility":
        grids = (configuration.load(ROOT / "configs" / f"{name}.py", v).grid for v in ("ci", "abide", "hippocampus"))
        synthetic = ["n=6,dp_fedavg,eps=4", "adaptive,n=12,eps=10", "banded,n=12,eps=0.5"]
        given = [w for grid in grids for w in grid if "eps=4" in w and not w.startswith("abide")]
        return [None, "ref,eps=1,eps=2", "abide,ref,eps=4", *synthetic, *given]
    assert name == "fedhavg_abide", f"tell here which words configs/{name}.py takes"
    found = [None, "all17", "released,all17,gbar", "paper,ext,c=0.5,gamma=3", "released,krum,corrupt=random"]
    for grid, profile in itertools.product(
        ("table3", "table2", "curvature", "corruption"), ("", "paper,", "released,")
    ):
        found.append(f"{profile}{grid}")
        found += configuration.load(ROOT / "configs" / f"{name}.py", f"{profile}{grid}").grid
    return list(dict.fromkeys(found))


CASES = [(file.stem, words) for file in FILES for words in words_of(file.stem)]


def slices(folder):
    """A folder of images with masks: two sites of eight patients."""
    rows, random = ["image,mask,site,patient"], np.random.default_rng(0)
    folder.mkdir()
    for i in range(16):
        Image.fromarray(random.integers(0, 255, (16, 16), np.uint8)).save(folder / f"i{i}.png")
        Image.fromarray(255 * random.integers(0, 2, (16, 16), np.uint8)).save(folder / f"m{i}.png")
        rows.append(f"i{i}.png,m{i}.png,{'ab'[i % 2]},p{i}")
    (folder / "metadata.csv").write_text("\n".join(rows))
    return str(folder)


def decathlon(folder):
    """Twelve sites of two tiny volumes each."""
    ids = msd_folder(folder, 24)
    rows = "".join(f"{i // 2 + 1},{name}\r\n" for i, name in enumerate(ids))
    (folder / "partitioning_12.csv").write_text(f"Partition_ID,Subject_ID\r\n{rows}")
    return str(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, ct_root, mri_root, tile_root):
    """config -> its data, from a small synthetic folder of its kind; equal data are read once."""
    folder = tmp_path_factory.mktemp("configs")
    sites = (("NYU", 14), ("UM", 12), ("UCLA", 11), ("USM", 10), ("YALE", 10))
    root, kept = tiny_runs.folder(folder / "pcp", sites=sites), {}

    folders = {"tfds": ct_root, "images2d": slices(folder / "slices"), "fets": mri_root}
    folders["histopathology"] = tile_root
    folders["msd"] = decathlon(folder / "msd")

    def load(config):
        if config.data.name in folders or not config.synthesis.name:
            config.data.root = folders.get(config.data.name, root)
        if "cache" in config.data:
            config.data.cache = str(folder / "cache")
        if config.data.name == "fets":
            config.data.partition = "partitioning.csv"
        key = repr([configuration.flat(config.data), configuration.flat(config.synthesis), config.protocol])
        if key not in kept:
            kept[key] = experiment.load_data(config, folder / str(len(kept)))  # a generator's folder holds one output
        return kept[key]

    return load


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_docstring_holds_the_command(file):
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    command = rf"python -m fedjax_seg\.main --config=configs/{file.stem}\.py\S*( --config\.\S+)* --workdir=\S+"
    assert re.search(command, text)
    if configuration.load(file).grid:
        assert re.search(rf"python -m launch\.sweep --config=configs/{file.stem}\.py", text)


@pytest.fixture(scope="module")
def carded():
    """What kinds of runs have had their privacy card looked at."""
    return set()


@pytest.mark.parametrize("name, words", CASES, ids=[f"{n}:{w or ''}" for n, w in CASES])
def test_builds_and_reads_every_key(name, words, loaded, carded):
    config = configuration.load(ROOT / "configs" / f"{name}.py", words)
    configuration.validate(config)
    for room, table in configuration.ROOMS.items():
        if config[room].name:
            taken = set(inspect.signature(table[config[room].name]).parameters) | {"name"}
            assert set(config[room]) <= taken
            assert taken - set(config[room]) <= set(configuration.FROM_ENGINE.get(room, ()))  # all can be overridden
        else:
            assert set(config[room]) == {"name"}
    built = experiment.build(config, loaded(config))
    folds = len(built.data.splits)
    assert len(built.replicas) == len(config.seeds) * (len(config.folds) or folds)
    assert built.data.sites
    kind = (name, *(config[room].name for room in ("model", "client", "aggregator", "sampler", "secure_sum")))
    if kind not in carded:  # one of each: a network is traced for it
        carded.add(kind)
        complete(privacy_card.card(built, guarantee.of_run(built)))


PARTS = {
    "threat_model": {"unit", "adjacency", "trusted", "released", "not_protected"},
    "ledger": {"rows", "events", "curve", "per_round", "gdp_mu", "not_accounted", "text"},
    "secure_sum": {"name", "hides", "text"},
    "utility": {"rows", "snr", "text"},
}
MECHANISM = {
    *("where", "name", "clips", "sensitivity", "proof", "adjacency", "unit", "noise_multiplier", "stddev", "sampling"),
    *("participations", "realised", "numbers", "formal", "reasons"),
}


def complete(card):
    """All eight parts, and a guarantee or the words that there is none."""
    for part, keys in PARTS.items():
        assert keys <= card[part].keys(), part
        assert card[part].get("text", "told") or part == "utility"
    assert {"audit", "attacks", "mechanisms", "warnings"} <= card.keys()
    assert all(mechanism.keys() >= MECHANISM for mechanism in card["mechanisms"])
    json.dumps(writer.plain(card), allow_nan=False)
    if card["epsilon"] is None:
        assert "No differential-privacy guarantee" in card["sentence"] and card["epsilon_text"] == "infinite"
        assert any("no guarantee" in line for line in card["warnings"])
        assert all(not m["formal"] and m["reasons"] for m in card["mechanisms"])
    else:
        assert 0 < card["epsilon"] < math.inf and f"epsilon {card['epsilon']:.3g}" in card["sentence"]
        assert card["ledger"]["rows"] and card["ledger"]["events"] and card["ledger"]["curve"]
        assert card["ledger"]["per_round"][-1]["epsilon"] == pytest.approx(card["epsilon"], rel=1e-3)
        assert any(m["formal"] and m["proof"] and m["stddev"] > 0 for m in card["mechanisms"])


def leaves():
    """(file, words, key, value) of every leaf of a config of each kind of slot."""
    one_of_each = [("fedhavg_quickstart", None)]
    one_of_each += [("fedhavg_abide", f"paper,{m}") for m in ("fedavg", "median", "trimmed", "ext", "gbar")]
    one_of_each += [("fedonco_bench", f"ci,{m}") for m in ("fedavg", "dp_sgd", "scaffold", "fednova")]
    one_of_each += [("fedonco_bench", "lidc,fedavg"), ("dp_simagg_fets", "hippocampus,simagg_released")]
    one_of_each += [("dp_simagg_fets", f"small,{m}") for m in ("simagg", "dp_eps1", "sound_tight", "local_dp", "geyer")]
    one_of_each += [("smc_histopathology", "lc25000,smc"), ("smc_histopathology", "ci,noise")]
    one_of_each += [("smc_histopathology", f"small,{m}") for m in ("chained", "additive", "secagg", "secagg_plus")]
    private = ("ref", "adaptive", "ball", "banded", "dp_sgd_patient")
    one_of_each += [("privacy_utility", f"ci,{m},eps=4") for m in private]
    one_of_each += [("fedhavg_abide", f"released,{m}") for m in ("geometric_median", "multi_krum", "clipped")]
    seen = set()
    for name, words in one_of_each:
        config = configuration.load(ROOT / "configs" / f"{name}.py", words)
        for key, value in configuration.flat(config).items():
            kind = (key, config[key.split(".")[0]].get("name", "") if "." in key else "")
            if kind not in seen:
                seen.add(kind)
                yield name, words, key, value


OTHER = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.5, str: lambda v: v + "x", tuple: tuple}


@pytest.mark.parametrize("name, words, key, value", list(leaves()), ids=lambda x: str(x)[:40])
def test_every_leaf_can_be_overridden(name, words, key, value):
    file = f"{ROOT / 'configs' / name}.py" + (f":{words}" if words else "")
    before = configuration.load(ROOT / "configs" / f"{name}.py", words)
    if key.endswith(".name"):
        room = key.removesuffix(".name")
        new = next(n for n in configuration.ROOMS[room] if n != value or len(configuration.ROOMS[room]) == 1)
    elif value is None:  # an optional one
        new = {"int": 3, "float": 0.5, "str": "x", "tuple": (1, 2)}[configuration.type_name(before, key)]
    else:
        new = OTHER[type(value)](value)
    after = configuration.flat(main.configured(file, [f"--config.{key}={new}"]))
    assert after[key] == new and type(after[key]) is type(new)
    if not key.endswith(".name"):
        assert {k for k, v in configuration.flat(before).items() if v != after[k]} <= {key}


@pytest.mark.parametrize("room", configuration.ROOMS)
def test_slots_take_exactly_the_options_of_their_maker(room):
    for name, maker in configuration.ROOMS[room].items():
        with pytest.raises(UserError, match=f"{room} '{name}': unknown option 'no_such_option'"):
            configuration.slot(room, name, no_such_option=1)
        mine = set(configuration.slot(room, name)) - {"name"}
        outside = {"name", *configuration.FROM_ENGINE.get(room, ())}
        assert mine == set(inspect.signature(maker).parameters) - outside
    with pytest.raises(UserError, match="unknown name 'nothing'"):
        configuration.slot(room, "nothing")


def test_free_keys_exist():
    """A misspelt key in FREE_ON_RESUME would forbid what it should allow."""
    slices, volumes = (
        configuration.load(ROOT / "configs" / f"{name}.py", words)
        for name, words in (("fedhavg_abide", "paper,ext"), ("dp_simagg_fets", "simagg"))
    )
    for key in same_run.FREE_ON_RESUME:
        known = volumes if key in ("data.cache", "data.workers", "data.ahead", "data.partition") else slices
        if key == "published":  # a group of whatever metrics a paper printed
            assert key in known
            continue
        inside = {"checkpoint": ".keep", "network": ".file"}.get(key, "")
        configuration.check_path(known, key + inside)


def test_runs_of_other_noise_have_other_salts():
    """Rounds may be raised without another salt, but where the noise is computed for their number."""
    c = configuration.load(ROOT / "configs" / "fedonco_bench.py", "ci,dp_sgd")
    before = same_run.salt(c, "data")
    c.rounds += 1
    assert same_run.salt(c, "data") == before != same_run.salt(c, "other data")
    c.privacy.target_epsilon = 3.0
    with_target = same_run.salt(c, "data")
    c.rounds += 1
    assert same_run.salt(c, "data") != with_target
