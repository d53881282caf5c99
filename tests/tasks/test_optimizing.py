"""Built-in tasks make their optimizer steps in one launch on a GPU, and leave the choice to torch elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import fused_for

TINY = {
    "digits": ("width=0.25",),
    "lm": ("layers=1", "features=16", "length=8"),
    "lstm-lm": ("features=8", "length=4"),
    "graph": (),
    "detection": (),
    "forecast": (),
    "rl": (),
}


def test_all_parameters_must_be_on_the_gpu() -> None:
    with FakeTensorMode():
        there, here = torch.empty(2, device="cuda"), torch.empty(2)
        assert fused_for([there, there]) is True
        assert fused_for([there, here]) is None
        assert fused_for([]) is None


@pytest.mark.parametrize("name", TINY)
def test_every_kind_of_task_asks_for_it(name: str) -> None:
    task = find_task(name, TINY[name])
    model = task.model()
    assert all(group["fused"] is None for group in task.optimizer(model).param_groups)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = nn.Module()
        for index, parameter in enumerate(model.parameters()):
            there.register_parameter(str(index), nn.Parameter(torch.empty(parameter.shape, device="cuda")))
        assert all(group["fused"] is True for group in task.optimizer(there).param_groups)
