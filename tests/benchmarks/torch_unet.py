"""The U-Net of models/unet.py in plain PyTorch, and a federated step as a sequential loop; imports nothing of ours."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, features: int):
        layers: list[nn.Module] = []
        for i in (inputs, features):
            layers += [nn.Conv2d(i, features, 3, padding=1), nn.BatchNorm2d(features), nn.ReLU()]
        super().__init__(*layers)


class Unet(nn.Module):
    """[B, channels, H, W] -> logits [B, classes, H, W]."""

    def __init__(self, width: int, depth: int = 2, channels: int = 1, classes: int = 2):
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(DoubleConv(i, o) for i, o in zip([channels, *sizes], sizes[:-1]))
        self.bottleneck = DoubleConv(sizes[-2], sizes[-1])
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, stride=2) for s in sizes[:-1])
        self.up = nn.ModuleList(DoubleConv(2 * s, s) for s in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = torch.max_pool2d(skips[-1], 2)
        x = self.bottleneck(x)
        for enlarge, block, skip in reversed(list(zip(self.enlarge, self.up, skips))):
            x = block(torch.cat([skip, enlarge(x)], 1))
        return self.head(x)


State = Mapping[str, torch.Tensor]


def federated_round(
    model: Unet,
    start: State,
    clients: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    lr: float,
    momentum: float,
) -> State:
    """The mean of the clients' weights: one after the other, each from `start` through its batches (x, y) by SGD."""
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


def loop(
    width: int, clients: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], channels_last: bool
) -> Callable[[], State]:
    """A call is one federated round from weights that stay the same, so that every call does the same work."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = Unet(width).to(memory_format=form)
    own = [[(x.to(memory_format=form), y) for x, y in batches] for batches in clients]
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return lambda: federated_round(model, start, own, 0.01, 0.9)
