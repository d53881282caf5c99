"""Frozen weights in native execution: stored codes go to the GEMM units in fprop and dgrad, and there is no wgrad."""

from typing import Any

import pytest
import torch
from frozen_models import plan
from torch import Tensor, nn

import bitplan as bp
from bitplan.executions.native.backends import Float8Backend, Int8Backend

E4M3, E5M2 = {"format": "e4m3", "scale": "tensor"}, {"format": "e5m2", "scale": "tensor"}
DELAYED = {"format": "e4m3", "scale": "tensor", "history": 4}
INT8 = {"format": "int8", "scale": "tensor"}

#: Plan -> how often each pass multiplies: fprop, dgrad.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "stored codes": (plan({"match": "*", "op": "linear", "frozen": "e4m3", "x": E4M3, "dy": E5M2}), 2),
    "same w": (plan({"match": "*", "op": "linear", "frozen": "e4m3", "x": E4M3, "w": E4M3, "dy": E5M2}), 2),
    "delayed": (plan({"match": "*", "op": "linear", "frozen": "e4m3", "x": DELAYED, "dy": E5M2}), 2),
    "int8": (
        plan({"match": "*", "op": "linear", "frozen": {"format": "int8", "scale": "tensor"}, "x": INT8, "dy": INT8}),
        2,
    ),
    "channels": (plan({"match": "*", "op": "linear", "frozen": "int8", "x": INT8, "dy": INT8}), 1),
    "nf4 cast to fp8": (plan({"match": "*", "op": "linear", "frozen": "nf4", "x": E4M3, "w": E4M3, "dy": E5M2}), 2),
    "forward only": (plan({"match": "*", "op": "linear", "frozen": "e4m3", "x": E4M3}), 1),
}


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of both operands of every product on a unit; units compute on the CPU."""
    made: list[tuple[torch.dtype, torch.dtype]] = []
    for unit in (Int8Backend, Float8Backend):
        multiply = unit.multiply

        def noted(self: Any, a: Tensor, b: Tensor, *rest: Any, original: Any = multiply) -> Tensor:
            made.append((a.dtype, b.dtype))
            return original(self, a, b, *rest)

        monkeypatch.setattr(unit, "is_available", lambda self, device: device.type == "cpu")
        monkeypatch.setattr(unit, "multiply", noted)
    torch.compiler.reset()
    return made


def make(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 64).requires_grad_(False).to(dtype)


def gradients(model: nn.Module, forward: Any, run: Any = None) -> list[Tensor]:
    x = torch.randn(4, 8, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for _ in range(2):
        y = forward(x)
        (y * torch.linspace(-1, 1, 64)).sum().backward()
        results += [y.detach(), x.grad]
        x.grad = None
        if run is not None:
            run.step()
    return results


@pytest.mark.parametrize("name", CASES)
def test_native_agrees_with_emulate(name: str, products: list[Any]) -> None:
    document, count = CASES[name]
    results = {}
    for execution in ("emulate", bp.Native(min_macs=0)):
        model = make()
        run = bp.attach(model, document, execution=execution, example=torch.zeros(4, 8, 96))
        results[str(execution)] = gradients(model, model, run)
    emulated, native = results.values()
    assert len(products) == 2 * count
    small = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}
    assert all(set(pair) <= small for pair in products)
    for a, b in zip(emulated, native, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * a.abs().max())
    plain = gradients(make(), make())
    assert not torch.allclose(plain[0], native[0], rtol=1e-4)


def test_stored_codes_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(torch.bfloat16)
    bp.attach(model, CASES["stored codes"][0], execution=bp.Native(min_macs=0))
    codes = model._buffers["_bitplan_frozen_weight_0"]
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == (64, 96)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(8, 96, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(x)
    assert [t.data_ptr() for t in saved if t.numel() == codes.numel()] == [codes.data_ptr()]
    decode = "bitplan.numerics.frozen_codec.FrozenCodec.decode"
    monkeypatch.setattr(decode, lambda *args, **kwargs: pytest.fail("the weight was decoded"))
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["stored codes", "nf4 cast to fp8", "channels"])
def test_compiled_agrees_with_eager(name: str, products: list[Any]) -> None:
    document, _ = CASES[name]
    results = []
    for is_compiled in (False, True):
        model = make()
        run = bp.attach(model, document, execution=bp.Native(min_macs=0), example=torch.zeros(4, 8, 96))
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        results.append(gradients(model, forward, run))
    assert products
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * a.abs().max())


def test_fallbacks_know_of_stored_weights() -> None:
    model = make()
    run = bp.attach(model, CASES["stored codes"][0], execution=bp.Native(min_macs=0), example=torch.zeros(4, 8, 96))
    assert not [row for row in run.fallbacks() if row.gemm_pass != "wgrad"]
    run.detach()
    rows = {"match": "*", "op": "linear", "frozen": {"format": "nf4"}, "x": E4M3, "dy": E5M2}
    with pytest.warns(bp.errors.BitplanWarning, match="emulated"):
        run = bp.attach(model, plan(rows), execution=bp.Native(min_macs=0), example=torch.zeros(4, 8, 96))
    assert "fprop.w has no format" in str(run.fallbacks())
