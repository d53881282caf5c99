"""A training loop of your own, recorded: first without a plan, then in 8 bits, judged against the first.

    python examples/own_loop.py
    bitplan runs runs/own-loop
    bitplan report runs/own-loop

Three lines are bitplan's: `record` around the loop, `log` after each step, `evaluate` at the end.
"""

from __future__ import annotations

import torch
from torch import nn

import bitplan as bp
from bitplan.lab.tasks.images import digits

STEPS, BATCH = 240, 128


def train(folder: str, plan: str | None = None, reference: str | None = None) -> str:
    """What the report says of the run."""
    torch.manual_seed(0)
    data = digits()
    images = data.training.take(torch.arange(len(data.training)))[:, :1].flatten(1).float() / 16
    labels = data.training.labels
    held_out = data.held_out.take(torch.arange(len(data.held_out)))[:, :1].flatten(1).float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with bp.record(
        folder,
        model,
        plan,
        optimizer=optimizer,
        example=images[:BATCH],
        reference=reference,
        metric="accuracy",
        trivial=0.1,
        settings={"steps": STEPS, "batch": BATCH},
        overwrite=True,
    ) as run:
        for step in range(STEPS):
            chosen = torch.randint(len(images), (BATCH,))
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if step % 40 == 39:
                with torch.no_grad():
                    right = model(held_out).argmax(1) == data.held_out.labels
                run.evaluate(accuracy=right.float().mean())
    return run.report().answer


if __name__ == "__main__":
    train("runs/own-loop/fp32")
    print(train("runs/own-loop/int8", "int8-all", reference="runs/own-loop/fp32"))
