"""A Llama from Transformers, small enough for a CPU: the commands of bitplan take it as examples/hf_llama.py:make.

    bitplan plan explain fp8-all examples/hf_llama.py:make
    python examples/hf_llama.py

Run as a script, it trains the model on the digits of 1/7 without a plan and with FP8 linear layers, packed. It needs
the package transformers.
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
