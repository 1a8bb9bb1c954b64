"""The U-Net of models/unet.py in plain PyTorch; imports nothing of the engine."""

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
