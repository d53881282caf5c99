"""A format whose parameters are in a tensor on the device, so that it can change without recompilation.

Writing the row changes every later rounding, eager or compiled, and the host does not wait for the device. One graph
serves one *kind* of format: floats, symmetric integers or unsigned integers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.numerics.dtypes import FLOAT32, FLOAT64, carrier_for
from bitplan.numerics.formats import BlockFormat, CodebookFormat, FloatFormat, Format, IntFormat, Overflow, get_format
from bitplan.numerics.rounding import row_from_tensor, row_values


class MutableFormat:
    """A float or integer format that :meth:`set_` can replace by another of its kind.

    >>> live = MutableFormat("e4m3")
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
        """
        :param dtype: the inputs' dtype: float64, or float32 for float32, bfloat16 and float16.
        :param row: a row of a larger table, which is written in place.
        """
        initial = get_format(format)
        if isinstance(initial, BlockFormat):
            raise FormatError(f"{initial.name} cannot be live, only floats and integers can: give its element's name.")
        if isinstance(initial, CodebookFormat):
            raise FormatError(f"{initial.name} cannot be live, only floats and integers can: use it as it is.")
        self.kind: Literal["float", "int"] = initial.kind
        self.affine = isinstance(initial, IntFormat) and initial.affine
        self.carrier = FLOAT64 if dtype == torch.float64 else FLOAT32
        self._overflow = overflow
        values = self.row_of(initial)
        row_dtype = self.carrier.int_dtype if self.kind == "float" else self.carrier.dtype
        self.row = torch.empty(len(values), dtype=row_dtype, device=device) if row is None else row
        self.set_(initial)

    def set_(self, format: str | Format) -> None:
        """Write another format of the same kind into the row."""
        target = get_format(format)
        self.require_same_kind(target)
        values = self.row_of(target)
        self.row.copy_(torch.tensor(values, dtype=self.row.dtype), non_blocking=True)

    def require_same_kind(self, target: Format) -> None:
        """Raise unless one graph can serve both formats."""
        is_affine = isinstance(target, IntFormat) and target.affine
        if target.kind != self.kind or is_affine != self.affine:
            kind = "unsigned integer" if self.affine else {"int": "symmetric integer", "float": "float"}[self.kind]
            raise FormatError(f"{target.name} cannot replace a live {kind} format: one graph serves one kind.")

    @property
    def max(self) -> Tensor:
        """The largest value, 0-d, on the device."""
        return self.max_in(self.row)

    def max_in(self, row: Tensor) -> Tensor:
        """The largest value of the format in `row`."""
        return torch.as_tensor(row_from_tensor(row).max) if self.kind == "float" else row[1]

    def overflow_threshold_in(self, row: Tensor) -> Tensor:
        """The overflow threshold of the format in `row`."""
        if self.kind == "int":
            return row[1] + 0.5
        fields = row_from_tensor(row)
        largest = torch.as_tensor(fields.max)
        # Half a step above the largest value is one bit below its last mantissa bit.
        half_step = torch.bitwise_left_shift(1, torch.as_tensor(fields.cut)) >> 1
        return (largest.view(self.carrier.int_dtype) + half_step).view(self.carrier.dtype)

    def row_of(self, target: Format) -> list[int] | list[float]:
        """The values of a row for `target`."""
        if isinstance(target, IntFormat):
            return [target.min, target.max]
        assert isinstance(target, FloatFormat)
        if carrier_for(self.carrier.dtype, target, "stochastic") is not self.carrier:
            raise FormatError(f"{target.name} cannot be live in float32 arithmetic: use it as a constant format.")
        return row_values(target, self._overflow, self.carrier)
