"""How like the truth a recovered image is: PSNR, SSIM, Dice, and which of several recovered images is which. numpy."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import ndimage, optimize

SIGMA, REACH = 1.5, 5  # of SSIM's Gaussian window: 11 x 11 pixels
K1, K2 = 0.01, 0.03
CEILING = 200.0  # dB; of images that are the same, whose PSNR is infinite


def psnr(image: np.ndarray, truth: np.ndarray, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB, 10 log10(peak^2 / mean squared error); at most CEILING. Any equal shapes."""
    difference = np.asarray(image, np.float64) - np.asarray(truth, np.float64)
    error = float(np.mean(np.square(difference)))
    return CEILING if error == 0 else min(CEILING, 10 * math.log10(peak**2 / error))


def ssim(image: np.ndarray, truth: np.ndarray, peak: float = 1.0) -> float:
    """Mean structural similarity, 1 for equal images.

    Source: Wang et al., "Image quality assessment: from error visibility to structural similarity" (2004), equation 13
    with its Gaussian window of 11 x 11 pixels (sigma 1.5), K1 = 0.01, K2 = 0.03. Moments are the window's weighted ones
    without a correction by n - 1, and the mean is over windows that lie inside the image, as in their code. Deviation:
    images of fewer than 11 pixels a side are mirrored at their edges, and every pixel counts.

    Args:
      image, truth: [H, W] or [H, W, channels]; channels are averaged.
    """
    x, y = (np.asarray(a, np.float64) for a in (image, truth))
    if x.ndim == 3:
        return float(np.mean([ssim(x[..., c], y[..., c], peak) for c in range(x.shape[-1])]))
    inside = (slice(REACH, -REACH),) * 2 if min(x.shape) > 2 * REACH else (slice(None),) * 2

    def mean(a: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(a, SIGMA, mode="reflect", radius=REACH)[inside]

    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    return float(np.mean((2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))))


def dice(mask: np.ndarray, truth: np.ndarray) -> float:
    """2 |A and B| / (|A| + |B|) of all foreground (> 0); 1 where both are empty."""
    a, b = np.asarray(mask) > 0, np.asarray(truth) > 0
    total = int(a.sum()) + int(b.sum())
    return 2 * int((a & b).sum()) / total if total else 1.0


def matched(found: Sequence[np.ndarray], truths: Sequence[np.ndarray]) -> list[int]:
    """Which of the found images stands for every truth: the assignment with the largest sum of PSNR.

    A gradient of several images does not tell their order. There must be as many found ones as truths, or more.
    """
    values = np.array([[psnr(f, t) for f in found] for t in truths])
    rows, columns = optimize.linear_sum_assignment(values, maximize=True)
    assert list(rows) == list(range(len(truths)))
    return [int(c) for c in columns]
