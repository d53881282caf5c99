"""A head's loss in chunks on a CUDA device: compiled steps, FP8 units, and the memory of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_losses import RULES, ChunkedLoss, Model, WholeLoss
from torch import Tensor
from torch.nn import functional as F

import bitplan
from bitplan.executions.native.backends import backends_of
from bitplan.runtime.head_loss import linear_cross_entropy

pytestmark = pytest.mark.gpu

TOKENS, FEATURES, VOCABULARY = 2000, 256, 8192


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, FEATURES, device="cuda") * 0.05).to(dtype).requires_grad_()
    classes = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    classes[3] = -100
    return hidden, weight, classes


def whole(hidden: Tensor, weight: Tensor, classes: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), classes, **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.compiler.reset()  # torch limits the graphs of one function
    hidden, weight, classes = operands(dtype)
    results = []
    for function in (whole, linear_cross_entropy, torch.compile(linear_cross_entropy, fullgraph=True)):
        chunk = {} if function is whole else {"chunk": 512}
        loss = function(hidden, weight, classes, **options, **chunk)
        grads = torch.autograd.grad(loss.sum() * 0.7, (hidden, weight))
        results.append((loss, *grads))
    for actual in results[1:]:
        for ours, theirs in zip(actual, results[0], strict=True):
            assert float((ours - theirs).float().norm() / theirs.float().norm()) < (
                1e-4 if dtype == torch.float32 else 2e-2
            )


def test_memory_of_a_step() -> None:
    """Twice a chunk of logits and the weight's gradient, not the logits of all tokens."""
    hidden, weight, classes = operands(torch.bfloat16)
    peaks = []
    for function, chunk in ((whole, {}), (linear_cross_entropy, {"chunk": 256})):
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(function(hidden, weight, classes, **chunk), (hidden, weight))
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    logits = TOKENS * VOCABULARY * 2
    assert peaks[0] > 4 * logits
    assert peaks[1] < 2 * 256 * VOCABULARY * 2 + 2.5 * (weight.nbytes + hidden.nbytes) + (4 << 20)


@pytest.mark.parametrize("rule", ["fp8 scaled", "delayed", "int8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_native_equals_emulate(rule: str, compiled: bool) -> None:
    if "fp8" not in {unit.name for unit in backends_of(torch.device("cuda"))}:
        pytest.skip("this GPU has no fp8 unit")
    torch.compiler.reset()
    torch.manual_seed(1)
    x, classes = torch.randn(64, 16, device="cuda").bfloat16(), torch.randint(0, 64, (64,), device="cuda")
    grads: list[list[Tensor]] = []
    kinds: list[tuple[type[WholeLoss], Any]] = [(ChunkedLoss, bitplan.Native(min_macs=0)), (ChunkedLoss, "emulate")]
    for kind, execution in kinds:
        torch.manual_seed(0)
        model = Model().cuda().bfloat16()
        plan = {"version": 1, "rules": [{"match": "head", **RULES[rule]}]}
        with bitplan.attach(model, plan, example=x, execution=execution) as run:
            step = run.compile(kind(model)) if compiled else kind(model)
            for _ in range(2):
                model.zero_grad()
                step(x, classes).backward()
                run.step()
        grads.append([parameter.grad.float() for parameter in model.parameters()])  # type: ignore[union-attr]
    for native, emulated in zip(*grads, strict=True):
        assert float((native - emulated).norm() / emulated.norm()) < 2e-2
