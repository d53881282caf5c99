"""Small models and plans of a few rules, for tests that write the same rounding out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bitplan
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach


def attached(model: nn.Module, *rules: dict[str, Any], **options: Any) -> Attachment:
    """The model with a plan of these rules."""
    return attach(model, Plan.from_dict({"version": 1, "rules": list(rules)}), **options)


def q(x: Tensor, name: str, **how: Any) -> Tensor:
    """`x` rounded, which must change it."""
    rounded = bitplan.quantize(x.detach(), name, **how)
    assert not torch.equal(rounded, x.detach()), "a test on values that need no rounding shows nothing"
    return rounded


class Apply(nn.Module):
    """A function as a model, perhaps with a weight, which it is given last."""

    def __init__(self, function: Callable[..., Any], *weight: int) -> None:
        super().__init__()
        self.function = function
        if weight:
            self.weight = nn.Parameter(torch.randn(weight))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.parameters())
