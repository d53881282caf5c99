"""Scaled-dot-product attention with both products in FP8, and its backward pass on dequantised operands.

* ``bitplan::attention_amax`` computes the amax of each head.
* ``bitplan::attention_cast`` divides a tensor by a scale for each head and rounds it to E4M3, in the layout of queries
  and keys, (batch, tokens, heads, features), or in that of values, see :func:`transpose_values`.
* ``bitplan::attention_restore`` is its inverse in the backward pass, in bfloat16.
* ``bitplan::attention_forward`` takes queries, keys and values as E4M3 codes with a scale for each head and returns
  the output in bfloat16 with the log-sum-exp of each query. Scores stay in float32. Exponentials of scores less the
  largest score so far lie in [0, 1]; they are rounded to E4M3 with the fixed scale 1 / :data:`PEAK` before they are
  multiplied with the values, and divided by their unrounded sum afterwards.
* ``bitplan::attention_backward`` computes the gradients by torch's own kernels in bfloat16: cuDNN's, otherwise flash
  attention's.

On a GPU all but the last are Triton kernels (:mod:`bitplan.executions.native.attention_kernel`). The reference
implementations in this file are plain torch and run elsewhere.

Emulation rounds scores and normalised probabilities to bfloat16, and the probabilities to E4M3 with a scale for each
head, from the largest probability of the head. Under a causal mask this is 1, so the scale is 1 / 448, too. The numbers
differ otherwise by the places of the grid: E4M3 has the same relative spacing everywhere, and what is rounded here is
the probability times the sum of its row. Both errors have the same bound, half an ulp, a 16th of the value. In the
backward pass emulation multiplies the gradient with rounded probabilities for dV, and torch's kernels with unrounded
ones, which they compute again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import launch_directly
from bitplan.executions.native.float8_cast import FORMATS
from bitplan.numerics.rounding import round_float
from bitplan.numerics.scaling import divide

#: The code of the largest probability: the largest value of E4M3.
PEAK = 448.0
#: Keys whose order is exchanged, and those that a block of keys has at least: values are padded to whole blocks.
GROUP, KEY_BLOCK = 16, 128
#: The keys of a block in the reference; the kernel may take others.
_REFERENCE_BLOCK = 128

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "attention_amax(Tensor x) -> Tensor",
    "attention_cast(Tensor x, Tensor scale, bool transposed) -> Tensor",
    "attention_restore(Tensor codes, Tensor scale, SymInt tokens, bool transposed) -> Tensor",
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, "
    "float softmax_scale, bool is_causal) -> (Tensor, Tensor)",
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "float softmax_scale, bool is_causal) -> (Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def transpose_values(codes: Tensor, interleaved: bool = True) -> Tensor:
    """(batch, tokens, heads, features) -> (batch, heads, features, tokens), in whole blocks of keys.

    :param interleaved: whether tokens of each group of 16 come in the order 0, 1, 8, 9, 2, 3, 10, 11, and so on, see
        :mod:`bitplan.executions.native.attention_kernel`.
    """
    batch, tokens, heads, features = codes.shape
    padded = -(-tokens // KEY_BLOCK) * KEY_BLOCK
    as_bytes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, 0, 0, padded - tokens))
    if interleaved:  # axes of a group: half, pair, one of a pair
        grouped = as_bytes.view(batch, padded // GROUP, 2, 4, 2, heads, features)
        as_bytes = grouped.permute(0, 5, 6, 1, 3, 2, 4).reshape(batch, heads, features, padded)
    else:
        as_bytes = as_bytes.permute(0, 2, 3, 1).contiguous()
    return as_bytes.view(codes.dtype)


def restore_values(codes: Tensor, tokens: int, interleaved: bool = True) -> Tensor:
    """The inverse of :func:`transpose_values`."""
    batch, heads, features, padded = codes.shape
    as_bytes = codes.view(torch.uint8)
    if interleaved:
        grouped = as_bytes.view(batch, heads, features, padded // GROUP, 4, 2, 2)
        as_bytes = grouped.permute(0, 3, 5, 4, 6, 1, 2).reshape(batch, padded, heads, features)
    else:
        as_bytes = as_bytes.permute(0, 3, 1, 2)
    return as_bytes[:, :tokens].view(codes.dtype)


def amax_by_head_reference(x: Tensor) -> Tensor:
    """The amax of each head of `x`, (batch, heads, tokens, features)."""
    return torch.maximum(x.amax((0, 2, 3)), -x.amin((0, 2, 3))).float()


def restore_by_head_reference(codes: Tensor, scale: Tensor, tokens: int, transposed: bool) -> Tensor:
    """The values of codes, (batch, tokens, heads, features), in bfloat16."""
    rows = restore_values(codes, tokens) if transposed else codes
    return (rows.float() * scale.view(-1, 1)).to(torch.bfloat16)


def cast_by_head_reference(x: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """The codes of `x`, (batch, heads, tokens, features)."""
    ready = divide(x.float(), scale.view(-1, 1, 1))
    codes = round_float(ready, FORMATS[torch.float8_e4m3fn], "nearest", "saturate").to(torch.float8_e4m3fn)
    codes = codes.transpose(1, 2).contiguous()
    return transpose_values(codes) if transposed else codes


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    softmax_scale: float,
    is_causal: bool,
    block: int = _REFERENCE_BLOCK,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """The output, (batch, tokens, heads, features), and the log-sum-exp, (batch, heads, tokens).

    :param q: codes, (batch, tokens, heads, features); `k` alike, perhaps with fewer heads.
    :param v: codes as :func:`transpose_values` returns them.
    :param q_scale: a number for each head; the others alike.
    """
    queries, heads = q.shape[1:3]
    keys, key_heads = k.shape[1:3]
    group = heads // key_heads
    wide_q = q.float().transpose(1, 2)
    wide_k = k.float().transpose(1, 2).repeat_interleave(group, 1)
    wide_v = restore_values(v, keys, interleaved).float().transpose(1, 2).repeat_interleave(group, 1)
    factor = softmax_scale * q_scale.float() * k_scale.float().repeat_interleave(group)
    factor = factor.view(heads, 1, 1) * math.log2(math.e)
    total = torch.zeros_like(wide_q)
    row_sum = wide_q.new_zeros(*wide_q.shape[:3], 1)
    row_max = torch.full_like(row_sum, -math.inf)
    rows = torch.arange(queries, device=q.device).view(-1, 1)
    for start in range(0, keys, block):
        scores = wide_q @ wide_k[:, :, start : start + block].transpose(-2, -1)
        if is_causal:
            columns = torch.arange(start, start + scores.shape[-1], device=q.device)
            scores = scores.masked_fill(columns > rows, -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        correction = torch.exp2((row_max - new_max) * factor)
        weights = torch.exp2(scores * factor - (new_max * factor - math.log2(PEAK)))
        row_max, row_sum = new_max, row_sum * correction + weights.sum(-1, keepdim=True)
        rounded = round_float(weights, FORMATS[torch.float8_e4m3fn], "nearest", "saturate")
        total = total * correction + rounded @ wide_v[:, :, start : start + block]
    out = total * (v_scale.float().repeat_interleave(group).view(heads, 1, 1) / row_sum)
    logsumexp = (row_max * factor + (row_sum.log2() - math.log2(PEAK))) * math.log(2)
    return out.to(torch.bfloat16).transpose(1, 2).contiguous(), logsumexp.squeeze(-1)


def attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    softmax_scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v`; all tensors are (batch, tokens, heads, features)."""
    group = q.shape[2] // k.shape[2]
    wide_q, wide_grad, wide_out = (tensor.float().transpose(1, 2) for tensor in (q, grad, out))
    wide_k, wide_v = (tensor.float().transpose(1, 2).repeat_interleave(group, 1) for tensor in (k, v))
    scores = wide_q @ wide_k.transpose(-2, -1) * softmax_scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), -math.inf)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    grad_weights = wide_grad @ wide_v.transpose(-2, -1)
    grad_scores = weights * (grad_weights - (wide_grad * wide_out).sum(-1, keepdim=True)) * softmax_scale
    grad_q = grad_scores @ wide_k
    grad_k, grad_v = grad_scores.transpose(-2, -1) @ wide_q, weights.transpose(-2, -1) @ wide_grad
    if group > 1:
        grad_k, grad_v = (torch.unflatten(tensor, 1, (-1, group)).sum(2) for tensor in (grad_k, grad_v))
    return tuple(tensor.to(q.dtype).transpose(1, 2).contiguous() for tensor in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


def _backward_on_gpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    softmax_scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By cuDNN, which takes half of flash attention's time on an H200; otherwise by that, or in plain torch."""
    grad, q, k, v, out = (tensor.contiguous().transpose(1, 2) for tensor in (grad, q, k, v, out))
    backends = torch.backends.cuda
    parameters = backends.SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1])
    lengths = (q.shape[2], k.shape[2], 0.0, is_causal)
    if backends.can_use_cudnn_attention(parameters):
        number = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, logsumexp.unsqueeze(-1), number, number, None, None, None, *lengths),
            scale=softmax_scale,
        )
    elif backends.can_use_flash_attention(parameters):
        number = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, logsumexp, None, None, *lengths, number, number[0]), scale=softmax_scale
        )
    else:
        grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
        return attention_backward_reference(grad, q, k, v, out, logsumexp, softmax_scale, is_causal)
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in grads)


def _fake_cast(x: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    batch, heads, tokens, features = x.shape
    padded = -(-tokens // KEY_BLOCK) * KEY_BLOCK
    shape = (batch, heads, features, padded) if transposed else (batch, tokens, heads, features)
    return x.new_empty(shape, dtype=torch.float8_e4m3fn)


def _fake_amax(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


def _fake_restore(codes: Tensor, scale: Tensor, tokens: int, transposed: bool) -> Tensor:
    batch, heads, features = codes.shape[0], scale.shape[0], codes.shape[2 if transposed else 3]
    return codes.new_empty(batch, tokens, heads, features, dtype=torch.bfloat16)


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _features = q.shape
    return q.new_empty(q.shape, dtype=torch.bfloat16), q.new_empty(batch, heads, tokens, dtype=torch.float32)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _register(name: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # Compiled graphs call these as they are: some calls per layer, whose kernels take longer than the host.
    def run_on_gpu(x: Tensor, *args: Any) -> Any:
        launch = getattr(import_module(f"{__name__}_kernel"), f"launch_{name}")
        with torch.cuda.device(x.get_device()):
            return launch(launch_directly, x if x.stride(-1) == 1 else x.contiguous(), *args)

    _implement(name, reference, fake, run_on_gpu)


def _implement(
    name: str, reference: Callable[..., Any], fake: Callable[..., Any], run_on_gpu: Callable[..., Any]
) -> None:
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, run_on_gpu, "CUDA")
    torch.library.register_fake(f"bitplan::{name}", fake, lib=_LIBRARY)


_register("attention_amax", amax_by_head_reference, _fake_amax)
_register("attention_cast", cast_by_head_reference, _fake_cast)
_register("attention_restore", restore_by_head_reference, _fake_restore)
_register("attention_forward", attention_reference, _fake_forward)
_implement("attention_backward", attention_backward_reference, _fake_backward, _backward_on_gpu)
