"""Gradient inversion: images that a curious server computes from the gradient that a hospital sends.

Whoever reads an update (the server, without a secure sum) knows the model it was computed on, so that it can look for
images whose own gradient points into the same direction. Here: what an attacker does (`solver`), and what is sent under
the protections that rows compare (`mean`, `noisy`). inverting.py drives it on a run.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_seg.core import checks, noise, tree
from fedjax_seg.core.types import Array, Tree

# (params, images [N, H, W, C] in [0, 1], labels [N, ..., classes]) -> (scalar, [changes of batch statistics, flat [s]])
Loss = Callable[[Tree, Array, Array], tuple[Array, list[Array]]]
SURE = 20.0  # logit of a label that is known
LABEL_RATE = 10.0  # how much faster the logits of unknown labels move than pixels, which have a range of 1
TINY = 1e-30
START, END = "start", "end"


class Inversion(NamedTuple):
    """The attack's options, checked; see `inversion`."""

    images: int
    steps: int
    restarts: int
    tv: float
    lr: float
    local_steps: tuple[int, ...]
    batch: tuple[int, ...]
    noise: tuple[float, ...]
    known_labels: bool
    seed: int
    site: str
    at: str


def inversion(
    *,
    images: int = 2,
    steps: int = 100,
    restarts: int = 1,
    tv: float = 1e-2,
    lr: float = 0.03,
    local_steps: tuple[int, ...] = (1, 4),
    batch: tuple[int, ...] = (1, 4),
    noise: tuple[float, ...] = (0.01, 0.1, 1.0),
    known_labels: bool = True,
    seed: int = 0,
    site: str = "",
    at: str = START,
) -> Inversion:
    """Options of the attack.

    Args:
      images: how many training images are attacked by their gradient; other scenarios take the first of them.
      steps, lr, tv: of one attack: steps of signed Adam, its first rate (pixels have a range of 1), and the weight of
        the total variation. Measured on the quickstart's U-Net: 150 and 300 steps find the same, a rate of 0.1 is 1 dB
        worse, a tv of 0.5 0.9 dB better; small networks want 150 steps or more, a rate of 0.05 and a tv of 0.001.
      restarts: attacks from different starts, of which the one that explains the gradient best counts. The first one
        starts at the mean of public images, which an attacker has; the others at random images.
      local_steps: rows of an update after so many local SGD steps on one image; 1 is its gradient.
      batch: rows of the mean gradient of so many images.
      noise: rows of a clipped gradient with Gaussian noise of so many times the clip.
      known_labels: True: the attacker knows labels and masks, an upper bound, and rows without are added where they are
        cheap; False: it never does.
      seed: of the choice of images, of starts and of the rows' noise.
      site: the hospital that is attacked; '' = the first one with training images.
      at: the model that the gradient is of: 'start' (before training, where gradients tell most) or 'end'.
    """
    for name, count in (("images", images), ("steps", steps), ("restarts", restarts)):
        checks.number(f"attack.{name}", count, low=1, integer=True)
    checks.number("attack.tv", tv, low=0.0)
    checks.number("attack.lr", lr, low=0.0, above=0.0)
    checks.number("attack.seed", seed, low=0, integer=True)
    for name, values in (("local_steps", local_steps), ("batch", batch)):
        for value in values:
            checks.number(f"attack.{name}", value, low=1, integer=True)
    for multiplier in noise:
        checks.number("attack.noise", multiplier, low=0.0, above=0.0)
    checks.one_of("attack.at", at, (START, END))
    numbers = (tuple(local_steps), tuple(batch), tuple(noise))
    return Inversion(images, steps, restarts, tv, lr, *numbers, known_labels, seed, site, at)


class Sent(NamedTuple):
    """One message (or sum) that somebody reads.

    Attributes:
      key, words: of its scenario.
      cases: int [G, N], the images in it: of G clients, N each.
      observed: float32 [D], a direction: the gradient, or minus the update.
      noise: the noise multiplier of its protection; 0 = none.
      known: whether the attacker knows the labels.
      statistics: float32 leaves [s], the change of the batch statistics that travels with it; None = none does.
    """

    key: str
    words: str
    cases: np.ndarray
    observed: Any
    noise: float = 0.0
    known: bool = True
    statistics: Any = None


class Found(NamedTuple):
    """What an attack gives.

    Attributes:
      images: float32 [G, N, H, W, C], in [0, 1]; labels: float32 [G, N, ..., classes], probabilities.
      cosine: of the images' gradient with the observed one.
      objective: what was minimised.
    """

    images: np.ndarray
    labels: np.ndarray
    cosine: float
    objective: float


def gradient(loss: Loss, params: Tree, images: Array, labels: Array) -> tuple[Array, list[Array]]:
    """float32 [D]: the mean over G clients of the gradient of each one's loss on its N images; and of the statistics.

    Args:
      images [G, N, H, W, C]; labels [G, N, ..., classes].
    """

    def one(pair: tuple[Array, Array]) -> tuple[Array, list[Array]]:
        slope, statistics = jax.grad(loss, has_aux=True)(params, *pair)
        return tree.flat(slope), statistics

    if len(images) == 1:
        return one((images[0], labels[0]))
    return jax.tree.map(lambda x: jnp.mean(x, 0), jax.lax.map(one, (images, labels)))


def total_variation(images: Array) -> Array:
    """Mean absolute difference of neighbouring pixels, down plus across. images [..., H, W, C]."""
    down, across = jnp.diff(images, axis=-3), jnp.diff(images, axis=-2)
    return jnp.mean(jnp.abs(down)) + jnp.mean(jnp.abs(across))


def cosine(a: Array, b: Array) -> Array:
    """Of two vectors; 0 where one is 0."""
    return jnp.vdot(a, b) / jnp.sqrt(jnp.vdot(a, a) * jnp.vdot(b, b) + TINY)


def mismatch(guess: list[Array], observed: list[Array]) -> Array:
    """How far batch statistics are from the observed ones: mean over layers of the relative squared error.

    Both up to one common factor, which tells how many local steps they come from. Leaves [s]; 0 where there are none.
    """
    if not observed:
        return jnp.zeros(())
    sizes = [jnp.sqrt(jnp.sum(jnp.square(o)) + TINY) for o in observed]
    a, b = (jnp.concatenate([x / n for x, n in zip(side, sizes)]) for side in (guess, observed))
    return jnp.sum(jnp.square(jnp.vdot(a, b) / (jnp.vdot(a, a) + TINY) * a - b)) / len(observed)


def solver(loss: Loss, options: Inversion) -> Callable[..., tuple[Array, Array, Array, Array]]:
    """A jitted (params, (observed [D], statistics), images, logits, told) -> (images, logits, cosine, objective).

    Minimises 1 - cosine(gradient of the images, observed) + tv * total variation + mismatch of the batch statistics
    over images in [0, 1], and over the logits of the labels where they are not known. Only the direction of what is
    observed matters. told: {'leaves' [D]: 1 for parameters whose gradient is sent, 'statistics': 1 where those are
    sent, 'free': 1 where labels are not known}; else 0.

    Source: Geiping et al., "Inverting gradients - how easy is it to break privacy in federated learning?" (2020),
    equation 4 and appendix: Adam on the sign of the gradient, its rate divided by 10 after 3/8, 5/8 and 7/8 of the
    steps, images kept in their range. Deviations: batch statistics, where the update has them, are matched (as Yin et
    al., "See through gradients" (2021), match running ones), because a normalised network's gradient hides brightness
    and contrast; labels that are not known are probabilities, optimised with the images as in Zhu et al., "Deep leakage
    from gradients" (2019).
    """
    adam = optax.scale_by_adam()
    drops = np.array([3, 5, 7]) * options.steps // 8

    def objective(guess: tuple[Array, Array], params: Tree, seen: Any, told: Any) -> tuple[Array, Array]:
        images, logits = guess
        slope, statistics = gradient(loss, params, images, jax.nn.softmax(logits))
        near = cosine(slope * told["leaves"], seen[0])
        wrong = told["statistics"] * mismatch(statistics, seen[1])
        return 1 - near + options.tv * total_variation(images) + wrong, near

    @jax.jit
    def run(params: Tree, seen: Any, images: Array, logits: Array, told: Any) -> Any:
        slope = jax.grad(objective, has_aux=True)

        def body(i: Array, carry: Any) -> Any:
            guess, state = carry
            rate = options.lr * 10.0 ** -jnp.sum(i >= drops)
            update, state = adam.update(jax.tree.map(jnp.sign, slope(guess, params, seen, told)[0]), state)
            images = jnp.clip(guess[0] - rate * update[0], 0, 1)
            return (images, guess[1] - LABEL_RATE * told["free"] * rate * update[1]), state

        start = (images, logits)
        guess, _ = jax.lax.fori_loop(0, options.steps, body, (start, adam.init(start)))
        value, near = objective(guess, params, seen, told)
        return *guess, near, value

    return run


def invert(
    run: Callable[..., Any],
    params: Tree,
    seen: tuple[Array, list[Array]],
    starts: Sequence[Any],
    logits: Any,
    told: dict[str, Any],
) -> Found:
    """The best of `solver` over several starts [G, N, H, W, C]; logits [G, N, ..., classes]: `sure` or a guess."""
    best: Found | None = None
    for start in starts:
        images, labels, near, value = run(params, seen, start, logits, told)
        if best is None or float(value) < best.objective:
            best = Found(np.asarray(images), np.asarray(jax.nn.softmax(labels)), float(near), float(value))
    assert best is not None
    return best


def sure(y: np.ndarray, classes: int) -> np.ndarray:
    """Logits [..., classes] of known integer labels [...]."""
    return SURE * (np.asarray(y)[..., None] == np.arange(classes)).astype(np.float32)


def noisy(observed: Array, clip: float, multiplier: float, key: Array) -> Array:
    """observed min(1, clip / its norm) + N(0, (multiplier clip)^2) per entry: what DP-SGD sends of one example."""
    norm = jnp.linalg.norm(observed)
    return noise.add(observed * jnp.minimum(1.0, clip / jnp.maximum(norm, TINY)), key, multiplier * clip)
