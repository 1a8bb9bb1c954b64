"""The engine's federated step of the U-Net against PyTorch training the same clients one after the other.

    python tests/benchmarks/unet_vs_torch.py --parity     numbers: exit code 1 where they differ
    python tests/benchmarks/unet_vs_torch.py --quick      64x64, width 48, few repeats (about two minutes)
    python tests/benchmarks/unet_vs_torch.py [--repeats=5 --clients=4 --steps=1 --only=128 --threads=2]

Needs the extra `bench`. See README.md beside this file.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import federated_step  # noqa: E402
import torch_rounds  # noqa: E402
import torch_unet as reference  # noqa: E402
from machine_load import Load, disturbance, interleaved, spread  # noqa: E402

from fedjax_seg import models  # noqa: E402
from fedjax_seg.core.types import Task  # noqa: E402
from fedjax_seg.main import prepare_jax  # noqa: E402
from fedjax_seg.models import conv  # noqa: E402


class Case(NamedTuple):
    size: int
    width: int
    clients: int
    steps: int = 1
    batch: int = 8

    @property
    def name(self) -> str:
        return (
            f"{self.size}x{self.size}, width {self.width}, {self.clients} clients x {self.steps} step(s) x {self.batch}"
        )

    @property
    def flops(self) -> float:
        """Of the convolutions: forward, and twice that backward (the first layer has no gradient by its input)."""
        w, pixels = self.width, self.size**2
        double = lambda i, o: 9 * o * (i + o)
        forward = pixels * (double(1, w) + double(2 * w, w) + 2 * w)
        forward += pixels / 4 * (double(w, 2 * w) + double(4 * w, 2 * w) + 4 * 2 * w * w)
        forward += pixels / 16 * (double(2 * w, 4 * w) + 4 * 4 * w * 2 * w)
        return self.clients * self.steps * self.batch * 2 * (3 * forward - pixels * 9 * w)


def data_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Noisy discs: x float32 [C, S, B, H, W, 1], y int32 [C, S, B, H, W]."""
    rng = np.random.default_rng(0)
    lead = (case.clients, case.steps, case.batch)
    centre, radius = rng.uniform(0.3, 0.7, (*lead, 1, 1, 2)), rng.uniform(0.1, 0.3, (*lead, 1, 1))
    grid = np.stack(np.meshgrid(*2 * (np.linspace(0, 1, case.size),), indexing="ij"), -1)
    y = np.linalg.norm(grid - centre, axis=-1) < radius
    x = y + 0.5 * rng.normal(size=y.shape)
    return x[..., None].astype(np.float32), y.astype(np.int32)


# ---- ours ----


def task_of(module: Any) -> Task:
    """Pixel-wise cross entropy."""

    def loss(variables: Any, batch: Any, key: Any) -> Any:
        mutable = [name for name in variables if name != "params"]
        logits, updated = module.apply(variables, batch["x"], train=True, mutable=mutable)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), dict(updated)

    init = lambda key, batch: module.init(key, batch["x"])
    return Task(init, loss, lambda variables, batch: {}, lambda outputs, cases: [], {})


def engine(case: Case, lanes: int, rule: str = "auto") -> tuple[Callable[[Any], Any], Any]:
    """The federated step of the U-Net."""
    return federated_step.engine(task_of(models.make("unet", width=case.width, conv=rule)), *data_of(case), lanes)


def grouped(case: Case) -> Callable[[], Any]:
    """What vmap over clients makes of lax's convolution, on one device and outside of any loop (where it is faster)."""
    x, y = (jnp.asarray(v)[:, 0] for v in data_of(case))
    task = task_of(models.make("unet", width=case.width, conv="grouped"))

    def gradients(variables: Any, x: Any, y: Any) -> Any:
        loss = lambda params: task.loss({**variables, "params": params}, {"x": x, "y": y}, None)
        return jax.grad(loss, has_aux=True)(variables["params"])

    with mock.patch.dict(conv.BY_RULE, grouped=jax.lax.conv_general_dilated):
        variables = jax.jit(task.init)(jax.random.key(0), {"x": x[0, :1]})
        start = jax.tree.map(lambda v: jnp.stack([v] * case.clients), variables)  # local models differ after a step
        program = jax.jit(jax.vmap(gradients)).lower(start, x, y).compile()
    return lambda: program(start, x, y)


def private(case: Case, clip: bool) -> Callable[[], Any]:
    """Gradients of one client's batches in a loop, with GroupNorm: clipped example by example, or of the mean."""
    x, y = (jnp.asarray(v)[0] for v in data_of(case))
    task = task_of(models.make("unet", width=case.width, norm="group"))
    variables = jax.jit(task.init)(jax.random.key(0), {"x": x[0, :1]})
    gradient = lambda params, x, y: jax.grad(lambda p: task.loss({"params": p}, {"x": x, "y": y}, None)[0])(params)

    def clipped(params: Any, x: Any, y: Any) -> Any:
        def add(total: Any, one: Any) -> Any:
            found = gradient(params, one[0][None], one[1][None])
            factor = jnp.minimum(1, 1 / jnp.maximum(optax.global_norm(found), 1e-12)) / case.batch
            return jax.tree.map(lambda t, g: t + factor * g, total, found), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, y))[0]

    def step(params: Any, batch: Any) -> Any:
        found = (clipped if clip else gradient)(params, *batch)
        return jax.tree.map(lambda p, g: p - federated_step.LR * g, params, found), None

    program = jax.jit(lambda params, x, y: jax.lax.scan(step, params, (x, y))[0])
    return lambda: program(variables["params"], x, y)


# ---- numbers ----


def to_torch(variables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Flax variables under the names and in the forms of the PyTorch model."""
    state: dict[str, Any] = {}
    turn = lambda kernel: np.transpose(kernel, (3, 2, 0, 1))
    for name, layers in variables["params"].items():
        where = name.replace("_", ".")
        if "kernel" in layers:  # a transposed convolution correlates where lax's convolves
            kernel = np.asarray(layers["kernel"])
            state[f"{where}.weight"] = (
                turn(kernel) if name == "head" else np.transpose(kernel[::-1, ::-1], (2, 3, 0, 1))
            )
            state[f"{where}.bias"] = layers["bias"]
            continue
        for i in range(2):
            norm, stats = layers[f"BatchNorm_{i}"], variables["batch_stats"][name][f"BatchNorm_{i}"]
            state[f"{where}.{3 * i}.weight"] = turn(layers[f"Conv_{i}"]["kernel"])
            state[f"{where}.{3 * i}.bias"] = layers[f"Conv_{i}"]["bias"]
            state[f"{where}.{3 * i + 1}.weight"], state[f"{where}.{3 * i + 1}.bias"] = norm["scale"], norm["bias"]
            state[f"{where}.{3 * i + 1}.running_mean"] = stats["mean"]
            state[f"{where}.{3 * i + 1}.running_var"] = stats["var"]
    return {name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()}


def parity() -> int:
    """A round of two clients and two steps from the same weights on both sides; returns 1 where they differ."""
    case = Case(16, 8, 2, 2, 4)
    program, variables = engine(case, lanes=1)
    change = jax.tree.map(lambda d: d / case.clients, program(variables))
    ours = to_torch(jax.tree.map(np.asarray, jax.tree.map(jnp.add, variables, change)))
    model, start = reference.Unet(case.width), to_torch(jax.tree.map(np.asarray, variables))
    torch_rounds.load(model, start)
    theirs = torch_rounds.federated_round(
        model,
        model.state_dict() | start,
        federated_step.torch_batches(*data_of(case)),
        federated_step.LR,
        federated_step.MOMENTUM,
    )
    # Running variances differ by definition (biased here); the gradient of a bias before a norm is rounding errors.
    names = [n for n in ours if "running_var" not in n]
    gap = lambda n: float((ours[n] - theirs[n]).abs().max() / max(float((theirs[n] - start[n]).abs().max()), 1e-4))
    worst = max(names, key=gap)
    print(f"largest difference as a share of what the round changed: {gap(worst):.1e} ({worst}); at most 1e-3 expected")
    return int(not gap(worst) <= 1e-3)


# ---- speed ----


def mm() -> Callable[[], Any]:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return lambda: torch.mm(a, b)


def loops_of(case: Case, baseline: bool) -> dict[str, Callable[[], Any]]:
    """{name: call} of everything that is timed on a case."""
    made: dict[str, Callable[[], Any]] = {"torch.mm 2048": mm()}
    for name, form in (("torch NCHW", torch.contiguous_format), ("torch channels_last", torch.channels_last)):
        made[name] = torch_rounds.loop(reference.Unet(case.width), federated_step.torch_batches(*data_of(case)), form)
    if jax.default_backend() == "cpu":
        kinds = {"ours": (1, "auto")}
    else:
        kinds = {
            f"ours, {lanes} lanes, {rule}": (lanes, rule) for lanes in (1, 2, case.clients) for rule in conv.RULES[1:]
        }
    for name, (lanes, rule) in kinds.items():
        program, variables = engine(case, lanes, rule)
        made[name] = lambda program=program, variables=variables: program(variables)
    if baseline:
        made["vmapped grouped convolution"] = grouped(case)
    made["one client, GroupNorm"] = private(case, clip=False)
    made["one client, GroupNorm, DP"] = private(case, clip=True)
    return made


def measure(case: Case, repeats: int, baseline: bool) -> None:
    print(f"\n{case.name}: {case.flops / 1e9:.0f} GFLOP of convolutions", flush=True)
    loops = loops_of(case, baseline)
    samples = interleaved(
        loops, repeats, jax.block_until_ready, {"vmapped grouped convolution": 2}
    )  # seconds per call, and far away
    _table(case, samples)


def _table(case: Case, samples: Mapping[str, list[Load]]) -> None:
    """Medians [min-max]; a ratio pairs the samples of one repeat."""
    pairs = lambda a, b: [s.wall / t.wall for s, t in zip(samples[a], samples[b])]
    rate = 2 * 2048**3 / float(np.median([s.wall for s in samples["torch.mm 2048"]]))
    print(
        f"torch.mm: {rate / 1e9:.0f} GF/s\n"
        "| | ms | GF/s | share of torch.mm | x channels_last | x NCHW | CPU time x channels_last | others' cores |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, loads in samples.items():
        if name == "torch.mm 2048":
            continue
        flops = case.flops / case.clients if name.startswith("one client") else case.flops
        wall = [s.wall for s in loads]
        speed = flops / float(np.median(wall))
        against = [spread(pairs(name, f"torch {form}")) for form in ("channels_last", "NCHW")]
        against.append(spread([s.cpu / t.cpu for s, t in zip(loads, samples["torch channels_last"])]))
        load = disturbance(loads)
        if name.startswith("one client"):
            against = ["", "", ""]
        ms = spread([1e3 * s for s in wall], 0)
        print(f"| {name} | {ms} | {speed / 1e9:.0f} | {speed / rate:.0%} | {' | '.join(against)} | {load} |")
    if "vmapped grouped convolution" in samples and "ours" in samples:
        faster = spread(pairs("vmapped grouped convolution", "ours"))
        print(f"ours is {faster} times faster than vmapped grouped convolution")
    print(
        f"DP step / non-private step: {spread(pairs('one client, GroupNorm, DP', 'one client, GroupNorm'))}", flush=True
    )


CASES = ((64, 48), (64, 52), (128, 48))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true", help="compare numbers, not time")
    parser.add_argument("--quick", action="store_true", help="the first case, two clients, three repeats")
    parser.add_argument("--repeats", type=int, default=5, help="samples of every loop, interleaved")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="local steps per client")
    parser.add_argument("--only", default="", help="part of a case's name, e.g. 'width 52' or 128x")
    parser.add_argument("--threads", type=int, default=0, help="threads and host devices; 0 = the cores")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    prepare_jax(threads)
    if options.parity:
        return parity()
    clients, repeats = (2, 3) if options.quick else (options.clients, options.repeats)
    for number, (size, width) in enumerate(CASES[:1] if options.quick else CASES):
        case = Case(size, width, clients if size < 128 else min(clients, 2), options.steps)
        if options.only in case.name:
            measure(case, repeats, baseline=number == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
