"""Ratios, baselines and the plans that come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.capture.decompositions import decision_for
from bitplan.errors import PlanError
from bitplan.lab.targets import load_target
from bitplan.planners.assign.assignment import BASELINES, Assignment, count_moves_for_ratio, make_baseline
from bitplan.planners.assign.groups import StepTensors, count_tensors, operation_key
from bitplan.planners.assign.levels import PAPER, order_moves, resolve_formats

Network = Callable[..., StepTensors]


@pytest.mark.parametrize(
    ("name", "width", "operator", "prime"),
    [
        ("squeezenet", 1.0, 0.173, 0.344),
        ("squeezenet", 0.1, 0.163, 0.326),
        ("resnet18", 1.0, 0.279, 0.538),
        ("resnet18", 0.1, 0.266, 0.530),
        # Half of a split tensor is read by no product, and stays high.
        ("shufflenet-v2", 1.0, 0.269, 0.535),
        ("shufflenet-v2", 0.5, 0.263, 0.525),
        ("shufflenet-v2", 0.25, 0.2544, 0.5077),
        ("shufflenet-v2", 0.1, 0.239, 0.477),
    ],
)
def test_ratios_of_the_operator_baselines(
    network: Network, name: str, width: float, operator: float, prime: float
) -> None:
    step_tensors = network(name, width)
    assert make_baseline("operator", step_tensors, PAPER).reported_ratio == pytest.approx(operator, abs=0.0005)
    assert make_baseline("operator-prime", step_tensors, PAPER).reported_ratio == pytest.approx(prime, abs=0.0005)


@pytest.mark.parametrize(("name", "expected"), [("squeezenet", 0.998), ("resnet18", 0.979)])
def test_ratios_of_the_uniform_baselines(network: Network, name: str, expected: float) -> None:
    step_tensors = network(name)
    low = make_baseline("uniform-low", step_tensors, PAPER)
    assert low.reported_ratio == pytest.approx(expected, abs=0.0005)
    assert (low.selection_ratio, low.demoted) == (1.0, len(step_tensors.groups))
    assert make_baseline("all-high", step_tensors, PAPER).reported_ratio == 0.0
    assert make_baseline("fp32", step_tensors, PAPER).reported_ratio == -2.0
    assert not make_baseline("fp32", step_tensors, PAPER).plan.all_rules


def test_the_reported_ratio_leaves_out_the_gradients_of_parameters(network: Network) -> None:
    step_tensors = network("resnet18")
    moves = order_moves("largest", step_tensors.groups, 1)
    result = Assignment.after(
        step_tensors, PAPER, moves, count_moves_for_ratio(step_tensors, PAPER, moves, 0.5), {"ratio": 0.5}
    )
    low = [tensor for tensor in step_tensors.tensors if (result.levels or ())[tensor.unit]]
    gradients = sum(tensor.elements for tensor in low if tensor.role == "grad_weight")
    assert gradients
    assert result.selection_ratio - result.reported_ratio == pytest.approx(gradients / step_tensors.elements)


@pytest.mark.parametrize("target", ["resnet18", "shufflenet-v2", "gpt-tiny", "gcn"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.8, 1.0])
def test_the_plan_gives_every_tensor_what_was_meant(target: str, ratio: float) -> None:
    made = load_target(target, shapes_only=True)
    step_tensors = count_tensors(made.model, made.batch, made.loss)
    moves = order_moves("largest", step_tensors.groups, 1)
    cut = count_moves_for_ratio(step_tensors, PAPER, moves, ratio)
    assigned = Assignment.after(step_tensors, PAPER, moves, cut, {"ratio": ratio}, promotion=0.01)
    plan = bitplan.Plan.from_yaml(assigned.plan.to_yaml())
    inside = {operation_key(operation): operation.inside for operation in step_tensors.operations}
    for unit, level in zip(step_tensors.units, assigned.levels or (), strict=True):
        if unit.whole is not None:  # a group demotes a whole tensor and its parts together: they are rounded once
            assert level == (assigned.levels or ())[unit.whole]
            continue
        role = "fprop.x" if unit.kind == "input" else unit.kind
        expected = getattr(PAPER.levels[level], "activation" if unit.kind == "input" else unit.kind)
        for place in unit.operations:
            decision = decision_for(plan.decide, *place, inside[place])
            actual = decision[role].quantizer
            assert actual is not None
            assert replace(actual, promote=None) == expected
            assert decision.grad_at == "consumer"
    # And every rule says something.
    bitplan.explain(made.model, plan, made.batch, made.loss)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_plans_that_hold_on_their_model(name: str) -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(*layers, nn.Linear(64, 3))
    batch = torch.randn(2, 3, 8, 8), torch.randint(3, (2,))
    plan = bitplan.assign(net, batch, F.cross_entropy, baseline=name)
    rows = bitplan.explain(net, plan, batch, F.cross_entropy)
    low = {row.site.name for row in rows if row.quantizer is not None and row.quantizer.target.bits == 8}
    if name == "operator":  # the second convolution alone: the first and the last are exempt
        assert low == {
            *("2/relu.0:activation", "3/conv2d.0:weight", "3/conv2d.0:weight(bias)", "3/conv2d.0:grad_activation")
        }
    if name in ("fp32", "all-high"):
        assert not low


class Splitting(nn.Module):
    """A stem, a split of which a convolution reads one half, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.kept, changed = F.relu(self.stem(x)).chunk(2, 1)
        joined = F.relu(self.head(torch.cat([self.kept, self.branch(changed)], 1)))
        out: Tensor = self.last(joined.mean((2, 3)))
        return out


def test_parts_of_a_split_have_a_precision_of_their_own() -> None:
    torch.manual_seed(0)
    net, batch = Splitting(), (torch.randn(2, 3, 8, 8), torch.randint(3, (2,)))
    plan = bitplan.assign(net, batch, F.cross_entropy, baseline="operator")
    rows = {row.site.name: str(row.quantizer) for row in bitplan.explain(net, plan, batch, F.cross_entropy)}
    assert "e6m9b0" in rows["/relu.0:activation"]
    assert "e4m3b4" in rows["branch/conv2d.0:fprop.x"]
    read: list[Tensor] = []
    # Weights of one, so that the branch returns sums of four values of its half as it reads them.
    with torch.no_grad():
        net.branch.weight.fill_(1.0)
        net.branch.bias.zero_()  # type: ignore[union-attr]
    with bitplan.attach(net, plan, example=batch[0]):
        hook = net.branch.register_forward_hook(lambda module, inputs, output: read.extend((*inputs, output)))
        net(batch[0])
        hook.remove()
    (low, high) = (
        bitplan.quantize(tensor, name, rounding="nearest-away")
        for tensor, name in ((read[0], "e4m3b4"), (net.kept, "e6m9b0"))
    )
    assert torch.equal(high, net.kept)  # rounded to the high format, and not to the low one
    assert not torch.equal(bitplan.quantize(net.kept, "e4m3b4", rounding="nearest-away"), net.kept)
    summed = bitplan.quantize(low.sum(1, keepdim=True).expand(-1, 4, -1, -1), "e6m9b0", rounding="nearest-away")
    torch.testing.assert_close(read[1], summed)


def test_parts_that_a_fused_product_reads_have_the_precision_of_the_whole() -> None:
    made = load_target("gpt-tiny", shapes_only=True)
    units = count_tensors(made.model, made.batch, made.loss).units
    assert not any(unit.kind in ("part", "grad_part") for unit in units)


def test_levels_go_down_one_after_the_other() -> None:
    made = load_target("gpt-tiny", shapes_only=True)
    formats = resolve_formats("bf16/8/6/4")
    plan = bitplan.assign(made.model, made.batch, made.loss, levels=["bf16", "8", "6", "4"], ratio=0.75)
    assert isinstance(plan.made_by, dict)
    used = {str(use) for rule in plan.rules for _, use in rule.quantizers}
    assert plan.made_by["demoted"] == plan.made_by["groups"]  # all lie at 8 bits, and some below
    assert any("mxfp6" in use for use in used)
    assert not any("mxfp4" in use for use in used)
    assert formats.gain(0) == 0
    assert formats.gain(3) == 1
    lowest = bitplan.assign(made.model, made.batch, made.loss, levels=["bf16", "8", "6", "4"], ratio=1.0)
    assert isinstance(lowest.made_by, dict)
    assert lowest.made_by["selection_ratio"] == 1.0


def test_orders_differ_and_random_ones_repeat(network: Network) -> None:
    groups = network("squeezenet").groups
    assert order_moves("random", groups, 1, seed=1) == order_moves("random", groups, 1, seed=1)
    assert order_moves("random", groups, 1, seed=1) != order_moves("random", groups, 1, seed=2)
    assert sorted(move.group for move in order_moves("random", groups, 1)) == [group.number for group in groups]


def test_a_model_too_large_for_memory_is_planned() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(200_000, 200_000), nn.ReLU(), nn.Linear(200_000, 10))
        batch = torch.randn(64, 200_000)
    plan = bitplan.assign(net, batch, ratio=0.5)
    assert isinstance(plan.made_by, dict)
    assert plan.made_by["parameters"] == 200_000 * 200_011 + 10


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ({}, "give one of ratio, budget and baseline, not none"),
        ({"ratio": 0.5, "budget": "70%"}, "not ratio and budget"),
        ({"ratio": 1.5}, "from 0 to 1"),
        ({"ratio": 0.5, "order": "larger"}, "closest.*largest|did you mean|largest"),
        ({"baseline": "hfp8"}, "there is no baseline"),
        ({"ratio": 0.5, "formats": "papr"}, "there are no formats"),
        ({"ratio": 0.5, "levels": ["8", "bf16"]}, "highest precision down|precision down"),
        ({"ratio": 0.5, "levels": ["bf16"]}, "two or more"),
        ({"budget": "a lot"}, "no number of bytes"),
        ({"budget": "0%"}, "above 0%"),
    ],
)
def test_mistakes_are_told_in_a_sentence(requests: dict[str, object], message: str) -> None:
    with pytest.raises(bitplan.BitplanError, match=message):
        bitplan.assign(nn.Linear(4, 2), torch.randn(3, 4), **requests)  # type: ignore[arg-type]


def test_an_unknown_quantity_of_levels_is_refused() -> None:
    with pytest.raises(PlanError, match="levels, or low and high"):
        bitplan.assign(nn.Linear(4, 2), torch.randn(3, 4), ratio=0.5, levels=["bf16", "8"], low="4")
