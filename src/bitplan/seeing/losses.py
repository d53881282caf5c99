"""A loss function as a part of the model: its tensors are sites of the module path ``loss``.

A scope belongs to a module (:mod:`bitplan.seeing.intercept`), and a loss is often a plain function. So an empty module,
the *holder*, stands for it: it has the path, and what a plan does there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.graphs.guarding import VERSION, depend_on
from bitplan.seeing.intercept import Interceptor, ModuleState, Scope, innermost_scope

#: The path of a loss function's tensors.
LOSS_PATH = "loss"


def loss_holder(interceptor: Interceptor) -> nn.Module:
    """An empty module for a loss, whose operations `interceptor` sees."""
    holder = nn.Module()
    holder.__dict__["_bitplan"] = ModuleState(interceptor, LOSS_PATH)
    return holder


def bring_in(function: Callable[..., Tensor], interceptor: Interceptor, holder: nn.Module) -> Callable[..., Tensor]:
    """`function` with its operations in the holder's scope, eager and compiled, as a planned module has its own."""

    def planned_loss(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            depend_on(holder.__dict__[VERSION])
        if interceptor.keeper is not None and not torch.compiler.is_compiling() and innermost_scope() is None:
            with interceptor.keeper.hooks(), Scope(interceptor, holder):
                return function(*args, **kwargs)
        with Scope(interceptor, holder):
            return function(*args, **kwargs)

    return planned_loss
