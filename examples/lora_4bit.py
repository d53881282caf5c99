"""LoRA on a base in 4 bits: PEFT's adapters on a small Llama, whose frozen weights lie in memory as NF4.

    python examples/lora_4bit.py                              # about a minute on two cores
    bitplan memory examples/lora_4bit.py:make --plan lora-4bit

The model has random weights, and the text is the source of Python's argparse: nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import bitplan as bp

LENGTH, SEQUENCES, STEPS = 64, 8, 50


def make() -> tuple[torch.nn.Module, dict[str, Tensor], Any]:
    """A Llama with adapters, a batch and its loss: a target of bitplan's commands."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(model, adapters), batch(0), lambda output: output.loss


def batch(step: int) -> dict[str, Tensor]:
    """Windows of the text, byte by byte."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([text[start : start + LENGTH] for start in starts])
    return {"input_ids": ids, "labels": ids}


def megabytes(model: torch.nn.Module) -> float:
    return sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())) / 1e6


def main() -> None:
    model, example, _ = make()
    print(f"weights before: {megabytes(model):.1f} MB")
    run = bp.attach(model, "lora-4bit", example=example)
    print(f"weights with NF4: {megabytes(model):.1f} MB")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")
    run.detach()  # plain parameters again, with the values of NF4
    merged = model.merge_and_unload()
    print(f"merged: {type(merged).__name__}, loss {merged(**batch(0)).loss.item():.3f}")
    if not losses[-1] < losses[0] - 1.5:
        sys.exit("the adapters did not learn")


if __name__ == "__main__":
    main()
