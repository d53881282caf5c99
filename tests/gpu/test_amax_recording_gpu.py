"""Records that casts write into on a CUDA device: the bits are those of magnitudes that are told and gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.compiler import amax_fusion
from bitplan.compiler.kernel_ops import OPERATIONS, launch_directly
from bitplan.executions.native.backends import backends_of
from bitplan.executions.native.float8_cast import FORMATS, MAX_BATCH
from bitplan.executions.native.group_padding import pad_groups
from bitplan.executions.native.recorded_cast import CASTS
from bitplan.runtime.module_state import RECORD

pytestmark = pytest.mark.gpu

F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 2}
CODED = {"match": ["*.gate", "*.up"], "op": "linear", "activation": "e4m3"}


@pytest.fixture(autouse=True)
def _has_unit() -> None:
    if "fp8" not in {unit.name for unit in backends_of(torch.device("cuda"))}:
        pytest.skip("this GPU has no fp8 unit")
    torch._dynamo.reset()


def bits(x: Tensor) -> Tensor:
    """With NaN as one number."""
    return x.float().nan_to_num(nan=-7.0).contiguous().view(torch.int32)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("odd", [0.0, torch.inf, torch.nan])
def test_kernels_raise_records_to_what_is_told(kind: torch.dtype, odd: float) -> None:
    torch.manual_seed(0)
    x, y, z = (5 * torch.randn(1333, 400, device="cuda").bfloat16() for _ in range(3))
    for each in (x, y, z):
        each[700, 300] = odd
    history = torch.tensor(2.0, device="cuda")
    parts = torch.ops.bitplan.float8_amax(x, history)
    sources = pad_groups(torch.tensor([100, 100, 117, 1333], device="cuda"), len(x)).sources
    for cast in CASTS.values():
        arguments = {
            "float8_cast": (x, kind, parts, history, True, True, True, True),
            "float8_padded_cast": (x, sources, kind, parts, history, True, True, True),
            "gated_cast": (x, y, kind, parts, history, True, True, True, False),
            "gated_grads_cast": (x, y, z, kind, parts, parts, history, history, True, True, True),
            "norm_cast": (x, y[:, 0].float(), z[0], None, kind, parts, history, True, True, True),
        }[cast.name]
        count = max(len(cast.amax_results), cast.max_records)
        records, cells = [torch.rand(3, 57, device="cuda") for _ in range(count)], [22, 79, 136][:count]
        records[-1].view(-1)[cells[-1]] = 1e9
        before = [record.clone() for record in records]
        expected = cast.reference(*arguments, records=before, cells=cells)
        actual = cast.launch(*arguments, records=records, cells=cells, wrap=launch_directly)
        for first, second in zip(actual, expected, strict=True):
            assert torch.equal(bits(first), bits(second))


def test_one_kernel_looks_for_several_magnitudes() -> None:
    torch.manual_seed(0)
    xs = [number * torch.randn(333, 128 * number, device="cuda").bfloat16() for number in range(1, MAX_BATCH + 1)]
    history_amaxes = [torch.tensor(float(number % 3), device="cuda") for number in range(MAX_BATCH)]
    for count in (2, 5, MAX_BATCH):
        joined = OPERATIONS["float8_amax_batch"].launch(xs[:count], history_amaxes[:count])
        for tops, x, history_amax in zip(joined, xs, history_amaxes, strict=False):
            single = torch.ops.bitplan.float8_amax(x, history_amax)
            assert tops.shape == single.shape
            assert torch.equal(tops.amax(), single.amax())


class Block(nn.Module):
    """Three layers that read one tensor, and a gate; no attention, whose gradients are not the same at every call."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + torch.tanh(self.query(x)) * self.key(x) + self.value(x)
        result: Tensor = mixed + self.down(F.silu(self.gate(mixed)) * self.up(mixed))
        return result


def stepped(recompute: Any, coded: bool) -> tuple[list[Tensor], list[str]]:
    """Results and records of three steps, the first of two batches and without a past; the code that Inductor made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rule = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": {**F8, "format": "e5m2"}}
    plan = Plan.from_dict({"version": 1, "rules": [rule, *([CODED] if coded else [])]})
    model = nn.Sequential(Block(256, 512), Block(256, 512)).cuda().bfloat16()
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    result: list[Tensor] = []

    def records() -> list[Tensor]:
        held = (module._buffers.get(RECORD) for module in model.modules())
        return [item.clone() for item in held if item is not None]

    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
        called = run.compile()

        def step(factor: float) -> None:
            y: Tensor = called(factor * x)
            result.extend((y.detach(), *records()))
            y.float().mul(factor).sum().backward()
            result.extend(records())

        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(step, 1.0)
        for number in range(3):
            step(3.0 - number)
            run.step()
            result.extend(records())
    return [*result, *(p.grad for p in model.parameters() if p.grad is not None)], codes


@pytest.mark.parametrize(("recompute", "coded"), [((), False), ("activations", True), ("inputs", True)])
def test_steps_have_the_same_records(monkeypatch: pytest.MonkeyPatch, recompute: Any, coded: bool) -> None:
    results = []
    for notes in (True, False):
        monkeypatch.setattr(amax_fusion, "RECORDS_IN_CASTS", notes)
        monkeypatch.setattr(amax_fusion, "BATCHES_AMAX", notes)
        result, codes = stepped(recompute, coded)
        assert len(codes) == 2
        assert all(("aten.maximum" in code) == (not notes) for code in codes)
        assert ("_partial_amax_batch" in codes[0]) == notes
        results.append(result)
    for first, second in zip(*results, strict=True):
        assert torch.equal(bits(first), bits(second))
