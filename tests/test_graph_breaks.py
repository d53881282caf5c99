"""Graph breaks: the graph of an inner module runs while the scopes of outer modules are open, and is rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Broken(nn.Module):
    """A graph break between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Perceptron(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) * 2
        torch._dynamo.graph_break()
        return self.after(x) + 1


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.broken, self.head = Broken(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.broken(x).sin()) * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("plan", ["fp8-all", {"version": 1, "rules": [{"match": "*", "x": "e4m3", "w": "e4m3"}]}])
def test_compiled_code_around_a_graph_break_has_the_numbers_of_eager_code(plan: Any, backend: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Around(), torch.randn(8, 16)
    plain = model(x)
    results = []
    with bp.attach(model, plan, example=x):
        compiled = torch.compile(model, backend=backend)
        compiled(x)  # traces; the next call runs graphs alone
        for called in (model, compiled):
            model.zero_grad()
            y = called(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
    assert not torch.equal(results[0][0], plain)


def test_steps_after_the_first_compile_nothing_and_draw_the_bits_of_eager_steps() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    stochastic = {"format": "e4m3", "scale": "tensor", "rounding": "stochastic"}
    model, x = Around(), torch.randn(8, 16)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plan = {"version": 1, "rules": [{"match": "*", "activation": stochastic}]}
    losses = []
    for is_compiled in (False, True):
        with bp.attach(model, plan, example=x) as run:
            called = torch.compile(model, backend=backend) if is_compiled else model
            counts = []
            for _ in range(4):
                losses.append(called(x).square().sum().item())
                run.step()
                counts.append(len(graphs))
    assert counts == counts[:1] * 4
    assert losses[:4] == losses[4:]
    assert len(set(losses)) == 4
