"""The first tensor of a training step that is not finite, and whether rounding made it so.

The forward and backward pass run uncompiled, with hooks on every operation's result and every gradient. Where rounding
statistics are gathered, they tell an overflow in rounding from an operation that breaks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.explain import Explanation
from bitplan.capture.planned_classes import followed
from bitplan.capture.scopes import Interceptor, Scope, is_planned, loss_holder, state_of
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.module_state import RECORD
from bitplan.runtime.rounding_op import OpRounding
from bitplan.runtime.statistics import AMAX, ERROR, FRESH, OVERFLOW

#: Sites that are rounded before the result of an operation is computed, in that order; and those of its gradients.
_FORWARD = ("weight", "fprop.x", "fprop.w", "activation")

_BACKWARD = ("grad_activation", "dgrad.dy", "wgrad.dy", "dgrad.w", "wgrad.x", "grad_weight")


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, with a single synchronization."""
    tensors = [(name, tensor) for name, tensor in named if tensor.is_floating_point()]
    if not tensors:
        return None
    device = tensors[0][1].device  # a model may be on several
    finite = torch.stack([tensor.detach().isfinite().all().to(device) for _, tensor in tensors]).cpu()
    if bool(finite.all()):
        return None
    return tensors[int(finite.logical_not().nonzero()[0])][0]


def fault_of_step(
    model: nn.Module, table: Callable[[], Iterable[Explanation]], step: int, run_step: Callable[[StepWatch], object]
) -> Fault:
    """Run the forward and backward pass of a step, and name the first tensor that is not finite.

    :param table: what the tensors get, as :meth:`bitplan.Attachment.table` of the plan that is attached.
    :param step: counted from 1.
    :param run_step: runs both passes once; the loss may be wrapped by :meth:`StepWatch.loss`.
    """
    with StepWatch(model) as watch:
        run_step(watch)
    broken_operation = watch.first_broken_result()
    if broken_operation is not None:
        return _described(
            table, step, broken_operation, _FORWARD, "activation", "is no longer finite, though what it is made of is"
        )
    broken_operation = watch.first_broken_gradient
    if broken_operation is not None:
        # A gradient that overflowed in rounding reaches the operation before it as infinite or NaN.
        for earlier in watch.gradients:
            if earlier is not broken_operation and _overflowed(earlier, _BACKWARD) is not None:
                return _described(table, step, earlier, _BACKWARD, "grad_activation", "")
        return _described(table, step, broken_operation, (), "grad_activation", "arrives there not finite")
    broken = first_not_finite((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    if broken is not None:
        return Fault(step, f"{broken}: grad_weight", f"step {step} broke the gradient of {broken}. {_ADVICE}")
    return fault_not_found(step)


@dataclass(frozen=True)
class Fault:
    """The first tensor that is not finite, and the cause."""

    #: Counted from 1, as in metrics.jsonl.
    step: int
    #: None where it was not found.
    site: str | None
    sentence: str

    def __str__(self) -> str:
        return self.sentence


_ADVICE = "Lower the learning rate, or give the tensors around it more bits."


def fault_not_found(step: int) -> Fault:
    return Fault(
        step,
        None,
        f"the loss of step {step} is not finite, and stays finite when the step is made again uncompiled and watched: "
        f"lower the learning rate.",
    )


def _described(
    table: Callable[[], Iterable[Explanation]],
    step: int,
    seen: Seen,
    places: tuple[str, ...],
    role: str,
    symptom: str,
) -> Fault:
    overflow = _overflowed(seen, places)
    site = f"{seen.label}:{role if overflow is None else overflow.place}"
    rules = {f"{row.site.module}/{row.site.op}:{row.site.role}": row for row in reversed([*table()])}
    rule = rules.get(site)
    by = (
        ""
        if rule is None or rule.quantizer is None
        else f" ({rule.quantizer}{f', {rule.where}' if rule.where else ''})"
    )
    if overflow is None:
        return Fault(step, site, f"step {step} broke at {site}{by}, which {symptom}. {_ADVICE}")
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
    """The first of these sites whose rounding made finite values infinite, by its statistics."""
    record = seen.module._buffers.get(RECORD)
    if record is None or not is_planned(seen.module):
        return None
    actions = [action for action in state_of(seen.module).actions.values() if isinstance(action, OpRounding)]
    for place in places:
        rows = {
            action.state_of(place).records[seen.site]
            for action in actions
            if place in action.places
            and seen.site in action.state_of(place).records
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


# --- Which results and gradients of a training step are not finite, in the order they are computed


@dataclass(frozen=True, eq=False)
class Seen:
    """One operation that ran."""

    #: Module path and operation, as in the names of sites: ``fc/linear.0``.
    label: str
    module: nn.Module
    #: The operation and its number in the module.
    site: str
    #: The earlier operations that computed its inputs, by index.
    inputs: tuple[int, ...]
    is_finite: bool
    #: Its only values that are not finite are negative infinities, as in masks.
    is_like_a_mask: bool


class StepWatch:
    """A context that records every operation of the model and its loss, under the model's plan if it has one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.results: list[Seen] = []
        #: The operations whose results have received gradients, in that order.
        self.gradients: list[Seen] = []
        self.first_broken_gradient: Seen | None = None
        self._made_by: dict[int, int] = {}
        #: Keeps tensors alive, so that no id is used twice.
        self._kept: list[Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> StepWatch:
        planned = [state_of(module).interceptor for module in self.model.modules() if is_planned(module)]
        self.interceptor = planned[0] if planned else Interceptor()
        self._has_plan = bool(planned)
        if not planned:
            self._stack.enter_context(followed(self.model, self.interceptor))
        # On the instance, in front of the class's methods: the loss that the plan covers goes through it, too.
        for name, watched in (("on_operation", self._watched_operation), ("on_view", self._watched_view)):
            setattr(self.interceptor, name, watched(getattr(self.interceptor, name)))
            self._stack.callback(delattr, self.interceptor, name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._kept.clear()

    def loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` with its operations recorded."""
        if self._has_plan:
            return function
        holder = loss_holder(self.interceptor)

        def watched(*args: Any) -> Tensor:
            with Scope(self.interceptor, holder):
                return function(*args)

        return watched

    def first_broken_result(self) -> Seen | None:
        """The earliest operation on the path to the loss whose inputs are finite and whose result is not."""
        broken = [number for number, seen in enumerate(self.results) if not seen.is_finite]
        if not broken or broken[-1] != len(self.results) - 1:
            return None  # the loss is finite in spite of them
        behind, waiting = set[int](), [broken[-1]]
        while waiting:
            number = waiting.pop()
            if number not in behind:
                behind.add(number)
                waiting += [source for source in self.results[number].inputs if not self.results[source].is_finite]
        origins = [
            self.results[number]
            for number in sorted(behind)
            if all(self.results[source].is_finite for source in self.results[number].inputs)
        ]
        return next((seen for seen in origins if not seen.is_like_a_mask), origins[0])

    # --- recording ---

    def _watched_operation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_operation(
            scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
        ) -> Any:
            sources = self._sources(args, kwargs)
            result = original(scope, op, index, kind, func, args, kwargs)
            self._note(scope, f"{op}.{index}", sources, [t for t in _tensors(result) if t.is_floating_point()])
            return result

        return on_operation

    def _watched_view(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_view(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            sources = self._sources(args, kwargs)
            result = original(func, args, kwargs)
            if sources:
                for tensor in _tensors(result):
                    self._keep(tensor, sources[0])
            return result

        return on_view

    def _sources(self, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
        tensors = [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]
        return tuple(dict.fromkeys(self._made_by[id(tensor)] for tensor in tensors if id(tensor) in self._made_by))

    def _keep(self, tensor: Tensor, number: int) -> None:
        self._made_by[id(tensor)] = number
        self._kept.append(tensor)

    def _note(self, scope: Scope, site: str, sources: tuple[int, ...], outputs: list[Tensor]) -> None:
        if not outputs:
            return
        values = [tensor.detach() for tensor in outputs]
        finite = all(bool(value.isfinite().all()) for value in values)
        like_a_mask = not finite and not any(bool((value.isnan() | value.isposinf()).any()) for value in values)
        label = f"{state_of(scope.module).path}/{site}"
        seen = Seen(label, scope.module, site, sources, finite, like_a_mask)
        for tensor in outputs:
            self._keep(tensor, len(self.results))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note_gradient, seen))  # type: ignore[no-untyped-call]
        self.results.append(seen)

    def _note_gradient(self, seen: Seen, gradient: Tensor) -> None:
        if self.first_broken_gradient is None:
            self.gradients.append(seen)
            if not bool(gradient.isfinite().all()):
                self.first_broken_gradient = seen


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
