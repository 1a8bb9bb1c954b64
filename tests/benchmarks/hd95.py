"""Processor seconds that HD95 takes on a case of 240 x 240 x 155 voxels (one thread; on a quiet machine, the time).

    python tests/benchmarks/hd95.py [--repeats=5]

The bar is 0.3 s for one pair of masks. 'tumour' is a ball of 45 mm with a random, folded surface, about 230 cm^3; its
prediction is shifted by 3 mm and has a second, false lesion. 'reduce' is all that the volumetric task does on the host
for one case: unpacking, three regions, HD95, NSD and the rest.
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from fedjax_seg import tasks
from fedjax_seg.tasks import surface
from fedjax_seg.tasks.volumetric import case_outputs

SHAPE, BAR = (240, 240, 155), 0.3


def ball(centre, radius):
    axes = np.ogrid[tuple(slice(n) for n in SHAPE)]
    return sum((x - c) ** 2 for x, c in zip(axes, centre)) <= radius**2


def tumour(seed):
    field = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=SHAPE), 6)
    return ball((120, 120, 80), 45) & (field > -0.3 * field.std())


def best(function, repeats):
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        value = function()
        seconds.append(time.process_time() - start)
    return min(seconds), value


def hd95(first, second):
    return surface.percentile_distance(surface.directed_distances(first, second, (1, 1, 1)))


def reduced(truth):
    """One case through the task: classes by distance from the truth's centre, predicted 3 voxels aside."""
    classes = truth * (2 - ball((120, 120, 80), 25) + 2 * ball((120, 120, 80), 18)).astype(np.uint8)
    guess = np.roll(classes, 3, 0)
    out = case_outputs(jnp.asarray(np.eye(4, dtype=np.float32)[guess]), jnp.asarray(classes), jnp.array(SHAPE))
    numbers = {"shape": np.array(SHAPE), "full": np.array(SHAPE), "spacing": np.ones(3)}
    outputs = {name: np.asarray(x)[None] for name, x in {**out, **numbers}.items()}
    task = tasks.make("volumetric", {"name": "unet", "classes": 4}, regions="brats")
    return lambda: task.reduce(outputs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    one, other = tumour(1), tumour(2)
    pairs = {
        "balls of 30 mm, 3 mm apart": (ball((120, 120, 80), 30), ball((123, 120, 80), 30)),
        "tumour, shifted": (one, np.roll(one, 3, 0) | ball((70, 90, 60), 8)),
        "tumour and another one": (one, other),
        "tumour and a far ball": (one, ball((40, 40, 30), 8)),
        "ball of 8 mm in one of 70 mm": (ball((120, 120, 80), 8), ball((120, 120, 78), 70)),
        "noise, 2 % of all voxels": tuple(np.random.default_rng(0).random((2, *SHAPE)) < 0.02),
    }
    slow = 0
    for name, masks in pairs.items():
        seconds, value = best(lambda masks=masks: hd95(*masks), repeats)
        slow += seconds > BAR and not name.startswith("noise")
        print(f"{name:30s} {seconds:6.3f} s   HD95 {value:7.3f} mm")
    seconds, columns = best(reduced(one), repeats)
    print(f"{'reduce, three regions':30s} {seconds:6.3f} s   HD95 {columns['hd95'][0]:7.3f} mm")
    raise SystemExit(f"{slow} above the bar of {BAR} s" if slow else 0)


if __name__ == "__main__":
    main()
