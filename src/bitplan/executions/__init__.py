"""The executions of a plan: :func:`make_execution` makes the one that options ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from bitplan.plans.execution import ExecutionOptions, Native, Packed

if TYPE_CHECKING:
    from bitplan.runtime.execution import Execution


def make_execution(options: ExecutionOptions, model: nn.Module) -> Execution:
    """The execution with these options, for `model`."""
    if isinstance(options, Native):
        from bitplan.executions.native.execution import NativeExecution

        return NativeExecution(options, model)
    if isinstance(options, Packed):
        from bitplan.executions.packed.execution import PackedExecution

        return PackedExecution(options)
    from bitplan.executions.emulate import EmulateExecution

    return EmulateExecution(options)
