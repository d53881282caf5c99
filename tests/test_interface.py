"""The public interface: its names, steps that optimizers count, execution objects, and results that print."""

from __future__ import annotations

import html
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan.analysis.memory import Memory
from bitplan.errors import BitplanError, PlanError
from bitplan.plans.execution import Emulate
from bitplan.tables import Table

SEVEN_STEPS = {
    "version": 1,
    "schedules": {"grow": {"name": "steps", "bits": [4, 6, 8], "at": [2, 5]}},
    "rules": [{"match": "*", "activation": {"format": "int", "bits": "grow", "scale": "tensor"}}],
}
EIGHT_BITS = {"version": 1, "rules": [{"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    x = torch.randn(4, 8) if x is None else x
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which is one line that ends as a sentence does."""
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith((".", "?")) or "known names are" in message
    return message


# --- names ---


def test_the_public_names() -> None:
    assert sorted(set(bitplan.__all__) - {"__version__"}) == [
        "Attachment",
        "BitplanError",
        "Format",
        "Native",
        "Packed",
        "PackedTensor",
        "Plan",
        "Quantizer",
        "Schedule",
        "Watch",
        "advise",
        "assign",
        "attach",
        "auto",
        "compare",
        "estimate_cost",
        "estimate_memory",
        "explain",
        "get_format",
        "list_sites",
        "measure",
        "pack",
        "quantize",
        "range_test",
        "record",
        "register_format",
        "schedule",
    ]
    assert all(hasattr(bitplan, name) for name in bitplan.__all__)


@pytest.mark.parametrize("name", ["format", "sites", "cost", "predict_memory", "measure_memory", "AccountError"])
def test_old_names_are_gone(name: str) -> None:
    assert not hasattr(bitplan, name)


def test_all_options_of_attach_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        bitplan.attach(perceptron(), EIGHT_BITS, 5)  # type: ignore[misc]


# --- steps that optimizers count ---


def test_an_optimizer_counts_the_steps() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = bitplan.attach(model, SEVEN_STEPS, optimizer=optimizer, steps=7, example=torch.randn(4, 8))
    bits = []
    for _ in range(7):
        bits.append(run.table()[-1] and next(iter(run.state_dict()["formats"].values()))[0])
        train(model, optimizer)
    assert bits == ["int4", "int4", "int6", "int6", "int6", "int8", "int8"]
    assert run.state_dict()["step"] == 7
    assert run.cost().steps == 7
    run.detach()


def test_counting_by_hand_and_by_the_optimizer_trains_the_same() -> None:
    rounded = {"format": "e4m3", "scale": "tensor", "rounding": "stochastic"}
    plan = {"version": 1, "rules": [{"match": "*", "activation": rounded}]}
    x, weights = torch.randn(4, 8), []
    for counts in (True, False):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bitplan.attach(model, plan, optimizer=optimizer if counts else None) as run:
            for _ in range(4):
                train(model, optimizer, x=x)
                if not counts:
                    run.step()
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_a_step_of_its_own_is_refused_while_an_optimizer_counts() -> None:
    model = perceptron()
    with (
        bitplan.attach(model, EIGHT_BITS, optimizer=torch.optim.SGD(model.parameters())) as run,
        pytest.raises(PlanError, match="optimizer=") as error,
    ):
        run.step()
    sentence(error)


def test_optimizers_that_step_in_turn_count_as_one() -> None:
    model = perceptron()
    first, second = (torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2))
    with bitplan.attach(model, EIGHT_BITS, optimizer=[first, second]) as run:
        for _ in range(3):
            train(model, first, second)
        assert run.state_dict()["step"] == 3
        train(model, second)  # as where a GradScaler skips the first
        train(model, first, second)
        assert run.state_dict()["step"] == 5


def test_steps_that_a_grad_scaler_skips_are_not_counted() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    forward_only = {"version": 1, "rules": [{"match": "*", "activation": "bf16"}]}  # e5m2 would saturate infinities
    with bitplan.attach(model, forward_only, optimizer=optimizer) as run:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(model(torch.randn(4, 8)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.state_dict()["step"] == 2


def test_hooks_go_with_the_plan_and_hold_nothing() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = len(optimizer._optimizer_step_post_hooks)
    run = bitplan.attach(model, EIGHT_BITS, optimizer=optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == hooks + 1
    run.detach()
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    with pytest.raises(PlanError):
        bitplan.attach(model, "fp8-linear", optimizer=optimizer, example=torch.randn(4, 9))
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    train(model, optimizer)


def test_no_warning_of_forgotten_steps_while_an_optimizer_counts() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitplan.attach(model, EIGHT_BITS, optimizer=optimizer), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(model, optimizer)


@pytest.mark.parametrize("optimizer", ["adam", [], [3], torch.optim.SGD([nn.Parameter(torch.ones(1))])])
def test_what_does_not_train_the_model_is_refused(optimizer: Any) -> None:
    model = perceptron()
    with pytest.raises(PlanError, match="optimizer=") as error:
        bitplan.attach(model, EIGHT_BITS, optimizer=optimizer)
    sentence(error)
    bitplan.attach(model, EIGHT_BITS).detach()  # nothing was left behind


# --- executions ---


def test_options_are_frozen_values() -> None:
    assert bitplan.Packed() == bitplan.Packed()
    assert bitplan.Native(recompute=["activations", "weights"]) == bitplan.Native(recompute="inputs")
    assert bitplan.Native(fast_accumulation=True).fast_accumulation == ("fprop", "dgrad", "wgrad")
    assert bitplan.Native(fast_accumulation=("wgrad", "fprop")).fast_accumulation == ("fprop", "wgrad")
    assert bitplan.Native(fast_accumulation=False) == bitplan.Native()
    assert len({bitplan.Native(), bitplan.Native(min_macs=0), bitplan.Packed()}) == 3
    with pytest.raises(AttributeError):
        bitplan.Native().strict = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_macs": -1}, "min_macs"),
        ({"min_macs": 1.5}, "min_macs"),
        ({"min_macs": True}, "min_macs"),
        ({"strict": "yes"}, "strict"),
        ({"fast_accumulation": "forward"}, "'forward'"),
        ({"fast_accumulation": 3}, "fast_accumulation"),
        ({"recompute": "input"}, "did you mean inputs"),
        ({"recompute": ("weights", "all")}, "'all'"),
        ({"recompute": None}, "recompute"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError) as error:
        bitplan.Native(**options)
    assert named in sentence(error)


@pytest.mark.parametrize(
    ("execution", "named"), [("pack", "did you mean packed"), (bitplan.Packed, "bitplan.Packed()"), (3, "'emulate'")]
)
def test_bad_executions_are_refused_in_a_sentence(execution: Any, named: str) -> None:
    with pytest.raises(PlanError) as error:
        bitplan.attach(perceptron(), EIGHT_BITS, execution=execution)
    assert named in sentence(error)


def executed(plan: dict[str, Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with bitplan.attach(perceptron(), plan, example=torch.randn(4, 8), **options) as run:
            return run.execution


def test_the_argument_overrides_the_plan() -> None:
    assert executed(EIGHT_BITS) == Emulate()
    assert executed({**EIGHT_BITS, "execution": "packed"}) == bitplan.Packed()
    native = {"kind": "native", "recompute": "inputs", "fast_accumulation": ["wgrad", "fprop"], "min_macs": 0}
    options = bitplan.Native(min_macs=0, fast_accumulation=("fprop", "wgrad"), recompute="inputs")
    assert executed({**EIGHT_BITS, "execution": native}) == options
    assert executed({**EIGHT_BITS, "execution": native}, execution="emulate") == Emulate()
    assert executed({**EIGHT_BITS, "execution": "packed"}, execution=bitplan.Native(min_macs=0)).kind == "native"


@pytest.mark.parametrize(
    "execution",
    [
        "emulate",
        "packed",
        "native",
        {"kind": "native", "min_macs": 0, "strict": True, "fast_accumulation": ["fprop"], "recompute": "products"},
    ],
)
def test_a_plan_keeps_its_execution(execution: Any, tmp_path: Path) -> None:
    plan = bitplan.Plan.from_dict({**EIGHT_BITS, "execution": execution})
    assert plan.to_dict()["execution"] == execution
    for name in ("plan.yaml", "plan.json"):
        plan.save(tmp_path / name)
        assert bitplan.Plan.load(tmp_path / name) == plan
    extended = bitplan.Plan.from_yaml("{version: 1, extends: plan.yaml}", str(tmp_path / "other.yaml"))
    assert extended.execution is None
    assert extended.declared_execution == plan.execution == extended.flattened().execution
    own = bitplan.Plan.from_yaml("{version: 1, extends: plan.yaml, execution: packed}", str(tmp_path / "own.yaml"))
    assert own.declared_execution == bitplan.Packed()


def test_a_plan_without_execution_says_nothing_of_it() -> None:
    assert "execution" not in bitplan.Plan.preset("fp8-all").flattened().to_dict()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("execution: pack", "plan:2: execution: there is no 'pack' here; did you mean packed"),
        ("execution: 3", "plan:2: execution: this must be one of emulate, packed, native"),
        ("execution:\n  min_macs: 0", "'kind' is missing"),
        (
            "execution:\n  kind: native\n  macs: 0",
            "plan:4: execution: there is no key 'macs' here; did you mean",
        ),
        ("execution:\n  kind: native\n  recompute: input", "plan:4: execution.recompute: there is no 'input'"),
        (
            "execution:\n  kind: native\n  fast_accumulation: [fwd]",
            "plan:4: execution.fast_accumulation[0]:",
        ),
        ("execution:\n  kind: native\n  min_macs: -1", "plan:4: execution.min_macs: this must be 0 to"),
        ("execution:\n  kind: packed\n  min_macs: 0", "plan:4: execution.min_macs: min_macs is an option of native"),
    ],
)
def test_mistakes_in_a_plan_name_their_line(text: str, named: str) -> None:
    with pytest.raises(PlanError) as error:
        bitplan.Plan.from_yaml(f"version: 1\n{text}\n")
    assert named in sentence(error)


def test_the_schema_and_the_loader_agree_on_executions() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from bitplan.plans import plan_schema

    validator = jsonschema.Draft202012Validator(plan_schema())
    for execution in (
        "packed",
        "pack",
        3,
        {},
        {"kind": "packed"},
        {"kind": "packed", "min_macs": 0},
        {"kind": "native", "min_macs": 0},
        {"kind": "native", "min_macs": -1},
        {"kind": "native", "fast_accumulation": True},
        {"kind": "native", "fast_accumulation": "fprop"},
        {"kind": "native", "fast_accumulation": []},
        {"kind": "native", "recompute": ["weights", "products"]},
        {"kind": "native", "recompute": "input"},
    ):
        data = {"version": 1, "execution": execution}
        try:
            bitplan.Plan.from_dict(data)
            is_plan = True
        except PlanError:
            is_plan = False
        assert validator.is_valid(data) == is_plan, execution


def test_a_run_resumes_under_another_execution() -> None:
    x = torch.randn(4, 8)
    with bitplan.attach(perceptron(), {**EIGHT_BITS, "execution": "packed"}, example=x) as run:
        state = run.state_dict()
    with bitplan.attach(perceptron(), EIGHT_BITS, example=x) as run:
        run.load_state_dict(state)
    with bitplan.attach(perceptron(), "bf16-all", example=x) as run, pytest.raises(PlanError, match="another plan"):
        run.load_state_dict(state)


def test_strict_native_execution_needs_an_example() -> None:
    with pytest.raises(PlanError, match="example=") as error:
        bitplan.attach(perceptron(), EIGHT_BITS, execution=bitplan.Native(strict=True))
    sentence(error)


# --- results ---


@pytest.fixture
def run() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = {**EIGHT_BITS, "name": "<b>"}
        attached = bitplan.attach(perceptron(), plan, example=torch.randn(4, 8), execution=bitplan.Native(min_macs=0))
    with attached:
        yield attached


def test_results_print_and_convert(run: Any) -> None:
    for result in (run.table(), run.fallbacks(), run.promotions(), bitplan.list_sites(perceptron(), torch.randn(4, 8))):
        assert isinstance(result, Table)
        assert max(map(len, str(result).splitlines())) <= 80
        assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
        assert list(result) == [result[index] for index in range(len(result))] == result
        assert result[:1] == list(result)[:1]
        assert result._repr_html_().startswith(("<table>", "<p>"))
    for result in (run.cost(), run.memory(), run.memory(torch.randn(4, 8)), run.memory().estimated):
        assert max(map(len, str(result).splitlines())) <= 80
        assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
        assert result._repr_html_().startswith("<table>")


def test_measurements_print_and_convert() -> None:
    measurement = bitplan.measure(perceptron(), [torch.randn(4, 8)], candidates=["e4m3"])
    assert max(map(len, str(measurement).splitlines())) <= 80
    assert len(measurement.table()) == len(measurement.rows)
    assert "e4m3 tensor" in measurement._repr_html_()


def test_memory_of_a_run_is_estimated_and_measured(run: Any) -> None:
    assert run.memory().measured is None
    memory = run.memory(torch.randn(4, 8))
    assert isinstance(memory.estimated, Memory)
    assert isinstance(memory.measured, Memory)
    assert memory.estimated.weights == memory.measured.weights
    assert set(memory.to_dict()) == {"estimated", "measured"}


def test_an_empty_table_says_so(run: Any) -> None:
    assert str(run.promotions()) == "no promotions"
    assert run.promotions() == []
    assert not run.promotions()


def test_html_is_escaped_and_long_cells_are_wrapped() -> None:
    texts = ["<script>alert(1)</script>", "a" * 100 + " " + "b" * 50]
    table = Table(texts, {"<text>": str, "length": len, "nothing": lambda text: None})
    page = table._repr_html_()
    assert "<script>" not in page
    assert html.escape(texts[0]) in page
    assert "&lt;text&gt;" in page
    assert max(map(len, str(table).splitlines())) <= 80
    assert str(table).replace("\n", "").count("a") - str(table).count("alert") >= 100


def test_pandas_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([1, 2], {"number": int})
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pandas", None)
        with pytest.raises(BitplanError, match="pip install pandas") as error:
            table.to_pandas()
        sentence(error)
    pandas = pytest.importorskip("pandas")
    assert table.to_pandas().equals(pandas.DataFrame({"number": [1, 2]}))
