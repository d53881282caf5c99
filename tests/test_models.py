"""Plans on real models: convolutional, transformers of another library, recurrent, on graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import attached
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.capture.scopes import is_planned
from bitplan.lab.models.graph_networks import GCN, normalised_adjacency
from bitplan.lab.models.language_models import LSTMModel
from bitplan.lab.models.resnet import BasicBlock, ResNet, cifar_resnet
from bitplan.lab.models.small_cnns import MobileNetV2

transformers = pytest.importorskip("transformers")

Made = tuple[nn.Module, tuple[Any, ...]]
WORDS = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))


def gpt2() -> Made:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **dropout)
    return transformers.GPT2LMHeadModel(config), (WORDS,)


def bert() -> Made:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes, **dropout)
    return transformers.BertForSequenceClassification(config), (WORDS,)


def graph() -> Made:
    adjacency = normalised_adjacency(torch.randint(40, (2, 80)), 40)
    return GCN((6, 8, 4), dropout=0.0), (torch.randn(40, 6), adjacency)


MODELS: dict[str, Callable[[], Made]] = {
    "resnet8": lambda: (cifar_resnet(8), (torch.randn(4, 3, 16, 16),)),
    "mobilenet": lambda: (MobileNetV2(10, 0.25), (torch.randn(8, 3, 16, 16),)),
    "gpt2": gpt2,
    "bert": bert,
    "lstm": lambda: (LSTMModel(20, 8, layers=2, dropout=0.0), (torch.randint(20, (5, 4)),)),
    "gcn": graph,
}


def made(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def step_of(model: nn.Module, inputs: tuple[Any, ...], called: Any = None) -> list[Tensor]:
    """The result and the gradients of one step; running statistics of norms are put back."""
    state = copy.deepcopy(model.state_dict())
    model.zero_grad()
    result = (model if called is None else called)(*inputs)
    y: Tensor = result if isinstance(result, Tensor) else result[0]
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    model.load_state_dict(state)
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


# --- nothing asked, nothing done ---


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_plan_and_a_detached_one_change_no_bit(name: str) -> None:
    model, inputs = made(name)
    plain = step_of(model, inputs)
    with attached(model) as run:
        assert not any(map(is_planned, model.modules()))
        assert same(step_of(model, inputs), plain)
        run.step()
    with attached(model, {"match": "*", "weight": "e4m3", "activation": "e4m3", "grad_activation": "e5m2"}):
        assert not same(step_of(model, inputs), plain)
    assert same(step_of(model, inputs), plain)


# --- the same rounding by hand ---


@pytest.mark.parametrize("name", MODELS)
def test_rounded_weights_equal_a_copy_whose_weights_were_rounded_by_hand(name: str) -> None:
    model, inputs = made(name)
    by_hand = copy.deepcopy(model)
    for parameter in by_hand.parameters():
        parameter.data = bitplan.quantize(parameter.data, "e3m2")
    plain = step_of(model, inputs)
    with attached(model, {"match": "*", "weight": "e3m2"}, example=inputs):
        seen = step_of(model, inputs)
    assert same(seen, step_of(by_hand, inputs))
    assert not same(seen, plain)


def q(x: Tensor) -> Tensor:
    return bitplan.quantize(x, "e4m3")


def rounded_resnet(model: ResNet, x: Tensor) -> Tensor:
    x = q(F.relu(q(model.bn1(q(model.conv1(x))))))
    for block in model.modules():
        if isinstance(block, BasicBlock):
            inner = q(F.relu(q(block.bn1(q(block.conv1(x))))))
            inner = q(block.bn2(q(block.conv2(inner))))
            for layer in block.shortcut if isinstance(block.shortcut, nn.Sequential) else ():
                x = q(layer(x))
            x = q(F.relu(q(inner + x)))
    return q(model.fc(q(F.adaptive_avg_pool2d(x, 1)).flatten(1)))


def rounded_gcn(model: GCN, x: Tensor, adjacency: Tensor) -> Tensor:
    x = q(torch.sparse.mm(adjacency, q(model.layers[0](x))))
    return q(torch.sparse.mm(adjacency, q(model.layers[1](q(F.dropout(q(F.relu(x)), 0.0))))))


@pytest.mark.parametrize(("name", "by_hand"), [("resnet8", rounded_resnet), ("gcn", rounded_gcn)])
def test_rounded_activations_equal_a_forward_that_rounds_each_by_hand(
    name: str, by_hand: Callable[..., Tensor]
) -> None:
    model, inputs = made(name)
    with attached(model, {"match": "*", "activation": "e4m3"}, example=inputs):
        seen = step_of(model, inputs)
    assert same(seen, step_of(model, inputs, lambda *arguments: by_hand(model, *arguments)))
    assert error(seen[0], step_of(model, inputs)[0]) > 2**-6


# --- how far off ---


#: Operations whose results are far from the grid of what they were given; those of relu, of tanh for small numbers and
#: of a norm whose input was normal already are not.
FRESH = ("conv2d", "batch_norm", "embedding", "linear", "addmm", "sparse_matmul")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["e5m2", "e5m6"])
def test_every_rounding_errs_at_least_as_much_as_the_format_must_and_at_most_as_it_may(name: str, target: str) -> None:
    model, inputs = made(name)
    with attached(model, {"match": "*", "activation": target}, example=inputs, stats=True) as run:
        step_of(model, inputs)
        run.step()
        elements = {row.site.name: row.site.elements for row in run.table() if row.site.role == "activation"}
        result = {site: seen for site, seen in run.stats().items() if elements.get(site, 0) >= 100}
    unit = bitplan.get_format(target).epsilon  # type: ignore[union-attr]
    assert all(seen.error <= unit / 2 for seen in result.values())
    # An error is spread evenly over a step, which is between unit/2 and unit of the value: 1/sqrt(12) of that.
    fresh = [seen.error for site, seen in result.items() if site.split("/")[1].split(".")[0] in FRESH]
    assert len(fresh) >= 2
    assert all(0.75 * unit / 2 / 12**0.5 <= size <= 1.25 * unit / 12**0.5 for size in fresh)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("places", [("activation",), ("weight",), ("x", "w"), ("fprop.x", "wgrad.dy")])
def test_a_finer_format_leaves_a_smaller_error(name: str, places: tuple[str, ...]) -> None:
    model, inputs = made(name)
    exact = step_of(model, inputs)
    result = []
    rounds_operands = set(places) - {"activation", "weight"}
    # The operands of a sparse product cannot be rounded: without this rule, the plan raises.
    kept = [{"match": "*", "op": "sparse_matmul", "keep": True}] if name == "gcn" and rounds_operands else []
    for target in ("e5m2", "fp16"):
        with attached(model, {"match": "*", **dict.fromkeys(places, target)}, *kept):
            seen = step_of(model, inputs)
        gradients = [torch.cat([grad.flatten() for grad in item[1:]]) for item in (seen, exact)]
        result.append((error(seen[0], exact[0]), error(*gradients)))
    for coarse, fine in zip(*result, strict=True):
        assert 0 < fine < coarse / 2


# --- compiled ---

#: A part of each model (tracing every rounding of a whole one takes a minute), and all its kinds of operations.
PARTS = {"resnet8": "layer2.0", "gpt2": "transformer.h.1", "bert": "bert.encoder.layer.1", "lstm": "lstm"}


@pytest.mark.parametrize("name", PARTS)
def test_a_compiled_model_equals_the_eager_one(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = made(name)
    rules = [{"match": PARTS[name], "weight": "e4m3", "activation": "e4m3", "grad_activation": "e5m2"}]
    if name == "lstm":  # which compiles only where it is opened
        rules = [{"match": "lstm", "op": "lstm", "x": "e4m3", "w": "e3m2"}]
    plain = step_of(model, inputs)
    with attached(model, *rules, example=inputs):
        eager = step_of(model, inputs)
        seen = step_of(model, inputs, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert not same(eager, plain)
    assert same(seen, eager)


def test_inductor_differs_by_its_own_arithmetic_and_the_roundings_that_this_flips() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # What a transformer is made of, but for attention: each kernel takes the C++ compiler seconds.
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 50)
    )  # fmt: skip

    def both(*rules: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Outputs, eager and compiled, without a backward pass, which takes Inductor as long again."""
        with attached(model, *rules, example=WORDS), torch.no_grad():
            return model(WORDS), torch.compile(model, fullgraph=True)(WORDS)

    plain, compiled = both()
    gap = error(compiled, plain)
    # Weights are the same in both, so that nothing flips, and the gap is that of the plain model (of other numbers).
    eager, compiled = both({"match": "*", "op": "linear", "weight": "e3m2"})
    assert error(compiled, eager) < 4 * gap
    assert error(eager, plain) > 2**-5
    # Activations differ by the gap, and some then round to the neighbour: few, and one step of the format away.
    eager, compiled = both({"match": "*", "op": ["linear", "layer_norm"], "activation": "e4m3"})
    assert error(eager, plain) > 2**-7
    assert torch.equal(q(compiled), compiled)  # the head's output lies on the grid
    assert (compiled != eager).float().mean() < 0.02
    step = 2 ** (torch.floor(torch.log2(eager.abs().clamp(min=2**-6))) - 3)
    assert ((compiled - eager).abs() <= step * 1.001).all()
