from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.analysis.explain import Explanation, explain
from bitplan.errors import BitplanWarning, PlanError
from bitplan.numerics.quantizer import quantize
from bitplan.plans import Plan
from bitplan.runtime.attach import attach


class Net(nn.Module):
    """A convolution, attention over its pixels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x))


IMAGES = torch.randn(2, 3, 6, 6)


def explained(*rules: dict[str, Any], model: nn.Module | None = None, **named: Any) -> dict[str, Explanation]:
    plan = Plan.from_dict({"version": 1, "quantizers": named, "rules": list(rules)})
    return {item.site.name: item for item in explain(model or Net(), plan, IMAGES)}


def test_each_site_gets_its_quantizer_and_the_rule_that_said_so() -> None:
    result = explained({"match": "*", "weight": "e3m2"}, {"match": "head", "weight": "int8", "activation": "bf16"})
    said = {
        name: (str(explanation.quantizer), explanation.rule)
        for name, explanation in result.items()
        if explanation.rule is not None
    }
    assert said == {
        "conv/conv2d.0:weight": ("e3m2", 0),
        "head/linear.0:weight": ("int8", 1),
        "head/linear.0:weight(bias)": ("int8", 1),
        "head/linear.0:activation": ("bf16", 1),
    }
    assert result["conv/conv2d.0:activation"].quantizer is None


def test_keep_has_a_rule_and_no_quantizer() -> None:
    result = explained({"match": "*", "weight": "e3m2"}, {"match": "head", "keep": True})
    kept = result["head/linear.0:weight"]
    assert (kept.quantizer, kept.rule) == (None, 1)
    assert str(kept) == "head/linear.0:weight: left alone (plan: rules[1])"


def test_a_file_is_named_with_its_line() -> None:
    plan = Plan.from_yaml("version: 1\nrules:\n- {match: conv, weight: e3m2}\n", source="own.yaml")
    first = explain(Net(), plan, IMAGES)[0]
    assert str(first) == "conv/conv2d.0:weight: e3m2 (own.yaml:3: rules[0])"


def test_slots_are_sites_too_and_shorthands_reach_both() -> None:
    result = explained({"match": "*", "op": "conv2d", "x": "int8"})
    rounded = [name for name, explanation in result.items() if explanation.quantizer is not None]
    assert rounded == ["conv/conv2d.0:fprop.x", "conv/conv2d.0:wgrad.x"]


def test_the_loss_has_sites() -> None:
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "loss", "activation": "bf16"}]})
    rounded = [item.site.op for item in explain(Net(), plan, IMAGES, lambda y: y.square().mean()) if item.quantizer]
    assert rounded == ["square.0", "mean.0"]


def test_one_of_several_equal_operations_can_be_meant() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ReLU())
    result = explained({"match": "2", "op": "relu.0", "activation": "bf16"}, model=model)
    assert [name for name, explanation in result.items() if explanation.quantizer] == ["2/relu.0:activation"]


@pytest.mark.parametrize("op", ["scaled_dot_product_attention", "matmul"])
def test_attention_is_listed_by_its_insides_where_a_rule_asks_for_them(op: str) -> None:
    result = explained({"match": "*", "op": op, "x": "int8"})
    rounded = [name for name, explanation in result.items() if explanation.quantizer is not None]
    assert [name for name in rounded if "fprop" in name] == ["/matmul.0:fprop.x", "/matmul.1:fprop.x"]
    assert "/softmax.0:activation" in result


def test_attention_is_left_whole_where_no_rule_asks() -> None:
    result = explained({"match": "*", "activation": "bf16"}, {"match": "*", "op": "linear", "x": "int8"})
    assert "/scaled_dot_product_attention.0:activation" in result
    assert "/softmax.0:activation" not in result


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"match": "haed", "weight": "e3m2"}, r"no module fits 'haed'; the closest are head\.$"),
        ({"match": "*", "op": "conv3d", "x": "e3m2"}, r"no operation fits 'conv3d'; the closest are conv2d\.$"),
        ({"match": "head", "op": "conv2d", "x": "e3m2"}, r"no such operation runs in such a module\.$"),
        (
            {"match": "*", "op": "relu", "activation": "e3m2", "weight": "e3m2"},
            r"^plan: rules\[1\]: nothing under the rule has 'weight'; its operations \(relu\) have activation, "
            r"grad_activation\.$",
        ),
        ({"match": "*", "op": "relu", "dy": "e3m2"}, r"nothing under the rule has 'dy'"),
        ({"match": "*", "op": "softmax", "fprop": "e3m2"}, r"nothing under the rule has 'fprop'; .*\(softmax\)"),
    ],
    ids=str,
)
def test_a_rule_about_nothing_raises_or_if_it_is_not_strict_warns(rule: dict[str, Any], sentence: str) -> None:
    good = {"match": "*", "weight": "bf16"}
    with pytest.raises(PlanError, match=sentence):
        explained(good, rule)
    with pytest.warns(BitplanWarning, match=sentence):
        result = explained(good, {**rule, "strict": False})
    assert str(result["head/linear.0:weight"].quantizer) == "bf16"


def test_frozen_weights_have_no_gradient_to_round() -> None:
    model = Net()
    model.head.requires_grad_(False)
    with pytest.raises(PlanError, match="nothing under the rule has 'grad_weight'"):
        explained({"match": "head", "grad_weight": "bf16"}, model=model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_rule_that_covers_a_scripted_module_raises_unless_it_keeps_it() -> None:
    scripted = torch.jit.trace(nn.Linear(6, 6), IMAGES)
    model = nn.Sequential(nn.ReLU(), scripted)
    rule = {"match": "*", "activation": "bf16"}
    with pytest.raises(PlanError, match=r"^1 is scripted, .* covers it"):
        explained(rule, model=model)
    result = explained(rule, {"match": "1", "keep": True}, model=model)
    assert [name for name, explanation in result.items() if explanation.quantizer] == ["0/relu.0:activation"]


def test_a_plan_that_is_right_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitplanWarning)
        result = explained({"match": "*", "weight": "bf16", "grad_weight": "bf16"}, {"match": "head", "keep": True})
    assert any(item.quantizer is not None for item in result.values())


def test_the_model_is_as_before() -> None:
    model = Net()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    explained({"match": "*", "weight": "e3m2"}, model=model)
    assert type(model) is Net
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_rule_for_the_second_user_of_a_weight_has_an_effect() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x))
            return y

    plan = Plan.from_dict({"version": 1, "rules": [{"match": "two", "weight": "e4m3", "grad_weight": "bf16"}]})
    model, x = Tied(), torch.randn(2, 4)
    explain(model, plan, x)  # does not raise
    plain = model(x)
    with attach(model, plan, example=x):
        assert torch.equal(model(x), model.one(x) @ quantize(model.two.weight, "e4m3").t())
        assert not torch.equal(model(x), plain)
