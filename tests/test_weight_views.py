"""Weights that a model uses through a view: transposed, split, detached. Eager and compiled code round them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp


class Through(nn.Module):
    """The product of x and a view of the weight."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.view(self.weight))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "H": lambda w: w.H,
    "mH": lambda w: w.mH,
    "data": lambda w: w.data,
    "data.T": lambda w: w.data.T,
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "chunk": lambda w: w.chunk(2, 1)[0],
    "split": lambda w: w.split([3, 5], 1)[1],
    "unbind": lambda w: w.unbind()[0],
    "slice": lambda w: w[:, 2:5],
    "to": lambda w: w.to(torch.float64).float(),
}
WEIGHT = {"version": 1, "rules": [{"match": "*", "weight": "e2m1"}]}


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("compiler", ["aot_eager", "eager", "run.compile"])
def test_compiled_code_rounds_the_weight_behind_a_view(name: str, compiler: str) -> None:
    if compiler == "run.compile" and name not in ("T", "chunk"):
        pytest.skip("two views stand for all")
    torch.compiler.reset()  # every view is another code object
    model, x = Through(VIEWS[name]), torch.randn(4, 8)
    plain = model(x)
    with bp.attach(model, WEIGHT, example=x) as run:
        eager = model(x)
        compiled: Any = (
            run.compile() if compiler == "run.compile" else torch.compile(model, backend=compiler, fullgraph=True)
        )
        actual = compiled(x)
    expected = x @ VIEWS[name](bp.quantize(model.weight.detach(), "e2m1"))
    torch.testing.assert_close(eager, expected)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(eager, plain)


@pytest.mark.parametrize("name", ["mT", "mH"])
def test_compiled_code_rounds_a_batch_of_weights_behind_a_view(name: str) -> None:
    torch.compiler.reset()
    model, x = Through(VIEWS[name]), torch.randn(3, 4, 8)
    model.weight = nn.Parameter(torch.randn(3, 5, 8))
    with bp.attach(model, WEIGHT, example=x):
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(actual, x @ bp.quantize(model.weight.detach(), "e2m1").mT)
    assert not torch.allclose(actual, model(x))


def test_a_gradient_behind_a_transposition_is_rounded_in_compiled_code() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(torch.ones(3, 5), self.linear(x).T.T.sin())

    plan = {"version": 1, "rules": [{"match": "*", "grad_activation": "e2m1", "grad_at": "consumer"}]}
    model, x = Transposed(), torch.randn(5, 4)
    gradients = []
    with bp.attach(model, plan, example=x):
        for called in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            model.zero_grad()
            called(x).square().sum().backward()
            gradients.append(model.linear.weight.grad)
    assert torch.equal(*gradients)
