"""Keeping what a diagnosis needs in a training loop of one's own: :class:`Watch`.

The state of the run is kept in memory every some steps, with the batches since then. When the loss goes wrong, the
user's own training step is replayed from there, see :mod:`bitplan.planners.diagnose`.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from bitplan.analysis.fault import fault_of_step, first_not_finite
from bitplan.compiler.torch_private import tree_map_only
from bitplan.errors import BitplanWarning, PlanError
from bitplan.numerics.noise import preserve_rng_state
from bitplan.planners.diagnose import (
    FULL_RATE,
    MOST_REPLAYS,
    TOLERANCE,
    Diagnosis,
    Window,
    continue_run,
    diagnose,
    is_broken,
    rounded_tensors,
)
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment
from bitplan.runtime.optimizers import load_plain_state, plain_state, set_rate

#: Losses whose median a spike is compared with.
_LOSSES = 20
#: The fewest steps that are replayed, where an older state is kept: the newest may be bad already.
_LEAST_STEPS = 4


@dataclass(frozen=True)
class _Snapshot:
    """The state of a run before a step."""

    #: Steps that the watch has made.
    step: int
    tensors: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    stateful: list[Any]
    attachment: dict[str, Any]
    rng: tuple[Any, ...]


class Watch:
    """Makes the training steps of a loop, and keeps the last good state for a diagnosis.

    >>> import bitplan as bp
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = bp.attach(model, {"version": 1, "rules": [{"match": "*", "dy": "e2m1"}]}, optimizer=optimizer)
    >>> def train_step(batch):
    ...     optimizer.zero_grad()
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> watch = Watch(run, train_step)
    >>> loss = watch.step(torch.ones(2, 4))
    >>> watch.is_bad
    False
    """

    def __init__(
        self,
        run: Attachment,
        train_step: Callable[[Any], Any],
        *,
        every: int = 50,
        spike: float = 3.0,
        stateful: Iterable[Any] = (),
    ) -> None:
        """
        :param run: made by ``attach(..., optimizer=)``, so that it counts the steps by itself.
        :param train_step: a whole training step of a batch, the optimizer's step included; returns the loss.
        :param every: steps between two states that are kept. Two states and their batches are in memory.
        :param spike: a loss this many times the median of the last ones is bad.
        :param stateful: what else changes in a step and has ``state_dict()`` and ``load_state_dict()``: a scheduler of
            the learning rate, a ``GradScaler``.
        """
        if every < 1:
            raise PlanError(f"every is {every}; a state is kept every 1 or more steps.")
        if not spike > 1:
            raise PlanError(f"spike is {spike:g}; a loss is a spike at more than 1 time the usual.")
        if not run.optimizers:
            raise PlanError("a Watch needs a run that counts its steps by itself: give attach() the optimizer=.")
        self.run = run
        run.diagnosed_by = self.diagnose
        self.train_step = train_step
        self.every = every
        self.spike = spike
        self.stateful = list(stateful)
        #: Steps made.
        self.steps = 0
        #: Whether the last loss is not finite, or a spike.
        self.is_bad = False
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._snapshots: list[_Snapshot] = []
        #: The index of the state that replays begin at.
        self._good = -1
        #: Of all steps since the first of the snapshots.
        self._batches: list[Any] = []

    @property
    def model(self) -> nn.Module:
        return self.run.model

    def step(self, batch: Any) -> Any:
        """Make a training step; returns what `train_step` returns."""
        if not self.is_bad and self.steps % self.every == 0:
            self._keep_state()
        self._batches.append(batch)
        result = self.train_step(batch)
        self.steps += 1
        loss = _loss(result)
        usual = median(self._losses) if self._losses else loss
        is_spike = len(self._losses) == _LOSSES and loss > self.spike * abs(usual)
        self.is_bad = not math.isfinite(loss) or is_spike
        if not self.is_bad:
            self._losses.append(loss)
        return result

    def diagnose(
        self,
        *,
        tolerance: float = TOLERANCE,
        most_replays: int = MOST_REPLAYS,
        report: Callable[[str], None] | None = None,
    ) -> Diagnosis:
        """Replay the steps since the last good state, and find the tensors whose rounding breaks the run.

        Afterwards model, optimizer and generators are as they were; :attr:`run` is a new attachment of the same plan.
        :meth:`rewind` goes back to the good state.

        :param tolerance: the share by which the loss may exceed that without rounding.
        """
        if not self.steps:
            raise PlanError("nothing to replay: make a training step by watch.step(batch) first.")
        now, plan = self._snapshot(), self.run.plan
        tensors = rounded_tensors(plan, self.run.operations())
        with preserve_rng_state(), set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", BitplanWarning)  # rules that lose their effect are expected here
            try:
                reference = self._find_good_start()
                return diagnose(
                    *(self._replay, plan, tensors, Window(self._start.step, self._symptom(plan))),
                    tolerance=tolerance,
                    most_replays=most_replays,
                    reference=reference,
                    report=report,
                )
            finally:
                self._go_on(now, plan)

    def rewind(self, plan: Plan | None = None) -> Attachment:
        """Go back to the last good state, under another plan, such as that of a diagnosis; returns its attachment.

        The state is the one that :meth:`diagnose` replayed from, or else the newest.

        :param plan: by default the present one.
        """
        if not self._snapshots:
            raise PlanError("there is no state to go back to: make a training step by watch.step(batch) first.")
        start = self._snapshots[self._good]
        self._go_on(start, self.run.plan if plan is None else plan)
        self.steps, self.is_bad = start.step, False
        self._snapshots, self._batches, self._good = [], [], -1
        self._losses.clear()
        return self.run

    # --- states ---

    def _keep_state(self) -> None:
        """Keep the state and the one before it, with the batches since then; weights that are broken are not kept."""
        if first_not_finite(self.model.named_parameters()) is not None:
            return
        dropped = self._snapshots[0].step if self._snapshots else self.steps
        self._snapshots = [*self._snapshots[-1:], self._snapshot()]
        self._batches = self._batches[self._snapshots[0].step - dropped :]

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(
            self.steps,
            {name: _host_copy(tensor) for name, tensor in _changing(self.model)},
            [tree_map_only(Tensor, _host_copy, plain_state(optimizer)) for optimizer in self.run.optimizers],
            [copy.deepcopy(item.state_dict()) for item in self.stateful],
            copy.deepcopy(self.run.state_dict()),
            _random_states(),
        )

    def _restore(self, snapshot: _Snapshot, plan: Plan, rate: float = FULL_RATE, stats: bool | None = None) -> None:
        """Attach a plan and go back to a state."""
        self.run = self.run.attach_again(plan, stats=stats)
        self.run.diagnosed_by = self.diagnose
        with torch.no_grad():
            for name, tensor in _changing(self.model):
                tensor.copy_(snapshot.tensors[name])
        self.model.zero_grad(set_to_none=True)
        for optimizer, state in zip(self.run.optimizers, snapshot.optimizers, strict=True):
            load_plain_state(optimizer, copy.deepcopy(state))
        for item, state in zip(self.stateful, snapshot.stateful, strict=True):
            item.load_state_dict(copy.deepcopy(state))
        if rate != FULL_RATE:
            self._scale_rates(rate)
        continue_run(self.run, copy.deepcopy(snapshot.attachment))
        _set_random_states(snapshot.rng)

    def _go_on(self, snapshot: _Snapshot, plan: Plan) -> None:
        """Continue from a state, perhaps compiled: rules are checked now, as the first step may not be watched."""
        operations = self.run.operations()
        self._restore(snapshot, plan)
        self.run.check(operations)

    def _scale_rates(self, rate: float) -> None:
        for optimizer in self.run.optimizers:
            for group in optimizer.param_groups:
                set_rate(group, float(group["lr"]) * rate)
        for item in self.stateful:  # schedulers compute rates from these
            if hasattr(item, "base_lrs"):
                item.base_lrs = [base * rate for base in item.base_lrs]

    # --- replays ---

    @property
    def _start(self) -> _Snapshot:
        return self._snapshots[self._good]

    def _batches_since_start(self) -> list[Any]:
        return self._batches[self._start.step - self._snapshots[0].step :]

    def _find_good_start(self) -> list[float]:
        """Choose the newest state from which the run does not diverge without rounding; returns its losses."""
        starts = [index for index, kept in enumerate(self._snapshots) if self.steps - kept.step >= _LEAST_STEPS] or [0]
        for self._good in reversed(starts):
            losses = self._replay(Plan())
            if not is_broken(losses):
                break
        return losses

    def _replay(self, plan: Plan, rate: float = FULL_RATE) -> list[float]:
        self._restore(self._start, plan, rate)
        losses = list[float]()
        for batch in self._batches_since_start():
            losses.append(_loss(self.train_step(batch)))
            if not math.isfinite(losses[-1]):
                return losses
        if first_not_finite(self.model.named_parameters()) is not None:
            losses[-1] = math.nan
        return losses

    def _symptom(self, plan: Plan) -> str:
        """What is wrong, as a sentence, with the first tensor that is not finite."""
        batches = self._batches_since_start()
        broken = self._first_broken_step(batches, plan)
        if broken is None:
            return f"The loss jumps in step {self.steps}." if self.is_bad else ""
        self._restore(self._start, plan, stats=True)
        for batch in batches[:broken]:
            self.train_step(batch)
        step = self._start.step + broken + 1
        fault = fault_of_step(self.model, self.run.table, step, lambda watch: self.train_step(batches[broken]))
        return f"The run diverged: {fault}"

    def _first_broken_step(self, batches: Sequence[Any], plan: Plan) -> int | None:
        """The first step whose loss is not finite, or that leaves weights that are not."""
        self._restore(self._start, plan)
        for number, batch in enumerate(batches):
            is_finite = math.isfinite(_loss(self.train_step(batch)))
            if not is_finite or first_not_finite(self.model.named_parameters()) is not None:
                return number
        return None


def _changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that training may change: trained parameters and buffers."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            yield name, tensor


def _loss(result: Any) -> float:
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(result.detach())
    if isinstance(result, (int, float)):
        return float(result)
    raise PlanError(f"the training step of a Watch returns the loss, a scalar, not {type(result).__name__}.")


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _random_states() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), devices


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, numpy_state, cpu, devices = states
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(devices)
