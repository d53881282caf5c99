"""A gate's product and gradients, cast where they are computed: what the operations give, and where graphs get them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.compiler import gated_fusion as gated_fusing
from bitplan.compiler.gated_fusion import fuse_gates
from bitplan.compiler.launching import KernelInliningPass, inline_kernels
from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy
from bitplan.executions.native import gated_cast
from bitplan.executions.native.backends import Float8Backend
from bitplan.executions.native.float8_cast import cast_float8, tile_count
from bitplan.executions.native.gated_cast import (
    e4m3_reference,
    gated_grads_reference,
    gated_product_reference,
    grads_tile_count,
)
from bitplan.lab.models.language_models import LlamaBlocks
from bitplan.numerics import quantizer
from bitplan.runtime import rounding_op as actions

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OURS: Any = torch.ops.bitplan


def halves(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up, and the gradient of their product."""
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(20, 48) * 3 for _ in range(3))
    return gate.to(dtype), up.to(dtype), grad.bfloat16()


def test_the_numbers_are_those_of_torch_to_a_rounding() -> None:
    gate, up, grad = halves()
    exact_gate, exact_up = (item.double().requires_grad_() for item in (gate, up))
    exact = F.silu(exact_gate) * exact_up
    exact.backward(grad.double())
    assert exact_gate.grad is not None
    assert exact_up.grad is not None
    to_gate, to_up = gated_grads_reference(grad, gate, up)
    for ours, right in ((gated_product_reference(gate, up), exact), (to_gate, exact_gate.grad), (to_up, exact_up.grad)):
        assert ours.dtype == torch.bfloat16
        assert torch.allclose(ours.double(), right, rtol=2**-8, atol=1e-6)  # half a unit in bfloat16's last place


@pytest.mark.parametrize("history_amax", [0.0, 2.0])
def test_the_operations_cast_these_numbers(history_amax: float) -> None:
    gate, up, grad = halves()
    history = torch.tensor(history_amax)
    for codes in (False, True):
        parts = OURS.gated_amax(gate, up, history, codes)
        rows, columns, scale, tops, *small = OURS.gated_cast(
            gate, up, E4M3, parts, history, True, True, True, codes, grad
        )
        read = [e4m3_reference(item) for item in (gate, up)] if codes else [gate, up]
        expected = cast_float8(
            gated_product_reference(*read), E4M3, power_of_two=True, history_amax=history, returns_amax=True
        )
        actual = (rows, columns, scale, tops.amax())
        for ours, second in zip(actual, (*expected[:3], expected.tile_amax.amax()), strict=True):
            assert torch.equal(ours.float(), second.float())
        assert all(torch.equal(first.float(), two.float()) for first, two in zip(small, read, strict=True)) or not codes
        assert codes or all(item.numel() == 0 for item in small)
    parts = OURS.gated_grads_amax(grad, gate, up, history, history)
    both = OURS.gated_grads_cast(grad, gate, up, E5M2, *parts, history, history, True, True, True)
    for at, plain in zip((0, 4), gated_grads_reference(grad, gate, up), strict=True):
        expected = cast_float8(plain, E5M2, power_of_two=True, history_amax=history, returns_amax=True)
        for ours, second in zip(both[at : at + 4], expected, strict=True):
            assert torch.equal(ours.float(), second.float())


def test_torch_finds_the_operations_well_defined() -> None:
    gate, up, grad = halves()
    history_amax = torch.tensor(2.0)
    torch.library.opcheck(OURS.gated_amax, (gate, up, history_amax, True))
    torch.library.opcheck(OURS.gated_grads_amax, (grad, gate, up, history_amax, history_amax))
    parts = OURS.gated_amax(gate, up, history_amax, True)
    for codes in (False, True):
        torch.library.opcheck(OURS.gated_cast, (gate, up, E4M3, parts, history_amax, True, False, True, codes))
    torch.library.opcheck(
        OURS.gated_grads_cast, (grad, gate, up, E5M2, parts, parts, history_amax, history_amax, False, True, False)
    )


# --- graphs -------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit for float8, and rounding to it by casts."""

    def cast(x: Tensor, target: Any, rounding: Any, overflow: Any) -> Tensor:
        return x.to(E4M3).to(x.dtype)

    monkeypatch.setattr(Float8Backend, "is_available", lambda self, device: device.type == "cpu")
    monkeypatch.setattr(actions, "is_cast_small", lambda target, device: True)
    monkeypatch.setattr(quantizer, "round_by_torch", cast)
    torch._dynamo.reset()


@pytest.fixture
def _rounded_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations round what lies between to bfloat16, as graphs do that run as they stand. (Inductor's do not.)"""

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.bfloat16()) * up.bfloat16()

    def grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        wide, incoming = gate.float(), (grad * up.bfloat16()).float()
        sigmoid = torch.reciprocal(torch.exp(-wide) + 1)
        return (incoming * sigmoid * (wide * (1 - sigmoid) + 1)).bfloat16(), grad * F.silu(gate.bfloat16())

    monkeypatch.setattr(gated_cast, "gated_product_reference", product)
    monkeypatch.setattr(gated_cast, "gated_grads_reference", grads)


F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 4}
G8: dict[str, Any] = {**F8, "format": "e5m2"}
CODED = {"match": ["*.gate", "*.up"], "op": "linear", "activation": "e4m3"}


def gradients(rewritten: Any, recompute: Any, coded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = LlamaBlocks(64, 1, 128, heads=2).bfloat16()
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    rule = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": G8}
    plan = Plan.from_dict({"version": 1, "rules": [rule, *([CODED] if coded else [])]})
    result: list[Tensor] = rewritten.gradients(model, x, plan, recompute)
    return result


@pytest.mark.usefixtures("as_on_a_gpu", "_rounded_between")
@pytest.mark.parametrize(("recompute", "coded"), [((), False), ("activations", True), ("inputs", True)])
def test_graphs_have_the_three_of_them(rewriting: Any, recompute: Any, coded: bool) -> None:
    sparing = RecomputePolicy(recompute != (), False, coded)
    partitioner = RecomputePartitioner(sparing) if recompute != () else min_cut_rematerialization_partition
    rewritten = rewriting(partitioner, fuse_gates, switch=(gated_fusing, "FUSES"))
    assert all(gradient.isfinite().all() for gradient in gradients(rewritten, recompute, coded))
    forward, backward = rewritten.seen
    assert (forward["gated_amax"], forward["gated_cast"]) == (1, 1)
    assert (backward["gated_grads_amax"], backward["gated_grads_cast"]) == (1, 1)
    assert backward.get("gated_cast", 0) == (recompute != ())
    apart = rewritten.seen_without
    assert not any("gated" in name for seen in apart for name in seen)
    assert sum(sum(seen.values()) for seen in apart) > sum(sum(seen.values()) for seen in rewritten.seen)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("changes", [{"history": None}, {"power_of_two": False}])
def test_other_scales_are_left_as_they_are(rewriting: Any, changes: dict[str, Any]) -> None:
    kept = {key: value for key, value in changes.items() if value is not None}
    dropped = [key for key, value in changes.items() if value is None]
    rewritten = rewriting(min_cut_rematerialization_partition, fuse_gates)
    spec = {key: value for key, value in F8.items() if key not in dropped}
    torch.manual_seed(0)
    model, x = LlamaBlocks(64, 1, 128, heads=2).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    rule = {"match": "*", "op": "linear", **dict.fromkeys(("x", "w", "dy"), spec | kept)}
    plan = Plan.from_dict({"version": 1, "rules": [rule]})
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0)):
        torch.compile(model, fullgraph=True, backend=rewritten.backend)(x).sum().backward()
    assert rewritten.seen
    assert not any("gated" in name for seen in rewritten.seen for name in seen)


def traced(function: Any, *arguments: Tensor) -> fx.Graph:
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*arguments).graph


def cast(x: Tensor, **settings: Any) -> Tensor:
    arguments: dict[str, Any] = {"power_of_two": True, "history_amax": torch.ones(()), **settings}
    return cast_float8(x, E4M3, **arguments).rows


def names_of(graph: fx.Graph) -> list[str]:
    names = (str(node.target) for node in graph.nodes)
    return [name.split(".")[1] for name in names if name.startswith("bitplan.")]


def test_only_what_nothing_else_reads_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, _ = halves()

    def alone(gate: Tensor, up: Tensor) -> Tensor:
        return cast(F.silu(gate) * up)

    def turned(gate: Tensor, up: Tensor) -> Tensor:
        return cast(up * F.silu(gate))

    def of_codes(gate: Tensor, up: Tensor) -> Tensor:
        return cast(F.silu(gate.to(E4M3).bfloat16()) * up)

    for function in (alone, turned, of_codes):
        graph = traced(function, gate, up)
        assert fuse_gates(graph) == 0  # no GPU
        assert fuse_gates(graph, "cpu") == 1
        assert names_of(graph) == ["gated_amax", "gated_cast"]

    def read(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        product = F.silu(gate) * up
        return cast(product), product

    def another(gate: Tensor, up: Tensor) -> Tensor:
        return cast(F.gelu(gate) * up)

    def more(gate: Tensor, up: Tensor) -> Tensor:
        return cast(F.silu(gate + 1) * up)  # would have to be written

    def scattered(gate: Tensor, up: Tensor) -> Tensor:
        return cast((F.silu(gate) * up).t().contiguous())

    for function in (read, another, more, scattered):
        assert fuse_gates(traced(function, gate, up), "cpu") == 0
    assert fuse_gates(traced(alone, *(item.float() for item in (gate, up))), "cpu") == 0
    assert fuse_gates(traced(alone, gate.t().contiguous().t(), up), "cpu") == 0
    graphs = [traced(alone, gate, up) for _ in range(2)]
    gated_fusing._patterns.cache_clear()
    with torch.inference_mode():
        assert fuse_gates(graphs[0], "cpu") == 1
    monkeypatch.setattr(gated_fusing, "FUSES", False)
    assert fuse_gates(graphs[1], "cpu") == 0


def test_codes_of_gate_and_up_come_with_it() -> None:
    gate, up, _ = halves()

    def coded(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        small = gate.to(E4M3), up.to(E4M3)
        return (cast(F.silu(small[0].bfloat16()) * small[1].bfloat16()), *small)

    module = make_fx(coded, decomposition_table=select_decomp_table(), tracing_mode="fake")(gate, up)
    expected = module(gate, up)
    assert fuse_gates(module.graph, "cpu") == 1
    module.graph.lint()
    module.recompile()
    (joined,) = module.graph.find_nodes(op="call_function", target=OURS.gated_cast.default)
    assert joined.args[8] is True
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
    rows, *small = module(gate, up)
    assert all(torch.equal(first.float(), second.float()) for first, second in zip(small, expected[1:], strict=True))
    # The one rounding less that Inductor has, too, moves some numbers to the next code.
    assert (rows.float() != expected[0].float()).float().mean() < 0.05


def test_something_times_itself_is_read_as_codes() -> None:
    def coded(gate: Tensor) -> tuple[Tensor, ...]:
        small = gate.to(E4M3)
        return cast(F.silu(small.bfloat16()) * small.bfloat16()), small

    graph = traced(coded, halves()[0])
    assert fuse_gates(graph, "cpu") == 1
    graph.lint()
    (joined,) = graph.find_nodes(op="call_function", target=OURS.gated_cast.default)
    assert joined.args[8] is False


def test_what_is_stored_compiled_knows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = KernelInliningPass().uuid()
    monkeypatch.setattr(gated_fusing, "FUSES", False)
    assert KernelInliningPass().uuid() != joined


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels are traced")
@pytest.mark.usefixtures("gpu_in_name")
def test_kernels_become_launches_that_write_nothing_but_their_results() -> None:
    def step(gate: Tensor, up: Tensor, grad: Tensor, history_amax: Tensor) -> tuple[Tensor, ...]:
        parts = OURS.gated_amax(gate, up, history_amax, True)
        cast = OURS.gated_cast(gate, up, E4M3, parts, history_amax, True, False, True, True)
        both = OURS.gated_grads_amax(grad, *cast[4:], history_amax, history_amax)
        return *cast[:4], *OURS.gated_grads_cast(
            grad, *cast[4:], E5M2, *both, history_amax, history_amax, True, True, True
        )

    with FakeTensorMode():
        arguments = [torch.empty(300, 130, dtype=torch.bfloat16) for _ in range(3)]
        module = make_fx(step)(*arguments, torch.empty(()))
    assert inline_kernels(module.graph, "cpu") == 4
    module.graph.lint()
    result: dict[str, tuple[Any, set[str]]] = {}
    for node in module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        result[kernel.fn.__name__] = (node.kwargs["grid"], set(node.kwargs["tensors_to_clone"]))
    squares = {f"{half}_{what}" for half in ("gate", "up") for what in ("rows", "columns", "scale", "tile_amax")}
    assert (tile_count(300, 130), grads_tile_count(300, 130)) == (6, 24)
    assert result == {
        "_gated_amax": ([(512, 1, 1)], {"out"}),
        "_cast_gated_tile": ([(6, 1, 1)], {"as_rows", "scale_out", "tile_amax", "gate_codes", "up_codes"}),
        "_gated_grads_amax": ([(512, 1, 1)], {"gate_out", "up_out"}),
        "_cast_grads_tile": ([(6, 1, 1)], squares),
    }
