"""The engine against a plain sequential PyTorch loop (torch_fedhavg.py): the same numbers, and how much faster.

    python tests/benchmarks/mlp_vs_torch.py --parity              numbers: exit code 1 where they differ
    python tests/benchmarks/mlp_vs_torch.py [--rounds=2 --repeats=5 --only=Adam --fused --threads=2]    ratios of time

Needs the extra `bench`. Real features are used where FEDJAX_SEG_DATA names a folder that holds abide/, random ones of
the same shape otherwise. See README.md beside this file.
"""

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch_fedhavg as reference  # noqa: E402
from machine_load import BUSY, Load  # noqa: E402

from configs import fedhavg_abide  # noqa: E402
from fedjax_seg import config as configuration  # noqa: E402
from fedjax_seg import experiment  # noqa: E402
from fedjax_seg.data import federated  # noqa: E402
from fedjax_seg.federation import local_batches, replicas, round  # noqa: E402
from fedjax_seg.main import prepare_jax  # noqa: E402

TRAIN, TEST, FEATURES = (130, 83, 58, 40), (33, 21, 14, 10), 6105
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


def random_data(width: int, train: tuple[int, ...], test: tuple[int, ...], folds: int) -> federated.FederatedData:
    """Gaussian features of about the spread of Pearson correlations, labels by coin, folds by random order."""
    rng = np.random.default_rng(0)
    sizes = np.add(train, test)
    site_of = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    cases = [np.flatnonzero(site_of == k) for k in range(len(sizes))]
    splits = []
    for fold in range(folds):
        mixed = [rng.permutation(own) for own in cases]
        parts = (
            tuple(np.sort(m[:n]) for m, n in zip(mixed, train)),
            tuple(np.sort(m[n:]) for m, n in zip(mixed, train)),
        )
        splits.append(federated.Split(f"fold{fold}", *parts))
    count = len(site_of)
    names = tuple(f"case{i}" for i in range(count))
    arrays = {
        "x": (0.3 * rng.normal(size=(count, width))).astype(np.float32),
        "y": rng.integers(0, 2, count).astype(np.int32),
    }
    sites = tuple(f"site{k}" for k in range(len(sizes)))
    return federated.FederatedData(arrays, names, names, sites, site_of, tuple(splits), ("control", "patient"))


def speed_data() -> tuple[federated.FederatedData, str]:
    folder = Path(os.environ.get("FEDJAX_SEG_DATA", "")) / "abide"
    if not os.environ.get("FEDJAX_SEG_DATA") or not folder.is_dir():
        return random_data(FEATURES, TRAIN, TEST, folds=5), "random features"
    config = fedhavg_abide.get_config("released,fedavg")
    config.data.root = str(folder)
    with tempfile.TemporaryDirectory() as scratch:
        return experiment.load_data(config, Path(scratch)), "real features"


def config_of(words: str, optimizer: str = "sgd", folds: tuple[int, ...] = (0,), span: str = "off", every: int = 1):
    """The paper's config, as a user would run it."""
    c = fedhavg_abide.get_config(words)
    c.seeds, c.folds, c.input_span, c.eval_every = (0,), folds, span, every
    if optimizer == "adam":
        c.client = configuration.slot("client", "local_sgd", lr=1e-4, optimizer="adam", weight_decay=1e-3)
    return c


def training_of(config: Any, fused: bool = False) -> reference.Training:
    """The same local training in PyTorch's words. The rate is rounded to float32, as the engine's is."""
    c = config.client
    kept, lr = c.keep_optimizer, float(np.float32(c.lr))
    return reference.Training(
        c.optimizer, lr, c.weight_decay, c.momentum, c.nesterov, kept, config.task.double_softmax, fused
    )


def to_torch(params: Any) -> reference.State:
    """Flax parameters of the MLP as the state of the PyTorch model (kernels transposed)."""
    state, depth = {}, sum(name.startswith("Dense") for name in params)
    for i in range(depth):
        state[f"{3 * i}.weight"] = np.asarray(params[f"Dense_{i}"]["kernel"]).T
        state[f"{3 * i}.bias"] = np.asarray(params[f"Dense_{i}"]["bias"])
        if i < depth - 1:
            state[f"{3 * i + 1}.weight"] = np.asarray(params[f"LayerNorm_{i}"]["scale"])
            state[f"{3 * i + 1}.bias"] = np.asarray(params[f"LayerNorm_{i}"]["bias"])
    return {name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()}


def batches_of(setup: experiment.Experiment, key: Any, rounds: int) -> list[list[list[torch.Tensor]]]:
    """Case indices of every site's batches in the engine's order: [round][site][step] -> int64 [cases]."""
    cases = {"case": jnp.arange(len(setup.data.case_ids))}
    numbered = local_batches.in_memory(cases, setup.config.batch_size, setup.config.local_epochs)

    @jax.jit
    def orders(number: Any, site: Any) -> Any:
        own = round.stream(key, round.CLIENTS, number, site, round.SHUFFLE)
        local = numbered(
            jnp.asarray(setup.plan.train)[0, site], jnp.asarray(setup.plan.train_sizes)[0, site], site, own
        )
        return jax.vmap(local.at)(jnp.arange(local.longest)), local.steps

    def of_site(number: int, site: int) -> list[torch.Tensor]:
        steps, count = orders(number, site)
        real = zip(np.asarray(steps["case"]), np.asarray(steps["mask"]) > 0)
        return [torch.tensor(case[mask]).long() for case, mask in real][: int(count)]

    return [[of_site(n, k) for k in range(len(setup.data.sites))] for n in range(rounds)]


# ---- parity ----


class Comparison(NamedTuple):
    words: str  # of the config
    rule: Callable[[torch.Tensor], torch.Tensor]
    of: str = "weights"
    optimizer: str = "sgd"
    dtypes: tuple[str, ...] = ("float64",)
    sharp: bool = True  # what the rounds changed is known to as many digits as the weights


def comparisons() -> Iterator[Comparison]:
    """Hyperbolic means in float64 only: tanh is 1 early in float32, where the printed formulas lose the points."""
    both = ("float32", "float64")
    yield Comparison("paper,fedavg", reference.mean, optimizer="adam")
    for profile, margin, delta in (("paper", "argument", (2.0, 100.0)), ("released", "radius", (4.0, 1000.0))):
        yield Comparison(f"{profile},fedavg", reference.mean, dtypes=both)
        yield Comparison(f"{profile},median", reference.median, "updates", dtypes=both)
        for word, rule in (("ext", reference.extrinsic_mean), ("gbar", reference.gyro_mean)):
            on_weights = functools.partial(rule, ball=reference.Curvature(2.0, 1.0, margin))
            on_updates = functools.partial(rule, ball=reference.Curvature(*delta, margin))
            yield Comparison(f"{profile},{word}", on_weights, sharp=False)
            yield Comparison(f"{profile},{word}_delta", on_updates, "updates")


def parity(rounds: int = 3) -> int:
    """Every rule and profile on a small federation; returns the number of disagreements."""
    data = random_data(300, (33, 21, 16, 10), (8, 5, 4, 2), folds=1)
    print(f"largest relative differences after {rounds} rounds; at most {TOLERANCE} expected")
    print("| config | optimiser | dtype | weights | their change | probabilities | |\n|---|---|---|---|---|---|---|")
    failed = 0
    for case in comparisons():
        for dtype in case.dtypes:
            with jax.enable_x64(dtype == "float64"):
                weights, change, predicted = _differences(data, case, dtype, rounds)
            # In float32 the change is what is left of two nearly equal numbers: printed, not judged.
            judged = (weights, predicted, change if case.sharp and dtype == "float64" else 0.0)
            bad = not max(judged) <= TOLERANCE[dtype]
            failed += bad
            numbers = " | ".join(f"{w:.1e}" for w in (weights, change, predicted))
            print(
                f"| {case.words} | {case.optimizer} | {dtype} | {numbers} | {'DIFFERS' if bad else 'ok'} |", flush=True
            )
    return failed


def _differences(data: federated.FederatedData, case: Comparison, dtype: str, rounds: int) -> tuple[float, ...]:
    """Largest differences, as shares of a tensor's largest entry, of weights, of their change, and of predictions."""
    config = config_of(case.words, case.optimizer, every=rounds)
    config.model.hidden = (8, 8, 8)  # longer points come so close to the boundary that the printed 1e-12 show
    arrays = {"x": data.arrays["x"].astype(dtype), "y": data.arrays["y"]}
    setup = experiment.build(config, dataclasses.replace(data, arrays=arrays))
    state = jax.tree.map(lambda v: v.astype(dtype) if v.dtype == jnp.float32 else v, setup.initial())
    key = jax.random.wrap_key_data(jnp.asarray(np.asarray(state.key)[0]))
    weights = start = to_torch(jax.tree.map(lambda v: v[0], state.variables["params"]))
    x, y = torch.tensor(arrays["x"]), torch.tensor(arrays["y"]).long()
    sites = [reference.Site(x, y, config.model.hidden, training_of(config)) for _ in data.sites]
    for batches in batches_of(setup, key, rounds):
        weights = reference.federated_round(weights, sites, batches, case.rule, case.of)
    state, _, _ = setup.rounds(replicas.place(setup.how, state), replicas.place(setup.how, setup.plan), rounds)
    variables = jax.tree.map(lambda v: jnp.asarray(np.asarray(v[0])), state.variables)
    ours, test = to_torch(variables["params"]), np.concatenate(data.splits[0].test)
    probability = setup.task.outputs(variables, {"x": arrays["x"][test], "y": arrays["y"][test]})["probability"]
    model = reference.mlp(x.shape[1], config.model.hidden).to(x.dtype)
    model.load_state_dict(weights)
    theirs = torch.softmax(model(x[test]), 1).detach().numpy()
    predicted = float(np.abs(np.asarray(probability) - theirs).max() / theirs.max())
    return _gap(ours, weights), _gap(ours, weights, start), predicted


def _gap(a: reference.State, b: reference.State, start: reference.State | None = None) -> float:
    """Of the tensors, or of what was added to `start`."""
    size = lambda name: (b[name] - start[name] if start else b[name]).abs().max()
    return max(float((a[name] - b[name]).abs().max() / size(name)) for name in a)


# ---- speed ----


class Case(NamedTuple):
    name: str
    torch: str  # key of TORCH
    words: str
    optimizer: str
    folds: int
    span: str


TORCH = {  # a PyTorch loop: words of the config, optimiser
    "SGD paper": ("paper,fedavg", "sgd"),
    "SGD released": ("released,fedavg", "sgd"),
    "SGD paper, median": ("paper,median", "sgd"),
    "Adam": ("paper,fedavg", "adam"),
}
SPANS = {"SGD paper": (("off", 1), ("off", 5), ("auto", 1), ("auto", 5)), "SGD released": (("off", 1), ("auto", 5))}
CASES = tuple(
    Case(f"{loop}, {folds} fold{'s' * (folds > 1)}, input_span={span}", loop, *TORCH[loop], folds, span)
    for loop in TORCH
    for span, folds in SPANS.get(loop, (("off", 1), ("off", 5)))
)


def torch_loop(data: federated.FederatedData, words: str, optimizer: str, fused: bool) -> Callable[[int], None]:
    config, split = config_of(words, optimizer), data.splits[0]
    x, y = torch.tensor(data.arrays["x"]), torch.tensor(data.arrays["y"]).long()
    how = training_of(config, fused)
    sites = [reference.Site(x[torch.tensor(c)], y[torch.tensor(c)], config.model.hidden, how) for c in split.train]
    held = {"weights": {k: v.detach().clone() for k, v in sites[0].model.state_dict().items()}}
    rule = reference.median if "median" in words else reference.mean

    def go(rounds: int) -> None:
        for _ in range(rounds):
            batches = [reference.shuffled(len(site.y), config.batch_size) for site in sites]
            held["weights"] = reference.federated_round(held["weights"], sites, batches, rule)

    return go


def engine_loop(data: federated.FederatedData, case: Case, rounds: int) -> tuple[Callable[[int], None], str]:
    config = config_of(case.words, case.optimizer, tuple(range(case.folds)), case.span, rounds)
    setup = experiment.build(config, data)
    held = {"state": replicas.place(setup.how, setup.initial()), "round": 0}
    plan = replicas.place(setup.how, setup.plan)

    def go(rounds: int) -> None:
        held["round"] += rounds
        held["state"], _, _ = jax.block_until_ready(setup.rounds(held["state"], plan, held["round"]))

    began = time.monotonic()
    go(1)
    return go, f"{case.name}: compile and first round {time.monotonic() - began:.1f} s; {setup.how.text}"


def speed(rounds: int, repeats: int, only: str, fused: bool) -> None:
    data, what = speed_data()
    cases = [c for c in CASES if only.lower() in c.name.lower()]
    sizes = "/".join(str(len(part)) for part in data.splits[0].train)
    about = f"width {data.arrays['x'].shape[1]}, {sizes} training cases, {torch.get_num_threads()} PyTorch threads"
    print(f"{what}, {about}, {rounds} rounds x {repeats} repeats")
    loops: dict[str, Callable[[int], None]] = {}
    for name in dict.fromkeys(c.torch for c in cases):
        loops[name] = torch_loop(data, *TORCH[name], fused)
        loops[name](1)
    for case in cases:
        loops[case.name], line = engine_loop(data, case, rounds)
        print(line, flush=True)
    samples: dict[str, list[Load]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, go in loops.items():
            time.sleep(0.05)  # the thread pool of the loop before falls asleep
            with Load() as load:
                go(rounds)
            samples[name].append(load)
    _table(cases, samples, rounds)


def _table(cases: list[Case], samples: dict[str, list[Load]], rounds: int) -> None:
    """Medians; a ratio pairs the two samples of one repeat. ms are per round and fold."""
    print("\n| case | torch ms/round | ours ms/round | torch / ours: median [min-max] | CPU ratio | others' cores | |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        theirs, ours = samples[case.torch], samples[case.name]
        ms = lambda loads, n: 1e3 * float(np.median([s.wall for s in loads])) / n
        ratios = [case.folds * t.wall / o.wall for t, o in zip(theirs, ours)]
        cpu = float(np.median([case.folds * t.cpu / o.cpu for t, o in zip(theirs, ours)]))
        others = [s.others for s in (*theirs, *ours) if s.others is not None]
        disturbed = sum(o > BUSY for o in others) > len(others) / 2
        load = f"{np.median(others):.2f} [{min(others):.2f}-{max(others):.2f}]" if others else "unknown"
        print(
            f"| {case.name} | {ms(theirs, rounds):.0f} | {ms(ours, rounds * case.folds):.0f}"
            f" | {np.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] | {cpu:.2f} | {load}"
            f" | {'inconclusive: busy machine' if disturbed else ''} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true", help="compare numbers, not time")
    parser.add_argument("--rounds", type=int, default=2, help="rounds per sample")
    parser.add_argument("--repeats", type=int, default=5, help="samples of every loop, interleaved")
    parser.add_argument("--only", default="", help="part of a case's name, e.g. Adam")
    parser.add_argument("--fused", action="store_true", help="PyTorch's fused optimiser kernels")
    parser.add_argument("--threads", type=int, default=0, help="threads and host devices; 0 = the cores")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if options.parity else threads)
    prepare_jax(1 if options.parity else threads)
    if options.parity:
        return min(parity(), 1)
    speed(options.rounds, options.repeats, options.only, options.fused)
    return 0


if __name__ == "__main__":
    sys.exit(main())
