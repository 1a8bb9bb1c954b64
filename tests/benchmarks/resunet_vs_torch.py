"""The engine's federated step of the residual 3D U-Net against PyTorch training the same clients one after the other.

    python tests/benchmarks/resunet_vs_torch.py --parity     numbers: exit code 1 where they differ
    python tests/benchmarks/resunet_vs_torch.py --quick      depth 3 only, three repeats
    python tests/benchmarks/resunet_vs_torch.py [--repeats=5 --clients=2 --steps=1 --depth=3 --width=24 --size=32]

Needs the extra `bench`. See README.md beside this file.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import federated_step  # noqa: E402
import torch_resunet as reference  # noqa: E402
import torch_rounds  # noqa: E402
from machine_load import Load, disturbance, interleaved, spread  # noqa: E402

from fedjax_seg import models  # noqa: E402
from fedjax_seg.core import tree  # noqa: E402
from fedjax_seg.core.types import Task  # noqa: E402
from fedjax_seg.main import prepare_jax  # noqa: E402

MM, LAST, FIRST, OURS = "torch.mm 2048", "torch channels_last_3d", "torch NCDHW", "ours"
LIMITS = {LAST: 1.0, FIRST: 0.9}


class Case(NamedTuple):
    size: int
    width: int
    depth: int
    clients: int
    steps: int = 1
    batch: int = 1
    channels: int = 4
    classes: int = 4

    @property
    def name(self) -> str:
        return (
            f"{self.size}^3 x {self.channels} channels, width {self.width}, depth {self.depth},"
            f" {self.clients} clients x {self.steps} step(s) x {self.batch}"
        )

    @property
    def flops(self) -> float:
        """Of the convolutions: forward, and twice that backward (the first layer has no gradient by its input).

        The 1x1x1 convolutions are counted on the small volume, where ours runs them (PyTorch does 8 times that).
        """
        w, first = self.width, 27 * self.channels * self.width
        forward = self.size**3 * (first + 2 * 27 * w * w)
        for level in range(1, self.depth + 1):
            f = w * 2**level
            forward += (self.size / 2**level) ** 3 * (27 * f * f / 2 + 2 * 27 * f * f + f * f / 2)
        for level in range(self.depth):
            f = w * 2**level
            out = max(f, 2 * w)
            forward += (self.size / 2**level) ** 3 * 27 * (2 * f * out + 2 * out * out)
        forward += self.size**3 * 27 * 2 * w * self.classes
        return self.clients * self.steps * self.batch * 2 * (3 * forward - self.size**3 * first)


def data_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Noisy balls in balls: x float32 [C, S, B, D, H, W, channels], y int32 [C, S, B, D, H, W]."""
    rng = np.random.default_rng(0)
    lead = (case.clients, case.steps, case.batch)
    centre, radius = rng.uniform(0.4, 0.6, (*lead, 1, 1, 1, 3)), rng.uniform(0.3, 0.4, (*lead, 1, 1, 1))
    grid = np.stack(np.meshgrid(*3 * (np.linspace(0, 1, case.size),), indexing="ij"), -1)
    far = np.linalg.norm(grid - centre, axis=-1)
    y = sum((far < radius * part).astype(np.int32) for part in (1, 0.7, 0.4))
    x = y[..., None] * rng.uniform(0.5, 1, case.channels) + 0.5 * rng.normal(size=(*y.shape, case.channels))
    return x.astype(np.float32), y.astype(np.int32)


# ---- ours ----


def task_of(module: Any) -> Task:
    """Voxel-wise cross entropy; the label's logit by a comparison, as tasks/segmentation.py does it."""

    def loss(variables: Any, batch: Any, key: Any) -> Any:
        mutable = [name for name in variables if name != "params"]
        logits, updated = module.apply(variables, batch["x"], train=True, mutable=mutable, rngs={"dropout": key})
        label = batch["y"][..., None] == jnp.arange(logits.shape[-1])
        entropy = jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(label, logits, 0), -1)
        return entropy.mean(), dict(updated)

    init = lambda key, batch: module.init(key, batch["x"])
    return Task(init, loss, lambda variables, batch: {}, lambda outputs, cases: [], {})


def engine(case: Case, dropout: float = 0.0) -> tuple[Callable[[Any], Any], Any]:
    """The federated step of the residual 3D U-Net."""
    model = models.make("resunet3d", width=case.width, depth=case.depth, classes=case.classes, dropout=dropout)
    return federated_step.engine(task_of(model), *data_of(case))


# ---- numbers ----


def parity() -> int:
    """A round of two clients and two steps from the same weights on both sides; returns 1 where they differ."""
    case = Case(16, 4, 2, 2, 2, 2)
    program, variables = engine(case)
    change = jax.tree.map(lambda d: d / case.clients, program(variables))
    ours = reference.state_of(tree.paths(jax.tree.map(jnp.add, variables, change)))
    start = reference.state_of(tree.paths(variables))
    model = reference.ResUnet3d(case.width, case.depth)
    torch_rounds.load(model, start)
    theirs = torch_rounds.federated_round(
        model,
        model.state_dict() | start,
        federated_step.torch_batches(*data_of(case)),
        federated_step.LR,
        federated_step.MOMENTUM,
    )
    # The gradient of a bias before an instance norm is rounding errors on both sides.
    gap = lambda n: float((ours[n] - theirs[n]).abs().max() / max(float((theirs[n] - start[n]).abs().max()), 1e-4))
    worst = max(ours, key=gap)
    print(f"largest difference as a share of what the round changed: {gap(worst):.1e} ({worst}); at most 1e-3 expected")
    return int(not gap(worst) <= 1e-3)


# ---- speed ----


def loops_of(case: Case) -> dict[str, Callable[[], Any]]:
    """{name: call} of everything that is timed on a case."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    made: dict[str, Callable[[], Any]] = {MM: lambda: torch.mm(a, b)}
    batches = federated_step.torch_batches(*data_of(case))
    for name, form in ((FIRST, torch.contiguous_format), (LAST, torch.channels_last_3d)):
        made[name] = torch_rounds.loop(reference.ResUnet3d(case.width, case.depth), batches, form)
    program, variables = engine(case)
    made[OURS] = lambda: program(variables)
    return made


def measure(case: Case, repeats: int) -> bool:
    """Prints the table; whether both limits hold."""
    print(f"\n{case.name}: {case.flops / 1e9:.0f} GFLOP of convolutions", flush=True)
    loops = loops_of(case)
    samples = interleaved(loops, repeats, jax.block_until_ready, {})
    return _table(case, samples)


def _table(case: Case, samples: Mapping[str, list[Load]]) -> bool:
    """Medians [min-max]; a ratio pairs the samples of one repeat."""
    pairs = lambda a, b: [s.wall / t.wall for s, t in zip(samples[a], samples[b])]
    rate = 2 * 2048**3 / float(np.median([s.wall for s in samples[MM]]))
    print(
        f"torch.mm: {rate / 1e9:.0f} GF/s\n"
        "| | ms | GF/s | share of torch.mm | x channels_last_3d | x NCDHW |"
        " CPU time x channels_last_3d | others' cores |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, loads in samples.items():
        if name == MM:
            continue
        wall = [s.wall for s in loads]
        speed = case.flops / float(np.median(wall))
        against = [spread(pairs(name, form)) for form in (LAST, FIRST)]
        against.append(spread([s.cpu / t.cpu for s, t in zip(loads, samples[LAST])]))
        load = disturbance(loads)
        ms = spread([1e3 * s for s in wall], 0)
        print(f"| {name} | {ms} | {speed / 1e9:.0f} | {speed / rate:.0%} | {' | '.join(against)} | {load} |")
    ratios = {form: float(np.median(pairs(OURS, form))) for form in LIMITS}
    held = all(ratios[form] <= limit for form, limit in LIMITS.items())
    limits = ", ".join(f"{ratios[form]:.2f} of {form} (limit {limit})" for form, limit in LIMITS.items())
    print(f"time of ours: {limits}: {'held' if held else 'NOT held'}", flush=True)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true", help="compare numbers, not time")
    parser.add_argument("--quick", action="store_true", help="depth 3, three repeats")
    parser.add_argument("--repeats", type=int, default=5, help="samples of every loop, interleaved")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="local steps per client")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--depth", type=int, default=0, help="0 = 3 and 4")
    parser.add_argument("--threads", type=int, default=0, help="threads and host devices; 0 = the cores")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    prepare_jax(threads)
    if options.parity:
        return parity()
    repeats = 3 if options.quick else options.repeats
    depths = [options.depth] if options.depth else [3] if options.quick else [3, 4]
    cases = [Case(options.size, options.width, depth, options.clients, options.steps) for depth in depths]
    held = [measure(case, repeats) for case in cases]  # all of them, also after one that failed
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
