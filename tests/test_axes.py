"""Which axis a scale keeps: the one that a product does not sum over, in each of its slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.gemm.axes import resolve
from bitplan.plans import Plan
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.attach import attach


def kept_axes(spec: QuantizerSpec, place: str, op: str, shape: tuple[int, ...]) -> set[int]:
    """Axes along which each index has a scale of its own: making one much larger leaves the others as they were."""
    torch.manual_seed(0)
    x = torch.rand(shape) + 0.5
    quantizer = resolve(spec, place, op, len(shape))
    kept = set()
    for axis in range(len(shape)):
        larger = x.clone()
        larger.select(axis, 0).mul_(1000)
        others = [quantizer.quantize(item).narrow(axis, 1, shape[axis] - 1) for item in (x, larger)]
        if torch.equal(*others):
            kept.add(axis)
    return kept


X, W, DY = {"fprop.x": 0, "wgrad.x": 0}, {"fprop.w": 1, "dgrad.w": 1}, {"dgrad.dy": 2, "wgrad.dy": 2}
OPERAND = {**X, **W, **DY}
#: Operation -> shapes of x, w and dy, and for each slot the axes that have scales of their own.
VECTORS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, set[int]]]] = {
    "linear": (
        ((2, 3, 4), (5, 4), (2, 3, 5)),
        {"fprop.x": {0, 1}, "fprop.w": {0}, "dgrad.dy": {0, 1}, "dgrad.w": {1}, "wgrad.dy": {2}, "wgrad.x": {2}},
    ),
    "conv2d": (
        ((2, 3, 4, 4), (5, 3, 3, 3), (2, 5, 4, 4)),
        {"fprop.x": {0}, "fprop.w": {0}, "dgrad.dy": {0}, "dgrad.w": {1}, "wgrad.dy": {1}, "wgrad.x": {1}},
    ),
    "conv_transpose1d": (
        ((2, 3, 4), (3, 5, 3), (2, 5, 6)),
        {"fprop.x": {0}, "fprop.w": {1}, "dgrad.dy": {0}, "dgrad.w": {0}, "wgrad.dy": {1}, "wgrad.x": {1}},
    ),
    "bmm": (
        ((2, 3, 4), (2, 4, 5), (2, 3, 5)),
        {
            "fprop.x": {0, 1},
            "fprop.w": {0, 2},
            "dgrad.dy": {0, 1},
            "dgrad.w": {0, 1},
            "wgrad.dy": {0, 2},
            "wgrad.x": {0, 2},
        },
    ),
    "addmm": (
        ((3, 4), (4, 5), (3, 5)),
        {"fprop.x": {0}, "fprop.w": {1}, "dgrad.dy": {0}, "dgrad.w": {0}, "wgrad.dy": {1}, "wgrad.x": {1}},
    ),
}


@pytest.mark.parametrize("op", VECTORS)
def test_a_vector_of_scales_is_constant_along_what_the_product_sums_over(op: str) -> None:
    shapes, expected = VECTORS[op]
    spec = QuantizerSpec("int8", scale="vector")
    actual = {slot: kept_axes(spec, slot, op, shapes[operand]) for slot, operand in OPERAND.items()}
    assert actual == expected


@pytest.mark.parametrize("op", VECTORS)
def test_blocks_lie_along_an_axis_that_the_product_sums_over(op: str) -> None:
    shapes, vectors = VECTORS[op]
    for slot, operand in OPERAND.items():
        spec = QuantizerSpec("int8", scale="block", block=64)  # longer than any axis: one block is one line
        line = set(range(len(shapes[operand]))) - kept_axes(spec, slot, op, shapes[operand])
        assert len(line) == 1
        assert not line & vectors[slot]


@pytest.mark.parametrize(
    ("op", "place", "shape", "axis"),
    [
        ("linear", "weight", (5, 4), 0),
        ("conv2d", "weight", (5, 3, 2, 2), 0),
        ("conv_transpose2d", "weight", (3, 5, 2, 2), 1),
        ("matmul", "weight", (4, 5), 1),
        ("addmm", "weight", (4, 5), 1),
        ("linear", "activation", (2, 3, 5), 2),
        ("linear", "activation", (2, 3, 4, 5), 3),
        ("conv1d", "activation", (2, 5, 3), 1),
        ("batch_norm", "activation", (2, 5, 3, 3), 1),
        ("relu", "grad_activation", (2, 5, 3, 3), 1),
        ("gelu", "activation", (2, 3, 5), 2),
        ("scaled_dot_product_attention", "activation", (2, 2, 3, 5), 3),
        ("layer_norm", "activation", (2, 3, 3, 5), 3),
    ],
)
def test_a_scale_per_channel_keeps_the_features(op: str, place: str, shape: tuple[int, ...], axis: int) -> None:
    assert kept_axes(QuantizerSpec("int8", scale="channel"), place, op, shape) == {axis}


def test_an_axis_that_the_plan_names_is_taken_as_it_is() -> None:
    spec = QuantizerSpec("int8", scale="channel", axis=1)
    assert kept_axes(spec, "activation", "linear", (2, 3, 4)) == {1}


def test_a_number_has_one_scale_whatever_the_plan_says() -> None:
    x = torch.tensor(3.3)
    for spec in (QuantizerSpec("int8", scale="channel"), QuantizerSpec("int8", scale="block", block=4)):
        assert torch.equal(
            resolve(spec, "activation", "mean", 0).quantize(x), bitplan.quantize(x, "int8", scale="tensor")
        )


class Addmm(nn.Module):
    """A layer with its weight the other way round, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_the_same_layer_in_two_layouts_is_scaled_alike() -> None:
    torch.manual_seed(0)
    x, first, second = torch.randn(3, 4), Addmm(), nn.Linear(4, 5)
    second.load_state_dict({"weight": first.weight.detach().T, "bias": first.bias.detach()})
    plain = first(x)
    for quantizer in ({"format": "int4", "scale": "channel"}, {"format": "int4", "scale": "vector"}):
        plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "w": quantizer}]})
        with attach(first, plan), attach(second, plan):
            torch.testing.assert_close(first(x), second(x))
            assert not torch.allclose(first(x), plain, atol=1e-3)
