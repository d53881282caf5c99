"""A gate's product and gradients, cast where they are computed, on a CUDA device: the bits are those of two kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.compiler import gated_fusion as gated_fusing
from bitplan.executions.native.backends import backends_of
from bitplan.executions.native.float8_cast import FORMATS, pad_rows
from bitplan.executions.native.gated_cast import e4m3_reference, gated_cast_reference, gated_grads_cast_reference
from bitplan.executions.native.group_padding import pad_groups

pytestmark = pytest.mark.gpu

OURS: Any = torch.ops.bitplan
F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 4}
CODED = {"match": ["*gate", "*up"], "op": "linear", "activation": "e4m3"}


@pytest.fixture(autouse=True)
def _has_unit() -> None:
    if "fp8" not in {unit.name for unit in backends_of(torch.device("cuda"))}:
        pytest.skip("this GPU has no fp8 unit")
    torch._dynamo.reset()


def nearly(first: Tensor, second: Tensor) -> bool:
    """The same codes, but for a few that are next to each other: torch's exponential differs in last bits."""
    first, second = first.float(), second.float()
    apart = first != second
    close = (first - second).abs() <= 0.26 * second.abs()
    return bool((close | ~apart).all()) and float(apart.float().mean()) < 2e-3


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("history_amax", [0.0, 2.0])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_kernels_give_the_codes_of_plain_torch(is_padded: bool, kind: torch.dtype, history_amax: float) -> None:
    torch.manual_seed(0)
    gate, up, grad = (5 * torch.randn(333, 208, device="cuda").bfloat16() for _ in range(3))
    sources = torch.arange(333, device="cuda", dtype=torch.int32)
    if is_padded:
        sources = pad_groups(torch.tensor([40, 40, 57, 330], device="cuda"), 333).sources
    padding = (None, sources) if is_padded else ()
    history = torch.tensor(history_amax, device="cuda")
    for halves, codes in (((gate, up), True), ((gate, up), False), ((e4m3_reference(gate), e4m3_reference(up)), False)):
        parts = OURS.gated_amax(*halves, history, codes)
        arguments = (*halves, kind, parts, history, True, True, True, codes, *padding)
        ours, plain = OURS.gated_cast(*arguments), gated_cast_reference(*arguments)
        assert nearly(ours[0], plain[0])
        assert torch.equal(pad_rows(ours[0].float(), sources).t(), ours[1].float())
        assert torch.equal(ours[2], plain[2])
        assert all(
            torch.equal(first.float(), second.float()) for first, second in zip(ours[4:], plain[4:], strict=True)
        )
        if not codes:
            both = OURS.gated_grads_amax(grad, *halves, history, history)
            arguments = (grad, *halves, kind, *both, history, history, True, True, True, *padding)
            ours, plain = OURS.gated_grads_cast(*arguments), gated_grads_cast_reference(*arguments)
            for at in (0, 4):
                assert nearly(ours[at], plain[at])
                assert torch.equal(pad_rows(ours[at].float(), sources).t(), ours[at + 1].float())
                assert torch.equal(ours[at + 2], plain[at + 2])


class Perceptron(nn.Module):
    """Without what is not the same at every call, as attention's gradients are not."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def stepped(recompute: Any, coded: bool) -> tuple[list[Tensor], list[str]]:
    """Results and gradients of three steps, the first of which has no past, and the code that Inductor made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rule = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": {**F8, "format": "e5m2"}}
    plan = Plan.from_dict({"version": 1, "rules": [rule, *([CODED] if coded else [])]})
    model = Perceptron(256, 512).cuda().bfloat16()
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
        called = run.compile()

        def step() -> Tensor:
            y: Tensor = called(x)
            y.square().sum().backward()
            run.step()
            return y.detach()

        with torch._inductor.config.patch(force_disable_caches=True):
            first, codes = run_and_get_code(step)
        results = [first, step(), step()]
    return [*results, *(p.grad for p in (x, *model.parameters()) if p.grad is not None)], codes


@pytest.mark.parametrize(("recompute", "coded"), [((), False), ("activations", True), ("inputs", True)])
def test_steps_have_the_bits_of_two_kernels(monkeypatch: pytest.MonkeyPatch, recompute: Any, coded: bool) -> None:
    results = []
    for fuses in (True, False):
        monkeypatch.setattr(gated_fusing, "FUSES", fuses)
        result, codes = stepped(recompute, coded)
        assert len(codes) == 2
        assert ("_cast_gated_tile" in codes[0]) == ("_cast_grads_tile" in codes[1]) == fuses
        results.append(result)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
