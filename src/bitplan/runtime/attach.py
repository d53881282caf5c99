"""Putting a plan to work on a model: :func:`attach`.

``execution="emulate"`` rounds values and computes in the model's own precision: the numbers of low precision, none of
its savings in memory or time. ``execution="packed"`` computes the same numbers and keeps them small.
``execution="native"`` multiplies the same operands on the machine's own low-precision units.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bitplan.capture.decompositions import is_opened
from bitplan.capture.recording import record
from bitplan.capture.scopes import is_planned, unwrapped
from bitplan.errors import BitplanWarning, PlanError, nearest_names
from bitplan.executions.native.crossover import remembered
from bitplan.executions.native.fallbacks import Fallback
from bitplan.executions.native.gemm import PASSES
from bitplan.executions.native.paths import Terms
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan
from bitplan.runtime.attachment import Attachment
from bitplan.runtime.clock import Total

__all__ = ["EXECUTIONS", "Attachment", "attach"]

log = logging.getLogger("bitplan")

#: What each execution does, as the first line of the log says it.
EXECUTIONS = {
    "emulate": "values are rounded, but no memory or time is saved.",
    "packed": "values are rounded, and what is kept for the backward pass lies in memory in its low-precision form.",
    "native": "layers multiply on the machine's low-precision units where these have a path; the rest is emulated.",
}


def attach(
    model: nn.Module,
    plan: Plan | str,
    steps: Total | None = None,
    example: Any = None,
    *,
    seed: int = 0,
    live: bool = False,
    stats: bool = False,
    execution: str = "emulate",
    native_from: int | None = None,
    strict_native: bool = False,
    fast_sums: Sequence[str] = (),
) -> Attachment:
    """Put `plan` (a plan, a preset's name or a file) to work on `model`.

    :param steps: optimizer steps of the whole run, which a plan that changes over time needs; or ``"progress"``, where
        the loop tells its progress by :meth:`Attachment.progress`.
    :param example: a batch, as the model takes it; with one, everything is checked at once on fake tensors. Without,
        the first forward lists the operations, and a rule that matched none raises before the first optimizer step.
        A model that is compiled from the start needs one.
    :param seed: of stochastic rounding.
    :param live: every float and integer format may be changed during the run, see :meth:`Attachment.set_format`.
    :param stats: gather what rounding does at every site, see :meth:`Attachment.stats`.
    :param execution: ``emulate``, ``packed`` or ``native``.
    :param native_from: of native execution: products of so many multiplications (tokens x inputs x outputs) and more go
        to the units; by default from where on that pays on this machine, which is measured once and remembered.
    :param strict_native: raise where a product that the plan gives formats would be emulated; needs an `example`.
    :param fast_sums: of native execution: passes (``fprop``, ``dgrad``, ``wgrad``) whose FP8 products add up with fewer
        bits than float32 has, as tensor cores do at their fastest; torchao has it so in ``fprop``.
    """
    if execution not in EXECUTIONS:
        raise PlanError(f"there is no execution {execution!r}; {nearest_names(execution, EXECUTIONS)}")
    if not isinstance(model, nn.Module):
        raise PlanError(f"a plan is attached to a torch.nn.Module, not to {type(model).__name__}.")
    found = find_plan(plan)
    if any(is_planned(module) for module in model.modules()):
        raise PlanError("a plan is attached to this model already: detach it first.")
    operations = None
    if example is not None and found.all_rules:
        try:
            operations = record(unwrapped(model), example, opens=partial(is_opened, found))
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PlanError(
                f"the model does not run on the example ({reason}): give a batch as the model takes it."
            ) from error
    if execution != "native" and (native_from is not None or strict_native or fast_sums):
        raise PlanError(
            "native_from, strict_native and fast_sums go with execution='native': give that, too, or drop them."
        )
    fast_sums = (fast_sums,) if isinstance(fast_sums, str) else tuple(fast_sums)
    for one in fast_sums:
        if one not in PASSES:
            raise PlanError(f"there is no pass {one!r} to have fast sums: they are {', '.join(PASSES)}.")
    terms = None
    if execution == "native":
        first = next(model.parameters(), torch.empty(0))
        terms = remembered(first.device, first.dtype) if native_from is None else Terms(native_from)
        terms = terms._replace(fast_sums=fast_sums)
    run = Attachment(model, found, steps, seed, live, stats, execution, terms)
    if example is not None:
        run.expect(example)
    if operations is not None:
        try:
            run.check(operations)
            if execution == "native":
                _tell_fallbacks(run.fallbacks(), strict_native)
        except BaseException:
            run.detach()
            raise
    elif strict_native:
        run.detach()
        raise PlanError("strict_native needs to know the products: give attach() an example= batch.")
    log.info("plan attached, execution %s: %s", execution, EXECUTIONS[execution])
    return run


def _tell_fallbacks(found: list[Fallback], strict: bool) -> None:
    """Say once, in one sentence, what is emulated."""
    if not found:
        return
    reasons = Counter(fallback.reason for fallback in found)
    words = "; ".join(f"{reason} ({count}x)" if count > 1 else reason for reason, count in reasons.most_common(3))
    message = f"{len(found)} products are emulated: {words}. run.fallbacks() lists them."
    if strict:
        raise PlanError(f"{message} Drop strict_native to run them so.")
    warnings.warn(message, BitplanWarning, stacklevel=3)
