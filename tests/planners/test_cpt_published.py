"""Cyclic precision as in the authors' code: what they round beyond products, bits of gradients, and their periods.

The numbers by hand follow the facts about their code, and share none with the planner or the runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.analysis.cost import estimate_cost
from bitplan.errors import PlanError, ScheduleError
from bitplan.lab.models.graph_networks import (
    GCN,
    PublishedGCN,
    PublishedSAGE,
    mean_neighbours,
    symmetric_neighbours,
)
from bitplan.planners import cpt_plan
from bitplan.plans import Plan
from bitplan.plans.schedules import TEN, Static, schedule

BITS = 4


def rounded(x: Tensor, per: str = "last") -> Tensor:
    """Integers between the least and the largest value: of each vector along the last axis, or of the whole tensor."""
    low, high = (x.amin(-1, True), x.amax(-1, True)) if per == "last" else (x.min(), x.max())
    step = ((high - low) / (2**BITS - 1)).clamp(min=1e-8)
    return ((x - low) / step).clamp(0, 2**BITS - 1).round() * step + low


def under_plan(model: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    example: Any = inputs if len(inputs) > 1 else inputs[0]
    plan = cpt_plan(model, example, schedule=Static(BITS), **options)
    with bp.attach(model, plan, steps=10, example=example):
        made: Tensor = model(*inputs)
        return made.detach()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6)
        self.decoder = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.lstm(x)[0])
        return out


def test_biases_of_a_recurrent_model() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 2, 5)
    layer = model.lstm
    hidden = cell = torch.zeros(2, 6)
    states = []
    inputs = rounded(x, "tensor")  # here one range for all steps, and in the authors' code one for each
    for step in range(3):
        gates = F.linear(inputs[step], rounded(layer.weight_ih_l0), rounded(layer.bias_ih_l0))
        gates = gates + F.linear(rounded(hidden, "tensor"), rounded(layer.weight_hh_l0), rounded(layer.bias_hh_l0))
        enter, forget, new, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        states.append(hidden)
    weight, bias = model.decoder.weight, model.decoder.bias
    expected = F.linear(rounded(torch.stack(states), "tensor"), rounded(weight), rounded(bias))
    torch.testing.assert_close(under_plan(model, x, as_published=True), expected.detach())
    plain = under_plan(model, x)
    assert not torch.allclose(plain, expected.detach(), atol=1e-3)  # without the option, biases are left alone


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


def test_attention_is_rounded_along_the_last_axis_in_evaluation_too() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 3, 5, 8)

    def by_hand(x: Tensor, inputs: Tensor) -> Tensor:
        query, key, value = F.linear(inputs, rounded(model.qkv.weight), rounded(model.qkv.bias)).chunk(3, -1)
        scores = rounded(query) @ rounded(key.transpose(-1, -2)) / 8**0.5
        return (rounded(scores.softmax(-1)) @ rounded(value)).detach()

    torch.testing.assert_close(under_plan(model, x, as_published=True), by_hand(x, rounded(x, "tensor")))
    plan = cpt_plan(model, x, schedule=Static(BITS), as_published=True)
    with bp.attach(model, plan, steps=10, example=x) as run:
        model(x)
        run.step()
        other = x[:1] * 3
        low, spread = x.min(), x.max() - x.min()  # the running range of one step is that of its batch
        step = spread / (2**BITS - 1)
        inputs = ((other - low) / step).clamp(0, 2**BITS - 1).round() * step + low
        torch.testing.assert_close(model.eval()(other), by_hand(other, inputs))


NODES = 12
EDGES = torch.randint(NODES, (2, 30), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("sizes", [(6, 3), (3, 6)])
def test_a_graph_layer_rounds_its_sum_and_its_bias(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = PublishedGCN(sizes), torch.randn(NODES, sizes[0])
    layer = model.layers[0]
    nn.init.normal_(layer.bias)
    graph = symmetric_neighbours(EDGES, NODES)
    sources, targets, scale = graph

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(NODES, values.shape[1]).index_add(0, targets, values[sources])

    weight, features = rounded(layer.weight), x * scale
    weight_first = sizes[0] > sizes[1]
    made = summed(rounded(features) @ weight) if weight_first else rounded(summed(features)) @ weight
    expected = rounded(made * scale) + rounded(layer.bias)
    torch.testing.assert_close(under_plan(model, x, *graph, as_published=True), expected.detach())


def test_the_sum_of_a_sage_layer_and_the_gradient_of_its_bias() -> None:
    torch.manual_seed(0)
    model, x = PublishedSAGE((6, 3)), torch.randn(NODES, 6)
    layer = model.layers[0]
    nn.init.normal_(layer.bias)
    graph = mean_neighbours(EDGES, NODES)
    sources, targets, scale = graph
    others = rounded(x) @ rounded(layer.others.weight).T
    mean = torch.zeros(NODES, 3).index_add(0, targets, others[sources]) * scale
    expected = rounded(rounded(x) @ rounded(layer.itself.weight).T + mean) + rounded(layer.bias)
    torch.testing.assert_close(under_plan(model, x, *graph, as_published=True), expected.detach())
    plan = cpt_plan(model, (x, *graph), schedule=Static(BITS), gradient_bits=2, as_published=True)
    with bp.attach(model, plan, steps=10, example=(x, *graph)):
        upstream = torch.randn(NODES, 3)
        model(x, *graph).backward(upstream)
    # Two bits between the least and the largest: the bias gets the sum of four different values only.
    gradient = layer.bias.grad
    assert gradient is not None
    grid = torch.linspace(float(upstream.min()), float(upstream.max()), 4)
    units = (gradient - NODES * grid[0]) / (grid[1] - grid[0])
    torch.testing.assert_close(units, units.round(), atol=1e-4, rtol=0)
    assert not torch.allclose(gradient, upstream.sum(0))


def test_what_is_rounded_more_costs_no_more_bit_operations() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 2, 5)
    plans = [cpt_plan(model, x, as_published=published) for published in (False, True)]
    costs = [estimate_cost(model, plan, x, steps=50).bit_operations for plan in plans]
    assert costs[0] == costs[1]


def test_where_nothing_more_is_rounded_the_option_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(PlanError, match="images"):
        cpt_plan(model, torch.randn(2, 3, 8, 8), as_published=True)


def test_gradients_have_bits_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    plan = cpt_plan(model, torch.randn(2, 3, 8, 8), low=3, high=6, gradient_bits=8)
    decision = plan.decide("0", "conv2d.0")
    assert str(decision["dgrad.dy"].quantizer) == "int8 tensor minmax stochastic"
    weight = decision["fprop.w"].quantizer
    assert weight is not None
    assert weight.moved_by == schedule("CR", low=3, high=6)
    graph = GCN((5, 4, 3))
    inputs = (torch.randn(NODES, 5), *symmetric_neighbours(EDGES, NODES))
    aggregated = cpt_plan(graph, inputs, gradient_bits=6, quantized_aggregation=True)
    gradients = {
        str(use) for rule in aggregated.rules for key, use in rule.quantizers if key in ("dy", "grad_activation")
    }
    assert gradients == {"int6 tensor minmax stochastic"}


# --- Periods


def published(name: str, length: int, total: int, low: int, high: int) -> list[int]:
    """The bits with periods of a whole number of steps, written out for single steps."""
    profile, shape, reflection = TEN[name]  # type: ignore[index]

    def growth(z: float) -> float:
        left = 1 - z
        shapes = {
            "C": (1 - np.cos(np.pi * z)) / 2,
            "L": z,
            "E": 1 - np.exp(-4 * z),
            "R": 1 - left / (0.1 + 0.9 * left),
        }
        return float(shapes[profile])

    bits = []
    for step in range(total):
        cycle, z = step // length, (step % length) / length
        grown = growth(z)
        if shape == "triangular" and cycle % 2 == 0:
            grown = growth(1 - z) if reflection == "H" else 1 - grown
        bits.append(int(np.rint(low + (high - low) * grown)))
    return bits


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize(("total", "cycles"), [(500, 8), (777, 4), (64, 32)])
def test_periods_of_a_whole_number_of_steps(name: str, total: int, cycles: int) -> None:
    for period, length in (("published", total // cycles + 1), ("truncated", total // cycles)):
        made = schedule(name, low=3, high=8, cycles=cycles, period=period).table(total).tolist()
        assert made == published(name, length, total, 3, 8)


def test_both_defects_of_published_periods() -> None:
    ends = {
        (period, name): int(schedule(name, low=3, high=8, period=period).table(500)[-1])
        for period in ("exact", "published", "truncated")
        for name in ("CR", "RR", "RTH", "RTV")
    }
    assert all(ends["exact", name] == 8 for name in ("CR", "RR", "RTH", "RTV"))
    assert [ends["published", name] for name in ("CR", "RR", "RTH", "RTV")] == [8, 6, 6, 6]  # below the highest bits
    assert [ends["truncated", name] for name in ("CR", "RR")] == [3, 3]  # wrapped into a ninth cycle
    for name in TEN:
        exact, other = (schedule(name, low=3, high=8, period=period) for period in ("exact", "published"))
        long, short = ((exact.table(total) != other.table(total)).mean() for total in (6400, 500))
        assert 0.02 < long < 0.035
        assert 0.12 < short < 0.19


def test_a_period_is_part_of_a_plan() -> None:
    other = schedule("CR", low=3, high=8, period="published")
    assert schedule("CR", low=3, high=8).to_data() == {"name": "CR", "low": 3, "high": 8, "cycles": 8}  # as before
    assert str(other) == "CR 3-8 x8, published periods"
    plan = cpt_plan(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), period="published")
    assert plan.schedules == {"cpt": other}
    assert Plan.from_yaml(plan.to_yaml()).schedules == plan.schedules
    with pytest.raises(ScheduleError, match="period"):
        schedule("CR", low=3, high=8, period="long")
