"""Functions under activation checkpointing.

A module that is checkpointed enters its scope again when it is recomputed. A plain function does not: its operations
would be recomputed unrounded, in the backward pass, and nothing would say so. So while a plan is attached, a
checkpointed function is handed on together with the scope that it was called in.

``torch.utils.checkpoint.checkpoint`` itself stays what it is: torch.compile knows it by its identity, and a compiled
region arrives in :meth:`bitplan.seeing.intercept.Scope.__torch_function__` anyway. Eagerly it calls one of two inner
functions, and these are exchanged, wherever the outer one was imported to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as home

from bitplan.seeing.intercept import innermost_scope
from bitplan.torch_patches import Undo, replace_attribute

_keep_hooks = home._checkpoint_without_reentrant_generator
_Reentrant = home.CheckpointFunction


def _planned_keep_hooks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scope = innermost_scope()
    return _keep_hooks(function if scope is None else scope.carried(function), *args, **kwargs)


class _PlannedReentrant(_Reentrant):
    @classmethod
    def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
        scope = innermost_scope()
        return _Reentrant.apply(  # type: ignore[no-untyped-call]
            function if scope is None else scope.carried(function, args[1:]), *args
        )


def carry_scopes() -> Undo:
    """A patch of torch: checkpointed functions carry their scope along."""
    restore_hooked = replace_attribute(home, "_checkpoint_without_reentrant_generator", _planned_keep_hooks)
    restore_reentrant = replace_attribute(home, "CheckpointFunction", _PlannedReentrant)

    def undo() -> None:
        restore_hooked()
        restore_reentrant()

    return undo
