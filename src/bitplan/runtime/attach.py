"""Attaching a plan to a model: :func:`attach`.

The ``emulate`` execution rounds values and computes in the model's own precision: the numerics of low precision, none
of its savings in memory or time. ``packed`` computes the same numbers and saves tensors for the backward pass in few
bits. ``native`` multiplies the same operands on the hardware's low-precision units.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.planned_classes import uninstall, unwrapped
from bitplan.capture.recording import Operation, inputs_of, record
from bitplan.capture.scopes import is_planned, state_of
from bitplan.capture.selectors import expand_plan
from bitplan.errors import BitplanWarning, PlanError
from bitplan.plans import Plan
from bitplan.plans.execution import Emulate, ExecutionOptions, Native, execution_options
from bitplan.plans.loading import PlanSource, find_plan
from bitplan.progress import say_once
from bitplan.runtime.attachment import Attachment
from bitplan.runtime.clock import Total
from bitplan.runtime.module_state import remove_buffers

__all__ = ["Attachment", "attach"]

log = logging.getLogger("bitplan")

#: Said once, of a plan that is emulated by default.
EMULATED = (
    "the plan is emulated: numbers are rounded, which saves neither memory nor time; execution='packed' saves memory, "
    "'native' time ('emulate' says that this is meant)."
)

#: Called with every attachment that is made in a context: this is how :func:`bitplan.record` finds the plan of a loop.
attach_observer: ContextVar[Callable[[Attachment], None] | None] = ContextVar("attach_observer", default=None)


def attach(
    model: nn.Module,
    plan: PlanSource,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    steps: Total | None = None,
    example: Any = None,
    seed: int = 0,
    mutable_formats: bool = False,
    stats: bool = False,
    execution: str | ExecutionOptions | None = None,
    allow_code: bool = False,
) -> Attachment:
    """Attach `plan` (a plan, a preset's name, a file or a mapping) to `model`.

    :param optimizer: the optimizer, or several of them, whose steps the run counts by itself: nothing is called inside
        the loop. Several that step in turn within one iteration count as one step. Without it, the loop calls
        :meth:`Attachment.step` after ``optimizer.step()``. A step that a ``GradScaler`` skips is not counted, because
        the optimizer's ``step()`` is not called; fused optimizers skip on the device, and their steps all count.
    :param steps: optimizer steps of the whole run, which a plan that changes over time needs; or ``"progress"``, where
        the loop reports its progress by :meth:`Attachment.progress`; or ``"later"``, where a trainer calls
        :meth:`Attachment.set_total_steps` before the first step.
    :param example: a batch, as the model takes it or with a target that the model does not take, as loaders give it:
        ``(inputs, target)``, or a mapping with labels. With one, the plan is checked at once on fake tensors, or on the
        batch itself where the model needs values. Without, the first forward pass records the operations, and a rule
        that matched none raises before the first optimizer step. A model that is compiled from the start needs one, and
        so does a plan that chooses tensors by ``select``: the attachment's plan has plain rules in their place.
    :param seed: of stochastic rounding.
    :param mutable_formats: every float and integer format may be changed during the run, see
        :meth:`Attachment.set_format`.
    :param stats: gather rounding statistics at every site, see :meth:`Attachment.stats`.
    :param execution: ``"emulate"``, ``"packed"`` or ``"native"``, or an object with options: :class:`bitplan.Packed`,
        :class:`bitplan.Native`. By default the plan's ``execution:``, or emulation where it has none.
    :param allow_code: import the functions and classes that the plan names as ``module:name``, if you trust it.
    """
    from bitplan.executions import make_execution  # built on top of the runtime

    options = None if execution is None else execution_options(execution)
    if not isinstance(model, nn.Module):
        raise _not_a_model(model, plan)
    resolved = find_plan(plan)
    if allow_code:
        resolved = resolved.with_code()
    resolved.require_code()
    example = inputs_of(model, example)
    options = options or resolved.declared_execution or Emulate()
    _release_copy(model)
    if any(is_planned(module) for module in model.modules()):
        raise PlanError("a plan is attached to this model already: detach it first.")
    if resolved.all_rules:
        _check_weights(model)
    optimizers = _optimizers(optimizer, model)
    is_strict = isinstance(options, Native) and options.strict
    if is_strict and example is None:
        raise PlanError("Native(strict=True) needs to know the GEMMs: give attach() an example= batch.")
    if resolved.has_selectors and example is None:
        raise PlanError(
            "the plan chooses tensors by select, which needs the model's operations: give attach() an example= batch."
        )
    undo_loss = _chunk_loss(unwrapped(model), example) if resolved.declared_loss == "chunked" else None
    try:
        resolved, operations = _record(model, resolved, example)
        run = Attachment(model, resolved, make_execution(options, model), steps, seed, mutable_formats, stats)
    except BaseException:
        if undo_loss is not None:
            undo_loss()
        raise
    try:
        run.after_detach = undo_loss
        if example is not None:
            run.expect(example)
        if operations is not None:
            run.check(operations)
        run.count_steps_of(optimizers)
        run.store_frozen_weights()  # last: what it does to values cannot be undone
    except BaseException:
        run.detach()
        raise
    if options == Emulate() and execution is None and resolved.all_rules and not _is_called_by_bitplan():
        say_once(EMULATED)
    log.info("plan attached, execution %s: %s", options.kind, options.summary)
    observer = attach_observer.get()
    if observer is not None:
        observer(run)
    return run


def _chunk_loss(model: nn.Module, example: Any) -> Callable[[], None]:
    """Let a language model compute its loss in chunks; returns the function that undoes it."""
    from bitplan.integrations.causal_lm import compute_loss_in_chunks  # built on top of the runtime

    if not isinstance(example, Mapping):
        raise PlanError(
            "the plan computes the loss in chunks, which is compared with the model's own: give attach() an example= "
            "batch with labels, as a mapping of the model's arguments."
        )
    return compute_loss_in_chunks(model, example)


def _record(model: nn.Module, plan: Plan, example: Any) -> tuple[Plan, list[Operation] | None]:
    """The plan without selectors, and the operations of the model; None without an example."""
    if example is None or not plan.all_rules:
        return plan, None
    try:
        if plan.has_selectors:
            return expand_plan(plan, unwrapped(model), example)
        return plan, record(unwrapped(model), example, opens=partial(is_decomposed, plan))
    except (RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(
            f"the model does not run on the example ({reason}): give a batch as the model takes it."
        ) from error


def _release_copy(model: nn.Module) -> None:
    """A copy of a model with a plan follows that plan, and has no attachment to detach: it follows the new plan."""
    for module in model.modules():
        if is_planned(module) and module in state_of(module).copies():
            remove_buffers(module)
            uninstall([module])


def _check_weights(model: nn.Module) -> None:
    """Raise where a weight handles functions itself, and warn where a hook makes a weight outside of ``forward``."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            handler = getattr(type(tensor).__torch_function__, "__func__", None) if tensor is not None else None
            if handler not in (None, Tensor.__torch_function__.__func__) and not is_lazy(tensor):  # type: ignore[attr-defined]
                raise PlanError(
                    f"{prefix}{name} is a {type(tensor).__name__}, which handles torch functions itself, so that a "
                    f"plan cannot: attach the plan to a model with ordinary tensors."
                )
        for name, value in module.__dict__.items():
            sources = [key for key in (f"{name}_g", f"{name}_orig") if key in module._parameters]
            if isinstance(value, Tensor) and sources:
                warnings.warn(
                    f"{prefix}{name} is made from {sources[0]} by a hook, outside of all forward() methods, so rules "
                    f"about weights round {sources[0]} instead: use torch.nn.utils.parametrizations, or remove the "
                    f"hook before attach().",
                    BitplanWarning,
                    stacklevel=3,
                )
                return


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None, model: nn.Module) -> list[Optimizer]:
    """The optimizers whose steps are counted; wrappers such as Accelerate's are replaced by what they wrap."""
    if optimizer is None:
        return []
    several = [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable) else [*optimizer]
    optimizers = []
    for item in several:
        inner = getattr(item, "optimizer", None)
        item = inner if isinstance(inner, Optimizer) else item
        if isinstance(item, type):
            raise PlanError(
                f"optimizer= is an optimizer, not the class {item.__name__}: {item.__name__}(model.parameters(), ...)."
            )
        if not isinstance(item, Optimizer):
            raise PlanError(f"optimizer= takes a torch.optim.Optimizer or several of them, not {type(item).__name__}.")
        optimizers.append(item)
    parameters = {id(parameter) for parameter in model.parameters()}
    trained = (p for item in optimizers for group in item.param_groups for p in group["params"])
    if not any(id(parameter) in parameters for parameter in trained):
        raise PlanError("optimizer= has no parameter of this model: give the optimizer that trains it.")
    return optimizers


def _is_called_by_bitplan() -> bool:
    """Whether :func:`attach` is called by a planner or a measurement, rather than by the user or a trainer."""
    caller = str(sys._getframe(2).f_globals.get("__name__"))
    return caller.startswith("bitplan.") and not caller.startswith("bitplan.integrations.")


def _not_a_model(model: object, plan: object) -> PlanError:
    advice = " The model comes first: attach(model, plan)." if isinstance(plan, nn.Module) else ""
    if isinstance(model, type):
        return PlanError(f"a plan is attached to a model, not to the class {model.__name__}: make one of it first.")
    if isinstance(model, Mapping):
        advice = " Load a state_dict into a model first."
    return PlanError(f"a plan is attached to a torch.nn.Module, not to {type(model).__name__}.{advice}")
