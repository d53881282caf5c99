"""Tensors that are saved for the backward pass lie in the memory order of their readers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_backend import compile_without_inductor
from torch import Tensor, nn
from zoo_models import import_torchvision

import bitplan
from bitplan.compiler import partitioning
from bitplan.plans import Plan

PLAN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]})
CODES = (torch.uint8, torch.int16, torch.float8_e4m3fn)
Saved = list[tuple[torch.Size, tuple[int, ...]]]


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and an MLP of channels, which are the last dimension there."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.fc1, self.fc2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.fc2(nn.functional.gelu(self.fc1(y)))
        return x + y.permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Attention between convolutions: queries, keys and values have four dimensions and are no images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = (q.tanh() @ k.tanh().mT).softmax(-1)
        return x + (scores @ v).mT.flatten(1, 2).view_as(x)


def network(middle: nn.Module) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), middle, nn.Conv2d(8, 8, 3, padding=1))
    return model.to(memory_format=torch.channels_last), torch.randn(2, 3, 6, 10).to(memory_format=torch.channels_last)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Shapes and strides of the codes that graphs save, as they were traced: those of the gradients."""
    codes: Saved = []
    partition = partitioning.PackedPartitioner.__call__

    def record(self: Any, gm: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        forward, backward = partition(self, gm, inputs, **settings)
        outputs: Any = forward.graph.output_node().args[0]
        values = [node.meta["val"] for node in outputs[settings["num_fwd_outputs"] :]]
        codes.extend((value.shape, value.stride()) for value in values if value.dtype in CODES)
        return forward, backward

    monkeypatch.setattr(partitioning.PackedPartitioner, "__call__", record)
    torch.compiler.reset()
    return codes


def gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_inductor_saves_codes_in_the_order_of_the_gradients(traced: Saved) -> None:
    """Fails without ``save_in_memory_order``: Inductor stores (samples, height, width, channels) as channels-last."""
    rule = {"match": "*", "op": ["linear", "conv2d"], "activation": "bf16"}  # of few operations: quick to compile
    model, x = network(ConvNeXtBlock(8))
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),  # a cached graph is not partitioned
        bitplan.attach(model, {"version": 1, "rules": [rule]}, example=x, execution="packed") as run,
    ):
        y = run.compile()(x)
    saved_tensors: Any = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    saved = [(tensor.shape, tensor.stride()) for tensor in saved_tensors if tensor.dtype in CODES]
    assert sorted(saved) == sorted(traced)
    assert {tuple(shape) for shape, _ in saved} == {(120, 32), (120, 8), (2, 8, 6, 10)}
    assert all(stride[1] == 1 for _, stride in saved)  # channels are innermost


@pytest.mark.parametrize(("middle", "matrices"), [(ConvNeXtBlock, 2), (Attention, 2), (lambda _: nn.Tanh(), 0)])
def test_only_what_is_no_image_is_saved_as_a_matrix(
    middle: Any, matrices: int, traced: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = network(middle(8))
    results = []
    for execution in ("emulate", "packed"):
        twin = copy.deepcopy(model)
        torch.compiler.reset()
        with bitplan.attach(twin, PLAN, example=x, execution=execution) as run:
            results.append(gradients(twin, compile_without_inductor(run, twin, monkeypatch)(x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    images = [stride for shape, stride in traced if len(shape) == 4]
    assert images
    assert all(stride[1] == 1 for stride in images)
    assert sum(len(shape) == 2 for shape, _ in traced) == matrices


def test_graphs_of_timm_save_no_code_of_four_dimensions_but_images(
    traced: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    model = timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20), num_classes=4)
    model, x = model.to(memory_format=torch.channels_last), torch.randn(2, 3, 64, 64)
    x = x.to(memory_format=torch.channels_last)
    with bitplan.attach(model, PLAN, example=x, execution="packed") as run:
        compile_without_inductor(run, model, monkeypatch)(x).square().mean().backward()
    images = [stride for shape, stride in traced if len(shape) == 4 and shape[3] not in (20, 80)]  # up to the last
    assert len(images) > 6
    assert all(stride[1] == 1 for stride in images)
    assert sum(len(shape) == 2 for shape, _ in traced) >= 6
