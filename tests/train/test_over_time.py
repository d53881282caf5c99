"""Training under plans that change over time: resumed bit for bit, cost by cost, and as long as its task says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitplan.analysis.cost import estimate_cost
from bitplan.lab.train import RunFolder, train
from bitplan.plans import Plan

PLAN = Plan.from_yaml("""
version: 1
schedules:
  up: {name: LR, low: 3, high: 8, cycles: 3}
quantizers:
  w: {format: int, bits: up, scale: channel, range: minmax, rounding: stochastic}
  a:
    until: 60%
    use: {format: int, bits: up, scale: tensor, range: minmax, eval: ema}
    then: {format: e4m3, scale: tensor}
rules:
- {match: "*", op: linear, w: w, x: a, dy: {format: int8, scale: tensor, rounding: stochastic}}
""")


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, tiny: Any, fingerprint: Any, execution: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), PLAN, folder=whole, execution=execution)
    for step in (1, 7, 14, 15, 23):  # 60 % are 14.4 steps
        seen: list[int] = []
        summary = train(
            tiny(),
            PLAN,
            folder=parts,
            execution=execution,
            on_progress=lambda now, seen=seen: seen.append(now.step),  # type: ignore[misc]
            stop=lambda seen=seen, step=step: bool(seen) and seen[-1] >= step,  # type: ignore[misc]
        )
        assert (summary.status, summary.step) == ("stopped", step)
    assert train(tiny(), PLAN, folder=parts, execution=execution).status == "finished"
    assert fingerprint(parts) == fingerprint(whole)


def test_the_cost_of_a_run_is_what_was_foretold(tmp_path: Path, tiny: Any) -> None:
    task = tiny("hold=6")
    summary = train(task, PLAN, folder=tmp_path / "run", log_every=1)
    target = task.target()
    foretold = estimate_cost(target.model, PLAN, target.batch, target.loss, steps=30)
    assert summary.step == 30
    assert summary.cost["bitops"] == foretold.bit_operations
    bits = [line["bits"] for line in RunFolder(tmp_path / "run").metrics() if "bits" in line]
    assert len(set(bits)) > 4
