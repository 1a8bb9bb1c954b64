"""Drawing slices from a trained diffusion model, in the form and the unit of the data it has learned from."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Tree
from fedjax_seg.data import records
from fedjax_seg.synthesis import contact_sheet, diffusion, diffusion_data, diffusion_training, memorisation
from fedjax_seg.synthesis.ct import split_sizes
from fedjax_seg.synthesis.diffusion_data import TrainingSlices
from fedjax_seg.synthesis.diffusion_training import Tell, Trained

GENERATOR = "ct diffusion (denoising diffusion model, samples conditioned on masks and clients)"
NAME = "ct_diffusion"
_CHUNK = 32  # slices per call of the device: one compiled program for every number
_SHIFT, _SCALE = 0.03, (0.85, 1.15)  # of the image's side, and of a mask


class Drawn(NamedTuple):
    """Slices: x float32 [n, H, W, 1] in [-1, 1], label uint8 [n, H, W], client int32 [n]."""

    x: np.ndarray
    label: np.ndarray
    client: np.ndarray


def ct_diffusion(
    folder: str | Path = "",
    *,
    workdir: str = "",
    data: str = "",
    clients: tuple[int, ...] = (200, 200, 200, 100, 100),
    test: int = 200,
    shadow: int = 0,
    steps: int = 50,
    eta: float = 0.0,
    seed: int = 0,
    tell: Tell = print,
) -> Path:
    """Writes slices of a trained model as a TFDS data set: splits client_1, client_2, ..., test and shadow.

    Beside the data set: samples.png (slices of every split with the outlines of their masks) and, in memorisation.png,
    .csv and .json, how near the samples come to the slices the model was trained on.

    A slice depends on (model, seed, split, number) alone, up to rounding: more slices leave the first ones as they are.

    Args:
      folder: new, empty, or holding an earlier output of the same model and options (which is written again).
      workdir: folder of the model.
      data: the folder it was trained on, where it has moved since; '' = as in training. Its masks are what samples are
        drawn for (`placed_mask`); the model file holds no slice.
      clients: slices of each client; client k has the k-th client's profile and masks (and so on from the first).
      test, shadow: slices of these splits, 0 = none; they take the profiles of the clients in turn.
      steps: of DDIM, 1 to 1000.
      eta: 0 = the noise decides the slice; 1 = fresh noise at every step, as Ho et al. 2020.
      seed: at least 0.

    Returns: the folder, to be read by `data.records.tfds` with the training window.
    Raises: UserError on an option, a folder that holds anything else, a missing model, or other training data.
    """
    sizes = split_sizes(clients, test, shadow)
    checks.number("steps", steps, low=1, high=diffusion.STEPS, integer=True)
    checks.number("eta", eta, low=0, high=1)
    checks.number("seed", seed, low=0, high=2**31 - 1, integer=True)
    for what, given in (("out", folder), ("workdir", workdir)):
        if not str(given):
            raise checks.UserError(f"{what}: no folder given")
    trained = diffusion_training.load(Path(workdir).expanduser() / diffusion_training.MODEL)
    slices = _training_slices(trained, data)
    about = _about(trained, slices, {"slices": sizes, "steps": steps, "eta": eta, "seed": seed})
    kept: dict[str, list[Drawn]] = {split: [] for split in sizes}

    def parts(split: str, n: int) -> Iterator[dict[str, Any]]:
        for first in range(0, n, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, n))
            kept[split].append(draw(trained, slices, split, numbers, len(clients), steps=steps, eta=eta, seed=seed))
            yield _columns(split, numbers, kept[split][-1], slices, len(clients))
        tell(f"{split}: {n} slices")

    root = records.write(folder, {s: parts(s, n) for s, n in sizes.items()}, name=NAME, about=about)
    drawn = {split: Drawn(*(np.concatenate(column) for column in zip(*own))) for split, own in kept.items()}
    sheet = contact_sheet.save(root / "samples.png", {split: (d.x[..., 0], d.label) for split, d in drawn.items()})
    own, out = slices.train, slices.held_out
    found = memorisation.check(
        np.concatenate([d.x for d in drawn.values()]),
        slices.x[own],
        slices.x[out],
        patients=[slices.patient[i] for i in own],
    )
    memorisation.save(root, found, pairs=not slices.real)
    tell(f"{sheet}\n{found.verdict}")
    return root


def _training_slices(trained: Trained, data: str) -> TrainingSlices:
    own = trained.options
    slices = diffusion_data.read(
        data or own.data, size=own.size, window=own.window, clients=own.clients, held_out=own.held_out
    )
    if slices.facts["digest"] != trained.facts["digest"]:
        raise checks.UserError(
            f"data: {data or own.data} holds other slices than those the model was trained on; name that folder"
        )
    return slices


def _about(trained: Trained, slices: TrainingSlices, how: Mapping[str, Any]) -> dict[str, Any]:
    options = {k: v for k, v in trained.options._asdict().items() if k not in ("data", "size", "held_out")}
    return {
        "generator": GENERATOR,
        "synthetic": not slices.real,  # samples of a model of patients' slices may show a patient's: not shown unasked
        **how,
        "size": trained.options.size,
        "model": options | {"steps": int(trained.state.step), "parameters": diffusion_training.digest(trained)},
        "training_data": dict(slices.facts) | {"real": slices.real, "clients": list(slices.clients)},
        "masks": f"training masks, turned over and scaled by {_SCALE[0]} to {_SCALE[1]} about their centre,"
        f" shifted by up to {_SHIFT:g} of the side",
    }


def clients_of(split: str, numbers: np.ndarray, clients: int) -> np.ndarray:
    """The client, from 0, whose profile each slice has; in turn for splits that are no client."""
    if split in (records.TEST, records.SHADOW):
        return numbers % clients
    return np.full(len(numbers), int(split.rpartition("_")[2]) - 1)


def _stream(split: str) -> int:
    """A number of its own for every split."""
    fixed = {records.TEST: 0, records.SHADOW: 1}
    return fixed[split] if split in fixed else 1 + int(split.rpartition("_")[2])


def draw(
    trained: Trained,
    slices: TrainingSlices,
    split: str,
    numbers: np.ndarray,
    clients: int,
    *,
    steps: int = 50,
    eta: float = 0.0,
    seed: int = 0,
) -> Drawn:
    """The slices of a split with these numbers, each for a mask of its own."""
    client = clients_of(split, numbers, clients) % len(slices.clients)
    label = np.stack(
        [_mask(slices, k, np.random.default_rng([seed, _stream(split), n])) for k, n in zip(client, numbers)]
    )
    x = images(trained, label, client, split, numbers, slices.classes, steps=steps, eta=eta, seed=seed)
    return Drawn(x, label, client.astype(np.int32))


def images(
    trained: Trained,
    label: np.ndarray,
    client: np.ndarray,
    split: str,
    numbers: np.ndarray,
    classes: int,
    *,
    steps: int,
    eta: float,
    seed: int,
) -> np.ndarray:
    """float32 [n, H, W, 1] in [-1, 1] for masks uint8 [n, H, W] and clients int [n]; the noise is that of `numbers`."""
    key = jax.random.fold_in(jax.random.key(seed), _stream(split))
    static = diffusion_training.compiled_for(trained.options)
    known = len(trained.facts["slices"])
    out = []
    for first in range(0, len(numbers), _CHUNK):
        rows = np.resize(np.arange(first, min(first + _CHUNK, len(numbers))), _CHUNK)
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.asarray(numbers[rows], jnp.uint32))
        mask = jnp.asarray(diffusion_data.as_input(label[rows], classes))
        x = _sampled(
            trained.state.averaged, keys, mask, jnp.asarray(client[rows], jnp.int32), steps, eta, static, known
        )
        out.append(np.asarray(x)[: len(numbers) - first])
    return np.concatenate(out)


@functools.partial(jax.jit, static_argnames=("steps", "eta", "options", "known"))
def _sampled(params: Tree, keys: Array, mask: Array, client: Array, steps: int, eta: float, options: Any, known: int):
    model = diffusion_training.network(options, known)
    noise = jax.vmap(lambda k: jax.random.normal(k, mask.shape[1:]))(keys)
    predict = lambda z, t: model.apply({"params": params}, z, mask, t / diffusion.STEPS, client)
    return diffusion.ddim(predict, noise, steps=steps, eta=eta, keys=keys)


def _mask(slices: TrainingSlices, client: int, random: np.random.Generator) -> np.ndarray:
    own = slices.train[slices.client[slices.train] == client]
    return placed_mask(slices.label[random.choice(own if len(own) else slices.train)], random)


def placed_mask(label: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A mask turned over, scaled and shifted a little about its own centre, so that it stays in its organ.

    Mirrored in each direction with chance 1/2, scaled by .85 to 1.15, shifted by up to 3 % of the side; nearest pixels.
    Where less than half of it would remain (a tumour of few pixels, or at the border), it is left as it is.

    Args:
      label: uint8 [H, W].
    """
    where = np.argwhere(label > 0)
    turn, scale = random.choice([-1.0, 1.0], 2), random.uniform(*_SCALE)
    shift = random.uniform(-_SHIFT, _SHIFT, 2) * label.shape
    if not len(where):
        return label.copy()
    centre, matrix = where.mean(0), turn / scale
    moved = ndimage.affine_transform(label, matrix, centre - matrix * (centre + shift), order=0, mode="constant")
    return moved if 2 * np.count_nonzero(moved) >= len(where) else label.copy()


def _columns(split: str, numbers: np.ndarray, drawn: Drawn, slices: TrainingSlices, clients: int) -> dict[str, Any]:
    columns = {
        "image": slices.unit.stored(drawn.x[..., 0]),
        "mask": drawn.label,
        "case": [f"{split}_{i:05d}" for i in numbers],
        "patient": [f"{split}_p{i:05d}" for i in numbers],
        "site": [f"client_{k + 1}" for k in clients_of(split, numbers, clients)],
    }
    if slices.spacing is None:
        return columns
    return columns | {"spacing": np.tile(np.array(slices.spacing, np.float32), (len(numbers), 1))}
