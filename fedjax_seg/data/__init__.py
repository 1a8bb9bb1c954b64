"""Files on disk -> FederatedData. numpy until the last step."""

from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.data.abide import abide
from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.images2d import images2d
from fedjax_seg.data.records import tfds

DATASETS = {
    "abide": abide,
    "images2d": images2d,
    "tfds": tfds,
}


def make(name: str, **options: Any) -> FederatedData:
    """The data set of that name; an unknown name or option is a UserError."""
    return checks.call(checks.lookup(DATASETS, name, "data.name"), f"data.{name}", (), options)
