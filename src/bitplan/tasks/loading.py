"""Tasks whose data are loaded once, when they are first asked for."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Generic, TypeVar

import torch

from bitplan.tasks.task import Task

Data = TypeVar("Data")


class LoadingTask(Task, Generic[Data]):
    """A task with a data set. A set derives from this, or from a kind of task that does, and says how it is loaded."""

    @abstractmethod
    def load(self) -> Data:
        """The data set."""

    @cached_property
    def data(self) -> Data:
        with torch.device("cpu"):  # where only shapes are asked for, models are made on another device
            return self.load()
