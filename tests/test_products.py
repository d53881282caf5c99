"""Products with six operand slots: forward and backward, each operand rounded for itself or shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import Apply, attached, q
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.plans import SLOTS
from bitplan.runtime.rounding_op import RoundingOp

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


#: Another format for each slot, so that none can stand in for another.
FORMATS = dict(zip(SLOTS, ("e4m3", "e3m2", "e5m2", "e2m3", "e3m4", "e2m1"), strict=True))
PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (3, 4, 6), (5, 6)),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2), (2, 4, 9), (6, 4, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), (2, 4, 5, 6), (6, 2, 3, 3)),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 3, 5, 6), (4, 3, 3, 3)),
    "conv2d unbatched": (F.conv2d, (3, 5, 6), (4, 3, 3, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w, stride=(1, 2, 1)), (1, 2, 4, 4, 4), (3, 2, 2, 2, 2)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, groups=2), (2, 4, 5), (4, 3, 2)),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (2, 3, 4, 4),
        (3, 2, 3, 3),
    ),
    "conv_transpose3d": (F.conv_transpose3d, (1, 2, 2, 3, 3), (2, 3, 2, 2, 2)),
    "matmul": (torch.matmul, (2, 3, 4), (4, 5)),
    "@": (lambda x, w: x @ w, (3, 4), (2, 4, 5)),
    "mv": (torch.mv, (3, 4), (4,)),
    "vector @ matrix": (lambda x, w: x @ w, (4,), (4, 5)),
    "dot": (torch.dot, (4,), (4,)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "addmm": (lambda x, w: torch.addmm(x.new_zeros(5), x, w), (3, 4), (4, 5)),
    "baddbmm": (lambda x, w: torch.baddbmm(x.new_zeros(2, 3, 5), x, w), (2, 3, 4), (2, 4, 5)),
    "einsum": (lambda x, w: torch.einsum("bihd,bjhd->bhij", x, w), (2, 3, 2, 4), (2, 5, 2, 4)),
    "einsum of a list": (lambda x, w: torch.einsum("ij, jk", [x, w]), (3, 4), (4, 5)),
    "einsum that sums one operand": (lambda x, w: torch.einsum("ij,jk->k", x, w), (3, 4), (4, 5)),
    "einsum with an ellipsis": (lambda x, w: torch.einsum("...j,kj->...k", x, w), (2, 3, 4), (5, 4)),
}


def three_products(
    function: Callable[..., Tensor], x: Tensor, w: Tensor, dy: Tensor, formats: dict[str, str]
) -> list[Tensor]:
    """y, dx and dw in float64, of operands that were rounded in float32."""

    def rounded(slot: str, operand: Tensor) -> Tensor:
        return (bitplan.quantize(operand, formats[slot]) if slot in formats else operand).double()

    y = function(rounded("fprop.x", x), rounded("fprop.w", w))
    wide, tall = x.double().requires_grad_(), w.double().requires_grad_()
    (dx,) = torch.autograd.grad(function(wide, rounded("dgrad.w", w)), wide, rounded("dgrad.dy", dy))
    (dw,) = torch.autograd.grad(function(rounded("wgrad.x", x), tall), tall, rounded("wgrad.dy", dy))
    return [y, dx, dw]


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_slot_of_a_product_equals_float64_on_the_rounded_operands(name: str) -> None:
    function, x_shape, w_shape = PRODUCTS[name]
    model, x = Apply(function, *w_shape), torch.randn(x_shape, requires_grad=True)
    with attached(model, {"match": "*", **FORMATS}):
        y = model(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    actual = [y.detach().double(), x.grad.double(), model.weight.grad.double()]
    w, x = model.weight.detach(), x.detach()
    expected = three_products(function, x, w, dy, FORMATS)
    # Terms of magnitude |a||b|, summed in any order: K eps of their sum, and the longest sum here has K < 200.
    sizes = three_products(function, x.abs(), w.abs(), dy.abs(), FORMATS)
    bounds = [200 * EPS * size for size in sizes]
    for ours, exact, bound in zip(actual, expected, bounds, strict=True):
        assert ((ours - exact).abs() <= bound).all()
    for slot in SLOTS:  # and none of them could have been left out
        without = three_products(function, x, w, dy, {key: name for key, name in FORMATS.items() if key != slot})
        pairs = zip(actual, without, bounds, strict=True)
        assert any(((ours - other).abs() > bound).any() for ours, other, bound in pairs), slot


def test_the_bias_beside_slots_gets_its_whole_gradient() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5)
    with attached(model, {"match": "*", "fprop.x": "e4m3", "dgrad.dy": "e2m1"}):
        y = model(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    assert torch.equal(y, F.conv2d(q(x, "e4m3"), model.weight, model.bias))
    torch.testing.assert_close(model.bias.grad, dy.sum((0, 2, 3)))


@pytest.mark.parametrize(("function", "x", "w"), [(torch.addmm, (6, 8), (8, 5)), (torch.baddbmm, (2, 6, 8), (2, 8, 5))])
def test_the_sum_of_a_product_is_rounded_to_bfloat16_once(
    function: Callable[..., Tensor], x: tuple[int, ...], w: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, bias = Apply(lambda bias, x, w: function(bias, x, w), *w).bfloat16(), torch.randn(*x[:-1], w[-1]).bfloat16()
    inputs = torch.randn(x).bfloat16().requires_grad_()
    with attached(model, {"match": "*", "dgrad.w": "e2m1"}):
        y = model(bias, inputs)
        y.sum().backward()
    assert torch.equal(y, function(bias, inputs, model.weight))
    assert torch.equal(inputs.grad, torch.ones_like(y) @ q(model.weight, "e2m1").mT)


def test_an_einsum_that_takes_a_diagonal_says_that_its_slots_cannot_be_told_apart() -> None:
    model = Apply(lambda x, w: torch.einsum("ii,ij->j", x, w), 3, 4)
    with (
        attached(model, {"match": "*", "fprop.x": "e4m3"}),
        pytest.raises(bitplan.errors.QuantizeError, match="diagonal"),
    ):
        model(torch.randn(3, 3))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers_round_the_operands_of_their_products(kind: str) -> None:
    model: nn.LSTM | nn.GRU = nn.LSTM(5, 4) if kind == "lstm" else nn.GRU(5, 4)
    x, h, c = torch.randn(1, 2, 5), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    state: Any = (h, c) if kind == "lstm" else h
    with attached(model, {"match": "*", "op": kind, "x": "e3m2", "w": "e2m3"}):
        y = model(x, state)[0]
    weights = [q(w, "e2m3").double() for w in (model.weight_ih_l0, model.weight_hh_l0)]
    from_x = F.linear(q(x[0], "e3m2").double(), weights[0], model.bias_ih_l0.double())
    from_h = F.linear(q(h[0], "e3m2").double(), weights[1], model.bias_hh_l0.double())
    if kind == "lstm":
        i, f, g, o = (from_x + from_h).chunk(4, -1)
        expected = o.sigmoid() * (f.sigmoid() * c[0].double() + i.sigmoid() * g.tanh()).tanh()
    else:
        (r, z, n), (hr, hz, hn) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        update = (z + hz).sigmoid()
        expected = (1 - update) * (n + (r + hr).sigmoid() * hn).tanh() + update * h[0].double()
    torch.testing.assert_close(y[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert (y - model(x, state)[0]).abs().max() > 1e-3


def test_attention_rounds_the_operands_of_both_its_products() -> None:
    model = Apply(F.scaled_dot_product_attention)
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    with attached(model, {"match": "*", "x": "e4m3", "w": "e3m2"}):
        y = model(query, key, value)
    scores = q(query, "e4m3") @ q(key.transpose(-2, -1), "e3m2") * 0.5
    assert torch.equal(y, q(scores.softmax(-1), "e4m3") @ q(value, "e3m2"))


# --- shared operands ---


@pytest.mark.parametrize(
    ("keys", "times"), [(("x", "w", "dy"), 3), (("fprop.x", "wgrad.x"), 2), (("fprop", "dgrad", "wgrad"), 6)]
)
def test_a_shared_operand_is_rounded_once(keys: tuple[str, ...], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = RoundingOp.round

    def counted(self: RoundingOp, *args: Any) -> Tensor:
        calls.append(self.place)
        return original(self, *args)

    monkeypatch.setattr(RoundingOp, "round", counted)
    model = nn.Linear(4, 4)
    with attached(model, {"match": "*", **dict.fromkeys(keys, "e3m2")}):
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert len(calls) == times


@pytest.mark.parametrize("shared", [True, False])
def test_both_products_of_a_shared_operand_see_the_same_random_bits(shared: bool) -> None:
    model, x = nn.Linear(8, 8, bias=False), torch.rand(8, 8)
    nn.init.eye_(model.weight)
    noisy = {"format": "e2m1", "rounding": "stochastic"}
    with attached(model, {"match": "*", **({"x": noisy} if shared else {"fprop.x": noisy, "wgrad.x": noisy})}):
        y = model(x)
        y.backward(torch.eye(8))  # so that the weight's gradient is x as the product saw it
    assert not torch.equal(y, x)
    assert torch.equal(model.weight.grad, y.detach()) is shared


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_an_operand_is_shared_also_beside_operands_that_are_not(execution: str) -> None:
    model, x = nn.Linear(8, 8), torch.rand(8, 8)
    nn.init.eye_(model.weight)
    noisy = {"format": "e2m1", "rounding": "stochastic"}
    with attached(model, {"match": "*", "x": noisy, "dy": noisy, "dgrad.w": "e4m3"}, execution=execution):
        y = model(x)
        y.backward(torch.eye(8) * 0.9)
    rounded_x = y.detach() - model.bias.detach()
    rounded_dy = bitplan.quantize(model.bias.grad, "e2m1")  # one element each
    assert set(rounded_dy.tolist()) <= {0.5, 1.0}
    torch.testing.assert_close(model.weight.grad, (rounded_x.T * rounded_dy).T, rtol=1e-5, atol=1e-5)
    assert not torch.equal(y, x + model.bias)
