"""A plan together with what else training code does: autocast, scaled losses, accumulation, compilation, processes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import ddp_worker
import pytest
import torch
from ranks import on_ranks
from small import attached
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.optim import SGD

import bitplan

NOISY = {"format": "e3m2", "rounding": "stochastic"}
ROLES = {"match": "*", "weight": NOISY, "activation": "e4m3", "grad_activation": NOISY}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def step_of(model: nn.Module, called: Any = None, x: Tensor = X) -> list[Tensor]:
    """The result and the gradients of one step."""
    model.zero_grad()
    y = (model if called is None else called)(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# --- autocast and scaled losses ---


def test_autocast_multiplies_the_rounded_operands_in_its_own_type() -> None:
    model = nn.Linear(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(X)
        with attached(model, {"match": "*", "weight": "e3m2", "x": "e2m3", "activation": "e4m3", "dy": "e2m1"}):
            y = model(X)
            y.backward(dy := torch.randn_like(y))
        rounded = [bitplan.quantize(p, "e3m2") for p in (model.weight, model.bias)]
        expected = F.linear(bitplan.quantize(X, "e2m3"), *rounded)
    assert y.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(y, bitplan.quantize(expected, "e4m3"))
    assert not torch.equal(y, plain)
    assert model.weight.grad.dtype == torch.float32
    seen = bitplan.quantize(dy, "e2m1").T @ bitplan.quantize(X, "e2m3").bfloat16()
    torch.testing.assert_close(model.weight.grad, seen.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("place", ["weight", "x", "fprop.w", "dgrad.dy"])
@pytest.mark.parametrize("quantizer", ["fp16", "tf32", {"format": "int16", "scale": "tensor"}])
def test_a_format_finer_than_autocasts_type_raises(place: str, quantizer: Any) -> None:
    model = nn.Linear(6, 5)
    with attached(model, {"match": "*", place: quantizer}):
        model(X)  # there is room without it
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(bitplan.errors.QuantizeError, match="coarser format"):
            model(X)


def test_an_activation_finer_than_autocasts_type_raises() -> None:
    with (
        attached(nn.Linear(6, 5), {"match": "*", "activation": "fp16"}) as run,
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(bitplan.errors.FormatError, match=r"bfloat16 cannot hold the values of fp16"),
    ):
        run.model(X)


def test_a_step_that_the_scaler_skips_counts_and_changes_no_weight() -> None:
    model = small()
    optimizer, scaler = SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = []
    with warnings.catch_warnings(), attached(model, {"match": "*", "weight": NOISY}, stats=True) as run:
        warnings.simplefilter("error")
        for factor in (1.0, float("inf"), 1.0):
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            run.step()
            seen.append(all(torch.equal(value, before[key]) for key, value in model.state_dict().items()))
        assert run.state_dict()["step"] == 3
        assert {stat.steps for stat in run.stats().values()} == {3}
    assert seen == [False, True, False]
    assert scaler.get_scale() == 2.0**9


# --- micro-batches, evaluation, control flow ---


@pytest.mark.parametrize("place", ["weight", "w"])
def test_micro_batches_of_a_step_add_up_to_the_whole_batch(place: str) -> None:
    model = small().double()
    x = X.double()
    with attached(model, {"match": "*", place: NOISY}) as run:
        whole = step_of(model, x=x)[1:]
        model.zero_grad()
        for part in x.chunk(2):
            model(part).square().sum().backward()
        for one, parameter in zip(whole, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, one, rtol=1e-12, atol=1e-12)
        run.step()
        assert not torch.allclose(step_of(model, x=x)[1], whole[0], rtol=1e-3)


def test_evaluation_moves_nothing() -> None:
    rules = [{**ROLES, "activation": {"format": "int8", "scale": "tensor", "eval": "ema"}}]
    seen = []
    for evaluates in (False, True):
        model = small()
        optimizer = SGD(model.parameters(), 0.1)
        with attached(model, *rules, stats=True) as run:
            for _ in range(3):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                optimizer.step()
                run.step()
                if evaluates:
                    model.eval()
                    with torch.no_grad():
                        first, second = model(X * 7), model(X * 7)
                    with torch.inference_mode():
                        model(X * 9)
                    assert torch.equal(first, second)
                    model.train()
                    with torch.no_grad():
                        model(X * 11)
            seen.append((run.stats(), [p.tolist() for p in model.parameters()], model.eval()(X).tolist()))
    assert seen[0] == seen[1]


class Loop(nn.Module):
    """As many turns as it is told, and another branch on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, turns: int) -> Tensor:
        for turn in range(turns):
            x = torch.tanh(self.layer(x)) if turn % 2 else torch.sigmoid(self.layer(x))
        return x


def test_every_turn_of_a_loop_is_rounded_however_many_there_are() -> None:
    model = Loop()
    with attached(model, {"match": "*", "activation": "e3m2"}, {"match": "", "op": "tanh.1", "activation": "e2m1"}):
        seen = [model(X, turns) for turns in (1, 4, 2)]
    x, expected = X, []
    for turn in range(4):
        x = bitplan.quantize(model.layer(x), "e3m2")
        x = bitplan.quantize(*((torch.tanh(x), "e2m1" if turn == 3 else "e3m2") if turn % 2 else (x.sigmoid(), "e3m2")))
        expected.append(x)
    assert same(seen, [expected[0], expected[3], expected[1]])


# --- compilation ---


class Mixed(nn.Module):
    """A norm, a tied weight, an in-place operation, a view of a weight, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_() + x
        return self.last(self.norm(y)) * 0.9 + F.relu(y @ self.first.weight.t())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def test_a_compiled_model_equals_the_eager_one_bit_for_bit_step_after_step() -> None:
    torch._dynamo.reset()
    model = Mixed()
    plain = step_of(model)
    slots = {"match": "last", "fprop.x": "e2m3", "wgrad.dy": NOISY, "dgrad.w": NOISY}
    consumer = {"match": "first", "grad_activation": NOISY, "grad_at": "consumer"}
    with attached(model, ROLES, slots, consumer, example=X) as run:
        called = compiled(model)
        for _ in range(2):
            eager = step_of(model)
            assert same(step_of(model, called), eager)
            assert not same(eager, plain)
            run.step()
        assert not same(step_of(model), eager)
        counters.clear()
        step_of(model, called)
        assert not counters["stats"]
    assert same(step_of(model, called), plain)


def test_a_model_that_was_compiled_and_run_before_gets_its_plan() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    called = compiled(model)
    plain = step_of(model, called)
    with attached(called, {"match": "0", "weight": "e2m1"}, example=X):
        assert same(step_of(model, called), step_of(model))
        assert not same(step_of(model, called), plain)
    assert same(step_of(model, called), plain)


def test_a_compiled_model_without_an_example_raises_rather_than_go_unchecked() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 6))
    with attached(model, {"match": "*", "weight": "e2m1"}):
        compiled(model)(X).sum().backward()
        with pytest.raises(bitplan.errors.PlanError, match="example="):
            SGD(model.parameters(), 0.1).step()


class Block(nn.Module):
    """A layer and an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Blocks(nn.Module):
    """Fourteen equal blocks, each compiled for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(14))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


@pytest.mark.filterwarnings("ignore:.*override it:bitplan.errors.BitplanWarning")
@pytest.mark.parametrize("wrapped", [False, True])
def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph(wrapped: bool) -> None:
    overridden = {"strict": False}  # by the last rule
    rules = [
        {"match": "blocks.0.layer", "weight": "e2m1", **overridden},
        {"match": "blocks", "weight": NOISY, **overridden},
        ROLES,
    ]
    eager = Blocks()
    plain = step_of(eager)
    with attached(eager, *rules) as run:
        run.step()
        expected = step_of(eager)
    assert not same(expected, plain)
    model, graphs = Blocks(), []
    for number, block in enumerate(model.blocks):
        if wrapped:
            model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
        else:
            block.compile(backend="aot_eager", fullgraph=True)
    for chosen in ([], rules):
        torch._dynamo.reset()
        counters.clear()
        with attached(model, *chosen, example=X) as run:
            step_of(model)
            run.step()
            assert same(step_of(model), expected if chosen else plain)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] <= 2


def test_many_kinds_of_modules_can_be_compiled_in_one_process() -> None:
    torch._dynamo.reset()
    names = ["Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "ELU", "Mish", "Softplus", "LogSigmoid", "Hardswish"]
    for name in names:
        model = getattr(nn, name)()
        with attached(model, {"match": "*", "activation": "e2m1"}, example=X), torch.no_grad():
            assert torch.equal(compiled(model)(X), bitplan.quantize(getattr(nn, name)()(X), "e2m1"))


def test_a_recurrent_layer_compiles_through_its_opened_cell() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    before = torch._dynamo.config.allow_rnn

    def step(called: Any) -> list[Tensor]:
        model.zero_grad()
        y = called(x)[0]
        y.sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    plain = step(model)
    with attached(model, {"match": "*", "x": "e3m2", "w": NOISY}, example=x):
        eager = step(model)
        assert not same(eager, plain)
        assert same(step(compiled(model)), eager)
    assert torch._dynamo.config.allow_rnn is before
    assert same(step(model), plain)


# --- processes ---


@pytest.mark.parametrize("before", [True, False])
def test_two_processes_train_as_one(before: bool, tmp_path: Path) -> None:
    result = on_ranks(2, ddp_worker.work, tmp_path, before)
    model, batches = ddp_worker.make()
    plain = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), 0.5)
    with attached(model, ddp_worker.RULE) as run:
        for step in range(ddp_worker.STEPS):
            optimizer.zero_grad()
            for part in batches[:, step]:
                model(part).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad /= 2  # type: ignore[operator]
            optimizer.step()
            run.step()
    for position, parameter in enumerate(model.parameters()):
        torch.testing.assert_close(result[0][position], parameter.detach(), rtol=0, atol=1e-7)
        assert torch.equal(result[0][position], result[1][position])
    assert not same([*map(Tensor.detach, plain.parameters())], [*map(Tensor.detach, model.parameters())])
