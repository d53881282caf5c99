"""A tiny task, a plan with everything that a resumed run could lose, and what two runs are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.plans import Plan

MakeTask = Callable[..., Task]
Fingerprint = Callable[[Path], tuple[str, ...]]

NOISY_PLAN = """
version: 1
name: noisy
quantizers:
  w: {format: e3m2, rounding: stochastic}
  a: {format: int4, scale: tensor, range: minmax, eval: ema}
  g: {format: e5m2, rounding: stochastic}
rules:
- {match: "*", weight: w, activation: a, grad_activation: g}
"""


@pytest.fixture
def tiny_file() -> Path:
    return Path(__file__).with_name("tiny_task.py")


@pytest.fixture
def tiny(tiny_file: Path) -> MakeTask:
    def make(*settings: str, seed: int = 0) -> Task:
        return find_task(f"{tiny_file}:Tiny", settings, seed)

    return make


@pytest.fixture
def noisy() -> Plan:
    return Plan.from_yaml(NOISY_PLAN)


@pytest.fixture
def fingerprint() -> Fingerprint:
    """Of all that a run computed: weights, optimizer and records, the rest of its state, and its metrics."""

    def of(folder: Path) -> tuple[str, ...]:
        newest = checkpoints_in(folder / "checkpoints")[0]
        files = (newest.tensors_file, newest.json_file, folder / "metrics.jsonl", folder / "model.safetensors")
        return tuple(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)

    return of
