"""Watching one training step: which results and gradients are not finite, in the order they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from bitplan.seeing.intercept import Interceptor, Scope, followed, is_planned, state_of
from bitplan.seeing.losses import loss_holder


@dataclass(frozen=True, eq=False)
class Seen:
    """One operation that ran."""

    #: Module path and operation, as sites are called: ``fc/linear.0``.
    label: str
    module: nn.Module
    #: The operation and its number in the module.
    site: str
    #: What it was made of, as numbers of earlier operations.
    inputs: tuple[int, ...]
    is_finite: bool
    #: It holds infinities below zero and nothing else amiss: what masks are made of.
    is_like_a_mask: bool


class StepWatch:
    """While entered, sees every operation of the model and its loss, under the model's plan if it has one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.results: list[Seen] = []
        #: The operations to whose results gradients have come back, in that order.
        self.gradients: list[Seen] = []
        self.first_broken_gradient: Seen | None = None
        self._made_by: dict[int, int] = {}
        #: So that no id is used twice.
        self._kept: list[Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> StepWatch:
        planned = [state_of(module).interceptor for module in self.model.modules() if is_planned(module)]
        self.interceptor = planned[0] if planned else Interceptor()
        self._has_plan = bool(planned)
        if not planned:
            self._stack.enter_context(followed(self.model, self.interceptor))
        # On the object, in front of its class's: the loss that the plan has brought in goes through it, too.
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
        """`function` with its operations in view."""
        if self._has_plan:
            return function
        holder = loss_holder(self.interceptor)

        def watched(*args: Any) -> Tensor:
            with Scope(self.interceptor, holder):
                return function(*args)

        return watched

    def first_broken_result(self) -> Seen | None:
        """Where the last result that is not finite, which is the loss, got it from: the earliest operation behind it
        that broke without having been given anything broken."""
        broken = [number for number, seen in enumerate(self.results) if not seen.is_finite]
        if not broken or broken[-1] != len(self.results) - 1:
            return None  # infinities that something has absorbed
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

    # --- what is seen ---

    def _watched_operation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_operation(
            scope: Scope, op: str, index: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
        ) -> Any:
            sources = self._sources(args, kwargs)
            result = original(scope, op, index, func, args, kwargs)
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
        given = [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]
        return tuple(dict.fromkeys(self._made_by[id(tensor)] for tensor in given if id(tensor) in self._made_by))

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
