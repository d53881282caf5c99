"""Code of the user's own: quantizers and schedules that plans name, planners, and error metrics."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp
from bitplan.analysis.measure import register_metric
from bitplan.cli import main
from bitplan.errors import BitplanError, MetricError, PlanError, RunError
from bitplan.lab.compare import find_suite
from bitplan.lab.tasks.registry import find_task
from bitplan.planners import register_planner
from bitplan.plans import Plan

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "extending.md").read_text()
#: The quantizers of the documentation.
SOURCE = PAGE.split('```python title="my_quantizers.py"\n')[1].split("```")[0]
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported."""
    name = "own_quantizers"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def planned(*rules: dict[str, Any], **document: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules), **document})


def imported(name: str) -> ModuleType:
    return sys.modules[name]


# --- consent ---


def test_reading_checking_and_writing_a_plan_imports_nothing(module: str, tmp_path: Path) -> None:
    plan = planned(
        {"match": "*", "op": "linear", "weight": {"format": "int4", "function": f"{module}:LearnedStep"}},
        {"match": "*", "op": "linear", "x": {"format": "int", "bits": "mine", "scale": "tensor"}},
        schedules={"mine": {"name": "function", "function": f"{module}:warm_up", "low": 4, "high": 8}},
    )
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == Plan.from_json(plan.to_json()) == plan
    assert [site.words for site in bp.explain(net(), plan, X) if site.quantizer is not None]
    with pytest.raises(PlanError, match=f"{module}:LearnedStep, {module}:warm_up.*allow_code=True"):
        bp.attach(net(), plan, steps=10)
    with pytest.raises(PlanError, match="--allow-code"):
        plan.schedules["mine"].bits(0, 10)
    assert module not in sys.modules
    with bp.attach(net(), plan, steps=10, example=X, allow_code=True) as run:
        assert module in sys.modules
        assert run.plan.schedules["mine"].table(10).tolist() == [8] + [4] * 9
        assert Plan.from_yaml(run.plan.to_yaml()) == plan


def test_a_module_that_is_imported_already_is_no_consent() -> None:
    plan = planned({"match": "*", "weight": {"format": "int4", "function": "os:kill"}})
    assert "os" in sys.modules
    with pytest.raises(PlanError, match=r"os:kill.*allow_code"):
        bp.attach(net(), plan)


def test_functions_that_python_code_brings_along_need_no_consent() -> None:
    def halved(x: Tensor, quantize: Any) -> Tensor:
        return x / 2

    plan = planned({"match": "0", "activation": {"format": "fp32", "function": f"{__name__}:missing"}})
    with pytest.raises(PlanError, match="missing"):
        bp.attach(net(), plan, allow_code=True)
    spec = bp.plans.QuantizerSpec("fp32", function=halved)  # type: ignore[arg-type, attr-defined]
    plan = Plan((bp.plans.Rule(("0",), quantizers=(("activation", spec),)),))  # type: ignore[attr-defined]
    model = net()
    expected = model[0](X) / 2
    with bp.attach(model, plan, example=X):
        assert torch.equal(model[0](X), expected)
    with pytest.raises(PlanError, match="keep this plan in Python"):
        plan.save("plan.yaml")


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("math:pi", "no function"),
        ("math:no_such", "no function"),
        ("an-entry-point", "entry points"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_sentence(name: str, token: str) -> None:
    with pytest.raises(PlanError, match=token):
        bp.attach(net(), planned({"match": "*", "weight": {"format": "int4", "function": name}}), allow_code=True)


@pytest.mark.parametrize("name", ["a b", "a:b:c", "a b:c", ":b", "a:", ""])
def test_a_reference_is_a_module_and_a_name(name: str) -> None:
    with pytest.raises(PlanError, match=r"function|empty"):
        planned({"match": "*", "weight": {"format": "int4", "function": name}})


def test_commands_import_code_with_allow_code_only(module: str, tmp_path: Path, capsys: Any) -> None:
    schedule = {"name": "function", "function": f"{module}:warm_up", "low": 4, "high": 8}
    rule = {"match": "*", "op": "linear", "x": {"format": "int", "bits": "mine", "scale": "tensor"}}
    planned(rule, schedules={"mine": schedule}).save(tmp_path / "plan.yaml")
    command = ["cost", "gpt-tiny", "--plan", "plan.yaml", "--steps", "10", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert "--allow-code" in capsys.readouterr().err
    assert module not in sys.modules
    path = list(sys.path)
    with pytest.raises(SystemExit) as ended:
        main(["--allow-code", *command])
    sys.path[:] = path
    assert not ended.value.code
    with pytest.raises(PlanError):  # the consent ends with the command
        Plan.load(tmp_path / "plan.yaml").require_code()


# --- quantizers ---


def test_a_learned_step_has_the_gradients_of_the_same_computation_by_hand(module: str) -> None:
    rule = {"match": "0", "op": "linear", "weight": {"format": "int4", "function": f"{module}:LearnedStep"}}
    model, by_hand = net(), net()
    with bp.attach(model, planned(rule), example=X, allow_code=True) as run:
        assert set(run.quantizer_modules()) == {"0/linear.0:weight", "0/linear.0(bias):weight"}
        optimizer = torch.optim.SGD([*model.parameters(), *run.quantizer_parameters()], 0.1)
        run.count_steps_of([optimizer])
        steps = {name: imported(module).LearnedStep() for name in ("weight", "bias")}
        parameters = [*by_hand.parameters(), *(p for step in steps.values() for p in step.parameters())]
        optimizer_by_hand = torch.optim.SGD(parameters, 0.1)
        int4 = type("Quantize", (), {"format": bp.get_format("int4")})()
        for _ in range(3):
            loss = model(X).square().mean()
            weight, bias = (steps[name](getattr(by_hand[0], name), int4) for name in ("weight", "bias"))
            loss_by_hand = by_hand[2](nn.functional.linear(X, weight, bias).relu()).square().mean()
            assert loss.item() == loss_by_hand.item()
            for value, chosen in ((loss, optimizer), (loss_by_hand, optimizer_by_hand)):
                value.backward()
                chosen.step()
                chosen.zero_grad()
        assert [p.item() for p in run.quantizer_parameters()] == [
            p.item() for s in steps.values() for p in s.parameters()
        ]
        state = run.state_dict()
        first = run.quantizer_parameters()[0].item()
        with torch.no_grad():
            run.quantizer_parameters()[0].fill_(9.0)
        run.load_state_dict(state)
        assert run.quantizer_parameters()[0].item() == first != 0
    resumed = net()
    with bp.attach(resumed, planned(rule), allow_code=True) as run:  # without an example: its objects are made later
        run.load_state_dict(state)
        resumed(X)
        assert run.quantizer_parameters()[0].item() == first
        with pytest.raises(PlanError, match="uncompiled"):
            run.compile()
    assert "quantizers" not in bp.attach(net(), "int8-all").state_dict()


def test_packed_execution_saves_what_the_plans_quantizer_returned_in_few_bits(module: str) -> None:
    activation = {"format": "uint4", "scale": "tensor", "function": f"{module}:Pact"}
    plan = planned({"match": "1", "activation": activation, "grad_activation": {"format": "e5m2", "scale": "tensor"}})
    results = []
    for execution in ("emulate", "packed"):
        model = net()
        with bp.attach(model, plan, example=X, execution=execution, allow_code=True) as run:
            loss = model(X * 20).square().mean()
            if execution == "packed":
                packer = run._execution.packer  # type: ignore[attr-defined]
                assert 0 < packer.packed_bytes < packer.plain_bytes / 6
            loss.backward()
            (bound,) = run.quantizer_parameters()
            results.append((loss, bound.grad, model[0].weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][1] != 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_rounds_operands_forward_and_gradients_backward(module: str, compiled: bool) -> None:
    def quantizer(**options: Any) -> dict[str, Any]:
        return {"format": "int4", "scale": "tensor", "function": f"{module}:hadamard", **options}

    model = net()
    plan = planned({"match": "0", "op": "linear", "x": quantizer(), "w": quantizer(), "dy": quantizer()})
    x = X.clone().requires_grad_()
    with bp.attach(model, plan, example=X, allow_code=True) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        called(x).square().mean().backward()
        table = {str(row.site.role): row for row in run.table() if row.site.module == "0"}
        assert "hadamard" in str(table["fprop.x"])

    def by_hand(tensor: Tensor) -> Tensor:
        rounded: Tensor = imported(module).hadamard(tensor, lambda t: bp.quantize(t, "int4", scale="tensor"))
        return rounded

    reference, leaf = net(), X.clone().requires_grad_()
    y = nn.functional.linear(by_hand(leaf), by_hand(reference[0].weight), reference[0].bias)
    y.register_hook(by_hand)
    reference[2](y.relu()).square().mean().backward()
    assert torch.equal(x.grad, leaf.grad)  # type: ignore[arg-type]
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad)
    assert not torch.equal(by_hand(X), bp.quantize(X, "int4", scale="tensor"))


def test_native_execution_emulates_such_products_and_says_why(module: str) -> None:
    w = {"format": "int8", "scale": "tensor"}
    plan = planned({"match": "*", "op": "linear", "x": {**w, "function": f"{module}:hadamard"}, "w": w, "dy": w})
    with pytest.warns(bp.errors.BitplanWarning, match="hadamard"):
        run = bp.attach(net(), plan, example=X, execution=bp.Native(min_macs=0), allow_code=True)
    assert {fallback.gemm_pass for fallback in run.fallbacks() if "hadamard" in fallback.reason} == {"fprop", "wgrad"}


@pytest.mark.parametrize(
    ("rule", "token"),
    [
        ({"grad_activation": {"format": "int4", "function": "M:LearnedStep"}}, "gradient of what it returns"),
        ({"op": "linear", "fprop.x": {"format": "int4", "function": "M:LearnedStep"}}, "fprop.x"),
        ({"op": "linear", "dy": {"format": "int4", "function": "M:LearnedStep"}}, "class, which learns"),
        ({"weight": {"format": "int4", "function": "M:wrong"}}, "same shape and dtype"),
        ({"weight": {"format": "int4", "function": "M:NoModule"}}, r"torch\.nn\.Module"),
        ({"weight": {"format": "e4m3", "function": "M:hadamard", "promote": {"to": "bf16"}}}, "drop promote"),
    ],
)
def test_misuse_is_said_in_a_sentence(rule: dict[str, Any], token: str, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(
        f"{SOURCE}\ndef wrong(x, quantize):\n    return x[0]\nclass NoModule: pass\n"
    )
    named = {
        key: {**value, "function": value["function"].replace("M", module, 1)} if isinstance(value, dict) else value
        for key, value in rule.items()
    }
    with pytest.raises(BitplanError, match=token):
        run_once(planned({"match": "*", "op": "linear", **named}))


def run_once(plan: Plan) -> None:
    model = net()
    bp.attach(model, plan, example=X, allow_code=True)
    model(X)


# --- planners and metrics ---


def small_weights(model: nn.Module, batch: Any, loss: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "*", "weight": "e4m3"}]}


def two_plans(model: nn.Module, batch: Any, loss: Any) -> dict[str, Any]:
    return {"eight": small_weights(model, batch, loss), "sixteen": "bf16-all"}


def test_auto_tries_the_plans_of_own_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    register_planner("small", small_weights)
    result = bp.auto(net(), X, planners=["small", two_plans], steps=0)
    names = [row.name for row in result.rows if row.family == "planner"]
    assert names == ["small", "eight", "sixteen"]
    assert all(row.outcome is not None for row in result.rows if row.name in ("small", "sixteen"))
    with pytest.raises(BitplanError, match="no planner 'smal'; did you mean small"):
        bp.auto(net(), X, planners=["smal"], steps=0)
    with pytest.raises(PlanError, match="returned no plan"):
        bp.auto(net(), X, planners=[lambda model, batch, loss: 3], steps=0)


def test_a_suite_may_be_a_planner(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def make(model, batch, loss):\n    return {'eight': 'int8-all', 'sixteen': 'bf16-all'}\n")
    register_planner("two", two_plans)
    task = lambda: find_task("digits", (), 0)  # noqa: E731
    for name in (f"{file}:make", "two"):
        choices = find_suite(name).choices_for(task)
        assert [choice.label for choice in choices] == ["FP32", "eight", "sixteen"]
    with pytest.raises(RunError, match="no suite 'twoo'; did you mean two"):
        find_suite("twoo")


def test_an_own_metric_is_measured_for_every_candidate() -> None:
    seen = []

    def worst(exact: Tensor, computed: Tensor) -> Tensor:
        seen.append((exact.dtype, exact.shape == computed.shape))
        return (computed - exact).abs().amax()

    register_metric("worst", worst)
    result = bp.measure(net(), [X, X], candidates=["int8 tensor", "int4 tensor"], metrics=["worst"])
    assert set(seen) == {(torch.float64, True)}
    by_candidate = {
        name: [row.own["worst"] for row in result.select(candidate=name)] for name in ("int8 tensor", "int4 tensor")
    }
    assert all(0 < fine < coarse for fine, coarse in zip(*by_candidate.values(), strict=True))
    assert "worst" in str(result)
    assert type(result).from_dict(result.to_dict()) == result
    assert "own" not in bp.measure(net(), [X], candidates=["int8 tensor"]).rows[0].to_dict()
    with pytest.raises(MetricError, match="oops"):
        bp.measure(net(), [X], candidates=["int8 tensor"], metrics={"oops": lambda exact, computed: math.pi / 0})


def test_own_metrics_have_a_table_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def mean(exact, computed):\n    return (computed - exact).abs().mean()\n")
    with pytest.raises(SystemExit) as ended:
        main(["measure", "gpt-tiny", "-c", "int8 tensor", "--rows", "4", "--metric", f"{file}:mean"])
    assert not ended.value.code
    assert "now, mean" in capsys.readouterr().out
