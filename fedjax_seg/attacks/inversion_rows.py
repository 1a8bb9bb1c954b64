"""What came of gradient inversion: a row of numbers per scenario, and the findings in words. numpy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.attacks import image_quality
from fedjax_seg.attacks.inversion import Found, Sent

BETTER = 3.0  # dB above the baseline from which an image counts as recovered
IMAGES, VECTORS = "cosine", "closed form"


def row(
    sent: Sequence[Sent], found: Sequence[Found], x: np.ndarray, y: np.ndarray, mean: np.ndarray
) -> tuple[dict[str, Any], np.ndarray]:
    """A JSON-able row of one scenario, over all its images, and the recovered ones [n, H, W, C] for the figure.

    Args:
      sent: the scenario's messages; found: what the attack made of each.
      x: [N, ...] the cases in the range 0 to 1 that messages point into, and y their labels.
      mean: of public cases, the guess without a gradient.

    Returns keys: scenario, words, images (per message), messages, noise, known; psnr (mean, dB), each (per image),
      baseline (mean PSNR of the public mean for the same images), ssim, dice (of recovered masks; None where they are
      known), labels_right (share, of unknown labels), above (share of images more than BETTER dB above their baseline),
      cosine (of the found images' gradient with what was seen).
    """
    truths: list[np.ndarray] = []
    images: list[np.ndarray] = []
    masks: list[float] = []
    labels: list[float] = []
    for message, one in zip(sent, found):
        cases = message.cases.ravel()
        mine = one.images.reshape(len(cases), *one.images.shape[2:])
        truth = x[cases]
        order = image_quality.matched(list(mine), list(truth))
        soft = one.labels.reshape(len(mine), *one.labels.shape[2:])[order]
        truths, images = [*truths, *truth], [*images, *mine[order]]
        if not message.known and soft.shape[-1]:
            guess, real = soft.argmax(-1), y[cases]
            pairs = list(zip(guess, real))
            masks += [image_quality.dice(g, r) for g, r in pairs] if real.ndim > 1 else []
            labels += [float(g == r) for g, r in pairs] if real.ndim == 1 else []
    each = [image_quality.psnr(i, t) for i, t in zip(images, truths)]
    base = [image_quality.psnr(mean, t) for t in truths]
    first, cosines = sent[0], [one.cosine for one in found]
    made = {
        "scenario": first.key,
        "words": first.words,
        "images": int(first.cases.size),
        "messages": len(sent),
        "noise": float(first.noise),
        "known": first.known,
        "psnr": float(np.mean(each)),
        "each": each,
        "baseline": float(np.mean(base)),
        "ssim": float(np.mean([image_quality.ssim(i, t) for i, t in zip(images, truths)])) if mean.ndim == 3 else None,
        "dice": float(np.mean(masks)) if masks else None,
        "labels_right": float(np.mean(labels)) if labels else None,
        "above": float(np.mean(np.array(each) > np.array(base) + BETTER)),
        "cosine": float(np.mean(cosines)) if np.all(np.isfinite(cosines)) else None,
    }
    return made, np.stack(images)


def text(told: Mapping[str, Any], known: bool) -> str:
    """The findings in words."""
    rows, base = {row["scenario"]: row for row in told["rows"]}, told["baseline"]
    first = next(iter(rows.values()))
    shape = "an image of" if told["how"] == IMAGES else "a case of"
    words = (
        f"A curious server looks for {shape} {told['site']} in what leaves it ({told['model']} model)."
        f" The guess without any gradient, the mean of {base['images']} public cases, has {base['psnr']:.1f} dB;"
        f" {first['words']}: {first['psnr']:.1f} dB."
    )
    noises = [row for row in rows.values() if row["scenario"].startswith("noise_")]
    if first["above"] > 0 and noises:
        least = next((row for row in noises if row["above"] == 0), None)
        if least:
            words += (
                f" Noise of {least['noise']:g} times the clip already defeats this attack ({least['psnr']:.1f} dB)."
            )
    elif first["above"] == 0:
        words += f" The attack recovers no image here: none is {BETTER:g} dB better than that guess."
    if told["how"] == IMAGES:
        words += " PSNR judges grey values: outlines can be plain to see in an image that it calls bad."
    if told["how"] == IMAGES and known:
        words += " Unless a row says otherwise the attacker knows the labels: an upper bound."
    return words + " An attack that fails is no proof of privacy: stronger ones exist."
