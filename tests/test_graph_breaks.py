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


# --- operations whose backward pass reads values, which no graph can hold


def _scaled_by_count(x: Tensor, count: Tensor) -> Tensor:
    return x * count.item()


torch.library.custom_op(
    "bitplan_test::scaled_by_count", _scaled_by_count, mutates_args=(), schema="(Tensor x, Tensor count) -> Tensor"
)
torch.library.register_fake("bitplan_test::scaled_by_count", lambda x, count: torch.empty_like(x))


def _save_count(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.count = inputs[1]


torch.library.register_autograd(
    "bitplan_test::scaled_by_count", lambda ctx, dy: (dy * ctx.count.item(), None), setup_context=_save_count
)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Perceptron(), Perceptron()
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.ops.bitplan_test.scaled_by_count(self.before(x), self.count))


def test_a_graph_that_cannot_be_compiled_runs_eagerly_as_without_a_plan() -> None:
    """BackendCompilerFailed was raised."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Counted(), torch.randn(8, 16)
    torch.compile(model, backend="aot_eager")(x)  # torch falls back to eager by itself
    torch.compiler.reset()
    results = []
    with bp.attach(model, "fp8-all", example=x):
        for called in (model, torch.compile(model, backend="aot_eager")):
            model.zero_grad()
            y = called(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == 9
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


@torch.compiler.allow_in_graph
def _of_a_user(x: Tensor, count: Tensor) -> Tensor:
    return torch.ops.bitplan_test.scaled_by_count(x, count)  # type: ignore[no-any-return]


def test_a_function_that_a_user_allowed_in_graphs_raises_as_without_a_plan() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return _of_a_user(super().forward(x), count)

    model, batch = Model(4, 4), (torch.randn(2, 4), torch.tensor(2))
    for is_planned in (False, True):
        torch.compiler.reset()
        run = bp.attach(model, "fp8-all") if is_planned else None
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(model, backend="aot_eager")(*batch)
        if run is not None:
            run.detach()


def _loop_over_experts(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    return torch.cat([input[a:b] @ w for a, b, w in zip([0, *ends], ends, weight, strict=False)])


torch.library.custom_op(
    "bitplan_test::grouped_mm_fallback",
    _loop_over_experts,
    mutates_args=(),
    schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor",
)


class Experts(nn.Module):
    """Calls an operation of the name and signature that Transformers' experts have in compiled float32 code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch.ops.bitplan_test.grouped_mm_fallback(x, self.weight.transpose(-2, -1).mT, offs=offsets)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_of_experts_are_rounded_and_compile_to_one_graph(is_compiled: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Experts(), torch.randn(7, 4, requires_grad=True)
    dy = torch.randn(7, 5)
    with bp.attach(model, {"version": 1, "rules": [{"match": "*", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}):
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        for offsets in ([2, 2, 7], [3, 4, 7]):
            x.grad = model.weight.grad = None
            y = called(x, torch.tensor(offsets))
            y.backward(dy)
            x8 = x.detach().to(torch.float8_e4m3fn).float().requires_grad_()
            w8 = model.weight.detach().to(torch.float8_e4m3fn).float().requires_grad_()
            expected = _loop_over_experts(x8, w8, torch.tensor(offsets))
            expected.backward(dy.to(torch.float8_e5m2).float())
            for ours, theirs in ((y, expected), (x.grad, x8.grad), (model.weight.grad, w8.grad)):
                torch.testing.assert_close(ours, theirs)
