"""Why a run diverged: the failing step is repeated uncompiled and watched (:mod:`bitplan.analysis.fault`).

Where the weights were not finite before that step, steps are repeated from the last good checkpoint until the one that
broke them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from bitplan.analysis.fault import Fault, StepWatch, fault_not_found, fault_of_step
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.checkpoint import newest_whole
from bitplan.lab.train.session import Session


def find_fault(session: Session, checkpoints: Path, on_step: Callable[[], None]) -> Fault:
    """Search from the session's step: before the one whose loss is not finite, or after one that broke weights.

    :param on_step: called for every repeated step.
    """
    last = session.step + 1
    session.observe()
    if session.broken_state() is None:
        on_step()
        return _fault_of_step(session)
    checkpoint = newest_whole(checkpoints, broken=session.broken_in)
    if checkpoint is None:
        session.restart()
    else:
        session.load(*checkpoint)
    while session.step < last:
        on_step()
        loss = session.forward_backward()
        if not math.isfinite(loss) or session.broken_gradient() is not None:
            return _fault_of_step(session)
        session.apply()
        broken = session.broken_state()
        if broken is not None:
            return Fault(
                *(session.step, broken),
                f"step {session.step} broke {broken}: its gradient was finite, but the optimizer's step on it was not. "
                f"Lower the learning rate.",
            )
        repeat_evaluation(session)
    return fault_not_found(last)


def repeat_evaluation(session: Session) -> None:
    """Evaluate as the run did, if the task's learning rate depends on it."""
    listens = type(session.task).after_evaluation is not Task.after_evaluation
    if listens and session.step % session.task.settings.evaluate_every == 0:
        session.evaluate()


def _fault_of_step(session: Session) -> Fault:
    """Repeat the forward and backward pass of the next step."""

    def run_step(watch: StepWatch) -> None:
        kept, session.loss = session.loss, watch.loss(session.loss)
        try:
            session.forward_backward()
        finally:
            session.loss = kept

    return fault_of_step(session.model, session.run.table, session.step + 1, run_step)
