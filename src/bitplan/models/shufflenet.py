"""ShuffleNet-v2 (Ma et al. 2018, arXiv 1807.11164), the CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STEM, _HEAD = 24, 1024
_BLOCKS = (4, 8, 4)
#: Channels of the three stages, for each width: the halves of all of them are multiples of 2.
_STAGES = {1.0: (116, 232, 464), 0.5: (56, 112, 224), 0.25: (28, 56, 112), 0.1: (12, 24, 48)}


def _conv_norm(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def _shuffled(x: Tensor) -> Tensor:
    """The channels of the two halves in turns."""
    batch, channels, height, width = x.shape
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(x.shape)


class Branch(nn.Module):
    """1x1, 3x3 depthwise without an activation, 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.enter = _conv_norm(inputs, outputs)
        self.depthwise = _conv_norm(outputs, outputs, 3, stride, groups=outputs)
        self.leave = _conv_norm(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.leave(self.depthwise(F.relu(self.enter(x)))))


class Unit(nn.Module):
    """One half of the channels passes untouched, the other through a branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = Branch(channels // 2, channels // 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        return _shuffled(torch.cat([kept, self.branch(changed)], 1))


class DownUnit(nn.Module):
    """Both branches see all channels and halve the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.depthwise = _conv_norm(inputs, inputs, 3, 2, groups=inputs)
        self.leave = _conv_norm(inputs, outputs // 2)
        self.branch = Branch(inputs, outputs // 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return _shuffled(torch.cat([F.relu(self.leave(self.depthwise(x))), self.branch(x)], 1))


class ShuffleNetV2(nn.Module):
    """Stem, three stages, 1x1 head, average pool, linear."""

    def __init__(self, classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        if width not in _STAGES:
            raise ValueError(f"ShuffleNet-v2 has the widths {', '.join(map(str, _STAGES))}, not {width}.")
        features = _STEM
        self.stem = _conv_norm(3, features, 3)
        self.units = nn.Sequential()
        for channels, count in zip(_STAGES[width], _BLOCKS, strict=True):
            self.units.append(DownUnit(features, channels))
            self.units.extend(Unit(channels) for _ in range(count - 1))
            features = channels
        self.head = _conv_norm(features, _HEAD)
        self.fc = nn.Linear(_HEAD, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.head(self.units(F.relu(self.stem(x)))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
