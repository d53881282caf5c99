"""RetinaNet (Lin et al. 2017, arXiv 1708.02002): a ResNet, a feature pyramid, and two heads that every level shares.

A level Pn of the pyramid has a cell per 2^n pixels. P3, P4 and P5 come from the backbone's last three stages, each
added to the next coarser one; P6 and P7 are strided convolutions of the last stage. Every cell has several anchors,
boxes of fixed sizes, and the network returns, for each anchor, the logits of the classes and the offsets of the edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.lab.models.resnet import BOTTLENECK_DEPTHS, Bottleneck, ResNet, imagenet_resnet
from bitplan.lab.models.small_cnns import scaled

#: The first level of the pyramid, and the largest number of levels: P3 to P7.
FIRST_LEVEL, MOST_LEVELS = 3, 5
#: Levels of the backbone's stages; a pyramid has at least these.
BACKBONE_LEVELS = 3
#: Sides of images are multiples of this, so that a cell covers exactly four cells of the level below.
COARSEST = 2 ** (FIRST_LEVEL + BACKBONE_LEVELS - 1)

#: The initial probability of every anchor and class. Nearly all anchors are background: at 0.5 their sum would
#: dominate the loss in the first steps.
_PRIOR = 0.01


class FrozenBatchNorm(nn.BatchNorm2d):
    """A batch norm that neither learns nor updates statistics: a fixed scale and shift in every mode."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.requires_grad_(False)
        self.training = False

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self


def freeze_norms(model: nn.Module) -> None:
    """Replace every batch norm by a frozen one with the same values."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            frozen = FrozenBatchNorm(module.num_features)
            frozen.load_state_dict(module.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, frozen)


class Stages(nn.Module):
    """A ResNet without its classifier: returns its last three stages."""

    def __init__(self, network: ResNet) -> None:
        super().__init__()
        self.conv1, self.bn1, self.pool = network.conv1, network.bn1, network.pool
        self.names = network.stages
        for name in self.names:
            self.add_module(name, network.get_submodule(name))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        made = []
        for name in self.names:
            x = self.get_submodule(name)(x)
            made.append(x)
        return made[-BACKBONE_LEVELS:]


class Pyramid(nn.Module):
    """Levels with equal channels, each combined with the coarser ones (Lin et al. 2016, arXiv 1612.03144)."""

    def __init__(self, inputs: Sequence[int], channels: int, levels: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in inputs)
        extra = range(levels - len(inputs))
        self.coarser = nn.ModuleList(
            nn.Conv2d(channels if number else inputs[-1], channels, 3, 2, padding=1) for number in extra
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                _zero(module.bias)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        above: Tensor | None = None
        levels: list[Tensor] = []
        for stage, lateral, smooth in reversed([*zip(stages, self.lateral, self.smooth, strict=True)]):
            joined = lateral(stage)
            if above is not None:
                joined = joined + F.interpolate(above, scale_factor=2.0, mode="nearest")
            above = joined
            levels.insert(0, smooth(joined))
        coarse = stages[-1]
        for number, convolution in enumerate(self.coarser):
            coarse = convolution(F.relu(coarse) if number else coarse)
            levels.append(coarse)
        return levels


class Head(nn.Module):
    """3x3 convolutions, the last of which returns a number of values per anchor."""

    def __init__(self, channels: int, layers: int, anchors: int, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.tower = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))
        self.tell = nn.Conv2d(channels, anchors * numbers, 3, padding=1)
        for module in self.tower:
            assert isinstance(module, nn.Conv2d)
            # The paper's deviation of 0.01 suits 256 channels; this one preserves the variance for any number.
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            _zero(module.bias)
        nn.init.normal_(self.tell.weight, std=0.01)
        _zero(self.tell.bias)

    def forward(self, levels: list[Tensor]) -> Tensor:
        """(batch, anchors of all levels, values): level by level, row by row, with each cell's anchors together."""
        outputs = []
        for level in levels:
            for convolution in self.tower:
                level = F.relu(convolution(level))
            outputs.append(self.tell(level).permute(0, 2, 3, 1).reshape(level.shape[0], -1, self.numbers))
        return torch.cat(outputs, 1)


class RetinaNet(nn.Module):
    """Images (batch, 3, side, side) to logits (batch, anchors, classes) and offsets (batch, anchors, 4)."""

    def __init__(
        self,
        classes: int,
        *,
        anchors: int = 9,
        width: float = 1.0,
        levels: int = MOST_LEVELS,
        head_layers: int = 4,
        depth: int = 18,
    ) -> None:
        """
        :param anchors: anchors per cell.
        :param width: multiplier of the channels.
        :param levels: levels of the pyramid, from P3 on: 3 to 5. Small images need no coarse ones.
        :param head_layers: hidden convolutions of each head.
        :param depth: of the backbone: 18, 34, 50 or 101.
        """
        super().__init__()
        if not BACKBONE_LEVELS <= levels <= MOST_LEVELS:
            raise ValueError(f"a pyramid has {BACKBONE_LEVELS} to {MOST_LEVELS} levels, not {levels}.")
        channels = scaled(256, width)
        self.backbone = Stages(imagenet_resnet(depth, width=width))
        expansion = Bottleneck.expansion if depth in BOTTLENECK_DEPTHS else 1
        stages = [scaled(size, width) * expansion for size in (128, 256, 512)]
        self.pyramid = Pyramid(stages, channels, levels)
        self.class_head = Head(channels, head_layers, anchors, classes)
        self.box_head = Head(channels, head_layers, anchors, 4)
        assert self.class_head.tell.bias is not None
        nn.init.constant_(self.class_head.tell.bias, -math.log((1 - _PRIOR) / _PRIOR))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.pyramid(self.backbone(images))
        return self.class_head(levels), self.box_head(levels)


def level_grids(side: int, levels: int) -> list[tuple[int, int]]:
    """(pixels of a cell, cells of a row) of each level, for images of that side.

    >>> level_grids(320, 5)
    [(8, 40), (16, 20), (32, 10), (64, 5), (128, 3)]
    """
    strides = [2 ** (FIRST_LEVEL + number) for number in range(levels)]
    return [(stride, -(-side // stride)) for stride in strides]


def _zero(bias: Tensor | None) -> None:
    assert bias is not None
    nn.init.zeros_(bias)
