"""Casts that update amax records themselves instead of returning the amax.

With delayed scaling a cast returns the amax of each tile, and one cell of a record is raised to the maximum of these:
up to four small kernels per cast. The operations with the suffix ``_recorded``, such as
``bitplan::float8_cast_recorded``, take the arguments of those without it and *records*: tensors in each of which one
element, its *cell*, is raised. In a compiled graph on a GPU the cast kernel does that; elsewhere the reference
implementation below. They return the results of the plain operations, with an empty amax, and then the updated records.

:mod:`bitplan.compiler.amax_fusion` puts them into graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import OPERATIONS, KernelOp, launch_directly
from bitplan.executions.native import gated_cast, norm_cast  # noqa: F401 - define the operations
from bitplan.executions.native.float8_cast import MAX_RECORDS

_ours: Any = torch.ops.bitplan
_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class RecordingCast:
    """The signature of a cast operation that has a variant with records."""

    name: str
    #: Position of the argument `returns_amax`.
    returns_amax: int
    #: Positions of the amax results, and the number of results.
    amax_results: tuple[int, ...]
    results: int
    #: The most records per amax.
    max_records: int

    @property
    def plain(self) -> Any:
        return getattr(_ours, self.name).default

    @property
    def recorded(self) -> Any:
        return getattr(_ours, f"{self.name}_recorded").default

    def with_amax(self, args: Sequence[Any], returns_amax: bool) -> tuple[Any, ...]:
        """The arguments with `returns_amax` replaced."""
        return (*args[: self.returns_amax], returns_amax, *args[self.returns_amax + 1 :])

    def amax_result_of(self, record: int) -> int:
        """The position of the result that raises the record: the only amax, or the record's own."""
        return self.amax_results[record] if len(self.amax_results) > 1 else self.amax_results[0]

    def reference(self, *args: Any, records: Sequence[Tensor], cells: Sequence[int]) -> list[Tensor]:
        results = list(self.plain(*self.with_amax(args, True)))
        raised = []
        for number, (record, cell) in enumerate(zip(records, cells, strict=True)):
            copy = record.clone()
            element = copy.view(-1)[cell]
            element.copy_(torch.maximum(element, results[self.amax_result_of(number)].amax()))
            raised.append(copy)
        for position in self.amax_results:
            results[position] = results[position].new_empty(0)
        return results + raised

    def fake(self, *args: Any, records: Sequence[Tensor], cells: Sequence[int]) -> list[Tensor]:
        return [*self.plain(*self.with_amax(args, False)), *map(torch.empty_like, records)]

    def launch(
        self, *args: Any, records: Sequence[Tensor], cells: Sequence[int], wrap: Any = launch_directly
    ) -> list[Tensor]:
        """Launch the kernel, which updates the records in place."""
        launch = OPERATIONS[self.name].launch
        results = launch(*self.with_amax(args, False), wrap=wrap, records=tuple(records), cells=tuple(cells))
        return [*results, *records]

    def supports(self, *args: Any, records: Sequence[Tensor], cells: Sequence[int]) -> bool:
        return OPERATIONS[self.name].supports(*args)


#: By the operation without records.
CASTS: dict[Any, RecordingCast] = {
    cast.plain: cast
    for cast in (
        RecordingCast("float8_cast", 7, (3,), 4, MAX_RECORDS),
        RecordingCast("float8_padded_cast", 7, (3,), 4, MAX_RECORDS),
        RecordingCast("gated_cast", 7, (3,), 6, 1),
        RecordingCast("gated_grads_cast", 10, (3, 7), 8, 1),
        RecordingCast("norm_cast", 9, (3,), 4, MAX_RECORDS),
    )
}

for _cast in CASTS.values():
    _arguments = str(_cast.plain._schema).partition("(")[2].rpartition(") -> ")[0]
    _name = f"{_cast.name}_recorded"
    _LIBRARY.define(
        f"{_name}({_arguments}, *, Tensor[] records, int[] cells) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
    )
    _LIBRARY.impl(_name, _cast.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitplan::{_name}", _cast.fake, lib=_LIBRARY)
    OPERATIONS[_name] = KernelOp(_name, _cast.launch, _cast.supports, (__name__, *OPERATIONS[_cast.name].modules))
