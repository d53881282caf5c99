from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.lab.models.resnet import PadShortcut, Shortcut, cifar_resnet, imagenet_resnet, resnet18


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)], ids=lambda value: str(value)
)
def test_with_pad_shortcuts_the_parameters_are_those_of_he_et_al_table_6(depth: int, millions: float) -> None:
    with torch.device("meta"):
        assert parameters(cifar_resnet(depth, shortcut="pad")) / 1e6 == pytest.approx(millions, abs=0.03)


def test_conv_shortcuts_add_two_small_convolutions_and_their_norms() -> None:
    with torch.device("meta"):
        plain, convolved = cifar_resnet(20, shortcut="pad"), cifar_resnet(20)
    assert parameters(plain) == 269_722
    assert parameters(convolved) - parameters(plain) == (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)


@pytest.mark.parametrize("depth", [38, 74, 152])
def test_the_depth_counts_convolutions_on_the_longest_way_and_the_last_layer(depth: int) -> None:
    with torch.device("meta"):
        model = cifar_resnet(depth, shortcut="pad")
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules()) == depth


@pytest.mark.parametrize("depth", [19, 2, 18])
def test_another_depth_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="6n\\+2"):
        cifar_resnet(depth)


def test_resnet18_for_cifar_100_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert parameters(resnet18(100)) == 11_220_132


def test_a_tenth_of_the_width_is_rounded_to_multiples_of_four() -> None:
    narrow = resnet18(100, width=0.1)
    stages = [narrow.get_submodule(f"layer{number}.1.conv2") for number in (1, 2, 3, 4)]
    assert [stage.out_channels for stage in stages] == [8, 12, 24, 52]


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_imagenet_networks_have_the_well_known_numbers_of_parameters(depth: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(imagenet_resnet(depth)) == count


def test_an_imagenet_network_of_another_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="18, 34, 50 or 101"):
        imagenet_resnet(42)


def test_imagenet_networks_reach_the_last_pool_with_seven_by_seven_pixels() -> None:
    seen: list[torch.Size] = []
    with torch.device("meta"):
        model = imagenet_resnet(50)
        model.get_submodule("layer4").register_forward_hook(lambda *arguments: seen.append(arguments[2].shape))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert seen == [torch.Size([2, 2048, 7, 7])]


@pytest.mark.parametrize("shortcut", ["pad", "conv"])
def test_every_parameter_of_a_cifar_network_learns(shortcut: Shortcut) -> None:
    model = cifar_resnet(8, classes=4, shortcut=shortcut)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_pad_shortcut_keeps_every_other_pixel_and_adds_zero_channels() -> None:
    x = torch.randn(1, 2, 4, 4)
    y = PadShortcut(2, 4, stride=2)(x)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, 0].any()
    assert not y[:, 3].any()
