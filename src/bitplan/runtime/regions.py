"""The equal blocks of a model, which :meth:`bitplan.Attachment.compile` can compile once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from torch import nn


def equal_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of one class with parameters of equal shapes, of which a list or a sequence holds two or more.

    Blocks inside of such blocks are not listed: they are compiled with them.

    >>> layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2)]
    >>> [len(equal_blocks(nn.Sequential(*layers[:count]))) for count in (5, 1)]
    [2, 0]
    """
    return list(dict.fromkeys(_walk(model)))


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    counts: Counter[Hashable] = Counter()
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        counts.update(_form(child) for child in children)
    for child in children:
        if counts[_form(child)] > 1 and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _walk(child)


def _form(module: nn.Module) -> Hashable:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())
