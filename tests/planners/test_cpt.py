"""The plan of cyclic precision training: its quantiser, what it leaves alone, and its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan import attach, explain
from bitplan.errors import PlanError, ScheduleError
from bitplan.lab.targets import load_target
from bitplan.planners import cpt_plan
from bitplan.planners.cpt import Widths, classify_model, find_exempt_modules, make_plan, record_operations
from bitplan.plans import Plan
from bitplan.plans.schedules import schedule


@pytest.mark.parametrize(
    ("target", "kind", "kept"),
    [
        ("resnet20", "images", ["fc"]),
        ("mobilenet-v2", "images", ["fc"]),
        ("digits", "images", ["fc"]),
        (
            "resnet50",
            "large images",
            ["conv1", *(f"layer{number}.0.shortcut.0" for number in (1, 2, 3, 4)), "fc"],
        ),
        ("squeezenet", "convolutional", []),
        ("detection", "convolutional", []),  # pyramid and heads, too
        ("lstm", "recurrent", []),
        ("gpt-tiny", "transformer", []),
        ("gcn", "graph", []),
        ("graph", "graph", []),
        ("coauthor-cs", "graph", []),
    ],
)
def test_what_is_left_alone_follows_from_the_kind_of_model(target: str, kind: str, kept: list[str]) -> None:
    chosen = load_target(target, shapes_only=True)
    operations = record_operations(chosen.model, chosen.batch, chosen.loss)
    assert classify_model(operations) == kind
    assert find_exempt_modules(operations, classify_model(operations)) == kept
    plan = cpt_plan(chosen.model, chosen.batch, chosen.loss, schedule="RTH", low=4, high=6, cycles=4)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.schedules == {"cpt": schedule("RTH", low=4, high=6, cycles=4)}
    rows = explain(chosen.model, plan, chosen.batch, chosen.loss)  # which raises where a rule has no effect
    products = {row.site.op.split(".")[0] for row in rows if row.site.role == "fprop.w" and row.quantizer is not None}
    assert products
    roles = ("weight", "activation", "grad_weight", "grad_activation")
    for row in rows:
        if row.site.role in roles or row.site.module in kept:
            assert row.quantizer is None
    if kind == "transformer":
        (inner,) = {row.words for row in rows if row.site.op.startswith("matmul") and row.site.role == "fprop.w"}
        assert inner == "int RTH 4-6 x4 tensor minmax eval=ema"
    if kind == "recurrent":
        assert any(row.site.op.startswith("linear") and row.site.module == "lstm" for row in rows)


def vision_transformer(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=5,
        attn_implementation=attention,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_vision_transformer_is_a_transformer(attention: str) -> None:
    """It begins with a convolution, and its attention is quantised as BERT's is."""
    model, x = vision_transformer(attention), torch.randn(2, 3, 32, 32)
    operations = record_operations(model, x)
    assert classify_model(operations) == "transformer"
    assert find_exempt_modules(operations, "transformer") == []
    rows = explain(model, cpt_plan(model, x, schedule="CR", low=3, high=8), x)
    inner = [row for row in rows if row.site.op.startswith("matmul") and row.site.role in ("fprop.x", "fprop.w")]
    assert len(inner) == 2 * 2 * 2  # layers, products, operands
    assert {row.words for row in inner} == {"int CR 3-8 x8 tensor minmax eval=ema"}
    patches = [row for row in rows if row.site.op.startswith("conv") and row.site.role == "fprop.w"]
    assert [row.words for row in patches] == ["int CR 3-8 x8 channel minmax"]


def test_a_convolutional_network_with_some_attention_stays_one() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2, batch_first=True)
            self.wide, self.fc = nn.Conv2d(8, 64, 3), nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.wide(self.conv(x)).mean((2, 3))
            tokens = self.conv(x)[:, :, 0].transpose(1, 2)
            out: torch.Tensor = self.fc(y + self.attention(tokens, tokens, tokens)[0].mean())
            return out

    assert classify_model(record_operations(Mixed(), torch.randn(2, 3, 16, 16))) == "images"


def test_the_quantiser() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    decision = cpt_plan(net, torch.randn(2, 3, 8, 8)).decide("0", "conv2d")
    assert decision["fprop.w"].words == decision["dgrad.w"].words == "int CR 3-8 x8 channel minmax"
    assert decision["fprop.x"].words == decision["wgrad.x"].words == "int CR 3-8 x8 tensor minmax eval=ema"
    assert decision["dgrad.dy"].words == decision["wgrad.dy"].words == "int8 tensor minmax stochastic"
    for first, second in (("fprop.w", "dgrad.w"), ("fprop.x", "wgrad.x"), ("dgrad.dy", "wgrad.dy")):
        assert decision[first].share == decision[second].share is not None  # rounded once, and shared


def test_its_numbers_are_those_of_the_papers() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(6, 5), torch.randn(4, 6)

    def rounded(values: torch.Tensor, bits: int, dims: tuple[int, ...]) -> torch.Tensor:
        low, high = values.amin(dims, keepdim=True), values.amax(dims, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
        return ((values - low) / scale).clamp(0, 2**bits - 1).round() * scale + low

    plan = cpt_plan(net, x, schedule="LR", low=3, high=8, cycles=1)
    chosen = schedule("LR", low=3, high=8, cycles=1)
    with attach(net, plan, steps=10, example=x) as run:
        for step in range(10):
            bits = chosen.bits(step, 10)
            expected = rounded(x, bits, (0, 1)) @ rounded(net.weight.detach(), bits, (1,)).T + net.bias.detach()
            torch.testing.assert_close(net(x).detach(), expected)
            run.step()


def test_features_before_neighbour_sums() -> None:
    chosen = load_target("gcn", shapes_only=True)
    plan = cpt_plan(chosen.model, chosen.batch, chosen.loss, quantized_aggregation=True)
    rows = explain(chosen.model, plan, chosen.batch, chosen.loss)
    before = [row for row in rows if row.site.role == "activation" and row.quantizer is not None]
    assert [row.site.name for row in before] == [f"layers.{number}/linear.0:activation" for number in range(3)]
    assert {row.words for row in before} == {"int CR 3-8 x8 vector minmax"}
    with pytest.raises(PlanError, match="sums over no neighbours"):
        cpt_plan(nn.Linear(3, 3), torch.randn(2, 3), quantized_aggregation=True)


@pytest.mark.parametrize(
    ("model", "places"),
    [("gcn", ["sums.0/mul.0", "sums.1/mul.0"]), ("sage", ["layers.0.others/linear.0", "layers.1.others/linear.0"])],
)
def test_features_and_gradients_before_the_neighbour_sums_of_tasks(model: str, places: list[str]) -> None:
    chosen = load_target("graph", shapes_only=True, settings=[f"model={model}"])
    plan = cpt_plan(chosen.model, chosen.batch, chosen.loss, quantized_aggregation=True)
    rows = explain(chosen.model, plan, chosen.batch, chosen.loss)
    result = {row.site.name: row.words for row in rows if row.site.role.endswith("activation") and row.quantizer}
    assert result == {
        f"{place}:{role}": text
        for place in places
        for role, text in (
            ("activation", "int CR 3-8 x8 vector minmax"),
            ("grad_activation", "int8 tensor minmax stochastic"),
        )
    }


def test_sums_at_the_root_of_a_model_mean_no_module_beneath() -> None:
    class Beneath(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.beneath = nn.Linear(4, 4), Beneath()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.beneath(self.first(x)) * 2
            return torch.zeros_like(x).index_add(0, torch.arange(len(x)), x)

    net, x = Sums(), torch.randn(3, 4)
    plan = cpt_plan(net, x, quantized_aggregation=True)
    rounded = [row.site.name for row in explain(net, plan, x) if row.site.role == "activation" and row.quantizer]
    assert rounded == ["/mul.0:activation"]


def test_widths_of_their_own_for_every_rounding() -> None:
    early = schedule("deficit", low=3, high=8, start=0, end="25%")
    net, x = nn.Linear(6, 5), torch.randn(4, 6)
    plan = make_plan(record_operations(net, x), Widths(early, None, schedule("CR", low=3, high=8)))
    assert list(plan.schedules) == ["cpt", "cpt2"]
    assert plan.decide("", "linear")["fprop.x"].quantizer is None
    assert plan.decide("", "linear")["dgrad.dy"].words == "int CR 3-8 x8 tensor minmax stochastic"


def test_mistakes_are_sentences() -> None:
    with pytest.raises(PlanError, match="nothing to quantise"):
        cpt_plan(nn.ReLU(), torch.randn(2, 3))
    with pytest.raises(ScheduleError, match="there is no schedule"):
        cpt_plan(nn.Linear(3, 3), torch.randn(2, 3), schedule="XX")
    with pytest.raises(PlanError, match="a symmetric integer needs 2 to 16 bits, not 1"):
        cpt_plan(nn.Linear(3, 3), torch.randn(2, 3), low=1)
