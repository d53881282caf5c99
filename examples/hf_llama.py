"""A Llama from Transformers, small enough for a CPU: the commands of bitplan take it as examples/hf_llama.py:make.

    bitplan plan explain fp8-all examples/hf_llama.py:make
    bitplan memory examples/hf_llama.py:llama3_70b --shard fsdp=64,tp=8
    python examples/hf_llama.py

Run as a script, it trains the model on the digits of 1/7 without a plan and with FP8 linear layers, packed. The shapes
of Llama 3 70B and Llama 3.1 405B are made on the meta device, without weights. It needs the package transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import bitplan as bp

DIGITS = torch.tensor([1, 4, 2, 8, 5, 7])


def make() -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """The model, a batch as it takes it, and the loss of its output."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    rows = torch.stack([DIGITS.roll(shift).repeat(8) for shift in range(6)]).repeat(4, 1)
    return LlamaForCausalLM(config), {"input_ids": rows, "labels": rows}, lambda output: output.loss


def llama3_70b() -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """The shapes of Llama 3 70B, with a sequence of 8192 tokens and activation checkpointing of every layer."""
    return make_on_meta(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)


def llama3_405b() -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """The same for Llama 3.1 405B."""
    return make_on_meta(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)


def make_on_meta(**shapes: int) -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """A Llama 3 on the meta device, which takes no memory."""
    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, **shapes
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        tokens = torch.zeros(1, 8192, dtype=torch.long)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, {"input_ids": tokens, "labels": tokens}, lambda output: output.loss


def train(plan: str | None) -> float:
    """The last loss of 30 steps."""
    model, batch, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = None
    if plan is not None:
        run = bp.attach(model, plan, optimizer=optimizer, example=batch, execution="packed")
    for _ in range(30):
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.detach()
    return loss.item()


if __name__ == "__main__":
    for plan in (None, "fp8-linear"):
        print(f"{plan or 'no plan':12} loss {train(plan):.4f}")
