"""Grouped products of expert layers in native execution, with a reference in place of the FP8 kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.errors import BitplanWarning
from bitplan.executions.native import backends, execution, grouped

TOKENS, WIDTH, FEATURES = 24, 32, 48
#: Groups of different sizes; one is empty, as an expert is that no token chose.
ENDS = (5, 5, 16, 24)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(len(ENDS), FEATURES, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor(ENDS, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)


class Kernel:
    """Stands for torch's FP8 kernel, with its demands on the operands; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.transpose(1, 2).is_contiguous()
        assert a_scale.shape == a.shape[:1]
        assert b_scale.shape == (b.shape[0], b.shape[2])
        assert options["out_dtype"] == torch.bfloat16
        y = a.new_zeros(a.shape[0], b.shape[2], dtype=torch.float32)
        start = 0
        for group, end in enumerate(offs.tolist()):
            scaled = b[group].float() * b_scale[group]
            y[start:end] = (a[start:end].float() * a_scale[start:end, None]) @ scaled
            start = end
        return y.to(torch.bfloat16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(backends, "scaled_grouped_mm", kernel)
    for module in (execution, grouped):
        monkeypatch.setattr(module, "multiplies_groups", lambda device: True)
    return kernel


def operand(scale: str, fmt: str = "e4m3", **more: Any) -> dict[str, Any]:
    return {"format": fmt, "scale": scale, **more}


def rowwise(dy: str = "e4m3") -> dict[str, Any]:
    """Every operand rounded for each pass, with a scale for each of its rows in that pass."""
    slots = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
    return {slot: operand("vector", dy if slot.endswith("dy") else "e4m3") for slot in slots}


ROWWISE = rowwise()
SCALES = {
    "rows": ROWWISE,
    "tensor": {"x": operand("tensor"), "w": operand("tensor"), "dy": operand("tensor")},
    "experts": {"x": operand("tensor"), "w": operand("channel", axis=0), "dy": operand("tensor")},
    "none": dict.fromkeys(("x", "w", "dy"), "e4m3"),
    "past steps": dict.fromkeys(("x", "w", "dy"), operand("tensor", history=2)),
}


def plan_of(operands: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "*", **operands}]}


def step(plan: dict[str, Any], how: Any, is_compiled: bool = False) -> tuple[list[Tensor], Any]:
    model = Experts()
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16)
    with bp.attach(model, plan, example=x, execution=how) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        y = called(x)
        y.backward(dy)
        rows = None if how != "native" and not isinstance(how, bp.Native) else list(run.fallbacks())
    assert x.grad is not None
    assert model.weight.grad is not None
    return [y.detach(), x.grad, model.weight.grad], rows


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_native_differs_from_emulate_by_the_order_of_sums_only(
    scales: str, is_compiled: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:  # the graph is made on fake tensors, on which the reference cannot loop
        fake = torch.library.custom_op(
            "bitplan_test::scaled_groups",
            lambda a, b, s, t, offs: kernel(a, b, s, t, offs, out_dtype=torch.bfloat16),
            mutates_args=(),
            schema="(Tensor a, Tensor b, Tensor s, Tensor t, Tensor offs) -> Tensor",
        )
        fake.register_fake(lambda a, b, s, t, offs: a.new_empty(a.shape[0], b.shape[2], dtype=torch.bfloat16))
        monkeypatch.setattr(backends, "scaled_grouped_mm", lambda a, b, s, t, offs, **_: fake(a, b, s, t, offs))
    plan = plan_of(SCALES[scales])
    emulated, _ = step(plan, "emulate")
    native, _ = step(plan, bp.Native(min_macs=0), is_compiled)
    assert kernel.calls == 2  # fprop and dgrad
    for ours, expected in zip(native, emulated, strict=True):
        assert expected.norm() > 0
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_the_gradient_of_the_weights_is_listed_with_its_reason(kernel: Kernel) -> None:
    with pytest.warns(BitplanWarning, match="emulated"):
        _, rows = step(plan_of(ROWWISE), bp.Native(min_macs=0))
    (row,) = rows
    assert row.site == "/grouped_mm.0"
    assert row.gemm_pass == "wgrad"
    assert "multiples of 16" in row.reason


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "e5m2 gradients": (rowwise(dy="e5m2"), "e5m2"),
    "a scale along the sum": ({**SCALES["tensor"], "w": operand("vector")}, "changes along the sum"),
    "no gradient format": ({"x": operand("vector"), "w": operand("tensor")}, "has no format"),
}


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_a_pass_that_the_kernel_lacks_is_emulated_and_listed(case: str, kernel: Kernel) -> None:
    operands, reason = REASONS[case]
    emulated, _ = step(plan_of(operands), "emulate")
    native, rows = step(plan_of(operands), bp.Native(min_macs=0))
    assert any(row.gemm_pass == "dgrad" and reason in row.reason for row in rows)
    assert kernel.calls == 1
    for ours, expected in zip(native, emulated, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_without_the_kernel_all_passes_are_listed() -> None:
    native, rows = step(plan_of(ROWWISE), bp.Native(min_macs=0))
    emulated, _ = step(plan_of(ROWWISE), "emulate")
    (row,) = rows
    assert row.gemm_pass == "all passes"
    assert "Hopper" in row.reason
    assert all(torch.equal(ours, expected) for ours, expected in zip(native, emulated, strict=True))


def test_its_input_is_saved_as_codes(kernel: Kernel) -> None:
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    model, x = Experts(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with bp.attach(model, plan_of(ROWWISE), execution=bp.Native(min_macs=0)), hooks:
        model(x)
    inputs = [tensor for tensor in saved if tensor.shape == x.shape]
    assert [tensor.dtype for tensor in inputs] == [torch.float8_e4m3fn]


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_another_dtype_than_that_of_the_kernels_results_is_emulated(kernel: Kernel) -> None:
    model, x = Experts().float(), torch.randn(TOKENS, WIDTH)
    with bp.attach(model, plan_of(ROWWISE), example=x, execution=bp.Native(min_macs=0)) as run:
        model(x)
        (row,) = run.fallbacks()
    assert "bfloat16" in row.reason
    assert kernel.calls == 0
