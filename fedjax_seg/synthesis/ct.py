"""Synthetic CT slices with tumours, one client per profile, written as a TFDS data set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import records
from fedjax_seg.synthesis import ct_lesions, ct_profiles, ct_slices

GENERATOR = "ct phantoms (procedural; no real patient, nothing fitted to data)"
_PART = 256  # slices drawn and written at a time
FIELD_MM = 2 * ct_lesions.HALF_FIELD_MM


def ct(
    folder: str | Path,
    *,
    size: int = 256,
    clients: tuple[int, ...] = (1000, 1000, 1000, 500, 500),
    test: int = 1000,
    shadow: int = 1000,
    slices_per_patient: int = 1,
    seed: int = 0,
) -> Path:
    """Writes axial slices in HU with tumour masks: splits client_1, client_2, ..., test and shadow.

    Source: FedOnco-Bench, data section: 1000/1000/1000/500/500 slices and 1000 for the global test, 256 by 256, clients
    that differ (large tumours, small lesions, noisy images; the other two are not named there), 1000 separate slices
    for the shadow models. Deviation: the paper draws from a diffusion model; these are procedural phantoms. Profiles:
    ct_profiles. Test and shadow slices take the profiles of the clients in turn.

    Every slice depends on (seed, split, number) alone: it can be drawn again by itself, and more slices leave the
    first ones as they are.

    Args:
      folder: new, empty, or holding an earlier output of the same options (which is written again).
      size: pixels per side, at least 32; a slice shows 400 mm.
      clients: slices of each client; client k has profile k of ct_profiles.PROFILES (and so on from the first).
      test, shadow: slices of these splits, 0 = none.
      slices_per_patient: neighbouring slices that share anatomy and tumours; 1 = independent slices.
      seed: at least 0.

    Returns: the folder, to be read by `data.records.tfds`.
    Raises: UserError on an option, a folder that holds anything else, or where the extra `tfds` is missing.
    """
    checks.number("synthesis.size", size, low=32, high=1024, integer=True)
    checks.number("synthesis.seed", seed, low=0, high=2**31 - 1, integer=True)
    checks.number("synthesis.slices_per_patient", slices_per_patient, low=1, high=9, integer=True)
    sizes = split_sizes(clients, test, shadow, "synthesis.")
    about = {
        "generator": GENERATOR,
        "synthetic": True,
        "seed": seed,
        "size": size,
        "slices": sizes,
        "slices_per_patient": slices_per_patient,
        "profiles": {
            f"client_{k + 1}": list(ct_profiles.PROFILES)[ct_slices.profile_of(k)] for k in range(len(clients))
        },
        "profile_values": ct_profiles.described(),
    }
    splits = {name: _columns(name, n, len(clients), size, seed, slices_per_patient) for name, n in sizes.items()}
    return records.write(folder, splits, name="ct", about=about)


def split_sizes(clients: tuple[int, ...], test: int, shadow: int, prefix: str = "") -> dict[str, int]:
    """{split: slices} of a data set of clients; `prefix` is that of the options in error messages."""
    if not clients:
        raise checks.UserError(f"{prefix}clients: () given, the number of slices of at least one client expected")
    sizes = {f"client_{k + 1}": n for k, n in enumerate(clients)}
    for name, n in sizes.items():
        checks.number(f"{prefix}clients: {name}", n, low=1, integer=True)
    others = {records.TEST: test, records.SHADOW: shadow}
    for name, n in others.items():
        checks.number(f"{prefix}{name}", n, low=0, integer=True)
    return sizes | {name: n for name, n in others.items() if n}


def _columns(split: str, n: int, clients: int, size: int, seed: int, per_patient: int) -> Iterator[dict[str, Any]]:
    for start in range(0, n, _PART):
        index = np.arange(start, min(start + _PART, n))
        drawn = ct_slices.slices(split, index, clients=clients, size=size, seed=seed, slices_per_patient=per_patient)
        yield {
            "image": drawn.image,
            "mask": drawn.mask,
            "case": [f"{split}_{i:05d}" for i in index],
            "patient": [f"{split}_p{i // per_patient:05d}" for i in index],
            "site": [f"client_{k + 1}" for k in ct_slices.clients_of(split, index, clients, per_patient)],
            "spacing": np.full((len(index), 2), FIELD_MM / size, np.float32),
        }
