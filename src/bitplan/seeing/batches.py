"""A batch as users give it, and how a model and a loss are called with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def split_batch(batch: Any, loss: Callable[..., Any] | None) -> tuple[Any, Any]:
    """(inputs, target): a pair is both where a loss wants a target, anything else is inputs alone."""
    if loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2 and wants_target(loss):
        return batch[0], batch[1]
    return batch, None


def wants_target(loss: Callable[..., Any]) -> bool:
    try:
        needed = [
            parameter
            for parameter in inspect.signature(loss).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return True
    return len(needed) >= 2 or isinstance(loss, nn.Module)


def call_arguments(inputs: Any) -> tuple[Any, ...]:
    """(args, kwargs) of the model's call: a mapping becomes keywords, a tuple positions, anything else one argument."""
    if isinstance(inputs, dict) or hasattr(inputs, "keys"):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def call_loss(loss: Callable[..., Any], output: Any, target: Any) -> Any:
    return loss(output) if target is None else loss(output, target)
