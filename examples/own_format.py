"""Your own number format: its name defines it.

    python examples/own_format.py

e3m4b2 is a float of 8 bits: a sign, 3 exponent bits, 4 mantissa bits, and an additional bias of 2, which multiplies
every value by 2^-2. Weights are small, so a range shifted towards zero suits them better than that of e3m4.
"""

from __future__ import annotations

import torch

import bitplan as bp

mine = bp.get_format("e3m4b2")
print(f"{mine}: {mine.bits} bits, from {mine.min_subnormal} to {mine.max}, {len(mine.values())} values")

# Its rounding error, next to the well-known 8-bit floats.
torch.manual_seed(0)
weights = torch.randn(256, 256) / 16  # the initialisation of a layer with 256 inputs


def relative_error(rounded: torch.Tensor) -> float:
    return float((rounded - weights).norm() / weights.norm())


for name in ("e3m4b2", "e3m4", "e4m3", "e5m2"):
    print(f"{name:8} relative error {relative_error(bp.quantize(weights, name)):.4f}")

# The same values, stored in 8 bits each.
packed = bp.pack(weights, mine)
assert torch.equal(packed.unpack(), bp.quantize(weights, mine))
print(f"packed: {weights.nbytes} -> {packed.nbytes} bytes")

# In a plan it is used like any other format.
plan = bp.Plan.from_yaml("""
version: 1
rules:
- {match: "*", weight: e3m4b2, activation: {format: e3m4b2, scale: tensor}}
""")
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
batch = torch.randn(32, 256)
with bp.attach(model, plan, example=batch) as run:
    model(batch).square().mean().backward()
    print(*(row for row in run.table() if "e3m4b2" in str(row)), sep="\n")
