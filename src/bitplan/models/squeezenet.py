"""SqueezeNet (Iandola et al. 2016, arXiv 1602.07360), the CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.widths import scaled

_STEM = 96
#: (squeeze, expand) of the eight fire modules; each expand is made twice, by a 1x1 and by a 3x3 convolution.
_FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
#: Fire modules (and the stem, 0) that a 2x2 max pool follows.
_POOL_AFTER = (0, 3, 7)


def _conv_norm(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs))


class Fire(nn.Module):
    """Squeeze by a 1x1 convolution, expand by a 1x1 and a 3x3 one side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = _conv_norm(inputs, squeeze, 1)
        self.expand1 = _conv_norm(squeeze, expand, 1)
        self.expand3 = _conv_norm(squeeze, expand, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.expand1(x), self.expand3(x)], 1))


class SqueezeNet(nn.Module):
    """Stem, eight fire modules, 1x1 convolution to the classes, average pool."""

    def __init__(self, classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        features = scaled(_STEM, width)
        self.stem = _conv_norm(3, features, 3)
        self.fires = nn.ModuleList()
        for number, (squeeze, expand) in enumerate(_FIRES, start=1):
            # The last expand keeps its width: it is what the classes are read from.
            outputs = expand if number == len(_FIRES) else scaled(expand, width)
            self.fires.append(Fire(features, scaled(squeeze, width), outputs))
            features = 2 * outputs
        self.head = nn.Conv2d(features, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for number, fire in enumerate([nn.Identity(), *self.fires]):
            x = fire(x)
            if number in _POOL_AFTER:
                x = F.max_pool2d(x, 2)
        return F.adaptive_avg_pool2d(self.head(x), 1).flatten(1)
