"""MobileNet-v2 (Sandler et al. 2018, arXiv 1801.04381), and its CIFAR variant of Lee, Sharma & Aiken 2023 (2301.13464).

The variant takes 32x32 images, so it strides less; it has ReLU in place of ReLU6, and a convolution in a shortcut whose
number of channels changes, where the original has no shortcut.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.widths import scaled

#: (expansion, channels, repeats, stride) of each stage, for 32x32 images.
_STAGES = (
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
_STEM, _HEAD = 32, 1280


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
        if original and expansion == 1:  # there is nothing to go up to
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
        features = scaled(_STEM, width)
        self.conv1 = nn.Conv2d(3, features, 3, 2 if big_images else 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.blocks = nn.Sequential()
        for number, (expansion, channels, repeats, stride) in enumerate(_STAGES):
            first_stride = 2 if big_images and number in _STRIDES_ALSO else stride
            for position in range(repeats):
                outputs = scaled(channels, width)
                own_stride = first_stride if position == 0 else 1
                self.blocks.append(InvertedResidual(features, outputs, expansion, own_stride, big_images))
                features = outputs
        head = max(_HEAD, scaled(_HEAD, width))  # the head is not shrunk
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
