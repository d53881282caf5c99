"""What the trainer integrations share: settings of a plan, checks of a model, and the state beside a checkpoint.

The integrations differ in the events of their trainer. What happens at an event is the same: attach before the trainer
wraps the model, learn the number of steps, count steps, save and restore the state of the run, detach.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bitplan.capture.planned_classes import unwrapped
from bitplan.capture.scopes import is_planned
from bitplan.compiler.torch_private import COMPILED_CALL, tree_map_only
from bitplan.errors import MissingPackageError, PlanError, RunError
from bitplan.plans import Plan
from bitplan.plans.execution import Emulate, ExecutionOptions, Native, execution_options
from bitplan.plans.loading import find_plan
from bitplan.runtime.attach import attach
from bitplan.runtime.attachment import Attachment
from bitplan.runtime.state_file import STATE_FILE, load_state

log = logging.getLogger("bitplan")

PlanSource = Plan | str | PathLike[str] | Mapping[str, Any]


def missing_package(package: str, extra: str) -> MissingPackageError:
    """The error of an integration whose package is not installed."""
    return MissingPackageError(
        f"bitplan.integrations.{extra} needs {package}, which is not installed: run 'pip install \"bitplan[{extra}]\"'."
    )


@dataclass(frozen=True)
class PlanSettings:
    """A plan and how it is attached, as the integrations take them; a mistake in the plan raises when this is made."""

    source: PlanSource
    execution_source: str | ExecutionOptions | None = None
    #: Whether :meth:`bitplan.Attachment.compile` compiles the model in place.
    compile: bool = False
    example: Any = None
    seed: int = 0
    stats: bool = False
    #: Whether a checkpoint without bitplan's state may be resumed, with empty histories.
    fresh_state: bool = False
    plan: Plan = field(init=False)
    execution: ExecutionOptions = field(init=False)

    def __post_init__(self) -> None:
        plan = find_plan(self.source)
        given = None if self.execution_source is None else execution_options(self.execution_source)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "execution", given or plan.declared_execution or Emulate())

    @property
    def why_example(self) -> str | None:
        """Why the plan cannot be attached without an example batch; None where it can."""
        if self.plan.has_selectors:
            return "the plan chooses tensors by select"
        if self.plan.declared_loss == "chunked":
            return "the plan computes the loss in chunks"
        if isinstance(self.execution, Native) and self.execution.strict:
            return "Native(strict=True) checks all GEMMs"
        return "a model that is compiled from the start cannot be watched" if self.compile else None

    def attach(
        self, model: nn.Module, example: Any = None, optimizer: Optimizer | None = None, steps: int | None = None
    ) -> Attachment:
        """Attach the plan, and compile the model in place where that is asked for.

        :param example: a batch that the trainer has, for settings without an example of their own.
        :param steps: None: :meth:`~bitplan.Attachment.set_total_steps` is called later.
        """
        batch = self.example if self.example is not None else example
        if batch is None and self.why_example is not None:
            raise PlanError(f"{self.why_example}, which needs an example batch: pass example=, as the model takes it.")
        run = attach(
            model,
            self.plan,
            optimizer=optimizer,
            steps="later" if steps is None else steps,
            example=batch,
            seed=self.seed,
            stats=self.stats,
            execution=self.execution,
        )
        if self.compile:
            run.compile(fullgraph=False, in_place=True)
        return run

    def restore(self, run: Attachment, folder: Path, step: int) -> None:
        """Restore the state in `folder`, a trainer's checkpoint after `step` steps."""
        path = folder / STATE_FILE
        if path.is_file():
            run.load_state_dict(load_state(path))
            require_step(run, step, str(folder))
        else:
            self.start_fresh(run, str(folder), step)

    def start_fresh(self, run: Attachment, checkpoint: str, step: int) -> None:
        """Resume from a checkpoint that has no state of bitplan, where that is allowed."""
        if not self.fresh_state:
            raise RunError(
                f"{checkpoint} has no state of bitplan, so it was saved without this plan, or not completely: resume "
                f"from a checkpoint that has it, or pass fresh_state=True to begin with empty histories at step {step}."
            )
        log.info("%s has no state of bitplan: the plan begins with empty histories at step %d", checkpoint, step)
        run.start_at(step)


def require_step(run: Attachment, step: int, checkpoint: str) -> None:
    """Raise where the restored run and its trainer are at different steps."""
    if run.steps_done != step:
        raise RunError(
            f"{checkpoint} was saved after {step} steps of the trainer and {run.steps_done} steps of the plan: resume "
            f"from another checkpoint."
        )


def require_unwrapped(model: Any, advice: str) -> None:
    """Raise where a plan comes too late for this model, or is not the first one.

    :param advice: what to do instead, which names the right place.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"a plan is attached to a torch.nn.Module, not to {type(model).__name__}.")
    if any(is_planned(module) for module in model.modules()):
        raise PlanError(f"a plan is attached to this model already, and a model has one plan at a time: {advice}")
    what = _wrapping(model)
    if what is not None:
        raise PlanError(f"the model arrives {what}, which is too late for a plan: {advice}")


def _wrapping(model: nn.Module) -> str | None:
    wrapped = {"DataParallel", "DeepSpeedEngine"}
    if unwrapped(model) is not model and "_orig_mod" not in model._modules:
        return f"wrapped in {type(model).__name__}"
    if any("_orig_mod" in m._modules or m.__dict__.get(COMPILED_CALL) is not None for m in model.modules()):
        return "compiled"
    if isinstance(model, FullyShardedDataParallel) or type(model).__name__ in wrapped:
        return f"wrapped in {type(model).__name__}"
    is_sharded = any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())
    if is_sharded or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "sharded"
    return None


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """A batch with its tensors on the device of the model's parameters."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None or device.type == "meta":
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
