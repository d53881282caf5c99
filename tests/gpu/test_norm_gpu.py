"""An RMS norm's result, cast where it is computed, on a CUDA device: the bits are those of two kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.compiler import norm_fusion as norm_fusing
from bitplan.executions.native.backends import backends_of
from bitplan.executions.native.float8_cast import FORMATS, cast_float8
from bitplan.executions.native.norm_cast import norm_cast_reference

pytestmark = pytest.mark.gpu

OURS: Any = torch.ops.bitplan
EPS = 1e-6
F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 4}


@pytest.fixture(autouse=True)
def _has_unit() -> None:
    if "fp8" not in {unit.name for unit in backends_of(torch.device("cuda"))}:
        pytest.skip("this GPU has no fp8 unit")
    torch._dynamo.reset()


def given(rows: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, means of squares, weight."""
    torch.manual_seed(0)
    x = (torch.randn(rows, features, device="cuda") * torch.logspace(-2, 2, rows, device="cuda")[:, None]).to(dtype)
    return x, x.float().square().mean(1), (3 * torch.randn(features, device="cuda")).to(dtype)


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (64, 128), (333, 208), (130, 5000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("history_amax", [0.0, 2.0])
@pytest.mark.parametrize("rounds_twice", [False, True])
def test_the_kernels_give_the_codes_of_plain_torch(
    rows: int, features: int, dtype: torch.dtype, kind: torch.dtype, history_amax: float, rounds_twice: bool
) -> None:
    x, mean, weight = given(rows, features, dtype)
    history, inverse = torch.tensor(history_amax, device="cuda"), torch.rsqrt(mean + EPS)
    read = (x, inverse, weight, None)
    parts = OURS.norm_amax(*read, history, rounds_twice)
    for layouts in ((True, True), (True, False), (False, True)):
        rest = (kind, parts, history, *layouts, True, None, rounds_twice)
        ours, plain = OURS.norm_cast(*read, *rest), norm_cast_reference(*read, *rest)
        for first, second in zip(ours[:3], plain[:3], strict=True):
            assert torch.equal(first.float(), second.float())
        assert torch.equal(ours[3].amax(), plain[3].amax())
        # Of the mean: torch's inverse of a root may differ in the last bit, which now and then moves a code.
        near = OURS.norm_cast(x, mean, weight, EPS, *rest)
        for first, second in zip(near[:2], plain[:2], strict=True):
            first, second = first.float(), second.float()
            assert ((first - second).abs() <= 0.26 * second.abs() + 2**-9).all()
            assert (first != second).sum() <= 1 + first.numel() // 100


def test_a_norm_of_transformers_has_the_codes_of_eager_code() -> None:
    x, mean, weight = given(512, 2048, torch.bfloat16)
    history = torch.tensor(3.0, device="cuda")
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(mean + EPS)[:, None]).to(x.dtype)
    settings: dict[str, Any] = {"power_of_two": True, "history_amax": history, "returns_amax": True}
    expected = cast_float8(normed, torch.float8_e4m3fn, **settings)
    read = (x, torch.rsqrt(mean + EPS), weight, None)
    parts = OURS.norm_amax(*read, history, True)
    actual = OURS.norm_cast(*read, torch.float8_e4m3fn, parts, history, True, True, True, None, True)
    for first, second in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(first.float(), second.float())
    assert torch.equal(actual[3].amax(), expected.tile_amax.amax())


@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("features", [208, 2048, 4096])
def test_the_codes_are_those_of_a_compiled_norm(layouts: tuple[bool, bool], features: int) -> None:
    """As the backward pass has it: the mean lies in memory."""
    x, mean, weight = given(512, features, torch.bfloat16)
    history_amax = torch.tensor(3.0, device="cuda")
    settings: dict[str, Any] = {"as_rows": layouts[0], "as_columns": layouts[1], "returns_amax": True}

    @torch.compile(fullgraph=True)
    def normed(x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(mean + EPS)[:, None] * weight).bfloat16()

    expected = cast_float8(
        normed(x, mean, weight), torch.float8_e4m3fn, power_of_two=True, history_amax=history_amax, **settings
    )
    parts = OURS.norm_amax(x, mean, weight, EPS, history_amax)
    actual = OURS.norm_cast(x, mean, weight, EPS, torch.float8_e4m3fn, parts, history_amax, *layouts, True)
    for first, second in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(first.float(), second.float())
    assert torch.equal(actual[3].amax(), expected.tile_amax.amax())


class Blocks(nn.Module):
    """Norms with linear layers behind them, without what is not the same at every call, as attention's gradients."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.ones, self.others = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)) for _ in range(2)
        )
        for norm in self.norms:
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for norm, first, second in zip(self.norms, self.ones, self.others, strict=True):
            normed = norm(x)
            x = x + F.relu(first(normed)) + second(normed)
        return x


def stepped(recompute: Any) -> tuple[list[Tensor], list[str]]:
    """Results and gradients of three steps, the first of which has no past, and the code that Inductor made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rule = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": {**F8, "format": "e5m2"}}
    plan = Plan.from_dict({"version": 1, "rules": [rule]})
    model = Blocks(768, 3).cuda().bfloat16()
    x = torch.randn(4, 128, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
        called = run.compile()

        def step() -> Tensor:
            y: Tensor = called(x)
            y.square().mean().backward()
            run.step()
            return y.detach()

        with torch._inductor.config.patch(force_disable_caches=True):
            first, codes = run_and_get_code(step)
        results = [first, step(), step()]
    return [*results, *(p.grad for p in (x, *model.parameters()) if p.grad is not None)], codes


@pytest.mark.parametrize("recompute", [(), "activations", "inputs"])
def test_steps_have_the_bits_of_two_kernels(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    results = []
    for fuses in (True, False):
        monkeypatch.setattr(norm_fusing, "FUSES", fuses)
        result, codes = stepped(recompute)
        assert len(codes) == 2
        assert ("_cast_norm_tile" in codes[0]) == fuses
        assert ("_cast_norm_tile" in codes[1]) == (fuses and recompute != ())
        results.append(result)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_sums_that_are_rounded_first_hardly_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_fusing, "FUSES_SUMS", True)
    result, codes = stepped("activations")
    assert all("_cast_norm_tile" in code for code in codes)
    monkeypatch.setattr(norm_fusing, "FUSES", False)
    plain, _ = stepped("activations")
    for first, second in zip(result, plain, strict=True):
        assert (first - second).float().norm() < 0.1 * second.float().norm()
