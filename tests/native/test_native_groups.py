"""Grouped products of expert layers in native execution, with a reference in place of the FP8 kernel."""

from __future__ import annotations

import collections
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._meta_registrations import _meta_grouped_mm_common
from torch.nn import functional as F

import bitplan as bp
from bitplan.compiler import patterns
from bitplan.compiler.gated_fusion import fuse_gates
from bitplan.executions.native import backends, execution, grouped, product
from bitplan.executions.native.group_padding import pad_groups, padded_count

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
        self.sums_over_groups = 0

    def __call__(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        assert options["out_dtype"] == torch.bfloat16
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        _meta_grouped_mm_common(a, b, a_scale, b_scale, offs, out_dtype=torch.bfloat16)  # raises for other layouts
        assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
        spans = list(pairwise([0, *offs.tolist()]))
        if b.dim() == 3:
            y = torch.full((a.shape[0], b.shape[2]), torch.nan)
            for group, (start, end) in enumerate(spans):
                scaled = b[group].float() * b_scale[group]
                y[start:end] = (a[start:end].float() * a_scale[start:end, None]) @ scaled
            return y.to(torch.bfloat16)
        self.sums_over_groups += 1
        assert all(start < end and start % 16 == 0 for start, end in spans)
        scales = zip(a_scale.chunk(len(offs)), b_scale.chunk(len(offs)), strict=True)
        products = [
            (a[:, start:end].float() * left[:, None]) @ (b[start:end].float() * right)
            for (start, end), (left, right) in zip(spans, scales, strict=True)
        ]
        return torch.stack(products).to(torch.bfloat16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(backends, "scaled_grouped_mm", kernel)
    for module in (execution, grouped):
        monkeypatch.setattr(module, "multiplies_groups", lambda device: True)
    return kernel


def use_in_graphs(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in as an operation: graphs are made on fake tensors, on which it cannot loop."""
    operation = torch.library.custom_op(
        "bitplan_test::scaled_groups",
        lambda a, b, s, t, offs: kernel(a, b, s, t, offs, out_dtype=torch.bfloat16),
        mutates_args=(),
        schema="(Tensor a, Tensor b, Tensor s, Tensor t, Tensor offs) -> Tensor",
    )
    operation.register_fake(
        lambda a, b, s, t, offs: a.new_empty(
            *offs.shape * (b.dim() == 2), a.shape[0], b.shape[-1], dtype=torch.bfloat16
        )
    )
    monkeypatch.setattr(backends, "scaled_grouped_mm", lambda a, b, s, t, offs, **_: operation(a, b, s, t, offs))


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
    "powers": dict.fromkeys(("x", "w", "dy"), operand("tensor", power_of_two=True)),
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
        use_in_graphs(kernel, monkeypatch)
    plan = plan_of(SCALES[scales])
    emulated, _ = step(plan, "emulate")
    native, _ = step(plan, bp.Native(min_macs=0), is_compiled)
    assert (kernel.calls, kernel.sums_over_groups) == (3, 1)
    for ours, expected in zip(native, emulated, strict=True):
        assert expected.norm() > 0
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


SIZES: dict[str, tuple[int, ...]] = {
    "any": (3, 0, 1, 17, 32, 15),
    "one has all": (0, 0, 40),
    "empty at the end": (16, 24, 0),
    "rows in no group": (5, 9),
}


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_products_of_groups_of_any_size(sizes: str, is_transposed: bool, kernel: Kernel) -> None:
    """With numbers that E4M3 holds, and sums that bfloat16 holds, results are those of float64."""
    ends = torch.tensor(SIZES[sizes]).cumsum(0).to(torch.int32)
    groups, rows, used = len(ends), 68 if "no group" in sizes else int(ends[-1]), int(ends[-1])
    torch.manual_seed(0)
    whole = [torch.randint(-1, 2, shape).double() for shape in ((rows, 32), (groups, 32, 48), (rows, 48))]
    x, stored, dy = (tensor.bfloat16() for tensor in whole)
    weight = nn.Parameter(stored.transpose(1, 2).contiguous() if is_transposed else stored)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return F.grouped_mm(x, self.weight.transpose(1, 2) if is_transposed else self.weight, offs=ends)

    dy[used:] = 0
    x.requires_grad_()
    with bp.attach(Layer(), plan_of(SCALES["powers"]), execution=bp.Native(min_macs=0)) as run:
        y = run.model(x)
        y[:used].backward(dy[:used])
    assert (kernel.calls, kernel.sums_over_groups) == (3, 1)
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    grad_w = weight.grad.transpose(1, 2) if is_transposed else weight.grad
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        part, w, part_dy = whole[0][start:end], whole[1][group], whole[2][start:end]
        assert torch.equal(y[start:end].double(), part @ w)
        assert torch.equal(x.grad[start:end].double(), part_dy @ w.T)
        assert torch.equal(grad_w[group].double(), part.T @ part_dy)


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_padding_moves_every_row_to_one_column(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    for _ in range(20):
        sizes = torch.randint(0, 40, (groups,), generator=generator)
        rows = int(sizes.sum()) + int(torch.randint(0, 3, (), generator=generator))
        sources, ends = pad_groups(sizes.cumsum(0), rows)
        assert sources.shape == (padded_count(rows, groups),)
        assert sources[sources >= 0].tolist() == list(range(rows))
        starts = [0, *ends.tolist()]
        for size, (start, end) in zip(sizes.tolist(), pairwise(starts), strict=True):
            assert end % 16 == 0
            assert end > start
            assert (sources[start:end] >= 0).sum() == size


def test_one_kernel_writes_both_layouts(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    casts: list[tuple[bool, bool]] = []
    original = product.cast_float8

    def count(*args: Any, **kwargs: Any) -> Any:
        casts.append((kwargs["as_rows"], kwargs["as_columns"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(product, "cast_float8", count)
    step(plan_of(SCALES["past steps"]), bp.Native(min_macs=0))
    assert casts == [(True, True)] * 3  # x, w and dy


class GatedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"gate": (FEATURES, WIDTH), "up": (FEATURES, WIDTH), "down": (WIDTH, FEATURES)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(len(ENDS), *shape, dtype=torch.bfloat16) / 5))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor(ENDS, dtype=torch.int32)
        gate, up, down = (weight.transpose(-2, -1) for weight in (self.gate, self.up, self.down))
        hidden = F.silu(F.grouped_mm(x, gate, offs=offsets)) * F.grouped_mm(x, up, offs=offsets)
        return F.grouped_mm(hidden, down, offs=offsets)


def test_gates_of_experts_are_fused_with_their_padded_casts(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    use_in_graphs(kernel, monkeypatch)
    monkeypatch.setattr(patterns, "GROUPED", [torch.ops.bitplan_test.scaled_groups.default])
    counts: list[int] = []
    seen: collections.Counter[str] = collections.Counter()

    def rewrite(gm: fx.GraphModule, given: Any, **options: Any) -> Any:
        counts.append(fuse_gates(gm.graph, "cpu"))
        seen.update(str(node.target) for node in gm.graph.nodes if "cast" in str(node.target))
        gm.graph.lint()
        gm.recompile()
        return make_boxed_func(gm.forward)

    def results(is_compiled: bool, recompute: str | tuple[str, ...] = ()) -> list[Tensor]:
        torch._dynamo.reset()
        model = GatedExperts()
        torch.manual_seed(1)
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        f8 = operand("tensor", history=2, power_of_two=True)
        plan = plan_of({"x": f8, "w": f8, "dy": f8})
        with bp.attach(model, plan, example=x, execution=bp.Native(min_macs=0, recompute=recompute)) as run:
            run.compile()  # only chooses what is cast again
            backend = partial(compile_fx, inner_compile=rewrite)
            called = torch.compile(model, backend=backend, fullgraph=True) if is_compiled else model
            for _ in range(2):
                x.grad = None
                model.zero_grad(set_to_none=True)
                y = called(x)
                y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
                run.step()
        assert x.grad is not None
        return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    fused, eager = results(is_compiled=True), results(is_compiled=False)
    assert counts == [1, 1]
    assert seen["bitplan.gated_cast.default"] == seen["bitplan.gated_grads_cast.default"] == 1
    assert seen["bitplan.float8_padded_cast.default"] == 2  # x, for gate and up alike, and the gradient of the result
    assert seen["bitplan.float8_cast.default"] == 3
    recast = results(is_compiled=True, recompute="weights")
    assert counts == [1, 1] * 2
    assert seen["bitplan.float8_cast.default"] == 3 + 6  # weights, and once more in the backward pass
    assert all(map(torch.equal, recast, fused))
    for ours, expected in zip(fused, eager, strict=True):
        assert (ours - expected).norm() < 0.02 * expected.norm()


def test_nothing_is_listed_where_all_passes_are_native(kernel: Kernel) -> None:
    for scales in SCALES.values():
        assert step(plan_of(scales), bp.Native(min_macs=0))[1] == []


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_the_preset_multiplies_forward_in_fp8_and_lists_the_gradients(kernel: Kernel) -> None:
    rules = [{"match": "*", "x": operand("tensor"), "w": operand("tensor"), "dy": operand("tensor", "e5m2")}]
    _, rows = step({"version": 1, "rules": rules}, bp.Native(min_macs=0))
    assert [row.gemm_pass for row in rows] == ["dgrad", "wgrad"]
    assert all("e4m3 by e4m3" in row.reason for row in rows)
    assert kernel.calls == 1


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
    assert kernel.calls == 3 - len(rows)
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
    dtypes = {tuple(tensor.shape): tensor.dtype for tensor in saved}
    assert x.shape not in dtypes
    assert dtypes[WIDTH, padded_count(TOKENS, len(ENDS))] == torch.float8_e4m3fn


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_another_dtype_than_that_of_the_kernels_results_is_emulated(kernel: Kernel) -> None:
    model, x = Experts().float(), torch.randn(TOKENS, WIDTH)
    with bp.attach(model, plan_of(ROWWISE), example=x, execution=bp.Native(min_macs=0)) as run:
        model(x)
        (row,) = run.fallbacks()
    assert "bfloat16" in row.reason
    assert kernel.calls == 0
