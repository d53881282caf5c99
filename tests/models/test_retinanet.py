from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.lab.models.resnet import imagenet_resnet
from bitplan.lab.models.retinanet import FrozenBatchNorm, Pyramid, RetinaNet, Stages, freeze_norms


def test_the_backbone_is_a_resnet_18_without_its_classifier() -> None:
    network = imagenet_resnet(18, width=0.25).eval()
    stages = Stages(network)
    images = torch.randn(2, 3, 64, 64)
    made = stages(images)
    assert [tuple(item.shape[1:]) for item in made] == [(32, 8, 8), (64, 4, 4), (128, 2, 2)]
    torch.testing.assert_close(network.fc(made[-1].mean((2, 3))), network(images))
    own = set(stages.state_dict())
    assert own == {name for name in network.state_dict() if not name.startswith("fc.")}


def test_a_finer_level_knows_what_the_coarser_ones_know() -> None:
    pyramid = Pyramid([4, 8, 16], 8, 5)
    stages = [torch.randn(1, 4, 16, 16), torch.randn(1, 8, 8, 8), torch.randn(1, 16, 4, 4, requires_grad=True)]
    levels = pyramid(stages)
    assert [tuple(level.shape) for level in levels] == [(1, 8, side, side) for side in (16, 8, 4, 2, 1)]
    for level in levels:
        (gradient,) = torch.autograd.grad(level[0, 0, 0, 0], stages[2], retain_graph=True)
        assert gradient.abs().sum() > 0


def test_it_begins_with_background_everywhere() -> None:
    torch.manual_seed(0)
    logits, _ = RetinaNet(3, width=0.25, levels=3).eval()(torch.randn(1, 3, 64, 64))
    assert logits.sigmoid().mean().item() == pytest.approx(0.01, rel=0.5)


def test_heads_are_shared_by_all_levels_and_everything_is_trained() -> None:
    model = RetinaNet(3, width=0.25, levels=5, head_layers=1)
    logits, offsets = model(torch.randn(2, 3, 64, 64))
    (logits.square().sum() + offsets.square().sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert sum(name.startswith("class_head.tower") for name, _ in model.named_parameters()) == 2


def test_frozen_norms_change_no_number_and_neither_learn_nor_gather() -> None:
    model = RetinaNet(3, width=0.25, levels=3, head_layers=1)
    images = torch.randn(4, 3, 64, 64)
    model(images)  # some statistics
    expected = model.eval()(images)
    freeze_norms(model)
    assert not any(type(module) is nn.BatchNorm2d for module in model.modules())
    norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm)]
    assert len(norms) == 20
    model.train()
    assert not any(norm.training for norm in norms)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for first, second in zip(model(images), expected, strict=True):
        torch.testing.assert_close(first, second)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for norm in norms for parameter in norm.parameters())


def test_torch_compile_follows_it_whole() -> None:
    model = RetinaNet(3, width=0.25, levels=3, head_layers=1)
    images = torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for first, second in zip(compiled(images), model(images), strict=True):
        torch.testing.assert_close(first, second)


def test_a_pyramid_has_three_to_five_levels() -> None:
    with pytest.raises(ValueError, match="3 to 5 levels, not 6"):
        RetinaNet(3, levels=6)
