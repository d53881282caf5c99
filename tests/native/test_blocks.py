"""Block scales on FP8 units: what is handed to cuBLAS, checked by torch's own rules and multiplied in float64.

No CPU multiplies such operands. In place of ``torch.nn.functional.scaled_mm`` stands what its documentation says: codes
times the scales of their blocks. Before that, torch's function for fake tensors checks shapes, strides and dtypes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

import bitplan
from bitplan.executions.native import backends
from bitplan.executions.native.backends import Float8BlockBackend
from bitplan.plans import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is|are) emulated:bitplan.errors.BitplanWarning"),
    pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no torch.nn.functional.scaled_mm"),
]

LINE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [1, 128]}
TILE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [128, 128]}
RECIPE: dict[str, Any] = {"fprop.x": LINE, "wgrad.x": LINE, "dgrad.dy": LINE, "wgrad.dy": LINE, "w": TILE}


def plan_of(**places: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **places}]})


class ScaledMM:
    """``scaled_mm`` in float64; counts the pairs of recipes that it was asked for."""

    def __init__(self) -> None:
        self.recipes: list[tuple[str, str]] = []

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, output_dtype: Any
    ) -> Tensor:
        self.recipes.append((recipe_a.name, recipe_b.name))
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        _check_by_torch(a, b, scale_a, recipe_a, scale_b, recipe_b)
        left = a.double() * self._spread(scale_a, recipe_a, *a.shape)
        right = b.double() * self._spread(scale_b, recipe_b, b.shape[1], b.shape[0]).t()
        return (left @ right).to(output_dtype)

    @staticmethod
    def _spread(scale: Tensor, recipe: Any, rows: int, summed: int) -> Tensor:
        """The scale of each value of an operand (rows, summed)."""
        if recipe.name == "BlockWise128x128":  # transposed, and padded along the sum
            scale = scale.t()[:, : summed // 128].repeat_interleave(128, 0)
        return scale.double().repeat_interleave(128, 1).reshape(rows, summed)


def _check_by_torch(a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any) -> None:
    """Raise where torch refuses shapes, strides or dtypes."""

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    arguments = [on_meta(tensor) for tensor in (a, b, scale_a, scale_b)]
    _SCALED_MM(arguments[0], arguments[1], arguments[2], recipe_a, arguments[3], recipe_b, output_dtype=torch.float32)


_SCALED_MM = getattr(F, "scaled_mm", None)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> ScaledMM:
    scaled_mm = ScaledMM()
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(Float8BlockBackend, "is_available", lambda self, device: device.type == "cpu")
    return scaled_mm


def results(plan: Plan, execution: Any, shape: tuple[int, ...], inputs: int, outputs: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(inputs, outputs), torch.randn(*shape, inputs).exp().requires_grad_()
    with bitplan.attach(model, plan, example=x, execution=execution) as run:
        y = model(x)
        y.backward(torch.randn(y.shape).exp())
        fallbacks = list(run.fallbacks()) if execution != "emulate" else []
    assert not fallbacks
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("shape", [(256,), (2, 128), (3, 2, 128)])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 384), (128, 128), (640, 128)])
def test_the_products_of_blocks_are_those_of_emulation(
    shape: tuple[int, ...], inputs: int, outputs: int, unit: ScaledMM
) -> None:
    native = results(plan_of(**RECIPE), bitplan.Native(min_macs=0), shape, inputs, outputs)
    lines, tiles = "BlockWise1x128", "BlockWise128x128"
    assert unit.recipes == [(lines, tiles), (lines, tiles), (lines, lines)]
    emulated = results(plan_of(**RECIPE), "emulate", shape, inputs, outputs)
    for ours, theirs in zip(native, emulated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
    by_tensor = {key: {"format": "e4m3", "scale": "tensor"} for key in ("x", "w", "dy")}
    other = results(plan_of(**by_tensor), "emulate", shape, inputs, outputs)
    assert not any(torch.allclose(ours, coarse, rtol=1e-3) for ours, coarse in zip(native[:3], other, strict=False))


def test_weights_may_be_rounded_in_lines_for_each_product(unit: ScaledMM) -> None:
    rule = dict.fromkeys(("fprop", "dgrad", "wgrad"), LINE)
    native = results(plan_of(**rule), bitplan.Native(min_macs=0), (128,), 256, 128)
    assert unit.recipes == [("BlockWise1x128", "BlockWise1x128")] * 3
    for ours, theirs in zip(native, results(plan_of(**rule), "emulate", (128,), 256, 128), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


def test_what_is_saved_for_the_weight_gradient_is_codes_and_scales(unit: ScaledMM) -> None:
    model, x = nn.Linear(256, 128, bias=False), torch.randn(128, 256)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with (
        bitplan.attach(model, plan_of(**RECIPE), example=x, execution=bitplan.Native(min_macs=0)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        model(x)
    floats = [tuple(tensor.shape) for tensor in saved if tensor.dtype == torch.float32]
    assert sorted(floats) == [(1, 256), (128, 256)]  # the scales of x, and w itself: there is no gradient of x
    assert [tuple(tensor.shape) for tensor in saved if tensor.dtype == torch.float8_e4m3fn] == [(128, 256)]


@pytest.mark.parametrize(
    ("rule", "shape", "gemm_pass", "reason"),
    [
        (RECIPE, (4, 96), "wgrad", "sequences of 96 tokens cut blocks of 128"),
        (RECIPE, (40,), "fprop", "the fp8 blocks backend does not support the shape 40 x 256 x 128"),
        ({"x": LINE, "w": TILE, "dy": LINE}, (128,), "wgrad", "the blocks of wgrad.dy do not lie along the sum"),
        ({"x": TILE, "w": TILE}, (128,), "fprop", "fprop.x has tiles"),
        ({**RECIPE, "w": {"format": "e4m3", "scale": "tensor"}}, (128,), "fprop", "only one of fprop.x and fprop.w"),
        ({**RECIPE, "fprop.x": {**LINE, "block": 64}}, (128,), "fprop", "fprop.x has blocks of 64"),
        ({**RECIPE, "fprop.x": {**LINE, "format": "e5m2"}}, (128,), "fprop", "in e4m3 only, not in e5m2 by e4m3"),
        ({**RECIPE, "wgrad": "nvfp4"} | {"wgrad.x": None, "wgrad.dy": None}, (128,), "wgrad", "changes along the sum"),
    ],
)
def test_what_the_units_do_not_multiply_is_emulated_with_a_reason(
    rule: dict[str, Any], shape: tuple[int, ...], gemm_pass: str, reason: str, unit: ScaledMM
) -> None:
    plan = plan_of(**{key: value for key, value in rule.items() if value is not None})
    model, x = nn.Linear(256, 128), torch.randn(*shape, 256, requires_grad=True)
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0)) as run:
        model(x).sum().backward()
        found = {row.gemm_pass: row.reason for row in run.fallbacks()}
    assert reason in found.get(gemm_pass, found.get("all passes", ""))


def test_a_machine_without_such_units_says_what_it_takes() -> None:
    model, x = nn.Linear(256, 128), torch.randn(128, 256)
    with bitplan.attach(model, plan_of(**RECIPE), example=x, execution=bitplan.Native(min_macs=0)) as run:
        (row,) = run.fallbacks()
    assert row.gemm_pass == "all passes"
    assert "compute capability 9.0" in row.reason
    assert "CUDA 12.9" in row.reason


@pytest.mark.parametrize(
    ("capability", "cuda", "is_available"),
    [((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)],
)
def test_only_hopper_with_a_new_cuda_has_the_unit(
    capability: tuple[int, int], cuda: str, is_available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert Float8BlockBackend().is_available(torch.device("cuda")) == is_available
    assert not Float8BlockBackend().is_available(torch.device("cpu"))


def test_a_compiled_layer_calls_the_same_operation_in_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function is traced; what it becomes in the graphs is replaced by the product in float64."""
    monkeypatch.setattr(Float8BlockBackend, "is_available", lambda self, device: device.type == "cpu")
    calls = ScaledMM()

    def by_hand(
        a: Tensor, b: Tensor, scale_a: Any, recipe_a: Any, _a: Any, scale_b: Any, recipe_b: Any, *rest: Any
    ) -> Any:
        kinds = [F.ScalingType(recipe[0]) for recipe in (recipe_a, recipe_b)]
        return calls(a, b, scale_a[0], kinds[0], scale_b[0], kinds[1], output_dtype=rest[2])

    def compiled(gm: torch.fx.GraphModule, arguments: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten._scaled_mm_v2.default:
                node.target = by_hand
        gm.recompile()
        return make_boxed_func(gm.forward)

    torch.manual_seed(0)
    model, x = nn.Linear(256, 128), torch.randn(128, 256).exp().requires_grad_()
    dy = torch.randn(128, 128)
    with bitplan.attach(model, plan_of(**RECIPE), example=x, execution=bitplan.Native(min_macs=0)):
        y = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiled, bw_compiler=compiled))(x)
        y.backward(dy)
    assert len(calls.recipes) == 3
    ours = [y.detach(), x.grad, model.weight.grad]
    x.grad = model.weight.grad = None
    with bitplan.attach(model, plan_of(**RECIPE), example=x, execution="emulate"):
        expected = model(x)
        expected.backward(dy)
    for actual, theirs in zip(ours, [expected.detach(), x.grad, model.weight.grad], strict=True):
        assert actual is not None
        assert theirs is not None
        torch.testing.assert_close(actual, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
