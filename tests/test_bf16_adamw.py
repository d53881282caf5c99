"""AdamW of bfloat16 weights: no update is lost, and moments take a byte per weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import bitplan as bp
from bitplan.runtime import bf16_adamw
from bitplan.runtime.bf16_adamw import BF16AdamW, float32_weights
from bitplan.runtime.step_in_backward import StepInBackward

RATE = 1e-4


def random_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16())


def gradient(shape: torch.Size, number: int) -> Tensor:
    """Noise around a mean, in columns of other sizes."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return ((noise + 1.0) * torch.logspace(-2, 0, shape[-1])).bfloat16()


def train(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int = 30) -> None:
    for number in range(steps):
        weight.grad = gradient(weight.shape, number).to(weight.dtype)
        optimizer.step()


def reference(weight: Tensor, steps: int = 30, **settings: Any) -> Tensor:
    """Float32 weights after steps of torch's AdamW."""
    expected = nn.Parameter(weight.detach().float().clone())
    train(expected, AdamW([expected], lr=RATE, **settings), steps)
    return expected.detach()


@pytest.mark.parametrize("shape", [(64, 256), (7, 11)])
def test_weights_follow_those_of_float32_training(shape: tuple[int, int]) -> None:
    weight, start = random_weight(*shape), random_weight(*shape).detach().float()
    optimizer = BF16AdamW([weight], lr=RATE)
    train(weight, optimizer)
    moved = (reference(start) - start).abs().mean()
    error = (float32_weights(optimizer, weight) - reference(start)).abs().mean() / moved
    # In whole blocks moments are rounded to E4M3; 77 values have a scale each, which is exact.
    assert (1e-3 < error < 0.05) if shape == (64, 256) else error < 1e-3


def test_bfloat16_alone_would_not_move() -> None:
    """The same by torch's AdamW: most updates are rounded away."""
    weight, start = random_weight(64, 256), random_weight(64, 256).detach()
    train(weight, AdamW([weight], lr=RATE))
    large = start.abs() > 0.1
    assert (weight.detach() == start)[large].float().mean() > 0.9
    ours = random_weight(64, 256)
    train(ours, BF16AdamW([ours], lr=RATE))
    assert (ours.detach() == start)[large].float().mean() < 0.7


def test_the_bits_below_bfloat16_are_those_of_float32() -> None:
    """Weight decay alone: products of float32 numbers, bit for bit."""
    weight = random_weight(16, 256)
    expected = weight.detach().float()
    optimizer = BF16AdamW([weight], lr=1e-3, weight_decay=0.1)
    for _ in range(20):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        expected = expected * (1 - torch.tensor(1e-3) * 0.1)
    values = float32_weights(optimizer, weight)
    assert torch.equal(values, expected)
    assert torch.equal((weight.float() - values).abs(), (values.bfloat16().float() - values).abs())
    assert not torch.equal(weight.float(), values)


def test_stochastic_rounding_is_right_on_average() -> None:
    weight = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    optimizer = BF16AdamW([weight], lr=1.0, weight_decay=2**-10, weights="stochastic")
    weight.grad = torch.zeros_like(weight)
    torch.manual_seed(0)
    optimizer.step()
    assert set(weight.detach().unique().tolist()) == {1.0, 1 - 2**-8}
    # A quarter of 65,536 goes down, 111 more or less.
    assert 16384 - 450 < int((weight < 1).sum()) < 16384 + 450
    assert "low_bits" not in optimizer.state[weight]


def test_a_weight_with_a_small_gradient_in_a_block_with_a_large_one_is_not_thrown_away() -> None:
    """Its second moment is far below what E4M3 can hold beside the largest, and its gradient ends."""
    weight = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    optimizer = BF16AdamW([weight], lr=RATE, weight_decay=0.0)
    size = torch.logspace(-7, 0, 256)
    for number in range(40):
        before = float32_weights(optimizer, weight) if number else torch.zeros(256)
        weight.grad = (size if number < 20 else torch.zeros(256)).bfloat16()
        optimizer.step()
        moved = (float32_weights(optimizer, weight) - before).abs() / RATE
        assert moved.isfinite().all()
        assert moved.max() < 1.6
        if number < 20:
            assert moved[size > 1e-4].min() > 0.8


def test_state_is_a_byte_per_moment_and_scales() -> None:
    weight = random_weight(64, 256)
    optimizer = BF16AdamW([weight], lr=RATE)
    train(weight, optimizer, 1)
    state = optimizer.state[weight]
    sizes = {name: value.nbytes for name, value in state.items() if name != "step"}
    scales = 64 * 256 // 256 * 4
    assert sizes == {
        "exp_avg": 64 * 256,
        "exp_avg_scale": scales,
        "exp_avg_sq_root": 64 * 256,
        "exp_avg_sq_root_scale": scales,
        "low_bits": 64 * 256 * 2,
    }
    # Codes of several values, not of zeros or of one value: E4M3 really holds them.
    assert len(state["exp_avg"].float().unique()) > 50
    assert state["exp_avg_sq_root"].float().min() > 0


@pytest.mark.parametrize("weights", ["float32", "stochastic"])
def test_a_loaded_state_continues_bit_for_bit(weights: Any) -> None:
    whole, first = random_weight(8, 256), random_weight(8, 256)
    torch.manual_seed(0)
    train(whole, BF16AdamW([whole], lr=1e-3, weights=weights), 3)
    torch.manual_seed(0)
    saved = BF16AdamW([first], lr=1e-3, weights=weights)
    train(first, saved, 2)
    second = nn.Parameter(first.detach().clone())
    loaded = BF16AdamW([second], weights=weights)
    loaded.load_state_dict(saved.state_dict())
    second.grad = gradient(second.shape, 2)
    loaded.step()
    assert torch.equal(second, whole)


@pytest.mark.parametrize("weights", ["float32", "stochastic"])
def test_parts_of_a_large_weight_are_updated_alike(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    whole, parts = random_weight(10, 256), random_weight(10, 256)
    torch.manual_seed(0)
    train(whole, BF16AdamW([whole], lr=RATE, weights=weights), 3)
    monkeypatch.setattr(bf16_adamw, "CHUNK", 1024)
    torch.manual_seed(0)
    train(parts, BF16AdamW([parts], lr=RATE, weights=weights), 3)
    assert torch.equal(whole, parts)


def test_compiled_steps_are_the_same_for_all_shapes() -> None:
    weights = [random_weight(*shape) for shape in ((8, 256), (5, 512), (256,))]
    eager = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizers = [BF16AdamW(weights, lr=RATE, compiled=True), BF16AdamW(eager, lr=RATE, compiled=False)]
    for number in range(3):
        for parameters, optimizer in zip((weights, eager), optimizers, strict=True):
            for parameter in parameters:
                parameter.grad = gradient(parameter.shape, number)
            optimizer.step()
    for compiled, other in zip(weights, eager, strict=True):
        values, expected = (float32_weights(o, w) for o, w in zip(optimizers, (compiled, other), strict=True))
        difference = (values - expected).abs()
        # Another order of operations, which moves single moments to the next number of E4M3.
        assert (difference > RATE / 50).float().mean() < 0.01
        assert difference.max() < RATE / 2


def test_it_updates_a_planned_model_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).bfloat16()
    x = torch.randn(32, 16).bfloat16()
    with bp.attach(model, "fp8-linear", example=x) as run:
        optimizer = StepInBackward(model, lambda parameter: BF16AdamW([parameter], lr=1e-3), run)
        losses = []
        for _ in range(10):
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert not math.isclose(losses[0], losses[-1], rel_tol=0.01)
    assert all("low_bits" in state for each in optimizer.optimizers.values() for state in each.state.values())


def test_other_weights_are_refused() -> None:
    with pytest.raises(bp.BitplanError) as caught:
        BF16AdamW([nn.Parameter(torch.zeros(4))])
    assert "torch.float32" in str(caught.value)
    with pytest.raises(bp.BitplanError) as caught:
        BF16AdamW([random_weight(4, 4)], weights="nearest")  # type: ignore[arg-type]
    assert "'nearest'" in str(caught.value)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", ["float32", "stochastic"])
def test_a_weight_that_is_no_number_stays_none(weights: Any, compiled: bool) -> None:
    """Divergence must be seen: a GPU's NaN has the bits 0x7FFFFFFF, and adding to them gives -0."""
    weight = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    optimizer = BF16AdamW([weight], lr=1e-3, weights=weights, compiled=compiled)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    if weights == "float32":  # -0 and the lower bits -1 are such a NaN
        weight.data.view(torch.int16)[0] = -(2**15)
        optimizer.state[weight]["low_bits"][0] = -1
        assert float32_weights(optimizer, weight).view(torch.int32)[0] == 0x7FFFFFFF
    else:
        weight.data.view(torch.int16)[0] = 0x7FFF
    optimizer.step()
    assert weight[0].isnan()
    assert weight[1:].isfinite().all()
    weight.grad[300] = torch.nan
    optimizer.step()
    optimizer.step()
    assert weight[:256].isnan().sum() == 1
    assert weight[256:].isnan().all()  # the block that shares a scale
