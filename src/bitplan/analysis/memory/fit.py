"""Whether a training step fits into memory, and with which plan, without running the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitplan.analysis.memory.estimate import estimate_memory
from bitplan.analysis.memory.ranks import RankEstimate, Traffic, estimate_rank
from bitplan.analysis.memory.step import Memory, OptimizerChoice
from bitplan.analysis.sharding import Sharding
from bitplan.analysis.targets import Target
from bitplan.plans.loading import find_plan

#: Plans that are tried if none is named, with fewer bits from one to the next.
LADDER: tuple[str | None, ...] = (None, "bf16-all", "fp8-all", "int4-all", "int2-all")


@dataclass(frozen=True)
class PlanEstimate:
    """The estimated memory of a step under a plan."""

    #: The name of the plan; None: no plan.
    plan: str | None
    execution: str
    estimated: Memory
    #: Whether the peak is within the budget; None without a budget.
    fits: bool | None
    #: Whether the execution, with its options, is the plan's own.
    is_declared: bool = False
    #: What one process sends in a step; empty without sharding.
    traffic: tuple[Traffic, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan,
            "execution": self.execution,
            "estimated": self.estimated.to_dict(),
            "fits": self.fits,
        }


def estimate_plans(
    target: Target,
    plans: Iterable[str | None],
    execution: str | None,
    optimizer: OptimizerChoice,
    budget: int | None,
    *,
    compile: bool = False,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
    sharding: Sharding | None = None,
) -> Iterator[PlanEstimate]:
    """Estimate the memory under each plan.

    :param execution: None: as each plan says, otherwise packed with a budget and emulated without.
    :param sharding: estimate one process of a step that is split like this.
    """
    default = "emulate" if budget is None else "packed"
    for plan in plans:
        declared = None if plan is None else find_plan(plan).declared_execution
        uses_declared = execution is None and declared is not None
        plan_execution = "emulate" if plan is None else execution or (declared.kind if declared else default)
        # The plan's own execution has options, too.
        step = (target.model, target.batch, target.loss, optimizer, plan, None if uses_declared else plan_execution)
        if sharding is None:
            rank = RankEstimate(estimate_memory(*step, compile, autocast=autocast, device=device), ())
        else:
            rank = estimate_rank(*step, sharding=sharding, autocast=autocast)
        estimated = rank.memory
        fits = None if budget is None else estimated.peak <= budget
        yield PlanEstimate(plan, plan_execution, estimated, fits, uses_declared, rank.traffic)


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None if the system does not report them."""
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
