"""TensorBoard's events beside a run, where tensorboard is installed; nothing at all where it is not."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger("bitplan")


class Events:
    """Takes the lines of metrics.jsonl, and here does nothing with them."""

    def add(self, line: Mapping[str, Any]) -> None:
        return None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Single figures by name."""

    def close(self) -> None:
        return None

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardEvents(Events):
    """Writes every figure as a scalar."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier attempt wrote of later steps is not shown any more.
        writer: Any = SummaryWriter
        self._writer = writer(str(folder), purge_step=after + 1 if after else None)

    def add(self, line: Mapping[str, Any]) -> None:
        kind = "evaluation" if line.get("evaluation") else "training"
        for name, value in line.items():
            if name not in ("step", "evaluation"):
                self._writer.add_scalar(f"{kind}/{name}", value, line["step"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"measured/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def open_events(folder: Path, after: int) -> Events:
    """Events of the steps that follow step `after`."""
    if importlib.util.find_spec("tensorboard") is None:
        return Events()
    try:
        return TensorBoardEvents(folder, after)
    except Exception as error:  # an extra that does not work must not stop a run
        log.info("no TensorBoard events are written: %s", error)
        return Events()
