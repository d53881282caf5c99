"""Whether a step will fit, and with what plan: answered without running the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitplan.analysis.memory.estimate import estimate_memory
from bitplan.analysis.memory.step import Memory, OptimizerChoice
from bitplan.analysis.targets import Target

#: What is tried where no plan is named: the plainest first, and each keeps fewer bits than the one before.
LADDER: tuple[str | None, ...] = (None, "bf16-all", "fp8-all", "int4-all", "int2-all")


@dataclass(frozen=True)
class Choice:
    """One way to train, with what it would hold."""

    #: What the user called the plan; None is without one.
    plan: str | None
    execution: str
    estimated: Memory
    #: Whether the peak lies within the budget; None where there is no budget.
    fits: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan,
            "execution": self.execution,
            "estimated": self.estimated.to_dict(),
            "fits": self.fits,
        }


def choices(
    target: Target,
    plans: Iterable[str | None],
    execution: str,
    optimizer: OptimizerChoice,
    budget: int | None,
    *,
    compile: bool = False,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[Choice]:
    """What each plan would hold, one after the other."""
    for plan in plans:
        how = "emulate" if plan is None else execution
        estimated = estimate_memory(
            *(target.model, target.batch, target.loss, optimizer, plan, how, compile),
            autocast=autocast,
            device=device,
        )
        yield Choice(plan, how, estimated, None if budget is None else estimated.peak <= budget)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
