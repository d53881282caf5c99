"""MobileNet-v2, SqueezeNet and ShuffleNet-v2 in the CIFAR variants whose sizes are published."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitplan.lab.models.small_cnns import Fire, InvertedResidual, MobileNetV2, ShuffleNetV2, SqueezeNet, scaled


@pytest.mark.parametrize(
    ("make", "count"), [(MobileNetV2, 2_412_212), (SqueezeNet, 781_156), (ShuffleNetV2, 1_356_104)]
)
def test_with_100_classes_the_parameters_are_the_published_ones(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == count


@pytest.mark.parametrize("make", [MobileNetV2, SqueezeNet, ShuffleNetV2])
@pytest.mark.parametrize("width", [1.0, 0.1])
def test_images_of_32_pixels_reach_the_last_pool_with_four(make: Callable[..., nn.Module], width: float) -> None:
    convolved: list[torch.Size] = []
    with torch.device("meta"):
        model = make(10, width)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda *arguments: convolved.append(arguments[2].shape[2:]))
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert convolved[0] == (32, 32)
    assert convolved[-1] == (4, 4)


@pytest.mark.parametrize("make", [MobileNetV2, SqueezeNet, ShuffleNetV2])
def test_every_parameter_learns(make: Callable[..., nn.Module]) -> None:
    model = make(10, 0.1)
    # The square of the softmax: a plain sum would not see a constant that batch norm takes away.
    model(torch.randn(4, 3, 32, 32)).softmax(1).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_squeezenet_at_a_tenth_of_the_width_has_the_published_channels() -> None:
    model = SqueezeNet(width=0.1)
    fires = [module for module in model.modules() if isinstance(module, Fire)]
    assert model.stem[0].out_channels == 12
    assert [(fire.squeeze[0].out_channels, fire.expand3[0].out_channels) for fire in fires] == [
        *((4, 8), (4, 8), (4, 12), (4, 12)),
        *((8, 20), (8, 20), (8, 24), (8, 256)),
    ]


def test_mobilenet_adds_the_input_wherever_the_image_keeps_its_size() -> None:
    blocks = [module for module in MobileNetV2().modules() if isinstance(module, InvertedResidual)]
    assert [block.conv2.stride[0] for block in blocks if block.shortcut is None] == [2, 2, 2]
    convolved = [block.conv3.out_channels for block in blocks if isinstance(block.shortcut, nn.Sequential)]
    assert convolved == [16, 24, 96, 320]


def test_mobilenets_head_is_not_shrunk() -> None:
    assert MobileNetV2(width=0.25).conv2.out_channels == 1280
    assert MobileNetV2(width=2.0).conv2.out_channels == 2560


def test_shufflenet_has_only_the_widths_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"widths 1\.0, 0\.5, 0\.25, 0\.1, not 0\.3"):
        ShuffleNetV2(width=0.3)


@pytest.mark.parametrize(
    ("channels", "width", "expected"),
    [
        *((64, 1.0, 64), (24, 0.5, 16), (64, 0.1, 8), (1, 1.0, 8), (1, 0.1, 4)),
        (96, 0.1, 12),  # 9.6: the nearest multiple of 4 is 8, which is under 90 %
        (36, 0.5, 24),  # 18: the nearest multiple of 8 is 16, which is under 90 %
    ],
)
def test_widths_are_rounded_but_never_below_90_percent(channels: int, width: float, expected: int) -> None:
    assert scaled(channels, width) == expected


def test_the_original_mobilenet_has_the_published_size_and_takes_big_images() -> None:
    """3,504,872 parameters: the paper's 3.4M, and torchvision's count to the last one."""
    with torch.device("meta"):
        model = MobileNetV2(1000, big_images=True)
        assert sum(parameter.numel() for parameter in model.parameters()) == 3_504_872
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert model.blocks(torch.empty(1, 32, 112, 112)).shape == (1, 320, 7, 7)
