"""Where Python code runs: eagerly, or while torch.compile makes a graph of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext

F = TypeVar("F", bound=Callable[..., Any])


def is_traced() -> bool:
    """Whether a graph is being made: by torch.compile, or beneath it of the functions that it took as they are."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def constant_when_traced(function: F) -> F:
    """Under torch.compile call `function` while tracing and keep its result as a constant."""
    constant: F = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return constant


def taken_whole(function: F) -> F:
    """Under torch.compile do not follow `function`: run it as it is when the graph of tensors is made.

    Its arguments are tensors and plain constants.
    """
    whole: F = torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    return whole
