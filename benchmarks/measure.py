"""``python benchmarks/run.py measure``: the cost of a probe of the default candidates, in training steps of the model.

Steps and probes take turns, so that a machine that gets busy slows both; the best turn of each counts. A step is
forward, loss, backward and the optimizer, as a task trains; a probe is one call of :func:`bitplan.measure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitplan.analysis.measure import DEFAULT_CANDIDATES, measure
from bitplan.analysis.targets import Target, batch_size, move_target
from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.gemm.sampling import Sampling
from bitplan.lab.targets import load_target
from bitplan.machine import describe_machine

#: The largest cost of a full probe of the default candidates, in training steps.
MOST_STEPS = 5.0
DEFAULT_TARGETS = ("resnet20", "bert-mini")


@dataclass(frozen=True)
class Row:
    """One target."""

    target: str
    batch: int
    products: int
    step_milliseconds: float
    probe_milliseconds: float
    #: The probe's time in steps.
    steps: float
    reached: bool


def bench_measure(
    targets: Sequence[str] = DEFAULT_TARGETS,
    device: str = "cpu",
    turns: int = 3,
    seed: int = 0,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, settings and one entry per target."""
    where = torch.device(device)
    rows = []
    for name in targets:
        torch.manual_seed(seed)
        rows.append(_row(name, move_target(load_target(name), where), turns))
        on_row(rows[-1])
    return {
        "benchmark": "measure",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "device": device,
        "candidates": list(map(str, DEFAULT_CANDIDATES)),
        "sampling": asdict(Sampling()),
        "seed": seed,
        "turns": turns,
        "limit": MOST_STEPS,
        "rows": [asdict(row) for row in rows],
    }


def _row(name: str, target: Target, turns: int) -> Row:
    optimizer = torch.optim.SGD(target.model.parameters(), lr=1e-4, momentum=0.9)
    inputs, expected = split_batch(target.batch, target.loss)
    args, kwargs = call_arguments(inputs)

    def step() -> None:
        output = target.model(*args, **kwargs)
        loss = output.float().square().mean() if target.loss is None else call_loss(target.loss, output, expected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    products = len(measure(target.model, [target.batch], target.loss).products)
    step()
    best = {"step": float("inf"), "probe": float("inf")}
    for _ in range(turns):
        for what, work in (("step", step), ("probe", lambda: measure(target.model, [target.batch], target.loss))):
            best[what] = min(best[what], _seconds(work))
    ratio = best["probe"] / best["step"]
    return Row(
        *(name, batch_size(target.batch), products, best["step"] * 1e3, best["probe"] * 1e3, ratio),
        reached=ratio <= MOST_STEPS,
    )


def _seconds(work: Callable[[], Any]) -> float:
    _wait()
    begin = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
