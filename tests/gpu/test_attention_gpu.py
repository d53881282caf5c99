"""Attention in FP8 on a CUDA device: its kernels, its gradients, and a planned model eager and compiled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.executions.native.attention import (
    attention_backward_reference,
    attention_reference,
    cast_by_head_reference,
    restore_by_head_reference,
    restore_values,
)
from bitplan.executions.native.backends import multiplies_attention

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")]


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not multiplies_attention(torch.device("cuda")):
        pytest.skip("only Hopper has attention in FP8")
    torch._dynamo.reset()
    torch.manual_seed(0)


def operands(heads: int, key_heads: int, queries: int, keys: int, size: int) -> list[Tensor]:
    """Queries, keys and values as projections return them: (batch, heads, tokens, features), tokens outermost."""
    shapes = (queries, heads), (keys, key_heads), (keys, key_heads)
    return [
        torch.randn(2, *shape, size, device="cuda").bfloat16().transpose(1, 2) * factor
        for shape, factor in zip(shapes, (2, 2, 1), strict=True)
    ]


def scale_of(x: Tensor) -> Tensor:
    return x.float().abs().amax((0, 2, 3)) / 448


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_codes_are_those_of_the_plain_twin(size: int, transposed: bool) -> None:
    x, *_ = operands(6, 6, 333, 333, size)
    scale = scale_of(x) * torch.rand(6, device="cuda")  # some values saturate
    codes = torch.ops.bitplan.attention_cast(x, scale, transposed)
    assert torch.equal(codes.view(torch.uint8), cast_by_head_reference(x, scale, transposed).view(torch.uint8))
    values = torch.ops.bitplan.attention_restore(codes, scale, 333, transposed)
    assert torch.equal(values, restore_by_head_reference(codes, scale, 333, transposed))
    assert torch.equal(torch.ops.bitplan.attention_amax(x), x.float().abs().amax((0, 2, 3)))


SHAPES = [(8, 8, 512, 512), (8, 2, 1000, 1000), (4, 1, 77, 77), (4, 4, 300, 515)]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("shape", "is_causal"), [(s, c) for s, c in itertools.product(SHAPES, (False, True)) if not c or s[2] == s[3]]
)
def test_the_error_is_that_of_e4m3(shape: tuple[int, int, int, int], is_causal: bool, size: int) -> None:
    q, k, v = operands(*shape, size)
    scales = [scale_of(x) for x in (q, k, v)]
    codes = [
        torch.ops.bitplan.attention_cast(x, scale, number == 2)
        for number, (x, scale) in enumerate(zip((q, k, v), scales, strict=True))
    ]
    out, logsumexp = torch.ops.bitplan.attention_forward(*codes, *scales, size**-0.5, is_causal)
    plain, plain_logsumexp = attention_reference(*codes, *scales, size**-0.5, is_causal)
    assert torch.allclose(logsumexp, plain_logsumexp, atol=1e-2)  # FP8 tensor cores sum in about 14 bits
    assert relative(out, plain) < 0.02
    restored = (*codes[:2], restore_values(codes[2], shape[3]))
    rounded = [(x.double() * scale.view(-1, 1)).transpose(1, 2) for x, scale in zip(restored, scales, strict=True)]
    group = shape[0] // shape[1]
    wide_q, wide_k, wide_v = rounded[0], *(x.repeat_interleave(group, 1) for x in rounded[1:])
    scores = wide_q @ wide_k.transpose(-2, -1) * size**-0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), -math.inf)
    weights = scores.softmax(-1)
    exact, ours = weights @ wide_v, out.transpose(1, 2).double()
    # Half an ulp of a probability is a 16th of it at most; below the smallest normal code, 2^-10 of the largest code.
    row_sum = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    bound = weights @ wide_v.abs() / 16 + wide_v.abs().sum(-2, keepdim=True) * 2.0**-10 / 448 / row_sum
    summation = 2.0**-6 * (weights @ wide_v.abs())  # the tensor cores' short sums, of scores in the exponent, too
    assert bool(((ours - exact).abs() <= bound + exact.abs() * 2.0**-8 + summation + 1e-5).all())
    bfloat16 = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    unrounded = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal, enable_gqa=True)
    assert 4 * relative(bfloat16, unrounded) < relative(ours, unrounded) < 0.3
    assert relative(ours, exact) > 2 * relative(bfloat16, unrounded)  # the probabilities were rounded, too


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shape", [(8, 8, 512, 512), (8, 2, 1000, 1000)])
def test_gradients_of_torchs_kernels_are_those_of_the_plain_twin(
    shape: tuple[int, int, int, int], size: int, is_causal: bool
) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in operands(*shape, size))
    unit = [torch.ones((heads,), device="cuda") for heads in (shape[0], shape[1], shape[1])]
    codes = [
        torch.ops.bitplan.attention_cast(x.transpose(1, 2), scale, number == 2)
        for number, (x, scale) in enumerate(zip((q, k, v), unit, strict=True))
    ]
    out, logsumexp = torch.ops.bitplan.attention_forward(*codes, *unit, size**-0.5, is_causal)
    rounded = [x.bfloat16() for x in (*codes[:2], restore_values(codes[2], shape[3]))]
    arguments = (torch.randn_like(out), *rounded, out, logsumexp, size**-0.5, is_causal)
    ours, plain = torch.ops.bitplan.attention_backward(*arguments), attention_backward_reference(*arguments)
    for grad, expected in zip(ours, plain, strict=True):
        assert grad.shape == expected.shape
        assert relative(grad, expected) < 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(256, 256 + 2 * 128, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.project(x).split((256, 128, 128), -1))
        mixed = F.scaled_dot_product_attention(q * 6, k * 6, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def step(execution: Any, is_compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).cuda().bfloat16()
    x = torch.randn(2, 600, 256, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(2, 600, 256, device="cuda").bfloat16()
    if execution is None:
        y = model(x)
        y.backward(grad)
    else:
        with bp.attach(model, "fp8-attention", example=x, execution=execution) as run:
            y = (run.compile() if is_compiled else model)(x)
            y.backward(grad)
            if isinstance(execution, bp.Native):
                assert not list(run.fallbacks())
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_planned_model_is_as_far_from_bfloat16_as_emulate(is_compiled: bool) -> None:
    native, emulated, plain = step(bp.Native(min_macs=0), is_compiled), step("emulate"), step(None)
    for ours, theirs, exact in zip(native, emulated, plain, strict=True):
        assert 0.6 * relative(theirs, exact) < relative(ours, exact) < 1.4 * relative(theirs, exact)
        assert relative(ours, theirs) < 1.2 * relative(theirs, exact)


def test_nothing_is_written_for_each_pair_of_tokens() -> None:
    """Emulation holds scores and probabilities of 8192 x 8192 tokens: 1 GiB in bfloat16 for 8 heads."""
    q, k, v = (torch.randn(1, 8, 8192, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    model = nn.Module()
    model.forward = lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True)  # type: ignore[method-assign]
    with bp.attach(model, "fp8-attention", example=(q, k, v), execution=bp.Native(min_macs=0)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(q, k, v).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 2**28
