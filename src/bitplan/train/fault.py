"""What broke first in a run whose loss or weights are no longer finite.

The failing step is made again, uncompiled and watched: every operation's result, every gradient on its way back, and
what rounding does at each site. Where the weights were broken already when the loss was, an earlier step did that:
the run is taken up from its last good checkpoint, and made again until that step is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitplan.at_work.actions import Action
from bitplan.at_work.observe import AMAX, ERROR, FRESH, OVERFLOW
from bitplan.at_work.tables import RECORD
from bitplan.plan.spec import QuantizerSpec
from bitplan.seeing.intercept import is_planned, state_of
from bitplan.tasks.task import Task
from bitplan.train.checkpoint import newest_whole
from bitplan.train.session import Session
from bitplan.train.step_watch import Seen, StepWatch

#: Places whose rounding happens before an operation's result is there, in that order; and those of its gradients.
_FORWARD = ("weight", "fprop.x", "fprop.w", "activation")
_BACKWARD = ("grad_activation", "dgrad.dy", "wgrad.dy", "dgrad.w", "wgrad.x", "grad_weight")


@dataclass(frozen=True)
class Fault:
    """The tensor that broke first, and how."""

    #: Counted from 1, as in metrics.jsonl.
    step: int
    #: None where it was not found.
    site: str | None
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def find_fault(session: Session, checkpoints: Path, on_step: Callable[[], None]) -> Fault:
    """Search from where `session` stands: before the step whose loss is not finite, or after one that broke weights.

    :param on_step: called for every step that is made again.
    """
    last = session.step + 1
    session.observe()
    if session.broken_weight() is None:
        on_step()
        return _fault_of_step(session)
    known = newest_whole(checkpoints)
    if known is None:
        session.restart()
    else:
        session.load(*known)
    while session.step < last:
        on_step()
        loss = session.forward_backward()
        if not math.isfinite(loss) or session.broken_gradient() is not None:
            return _fault_of_step(session)
        session.apply()
        broken = session.broken_weight()
        if broken is not None:
            return Fault(
                *(session.step, broken),
                f"step {session.step} broke {broken}: its gradient was finite, but the optimizer's step on it was not. "
                f"Lower the learning rate.",
            )
        _remind(session)
    return _not_found(last)


def _remind(session: Session) -> None:
    """Evaluate where the run did, if the task learns from that what its next learning rate is."""
    listens = type(session.task).after_evaluation is not Task.after_evaluation
    if listens and session.step % session.task.settings.evaluate_every == 0:
        session.evaluate()


def _fault_of_step(session: Session) -> Fault:
    """Make the next step's forward and backward pass again, and look."""
    step = session.step + 1
    with StepWatch(session.model) as watch:
        loss = watch.loss(session.loss)
        kept, session.loss = session.loss, loss
        try:
            session.forward_backward()
        finally:
            session.loss = kept
    found = watch.first_broken_result()
    if found is not None:
        return _described(
            session, step, found, _FORWARD, "activation", "is no longer finite, though what it is made of is"
        )
    found = watch.first_broken_gradient
    if found is not None:
        # A gradient that was rounded beyond the largest number arrives broken at the operation before.
        for earlier in watch.gradients:
            if earlier is not found and _overflowed(earlier, _BACKWARD) is not None:
                return _described(session, step, earlier, _BACKWARD, "grad_activation", "")
        return _described(session, step, found, (), "grad_activation", "arrives there not finite")
    broken = session.broken_gradient()
    if broken is not None:
        return Fault(step, f"{broken}: grad_weight", f"step {step} broke the gradient of {broken}. {_ADVICE}")
    return _not_found(step)


_ADVICE = "Lower the learning rate, or give the tensors around it more bits."


def _not_found(step: int) -> Fault:
    return Fault(
        step,
        None,
        f"the loss of step {step} is not finite, and stays finite when the step is made again uncompiled and watched: "
        f"lower the learning rate.",
    )


def _described(session: Session, step: int, seen: Seen, places: tuple[str, ...], role: str, words: str) -> Fault:
    overflow = _overflowed(seen, places)
    site = f"{seen.label}:{role if overflow is None else overflow.place}"
    rules = {f"{each.site.module}/{each.site.op}:{each.site.role}": each for each in reversed(session.run.table())}
    rule = rules.get(site)
    by = (
        ""
        if rule is None or rule.quantizer is None
        else f" ({rule.quantizer}{f', {rule.where}' if rule.where else ''})"
    )
    if overflow is None:
        return Fault(step, site, f"step {step} broke at {site}{by}, which {words}. {_ADVICE}")
    return Fault(
        *(step, site),
        f"step {step} broke at {site}{by}: {overflow.share:.2%} of its values, up to {overflow.largest:.3g}, lie "
        f"beyond the format's largest and became infinite or NaN. Give it a scale, saturation or a wider format.",
    )


@dataclass(frozen=True)
class _Overflow:
    place: str
    share: float
    largest: float


def _overflowed(seen: Seen, places: tuple[str, ...]) -> _Overflow | None:
    """The first of these places whose rounding made finite values infinite, by its statistics."""
    record = seen.module._buffers.get(RECORD)
    if record is None or not is_planned(seen.module):
        return None
    actions = [action for action in state_of(seen.module).actions.values() if isinstance(action, Action)]
    for place in places:
        rows = {
            action.places[place].records[seen.site]
            for action in actions
            if place in action.places
            and seen.site in action.places[place].records
            and _overflows_specially(action.places[place].spec)
        }
        for row in rows:
            values = record[row].tolist()
            if (
                values[FRESH]
                and values[OVERFLOW] > 0
                and math.isfinite(values[AMAX])
                and not math.isfinite(values[ERROR])
            ):
                return _Overflow(place, values[OVERFLOW], values[AMAX])
    return None


def _overflows_specially(spec: QuantizerSpec) -> bool:
    return (spec.overflow or getattr(spec.target, "default_overflow", "saturate")) == "special"
