"""The five clients of the synthetic CT data: what their tumours and their scanners are like."""

from typing import Any, NamedTuple


class Profile(NamedTuple):
    """How slices of one client are drawn. Ranges are (low, high), drawn evenly unless stated; lengths in mm.

    Attributes:
      about: in words, for reports.
      radius: of the largest tumour of a slice, before its outline is made irregular (drawn evenly in the logarithm).
      tumours: fewest and most per slice.
      contrast: |HU| between a liver tumour and the liver around it (the tumour is darker).
      lung: the share of slices with tumours in the lung; the others have them in the liver.
      enhanced: the share of slices with contrast agent in the vessels and the organs.
      noise: standard deviation in HU at the centre of the body, at 256 pixels per side.
      streaks: the share of the noise that runs in horizontal streaks (too few photons through the shoulders and spine).
      kernel: of the reconstruction; below 0 smooth, above 0 sharp (overshoots at edges).
      scale, offset: HU as this scanner gives them = scale * HU + offset (air outside the patient stays at -1000).
      bias: HU by which a smooth field darkens or brightens the body (cupping, scatter).
    """

    about: str
    radius: tuple[float, float]
    tumours: tuple[int, int]
    contrast: tuple[float, float]
    lung: float
    enhanced: float
    noise: float
    streaks: float
    kernel: float
    scale: float
    offset: float
    bias: float


LARGE = Profile("large tumours", (24.0, 46.0), (1, 2), (45, 70), 0.5, 0.6, 12.0, 0.2, 0.0, 1.0, 0.0, 4.0)
SMALL = Profile("small lesions", (11.0, 15.5), (1, 3), (55, 80), 0.5, 0.6, 10.0, 0.2, 0.15, 1.0, 0.0, 4.0)
NOISY = Profile("noisy images (low dose)", (15.0, 32.0), (1, 2), (50, 75), 0.5, 0.4, 34.0, 0.3, 0.3, 1.0, 0.0, 6.0)
SCANNER = Profile(
    "another scanner: shifted HU, bias field, sharp kernel",
    (15.0, 32.0), (1, 2), (45, 70), 0.5, 0.5, 13.0, 0.2, 0.8, 1.06, 14.0, 16.0,
)  # fmt: skip
MULTIFOCAL = Profile(
    "contrast agent, several low-contrast lesions",
    (14.0, 26.0), (2, 4), (36, 56), 0.3, 1.0, 9.0, 0.2, -0.3, 1.0, 0.0, 4.0,
)  # fmt: skip

# In the order of the clients; more clients than profiles start again from the first.
PROFILES = {"large": LARGE, "small": SMALL, "noisy": NOISY, "scanner": SCANNER, "multifocal": MULTIFOCAL}


def described() -> dict[str, dict[str, Any]]:
    """All profiles as JSON-able facts."""
    return {name: profile._asdict() for name, profile in PROFILES.items()}
