"""A plan in a training loop of Accelerate: :func:`prepare` in the place of ``accelerator.prepare``.

    model, optimizer, loader, run = prepare(accelerator, model, optimizer, "fp8-linear", loader)

The plan is attached before Accelerate wraps, compiles or shards the model. A hook of the optimizer counts steps, and
Accelerate steps it once per accumulated step. ``save_state`` and ``load_state`` of the accelerator include the run:
its state is ``bitplan.safetensors`` in the same folder. (Objects of ``register_for_checkpointing`` would be read by
pickle, which executes what a file says.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bitplan.errors import PlanError
from bitplan.integrations.trainer_support import PlanSettings, PlanSource, missing_package, require_unwrapped
from bitplan.plans.execution import Emulate, ExecutionOptions
from bitplan.runtime.state_file import STATE_FILE, load_state, save_state

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend
except ImportError as error:
    raise missing_package("accelerate", "accelerate") from error

__all__ = ["prepare"]

_ADVICE = (
    "give the plain model to bitplan.integrations.accelerate.prepare(), once, which calls accelerator.prepare() itself."
)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    plan: PlanSource,
    *others: Any,
    steps: int | None = None,
    execution: str | ExecutionOptions | None = None,
    compile: bool = False,
    example: Any = None,
    seed: int = 0,
    stats: bool = False,
    fresh_state: bool = False,
) -> tuple[Any, ...]:
    """Attach `plan` to `model`, then prepare model, optimizer and `others` by ``accelerator.prepare``.

    :param plan: a plan, a preset's name, a file or a mapping.
    :param others: data loaders and schedulers, as ``accelerator.prepare`` takes them.
    :param steps: optimizer steps of the whole run, which a plan that changes over time needs; or call
        :meth:`bitplan.Attachment.set_total_steps` before the first one.
    :param execution: as in :func:`bitplan.attach`; by default the plan's own.
    :param compile: compile the model by :meth:`bitplan.Attachment.compile`, in place. Use it instead of Accelerate's
        ``dynamo_plugin``, which packed and native execution refuse.
    :param example: a batch as the model takes it, for plans with selectors and for compiled models.
    :param seed: of stochastic rounding.
    :param stats: gather rounding statistics.
    :param fresh_state: allow ``load_state`` of a folder that was saved without this plan.
    :return: the prepared model, optimizer and `others`, and the :class:`bitplan.Attachment`.
    """
    settings = PlanSettings(plan, execution, compile, example, seed, stats, fresh_state)
    require_unwrapped(model, _ADVICE)
    if getattr(model, "_is_accelerate_prepared", False) or isinstance(optimizer, AcceleratedOptimizer):
        raise PlanError(f"the model or the optimizer is prepared already, which is too late for a plan: {_ADVICE}")
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO and (compile or not isinstance(settings.execution, Emulate)):
        raise PlanError(
            f"{settings.execution.kind} execution is compiled by bitplan, and this Accelerator compiles by "
            f"{str(backend.value).lower()}: drop its dynamo backend and call prepare(..., compile=True)."
        )
    run = settings.attach(model, optimizer=optimizer, steps=steps)

    def save(models: Any, weights: Any, output_dir: Any) -> None:
        is_on_each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if is_on_each_node else accelerator.is_main_process:
            save_state(Path(output_dir) / STATE_FILE, run.state_dict())

    def load(models: Any, input_dir: Any) -> None:
        path = Path(input_dir) / STATE_FILE
        if path.is_file():
            run.load_state_dict(load_state(path))
        else:
            settings.start_fresh(run, str(input_dir), run.steps_done)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return (*accelerator.prepare(model, optimizer, *others), run)
