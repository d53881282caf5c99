"""A number format of your own: any list of up to 256 numbers.

    python examples/own_format.py

NF4, whose values are quantiles of a normal distribution, is made here from its definition (Dettmers et al. 2023,
appendix E). A small network is trained with its weights and saved activations in it, in 4 bits each.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import nn

import bitplan as bp

# 8 quantiles above zero, 7 below, and zero itself, scaled to [-1, 1].
quantile, offset = NormalDist().inv_cdf, 0.9677083
above = [quantile(offset + (0.5 - offset) * step / 8) for step in range(8)]
below = [-quantile(offset + (0.5 - offset) * step / 7) for step in range(7)]
mine = bp.register_format("my-nf4", [value / above[0] for value in (*below, 0.0, *above)])
print(f"{mine}: {mine.bits} bits, {len(mine.values())} values from {mine.min} to {mine.max}")

# Its rounding error on weights, with one scale for 64 neighbours.
torch.manual_seed(0)
weights = torch.randn(256, 256) / 16  # the initialisation of a layer with 256 inputs
for name in ("my-nf4", "int4", "e2m1"):
    rounded = bp.quantize(weights, name, scale="block", block=64)
    print(f"{name:8} relative error {float((rounded - weights).norm() / weights.norm()):.4f}")

packed = bp.pack(weights, mine, scale="block", block=64)
assert torch.equal(packed.unpack(), bp.quantize(weights, mine, scale="block", block=64))
print(f"packed: {weights.nbytes} -> {packed.nbytes} bytes")

# In a plan it is used like any other format.
plan = bp.Plan.from_yaml("""
version: 1
quantizers: {low: {format: my-nf4, scale: block, block: 64}}
rules:
- {match: "*", op: linear, weight: low}
- {match: "*", op: relu, activation: low}
""")
inputs = torch.randn(512, 64)
labels = (inputs[:, :32].square().sum(1) > inputs[:, 32:].square().sum(1)).long()


def train(execution: str | None) -> tuple[float, nn.Module, bp.Attachment | None]:
    """The loss after 60 steps, in full precision where there is no execution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run = None
    if execution is not None:
        run = bp.attach(model, plan, optimizer=optimizer, example=inputs, execution=execution)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), model, run


plain, model, _ = train(None)
memory = bp.estimate_memory(model, (inputs, labels), nn.functional.cross_entropy)
rounded, _, run = train("packed")
assert run is not None
packed_memory, cost = run.memory((inputs, labels), nn.functional.cross_entropy), run.cost()
print(f"loss after 60 steps: {plain:.4f} in float32, {rounded:.4f} in my-nf4")
print(f"saved tensors: {memory.activations} bytes in float32, {packed_memory.measured.activations} in my-nf4, measured")
print(f"{cost.relative:.1%} of the bit operations of FP32")
run.detach()

# The plan's file holds the values, so every program that loads it knows the format:
# bitplan train digits --plan own_format.yaml
plan.save("own_format.yaml")
print("wrote own_format.yaml")
