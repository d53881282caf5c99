"""Attention in native execution, with the plain twin in place of the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.errors import BitplanWarning, PlanError
from bitplan.executions.native import attention_path, execution
from bitplan.executions.native.attention import attention_reference

BATCH, TOKENS, SIZE = 2, 140, 64


class Attention(nn.Module):
    """Attention with products before and after it, whose numbers must not depend on how it is computed."""

    def __init__(self, heads: int = 4, key_heads: int = 2, **settings: Any) -> None:
        super().__init__()
        self.heads = heads, key_heads, key_heads
        self.settings = settings
        torch.manual_seed(0)
        width = SIZE * heads
        self.projection = nn.Parameter(torch.randn(width, SIZE * (heads + 2 * key_heads)) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.matmul(x * 1.5, self.projection.to(x.dtype))
        parts = mixed.split([SIZE * heads for heads in self.heads], -1)
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        grouped = self.heads[0] != self.heads[1]
        out = F.scaled_dot_product_attention(q, k * 4, v, enable_gqa=grouped, **self.settings)
        out = out.transpose(1, 2).flatten(2)
        return torch.softmax(torch.matmul(out, out.transpose(-2, -1)) * 0.01, -1)


class Calls:
    """Counts the calls of the function that it stands for."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.function(*args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(attention_path._attend)
    monkeypatch.setattr(attention_path, "_attend", calls)
    monkeypatch.setattr(execution, "multiplies_attention", lambda device: True)
    return calls


def batch(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, TOKENS, SIZE * 4, dtype=dtype)


def step(model: nn.Module, plan: Any, how: Any, is_compiled: bool = False, **attached: Any) -> list[Tensor]:
    x = batch().requires_grad_()
    torch.compiler.reset()
    with bp.attach(model, plan, execution=how, **attached):
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        y = called(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert x.grad is not None
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [y.detach(), x.grad, *grads]


def apart(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).norm() / second.double().norm())


NATIVE = bp.Native(min_macs=0)
PRESET = "fp8-attention"


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("settings", [{"is_causal": True}, {}, {"scale": 0.3, "is_causal": True}], ids=str)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_native_is_as_far_from_exact_as_emulate(
    key_heads: int, settings: dict[str, Any], is_compiled: bool, calls: Calls
) -> None:
    model = Attention(key_heads=key_heads, **settings)
    native = step(model, PRESET, NATIVE, is_compiled, example=batch())
    assert calls.count > 0
