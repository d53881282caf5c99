"""Two lines turn a plain PyTorch loop into a low-precision one. They are marked (1) and (2).

    python examples/plain_pytorch.py

Trains a small network on the 1,797 handwritten digits that come with bitplan, first without a plan, then with every
weight, activation and activation gradient in 8 bits.
"""

from __future__ import annotations

import torch
from torch import nn

import bitplan as bp
from bitplan.lab.tasks.images import digits

STEPS, BATCH = 300, 128


def images_and_labels(held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey pixels between 0 and 1, and the digits."""
    data = digits()
    part = data.held_out if held_out else data.training
    images = part.take(torch.arange(len(part)))[:, :1]
    return images.flatten(1).float() / images.max(), part.labels


def train(plan: bp.Plan | str) -> float:
    """The held-out accuracy of a newly trained network."""
    torch.manual_seed(0)
    images, labels = images_and_labels(held_out=False)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # (1) Raises if a rule of the plan has no effect; counts steps by a hook on the optimizer.
    run = bp.attach(model, plan, optimizer=optimizer, example=images[:BATCH])
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(run.cost())
    run.detach()  # (2) the model is plain again, with the weights it has learned
    images, labels = images_and_labels(held_out=True)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    plain, planned = train(bp.Plan()), train("int8-all")  # a plan without rules changes nothing
    print(f"accuracy without a plan {plain:.3f}, in 8 bits {planned:.3f}")
