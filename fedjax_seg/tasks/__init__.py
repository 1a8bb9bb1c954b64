"""A task = model + loss + predictions + metrics. TASKS is the table of contents: {name: maker}."""

from collections.abc import Mapping
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.core.types import Task
from fedjax_seg.tasks.classification import classification
from fedjax_seg.tasks.segmentation import segmentation
from fedjax_seg.tasks.volumetric import volumetric

TASKS = {
    "classification": classification,
    "segmentation": segmentation,
    "volumetric": volumetric,
}


def make(name: str, model: Mapping[str, Any], **options: Any) -> Task:
    """The task `name` over the model slot; unknown names and options are UserErrors."""
    return checks.call(checks.lookup(TASKS, name, "task.name"), f"task {name!r}", (model,), options)
