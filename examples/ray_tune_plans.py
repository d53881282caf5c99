"""Search over plans with Ray Tune: ASHA ends the trials of plans that learn slower than others.

    python examples/ray_tune_plans.py

A plan is JSON, so it is a value of the search space as it stands: presets by name, and plans with free numbers as
mappings. Needs ray[tune]. `ray.init(address="auto")` spreads the trials over a cluster.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.nn import functional as F

import bitplan as bp

STEPS = 60
#: No plan, two presets, and weights, activations and gradients in other formats.
PLANS: list[Any] = [
    None,
    "fp8-all",
    "int8-all",
    {"version": 1, "rules": [{"match": "*", "weight": "e3m2", "activation": "e3m2", "grad_activation": "e3m2"}]},
    {"version": 1, "rules": [{"match": "*", "weight": "e2m1", "activation": "e2m1", "grad_activation": "e2m1"}]},
]


def trial(config: dict[str, Any]) -> None:
    """Train a small network under the plan of the trial, and report its loss every ten steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if config["plan"] is not None:
        bp.attach(model, config["plan"], optimizer=optimizer, example=torch.zeros(256, 16))
    for step in range(1, STEPS + 1):
        x = torch.randn(256, 16)
        loss = F.mse_loss(model(x), x[:, :8].prod(1, keepdim=True) + x[:, 8:].sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            tune.report({"loss": loss.item(), "steps": step})


def search(storage: str) -> list[tuple[str, float, int]]:
    """(plan, last loss, steps) of every trial, the best first."""
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"plan": tune.grid_search(PLANS)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="steps", max_t=STEPS, grace_period=20, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    )
    trials = [(str(result.config["plan"]), result.metrics["loss"], result.metrics["steps"]) for result in tuner.fit()]
    return sorted(trials, key=lambda row: (-row[2], row[1]))


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as storage:
        for plan, loss, steps in search(storage):
            print(f"loss {loss:.4f} after {steps} steps: {plan[:60]}")
    ray.shutdown()
