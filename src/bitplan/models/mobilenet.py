"""MobileNet-v2 (Sandler et al. 2018, arXiv 1801.04381), the CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.widths import scaled

#: (expansion, channels, repeats, stride) of each stage. Strides are smaller than for ImageNet: images are 32x32.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM, _HEAD = 32, 1280


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 depthwise, 1x1 down without an activation; at stride 1 the input is added."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module | None = None
        if stride == 1:
            change = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
            self.shortcut = change if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        y: Tensor = self.bn3(self.conv3(inner))
        return y if self.shortcut is None else y + self.shortcut(x)


class MobileNetV2(nn.Module):
    """Stem, seven stages of inverted residuals, 1x1 head, average pool, linear."""

    def __init__(self, classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        features = scaled(_STEM, width)
        self.conv1 = nn.Conv2d(3, features, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.blocks = nn.Sequential()
        for expansion, channels, repeats, stride in _STAGES:
            for position in range(repeats):
                outputs = scaled(channels, width)
                self.blocks.append(InvertedResidual(features, outputs, expansion, stride if position == 0 else 1))
                features = outputs
        head = max(_HEAD, scaled(_HEAD, width))  # the head is not shrunk
        self.conv2 = nn.Conv2d(features, head, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(head)
        self.fc = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
