"""A plan inside the ``Trainer`` of Lightning, as a callback or as a precision plugin.

    Trainer(callbacks=[BitplanCallback("fp8-linear")])
    Trainer(plugins=[BitplanPrecision("fp8-linear")])

Both attach the plan to the LightningModule before the strategy wraps it, and count steps by a hook of the optimizers:
accumulation makes no difference, and every checkpoint holds the step that its weights have made. The callback goes with
any precision (``bf16-mixed`` and others); the plugin takes the place of one. A plan rounds what ``forward()`` methods
do, not the operations of ``training_step`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.errors import PlanError, RunError
from bitplan.integrations.trainer_support import (
    PlanSettings,
    PlanSource,
    missing_package,
    on_device_of,
    require_unwrapped,
)
from bitplan.plans.execution import ExecutionOptions
from bitplan.runtime.attachment import Attachment

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise missing_package("lightning", "lightning") from error

__all__ = ["BitplanCallback", "BitplanPrecision"]

_ADVICE = (
    "give the plain LightningModule to Trainer.fit() with one BitplanCallback in callbacks= or one BitplanPrecision in "
    "plugins=, and shard in configure_model(): the callback attaches the plan in setup(), or in on_fit_start() where "
    "the module has a configure_model() or setup() of its own; compile by compile=True."
)


class _LightningRun:
    """The attachment of a fit, and its state between two of them."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.run: Attachment | None = None
        #: Whether the plan is attached at the moment.
        self.is_attached = False
        #: The state in the checkpoint that the fit resumes from.
        self.loaded: dict[str, Any] | None = None
        #: The state at the end of the last fit.
        self._left: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        #: Steps of the trainer and of the run when they were last compared.
        self._counted = (0, 0)

    def attach(self, trainer: Trainer, module: LightningModule, *, is_set_up: bool = False) -> None:
        """`is_set_up`: the strategy may have sharded the module already."""
        plans = [*trainer.callbacks, trainer.precision_plugin]  # type: ignore[attr-defined]
        if sum(isinstance(part, (BitplanCallback, BitplanPrecision)) for part in plans) > 1:
            raise PlanError(f"this Trainer has two plans, and a model has one plan at a time: {_ADVICE}")
        if module._compiler_ctx is not None:
            raise PlanError(f"the LightningModule arrives compiled, which is too late for a plan: {_ADVICE}")
        if not is_set_up:
            require_unwrapped(module, _ADVICE)
        example = getattr(module, "example_input_array", None)
        self.run = self.settings.attach(module, None if example is None else on_device_of(module, example))
        self.is_attached = True

    def begin(self, trainer: Trainer, optimizers: list[Optimizer]) -> None:
        """The fit is about to begin: everything about it is known."""
        if self.run is None or not self.is_attached:
            raise PlanError(f"the plan is not attached, because it came after Trainer.fit() had begun: {_ADVICE}")
        self._trainer = trainer
        if self.settings.plan.moves:
            total = trainer.estimated_stepping_batches
            if not math.isfinite(total) or total < 1:
                raise PlanError("the plan changes over time, and this fit has no end: give Trainer(max_steps=...).")
            self.run.set_total_steps(int(total))
        step = trainer.global_step
        saved, self.loaded = self.loaded, None
        if saved is None and step and self._left is not None:  # a second fit of the same Trainer
            saved = self._left
        if saved is not None:
            if saved.get("global_step") != step:
                raise RunError(
                    f"the state of bitplan was saved after {saved.get('global_step')} steps, and the Trainer resumes "
                    f"at step {step}: resume from another checkpoint."
                )
            self.run.load_state_dict(saved["run"])
        elif step:
            self.settings.start_fresh(self.run, str(trainer.ckpt_path or "the checkpoint"), step)
        self.run.count_steps_of(optimizers)
        self._counted = (step, self.run.steps_done)

    def check_rules(self) -> None:
        """After a backward pass, which Lightning runs inside the optimizer's step: before it, nothing has run."""
        if self.run is not None and self.is_attached:
            self.run.check_rules()

    def after_batch(self, trainer: Trainer) -> bool:
        """Whether an optimizer step was made since the last call; raise where the plan has missed it."""
        if self.run is None or not self.is_attached or trainer.global_step == self._counted[0]:
            return False
        if self.run.steps_done == self._counted[1]:
            raise PlanError(
                f"{type(trainer.strategy).__name__} makes optimizer steps that torch.optim does not see, so the plan "
                f"cannot count them: use another strategy."
            )
        self._counted = (trainer.global_step, self.run.steps_done)
        return True

    def state(self) -> dict[str, Any]:
        if self.run is None or not self.is_attached or self._trainer is None:
            return self._left or {}
        return {"global_step": self._trainer.global_step, "run": self.run.state_dict()}

    def end(self) -> None:
        if self.run is not None and self.is_attached:
            self._left = self.state() or None  # for a checkpoint that is saved later, and for the next fit
            self.run.detach()
        self.is_attached = False
        self._trainer = None


class _PlanPart:
    """A part of a Trainer that has a plan: its settings, and its state in checkpoints."""

    def __init__(
        self,
        plan: PlanSource,
        execution: str | ExecutionOptions | None = None,
        compile: bool = False,
        *,
        example: Any = None,
        seed: int = 0,
        stats: bool = False,
        fresh_state: bool = False,
    ) -> None:
        self._fit = _LightningRun(PlanSettings(plan, execution, compile, example, seed, stats, fresh_state))

    @property
    def run(self) -> Attachment | None:
        """The attachment of the last fit; detached when that has ended."""
        return self._fit.run

    def state_dict(self) -> dict[str, Any]:
        return self._fit.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._fit.loaded = state_dict


class BitplanCallback(_PlanPart, Callback):
    """Trains a LightningModule under a plan, with any precision.

    :param plan: a plan, a preset's name, a file or a mapping.
    :param execution: as in :func:`bitplan.attach`; by default the plan's own.
    :param compile: compile the module's ``forward`` by :meth:`bitplan.Attachment.compile`, in place.
    :param example: a batch as ``forward`` takes it; by default the module's ``example_input_array``, if it has one.
    :param seed: of stochastic rounding.
    :param stats: gather rounding statistics, which are then logged.
    :param fresh_state: allow a checkpoint that was saved without this callback to be resumed.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        makes_layers = any(is_overridden(hook, pl_module) for hook in ("setup", "configure_model"))
        if stage == TrainerFn.FITTING and not makes_layers:
            self._fit.attach(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._fit.is_attached:
            self._fit.attach(trainer, pl_module, is_set_up=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.begin(trainer, trainer.optimizers)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.check_rules()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_stepped = self._fit.after_batch(trainer)
        if has_stepped and trainer.loggers and trainer.is_global_zero and self.run is not None:
            interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
            if interval and trainer.global_step % interval == 0:
                scalars = self.run.scalars()
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self._fit.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fit.end()


class BitplanPrecision(_PlanPart, Precision):
    """Trains a LightningModule in its own dtype under a plan, as the precision plugin of a ``Trainer``.

    Parameters are those of :class:`BitplanCallback`.
    """

    _module: LightningModule | None = None
    _has_begun = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, LightningModule) and module.trainer.state.fn == TrainerFn.FITTING:
            self._module, self._has_begun = module, False
            self._fit.attach(module.trainer, module, is_set_up=is_overridden("configure_model", module))
        return module

    def _begin(self) -> None:
        """Before the first training step: no hook of a plugin comes earlier and knows the state of the checkpoint."""
        if self._module is not None and not self._has_begun:
            self._has_begun = True
            self._fit.begin(self._module.trainer, self._module.trainer.optimizers)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        self._begin()
        if self._module is not None:
            self._fit.after_batch(self._module.trainer)
        with super().train_step_context():
            yield

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self._begin()  # the closure has the training step, and may be called inside the optimizer's step
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        self._fit.check_rules()
        return super().post_backward(tensor, module)

    def teardown(self) -> None:
        super().teardown()
        self._fit.end()
        self._module = None
