"""The counted tensors of the paper's networks, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from bitplan.lab.models.built_in import sized_target
from bitplan.planners.assign.groups import StepTensors, count_tensors


@cache
def _network(name: str, width: float) -> StepTensors:
    with torch.device("meta"):
        target = sized_target(name, 100, width)
    return count_tensors(target.model, target.batch, target.loss)


@pytest.fixture
def network() -> Callable[..., StepTensors]:
    """Counts the tensors of a network by name and width, with 100 classes and 128 images."""
    return lambda name, width=1.0: _network(name, width)
