"""Generators that write small synthetic data sets in the very formats that data/ reads."""

from pathlib import Path
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.synthesis.connectomes import connectomes
from fedjax_seg.synthesis.ct import ct
from fedjax_seg.synthesis.histology import histology
from fedjax_seg.synthesis.mri import mri

GENERATORS = {"connectomes": connectomes, "ct": ct, "histology": histology, "mri": mri}


def make(name: str, folder: str | Path, **options: Any) -> Path:
    """Writes the data set of that name into the folder; an unknown name or option is a UserError."""
    maker = checks.lookup(GENERATORS, name, "synthesis.name")
    return checks.call(maker, f"synthesis.{name}", (folder,), options)
