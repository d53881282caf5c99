"""Which passes of a product at hand go to the units: what its tensors and its settings say, beyond what the plan says.

Asked at every call, also while a graph is made, and by the list of fallbacks: so that both say the same, and so that no
sentence is made here that holds a size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from bitplan.executions.native.backends import FASTER
from bitplan.executions.native.convolution import is_pointwise, obstacle, obstacle_of_dgrad, places_of


class Terms(NamedTuple):
    """On which terms products go to the units: from where on that pays on a machine, and how exactly they add up."""

    #: Multiplications of a product, whatever its unit.
    work: int = 0
    #: Unit -> multiplications of a product.
    works: tuple[tuple[str, int], ...] = ()
    #: Unit -> channels, of input and of result, of a convolution whose kernel has to be unfolded.
    channels: tuple[tuple[str, int], ...] = ()
    #: Passes that a unit with a faster twin gives to that one.
    fast_sums: tuple[str, ...] = ()


#: Kind of device, dimensions of x, and whether what a row sees is one row (as of linear layers) -> pass -> unit.
Passes = dict[tuple[str, int, bool], dict[str, str]]

TOO_SMALL = "is too small to gain by it"
TOO_NARROW = "has too few channels to gain by unfolding its kernel"


def work_of(op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor) -> int:
    """Multiplications of one pass."""
    if op == "linear":
        return x.numel() * w.shape[0]
    work: int = x.shape[0] * math.prod(places_of(x.shape[2:], w.shape[2:], settings)) * w.numel()
    return work


def obstacle_here(op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: Terms) -> str | None:
    """Why no pass of this product goes to the units, whatever its formats; None where they may."""
    if op == "linear":
        if w.dim() != 2:
            return "a weight that is no matrix has no path to the units"
    else:
        found = obstacle(settings, x, w)
        if found is not None:
            return found
    if work_of(op, settings, x, w) < max(terms.work, 1):  # an empty batch has nothing to take a scale from
        return TOO_SMALL
    return None


def obstacle_of_pass(
    one: str, unit: str, op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: Terms
) -> str | None:
    """Why that pass does not go to that unit."""
    if work_of(op, settings, x, w) < dict(terms.works).get(unit, 0):
        return TOO_SMALL
    if sees_one_row(op, settings, w):
        return None
    for name, channels in terms.channels:
        if name == unit and min(w.shape[0], w.shape[1]) < channels:
            return TOO_NARROW
    return obstacle_of_dgrad(settings, w) if one == "dgrad" else None


def sees_one_row(op: str, settings: tuple[Any, ...], w: Tensor) -> bool:
    return op == "linear" or is_pointwise(settings, w)


def units_here(
    passes: Passes, op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: Terms
) -> dict[str, str]:
    """Pass -> unit, for those that go to one."""
    chosen = passes.get((x.device.type, x.dim(), sees_one_row(op, settings, w)), {})
    if not chosen or obstacle_here(op, settings, x, w, terms) is not None:
        return {}
    return {
        one: FASTER.get(unit, unit) if one in terms.fast_sums else unit
        for one, unit in chosen.items()
        if obstacle_of_pass(one, unit, op, settings, x, w, terms) is None
    }
