"""The memory of a plan at work."""

from __future__ import annotations

from typing import Any

from bitplan.attach import Attachment
from bitplan.errors import AccountError
from bitplan.memory.account import Memory
from bitplan.memory.measure import measure_memory
from bitplan.memory.predict import predict_memory
from bitplan.memory.step import Loss, OptimizerChoice


def of_run(
    run: Attachment,
    batch: Any = None,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    compile: bool = False,
) -> dict[str, Memory | None]:
    """``{"predicted": ..., "measured": ...}`` of a training step with the plan at work as it is.

    Predicted from the shapes of `batch`, or of the first batch that the attachment has seen. Measured where a batch is
    given, on a copy of the model, so that the run goes on as if nothing had been asked; else None.
    """
    given = run._ledger.inputs if batch is None else batch
    if given is None:
        raise AccountError("bitplan has not seen a batch yet: give one, or run the model once uncompiled.")
    rest: tuple[Any, ...] = (loss, optimizer, run.plan, run.execution, compile)
    measured = None if batch is None else measure_memory(run.model, batch, *rest)
    return {"predicted": predict_memory(run.model, given, *rest), "measured": measured}
