"""Compiling equal blocks once: one graph, whatever their number, with the numbers of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import bitplan as bp
from bitplan.runtime.regions import equal_blocks
from bitplan.runtime.step_in_backward import StepInBackward

pytestmark = pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh(without_inductor: None) -> None:
    torch.compiler.reset()
    counters.clear()


def tokens() -> Tensor:
    return torch.arange(12).remainder(10).view(2, 6)


def step(model: nn.Module, called: Any) -> list[Tensor]:
    model.zero_grad()
    loss = called(tokens()).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


#: With scales of the present tensor and of the past, for classes of tensors and for operands.
DELAYED = {
    "version": 1,
    "quantizers": {"f8": {"format": "e4m3", "scale": "tensor", "history": 4}},
    "rules": [{"match": "*", "op": "linear", "x": "f8", "w": "f8", "dy": "f8"}],
}
PLANS: dict[str, Any] = {"fp8-all": "fp8-all", "fp8-linear": "fp8-linear", "delayed": DELAYED}


@pytest.mark.parametrize("execution", ["emulate", "packed", bp.Native(min_macs=0)], ids=["emulate", "packed", "native"])
@pytest.mark.parametrize("plan", PLANS)
def test_equal_blocks_have_one_graph_and_the_numbers_of_eager_code(plan: str, execution: Any) -> None:
    for blocks in (2, 5) if (plan, execution) == ("fp8-all", "emulate") else (3,):
        torch.compiler.reset()
        counters.clear()
        model = Net(blocks)
        plain = step(model, model)
        with bp.attach(model, PLANS[plan], example=tokens(), execution=execution) as run:
            eager = step(model, model)
            compiled = run.compile(regional=True)
            assert compiled is model
            ours = step(model, compiled)
            assert graphs() == 1
            step(model, compiled)
            assert graphs() == 1
        assert len(ours) == len(eager)
        assert not torch.equal(ours[0], plain[0])
        for value, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_packed_equals_emulate() -> None:
    results = []
    for execution in ("emulate", "packed"):
        torch.compiler.reset()
        model = Net(3)
        with bp.attach(model, "fp8-all", example=tokens(), execution=execution) as run:
            results.append(step(model, run.compile(regional=True)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_it_has_the_numbers_of_the_whole_model_compiled() -> None:
    model = Net(3)
    with bp.attach(model, "fp8-all", example=tokens()) as run:
        whole = step(model, run.compile())
        regional = step(model, run.compile(regional=True))
    for value, expected in zip(regional, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_blocks_that_the_plan_treats_differently_have_a_graph_for_each_treatment() -> None:
    rules = [{"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3"}, {"match": "blocks.0.*", "keep": True}]
    model = Net(12)
    every_other = [{"match": f"blocks.{number}.*", "x": f"e{number}m{9 - number}"} for number in range(2, 7)]
    with bp.attach(model, {"version": 1, "rules": [*rules, *every_other]}, example=tokens()) as run:
        eager = step(model, model)
        compiled = step(model, run.compile(regional=True))
        assert graphs() == 7  # the kept one, five with formats of their own, and the others
    for value, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_detaching_leaves_the_model_as_it_was() -> None:
    model = Net(3)
    before, keys = step(model, model), list(model.state_dict())
    run = bp.attach(model, "fp8-linear", example=tokens())
    run.compile(regional=True)
    step(model, model)
    assert graphs() == 1
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in twin.blocks)
    run.detach()
    assert all(block._compiled_call_impl is None for block in model.blocks)
    after = step(model, model)
    assert graphs() == 1
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_resumed_run_goes_on_with_the_same_numbers() -> None:
    def train(steps: int, model: nn.Module, saved: Any = None) -> tuple[list[float], Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with bp.attach(model, DELAYED, example=tokens(), optimizer=optimizer) as run:
            if saved is not None:
                run.load_state_dict(saved)
            compiled = run.compile(regional=True)
            for _ in range(steps):
                optimizer.zero_grad()
                loss = compiled(tokens()).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, run.state_dict()

    whole, _ = train(4, Net(3))
    model = Net(3)
    first, state = train(2, model)
    second, _ = train(2, model, state)
    assert [*first, *second] == whole
    assert len(set(whole)) == 4


def gradient_bytes_at_once(loss: Tensor) -> int:
    """The most bytes of gradients that one node of the backward pass makes, all of which are alive before it ends."""
    most, nodes, seen = 0, [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [function for function, _ in node.next_functions]
        parameters = {function.variable for function in following if hasattr(function, "variable")}
        most = max(most, sum(parameter.nbytes for parameter in parameters))
        nodes += following
    return most


def test_steps_in_the_backward_pass_free_the_gradients_of_each_block() -> None:
    def train(regional: bool | None) -> tuple[int, list[Tensor]]:
        torch.compiler.reset()
        model = Net(5)
        with bp.attach(model, "fp8-linear", example=tokens()) as run:
            optimizer = StepInBackward(model, lambda parameter: torch.optim.SGD([parameter], lr=0.1), run)
            called = model if regional is None else run.compile(regional=regional)
            for _ in range(2):
                loss = called(tokens()).square().mean()
                at_once = gradient_bytes_at_once(loss)
                loss.backward()
                optimizer.step()
        return at_once, [parameter.detach() for parameter in model.parameters()]

    model = Net(5)
    _, expected = train(None)
    regional, ours = train(True)
    whole, _ = train(False)
    assert whole == sum(parameter.nbytes for parameter in model.parameters())
    assert regional == sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    for value, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_a_model_without_equal_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with bp.attach(model, "fp8-linear", example=torch.randn(2, 4)) as run, pytest.raises(bp.BitplanError) as caught:
        run.compile(regional=True)
    assert "Sequential has no equal blocks" in str(caught.value)


def test_blocks_of_published_models_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config)
    assert equal_blocks(model) == list(model.model.layers)
    with bp.attach(model, "fp8-linear", example={"input_ids": tokens()}) as run:
        eager = model(input_ids=tokens()).logits
        regional = run.compile(regional=True)(input_ids=tokens()).logits
        assert graphs() == 1
    torch.testing.assert_close(regional, eager)


def test_a_block_with_other_shapes_is_left_out() -> None:
    timm = pytest.importorskip("timm")
    resnet = timm.create_model("resnet50")
    assert len(equal_blocks(resnet)) == sum(
        count - 1 for count in (3, 4, 6, 3)
    )  # the first of a stage has its own form
