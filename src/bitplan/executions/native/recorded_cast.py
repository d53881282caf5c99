"""Casts that note the largest magnitude they meet where it is remembered, instead of telling it.

With scales from past steps a cast tells the largest magnitude of each tile, and a record's number is raised to the
largest of these: up to four small kernels for every cast. ``bitplan::float8_cast_noted``, ``bitplan::norm_cast_noted``,
``bitplan::gated_cast_noted`` and ``bitplan::gated_grads_cast_noted`` take what the operations without "noted" take, and
*records*: tensors, in each of which one number, its *cell*, is raised. On a GPU, in a compiled graph, the kernel that
casts does so itself; elsewhere they are what is written below. They give what the others give, without magnitudes, and
then the records.

Graphs get them by :mod:`bitplan.compiler.amax_recording`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import OPERATIONS, itself, register_kernels
from bitplan.executions.native import float8_cast, gated_cast, norm_cast
from bitplan.executions.native.float8_cast import NOTED

_ours: Any = torch.ops.bitplan
_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class RecordingCast:
    """An operation that casts, and what there is to know of it to let it note magnitudes."""

    name: str
    #: Which of its arguments says whether magnitudes are told.
    gathers: int
    #: Which of its results are these, of how many.
    tops: tuple[int, ...]
    results: int
    #: In how many records each of these can be noted.
    most: int
    modules: tuple[str, ...]

    @property
    def plain(self) -> Any:
        return getattr(_ours, self.name).default

    @property
    def noted(self) -> Any:
        return getattr(_ours, f"{self.name}_noted").default

    def telling(self, given: Sequence[Any], tells: bool) -> tuple[Any, ...]:
        """The arguments, with magnitudes told or not."""
        return (*given[: self.gathers], tells, *given[self.gathers + 1 :])

    def top_of(self, record: int) -> int:
        """Which result is noted in that one of the records: all of them hold the one there is, or each its own."""
        return self.tops[record] if len(self.tops) > 1 else self.tops[0]

    def in_torch(self, *given: Any, records: Sequence[Tensor], cells: Sequence[int]) -> list[Tensor]:
        results = list(self.plain(*self.telling(given, True)))
        raised = []
        for number, (record, cell) in enumerate(zip(records, cells, strict=True)):
            now = record.clone()
            place = now.view(-1)[cell]
            place.copy_(torch.maximum(place, results[self.top_of(number)].amax()))
            raised.append(now)
        for number in self.tops:
            results[number] = results[number].new_empty(0)
        return results + raised

    def of_shape(self, *given: Any, records: Sequence[Tensor], cells: Sequence[int]) -> list[Tensor]:
        return [*self.plain(*self.telling(given, False)), *map(torch.empty_like, records)]

    def launched(
        self, *given: Any, records: Sequence[Tensor], cells: Sequence[int], wrap: Any = itself
    ) -> list[Tensor]:
        """Writes into the records themselves."""
        plain = OPERATIONS[self.name].launched
        results = plain(*self.telling(given, False), wrap=wrap, records=tuple(records), cells=tuple(cells))
        return [*results, *records]

    def is_possible(self, *given: Any, records: Sequence[Tensor], cells: Sequence[int]) -> bool:
        return OPERATIONS[self.name].is_possible(*given)


_GATED = (gated_cast.__name__, f"{gated_cast.__name__}_kernel")
#: By the operation that tells.
CASTS: dict[Any, RecordingCast] = {
    each.plain: each
    for each in (
        RecordingCast("float8_cast", 7, (3,), 4, NOTED, (float8_cast.__name__, f"{float8_cast.__name__}_kernel")),
        RecordingCast("gated_cast", 7, (3,), 6, 1, _GATED),
        RecordingCast("gated_grads_cast", 10, (3, 7), 8, 1, _GATED),
        RecordingCast("norm_cast", 9, (3,), 4, NOTED, (norm_cast.__name__, f"{norm_cast.__name__}_kernel")),
    )
}

for _each in CASTS.values():
    _taken = str(_each.plain._schema).partition("(")[2].rpartition(") -> ")[0]
    _name = f"{_each.name}_noted"
    _LIBRARY.define(
        f"{_name}({_taken}, *, Tensor[] records, int[] cells) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
    )
    _LIBRARY.impl(_name, _each.in_torch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitplan::{_name}", _each.of_shape, lib=_LIBRARY)
    register_kernels(_name, _each.launched, _each.is_possible, (__name__, *_each.modules))
