"""What a plan does to numbers: each role against the same rounding written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small import Apply, attached, q
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- roles ---


def test_a_weight_is_rounded_where_it_is_used_and_its_gradient_passes() -> None:
    model, x = nn.Linear(6, 5), torch.randn(4, 6)
    with attached(model, {"match": "*", "weight": "e3m2"}):
        y = model(x)
        y.square().sum().backward()
    expected = F.linear(x, q(model.weight, "e3m2"), q(model.bias, "e3m2"))
    assert torch.equal(y, expected)
    assert torch.equal(model.weight.grad, (2 * expected).T @ x)


def test_a_weight_that_a_functional_call_brings_is_rounded_too() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(4, 6)
    brought = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with attached(model, {"match": "*", "weight": "e3m2"}):
        y = torch.func.functional_call(model, brought, x)
    assert torch.equal(y, F.linear(x, q(brought["0.weight"], "e3m2"), q(brought["0.bias"], "e3m2")))


def test_a_tensor_of_many_dimensions_is_rounded() -> None:
    x = torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 2)
    for scale in (None, "channel"):
        with attached(
            nn.Tanh(), {"match": "*", "activation": {"format": "e4m3", **({"scale": scale} if scale else {})}}
        ) as run:
            y = run.model(x)
        assert torch.equal(y, q(torch.tanh(x), "e4m3", **({"scale": scale, "axis": 1} if scale else {})))


def test_every_activation_is_rounded_as_it_is_made() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 6)
    with attached(model, {"match": "*", "activation": "e4m3"}):
        y = model(x)
    inner = q(torch.tanh(q(model[0](x), "e4m3")), "e4m3")
    assert torch.equal(y, q(model[2](inner), "e4m3"))


class FanOut(nn.Module):
    """One activation with two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.tanh(y) * 3 + torch.sigmoid(y) * 5


@pytest.mark.parametrize("grad_at", ["producer", "consumer"])
def test_a_gradient_is_rounded_after_the_fan_out_sum_or_on_each_branch(grad_at: str) -> None:
    model, x = FanOut(), torch.randn(3, 4)
    with attached(model, {"match": "layer", "grad_activation": "e5m2", "grad_at": grad_at}):
        model(x).sum().backward()
    y = model.layer(x).detach()
    tanh, sigmoid = torch.tanh(y), torch.sigmoid(y)
    branches = [3 * (1 - tanh * tanh), 5 * ((1 - sigmoid) * sigmoid)]
    if grad_at == "producer":
        expected = q(branches[0] + branches[1], "e5m2")
    else:
        expected = q(branches[0], "e5m2") + q(branches[1], "e5m2")
    torch.testing.assert_close(model.layer.bias.grad, expected.sum(0), rtol=1e-6, atol=0)
    assert not torch.allclose(model.layer.bias.grad, (branches[0] + branches[1]).sum(0), rtol=1e-4)


def _in_place(y: Tensor) -> Tensor:
    y.relu_()
    return y


def _chunked(y: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return torch.cat([torch.tanh(first), torch.tanh(second)], -1)


@pytest.mark.parametrize("consumer", [_in_place, _chunked, lambda y: F.relu(input=y), lambda y: y.t().tanh().t()])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradients_are_rounded_at_consumers_of_every_kind(consumer: Callable[[Tensor], Tensor], rounding: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(consumer))
    x, back = torch.randn(3, 4), torch.randn(3, 4)
    plain = model(x)
    bias = torch.autograd.grad(consumer(model[0](x)), model[0].bias, back)[0]
    rule = {"match": "0", "grad_activation": {"format": "e2m1", "rounding": rounding}, "grad_at": "consumer"}
    with attached(model, rule):
        y = model(x)
        y.backward(back)
    assert torch.equal(y, plain)
    assert not torch.equal(model[0].bias.grad, bias)
    if rounding == "nearest":
        y = model[0](x).detach().requires_grad_()
        (arriving,) = torch.autograd.grad(consumer(y * 1), y, back)
        assert torch.equal(model[0].bias.grad, q(arriving, "e2m1").sum(0))


def test_a_gradient_of_a_weight_is_rounded() -> None:
    model, x = nn.Linear(6, 5, bias=False), torch.randn(4, 6)
    with attached(model, {"match": "*", "grad_weight": "e4m3"}):
        model(x).square().sum().backward()
    assert torch.equal(model.weight.grad, q((2 * model(x)).T @ x, "e4m3"))


# --- tensors that are written into ---


def _added(x: Tensor) -> Tensor:
    x += 0.3
    return x


def _written(x: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.mul(x, 0.3, out=out)
    return out


def _matmul_written(x: Tensor) -> Tensor:
    out = torch.empty(4, 4)
    torch.matmul(x.t(), x, out=out)
    return out


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu_": (_in_place, torch.relu),
    "+=": (_added, lambda x: x + 0.3),
    "F.relu": (lambda x: F.relu(x, inplace=True), torch.relu),
    "F.elu_": (lambda x: F.elu_(x), F.elu),
    "index_add_": (
        lambda x: x.index_add_(0, torch.tensor([1]), x.new_full((1, 4), 0.3)),
        lambda x: x.index_add(0, torch.tensor([1]), x.new_full((1, 4), 0.3)),
    ),
    "out": (_written, lambda x: x * 0.3),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_rounded_in_place(name: str) -> None:
    function, expected = IN_PLACE[name]
    arguments = torch.randn(3, 4)
    handed = arguments.clone()
    model = Apply(function)
    with attached(model, {"match": "*", "activation": "e3m2"}):
        y = model(handed)
    rounded = q(expected(arguments), "e3m2")
    assert torch.equal(y, rounded)
    if name != "out":
        assert y.data_ptr() == handed.data_ptr()
        assert torch.equal(handed, rounded)


@pytest.mark.parametrize("slots", [{"x": "e3m2"}, {"fprop.x": "e3m2"}])
def test_a_product_with_rounded_slots_writes_where_it_is_told(slots: dict[str, str]) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad(), attached(model := Apply(_matmul_written), {"match": "*", **slots, "activation": "e4m3"}):
        assert torch.equal(model(x), q(q(x.t(), "e3m2") @ x, "e4m3"))


def test_a_gradient_through_an_in_place_operation_is_rounded() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4)
    with attached(model, {"match": "1", "grad_activation": "e2m1"}):
        y = model(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    assert torch.equal(model[0].bias.grad, (q(dy, "e2m1") * (y > 0)).sum(0))


def test_random_numbers_drawn_in_place_are_those_of_the_plain_model() -> None:
    model = Apply(lambda x: x.new_empty(3, 4).normal_() + x.new_empty(3, 4).uniform_())
    with attached(model, {"match": "*", "activation": "e4m3", "constants": True}):
        torch.manual_seed(1)
        y = model(torch.randn(1))
    torch.manual_seed(1)
    torch.randn(1)
    assert torch.equal(y, q(q(torch.randn(3, 4), "e4m3") + q(torch.rand(3, 4), "e4m3"), "e4m3"))


# --- how far off ---


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16", "bf16"])
def test_the_error_is_at_least_what_the_format_must_cause_and_at_most_what_it_may(name: str) -> None:
    model, x = nn.Tanh(), torch.randn(10_000) * 0.2 + 0.5
    x = x[x > 0.1]
    with attached(model, {"match": "*", "activation": name}):
        relative = (model(x) - torch.tanh(x)) / torch.tanh(x)
    unit = bitplan.get_format(name).epsilon  # type: ignore[union-attr]
    assert relative.abs().max() <= unit / 2
    # Rounding errors are spread evenly over half a step either way, and steps are between unit/2 and unit of a value.
    assert unit / 2 / 12**0.5 <= relative.square().mean().sqrt() <= unit / 12**0.5


# --- one value per weight, slot and step ---

NOISY = {"format": "e2m1", "rounding": "stochastic"}


class Tied(nn.Module):
    """Two layers with one weight; the identity as input shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("place", ["weight", "w", "fprop.w"])
def test_all_uses_of_a_weight_see_the_same_random_bits_until_the_step_is_over(place: str) -> None:
    model, eye = Tied(), torch.eye(8)
    with attached(model, {"match": "*", place: NOISY}) as run:
        first, second = model(eye)
        assert torch.equal(first, second)
        assert torch.equal(model(eye)[0], first)  # another micro-batch
        assert not torch.equal(first, model.first.weight.T)
        run.step()
        assert not torch.equal(model(eye)[0], first)


def test_another_seed_gives_other_bits_and_the_same_seed_the_same() -> None:
    model, eye = Tied(), torch.eye(8)
    seen = []
    for seed in (0, 0, 1):
        with attached(model, {"match": "*", "weight": NOISY}, seed=seed):
            seen.append(model(eye)[0].detach())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_stochastic_rounding_is_right_on_average() -> None:
    model, x = nn.Tanh(), torch.full((1000,), 0.3)
    total = torch.zeros(1000)
    with attached(model, {"match": "*", "activation": {"format": "e2m1", "rounding": "stochastic"}}) as run:
        for _ in range(20):
            total += model(x)
            run.step()
    exact = torch.tanh(x)[0]
    spread = 0.5 / 2 / (20 * 1000) ** 0.5  # half the distance of neighbours, at most
    assert (total.mean() / 20 - exact).abs() < 5 * spread


# --- evaluation and other types ---


@pytest.mark.parametrize(("mode", "changes"), [("same", True), ("top", True), ("off", False)])
def test_evaluation_does_what_the_quantizer_says(mode: str, changes: bool) -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    plain = model(x)
    quantizer = {"format": "e3m2", "eval": mode}
    for place in ("weight", "activation", "x", "fprop.w"):
        with attached(model, {"match": "*", place: quantizer}):
            assert torch.equal(model(x), plain) is not changes
            assert not torch.equal(model.train()(x), plain)
            model.eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_types_are_rounded_in_their_type(dtype: torch.dtype) -> None:
    model, x = nn.Linear(4, 4).to(dtype), torch.randn(2, 4, dtype=dtype)
    with attached(model, {"match": "*", "weight": "e3m2", "activation": "e4m3", "grad_activation": "e2m1"}):
        y = model(x)
        y.backward(dy := torch.randn_like(y))
    expected = F.linear(x, q(model.weight, "e3m2"), q(model.bias, "e3m2"))
    assert y.dtype == dtype
    assert torch.equal(y, q(expected, "e4m3"))
    assert torch.equal(model.bias.grad, q(dy, "e2m1").sum(0))
