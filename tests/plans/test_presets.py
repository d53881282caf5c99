from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from torch import nn

from bitplan.capture.selectors import plan_for_model
from bitplan.errors import PlanError
from bitplan.plans import PLACES, SLOTS, Plan, preset_names, preset_text
from bitplan.plans.schedules import Position

#: Listed first: they choose by what tensors are.
SELECTING = ["fp8-train", "fp8-train-small", "packed-fp8", "packed-fp8-mlp"]

NAMING = [
    *(
        "bf16-all",
        "deepseek-v3",
        "fp8-all",
        "fp8-attention",
        "fp8-late",
        "fp8-linear",
        "int2-all",
        "int4-all",
        "int6-all",
        "int8-all",
        "int8-linear",
    ),
    *("int8-minmax", "lora-4bit", "lora-4bit-small", "lora-fp8", "mxfp8-linear", "nvfp4", "nvfp4-late", "paper-low"),
]

EXPECTED = SELECTING + NAMING


def formats_of(name: str, op: str) -> dict[str, str]:
    decision = Plan.preset(name).decide("layer", op)
    return {place: str(decision[place].quantizer) for place in PLACES if decision[place].quantizer}


def test_the_presets_are_those_promised() -> None:
    assert preset_names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_describes_itself_does_something_and_round_trips(name: str) -> None:
    plan = Plan.preset(name)
    assert plan.description
    op = "scaled_dot_product_attention" if name == "fp8-attention" else "linear"
    assert plan.has_selectors or plan.has_frozen or not plan.decide("layer", op).changes_nothing
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_yaml(preset_text(name)) == plan
    assert (files("bitplan.plans") / "presets" / f"{name}.yaml").is_file()


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith("-linear")])
def test_the_linear_presets_leave_other_operations_alone(name: str) -> None:
    assert formats_of(name, "conv2d") == {}


@pytest.mark.parametrize("name", SELECTING)
def test_the_presets_to_train_with_name_no_layer_and_no_operation(name: str) -> None:
    plan = Plan.preset(name)
    assert all(rule.select and rule.match == ("*",) and not rule.op for rule in plan.all_rules)
    assert plan.declared_execution is not None
    assert plan.description is not None
    assert plan.description.count("\n") == 0


def test_fp8_linear_rounds_each_operand_once() -> None:
    decision = Plan.preset("fp8-linear").decide("layer", "linear")
    assert decision["fprop.x"].share == decision["wgrad.x"].share is not None
    assert str(decision["fprop.x"].quantizer) == "e4m3 tensor"
    assert str(decision["wgrad.dy"].quantizer) == "e5m2 tensor"


@pytest.mark.parametrize(("name", "before", "last"), [("fp8-late", "e4m3 tensor", 90), ("nvfp4-late", "nvfp4", 80)])
def test_late_presets_return_to_high_precision_forward_only(name: str, before: str, last: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plan = plan_for_model(Plan.preset(name), model, torch.randn(2, 16))
    early, late = (plan.at(Position(step, 100), fixed=True).decide("0", "linear.0") for step in (last - 1, last))
    assert {str(early[slot].quantizer) for slot in ("fprop.x", "fprop.w")} == {before}
    assert {late[slot].quantizer for slot in ("fprop.x", "fprop.w")} == {None}
    backward = [slot for slot in SLOTS if not slot.startswith("fprop")]
    assert all(early[slot].quantizer == late[slot].quantizer is not None for slot in backward)


def test_int8_minmax_is_the_quantiser_of_cyclic_precision_training() -> None:
    assert formats_of("int8-minmax", "conv2d") == {
        "fprop.x": "int8 tensor minmax eval=ema",
        "wgrad.x": "int8 tensor minmax eval=ema",
        "fprop.w": "int8 channel minmax",
        "dgrad.w": "int8 channel minmax",
        "dgrad.dy": "int8 tensor minmax stochastic",
        "wgrad.dy": "int8 tensor minmax stochastic",
    }
    assert formats_of("int8-minmax", "relu") == {}


def test_paper_low_is_the_uniform_low_precision_of_the_paper() -> None:
    assert formats_of("paper-low", "relu") == {
        "weight": "e4m3b4 nearest-away saturate",
        "activation": "e4m3b4 nearest-away saturate",
        "grad_activation": "e5m2b0 nearest-away special",
        "grad_weight": "e6m9b0 nearest-away special",
    }
    assert Plan.preset("paper-low").decide("layer", "add").grad_at == "consumer"


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="there is no preset 'fp8linear'; did you mean fp8-linear"):
        Plan.preset("fp8linear")
    with pytest.raises(PlanError, match="there is no preset"):
        Plan.preset("../presets/bf16-all")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith("-linear")])
def test_the_linear_presets_mean_the_linear_layers_of_gpt2_too(name: str) -> None:
    assert formats_of(name, "addmm") == formats_of(name, "linear") != {}


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_the_presets_of_all_tensors_in_integers_differ_in_their_bits_only(bits: int) -> None:
    assert formats_of(f"int{bits}-all", "conv2d") == {
        "weight": f"int{bits} channel minmax",
        "activation": f"int{bits} tensor minmax eval=ema",
        "grad_activation": f"int{bits} tensor minmax stochastic",
        "grad_weight": "bf16",
    }
