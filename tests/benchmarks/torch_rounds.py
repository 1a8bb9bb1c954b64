"""A federated round of any PyTorch model as a sequential loop; imports nothing of the engine."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

State = Mapping[str, torch.Tensor]
Clients = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]  # batches (x, y) of every client


def federated_round(model: nn.Module, start: State, clients: Clients, lr: float, momentum: float) -> State:
    """The mean of the clients' weights: one after the other, each from `start` through its batches by SGD."""
    total: dict[str, torch.Tensor] = {}
    for batches in clients:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                total[name] = total.get(name, 0) + value.detach().clone() / len(clients)
    return {**start, **total}


def loop(model: nn.Module, clients: Clients, form: torch.memory_format) -> Callable[[], State]:
    """A call is one federated round from weights that stay the same, so that every call does the same work."""
    model = model.to(memory_format=form)
    own = [[(x.to(memory_format=form), y) for x, y in batches] for batches in clients]
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return lambda: federated_round(model, start, own, 0.01, 0.9)


def load(model: nn.Module, state: State) -> None:
    """Gives a model all its weights; counters of batches may be missing."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing), (missing, unexpected)
