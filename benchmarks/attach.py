"""``python benchmarks/run.py attach``: the time of training steps under a plan, relative to the model without one.

Every variant has a process of its own. They take turns, a few steps each, so that a machine that gets hot or busy slows
all of them; the best turn of each counts. A step is forward, loss, backward and SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.own_plans import own_plan
from benchmarks.processes import call_all, contenders, require_all
from benchmarks.timing import seconds_per_step, seconds_per_turn, take_turns
from bitplan.analysis.targets import Target, batch_size, move_target
from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.lab.targets import load_target
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine
from bitplan.plans import Plan
from bitplan.runtime.attach import attach

Mode = Literal["eager", "compiled"]

PLAIN, EMPTY = "no plan", "empty plan"
#: The benchmark's own plans.
OWN_PLANS = ("unscaled", "tensor-scaled")

#: (device, mode, variant) -> the largest multiple of the step without a plan. The GPU's are for ResNet-50 under BF16
#: autocast, the CPU's for ResNet-20 at batch 128.
TARGETS: dict[tuple[str, Mode, str], float] = {
    ("cuda", "compiled", "unscaled"): 1.05,
    ("cuda", "eager", "unscaled"): 2.0,
    ("cpu", "compiled", "unscaled"): 1.5,
    ("cpu", "compiled", "tensor-scaled"): 1.9,
    ("cuda", "compiled", EMPTY): 1.02,
    ("cuda", "eager", EMPTY): 1.02,
    ("cpu", "compiled", EMPTY): 1.02,
    ("cpu", "eager", EMPTY): 1.02,
}


@dataclass(frozen=True)
class Row:
    """One variant in one mode."""

    mode: Mode
    variant: str
    milliseconds: float
    #: Interquartile range of the turns over their median.
    spread: float
    #: Relative to the step without a plan.
    ratio: float
    #: Seconds of the first step, compilation included.
    first_seconds: float
    target: float | None
    reached: bool | None


class Contender:
    """The model with its optimizer, trained on one batch under one plan."""

    def __init__(self, target: Target, plan: Plan | None, mode: Mode, autocast: bool) -> None:
        self.model = target.model
        inputs, self.expected = split_batch(target.batch, target.loss)
        self.arguments = call_arguments(inputs)
        self.loss = target.loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.run = None if plan is None else attach(self.model, plan, example=inputs)
        self.forward = torch.compile(self.model, fullgraph=True) if mode == "compiled" else self.model
        self.device = next(self.model.parameters()).device
        self.autocast = autocast

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            output = self.forward(*self.arguments[0], **self.arguments[1])
            error: Tensor = output.float().square().mean() if self.loss is None else self._loss(output)
        error.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.run is not None:
            self.run.step()

    def _loss(self, output: Any) -> Tensor:
        assert self.loss is not None
        loss: Tensor = call_loss(self.loss, output, self.expected)
        return loss

    def first_step(self) -> float:
        """Seconds of the step that compiles."""
        return seconds_per_step(self.step, 1, self.device)

    def seconds_per_step(self, steps: int) -> float:
        """Wall time per step over a number of steps."""
        return seconds_per_turn(self.step, steps, self.device)


def load_contender(
    model: str, device: str, batch: int | None, seed: int, plan: Plan | None, mode: Mode, autocast: bool
) -> Contender:
    """A contender with the weights of the seed."""
    torch.manual_seed(seed)
    return Contender(move_target(load_target(model), chosen_device(device), batch), plan, mode, autocast)


def bench_attach(
    model: str = "resnet20",
    plans: Sequence[str] = OWN_PLANS,
    device: str = "cpu",
    modes: Sequence[Mode] = ("eager", "compiled"),
    batch: int | None = None,
    autocast: bool | None = None,
    turns: int = 8,
    seed: int = 0,
    in_processes: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, settings and one entry per row.

    :param model: a target, see :func:`bitplan.lab.targets.load_target`.
    :param autocast: BF16 autocast; by default on a GPU only.
    """
    where = chosen_device(device)
    samples = batch_size(move_target(load_target(model), torch.device("cpu"), batch).batch)
    uses_autocast = where.type == "cuda" if autocast is None else autocast
    variants: dict[str, Plan | None] = {PLAIN: None, EMPTY: Plan(), **{name: own_plan(name) for name in plans}}
    rows: list[Row] = []
    for mode in modes:
        arguments = {name: (model, device, batch, seed, plan, mode, uses_autocast) for name, plan in variants.items()}
        with contenders(load_contender, arguments, in_processes) as ready:
            first = require_all(call_all(ready, "first_step"))
            times = take_turns({name: partial(each.call, "seconds_per_step") for name, each in ready.items()}, turns)
        for name in variants:
            limit = TARGETS.get((where.type, mode, name))
            ratio = times[name].best / times[PLAIN].best
            reached = None if limit is None else ratio <= limit
            measured = (times[name].best * 1e3, times[name].spread, ratio, first[name])
            rows.append(Row(mode, name, *measured, limit, reached))
            on_row(rows[-1])
    return {
        "benchmark": "attach",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "device": device,
        "model": model,
        "batch": samples,
        "autocast": "bfloat16" if uses_autocast else None,
        "seed": seed,
        "plans": {name: plan.to_dict() for name, plan in variants.items() if plan is not None and plan.rules},
        "rows": [asdict(row) for row in rows],
    }
