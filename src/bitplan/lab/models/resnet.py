"""Residual networks (He et al. 2015, arXiv 1512.03385): families that share their blocks.

=====================================  ====================================================================
:func:`cifar_resnet`                   depth 6n+2 for 32x32 images: 16, 32 and 64 channels, n blocks each
:func:`preactivated_resnet`            depth 9n+2, such as 164: bottlenecks, norms before convolutions
:func:`resnet18`                       its CIFAR variant: 3x3 stem, no pooling after it, a width to choose
:func:`imagenet_resnet`                depths 18, 34, 50 and 101 for 224x224 images
=====================================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.lab.models.small_cnns import scaled

#: The kind of a shortcut that changes its shape: ``pad`` strides and pads new channels with zeros (no parameters: He et
#: al.'s option A), ``conv`` is a 1x1 convolution and a batch norm (option B).
Shortcut = Literal["pad", "conv"]


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, and zeros in the new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


def _shortcut(inputs: int, outputs: int, stride: int, kind: Shortcut) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """relu(x + BN conv3x3 relu BN conv3x3 x)."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(inputs, channels, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the channels."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        outputs = channels * self.expansion
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        return F.relu(self.bn3(self.conv3(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of residual blocks (every stage after the first halves the image), average pool, linear."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        channels: Sequence[int],
        classes: int,
        shortcut: Shortcut = "conv",
        big_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels[0], 7, 2, 3, bias=False) if big_images else _conv3x3(3, channels[0])
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.pool = nn.MaxPool2d(3, 2, 1) if big_images else nn.Identity()
        self.stages: list[str] = []
        features = channels[0]
        for number, (count, size) in enumerate(zip(blocks, channels, strict=True), start=1):
            stage = nn.Sequential()
            for position in range(count):
                stride = 2 if number > 1 and position == 0 else 1
                stage.append(block(features, size, stride, shortcut))
                features = size * block.expansion
            self.stages.append(f"layer{number}")
            self.add_module(self.stages[-1], stage)
        self.fc = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def cifar_resnet(depth: int, classes: int = 10, shortcut: Shortcut = "conv", width: float = 1.0) -> ResNet:
    """He et al.'s network for CIFAR, section 4.2: depth 6n+2, such as 20, 38, 56, 74, 110 or 152.

    He et al. used ``pad`` shortcuts, the papers on cyclic precision (arXiv 2101.09868, 2403.02243) ``conv``.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"a CIFAR ResNet has depth 6n+2, such as 20 or 56, not {depth}.")
    return ResNet(BasicBlock, [blocks] * 3, [scaled(size, width) for size in (16, 32, 64)], classes, shortcut)


class PreactivatedBottleneck(nn.Module):
    """Norm and ReLU before each of three convolutions (He et al. 2016, arXiv 1603.05027); the shortcut of a block that
    changes its shape is a convolution of the activated input."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * Bottleneck.expansion
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, stride)
        self.bn3 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        has_same_shape = stride == 1 and inputs == outputs
        self.shortcut = None if has_same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        inner = self.conv1(active)
        inner = self.conv2(F.relu(self.bn2(inner)))
        inner = self.conv3(F.relu(self.bn3(inner)))
        added: Tensor = inner + (x if self.shortcut is None else self.shortcut(active))
        return added


class PreactivatedResNet(nn.Module):
    """A stem, three stages of :class:`PreactivatedBottleneck`, a last norm and ReLU, average pool, linear."""

    def __init__(self, blocks: int, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, channels[0])
        features = channels[0]
        self.layers = nn.Sequential()
        for number, size in enumerate(channels):
            for position in range(blocks):
                stride = 2 if number > 0 and position == 0 else 1
                self.layers.append(PreactivatedBottleneck(features, size, stride))
                features = size * Bottleneck.expansion
        self.bn = nn.BatchNorm2d(features)
        self.fc = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.layers(self.conv1(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def preactivated_resnet(depth: int, classes: int = 10, width: float = 1.0) -> PreactivatedResNet:
    """He et al.'s second network for CIFAR with bottlenecks: depth 9n+2, such as 164."""
    blocks, rest = divmod(depth - 2, 9)
    if rest or blocks < 1:
        raise ValueError(f"a preactivated ResNet has depth 9n+2, such as 164, not {depth}.")
    return PreactivatedResNet(blocks, [scaled(size, width) for size in (16, 32, 64)], classes)


def resnet18(classes: int = 100, width: float = 1.0) -> ResNet:
    """ResNet-18 for CIFAR as in Lee, Sharma & Aiken 2023 (arXiv 2301.13464): 3x3 stem without stride or pooling."""
    return ResNet(BasicBlock, [2, 2, 2, 2], [scaled(size, width) for size in (64, 128, 256, 512)], classes)


#: Depths of networks for ImageNet, and those of them that have bottlenecks.
IMAGENET_DEPTHS = (18, 34, 50, 101)
BOTTLENECK_DEPTHS = (50, 101)


def imagenet_resnet(depth: int, classes: int = 1000, width: float = 1.0) -> ResNet:
    """He et al.'s network for ImageNet, table 1, at depth 18, 34, 50 or 101."""
    shapes: dict[int, tuple[type[BasicBlock] | type[Bottleneck], list[int]]] = {
        18: (BasicBlock, [2, 2, 2, 2]),
        34: (BasicBlock, [3, 4, 6, 3]),
        50: (Bottleneck, [3, 4, 6, 3]),
        101: (Bottleneck, [3, 4, 23, 3]),
    }
    if depth not in shapes:
        raise ValueError(f"an ImageNet ResNet has depth 18, 34, 50 or 101 here, not {depth}.")
    block, blocks = shapes[depth]
    channels = [scaled(size, width) for size in (64, 128, 256, 512)]
    return ResNet(block, blocks, channels, classes, big_images=True)
