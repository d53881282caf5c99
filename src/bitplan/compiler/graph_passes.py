"""Inductor passes of ours over the graphs of a compiled model, beside those that the user has set.

Inductor has one option for such passes, which older torch versions give a single pass: ours then calls the earlier one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from bitplan.compiler.torch_private import CustomGraphPass, inductor_config

#: The Inductor option that holds passes over forward and backward graphs.
OPTION = "post_grad_custom_pre_pass"


class PostGradPass(CustomGraphPass):
    """A pass of ours, after the passes that the user has set."""

    def __init__(self, earlier: Iterable[Callable[[fx.Graph], None]] = ()) -> None:
        self.earlier = tuple(earlier)

    @abstractmethod
    def change(self, graph: fx.Graph) -> None:
        """Change a graph."""

    @abstractmethod
    def own_key(self) -> Any:
        """The part of the cache key that says what this pass does."""

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.earlier:
            graph_pass(graph)
        self.change(graph)

    def uuid(self) -> Any:
        """The cache key; None, which disables Inductor's caches, where an earlier pass has none."""
        others = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self.earlier]
        return None if None in others else (self.own_key(), *others)

    # torch.compile compares the options of two calls to decide whether a graph can be reused.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PostGradPass) and type(other) is type(self) and self.earlier == other.earlier

    def __hash__(self) -> int:
        return hash((type(self), self.earlier))


def with_pass(options: Mapping[str, Any] | None, added: type[PostGradPass]) -> dict[str, Any]:
    """Inductor options with a pass added after the passes that these options, or Inductor's global ones, have."""
    settings = dict(options or {})
    current = settings.get(OPTION, getattr(inductor_config, OPTION))
    earlier = current if isinstance(current, (list, tuple)) else () if current is None else (current,)
    if any(isinstance(graph_pass, added) for graph_pass in earlier):
        return settings
    if isinstance(current, (list, tuple)):  # newer torch versions take several passes
        return settings | {OPTION: [*earlier, added()]}
    return settings | {OPTION: added(earlier)}
