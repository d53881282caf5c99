from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitplan.analysis.sites import list_sites
from bitplan.capture.recording import scripted_modules

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.parametrize("script", [torch.jit.script, lambda block: torch.jit.trace(block, torch.randn(2, 3, 4))])
def test_nothing_inside_a_scripted_module_is_listed_and_everything_around_it_is(script: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), script(Block()), nn.ReLU())
    assert scripted_modules(model) == ["1"]
    listed = [site.name for site in list_sites(model, torch.randn(2, 3, 4)) if site.role == "activation"]
    assert listed == ["0/linear.0:activation", "2/relu.0:activation"]


def test_a_scripted_module_that_fails_leaves_nothing_behind() -> None:
    scripted = torch.jit.script(Block())
    with pytest.raises(RuntimeError):
        list_sites(nn.Sequential(scripted), torch.randn(2, 5))
    assert len(list_sites(nn.Sequential(nn.ReLU()), torch.randn(2, 5))) == 1  # modes look again


def test_a_model_can_be_unseen_as_a_whole() -> None:
    assert scripted_modules(torch.jit.script(Block())) == [""]
