"""Codes and moments in one operation, where packed graphs round what batch norm reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_backend import compile_without_inductor
from torch import Tensor, nn

import bitplan
from bitplan import Plan
from bitplan.compiler import batch_norm_fusion, partitioning
from bitplan.compiler.batch_norm_fusion import (
    cast_with_channel_stats_reference,
    fold_batch_norms,
    fuse_channel_stats,
)
from bitplan.numerics import quantizer
from bitplan.runtime import rounding_op as actions

PLAN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "conv2d", "activation": "e4m3"}]})


def test_codes_and_moments_are_those_of_the_rounded_values() -> None:
    y = (3 * torch.randn(4, 6, 5, 3) + 20 * torch.randn(1, 6, 1, 1)).bfloat16()
    y[0, 0, 0, 0] = 1000.0
    code, var, mean = torch.ops.bitplan.cast_with_channel_stats(y, torch.float8_e4m3fn)
    rounded = bitplan.quantize(y, "e4m3")
    assert torch.equal(code.to(torch.bfloat16), rounded)
    exact_var, exact_mean = torch.var_mean(rounded.double(), (0, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(var.double(), exact_var, rtol=1e-5)
    assert torch.allclose(mean.double(), exact_mean, rtol=1e-5)
    assert (var.shape, var.dtype) == ((1, 6, 1, 1), torch.float32)
    torch.library.opcheck(torch.ops.bitplan.cast_with_channel_stats.default, (y, torch.float8_e4m3fn))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounding by casts, and the pass at work, as CUDA has them; how many moments were fused in each graph."""

    def cast(x: Tensor, target: Any, rounding: Any, overflow: Any) -> Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    counts: list[int] = []

    def fused(graph: torch.fx.Graph) -> int:
        counts.append(fuse_channel_stats(graph, "cpu", min_elements=0))
        return counts[-1]

    monkeypatch.setattr(actions, "is_cast_small", lambda target, device: True)
    monkeypatch.setattr(quantizer, "round_by_torch", cast)
    monkeypatch.setattr(partitioning, "fuse_channel_stats", fused)
    return counts


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    )


def trained(model: nn.Module, x: Tensor, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    torch._dynamo.reset()
    with bitplan.attach(model, PLAN, example=x, execution="packed") as run:
        called = compile_without_inductor(run, model, monkeypatch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = called(x)
        y.float().square().mean().backward()
    state = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return [y.detach().float(), *(p.grad for p in model.parameters() if p.grad is not None), *state]


def assert_alike(ours: list[Tensor], plain: list[Tensor]) -> None:
    """But for last bits, so that a BF16 rounding behind them may flip now and then."""
    for first, second in zip(ours, plain, strict=True):
        assert (first - second).norm() <= 4e-3 * second.norm()
    assert plain[0].norm() > 0
    assert plain[1].norm() > 0


def test_a_packed_graph_has_them_fused(as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 8, 8)
    fused = trained(net(), x, autocast=True, monkeypatch=monkeypatch)
    assert as_on_a_gpu == [2]
    monkeypatch.setattr(partitioning, "fuse_channel_stats", lambda graph: 0)
    apart = trained(net(), x, autocast=True, monkeypatch=monkeypatch)
    assert_alike(fused, apart)


def test_float32_is_left_as_it_is(as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[int] = []

    def fold(graph: torch.fx.Graph) -> int:
        folded.append(fold_batch_norms(graph))
        return folded[-1]

    monkeypatch.setattr(partitioning, "fold_batch_norms", fold)
    trained(net(), torch.randn(4, 3, 8, 8), autocast=False, monkeypatch=monkeypatch)
    assert (as_on_a_gpu, folded) == ([0], [0])


def test_batch_norm_is_a_factor_and_a_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[tuple[int, ...]]] = []

    def fold(graph: torch.fx.Graph) -> int:
        result = fold_batch_norms(graph)
        kept.append(
            {tuple(node.meta["val"].shape) for node in graph.nodes if node.meta.get(batch_norm_fusion.ALWAYS_SAVED)}
        )
        return result

    x = torch.randn(4, 3, 8, 8)
    monkeypatch.setattr(partitioning, "fold_batch_norms", fold)
    folded = trained(net(), x, autocast=True, monkeypatch=monkeypatch)
    assert kept == [{(1, 8, 1, 1), (1, 4, 1, 1)}]
    monkeypatch.setattr(partitioning, "fold_batch_norms", lambda graph: 0)
    apart = trained(net(), x, autocast=True, monkeypatch=monkeypatch)
    assert_alike(folded, apart)


def test_other_moments_are_left_as_they_are() -> None:
    def graph_of(dims: list[int], dtype: torch.dtype, keepdim: bool) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        y = graph.placeholder("y")
        y.meta["val"] = torch.empty(2, 3, 4, 4, dtype=dtype)
        code = graph.call_function(batch_norm_fusion._convert, (y, torch.float8_e4m3fn))
        code.meta["val"] = torch.empty(2, 3, 4, 4, dtype=torch.float8_e4m3fn)
        wide = graph.call_function(batch_norm_fusion._convert, (code, torch.float32))
        both = graph.call_function(
            torch.ops.aten.var_mean.correction, (wide, dims), {"correction": 0, "keepdim": keepdim}
        )
        both.meta["val"] = (torch.empty(1, 3, 1, 1), torch.empty(1, 3, 1, 1))
        mean = graph.call_function(batch_norm_fusion.operator.getitem, (both, 1))
        graph.output((mean, code))
        return graph

    assert fuse_channel_stats(graph_of([0, 2, 3], torch.bfloat16, True), "cpu", min_elements=0) == 1
    assert fuse_channel_stats(graph_of([0, 2, 3], torch.bfloat16, True), "cuda", min_elements=0) == 0
    assert fuse_channel_stats(graph_of([0, 2, 3], torch.bfloat16, True), "cpu") == 0  # too few
    assert fuse_channel_stats(graph_of([0, 2], torch.bfloat16, True), "cpu", min_elements=0) == 0
    assert fuse_channel_stats(graph_of([0, 2, 3], torch.float32, True), "cpu", min_elements=0) == 0
    assert fuse_channel_stats(graph_of([0, 2, 3], torch.bfloat16, False), "cpu", min_elements=0) == 0


def test_the_twin_saturates() -> None:
    code, _, _ = cast_with_channel_stats_reference(torch.full((1, 1, 1, 2), -1e4), torch.float8_e4m3fn)
    assert code.float().tolist() == [[[[-448.0, -448.0]]]]
