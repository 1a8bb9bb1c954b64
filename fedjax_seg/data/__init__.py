"""Files on disk -> FederatedData. numpy until the last step."""

from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.data.abide import abide
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.fets import fets
from fedjax_seg.data.histopathology import histopathology
from fedjax_seg.data.images2d import images2d
from fedjax_seg.data.msd import msd
from fedjax_seg.data.records import tfds
from fedjax_seg.data.slide_bags import slide_bags
from fedjax_seg.data.tfds_images import tfds_images

DATASETS = {
    "abide": abide,
    "fets": fets,
    "histopathology": histopathology,
    "images2d": images2d,
    "msd": msd,
    "slide_bags": slide_bags,
    "tfds": tfds,
    "tfds_images": tfds_images,
}


def make(name: str, **options: Any) -> FederatedData:
    """The data set of that name; an unknown name or option is a UserError."""
    return checks.call(checks.lookup(DATASETS, name, "data.name"), f"data.{name}", (), options)
