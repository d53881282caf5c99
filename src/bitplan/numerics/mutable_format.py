"""A format whose parameters lie in a tensor on the device, so that it can change while a graph runs.

Writing the row changes every later rounding, eager or compiled, with no recompilation and no wait of the
host for the device. One graph serves one *kind*: floats among themselves, integers among themselves.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.numerics.dtypes import FLOAT32, FLOAT64, carrier_for
from bitplan.numerics.formats import BlockFormat, FloatFormat, Format, IntFormat, Overflow, get_format
from bitplan.numerics.rounding import row_from_tensor, row_values


class LiveFormat:
    """A float or integer format that :meth:`set_` may exchange for another of its kind.

    >>> live = LiveFormat("e4m3")
    >>> live.set_("e5m2")
    """

    def __init__(
        self,
        format: str | Format,
        *,
        device: torch.device | str | None = None,
        overflow: Overflow | None = None,
        dtype: torch.dtype = torch.float32,
        row: Tensor | None = None,
    ) -> None:
        """`dtype` is the inputs': float64, or float32 for float32, bfloat16 and float16.

        `row` may be a row of a larger table; it is then written in place.
        """
        first = get_format(format)
        if isinstance(first, BlockFormat):
            raise FormatError(f"{first.name} cannot be live, only floats and integers can: give its element's name.")
        self.kind: Literal["float", "int"] = first.kind
        self.affine = isinstance(first, IntFormat) and first.affine
        self.carrier = FLOAT64 if dtype == torch.float64 else FLOAT32
        self._overflow = overflow
        values = self.row_of(first)
        row_dtype = self.carrier.int_dtype if self.kind == "float" else self.carrier.dtype
        self.row = torch.empty(len(values), dtype=row_dtype, device=device) if row is None else row
        self.set_(first)

    def set_(self, format: str | Format) -> None:
        """Write another format of the same kind into the row."""
        target = get_format(format)
        self.require_same_kind(target)
        values = self.row_of(target)
        self.row.copy_(torch.tensor(values, dtype=self.row.dtype), non_blocking=True)

    def require_same_kind(self, target: Format) -> None:
        """Raise where one graph could not serve both."""
        same = target.kind == self.kind and (isinstance(target, IntFormat) and target.affine) == self.affine
        if not same:
            kind = "unsigned integer" if self.affine else {"int": "symmetric integer", "float": "float"}[self.kind]
            raise FormatError(f"{target.name} cannot replace a live {kind} format: one graph serves one kind.")

    @property
    def max(self) -> Tensor:
        """The largest value, 0-d, on the device."""
        return self.max_in(self.row)

    def max_in(self, row: Tensor) -> Tensor:
        """The largest value of the format in a row like this one's."""
        return torch.as_tensor(row_from_tensor(row).max) if self.kind == "float" else row[1]

    def overflow_threshold_in(self, row: Tensor) -> Tensor:
        """As a format's own, for the one in a row like this one's."""
        if self.kind == "int":
            return row[1] + 0.5
        named = row_from_tensor(row)
        largest = torch.as_tensor(named.max)
        # Half a step above the largest value is one bit behind its last one.
        half_step = torch.bitwise_left_shift(1, torch.as_tensor(named.cut)) >> 1
        return (largest.view(self.carrier.int_dtype) + half_step).view(self.carrier.dtype)

    def row_of(self, target: Format) -> list[int] | list[float]:
        """What is written into a row for `target`."""
        if isinstance(target, IntFormat):
            return [target.min, target.max]
        assert isinstance(target, FloatFormat)
        if carrier_for(self.carrier.dtype, target, "stochastic") is not self.carrier:
            raise FormatError(f"{target.name} cannot be live in float32 arithmetic: use it as a constant format.")
        return row_values(target, self._overflow, self.carrier)
