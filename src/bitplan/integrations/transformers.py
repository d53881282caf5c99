"""A plan inside the ``Trainer`` of Transformers, and of TRL's trainers that derive from it.

    Trainer(model, args, train_dataset=..., callbacks=[BitplanCallback("fp8-linear")])

The plan is attached in ``on_init_end``, the only event before Accelerate wraps or compiles the model. Steps are counted
in ``on_optimizer_step``, so that gradient accumulation makes no difference. The state of the run is written beside each
checkpoint as ``bitplan.safetensors`` and restored when the trainer resumes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.errors import BitplanError, PlanError, RunError
from bitplan.integrations.trainer_support import (
    PlanSettings,
    PlanSource,
    log,
    missing_package,
    on_device_of,
    require_unwrapped,
)
from bitplan.plans.execution import Emulate, ExecutionOptions
from bitplan.runtime.attachment import Attachment
from bitplan.runtime.state_file import STATE_FILE, save_state

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing_package("transformers", "transformers") from error

__all__ = ["BitplanCallback"]

_ADVICE = (
    "give the plain model to Trainer(model=...) with one BitplanCallback in callbacks=, which attaches the plan in "
    "on_init_end, before Accelerate wraps, compiles or shards the model."
)


class BitplanCallback(TrainerCallback):
    """Trains the model of a ``Trainer`` under a plan.

    :param plan: a plan, a preset's name, a file or a mapping.
    :param execution: as in :func:`bitplan.attach`; by default the plan's own.
    :param compile: compile the model by :meth:`bitplan.Attachment.compile`, in place. Use it instead of
        ``TrainingArguments(torch_compile=True)``, which packed and native execution refuse.
    :param example: a batch as the model takes it. By default the first samples of ``train_dataset``, collated.
    :param seed: of stochastic rounding.
    :param stats: gather rounding statistics, which are then part of the logs.
    :param fresh_state: allow a checkpoint that was saved without this callback to be resumed.
    """

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
        self._settings = PlanSettings(plan, execution, compile, example, seed, stats, fresh_state)
        #: The attachment, from the end of ``Trainer.__init__`` on; detached when training has ended.
        self.run: Attachment | None = None
        self._is_finished = False
        #: The forward that the model's instance had when the plan was attached.
        self._forward: Any = None

    # --- Events, in the order of time

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.run is not None:
            raise PlanError("a BitplanCallback serves one Trainer: make a new callback for each.")
        require_unwrapped(model, _ADVICE)
        self._check_arguments(args)
        trainer = _calling_trainer()
        example = None if self._settings.example is not None else self._example_of(trainer, model)
        self.run = self._settings.attach(model, example)
        self._forward = model.__dict__.get("forward")
        if trainer is not None:
            # Loggers see the scalars of on_log only if this callback comes first. A new list: the old one is iterated.
            handler = trainer.callback_handler
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        run = self._attached(model)
        run.set_total_steps(int(state.max_steps))
        if state.global_step:
            self._settings.restore(run, _resumed_folder(args, state), int(state.global_step))
        elif run.steps_done:
            raise PlanError(
                f"the plan has counted {run.steps_done} steps, and the trainer begins again at step 0: make a new "
                f"Trainer with a new BitplanCallback."
            )
        is_compiled = self._settings.compile or args.torch_compile
        if model.__dict__.get("forward") is not self._forward and not is_compiled:
            run.check_again()  # TRL's trainers and mixed precision exchange forward: rules must hold there, too

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.run is not None and not self._is_finished:
            self.run.step()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.run is None or self._is_finished or logs is None or "loss" not in logs:
            return
        scalars = self.run.scalars()
        logs.update(scalars)
        if state.log_history:  # it was written before this event
            state.log_history[-1].update(scalars)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.run is None or self._is_finished or not args.should_save:
            return
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if not folder.is_dir():
            raise RunError(f"the trainer has saved no {folder}, where the state of the plan belongs: save there.")
        save_state(folder / STATE_FILE, self.run.state_dict())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.run is not None:
            self.run.detach()
            self._is_finished = True

    # --- Checks

    def _check_arguments(self, args: TrainingArguments) -> None:
        is_emulated = isinstance(self._settings.execution, Emulate)
        if args.torch_compile and (self._settings.compile or not is_emulated):
            raise PlanError(
                f"{self._settings.execution.kind} execution is compiled by bitplan, and torch_compile=True compiles by "
                f"{args.torch_compile_backend}: drop torch_compile from TrainingArguments and pass "
                f"BitplanCallback(..., compile=True)."
            )
        if args.n_gpu > 1:
            raise PlanError(
                f"the Trainer would copy the model to {args.n_gpu} GPUs by nn.DataParallel, which runs no plan: start "
                f"one process for each GPU by torchrun."
            )

    def _attached(self, model: nn.Module) -> Attachment:
        """The attachment, if the model that is about to train has it."""
        if self.run is None:
            raise PlanError(f"this BitplanCallback was added to a Trainer that is made already: {_ADVICE}")
        if self._is_finished:
            raise PlanError("training has ended and the plan is detached: make a new Trainer with a new callback.")
        if not any(module is self.run.model for module in model.modules()):
            raise PlanError(
                "the Trainer trains another model than the one it was made with, as model_init= does: give it model=."
            )
        return self.run

    def _example_of(self, trainer: Any, model: nn.Module) -> Any:
        """A batch of the trainer's own data; None where there is none and the plan does not need it."""
        try:
            return _first_batch(trainer, model)
        except Exception as error:  # whatever a dataset or collator raises
            if isinstance(error, BitplanError):
                reason = str(error)
            else:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            why = self._settings.why_example
            if why is not None:
                raise PlanError(
                    f"{why}, which needs an example batch, and none could be made of the trainer's data ({reason}): "
                    f"pass BitplanCallback(..., example=batch)."
                ) from error
            log.info("rules are checked in the first forward pass: no example batch (%s)", reason)
            return None


# --- What events do not say


def _calling_trainer() -> Any:
    """The trainer whose event is being handled: events get neither it nor its data."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "callback_handler") and hasattr(owner, "get_train_dataloader"):
            return owner
        frame = frame.f_back
    return None


def _resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint that the trainer resumes from, which may be anywhere: only the caller of the event knows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        folder = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(folder, str) and hasattr(frame.f_locals.get("self"), "callback_handler"):
            return Path(folder)
        frame = frame.f_back
    return Path(args.resume_from_checkpoint or f"{args.output_dir}/checkpoint-{state.global_step}")


def _first_batch(trainer: Any, model: nn.Module) -> dict[str, Any]:
    """The first samples of the training data as one batch, as ``compute_loss`` gives them to the model."""
    if trainer is None or trainer.train_dataset is None:
        raise PlanError("there is no train_dataset")
    with _same_random_numbers():
        loader = trainer.get_train_dataloader()
        dataset = loader.dataset
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise PlanError("train_dataset is a stream, and reading it would lose samples")
        samples = [dataset[index] for index in range(min(len(dataset), trainer.args.per_device_train_batch_size))]
        batch = loader.collate_fn(samples)
    if not isinstance(batch, Mapping):
        raise PlanError(f"the collator makes a {type(batch).__name__}, not a mapping of the model's arguments")
    batch = dict(on_device_of(model, dict(batch)))
    computes_loss = trainer.label_smoother is None and trainer.compute_loss_func is None
    if computes_loss and trainer.model_accepts_loss_kwargs and isinstance(batch.get("labels"), Tensor):
        batch["num_items_in_batch"] = (batch["labels"] != -100).sum()
    if not computes_loss:
        batch.pop("labels", None)
    return batch


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Collators and samplers draw random numbers; training must not notice."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
