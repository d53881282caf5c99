"""FP4 for most of a run, and the forward pass in high precision for its last fifth.

    python examples/late_switch.py
    python examples/late_switch.py --steps 600 --seeds 3    # the table of docs/tutorials/switch-late.md
    python examples/late_switch.py --steps 600 --all-points # its picture

A network learns which token follows which in a random chain. The probabilities are known, so that its error is known
exactly: the mean Kullback-Leibler divergence from the truth to the network's prediction, 0 at best.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import bitplan as bp

TOKENS, BATCH, POINTS = 64, 512, 20
#: nvfp4-late without its switch.
NVFP4 = {"version": 1, "extends": "nvfp4-late", "quantizers": {"forward": "nvfp4"}}
PLANS = {
    "no plan": None,
    "nvfp4": NVFP4,
    "nvfp4-late": "nvfp4-late",
    "fp8-linear": "fp8-linear",
    "fp8-late": "fp8-late",
}


def next_token_probabilities() -> Tensor:
    """For each token, the probabilities of the next one."""
    torch.manual_seed(0)
    return torch.distributions.Dirichlet(torch.full((TOKENS, TOKENS), 0.1)).sample()


def train(plan: bp.Plan | str | dict | None, seed: int, steps: int) -> list[float]:
    """The error of the network, evaluated as it is trained, at equal distances of a run."""
    truth = next_token_probabilities()
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, TOKENS)]
    model = nn.Sequential(nn.Embedding(TOKENS, 64), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Constant for half of the run, then falling to 2 %.
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps) + 0.02))
    run = None
    if plan is not None:  # a plan that changes over time needs the length of the run
        run = bp.attach(model, plan, optimizer=optimizer, example=torch.arange(BATCH) % TOKENS, steps=steps)
    errors = []
    for step in range(1, steps + 1):
        tokens = torch.randint(TOKENS, (BATCH,))
        labels = torch.multinomial(truth[tokens], 1).squeeze(1)
        nn.functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        if step % (steps // POINTS) == 0:
            errors.append(divergence(truth, model))
    if run is not None:
        run.detach()
    return errors


def divergence(truth: Tensor, model: nn.Module) -> float:
    """The mean Kullback-Leibler divergence over all tokens, in nats."""
    with torch.no_grad():
        predicted = model.eval()(torch.arange(TOKENS)).log_softmax(-1)
    model.train()
    return (truth * (truth.clamp_min(1e-12).log() - predicted)).sum(-1).mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--all-points", action="store_true", help="Print the error at every 5 % of the run.")
    options = parser.parse_args()
    shown = range(5, 101, 5) if options.all_points else (50, 75, 80, 85, 90, 95, 100)
    print(f"{'error in nats at':16}" + "".join(f"{percent:>8}%" for percent in shown))
    for name, plan in PLANS.items():
        curves = torch.tensor([train(plan, seed, options.steps) for seed in range(options.seeds)])
        mean, spread = curves.mean(0), curves[:, -1].std().item() if options.seeds > 1 else 0.0
        row = "".join(f"{mean[percent * POINTS // 100 - 1]:9.4f}" for percent in shown)
        print(f"{name:16}{row}  +- {spread:.4f}")
