"""A Llama from transformers under FSDP2: linear layers in FP8, weights gathered and gradients reduced in FP8.

    torchrun --nproc-per-node 2 examples/fsdp2_train.py

The plan is attached like any other; its `communication:` says what goes over the wire. On CPUs the processes talk by
gloo, on GPUs by NCCL. It needs the package transformers.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import bitplan

PLAN = {
    "version": 1,
    "extends": "fp8-linear",
    "communication": {"gather": "e4m3", "reduce": {"format": "e5m2", "rounding": "stochastic"}},
}
STEPS, VOCABULARY, LENGTH = 20, 64, 32


def batch_of(step: int, rank: int, device: torch.device) -> Tensor:
    """Sentences that count upwards from a random number, different ones in every process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    return ((first + torch.arange(LENGTH)) % VOCABULARY).to(device)


def main() -> None:
    is_on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_on_gpu else "gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    if is_on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = bitplan.attach(model, PLAN, optimizer=optimizer)
    for step in range(STEPS):
        batch = batch_of(step, rank, device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean.item() / dist.get_world_size():.3f}")
    run.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
