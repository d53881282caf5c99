"""Scales for blocks and tiles of operands in plans, against sums that are written out in float64 with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from saved_bytes import saved_tensor_bytes
from torch import Tensor, nn

import bitplan
from bitplan.executions.packed.saved_tensors import SavedTensorPacker
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment

Matrix = np.ndarray[Any, np.dtype[np.float64]]

#: E4M3 by its definition: 8 steps a binade from 2^-6 on, steps of 2^-9 below, 448 at most.
_MAX = 448.0


def round_e4m3(values: Matrix) -> Matrix:
    """To the nearest E4M3 value, ties to even; beyond the largest value the largest."""
    magnitude = np.abs(values)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.sign(values) * np.minimum(np.rint(magnitude / step) * step, _MAX)


def round_tiles(matrix: Matrix, rows: int, columns: int) -> Matrix:
    """A matrix with one scale, its largest magnitude / 448, for every `rows` x `columns` of it; ragged at the ends."""
    rounded = np.empty_like(matrix)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            at = np.s_[top : top + rows, left : left + columns]
            scale = np.abs(matrix[at]).max() / _MAX
            rounded[at] = round_e4m3(matrix[at] / scale) * scale
    return rounded


def spread(*shape: int, seed: int) -> Tensor:
    """Float64 numbers of very different size, so that a scale taken over the wrong ones shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, 6, shape, generator=generator).double()
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * torch.exp2(exponents)


LINE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [1, 4]}
TILE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [4, 4]}
#: Lines of 4 along the summed axis, of x and dy once for each of their products; tiles of the weight once for both.
RECIPE = {"fprop.x": LINE, "wgrad.x": LINE, "dgrad.dy": LINE, "wgrad.dy": LINE, "w": TILE}


def plan_of(**places: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", **places}]})


def products_by_hand(x: Matrix, w: Matrix, dy: Matrix) -> list[Matrix]:
    """y, dx and dw of x (rows, inputs), w (outputs, inputs) and dy (rows, outputs)."""
    tiles = round_tiles(w, 4, 4)
    y = round_tiles(x, 1, 4) @ tiles.T
    dx = round_tiles(dy, 1, 4) @ tiles
    dw = round_tiles(dy.T, 1, 4) @ round_tiles(x.T, 1, 4).T  # the summed axis, rows, comes last in both
    return [y, dx, dw]


def trained(model: nn.Module, x: Tensor, dy: Tensor, plan: Any, **options: Any) -> list[Tensor]:
    """y, dx and dw of a layer under a plan."""
    x = x.clone().requires_grad_()
    weight = next(model.parameters())
    with bitplan.attach(model, plan, example=x, **options):
        y = model(x)
        y.backward(dy)
    grads, weight.grad = [x.grad, weight.grad], None
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def packer_of(run: Attachment) -> SavedTensorPacker:
    packer = run._execution.packer  # type: ignore[attr-defined]
    assert isinstance(packer, SavedTensorPacker)
    return packer


#: Multiples of the block, ragged ones, and axes that are shorter than a block.
SHAPES = [(8, 12, 16), (9, 10, 7), (3, 2, 1), (1, 5, 4)]


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_blocks_rounded_by_hand(rows: int, inputs: int, outputs: int, execution: str) -> None:
    model = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    x, dy = spread(rows, inputs, seed=1), spread(rows, outputs, seed=2)
    with torch.no_grad():
        model.weight.copy_(spread(outputs, inputs, seed=3))
    ours = trained(model, x, dy, plan_of(**RECIPE), execution=execution)
    expected = products_by_hand(x.numpy(), model.weight.detach().numpy(), dy.numpy())
    for actual, by_hand in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(by_hand), rtol=1e-11, atol=1e-11)
    whole = {key: {"format": "e4m3", "scale": "tensor"} for key in ("x", "w", "dy")}
    exact = trained(model, x, dy, plan_of(activation={"format": "int16", "scale": "tensor"}))
    if rows > 4:  # scales for blocks are others than scales for tensors, and better ones
        by_tensor = trained(model, x, dy, plan_of(**whole))
        for block, tensor, wide in zip(ours, by_tensor, exact, strict=True):
            error, coarse = float((block - wide).norm() / wide.norm()), float((tensor - wide).norm() / wide.norm())
            assert 1e-4 < error < coarse
            assert error < 2.0**-4


def test_sequences_have_blocks_of_their_own() -> None:
    """Of (batch, tokens, features), blocks along tokens end with the sequence."""
    model = nn.Linear(6, 5, bias=False, dtype=torch.float64)
    x, dy = spread(2, 6, 6, seed=1), spread(2, 6, 5, seed=2)
    _, _, dw = trained(model, x, dy, plan_of(**RECIPE))
    parts = [products_by_hand(one.numpy(), np.ones((5, 6)), two.numpy())[2] for one, two in zip(x, dy, strict=True)]
    torch.testing.assert_close(dw, torch.from_numpy(parts[0] + parts[1]), rtol=1e-11, atol=1e-11)


def test_a_square_tile_of_a_weight_is_the_same_for_both_of_its_products() -> None:
    """So `w` rounds once what fprop.w and dgrad.w round to the same values; of lines that is not so."""
    model = nn.Linear(10, 7, bias=False, dtype=torch.float64)
    x, dy = spread(9, 10, seed=1), spread(9, 7, seed=2)
    shared = trained(model, x, dy, plan_of(w=TILE))
    apart = trained(model, x, dy, plan_of(**{"fprop.w": TILE, "dgrad.w": TILE}))
    assert all(torch.equal(one, two) for one, two in zip(shared, apart, strict=True))
    lines = trained(model, x, dy, plan_of(w=LINE))
    lines_apart = trained(model, x, dy, plan_of(**{"fprop.w": LINE, "dgrad.w": LINE}))
    assert torch.equal(lines[0], lines_apart[0])
    assert not torch.equal(lines[1], lines_apart[1])


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_compiled_blocks_are_those_of_eager_code(execution: str) -> None:
    model = nn.Linear(21, 10, bias=False)
    x, dy = spread(9, 21, seed=1).float(), spread(9, 10, seed=2).float()
    eager = trained(model, x, dy, plan_of(**RECIPE), execution=execution)
    x = x.clone().requires_grad_()
    with bitplan.attach(model, plan_of(**RECIPE), example=x, execution=execution) as run:
        y = run.compile()(x)
        y.backward(dy)
    assert x.grad is not None
    assert model.weight.grad is not None
    for ours, expected in zip([y.detach(), x.grad, model.weight.grad], eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tile", "scales"), [([1, 32], 256 * 2), ([128, 128], 2), ([16, 16], 4 * 16)])
def test_packed_saves_codes_and_one_scale_for_each_block(tile: list[int], scales: int) -> None:
    """What is saved is the operand of wgrad, whose lines lie along the 64 tokens."""
    model = nn.Linear(256, 8, bias=False)
    x = torch.randn(64, 256, requires_grad=True)
    quantizer = {"format": "e4m3", "scale": "block", "block": tile}
    with bitplan.attach(model, plan_of(**{"fprop.x": quantizer, "wgrad.x": quantizer}), execution="packed") as run:
        saved = saved_tensor_bytes(lambda: model(x).sum(), model.parameters(), packer_of(run))
    assert saved == 64 * 256 + scales * 4


def test_convolutions_have_tiles_of_output_and_input_channels() -> None:
    """One tile for each position of the kernel, the same in fprop and dgrad."""
    model = nn.Conv2d(6, 5, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(spread(5, 6, 3, 3, seed=3))
    x = spread(2, 6, 7, 7, seed=1)
    ours = trained(model, x, torch.ones(2, 5, 5, 5, dtype=torch.float64), plan_of(w=TILE))
    w = np.empty((5, 6, 3, 3))
    for at in np.ndindex(3, 3):
        w[:, :, *at] = round_tiles(model.weight.detach().numpy()[:, :, *at], 4, 4)
    expected = nn.functional.conv2d(x, torch.from_numpy(w))
    torch.testing.assert_close(ours[0], expected, rtol=1e-11, atol=1e-11)
    apart = trained(
        model, x, torch.ones(2, 5, 5, 5, dtype=torch.float64), plan_of(**{"fprop.w": TILE, "dgrad.w": TILE})
    )
    assert all(torch.equal(one, two) for one, two in zip(ours, apart, strict=True))


def test_a_bias_is_one_row() -> None:
    model, x = nn.Linear(6, 10), torch.zeros(1, 6)
    with torch.no_grad():
        model.bias.copy_(spread(10, seed=1))
    with bitplan.attach(model, plan_of(weight=TILE), example=x):
        y = model(x)[0]
    assert torch.equal(y, bitplan.quantize(model.bias.detach(), "e4m3", scale="block", block=4))
    assert not torch.equal(y, model.bias)


def test_estimates_and_explanations_know_the_tiles() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), torch.randn(32, 64)
    plan = plan_of(weight={"format": "e4m3", "scale": "block", "block": [16, 16]}, activation={"format": "nvfp4"})
    tiles = plan_of(weight={"format": "nvfp4", "block": [16, 16]})
    assert bitplan.estimate_cost(model, plan, x).tensors["weight"].bits == 2 * 64 * 64 * (8 + 32 / 256)
    assert bitplan.estimate_cost(model, tiles, x).tensors["weight"].bits == 2 * 64 * 64 * (4 + 8 / 256)
    words = [str(row.quantizer) for row in bitplan.explain(model, plan, x) if row.site.role == "weight"]
    assert words
    assert set(words) == {"e4m3 block 16x16"}
    one_scale = plan_of(activation={"format": "e4m3", "scale": "tensor"})
    tiled, single = (
        bitplan.estimate_memory(model, x, plan=plan, execution="packed").activations
        for plan in (plan_of(activation=TILE), one_scale)
    )
    # Of two results with 32 x 64 values each, the first is saved and the second goes to the loss.
    assert single < tiled < bitplan.estimate_memory(model, x).activations
    assert Plan.from_dict(plan.to_dict()).to_yaml() == plan.to_yaml()
    assert "block: [16, 16]" in tiles.to_yaml()


@pytest.mark.parametrize(
    ("quantizer", "token"),
    [
        ({"format": "e4m3", "scale": "block", "block": [128]}, "two numbers"),
        ({"format": "e4m3", "scale": "block", "block": [128, 0]}, "1 to"),
        ({"format": "e4m3", "scale": "tensor", "block": [128, 128]}, "scale='block'"),
        ({"format": "e4m3", "block": [128, 128]}, "give scale="),
        ({"format": "e4m3", "scale": "block", "block": [128, 128], "axis": 0}, "drop axis"),
        ({"format": "nvfp4", "block": 16}, "nvfp4 has blocks of 16"),
    ],
)
def test_a_block_that_makes_no_sense_is_one_sentence(quantizer: dict[str, Any], token: str) -> None:
    with pytest.raises(bitplan.BitplanError, match=token) as caught:
        plan_of(x=quantizer)
    assert "\n" not in str(caught.value)


def test_a_step_on_the_meta_device_has_the_shapes_of_one_with_numbers() -> None:
    layer, x = nn.Linear(20, 12, device="meta"), torch.randn(5, 20, device="meta")
    tile = {"format": "e4m3", "scale": "block", "block": [8, 8]}
    rotated = {"format": "nvfp4", "rotate": "hadamard"}
    plan = {"version": 1, "rules": [{"match": "*", "op": "linear", "fprop": tile, "dgrad": tile, "wgrad": rotated}]}
    with bitplan.attach(layer, plan, example=x, execution="emulate"):
        y = layer(x)
        y.sum().backward()
    assert y.shape == (5, 12)
    assert layer.weight.grad is not None
    assert (layer.weight.grad.shape, layer.weight.grad.device.type) == (layer.weight.shape, "meta")
