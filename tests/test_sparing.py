"""Operations that keep less: bits of masks, and operations that run once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.executions.packed.recompute import RECOMPUTED, Bits, memory_saving


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_a_mask_comes_back_from_an_eighth_of_its_bytes(count: int) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    bits = Bits(mask)
    assert bits.payload.numel() == -(-count // 8)
    assert torch.equal(bits.mask(), mask)


def test_each_bit_has_its_place() -> None:
    for element in range(16):
        mask = torch.arange(16) == element
        assert torch.equal(Bits(mask).mask(), mask)


def test_layouts_and_parts_of_tensors_survive() -> None:
    mask = torch.rand(2, 3, 4, 5) < 0.5
    last = mask.to(memory_format=torch.channels_last)
    assert torch.equal(Bits(last).mask(), mask)
    assert Bits(last).mask().stride() == last.stride()
    assert torch.equal(Bits(mask[1]).mask(), mask[1])


def gradient_of(function: object, *inputs: Tensor) -> list[Tensor]:
    arguments = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(3)
    y = function(*arguments)  # type: ignore[operator]
    y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in arguments if x.requires_grad)]


@pytest.mark.parametrize(
    ("op", "function", "shapes"),
    [
        ("relu", F.relu, [(4, 9)]),
        ("dropout", lambda x: F.dropout(x, 0.3), [(4, 9)]),
        ("tanh", torch.tanh, [(4, 9)]),
        ("softmax", lambda x: F.softmax(x, 1), [(4, 9)]),
        ("max_pool2d", lambda x: F.max_pool2d(x, 2), [(2, 3, 8, 8)]),
        ("scaled_dot_product_attention", F.scaled_dot_product_attention, [(2, 2, 6, 8)] * 3),
    ],
)
def test_the_same_bits_as_torch(op: str, function: object, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    own = memory_saving(op, function)  # type: ignore[arg-type]
    if op == "dropout":
        expected = gradient_of(function, *inputs)
        actual = gradient_of(lambda x: own(x, 0.3), *inputs)
    else:
        expected, actual = gradient_of(function, *inputs), gradient_of(own, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_attention_draws_the_same_dropout_when_it_runs_again() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))

    def attention(*arguments: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*arguments, dropout_p=0.5)

    own = memory_saving("scaled_dot_product_attention", F.scaled_dot_product_attention)
    expected, actual = gradient_of(attention, q, k, v), gradient_of(lambda *g: own(*g, dropout_p=0.5), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_running_again_leaves_the_generator_where_it_was() -> None:
    own = memory_saving("scaled_dot_product_attention", F.scaled_dot_product_attention)
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    y = own(x, x, x, dropout_p=0.5)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_other_operations_are_torchs_own() -> None:
    assert memory_saving("gelu", F.gelu) is F.gelu
    assert "relu" not in RECOMPUTED
