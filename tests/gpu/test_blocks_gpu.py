"""Block scales on the FP8 units of a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.executions.native.backends import BLOCKS, BLOCKS_NEED
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
