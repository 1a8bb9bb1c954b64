"""Training the diffusion generator: Adam on the squared error of v, averaged parameters, and its file."""

import functools
import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Tree
from fedjax_seg.models import denoiser
from fedjax_seg.synthesis import diffusion, diffusion_data
from fedjax_seg.synthesis.storage import write_whole

MODEL = "denoiser.npz"
LOSSES = "loss.csv"
_CHUNK = 25  # steps per call of the device
_WARM_UP = 100  # steps until the full learning rate
_CLIP = 1.0  # of the gradient's norm
_SAVE_SECONDS = 60.0

Tell = Callable[[str], None]


class Options(NamedTuple):
    """All that decides the parameters but the number of steps."""

    data: str  # folder
    size: int
    window: tuple[float, ...] | None
    clients: tuple[str, ...]
    held_out: float
    width: int
    depth: int
    patch: int
    batch: int
    rate: float
    average: float
    seed: int


class State(NamedTuple):
    """Where training stands. `averaged` is what samples are drawn with."""

    step: Array  # int32, finished steps
    params: Tree
    averaged: Tree
    optimiser: Tree


class Trained(NamedTuple):
    """A model file, read. losses: rows (step, mean loss since the row before, seconds trained)."""

    options: Options
    facts: dict[str, Any]  # of the training data
    state: State
    losses: np.ndarray


def network(options: Options, clients: int) -> Any:
    return denoiser.denoiser(width=options.width, depth=options.depth, patch=options.patch, clients=clients)


def compiled_for(options: Options) -> Options:
    """The options without those that no compiled program depends on."""
    return options._replace(data="", window=(), clients=(), held_out=0.0)


def optimiser(rate: float) -> optax.GradientTransformation:
    """Adam as Ho et al. 2020, with a linear warm-up; gradients clipped by their norm."""
    return optax.chain(optax.clip_by_global_norm(_CLIP), optax.adam(optax.linear_schedule(0.0, rate, _WARM_UP)))


def start(options: Options, clients: int) -> State:
    """The state before the first step."""
    blank = jnp.zeros((1, options.size, options.size, 1))
    key = jax.random.fold_in(jax.random.key(options.seed), 2**31 - 1)
    one = jnp.zeros(1)
    params = jax.jit(network(options, clients).init)(key, blank, blank, one, one.astype(jnp.int32))["params"]
    averaged = jax.tree.map(jnp.copy, params)  # buffers of its own: `advance` takes the state's over
    return State(jnp.int32(0), params, averaged, optimiser(options.rate).init(params))


def loss(
    params: Tree, model: Any, x: Array, mask: Array, client: Array, times: Array, noise: Array, alpha_bar: Array
) -> Array:
    """Mean squared error of v at the given times (int32 [B])."""
    z = diffusion.noised(x, noise, alpha_bar[times])
    told = model.apply({"params": params}, z, mask, times / diffusion.STEPS, client)
    return jnp.mean(jnp.square(told - diffusion.velocity(x, noise, alpha_bar[times])))


def drawn_times(key: Array, count: int) -> Array:
    """int32 [count] in 1..T, spread evenly with one random shift (Kingma et al. 2021, appendix I.1): less variance."""
    u = (jax.random.uniform(key) + jnp.arange(count) / count) % 1.0
    return jnp.minimum(1 + jnp.floor(u * diffusion.STEPS).astype(jnp.int32), diffusion.STEPS)


@functools.partial(jax.jit, static_argnames=("options", "clients"), donate_argnames="state")
def advance(
    state: State, count: Array, x: Array, mask: Array, client: Array, *, options: Options, clients: int
) -> tuple[State, Array]:
    """`count` more steps over slices x, mask [N, H, W, 1], client [N]; the mean loss.

    Step i draws everything from fold_in(seed, i): neither the chunks nor an interruption change a result.
    """
    model, update = network(options, clients), optimiser(options.rate)
    alpha_bar = jnp.asarray(diffusion.cosine(), jnp.float32)

    def step(_: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, total = carry
        of_rows, of_times, of_noise = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), state.step), 3)
        rows = jax.random.randint(of_rows, (options.batch,), 0, x.shape[0])
        noise = jax.random.normal(of_noise, (options.batch, *x.shape[1:]))
        value, slope = jax.value_and_grad(loss)(
            state.params,
            model,
            x[rows],
            mask[rows],
            client[rows],
            drawn_times(of_times, options.batch),
            noise,
            alpha_bar,
        )
        change, opt = update.update(slope, state.optimiser, state.params)
        params = optax.apply_updates(state.params, change)
        # A short run must forget its start: the average reaches back over a ninth of the steps until `average` holds.
        keep = jnp.minimum(options.average, (1 + state.step) / (10 + state.step))
        averaged = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state.averaged, params)
        return State(state.step + 1, params, averaged, opt), total + value

    state, total = jax.lax.fori_loop(0, count, step, (state, jnp.float32(0)))
    return state, total / count


def train(
    *,
    data: str = "",
    workdir: str = "",
    steps: int = 3000,
    minutes: float = 0.0,
    size: int = 64,
    window: tuple[float, ...] | None = None,
    clients: tuple[str, ...] = (),
    held_out: float = 0.1,
    width: int = 16,
    depth: int = 3,
    patch: int = 1,
    batch: int = 8,
    rate: float = 1e-3,
    average: float = 0.999,
    seed: int = 0,
    tell: Tell = print,
) -> Path:
    """Trains a mask-conditioned diffusion model on slices with masks; the same command continues it.

    Source: Ho et al. 2020, with the cosine schedule of Nichol and Dhariwal 2021 and v of Salimans and Ho 2022.

    Args:
      data: a data set in TFDS form, or a folder of images and masks with metadata.csv.
      workdir: folder of the model, denoiser.npz; no slice is stored in it.
      steps: to train in all, those of earlier calls included.
      minutes: after so many this call stops, 0 = never.
      size: pixels per side; a multiple of patch * 2^depth, and a divisor of the stored size for data in TFDS form.
      window: (centre, width) in HU that the model sees; what lies outside is clipped. () = the full range of images
        that are no HU; None = (40, 400) for data in TFDS form, () for a folder of images.
      clients: names, () = all; the model is told the client of every slice, so that samples keep its profile.
      held_out: share of each client's patients kept out of training, for the memorisation check.
      width, depth, patch: of the network (models/denoiser.py). At 64 pixels a step of the default costs 0.18 s of one
        core, one of (32, 2, 2) 0.10 s; in equal time the default reaches the lower loss, and its tumours are sharper.
      batch, rate: slices per step and learning rate.
      average: most weight that the running average of the parameters gives to its past.
      seed: of everything.

    Returns: the model file.
    Raises: UserError on an option or the data, or where the workdir holds a model of other options.
    """
    options = Options(
        os.path.abspath(os.path.expanduser(data)) if data else "",
        *(
            size,
            None if window is None else tuple(window),
            tuple(clients),
            held_out,
            width,
            depth,
            patch,
            batch,
            rate,
            average,
            seed,
        ),
    )
    _check(options, workdir, steps, minutes)
    slices = diffusion_data.read(data, size=size, window=options.window, clients=options.clients, held_out=held_out)
    path = Path(workdir).expanduser() / MODEL
    if path.is_file():
        trained = _continued(path, options, slices)
    else:
        trained = Trained(options, dict(slices.facts), start(options, len(slices.clients)), np.zeros((0, 3)))
    own = slices.train
    mask = diffusion_data.as_input(slices.label[own], slices.classes)
    arrays = [jnp.asarray(a) for a in (slices.x[own], mask, slices.client[own])]
    tell(f"{len(own)} training slices of {len(slices.clients)} clients, {len(slices.held_out)} held out")
    return _run(path, trained, arrays, len(slices.clients), steps, minutes * 60 or np.inf, tell)


def _check(options: Options, workdir: str, steps: int, minutes: float) -> None:
    if not workdir:
        raise checks.UserError("workdir: no folder given; name one for the model")
    checks.number("steps", steps, low=1, high=10**8, integer=True)
    checks.number("minutes", minutes, low=0)
    checks.number("size", options.size, low=4, high=1024, integer=True)
    checks.number("batch", options.batch, low=1, integer=True)
    checks.number("rate", options.rate, above=0, high=1)
    checks.number("average", options.average, low=0, high=0.999999)
    checks.number("seed", options.seed, low=0, high=2**31 - 1, integer=True)
    network(options, 1)  # its own checks
    multiple = options.patch * 2**options.depth
    if options.size % multiple:
        raise checks.UserError(f"size: {options.size} given, a multiple of {multiple} expected (patch * 2^depth)")


def _continued(path: Path, options: Options, slices: diffusion_data.TrainingSlices) -> Trained:
    trained = load(path)
    for name, old, new in zip(Options._fields, trained.options, options):
        if name != "data" and old != new:
            raise checks.UserError(f"{name}: {new!r} given, the model in {path.parent} has {old!r}; name a new workdir")
    if trained.facts["digest"] != slices.facts["digest"]:
        raise checks.UserError(f"data: other slices than those the model in {path.parent} has seen; name a new workdir")
    return trained._replace(options=options)


def _run(
    path: Path,
    trained: Trained,
    arrays: list[Array],
    clients: int,
    steps: int,
    limit: float,
    tell: Callable[[str], None],
) -> Path:
    begun = saved = time.monotonic()
    before = float(trained.losses[-1, 2]) if len(trained.losses) else 0.0
    step, options = int(trained.state.step), compiled_for(trained.options)
    while step < steps and time.monotonic() - begun < limit:
        count = min(_CHUNK - step % _CHUNK, steps - step)
        state, value = advance(trained.state, jnp.int32(count), *arrays, options=options, clients=clients)
        step, value = step + count, float(value)
        if not np.isfinite(value):
            raise checks.UserError(f"rate: the loss is not finite at step {step}; lower the rate")
        row = (step, value, before + time.monotonic() - begun)
        trained = trained._replace(state=state, losses=np.vstack([trained.losses, row]))
        if time.monotonic() - saved > _SAVE_SECONDS:
            save(path, trained)
            saved = time.monotonic()
        if step % (8 * _CHUNK) == 0 or step == steps:
            tell(f"step {step}: loss {np.mean(trained.losses[-8:, 1]):.4f}, {row[2] / 60:.1f} minutes")
    save(path, trained)
    tell(f"{path}: {step} steps")
    return path


def _named(tree: Tree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def save(path: Path, trained: Trained) -> None:
    """Writes the model file (all of it or nothing), and beside it the losses as CSV."""
    content = io.BytesIO()
    about = json.dumps({"options": trained.options._asdict(), "facts": trained.facts}, sort_keys=True)
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in _named(trained.state).items()}
    np.savez(content, about=np.array(about), losses=trained.losses, **arrays)
    rows = ["step,loss,seconds", *(f"{int(s)},{value:.6f},{seconds:.1f}" for s, value, seconds in trained.losses)]
    write_whole(path, content.getvalue())
    write_whole(path.with_name(LOSSES), ("\n".join(rows) + "\n").encode())


def digest(trained: Trained) -> str:
    """sha256 of the parameters that samples are drawn with."""
    total = hashlib.sha256()
    for name, leaf in sorted(_named(trained.state.averaged).items()):
        total.update(name.encode())
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def load(path: str | Path) -> Trained:
    """Reads a model file. Raises: UserError where there is none, or it is no model of this program."""
    path = Path(path)
    if not path.is_file():
        raise checks.UserError(f"workdir: no {path.name} in {path.parent}; train one first")
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
        about = json.loads(str(found.pop("about")))
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["options"].items()}
        options, losses = Options(**given), found.pop("losses")
        like = jax.eval_shape(lambda: start(options, len(about["facts"]["slices"])))
        names, described = _named(like), jax.tree.structure(like)
        leaves = [jnp.asarray(found[name]) for name in names]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise checks.UserError(f"{path}: no model of this program ({error}); train it again") from None
    wrong = [n for (n, a), b in zip(names.items(), leaves) if a.shape != b.shape]
    if wrong:
        raise checks.UserError(f"{path}: {wrong[0]} has another shape than its options say; train it again")
    return Trained(options, about["facts"], jax.tree.unflatten(described, leaves), losses)
