from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bitplan.analysis.cost import Cost, TensorCost, estimate_cost, step_cost
from bitplan.capture.recording import record
from bitplan.errors import CostError
from bitplan.lab.models.resnet import cifar_resnet, resnet18
from bitplan.lab.models.small_cnns import SqueezeNet
from bitplan.numerics.packing import pack
from bitplan.plans import ROLES, Plan

NOTHING = Plan()
#: Of the linear layer that most tests price.
MACS = 4 * 6 * 3


def plan_of(*rules: dict[str, Any], **named: Any) -> Plan:
    return Plan.from_dict({"version": 1, "quantizers": named, "rules": list(rules)})


def linear() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(6, 3, bias=False), torch.randn(4, 6)


class Attends(nn.Module):
    """Self-attention without projections: of 2 heads, 5 tokens, 8 features each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return F.scaled_dot_product_attention(x, x, x)


# --- bit operations ---


def test_without_a_plan_a_layer_costs_three_products_of_32_bits() -> None:
    whole = estimate_cost(linear()[0], NOTHING, linear()[1])
    assert (whole.forward_macs, whole.training_macs) == (MACS, 3 * MACS)
    assert whole.bit_operations == 3 * MACS * 32 * 32 == whole.baseline_bit_operations("fp32")
    assert whole.baseline_bit_operations("bf16") == 3 * MACS * 16 * 16
    assert whole.relative == 1.0


def test_every_slot_counts_its_own_bits() -> None:
    slots = {"fprop.x": 2, "fprop.w": 3, "dgrad.dy": 4, "dgrad.w": 5, "wgrad.dy": 6, "wgrad.x": 7}
    plan = plan_of({"match": "*", **{slot: f"int{bits}" for slot, bits in slots.items()}})
    assert estimate_cost(linear()[0], plan, linear()[1]).bit_operations == MACS * (2 * 3 + 4 * 5 + 6 * 7)


@pytest.mark.parametrize(("forward", "backward"), [(3, 8), (8, 8), (5, 6)])
def test_the_formula_of_cyclic_precision_training(forward: int, backward: int) -> None:
    plan = plan_of({"match": "*", "x": f"int{forward}", "w": f"int{forward}", "dy": f"int{backward}"})
    whole = estimate_cost(linear()[0], plan, linear()[1])
    assert whole.bit_operations == MACS * (forward**2 + 2 * forward * backward)
    assert whole.effective_macs == MACS * (forward**2 + 2 * forward * backward) / 32**2
    assert whole.gbitops == whole.bit_operations / 1e9


@pytest.mark.parametrize(("depth", "published"), [(38, 1.31), (74, 2.65), (110, 3.98), (152, 5.54)])
def test_static_8_bits_on_cifar_resnets_cost_what_was_published(depth: int, published: float) -> None:
    """64,000 iterations at batch 128, in 10^8 GBitOPs; the batch's share is priced on one image."""
    with torch.device("meta"):
        model, images = cifar_resnet(depth), torch.empty(2, 3, 32, 32)
    one_image = estimate_cost(model, "int8-minmax", images).gbitops / 2
    assert round(one_image * 128 * 64_000 / 1e8, 2) == published


def test_training_macs_are_those_that_torch_runs_but_for_the_first_input_gradient() -> None:
    model, images = cifar_resnet(8), torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    spared = images[:, 0].numel() * 16 * 3 * 9
    assert estimate_cost(model, NOTHING, images).training_macs == counter.get_total_flops() / 2 + spared


def test_an_operand_has_the_bits_of_the_tensor_that_feeds_it_views_between_or_not() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6, 3, bias=False))
    plan = plan_of({"match": "*", "op": "relu", "activation": "e4m3"})
    fprop, dgrad, wgrad = 8 * 32, 32 * 32, 32 * 8
    assert estimate_cost(model, plan, torch.randn(4, 2, 3)).bit_operations == MACS * (fprop + dgrad + wgrad)


def test_weights_and_gradients_bring_their_bits_to_the_products() -> None:
    plan = plan_of({"match": "*", "weight": "int4", "grad_activation": "e5m2"})
    assert estimate_cost(linear()[0], plan, linear()[1]).bit_operations == MACS * (32 * 4 + 8 * 4 + 8 * 32)


def test_a_view_of_a_weight_has_the_weights_bits() -> None:
    class Transposes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t()

    whole = estimate_cost(Transposes(), plan_of({"match": "*", "weight": "int4"}), linear()[1])
    assert whole.bit_operations == MACS * (32 * 4 + 32 * 4 + 32 * 32)
    assert whole.tensors["weight"] == TensorCost(1, 18, 18 * 4)


def test_a_slots_quantizer_comes_last_and_a_kept_slot_takes_what_arrives() -> None:
    rules = [{"match": "*", "weight": "int4", "w": "int6"}]
    assert estimate_cost(linear()[0], plan_of(*rules), linear()[1]).bit_operations == MACS * (32 * 6 + 32 * 6 + 32 * 32)
    rules.append({"match": "*", "w": "keep"})
    assert estimate_cost(linear()[0], plan_of(*rules), linear()[1]).bit_operations == MACS * (32 * 4 + 32 * 4 + 32 * 32)


@pytest.mark.parametrize(("grad_at", "bits"), [("producer", 8), ("consumer", 32)])
def test_rounded_at_its_consumers_the_sum_of_a_fan_out_is_not_rounded(grad_at: str, bits: int) -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()[0]

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.sin() + y.cos()

    plan = plan_of({"match": "linear", "grad_activation": "e5m2", "grad_at": grad_at})
    assert estimate_cost(Forks(), plan, linear()[1]).bit_operations == MACS * (32 * 32 + 2 * bits * 32)


def test_at_one_consumer_the_gradient_arrives_as_it_was_rounded() -> None:
    plan = plan_of({"match": "0", "grad_activation": "e5m2", "grad_at": "consumer"})
    model = nn.Sequential(linear()[0], nn.ReLU())
    assert estimate_cost(model, plan, linear()[1]).bit_operations == MACS * (32 * 32 + 2 * 8 * 32)


def test_a_frozen_weight_has_no_gradient_product() -> None:
    model = nn.Sequential(linear()[0], nn.Linear(3, 3, bias=False))
    model[0].weight.requires_grad_(False)
    whole = estimate_cost(model, NOTHING, linear()[1])
    assert whole.training_macs == MACS + 3 * 4 * 9  # nothing there is trained: the forward product alone
    model[1].weight.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    assert estimate_cost(model, NOTHING, linear()[1]).training_macs == 3 * MACS + 2 * 4 * 9


def test_a_constant_that_is_no_layers_input_has_no_gradient_product() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()[0]
            self.register_buffer("mixing", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.mixing @ self.linear(x)

    assert estimate_cost(Mixes(), NOTHING, linear()[1]).training_macs == 3 * MACS + 2 * (4 * 4 * 3)


def test_the_dtype_counts_where_the_plan_is_silent() -> None:
    whole = estimate_cost(linear()[0].bfloat16(), NOTHING, linear()[1].bfloat16())
    assert whole.bit_operations == 3 * MACS * 16 * 16
    assert whole.mean_bits == 16


def test_attention_left_whole_multiplies_its_inner_tensors_in_full_precision() -> None:
    plan = plan_of({"match": "*", "activation": "e4m3", "grad_activation": "e5m2", "weight": "e4m3"})
    entered, scores = 2 * 5 * 8 * 8, 2 * 5 * 5 * 8
    q_k = scores * (8 * 8 + 32 * 8 + 32 * 8)
    p_v = scores * (32 * 8 + 8 * 8 + 8 * 32)
    layer = entered * (32 * 8 + 8 * 8 + 8 * 32)
    assert estimate_cost(Attends(), plan, torch.randn(1, 2, 5, 8)).bit_operations == layer + q_k + p_v


@pytest.mark.parametrize("op", ["scaled_dot_product_attention", "matmul"])
def test_opened_attention_costs_the_same_macs_with_the_slots_bits(op: str) -> None:
    x = torch.randn(1, 2, 5, 8)
    plain = estimate_cost(Attends(), NOTHING, x)
    opened = estimate_cost(Attends(), plan_of({"match": "*", "op": op, "x": "int4", "w": "int4", "dy": "int4"}), x)
    assert (opened.forward_macs, opened.training_macs) == (plain.forward_macs, plain.training_macs)
    assert opened.bit_operations == 3 * (2 * 5 * 8 * 8 * 32 * 32 + 2 * (2 * 5 * 5 * 8) * 4 * 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_opened_recurrent_layers_cost_the_same_macs(kind: Callable[..., nn.Module]) -> None:
    model, x = kind(6, 3, num_layers=2), torch.randn(5, 4, 6)
    plain = estimate_cost(model, NOTHING, x)
    opened = estimate_cost(model, plan_of({"match": "*", "x": "int4", "w": "int4", "dy": "int4"}), x)
    assert opened.forward_macs == plain.forward_macs
    assert opened.bit_operations == 3 * plain.forward_macs * 4 * 4


def test_what_cannot_be_counted_is_not_priced() -> None:
    with pytest.raises(CostError, match="bilinear"):
        estimate_cost(nn.Bilinear(3, 4, 5), NOTHING, (torch.randn(2, 3), torch.randn(2, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_products_that_cannot_be_seen_are_not_priced() -> None:
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.trace(linear()[0], linear()[1]))
    with pytest.raises(CostError, match="1 is scripted"):
        estimate_cost(model, NOTHING, linear()[1])


# --- bytes ---


def test_every_class_counts_its_tensors_once() -> None:
    model, x = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Flatten()), torch.randn(4, 6)
    tensors = estimate_cost(model, "fp8-all", x).tensors
    assert {role: (part.tensors, part.elements, part.bits) for role, part in tensors.items()} == {
        "weight": (2, 21, 21 * 8),
        "activation": (2, 24, 24 * 8),
        "grad_activation": (2, 24, 24 * 8),
        "grad_weight": (2, 21, 21 * 16),
    }


def test_a_shared_weight_is_held_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight), self.weight)

    assert estimate_cost(Tied(), NOTHING, torch.randn(4, 6)).tensors["weight"] == TensorCost(1, 36, 36 * 32)


@pytest.mark.parametrize(
    "quantizer",
    [
        *("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "e2m3", "int4"),
        {"format": "int4", "scale": "block", "block": 16},
        {"format": "e4m3", "scale": "block", "block": 32},
    ],
    ids=str,
)
def test_bytes_are_those_that_packing_really_holds(quantizer: Any) -> None:
    model = nn.Linear(64, 16, bias=False)
    result = (
        estimate_cost(model, plan_of({"match": "*", "weight": quantizer}), torch.randn(2, 64)).tensors["weight"].bytes
    )
    text = {"format": quantizer} if isinstance(quantizer, str) else quantizer
    packed = pack(model.weight.detach(), **text)
    tensor_scale = 4 if quantizer == "nvfp4" else 0  # one float32 for all of it
    assert result == packed.nbytes - tensor_scale


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, 1), labels)


def cifar(model: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        return model(), (torch.empty(128, 3, 32, 32), torch.empty(128, dtype=torch.long))


@pytest.mark.parametrize(("make", "published"), [(resnet18, 264), (SqueezeNet, 370)])
def test_the_tensors_are_those_of_the_assignment_paper_but_for_the_data(
    make: Callable[[], nn.Module], published: int
) -> None:
    """The paper also counts the images and their gradient; bitplan lists what operations make."""
    model, batch = cifar(make)
    assert estimate_cost(model, NOTHING, batch, nll).total.tensors == published - 2


@pytest.mark.parametrize(("make", "published"), [(resnet18, 0.979), (SqueezeNet, 0.998)])
def test_the_ratio_of_uniform_low_precision_is_the_published_one(
    make: Callable[[], nn.Module], published: float
) -> None:
    model, batch = cifar(make)
    assert round(estimate_cost(model, "paper-low", batch, nll).low_precision_ratio, 3) == published


@pytest.mark.parametrize(("width", "published"), [(1.0, 0.279), (0.1, 0.266)])
def test_the_ratio_of_the_operator_based_assignment_is_the_published_one(width: float, published: float) -> None:
    plan = plan_of(
        {"match": "*", "weight": "high", "activation": "high", "grad_activation": "high", "grad_weight": "high"},
        {"match": "*", "op": "conv2d", "weight": "low", "grad_activation": "lowg"},
        {"match": "*", "op": "relu", "activation": "low"},
        # The first convolution is exempt, and the last activation feeds none.
        {"match": "conv1", "weight": "high", "grad_activation": "high"},
        {"match": "layer4.1", "op": "relu.1", "activation": "high"},
        high="e6m9b0",
        low="e4m3b4",
        lowg="e5m2b0",
    )
    model, batch = cifar(lambda: resnet18(100, width))
    whole = estimate_cost(model, plan, batch, nll)
    images = 2 * 16.0 * batch[0].numel()  # which the paper counts too, in high precision, with their gradient
    high = 16 * whole.total.elements + images
    assert round(2 * (high - whole.total.bits - images) / high, 3) == published


def test_the_ratio_is_0_for_16_bits_and_falls_below_for_more() -> None:
    model, x = linear()
    assert estimate_cost(model, "bf16-all", x).low_precision_ratio == 0
    assert estimate_cost(model, NOTHING, x).low_precision_ratio == -2


# --- the value itself ---


def test_costs_add_up_to_those_of_a_run() -> None:
    model, x = linear()
    operations = record(model, x)
    plans = [plan_of({"match": "*", "x": f"int{bits}", "activation": f"int{bits}"}) for bits in (2, 4, 8)]
    steps = [step_cost(operations, plan.decide) for plan in plans]
    run = sum(steps, Cost())
    assert run.steps == 3
    assert run.bit_operations == sum(step.bit_operations for step in steps)
    assert run.tensors["activation"].mean_bits == (2 + 4 + 8) / 3
    assert steps[0].times(3) == steps[0] + steps[0] + steps[0]


def test_a_cost_is_only_added_to_costs() -> None:
    with pytest.raises(TypeError):
        Cost() + 1  # type: ignore[operator]


def test_a_cost_knows_all_tensor_classes() -> None:
    with pytest.raises(CostError, match=r"grad_weight, not weight\."):
        Cost(tensors={"weight": TensorCost()})


def test_nothing_costs_nothing() -> None:
    nothing = estimate_cost(nn.Identity(), NOTHING, torch.randn(2))
    assert (nothing.relative, nothing.mean_bits, nothing.low_precision_ratio) == (0, 0, 0)


def test_as_plain_values_it_stands_beside_fp32_and_bf16() -> None:
    model, x = linear()
    whole = estimate_cost(model, "fp8-all", x)
    data = whole.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data["bytes"]["plan"]) == {*ROLES, "total"}
    assert data["bytes"]["fp32"]["weight"] == 18 * 4
    assert data["bytes"]["bf16"]["weight"] == 18 * 2
    assert data["bytes"]["plan"]["weight"] == 18
    assert data["bit_operations"]["bf16"] == 3 * MACS * 256
    assert data["mean_bits"]["grad_weight"] == 16


def test_printed_it_is_a_table_of_the_plan_fp32_and_bf16() -> None:
    lines = str(estimate_cost(linear()[0], "fp8-all", linear()[1]).times(1000)).splitlines()
    assert lines[0].split() == ["plan", "FP32", "BF16"]
    # 72 MACs, thousand steps: (32 x 8 + 8 x 8 + 8 x 32) bits under the plan, three times 32 x 32 in FP32.
    assert lines[1].split() == ["GBitOPs", "0.041", "0.221", "0.055"]
