"""A training function that is compared under several plans, each run in a process of its own.

    bitplan compare examples/own_train.py:train --plans fp32 int8-all --seeds 2
    bitplan report runs/compare-own_train-fp32-int8-all

The function gets a plan (without rules for fp32) and a seed, and returns its figures on held-out data; the first one is
what plans are judged by. Killed half-way, the same command keeps the runs that have ended.
"""

from __future__ import annotations

import torch
from torch import nn

import bitplan as bp
from bitplan.lab.tasks.images import digits

STEPS, BATCH = 240, 128


def train(plan: bp.Plan, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    data = digits()
    images = data.training.take(torch.arange(len(data.training)))[:, :1].flatten(1).float() / 16
    labels = data.training.labels
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run = bp.attach(model, plan, optimizer=optimizer, example=images[:BATCH], seed=seed)
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.detach()
    held_out = data.held_out.take(torch.arange(len(data.held_out)))[:, :1].flatten(1).float() / 16
    with torch.no_grad():
        accuracy = (model(held_out).argmax(1) == data.held_out.labels).float().mean()
    return {"accuracy": float(accuracy)}
