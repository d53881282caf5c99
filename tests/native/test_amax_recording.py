"""Records that casts write into: what the operations give, where graphs get them, and that the numbers stay."""

from __future__ import annotations

import collections
import copy
import importlib.util
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bitplan
from bitplan import Plan
from bitplan.compiler import amax_fusion
from bitplan.compiler.amax_fusion import record_amax_in_casts
from bitplan.compiler.gated_fusion import fuse_gates
from bitplan.compiler.launching import KernelInliningPass, inline_kernels
from bitplan.compiler.norm_fusion import fuse_norms
from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy
from bitplan.executions.native.float8_cast import Cast, cast_float8
from bitplan.lab.models.language_models import LlamaBlocks
from bitplan.numerics import quantizer
from bitplan.runtime import rounding_op as actions
from bitplan.runtime.module_state import RECORD
from bitplan.runtime.statistics import COLUMNS, blank_record, observe_amax, observe_range

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NOW = 22
OURS: Any = torch.ops.bitplan
ATEN: Any = torch.ops.aten
F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 2}
G8: dict[str, Any] = {**F8, "format": "e5m2"}
CODED = {"match": ["*.gate", "*.up"], "op": "linear", "activation": "e4m3"}


def bits(x: Tensor) -> Tensor:
    """With NaN as one number."""
    return x.float().nan_to_num(nan=-7.0).contiguous().view(torch.int32)


# --- operations ---------------------------------------------------------------------------------------------


def test_they_give_what_the_others_give_and_records_that_are_raised() -> None:
    torch.manual_seed(0)
    x, y, z = (torch.randn(20, 48).bfloat16() for _ in range(3))
    history = torch.tensor(2.0)
    parts = OURS.float8_amax(x, history)
    records = [torch.rand(3, COLUMNS), torch.full((1, COLUMNS), 100.0)]
    cells = [COLUMNS + NOW, 4]
    for name, given, tops in (
        ("float8_cast", (x, E4M3, parts, history, True, True, True, True), (3, 3)),
        ("float8_padded_cast", (x, torch.arange(-12, 20).int(), E4M3, parts, history, True, True, True), (3, 3)),
        ("gated_cast", (x, y, E4M3, parts, history, True, True, True, True), (3, 3)),
        ("gated_grads_cast", (x, y, z, E5M2, parts, parts, history, history, True, True, True), (3, 7)),
    ):
        before = [record.clone() for record in records]
        told = getattr(OURS, name)(*given)
        noted = getattr(OURS, f"{name}_recorded")(*given, records=records, cells=cells)
        torch.library.opcheck(getattr(OURS, f"{name}_recorded"), given, {"records": records, "cells": cells})
        assert len(noted) == len(told) + 2
        for number, (first, second) in enumerate(zip(noted, told, strict=False)):
            assert torch.equal(first.float(), second.float()) if number not in tops else first.numel() == 0
        expected = [record.clone() for record in records]
        expected[0][1, NOW] = torch.maximum(expected[0][1, NOW], told[tops[0]].amax())
        expected[1][0, 4] = torch.maximum(expected[1][0, 4], told[tops[1]].amax())
        assert all(map(torch.equal, noted[len(told) :], expected))
        assert all(map(torch.equal, records, before))
        assert torch.equal(noted[-1], records[1])


# --- graphs of models ---------------------------------------------------------------------------------------


class Rewritten:
    """A backend of torch.compile that has Inductor prepare graphs, rewrites them, and counts what is in them.

    A copy of each graph, whose casts do not record, runs on the same values and has the same results, bit for bit.
    """

    def __init__(self, partitioner: Any = None) -> None:
        self.seen: list[collections.Counter[str]] = []
        self.seen_apart: list[collections.Counter[str]] = []
        self.settings = {} if partitioner is None else {"custom_partitioner_fn": partitioner}

    def __call__(self, gm: fx.GraphModule, given: Any) -> Any:
        return compile_fx(gm, given, inner_compile=self._counted, config_patches=self.settings)

    def _counted(self, gm: fx.GraphModule, given: Any, **options: Any) -> Any:
        apart = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        self.seen.append(self._rewritten(gm))
        with patch.object(amax_fusion, "RECORDS_IN_CASTS", False):
            self.seen_apart.append(self._rewritten(apart))

        def both(*arguments: Any) -> Any:
            copies = [item.clone() if isinstance(item, Tensor) else item for item in arguments]
            expected = [*apart.forward(*copies), *copies]
            results = gm.forward(*arguments)
            for ours, other in zip((*results, *arguments), expected, strict=True):
                assert torch.equal(bits(ours), bits(other)) if isinstance(ours, Tensor) else ours == other
            return results

        return torch._functorch.aot_autograd.make_boxed_func(both)

    def _rewritten(self, gm: fx.GraphModule) -> collections.Counter[str]:
        fuse_gates(gm.graph, "cpu")
        fuse_norms(gm.graph, "cpu")
        record_amax_in_casts(gm.graph, "cpu")
        gm.graph.lint()
        gm.recompile()
        return collections.Counter(map(name_of, gm.graph.nodes))


def name_of(node: fx.Node) -> str:
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def records_of(model: nn.Module) -> list[Tensor]:
    result = (module._buffers.get(RECORD) for module in model.modules())
    return [record.clone() for record in result if record is not None]


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to float8 by casts."""

    def cast(x: Tensor, target: Any, rounding: Any, overflow: Any) -> Tensor:
        return x.to(E4M3).to(x.dtype)

    monkeypatch.setattr(actions, "is_cast_small", lambda target, device: True)
    monkeypatch.setattr(quantizer, "round_by_torch", cast)


def train(rewritten: Rewritten, recompute: Any, coded: bool) -> list[Tensor]:
    """Three steps of two batches, with evaluation and NaN between; records after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaBlocks(64, 1, 128, heads=2).bfloat16()
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    rule = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": G8}
    plan = Plan.from_dict({"version": 1, "rules": [rule, *([CODED] if coded else [])]})
    result = []
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
        run._execution.recast_in_backward = run.execution.recast_operands
        run._installation.update_versions()
        called = torch.compile(model, fullgraph=True, backend=rewritten)
        for number in range(3):
            for factor in (1.0 + number, 0.5):
                y = called(factor * x)
                (y * (torch.nan if number == 1 and factor == 0.5 else factor)).sum().backward()
            run.step()
            result += records_of(model)
            if number == 0 and coded:
                with torch.no_grad():
                    called(7 * x)
                model.eval()
                with torch.no_grad():
                    called(9 * x)
                model.train()
    return result


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize(("recompute", "coded"), [((), False), ("inputs", True)])
def test_numbers_stay_and_what_was_computed_for_records_is_gone(recompute: Any, coded: bool) -> None:
    rewritten = Rewritten(RecomputePartitioner(RecomputePolicy(True, False, coded)) if coded else None)
    first, *_, last = train(rewritten, recompute, coded)
    assert not torch.equal(first, last)
    forward, backward, *others = rewritten.seen
    # Four inputs, of which one is a norm's result and one a gate's product, and seven weights; of seven gradients two
    # are cast at once.
    assert forward["float8_cast_recorded"] + forward["norm_cast_recorded"] + forward["gated_cast_recorded"] == 11
    assert forward["norm_cast_recorded"] == 1
    assert backward["float8_cast_recorded"] + 2 * backward["gated_grads_cast_recorded"] == 7
    assert backward["gated_grads_cast_recorded"] == forward["gated_cast_recorded"] == 1
    for seen in (forward, backward, *others):
        assert seen["select_scatter"] == seen["amax"] == seen["maximum"] == 0
    assert len(others) == 2 * coded
    told = rewritten.seen_apart[0]
    assert told["select_scatter"] > 0
    assert not any("recorded" in name for name in told)


# --- graphs made by hand ------------------------------------------------------------------------------------


def cast(x: Tensor, history_amax: Tensor) -> Cast:
    return cast_float8(x, E4M3, power_of_two=True, history_amax=history_amax, returns_amax=True)


def given(records: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [3 * torch.randn(20, 48), torch.zeros(()), *(blank_record(2, torch.device("cpu")) for _ in range(records))]


def traced(function: Callable[..., Any], records: int = 2) -> fx.GraphModule:
    return prepared(make_fx(torch.func.functionalize(function), tracing_mode="fake")(*given(records)))


def prepared(module: fx.GraphModule) -> fx.GraphModule:
    """As Inductor prepares a graph before it comes to passes of others."""
    module.graph = fx_graph_cse(module.graph)
    module.graph.eliminate_dead_code()
    joint_graph_passes(module)
    return module


def noted_twice(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    first = cast(x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    second = cast(2 * x, history_amax)
    observe_amax(other[1], second.tile_amax.amax())
    observe_amax(one[1], second.tile_amax.amax())
    return first.rows, second.columns


def test_what_a_cast_tells_goes_to_several_records() -> None:
    module, (plain, ours) = traced(noted_twice), (given(), given())
    expected = module(*plain)
    assert record_amax_in_casts(module.graph, "cpu") == 2
    module.graph.lint()
    module.recompile()
    assert collections.Counter(map(name_of, module.graph.nodes))["copy_"] == 2
    for first, second in zip((*module(*ours), *ours), (*expected, *plain), strict=True):
        assert torch.equal(first.float(), second.float())
    assert ours[2][1, NOW] == 2 * ours[2][0, NOW] == ours[3][1, NOW] > 0


def read_after(x: Tensor, history_amax: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    observe_amax(first[0], cast(x, history_amax).tile_amax.amax())
    return first[0, NOW] + 1, second


def widened(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first = cast(x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    observe_range(one[0], x)
    return first.rows


def told(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first = cast(x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    return first.tile_amax


def twice_in_one(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first = cast(x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    observe_amax(one[1], first.tile_amax.amax())
    return first.rows


def of_something_else(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first = cast(x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    observe_amax(one[1], x.abs().amax())
    return first.rows


def in_company(x: Tensor, history_amax: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The first record is not fit, so the cast is not, so the second record is not, so the other cast is not."""
    first, second = cast(x, history_amax), cast(2 * x, history_amax)
    observe_amax(one[0], first.tile_amax.amax())
    observe_range(one[0], x)
    observe_amax(other[0], first.tile_amax.amax())
    observe_amax(other[1], second.tile_amax.amax())
    return first.rows


@pytest.mark.parametrize("function", [read_after, widened, told, twice_in_one, of_something_else, in_company])
def test_anything_else_is_left_as_it_is(function: Callable[..., Any]) -> None:
    module = traced(function)
    before = str(module.graph)
    assert record_amax_in_casts(module.graph, "cpu") == 0
    assert str(module.graph) == before


def test_a_cast_notes_in_three_records_and_not_in_four(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(x: Tensor, history_amax: Tensor, *records: Tensor) -> Tensor:
        first = cast(x, history_amax)
        for record in records:
            observe_amax(record[0], first.tile_amax.amax())
        return first.rows

    assert record_amax_in_casts(traced(noted, 3).graph, "cpu") == 1
    assert record_amax_in_casts(traced(noted, 4).graph, "cpu") == 0
    assert record_amax_in_casts(traced(noted, 3).graph) == 0  # on another device
    monkeypatch.setattr(amax_fusion, "RECORDS_IN_CASTS", False)
    assert record_amax_in_casts(traced(noted, 3).graph, "cpu") == 0


def test_sizes_that_are_not_known_are_left_as_they_are() -> None:
    def noted(x: Tensor, history_amax: Tensor, record: Tensor) -> Tensor:
        first = cast(x, history_amax)
        observe_amax(record[0], first.tile_amax.amax())
        return first.rows

    unknown = prepared(make_fx(torch.func.functionalize(noted), tracing_mode="symbolic")(*given(1)))
    assert record_amax_in_casts(unknown.graph, "cpu") == 0


def test_what_is_stored_compiled_knows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = KernelInliningPass().uuid()
    monkeypatch.setattr(amax_fusion, "RECORDS_IN_CASTS", False)
    assert KernelInliningPass().uuid() != noted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels are traced")
@pytest.mark.usefixtures("gpu_in_name")
def test_kernels_write_into_the_records_and_inductor_copies_none() -> None:
    def step(x: Tensor, history_amax: Tensor, *records: Tensor) -> tuple[Tensor, ...]:
        rows, columns = noted_twice(x, history_amax, *records[:2])
        parts = OURS.gated_amax(x, 2 * x, history_amax, False)
        gated = OURS.gated_cast(x, 2 * x, E4M3, parts, history_amax, True, False, True, False)
        observe_amax(records[2][0], gated[3].amax())
        both = OURS.gated_grads_cast(x, x, 2 * x, E5M2, parts, parts, history_amax, history_amax, True, True, True)
        observe_amax(records[2][1], both[3].amax())
        observe_amax(records[3][0], both[7].amax())
        normed = OURS.norm_cast(x, x[:, 0].float(), x[0], 0.5, E4M3, parts, history_amax, False, True, True)
        observe_amax(records[4][1], normed[3].amax())
        return rows, columns, gated[0], both[0], both[4], normed[1]

    with FakeTensorMode():
        fakes = [torch.empty_like(item) for item in given(5)]
        module = prepared(make_fx(torch.func.functionalize(step))(fakes[0].bfloat16(), *fakes[1:]))
    assert record_amax_in_casts(module.graph, "cpu") == 5
    inline_kernels(module.graph, "cpu")
    module.graph.lint()
    launches = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    result: dict[str, list[set[str]]] = {}
    for node in launches:
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        result.setdefault(kernel.fn.__name__, []).append(set(node.kwargs["tensors_to_clone"]))
    layouts = {"as_rows", "as_columns", "scale_out"}
    halves = {f"{half}_{what}" for half in ("gate", "up") for what in ("rows", "columns", "scale", "record")}
    assert result["_cast_tile"] == [{*layouts, "record_0"}, {*layouts, "record_0", "record_1"}]
    assert result["_cast_gated_tile"] == [{"as_rows", "scale_out", "record"}]
    assert result["_cast_grads_tile"] == [halves]
    assert result["_cast_norm_tile"] == [{"as_columns", "scale_out", "record_0"}]
    reinplace_inplaceable_ops_core(module.graph)
    for node in launches:
        assert node.kwargs["tensors_to_clone"] == []
    copies = module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    assert all(copy.args[0] is copy.args[1] for copy in copies)  # or gone, where it was one cast's
    inputs = {node for node in module.graph.nodes if node.op == "placeholder"}
    written = ("record_0", "record_1", "record", "gate_record", "up_record")
    noted = [node.kwargs["kwargs"].get(name) for node in launches for name in written]
    assert len(inputs & {item for item in noted if item is not None}) == 5
