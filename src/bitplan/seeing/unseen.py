"""Scripted and traced modules: they run without Python, so that no mode sees what happens inside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bitplan.plan.match import ancestors


def unseen_modules(model: nn.Module) -> list[str]:
    """Their paths, outermost ones only."""
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    return [path for path in scripted if not set(scripted).intersection(ancestors(path))]


@contextmanager
def looking_away(model: nn.Module) -> Iterator[None]:
    """While scripted modules run, modes do not look.

    On real tensors they could see nothing anyway; but fake tensors compute parts of scripted code in Python, and that
    must not be taken for operations of the model.
    """
    unseen = [model.get_submodule(path) for path in unseen_modules(model)]
    if not unseen:
        yield
        return
    guards: list[Any] = []

    def enter(module: nn.Module, *given: Any) -> None:
        if any(module is each for each in unseen):
            guards.append(torch._C.DisableTorchFunction())
            guards[-1].__enter__()

    def leave(module: nn.Module, *given: Any) -> None:
        if any(module is each for each in unseen):
            guards.pop().__exit__(None, None, None)

    # Hooks for all modules: scripted ones take none of their own.
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
