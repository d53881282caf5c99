"""I am out of memory: what does a training step hold, what would fit, and does it?

    python examples/out_of_memory.py

A stack of a transformer's feed-forward blocks, and a budget that it does not fit into. First the step is predicted
without running it, so this also works for a model that does not fit. Plans are tried, plainest first, until one fits.
Then training runs with that plan packed, and torch's allocator says whether the prediction was right.
"""

from __future__ import annotations

import torch
from torch import nn

import bitplan as bp
from bitplan.files import byte_text

BUDGET = 13 * 2**20
#: Plainest first: each one keeps fewer bits.
FORMATS = ("bf16", "e4m3", "mxfp4")


def keep_in(format: str) -> bp.Plan:
    """Every activation in this format, but for the last layer's. Gradients are not kept, so they stay as they are."""
    return bp.Plan.from_yaml(f"""
version: 1
name: activations in {format}
rules:
- {{match: "*", activation: {format}}}
- {{match: head, keep: true}}
""")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential()
    for number in range(6):
        block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
        model.add_module(f"block{number}", block)
    model.add_module("head", nn.Linear(64, 16))
    return model


model = make_model()
batch = (torch.randn(1024, 64), torch.randint(16, (1024,)))
loss_of = nn.functional.cross_entropy

# 1. What fits? Nothing is computed here.
plain = bp.estimate_memory(model, batch, loss_of, "adamw")
print(f"no plan: keeps {byte_text(plain.activations)}, peak {byte_text(plain.peak)}; {byte_text(BUDGET)} are there")
for format in FORMATS:
    plan = keep_in(format)
    predicted = bp.estimate_memory(model, batch, loss_of, "adamw", plan, "packed")
    fits = predicted.peak <= BUDGET
    print(
        f"{plan.name}, packed: keeps {byte_text(predicted.activations)}, peak {byte_text(predicted.peak)}, "
        f"{'fits' if fits else 'does not fit'}"
    )
    if fits:
        break
else:
    raise SystemExit("Nothing fits: take a smaller batch.")

# 2. Does it? The allocator's own figures, before and after.
before = bp.analysis.memory.measure_memory(model, batch, loss_of, "adamw")
after = bp.analysis.memory.measure_memory(model, batch, loss_of, "adamw", plan, "packed")
print(f"measured: kept for backward {before.activations} -> {after.activations} bytes")
print(f"measured: peak {before.peak} -> {after.peak} bytes")

# 3. Train with it. One line is new, and run.step() after the optimizer's.
run = bp.attach(model, plan, example=batch[0], execution="packed")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(20):
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} with {plan.name}, packed")
