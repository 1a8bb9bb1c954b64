"""Files on disk -> FederatedData. numpy until the last step."""

from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.data.abide import abide
from fedjax_seg.data.federated import FederatedData

DATASETS = {"abide": abide}


def make(name: str, **options: Any) -> FederatedData:
    """The data set of that name; an unknown name or option is a UserError."""
    return checks.call(checks.lookup(DATASETS, name, "data.name"), f"data.{name}", (), options)
