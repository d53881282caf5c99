"""Block scales on the FP8 units of a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.executions.native.backends import BLOCKS, BLOCKS_NEED
from bitplan.executions.native.float8_block_cast import block_cast_reference
from bitplan.plans import Plan

pytestmark = pytest.mark.gpu

LINE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [1, 128]}
TILE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [128, 128]}
RULE = {"fprop.x": LINE, "wgrad.x": LINE, "dgrad.dy": LINE, "wgrad.dy": LINE, "w": TILE}


@pytest.fixture(autouse=True)
def _require_blocks() -> None:
    if not BLOCKS.is_available(torch.device("cuda")):
        pytest.skip(f"products of blocks need {BLOCKS_NEED}")


def rounded(t: Tensor, axes: tuple[int, int], block: tuple[int, int]) -> Tensor:
    return bitplan.quantize(t.float(), "e4m3", scale="block", block=block, axis=axes).double()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(256, 384, 640), (128, 128, 128), (2048, 1024, 512)])
def test_products_are_those_of_the_rounded_operands_in_float64(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs, bias=False).cuda().to(dtype)
    x = torch.randn(tokens, inputs, device="cuda", dtype=dtype).exp().requires_grad_()
    dy = torch.randn(tokens, outputs, device="cuda", dtype=dtype).exp()
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **RULE}]})
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, strict=True)) as run:
        y = (run.compile() if compiled else model)(x)
        y.backward(dy)
    w, line = model.weight.detach(), (1, 128)
    tile = rounded(w, (0, 1), (128, 128))
    expected = [
        rounded(x.detach(), (0, 1), line) @ tile.t(),
        rounded(dy, (0, 1), line) @ tile,
        rounded(dy, (1, 0), line).t() @ rounded(x.detach(), (1, 0), line),
    ]
    assert x.grad is not None
    assert model.weight.grad is not None
    for ours, exact in zip([y.detach(), x.grad, model.weight.grad], expected, strict=True):
        # Within a block of 128, tensor cores add up with fewer bits than float32 has.
        assert float((ours.double() - exact).norm() / exact.norm()) < 3e-3


def mixed(rows: int, features: int) -> Tensor:
    """Lines and tiles of all magnitudes, some of zeros, one with infinity, one with NaN."""
    torch.manual_seed(0)
    x = torch.randn(rows, features) * torch.logspace(-44, 37, rows)[:, None]
    x[rows // 5], x[:, features // 3] = 0.0, -0.0
    x[rows // 2, features // 2], x[rows - 1, features - 1] = torch.inf, torch.nan
    return x.cuda()


def ties() -> Tensor:
    """Quotients that are ties of E4M3, and their neighbours: lines with the amax 448 s and multiples of s."""
    torch.manual_seed(0)
    scales = torch.rand(512, 1, device="cuda") + 1
    halves = torch.arange(16, 144, device="cuda") / 16
    x = (scales * halves).clone()
    x[:, 0] = 448 * scales[:, 0]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_kernel_casts_as_the_reference_does(dtype: torch.dtype, tiles: bool, power_of_two: bool) -> None:
    for x in (
        mixed(384, 640),
        mixed(1000, 72),
        mixed(1, 1),
        ties(),
        ties().nextafter(torch.zeros((), device="cuda")),
        ties().t(),
    ):
        for layouts in ((True, True), (True, False), (False, True)):
            arguments = (x.to(dtype).contiguous(), tiles, power_of_two, *layouts)
            results = torch.ops.bitplan.float8_block_cast(*arguments)
            for ours, plain in zip(results, block_cast_reference(*arguments), strict=True):
                ours, plain = ours.float(), plain.float()
                assert ours.shape == plain.shape
                assert torch.equal(ours.isnan(), plain.isnan())
                assert torch.equal(ours.nan_to_num().view(torch.int32), plain.nan_to_num().view(torch.int32))


def test_a_compiled_model_casts_as_an_eager_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384, bias=False), nn.Linear(384, 128, bias=False)).cuda().bfloat16()
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **RULE}]})
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        x.grad = None
        with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, strict=True)) as run:
            y = (run.compile() if compiled else model)(x)
            y.sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager, ours)
