"""Out of memory: what takes the space, which plan fits, and does it really?

    python examples/out_of_memory.py

A stack of a transformer's feed-forward blocks exceeds a budget. The memory of a step is estimated without running it,
so this also works for a model that does not fit. Plans are tried, most precise first, until one fits. Then the model is
trained with that plan packed, and torch's allocator shows whether the estimate was right.
"""

from __future__ import annotations

import torch
from torch import nn

import bitplan as bp
from bitplan.analysis.memory import measure_memory
from bitplan.files import byte_text

BUDGET = 13 * 2**20
#: Most precise first.
FORMATS = ("bf16", "e4m3", "mxfp4")


def activations_in(format: str) -> bp.Plan:
    """Every activation in this format, except the last layer's. Gradients are not saved, so they are not rounded."""
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

# 1. What fits? Nothing is run here.
plain = bp.estimate_memory(model, batch, loss_of, "adamw")
print(f"no plan: saves {byte_text(plain.activations)}, peak {byte_text(plain.peak)}; budget {byte_text(BUDGET)}")
for format in FORMATS:
    plan = activations_in(format)
    estimated = bp.estimate_memory(model, batch, loss_of, "adamw", plan, "packed")
    fits = estimated.peak <= BUDGET
    print(
        f"{plan.name}, packed: saves {byte_text(estimated.activations)}, peak {byte_text(estimated.peak)}, "
        f"{'fits' if fits else 'does not fit'}"
    )
    if fits:
        break
else:
    raise SystemExit("Nothing fits: use a smaller batch.")

# 2. Is the estimate right? The allocator's figures without and with the plan.
before = measure_memory(model, batch, loss_of, "adamw")
after = measure_memory(model, batch, loss_of, "adamw", plan, "packed")
print(f"measured: saved for backward {before.activations} -> {after.activations} bytes")
print(f"measured: peak {before.peak} -> {after.peak} bytes")

# 3. Train with it.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = bp.attach(model, plan, optimizer=optimizer, example=batch[0], execution="packed")
losses = []
for _ in range(20):
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} with {plan.name}, packed")
