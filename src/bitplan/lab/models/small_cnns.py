"""MobileNet-v2 (Sandler et al. 2018, arXiv 1801.04381), and its CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464).

The variant takes 32x32 images, so it strides less; it has ReLU instead of ReLU6, and a convolution in shortcuts that
change the number of channels, where the original has no shortcut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- Channels of a network of another width


#: Up to this width channels are multiples of 4 rather than 8: narrow networks have few channels to lose.
_NARROW = 0.25


def scaled(channels: int, width: float) -> int:
    """`channels` times `width` as the nearest multiple of 8 (of 4 up to width 0.25), at least one such multiple and
    never under 90 % of the exact value.

    Source: the CIFAR networks of Lee, Sharma & Aiken 2023 (arXiv 2301.13464).

    >>> [scaled(64, width) for width in (1.0, 0.5, 0.25, 0.1)]
    [64, 32, 16, 8]
    """
    step = 4 if width <= _NARROW else 8
    exact = channels * width
    rounded = max(step, int(exact + step / 2) // step * step)
    return rounded if rounded >= 0.9 * exact else rounded + step


#: (expansion, channels, repeats, stride) of each stage, for 32x32 images.
_MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
#: For 224x224 images the stem and these stages stride, too.
_STRIDES_ALSO = (1,)

_MOBILENET_STEM, _MOBILENET_HEAD = 32, 1280


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 depthwise, 1x1 down without an activation; at stride 1 the input is added."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, original: bool = False) -> None:
        super().__init__()
        inner = inputs * expansion
        self.activation = F.relu6 if original else F.relu
        self.conv1: nn.Module = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module | None = None
        if original and expansion == 1:  # no expansion
            self.conv1, self.bn1 = nn.Identity(), nn.Identity()
        if stride == 1 and original and inputs == outputs:
            self.shortcut = nn.Identity()
        elif stride == 1 and not original:
            change = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
            self.shortcut = change if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = x if isinstance(self.conv1, nn.Identity) else self.activation(self.bn1(self.conv1(x)))
        inner = self.activation(self.bn2(self.conv2(inner)))
        y: Tensor = self.bn3(self.conv3(inner))
        return y if self.shortcut is None else y + self.shortcut(x)


class MobileNetV2(nn.Module):
    """Stem, seven stages of inverted residuals, 1x1 head, average pool, linear."""

    def __init__(self, classes: int = 100, width: float = 1.0, big_images: bool = False) -> None:
        """
        :param big_images: the original, for 224x224 images.
        """
        super().__init__()
        self.activation = F.relu6 if big_images else F.relu
        features = scaled(_MOBILENET_STEM, width)
        self.conv1 = nn.Conv2d(3, features, 3, 2 if big_images else 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.blocks = nn.Sequential()
        for number, (expansion, channels, repeats, stride) in enumerate(_MOBILENET_STAGES):
            first_stride = 2 if big_images and number in _STRIDES_ALSO else stride
            for position in range(repeats):
                outputs = scaled(channels, width)
                own_stride = first_stride if position == 0 else 1
                self.blocks.append(InvertedResidual(features, outputs, expansion, own_stride, big_images))
                features = outputs
        head = max(_MOBILENET_HEAD, scaled(_MOBILENET_HEAD, width))  # the head is not shrunk
        self.conv2 = nn.Conv2d(features, head, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(head)
        self.dropout = 0.2 if big_images else 0.0
        self.fc = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.activation(self.bn1(self.conv1(x))))
        x = self.activation(self.bn2(self.conv2(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        if self.dropout > 0:
            x = F.dropout(x, self.dropout, self.training)
        logits: Tensor = self.fc(x)
        return logits


# --- ShuffleNet-v2 (Ma et al. 2018, arXiv 1807.11164), the CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464)


_SHUFFLENET_STEM, _SHUFFLENET_HEAD = 24, 1024

_BLOCKS = (4, 8, 4)
#: Channels of the three stages, for each width: the halves of all of them are multiples of 2.
_SHUFFLENET_STAGES = {1.0: (116, 232, 464), 0.5: (56, 112, 224), 0.25: (28, 56, 112), 0.1: (12, 24, 48)}


def _conv_norm(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def _shuffled(x: Tensor) -> Tensor:
    """Interleave the channels of the two halves."""
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
    """One half of the channels passes unchanged, the other through a branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = Branch(channels // 2, channels // 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        return _shuffled(torch.cat([kept, self.branch(changed)], 1))


class DownUnit(nn.Module):
    """Both branches receive all channels and halve the image."""

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
        if width not in _SHUFFLENET_STAGES:
            raise ValueError(f"ShuffleNet-v2 has the widths {', '.join(map(str, _SHUFFLENET_STAGES))}, not {width}.")
        features = _SHUFFLENET_STEM
        self.stem = _conv_norm(3, features, 3)
        self.units = nn.Sequential()
        for channels, count in zip(_SHUFFLENET_STAGES[width], _BLOCKS, strict=True):
            self.units.append(DownUnit(features, channels))
            self.units.extend(Unit(channels) for _ in range(count - 1))
            features = channels
        self.head = _conv_norm(features, _SHUFFLENET_HEAD)
        self.fc = nn.Linear(_SHUFFLENET_HEAD, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.head(self.units(F.relu(self.stem(x)))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


# --- SqueezeNet (Iandola et al. 2016, arXiv 1602.07360), the CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464)


_SQUEEZENET_STEM = 96
#: (squeeze, expand) of the eight fire modules; each expand is a 1x1 and a 3x3 convolution.
_FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
#: Fire modules (and the stem, 0) that a 2x2 max pool follows.
_POOL_AFTER = (0, 3, 7)


def _squeezenet_conv_norm(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs))


class Fire(nn.Module):
    """Squeeze by a 1x1 convolution, expand by a 1x1 and a 3x3 one in parallel."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = _squeezenet_conv_norm(inputs, squeeze, 1)
        self.expand1 = _squeezenet_conv_norm(squeeze, expand, 1)
        self.expand3 = _squeezenet_conv_norm(squeeze, expand, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.expand1(x), self.expand3(x)], 1))


class SqueezeNet(nn.Module):
    """Stem, eight fire modules, 1x1 convolution to the classes, average pool."""

    def __init__(self, classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        features = scaled(_SQUEEZENET_STEM, width)
        self.stem = _squeezenet_conv_norm(3, features, 3)
        self.fires = nn.ModuleList()
        for number, (squeeze, expand) in enumerate(_FIRES, start=1):
            # The last expand keeps its width: the classes are computed from it.
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
