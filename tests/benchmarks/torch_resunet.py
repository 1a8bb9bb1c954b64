"""The residual U-Net of models/resunet3d.py in plain PyTorch.

Imports nothing of the engine. Layers have the names that the flax module gives them: weights can be handed over.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def convolution(inputs: int, features: int, stride: int = 1) -> nn.Module:
    return nn.Conv3d(inputs, features, 3, stride, padding=1)


class Style:
    """What all blocks share: the norm, and the probability of dropping a channel."""

    def __init__(self, tracked: bool, dropout: float):
        self.tracked, self.dropout = tracked, dropout

    def norm(self, features: int) -> nn.Module:
        return nn.InstanceNorm3d(features, affine=True, track_running_stats=self.tracked)


def act(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.leaky_relu(x, 0.01)


class Residual(nn.Module):
    """first: 'none' | 'conv' | 'active', what comes before the residual part."""

    def __init__(self, inputs: int, features: int, style: Style, first: str = "none", dropout: bool = True):
        super().__init__()
        self.first, norms, convolutions = first, [], []
        if first == "active":
            norms.append(style.norm(inputs))
        if first != "none":
            convolutions.append(convolution(inputs, features))
        norms += [style.norm(features), style.norm(features)]
        convolutions += [convolution(features, features), convolution(features, features)]
        for i, layer in enumerate(norms):
            self.add_module(f"InstanceNorm_{i}", layer)
        for i, layer in enumerate(convolutions):
            self.add_module(f"Conv_{i}", layer)
        self.norms, self.convolutions = [list(x) for x in (norms, convolutions)]
        self.drop = nn.Dropout3d(style.dropout if dropout else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms, convolutions = iter(self.norms), iter(self.convolutions)
        if self.first == "active":
            x = act(next(norms)(x))
        if self.first != "none":
            x = next(convolutions)(x)
        y = self.drop(next(convolutions)(act(next(norms)(x))))
        return x + next(convolutions)(act(next(norms)(y)))


class Shrink(nn.Module):
    def __init__(self, inputs: int, style: Style):
        super().__init__()
        self.Conv_0, self.InstanceNorm_0 = convolution(inputs, 2 * inputs, 2), style.norm(2 * inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return act(self.InstanceNorm_0(self.Conv_0(x)))


class Enlarge(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.Conv_0 = nn.Conv3d(inputs, inputs // 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Conv_0(nn.functional.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True))


class ResUnet3d(nn.Module):
    """[B, channels, D, H, W] -> logits [B, classes, D, H, W]."""

    def __init__(
        self,
        width: int,
        depth: int,
        channels: int = 4,
        classes: int = 4,
        tracked: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        style, self.depth = Style(tracked, dropout), depth
        self.down_0 = Residual(channels, width, style, "conv")
        for level in range(1, depth + 1):
            w = width * 2**level
            self.add_module(f"shrink_{level}", Shrink(w // 2, style))
            self.add_module(f"down_{level}" if level < depth else "bottleneck", Residual(w, w, style))
        for level in range(depth):
            w = width * 2**level
            self.add_module(f"enlarge_{level}", Enlarge(2 * w))
            self.add_module(f"up_{level}", Residual(2 * w, w if level else 2 * w, style, "active", dropout=False))
        self.InstanceNorm_0, self.head = style.norm(2 * width), convolution(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, skips = dict(self.named_children()), []
        x = self.down_0(x)
        for level in range(1, self.depth + 1):
            skips.append(x)
            x = part[f"down_{level}" if level < self.depth else "bottleneck"](part[f"shrink_{level}"](x))
        for level in reversed(range(self.depth)):
            x = part[f"up_{level}"](torch.cat([part[f"enlarge_{level}"](x), skips[level]], 1))
        return self.head(act(self.InstanceNorm_0(x)))


NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def state_of(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """{'params/down_0/Conv_0/kernel': array, ...} under the names and in the forms of this model."""
    state = {}
    for path, value in leaves.items():
        _, *where, leaf = path.split("/")
        value = np.asarray(value)
        value = np.transpose(value, (4, 3, 0, 1, 2)) if leaf == "kernel" else value
        state[".".join([*where, NAMES[leaf]])] = torch.tensor(np.ascontiguousarray(value))
    return state
