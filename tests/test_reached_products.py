"""Every product that a rule covers has its operands rounded, or the rule raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operand_spy import OperandSpy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan as bp
from bitplan.plans import SLOTS

OPERANDS = {"version": 1, "rules": [{"match": "*", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}


class Product(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    return F.grouped_mm(x, w, offs=ends)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "linalg.matmul": (torch.linalg.matmul, (8, 8)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [0])), (8, 8)),
    "tensordot of a number": (lambda x, w: torch.tensordot(x, w, 1), (8, 4)),
    "inner": (torch.inner, (5, 8)),
    "vecdot": (torch.linalg.vecdot, (8, 8)),
    "vdot": (lambda x, w: torch.vdot(x[0], w), (8,)),
    "multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w, x]), (8, 8)),
    "chain_matmul": (lambda x, w: torch.chain_matmul(x, w, x), (8, 8)),
    "addbmm": (lambda x, w: torch.addbmm(x, x.expand(3, 8, 8), w, beta=0.5, alpha=2), (3, 8, 8)),
    "addmv": (lambda x, w: torch.addmv(x[0], x, w), (8,)),
    "einsum of three": (lambda x, w: torch.einsum("ij,jk,kl->il", x, w, x), (8, 8)),
    "einsum of a list": (lambda x, w: torch.einsum("ij,jk,kl->il", [x, w, x]), (8, 8)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), (3, 8, 8)),
    "convolution": (
        lambda x, w: torch.convolution(x[None, None], w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (2, 1, 3, 3),
    ),
    "aten.mm": (torch.ops.aten.mm.default, (8, 8)),
    "aten.mm packet": (torch.ops.aten.mm, (8, 8)),
    "grouped_mm": (grouped, (2, 8, 8)),
    "lstm_cell": (lambda x, w: torch.lstm_cell(x, (x, x), w, w)[0], (32, 8)),
    "gru_cell": (lambda x, w: torch.gru_cell(x, x, w, w), (24, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_operand_is_rounded(name: str) -> None:
    function, shape = CASES[name]
    model, x = Product(function, *shape), torch.randn(8, 8, requires_grad=True)
    plain = model(x)
    with bp.attach(model, OPERANDS), OperandSpy() as spy:
        rounded = model(x)
        rounded.sum().backward()
    assert spy.count
    assert spy.unrounded == []
    assert 0 < (rounded - plain).norm() < 0.5 * plain.norm()
    assert model.weight.grad is not None


@pytest.mark.parametrize("name", CASES)
def test_a_decomposed_product_is_torchs_own(name: str) -> None:
    function, shape = CASES[name]
    if name == "grouped_mm":
        pytest.skip("it is not decomposed")
    model, x = Product(function, *shape).double(), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    plain = model(x)
    expected = torch.autograd.grad(plain.square().sum(), (x, model.weight))
    plan = {"version": 1, "rules": [{"match": "*", "x": "fp32", "w": "fp32"}]}
    with bp.attach(model, plan):
        rounded = model(x)
        actual = torch.autograd.grad(rounded.square().sum(), (x, model.weight))
    torch.testing.assert_close(rounded, plain, rtol=1e-5, atol=1e-5)
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["linalg.matmul", "tensordot", "multi_dot", "addbmm", "einsum of three", "lstm_cell", "grouped_mm"]
)
def test_compiled_code_rounds_them_too(name: str) -> None:
    torch.compiler.reset()
    function, shape = CASES[name]
    dtype = torch.bfloat16 if name == "grouped_mm" else torch.float32  # torch compiles groups in bfloat16 only
    model, x = Product(function, *shape).to(dtype), torch.randn(8, 8, dtype=dtype)
    plain = model(x)
    with bp.attach(model, OPERANDS, example=x):
        eager = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(eager, compiled)
    assert not torch.equal(compiled, plain)


@torch.jit.script
def scripted(x: Tensor, w: Tensor) -> Tensor:
    return x.mm(w)


def test_a_rule_over_operands_that_it_cannot_reach_raises() -> None:
    model, x = Product(lambda x, w: torch.sparse.mm(x.to_sparse(), w), 8, 8), torch.randn(8, 8)
    with bp.attach(model, OPERANDS), pytest.raises(bp.BitplanError, match="keep: true"):
        model(x)
    kept = {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}
    with bp.attach(model, kept):
        model(x)


def test_a_scripted_function_is_noticed_on_the_example() -> None:
    model, x = Product(scripted, 8, 8), torch.randn(8, 8)
    with pytest.raises(bp.BitplanError, match="mm"):
        bp.attach(model, OPERANDS, example=x)


class LeavingRows(TorchDispatchMode):
    """NaN in the rows of grouped products that are in no group: torch leaves them as they were in memory."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default and args[1].dim() == 3:
            self.calls += 1
            offsets = kwargs["offs"] if kwargs and "offs" in kwargs else args[2]
            result[int(offsets[-1]) :] = torch.nan
        return result


class Chain(nn.Module):
    """Two grouped products, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(2, 16, 16) / 4) for _ in range(2))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(F.grouped_mm(x, self.first, offs=ends), self.second, offs=ends)


@pytest.mark.parametrize("scale", ["tensor", "vector"])
def test_rows_in_no_group_have_no_part_in_a_scale(scale: str) -> None:
    torch.manual_seed(0)
    model = Chain().bfloat16()
    x, ends = torch.randn(24, 16).bfloat16().requires_grad_(), torch.tensor([5, 9], dtype=torch.int32)
    slots = {slot: {"format": "e4m3", "scale": scale} for slot in SLOTS}
    plan = {"version": 1, "rules": [{"match": "*", "op": "grouped_mm", **slots}]}
    with bp.attach(model, plan, example=(x, ends), execution="emulate"), LeavingRows() as leaving:
        y = model(x, ends)[:9]
        y.float().square().sum().backward()
    assert leaving.calls == 4  # forward and input gradient of both
    for result in (y, *(value.grad for value in (x, *model.parameters()))):
        assert result is not None
        assert result.isfinite().all()
        assert result.any()
