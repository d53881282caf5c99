"""Runs on a GPU resume bit for bit, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.lab.train import train
from bitplan.plans import Plan

pytestmark = pytest.mark.gpu


def on_gpu(task: Any) -> Any:
    """The task with its evaluation's data where the model is."""
    evaluate = task.evaluate

    def moved(model: torch.nn.Module) -> Any:
        task.points, task.labels = task.points.cuda(), task.labels.cuda()
        try:
            return evaluate(model)
        finally:
            task.points, task.labels = task.points.cpu(), task.labels.cpu()

    task.evaluate = moved
    return task


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    summary = train(on_gpu(tiny("optimizer=adamw")), noisy, folder=tmp_path / "whole", device="cuda")
    assert summary.status == "finished"
    assert 0 < summary.peak < 2**30
    seen: list[int] = []
    for step in (5, 13):
        stopped = train(
            on_gpu(tiny("optimizer=adamw")),
            noisy,
            folder=tmp_path / "parts",
            device="cuda",
            on_progress=lambda now: seen.append(now.step),
            stop=lambda step=step: seen[-1] >= step,
        )
        assert stopped.step == step
    train(on_gpu(tiny("optimizer=adamw")), noisy, folder=tmp_path / "parts", device="cuda")
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    assert torch.are_deterministic_algorithms_enabled() == before


def test_what_broke_first_is_found(tmp_path: Path, tiny: Any) -> None:
    task = on_gpu(tiny())
    batch = task.batch
    task.batch = lambda step: (batch(step)[0] * (1e30 if step == 8 else 1), batch(step)[1])
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "0", "activation": "fp16"}]})
    summary = train(task, plan, folder=tmp_path / "run", device="cuda")
    assert (summary.status, summary.site) == ("diverged", "0/linear.0:activation")
