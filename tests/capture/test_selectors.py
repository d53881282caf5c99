"""What selectors find. The truth is the architecture: which layers a Llama gates, where a ResNet adds, and so on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.analysis.explain import explain_selections
from bitplan.analysis.targets import Target
from bitplan.capture.recording import Operation, record
from bitplan.capture.selectors import OperationGraph, expand_plan, expand_selectors, fold_sites, plan_for_model
from bitplan.errors import PlanError
from bitplan.lab.targets import load_target
from bitplan.plans import PLACES, Plan
from bitplan.plans.match import SELECTORS


def selected(model: nn.Module, batch: Any, *names: str) -> list[str]:
    """The tensors that fulfil all selectors, folded over layers."""
    plan = Plan.from_dict({"version": 1, "rules": [{"select": list(names), "activation": "e3m2", "strict": False}]})
    (selection,) = explain_selections(model, plan, batch) if _finds(model, batch, plan) else (None,)
    return [] if selection is None else selection.folded


def _finds(model: nn.Module, batch: Any, plan: Plan) -> bool:
    try:
        expand_plan(plan, model, batch)
    except PlanError:
        return False
    return True


def plan_of(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


class SwiGLU(nn.Module):
    """A block with a gate, written as in Llama."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def blocks(count: int = 3) -> nn.Module:
    layers = nn.Sequential(*(SwiGLU() for _ in range(count)))
    return nn.Sequential(OrderedDict(stem=nn.Linear(4, 8), layers=layers, head=nn.Linear(8, 5)))


def function_model(function: Callable[[Tensor, nn.Linear], Tensor]) -> nn.Module:
    """A model of one linear layer and a function that calls it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.fc)

    return Model()


X = torch.zeros(2, 8)


# --- each selector on models written for it


def test_a_gated_block_is_known_by_its_structure() -> None:
    model, batch = blocks(), torch.zeros(2, 4)
    assert selected(model, batch, "weight-product") == [
        "stem/linear.0",
        "layers.*.gate/linear.0 (3)",
        "layers.*.up/linear.0 (3)",
        "layers.*.down/linear.0 (3)",
        "head/linear.0",
    ]
    assert selected(model, batch, "gate") == ["layers.*.gate/linear.0 (3)", "layers.*.up/linear.0 (3)"]
    assert selected(model, batch, "residual") == ["layers.*/add.0 (3)"]
    assert selected(model, batch, "first-product") == ["stem/linear.0"]
    assert selected(model, batch, "last-product") == ["head/linear.0"]
    assert selected(model, batch, "norm-readers") == ["stem/linear.0", "layers.*/add.0 (2)"]
    assert selected(model, batch, "weight-product", "pointwise-readers") == [
        "layers.*.gate/linear.0 (3)",
        "layers.*.up/linear.0 (3)",
        "layers.*.down/linear.0 (3)",
    ]
    assert selected(model, batch, "weight-product", "nonlinear-readers") == ["layers.*.gate/linear.0 (3)"]
    assert selected(model, batch, "widening", "not gate") == ["stem/linear.0"]
    # The sums are kept by norms, the halves by silu and mul; what down returns is only added.
    assert selected(model, batch, "weight-product", "saved") == [
        "stem/linear.0",
        "layers.*.gate/linear.0 (3)",
        "layers.*.up/linear.0 (3)",
    ]
    assert selected(model, batch, "residual", "saved") == ["layers.*/add.0 (3)"]


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT adds it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0
        return y


def test_a_gate_is_found_behind_adapters() -> None:
    model, batch = blocks(), torch.zeros(2, 4)
    for layer in model.get_submodule("layers"):
        for name in ("gate", "up", "down"):
            setattr(layer, name, Adapted(getattr(layer, name)))
    assert selected(model, batch, "gate") == ["layers.*.gate/add.0 (3)", "layers.*.up/add.0 (3)"]
    assert selected(model, batch, "widening", "nonlinear-readers", "pointwise-readers") == ["layers.*.gate/add.0 (3)"]
    assert selected(model, batch, "residual") == ["layers.*/add.0 (3)"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, fc: F.silu((y := fc(x).chunk(2, -1))[0]) * y[1],
        lambda x, fc: _slices(fc(x)),
        lambda x, fc: _slices(fc(x).double()),
        lambda x, fc: F.glu(fc(x)),
        lambda x, fc: _gelu((y := fc(x).chunk(2, -1))[0]) * y[1],
    ],
)
def test_halves_of_one_product_are_a_gate(function: Any) -> None:
    assert selected(function_model(function), X, "gate") == ["fc/linear.0"]


def _slices(y: Tensor) -> Tensor:
    return torch.sigmoid(y[..., :4]) * y[..., 4:]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3))))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, fc: _gelu(fc(x)),
        lambda x, fc: (y := fc(x)) * torch.sigmoid(1.702 * y),
        lambda x, fc: (y := fc(x)[..., :4]) * torch.sigmoid(y),
        lambda x, fc: fc(x) * x,
    ],
)
def test_a_function_of_one_tensor_is_no_gate(function: Any) -> None:
    model = function_model(function)
    assert selected(model, X, "gate") == []
    assert selected(model, X, "residual") == []


def test_a_quick_gelu_reads_its_tensor_by_a_nonlinear_function() -> None:
    model = function_model(lambda x, fc: (y := fc(x)) * torch.sigmoid(1.702 * y))
    assert selected(model, X, "product", "nonlinear-readers") == ["fc/linear.0"]
    assert selected(function_model(lambda x, fc: fc(x) * 2 + 1), X, "product", "nonlinear-readers") == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, fc: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
        lambda x, fc: x / (x * x).mean(-1, keepdim=True).add(1e-6).sqrt(),
        lambda x, fc: (x - (m := x.mean(-1, keepdim=True))) / torch.sqrt((x - m).pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, fc: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6),
        lambda x, fc: F.rms_norm(x, (8,)),
        lambda x, fc: F.normalize(x, dim=-1),
    ],
)
def test_norms_are_known_however_they_are_written(function: Any) -> None:
    model = function_model(lambda x, fc: function(fc(x), fc))
    assert selected(model, X, "product", "norm-readers") == ["fc/linear.0"]
    assert selected(model, X, "product", "pointwise-readers") == []


@pytest.mark.parametrize(
    "function", [lambda x, fc: fc(x).sigmoid().sqrt() * fc(x), lambda x, fc: fc(x).exp().mean(-1).sqrt()]
)
def test_a_root_of_something_else_is_no_norm(function: Any) -> None:
    assert selected(function_model(function), X, "product", "norm-readers") == []


def test_residual_sums_need_a_branch_that_mixes_positions_or_features() -> None:
    def net(x: Tensor, fc: nn.Linear) -> Tensor:
        y = fc(x)  # x + fc(x): a residual sum with the model's own input
        y = x + y
        y = y + torch.tanh(y)  # no product in the branch
        return 0.5 * y + fc(y)  # scaled, as in DeepNorm

    assert selected(function_model(net), X, "residual") == ["/add.0", "/add.2"]


def test_a_projected_shortcut_is_residual_and_a_low_rank_update_is_not() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv1 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
            self.conv2, self.shortcut = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(4, 8, 1, 2)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            y = self.conv2(F.relu_(self.conv1(x)))
            y += self.norm(self.shortcut(x))
            return F.relu_(y)

    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 0.5 * self.b(self.a(F.dropout(x, 0.1)))

    assert selected(Projected(), torch.zeros(2, 3, 8, 8), "residual") == ["/add.0"]
    assert selected(LoRA(), X, "residual") == []


def test_saved_follows_what_autograd_keeps() -> None:
    def net(x: Tensor, fc: nn.Linear) -> Tensor:
        y = fc(x)
        z = y * 2.0  # keeps nothing
        return torch.relu(z) + z.detach()  # relu keeps its result

    model = function_model(net)
    assert selected(model, X, "saved") == ["/relu.0"]
    model.fc.requires_grad_(False)
    assert selected(model, X, "saved") == []


@pytest.mark.parametrize(
    "op", ["gelu", "silu", "relu", "tanh", "sigmoid", "softmax", "exp", "mul", "add", "layer_norm"]
)
def test_saved_agrees_with_the_tensors_that_torch_saves(op: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda t: t.softmax(-1),
        "mul": lambda t: t * t.neg(),
        "add": lambda t: t + t.neg(),
        "layer_norm": lambda t: F.layer_norm(t, (8,)),
    }
    function = functions.get(op) or getattr(F, op, None) or getattr(torch, op)
    model = function_model(lambda x, fc: function(fc(x)))
    pointers: set[int] = set()
    y = model.fc(torch.randn(2, 8)).detach().requires_grad_()  # type: ignore[operator]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pointers.add(t.data_ptr()) or t, lambda t: t):
        function(y)
    assert ("fc/linear.0" in selected(model, X, "saved")) == (y.data_ptr() in pointers)


def test_weights_that_are_computed_are_weights_and_no_products_of_activations() -> None:
    def net(x: Tensor, fc: nn.Linear) -> Tensor:
        weight = F.layer_norm(fc.weight, (8,)) @ fc.weight  # of parameters alone
        return F.linear(F.linear(x, weight), fc.weight * 2) @ x.mT

    model = function_model(net)
    assert selected(model, X, "weight-product") == ["/linear.0", "/linear.1"]
    assert selected(model, X, "product") == ["/matmul.0", "/linear.0", "/linear.1", "/matmul.1"]
    assert selected(model, X, "last-product") == ["/linear.1"]


def test_several_heads_are_all_last_and_what_no_output_needs_is_not() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.boxes, self.classes, self.unused = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = F.relu(self.body(x))
            self.unused(x)
            return {"boxes": self.boxes(x), "classes": self.classes(x).log_softmax(-1), "features": x}

    assert selected(Heads(), X, "last-product") == ["boxes/linear.0", "classes/linear.0"]


def test_a_router_is_known_by_the_ranking_of_its_scores() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            weights, indices = self.router(x).softmax(-1).topk(1)
            return weights * torch.where(indices == 0, self.first(x), self.second(x))

    assert selected(Experts(), X, "router") == ["router/linear.0"]


def test_a_module_that_runs_twice_is_judged_by_both_calls() -> None:
    def net(x: Tensor, fc: nn.Linear) -> Tensor:
        return F.layer_norm(fc(F.gelu(fc(x))), (8,))

    model = function_model(net)
    assert selected(model, X, "product", "nonlinear-readers") == ["fc/linear.0"]  # in one call
    assert selected(model, X, "product", "pointwise-readers") == []  # not in both


def test_size_conditions_count_elements() -> None:
    model, batch = blocks(1), torch.zeros(2, 4)
    rule = {"select": "product", "activation": "e4m3"}
    assert explain_selections(model, plan_of({**rule, "min_elements": 32}), batch)[0].sites == (
        "layers.0.gate/linear.0",
        "layers.0.up/linear.0",
    )
    assert explain_selections(model, plan_of({**rule, "max_elements": 10}), batch)[0].sites == ("head/linear.0",)


def test_constants_are_chosen_only_where_the_rule_wants_them() -> None:
    class Angles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(8).float().cos()

    rule = {"match": "*", "min_elements": 1, "activation": "e4m3"}
    (found,) = explain_selections(Angles(), plan_of(rule), X)
    assert found.sites == ("/mul.0",)
    (found,) = explain_selections(Angles(), plan_of({**rule, "constants": True}), X)
    assert found.sites == ("/cos.0", "/mul.0")


def test_every_selector_has_a_meaning_for_every_model() -> None:
    graph = OperationGraph(record(blocks(1), torch.zeros(2, 4)))
    assert all(graph.numbers(name) <= set(range(len(graph.operations))) for name in SELECTORS)
    assert {name for name in SELECTORS if not graph.numbers(name)} == {"router"}


# --- expansion


def test_a_rule_becomes_one_of_exact_paths_for_each_numbered_operation() -> None:
    model, batch = blocks(2), torch.zeros(2, 4)
    plan = plan_of(
        {"select": ["weight-product", "not last-product"], "x": "e4m3", "w": "e4m3", "dy": "e5m2"},
        {"match": "layers.0", "select": "residual", "activation": "e4m3"},
    )
    expanded = plan_for_model(plan, model, batch)
    assert [rule.to_data() for rule in expanded.rules] == [
        {
            "match": [r"re:stem", *(rf"re:layers\.{n}\.{name}" for n in (0, 1) for name in ("gate", "up", "down"))],
            "op": "linear.0",
            "x": "e4m3",
            "w": "e4m3",
            "dy": "e5m2",
        },
        {"match": r"re:layers\.0", "op": "add.0", "activation": "e4m3"},
    ]
    assert not expanded.has_selectors
    assert [rule.where for rule in expanded.rules] == [rule.where for rule in plan.rules]
    assert Plan.from_yaml(expanded.to_yaml()) == expanded


def test_selectors_give_the_numbers_of_the_rules_that_name_layers() -> None:
    torch.manual_seed(0)
    model, batch = blocks(), torch.randn(16, 4)
    by_name = plan_of(
        {"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"},
        {"match": ["re:.*gate", "re:.*up"], "op": "linear", "activation": "e3m2"},
        {"match": "*", "op": "add", "activation": "e4m3"},
        {"match": "head", "keep": True},
    )
    by_select = plan_of(
        {"select": "weight-product", "x": "e4m3", "w": "e4m3", "dy": "e5m2"},
        {"select": "gate", "activation": "e3m2"},
        {"select": "residual", "activation": "e4m3"},
        {"select": "last-product", "keep": True},
    )

    def results(plan: Plan) -> list[Tensor]:
        model.zero_grad()
        with bp.attach(model, plan, example=batch):
            loss = model(batch).square().mean()
            loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]

    expected = results(by_name)
    assert all(map(torch.equal, results(by_select), expected))
    assert not torch.equal(expected[0], model(batch).square().mean())


def test_a_plan_with_selectors_needs_an_example() -> None:
    with pytest.raises(PlanError, match="example="):
        bp.attach(blocks(), plan_of({"select": "product", "x": "e4m3"}))
    with pytest.raises(PlanError, match="expand_selectors"):
        plan_of({"select": "product", "x": "e4m3"}).decide("fc", "linear")


def test_a_rule_that_finds_nothing_raises_and_an_optional_one_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(PlanError, match=r"rules\[0\].*gate"):
        bp.attach(model, plan_of({"select": "gate", "activation": "e4m3"}), example=X)
    product = {"select": "product", "x": "e4m3"}
    optional = {"select": "gate", "activation": "e4m3", "strict": False}
    expanded = plan_for_model(plan_of(product, optional), model, X)
    assert [rule.op for rule in expanded.rules] == [("linear.0",)]
    with pytest.raises(PlanError, match="no tensor of the model"):
        plan_for_model(plan_of(optional), model, X)


def test_a_rule_that_later_rules_override_everywhere_raises() -> None:
    rules = [{"select": "product", "x": "e4m3"}, {"match": "*", "op": "linear", "keep": True}]
    with pytest.raises(PlanError, match=r"rules\[0\].*no effect"):
        plan_for_model(plan_of(*rules), blocks(1), torch.zeros(2, 4))
    # An exception for one of several operations is none: the last product is the only addmm here.
    mixed = function_model(lambda x, fc: torch.addmm(fc.bias, F.relu(fc(x)), fc.weight))
    plan = plan_of({"select": "product", "x": "e4m3"}, {"select": "last-product", "keep": True})
    with bp.attach(mixed, plan, example=X) as run:
        assert [rule.op for rule in run.plan.rules] == [("linear.0",), ("addmm.0",)]


def test_keys_that_an_operation_does_not_have_are_left_out_of_its_rule() -> None:
    plan = plan_of({"select": "saved", "x": "e4m3", "activation": "e3m2"})
    expanded = plan_for_model(plan, blocks(1), torch.zeros(2, 4))
    keys = {rule.op[0]: [key for key, _ in rule.quantizers] for rule in expanded.rules}
    assert keys["linear.0"] == ["activation", "x"]
    assert keys["silu.0"] == ["activation"]
    with pytest.raises(PlanError, match="'x'"):
        plan_for_model(plan_of({"select": "residual", "x": "e4m3", "activation": "e3m2"}), blocks(1), torch.zeros(2, 4))


def test_an_optional_rule_whose_format_the_tensors_have_already_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    model, batch = blocks(1).bfloat16(), torch.zeros(2, 4, dtype=torch.bfloat16)
    rules = [{"select": "gate", "activation": "e4m3"}, {"select": "residual", "activation": "bf16", "strict": False}]
    with bp.attach(model, plan_of(*rules), example=batch) as run:
        assert [rule.op for rule in run.plan.rules] == [("linear.0",)]
    with bp.attach(model.float(), plan_of(*rules), example=batch.float()) as run:
        assert [rule.op for rule in run.plan.rules] == [("linear.0",), ("add.0",)]
    assert not recwarn.list


def test_products_beside_attention_keep_their_numbers_when_it_is_decomposed() -> None:
    def net(x: Tensor, fc: nn.Linear) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x)
        return y @ fc.weight

    model, batch = function_model(net), torch.randn(1, 4, 8)
    expanded, operations = expand_plan(plan_of({"select": "product", "x": "e4m3", "w": "e4m3"}), model, batch)
    # A rule for matmul.0 of that module asks for the products of attention, too: all are numbered anew.
    assert [operation.label for operation in operations if operation.operands] == [
        "/matmul.0",
        "/matmul.1",
        "/matmul.2",
    ]
    assert sorted(rule.op[0] for rule in expanded.rules) == ["matmul.0", "matmul.1", "matmul.2"]
    with bp.attach(model, plan_of({"select": "product", "x": "e4m3", "w": "e4m3"}), example=batch) as run:
        assert run.coverage().rounded_products == 3


def test_a_run_resumes_under_the_same_selectors() -> None:
    plan = plan_of({"select": "product", "x": {"format": "e4m3", "scale": "tensor", "history": 4}})
    model, batch = blocks(1), torch.randn(4, 4)
    with bp.attach(model, plan, example=batch) as run:
        model(batch).sum().backward()
        run.step()
        state = run.state_dict()
    with bp.attach(model, plan, example=batch) as run:
        run.load_state_dict(state)
        assert run.state_dict()["step"] == 1
    with (
        bp.attach(model, plan_of({"select": "gate", "x": "e4m3"}), example=batch) as run,
        pytest.raises(PlanError, match="another plan"),
    ):
        run.load_state_dict(state)


def test_costs_and_memory_take_plans_with_selectors() -> None:
    model, batch = blocks(2), torch.randn(64, 4)
    plan = plan_of({"select": "weight-product", "x": "e4m3", "w": "e4m3", "dy": "e4m3"})
    loss = nn.CrossEntropyLoss()
    pair = (batch, torch.zeros(64, dtype=torch.long))
    assert bp.estimate_cost(model, plan, pair, loss).relative == 1 / 16
    packed = plan_of({"select": "saved", "activation": "e4m3"})
    plain = bp.estimate_memory(model, pair, loss, "sgd")
    assert bp.estimate_memory(model, pair, loss, "sgd", packed, "packed").activations < plain.activations
    rows = bp.explain(model, plan, pair, loss)
    assert {row.where for row in rows if row.quantizer is not None} == {plan.rules[0].where}


def test_the_expansion_of_hundreds_of_modules_compares_whole_paths() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    operations = record(model, torch.zeros(1, 2))
    plan = expand_selectors(plan_of({"select": ["product", "not last-product"], "x": "e4m3"}), operations)
    (rule,) = plan.rules
    assert len(rule.match) == 499
    assert plan.decide("7", "linear.0")["fprop.x"].quantizer is not None
    assert plan.decide("499", "linear.0")["fprop.x"].quantizer is None
    assert plan.decide("7.inner", "linear.0")["fprop.x"].quantizer is None
    (matcher,) = plan._matchers
    assert not matcher.modules  # no expression is tried


def test_folding_keeps_names_with_digits_apart() -> None:
    assert fold_sites(["a.0.b1/x.0", "a.1.b1/x.0", "a.1.b2/x.0", "/x.1"]) == ["a.*.b1/x.0 (2)", "a.1.b2/x.0", "/x.1"]


# --- the plans of the benchmarks, which name layers, and the presets, which do not


@pytest.mark.parametrize(
    ("preset", "file", "target", "differs"),
    [
        ("packed-fp8", "packed-cnn", "resnet20", set()),
        # The sum of the embeddings begins the residual stream, and is no residual sum.
        ("packed-fp8-mlp", "packed-gpt", "gpt-tiny", {"/add.0"}),
        ("fp8-train-small", "native-fp8-gpt", "gpt-tiny", {"/add.0"}),
        ("fp8-train", "native-fp8-packed", "blocks", {"head/linear.0"}),  # the benchmark has no head
    ],
)
def test_presets_decide_as_the_plans_of_the_benchmarks(preset: str, file: str, target: str, differs: set[str]) -> None:
    loaded = Target(blocks(), torch.zeros(2, 4)) if target == "blocks" else load_target(target, shapes_only=True)
    by_name = Plan.load(Path(__file__).parents[2] / "benchmarks" / "plans" / f"{file}.yaml")
    by_select, operations = expand_plan(Plan.preset(preset), loaded.model, loaded.batch, loaded.loss)
    assert by_select.optimizer_rule == by_name.optimizer_rule

    def quantizers(plan: Plan, operation: Operation) -> list[Any]:
        decision = plan.decide(operation.module, f"{operation.op}.{operation.index}")
        return [decision[place].quantizer for place in PLACES]

    others = {op.label for op in operations if quantizers(by_select, op) != quantizers(by_name, op)}
    assert others == differs
    assert any(spec is not None for op in operations for spec in quantizers(by_select, op))
