"""Largest magnitudes of several matrices by one operation: what it gives, and where graphs get it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler import amax_fusion
from bitplan.compiler.amax_fusion import batch_amax_kernels
from bitplan.compiler.launching import KernelInliningPass, inline_kernels
from bitplan.executions.native.float8_cast import MAX_BATCH, cast_float8

E4M3 = torch.float8_e4m3fn
OURS: Any = torch.ops.bitplan


def given(count: int) -> list[Tensor]:
    """What all magnitudes are looked up in, something that is computed with, and weights."""
    torch.manual_seed(0)
    weights = [number * torch.randn(16, 32) for number in range(1, count + 1)]
    return [torch.zeros(count + 1), torch.randn(16, 32), *weights]


def casts(history_amaxes: Tensor, x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Of something that is computed first, and of every weight, some of them seen otherwise."""
    y = torch.tanh(x)
    result = [cast_float8(y, E4M3, history_amax=history_amaxes[-1])]
    for number, weight in enumerate(weights):
        result.append(
            cast_float8(weight.view(32, 16) if number % 2 else weight, E4M3, history_amax=history_amaxes[number])
        )
        y = y * result[-1].scale
    return [y, *(part for cast in result for part in (cast.rows, cast.scale))]


def traced(count: int) -> fx.GraphModule:
    return make_fx(casts, tracing_mode="fake")(*given(count))


def calls_of(graph: fx.Graph, name: str) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=getattr(OURS, name).default))


def test_it_gives_what_single_ones_give() -> None:
    xs, history_amaxes = given(3)[2:], [torch.tensor(history_amax) for history_amax in (0.0, 2.0, 0.0)]
    torch.library.opcheck(OURS.float8_amax_batch, (xs, history_amaxes))
    for ours, x, history_amax in zip(OURS.float8_amax_batch(xs, history_amaxes), xs, history_amaxes, strict=True):
        assert torch.equal(ours, OURS.float8_amax(x, history_amax))


@pytest.mark.parametrize("count", [2, MAX_BATCH, MAX_BATCH + 1, MAX_BATCH + 3])
def test_weights_are_joined_and_what_is_computed_is_not(count: int) -> None:
    module = traced(count)
    expected = module(*given(count))
    alone = count % MAX_BATCH == 1
    assert batch_amax_kernels(module.graph, "cpu") == count - alone
    module.graph.lint()
    module.recompile()
    assert len(calls_of(module.graph, "float8_amax")) == 1 + alone
    groups = [len(node.args[0]) for node in calls_of(module.graph, "float8_amax_batch")]  # type: ignore[arg-type]
    assert groups == [MAX_BATCH] * (count // MAX_BATCH) + [count % MAX_BATCH] * (count % MAX_BATCH > 1)
    for first, second in zip(module(*given(count)), expected, strict=True):
        assert torch.equal(first.float(), second.float())


def test_elsewhere_without_a_past_and_by_the_switch_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*weights: Tensor) -> list[Tensor]:
        return [cast_float8(weight, E4M3).rows for weight in weights]

    assert batch_amax_kernels(traced(4).graph) == 0
    assert batch_amax_kernels(make_fx(without, tracing_mode="fake")(*given(4)[2:]).graph, "cpu") == 0
    assert batch_amax_kernels(make_fx(casts, tracing_mode="symbolic")(*given(4)).graph, "cpu") == 0
    joined = KernelInliningPass().uuid()
    monkeypatch.setattr(amax_fusion, "BATCHES_AMAX", False)
    assert batch_amax_kernels(traced(4).graph, "cpu") == 0
    assert KernelInliningPass().uuid() != joined


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels are traced")
@pytest.mark.usefixtures("gpu_in_name")
def test_one_kernel_is_launched() -> None:
    with FakeTensorMode():
        module = make_fx(casts)(*map(torch.empty_like, given(3)))
    assert batch_amax_kernels(module.graph, "cpu") == 3
    inline_kernels(module.graph, "cpu")
    module.graph.lint()
    result: dict[str, list[tuple[Any, set[str]]]] = {}
    for node in module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        seen = (node.kwargs["grid"], set(node.kwargs["tensors_to_clone"]))
        result.setdefault(kernel.fn.__name__, []).append(seen)
    assert result["_partial_amax_batch"] == [([(64, 3, 1)], {"out_0", "out_1", "out_2"})]
    assert result["_partial_amax"] == [([(512, 1, 1)], {"out"})]
