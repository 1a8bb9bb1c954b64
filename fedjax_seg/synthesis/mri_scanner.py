"""What the scanners of a site make of a head: four contrasts in raw units, bias, blur, thick slices, noise."""

from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from fedjax_seg.synthesis.mri_anatomy import Head
from fedjax_seg.synthesis.mri_fields import Grid, smooth
from fedjax_seg.synthesis.mri_lesions import Lesion, Plan

MODALITIES = ("t1", "t1ce", "t2", "flair")
# Signal of tissues relative to white matter in T1, as text books order them. Per modality: white, grey, CSF, vessel
# with contrast agent, solid core, fluid core, rim, oedema.
SIGNAL = {
    "t1": (1.00, 0.79, 0.36, 0.62, 0.70, 0.50, 0.76, 0.76),
    "t1ce": (1.00, 0.80, 0.38, 2.10, 0.68, 0.46, 1.85, 0.80),
    "t2": (0.40, 0.56, 1.42, 0.30, 0.78, 1.25, 0.66, 0.84),
    "flair": (0.66, 0.80, 0.20, 0.35, 1.05, 0.55, 1.10, 1.28),
}
# What a site draws evenly (the gain: evenly in its logarithm) between two values, and what it means.
RANGES = {
    "gain": (220.0, 1800.0, "raw value of white matter in T1, per modality"),
    "gamma": (0.82, 1.22, "power of the signal, per modality: contrast between tissues"),
    "noise": (0.012, 0.055, "sd of the noise (Rician) relative to white matter in T1, at 1 mm"),
    "bias": (0.03, 0.18, "sd in the logarithm of the smooth field over the head"),
    "blur": (0.0, 0.75, "sd in mm of the point spread in the plane of a slice"),
    "slab": (0.0, 2.2, "sd in mm of the profile of a slice, per modality: 2.2 is 5 mm thick"),
    "enhancement": (0.75, 1.25, "factor of what the contrast agent adds"),
    "lesion": (-0.35, 0.35, "added to the logarithm of the volume of tumours"),
}


class Site(NamedTuple):
    """One site; the ranges are those of RANGES. gain, gamma, slab: float64 [4], per modality of MODALITIES."""

    gain: np.ndarray
    gamma: np.ndarray
    slab: np.ndarray
    noise: float
    bias: float
    blur: float
    enhancement: float
    lesion: float

    def described(self) -> dict[str, Any]:
        """JSON-able facts."""
        return {k: np.round(v, 4).tolist() for k, v in self._asdict().items()}


def site(random: np.random.Generator) -> Site:
    """Draws one."""

    def even(name: str, n: int | None = None) -> Any:
        low, high, _ = RANGES[name]
        return random.uniform(low, high, n)

    low, high, _ = RANGES["gain"]
    gain = np.exp(random.uniform(np.log(low), np.log(high), 4))
    slab = even("slab", 4) * (random.uniform(size=4) < 0.5)  # half of the sequences are isotropic
    single = {k: float(even(k)) for k in ("noise", "bias", "blur", "enhancement", "lesion")}
    return Site(gain=gain, gamma=even("gamma", 4), slab=slab, **single)


def scan(
    random: np.random.Generator, head: Head, lesion: Lesion, plan: Plan, where: Site, at: Grid
) -> dict[str, np.ndarray]:
    """{modality: int16 [X, Y, Z] of the grid's box}; 0 outside the brain, at least 1 inside.

    Args:
      random: noise, and what differs between two subjects of a site.
    """
    tissue = _tissue(random, head, lesion, plan, at)
    low_order = _low_order(head)
    out = {}
    for m, name in enumerate(MODALITIES):
        values = _values(name, where) * np.exp(0.035 * random.standard_normal(8)).astype(np.float32)
        signal = np.sum([share * value for share, value in zip(tissue, values)], axis=0)
        signal = np.maximum(signal, 0.02) ** np.float32(where.gamma[m])
        signal = _blurred(signal, head, at, where.blur, where.slab[m])
        field = low_order.T @ random.standard_normal(len(low_order)).astype(np.float32)
        signal = signal * np.exp(np.float32(where.bias) * field)
        # a larger voxel is less noisy, though less so than the mean of as many voxels would be
        sd = where.noise / np.prod(at.spacing) ** 0.2
        real, imaginary = (random.standard_normal(signal.size, np.float32) * np.float32(sd) for _ in range(2))
        signal = np.hypot(signal + real, imaginary)
        gain = where.gain[m] * np.exp(0.08 * random.standard_normal())
        box = np.zeros(at.shape, np.int16)
        box.reshape(-1)[head.flat] = np.clip(np.rint(signal * np.float32(gain)), 1, 32767)
        out[name] = box
    return out


def _values(name: str, where: Site) -> np.ndarray:
    values = np.array(SIGNAL[name], np.float32)
    if name == "t1ce":
        plain = np.array(SIGNAL["t1"], np.float32)
        for i in (3, 6):  # vessel and rim
            values[i] = plain[i] + (values[i] - plain[i]) * np.float32(where.enhancement)
    return values


def _tissue(random: np.random.Generator, head: Head, lesion: Lesion, plan: Plan, at: Grid) -> list[np.ndarray]:
    """Shares of the tissues of SIGNAL, [n] each, with a texture of their own."""
    texture = smooth(plan.fine, at).reshape(-1)[head.flat]
    patches = smooth(plan.middle, at).reshape(-1)[head.flat]
    free = 1 - lesion.core - lesion.rim - lesion.oedema
    wet = np.clip(plan.cystic + 0.22 * patches, 0, 1) if plan.volumes.rim else np.float32(0.15)
    # oedema lets the tissue under it show, the more the further it has spread
    dense = lesion.oedema * np.clip(0.78 + 0.1 * patches + 0.04 * texture - 0.2 * head.grey, 0.3, 1)
    free = np.maximum(free + lesion.oedema - dense, 0)
    rim = lesion.rim * np.clip(0.8 + 0.16 * texture + 0.14 * patches, 0.25, 1.3)
    solid = lesion.core * (1 - wet) + lesion.rim - rim
    vessel = head.vessel * free
    normal = free - vessel
    grain = 1 + 0.018 * texture
    shares = [normal * head.white * grain, normal * head.grey * grain, normal * head.csf, vessel]
    return [*shares, solid * (1 + 0.08 * texture), lesion.core * wet, rim, dense]


def _low_order(head: Head) -> np.ndarray:
    """[9, n]; smooth shapes over the head, of about unit variance together."""
    x, y, z = (p / np.float32(s) for p, s in zip(head.places, (40, 50, 45)))
    shapes = np.stack([x, y, z, x * y, x * z, y * z, x * x - 1, y * y - 1, z * z - 1])
    return shapes / np.float32(3)


def _blurred(signal: np.ndarray, head: Head, at: Grid, plane: float, slab: float) -> np.ndarray:
    """Blurred along the three axes; the brain's edge is not darkened by the nothing outside."""
    sigmas = [s / step for s, step in zip((plane, plane, slab), at.spacing)]
    if max(sigmas) < 0.25:
        return signal
    both = []
    for values in (signal, np.float32(1)):
        box = np.zeros(at.shape, np.float32)
        box.reshape(-1)[head.flat] = values
        for axis, sigma in enumerate(sigmas):
            if sigma >= 0.25:
                box = ndimage.gaussian_filter1d(box, sigma, axis, mode="constant", truncate=3.0)
        both.append(box.reshape(-1)[head.flat])
    return both[0] / np.maximum(both[1], 0.05)
