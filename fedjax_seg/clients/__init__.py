"""One client's local training. CLIENTS is the table of contents: {name: maker}; a maker takes the Task."""

from typing import Any

from fedjax_seg.clients.corruption import CORRUPTIONS, corrupt
from fedjax_seg.clients.dp_sgd import dp_sgd
from fedjax_seg.clients.local_sgd import local_sgd
from fedjax_seg.clients.scaffold import scaffold
from fedjax_seg.core import checks
from fedjax_seg.core.types import Client, Task

CLIENTS = {
    "local_sgd": local_sgd,
    "dp_sgd": dp_sgd,
    "scaffold": scaffold,
}

__all__ = ["CLIENTS", "CORRUPTIONS", "corrupt", "make"]


def make(name: str, task: Task, **options: Any) -> Client:
    """The client algorithm `name` for a task; unknown names and options are UserErrors."""
    return checks.call(checks.lookup(CLIENTS, name, "client.name"), f"client {name!r}", (task,), options)
