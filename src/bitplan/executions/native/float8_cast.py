"""A matrix as float8 codes, row by row and transposed, from one reading of it.

FP8 units want both operands with the summed axis innermost, so a linear layer's input is wanted row by row for its
result and transposed for the weight's gradient; its weight and the gradient of its result likewise. Left to Inductor
that is a kernel for each layout, the transposed one with scattered writes, each of which computes once more what
produced the matrix. Here are two operations that Inductor does not fuse with others, so that what they read is computed
once:

* ``bitplan::float8_amax`` looks for the largest magnitude, in parts, and ``bitplan::float8_amax_joined`` for those of
  several matrices (:mod:`bitplan.compiler.amax_joining`);
* ``bitplan::float8_cast`` makes the scale of these, divides by it, rounds, and writes one layout or both.

On a GPU they are Triton kernels (:mod:`bitplan.executions.native.float8_cast_kernel`), elsewhere the plain torch
below, which says
what they compute: to the bit what :meth:`bitplan.numerics.quantizer.Quantizer.encode` does.

A *reach* is a magnitude from the past, one number on the device, for which the scale makes room instead of the
largest of the present; where it is 0 nothing is known yet, and the present decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import itself, register, register_kernels
from bitplan.numerics.dtypes import TORCH_FLOAT8
from bitplan.numerics.formats import FloatFormat
from bitplan.numerics.rounding import round_float
from bitplan.numerics.scaling import divide, step_scale

FORMATS = {dtype: target for target, dtype in TORCH_FLOAT8.items() if isinstance(target, FloatFormat)}
#: What the operations read; anything else is cast by the quantizer itself.
READ = (torch.float32, torch.bfloat16, torch.float16)
#: In how many parts a GPU looks for the largest magnitude: about four for each of its multiprocessors.
PARTS = 512
#: Of so many matrices a GPU looks for the largest magnitude in one go.
JOINED = 8
#: A GPU casts squares of this side.
TILE = 128
#: In so many records a cast can note the largest magnitude (:mod:`bitplan.executions.native.recorded_cast`): query,
#: key and value.
NOTED = 3


class Cast(NamedTuple):
    """What came of a matrix (rows, features); a layout that was not asked for is empty."""

    #: (rows, features)
    rows: Tensor
    #: (features, rows)
    columns: Tensor
    #: A number in float32.
    scale: Tensor
    #: Magnitudes of which the largest is the matrix's largest; empty where they were not asked for.
    tops: Tensor


def cast_float8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    scaled: bool = True,
    power_of_two: bool = False,
    reach: Tensor | None = None,
    as_rows: bool = True,
    as_columns: bool = True,
    gathers: bool = False,
    after: Tensor | None = None,
) -> Cast:
    """`x`, two-dimensional and of one of the types in :data:`READ`, as codes.

    :param scaled: whether there is a scale; without, `power_of_two` and `reach` mean nothing.
    :param reach: for which magnitude the scale makes room, where that is known from the past.
    :param gathers: whether the magnitudes of the present are told.
    :param after: a tensor that is not looked at; a compiled graph casts when it has it.

    >>> cast = cast_float8(torch.tensor([[1.0, -896.0]]), torch.float8_e4m3fn)
    >>> cast.rows.float(), cast.columns.shape, cast.scale
    (tensor([[   0.5000, -448.0000]]), torch.Size([2, 1]), tensor(2.))
    """
    parts = torch.ops.bitplan.float8_amax(x, reach) if scaled else None
    given = (x, dtype, parts, reach if scaled else None, power_of_two, as_rows, as_columns, gathers, after)
    return Cast(*torch.ops.bitplan.float8_cast(*given))


_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("float8_amax(Tensor x, Tensor? reach) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("float8_amax_joined(Tensor[] xs, Tensor[] reaches) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "float8_cast(Tensor x, ScalarType dtype, Tensor? parts, Tensor? reach, bool power_of_two, bool as_rows, "
    "bool as_columns, bool gathers, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def amax_reference(x: Tensor, reach: Tensor | None) -> Tensor:
    """The largest magnitude, as one part."""
    if not x.numel():
        return torch.zeros(1, device=x.device)
    return torch.maximum(x.amax(), -x.amin()).float().reshape(1)


def joined_amax_reference(xs: Sequence[Tensor], reaches: Sequence[Tensor]) -> list[Tensor]:
    """The same for each of several matrices."""
    return [torch.ops.bitplan.float8_amax(*pair) for pair in zip(xs, reaches, strict=True)]


def cast_reference(
    x: Tensor,
    dtype: torch.dtype,
    parts: Tensor | None,
    reach: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two layouts, the scale, and the magnitudes that were met."""
    target = FORMATS[dtype]
    scale = torch.ones((), device=x.device)
    if parts is not None:
        span = parts.amax()
        scale = step_scale(span if reach is None else torch.where(reach > 0, reach, span), target.max, power_of_two)
    work = x.float()
    codes = round_float(work if parts is None else divide(work, scale), target, "nearest", "saturate").to(dtype)
    nothing = torch.empty(0, 0, dtype=dtype, device=x.device)
    return (
        codes if as_rows else nothing,
        codes.t().contiguous() if as_columns else torch.empty_like(nothing),
        scale,
        amax_reference(x, None) if gathers else torch.empty(0, device=x.device),
    )


def _amax_launched(x: Tensor, reach: Tensor | None, wrap: Any = itself) -> Tensor:
    from bitplan.executions.native.float8_cast_kernel import amax_by_kernel

    return amax_by_kernel(wrap, x.contiguous(), reach)


def _joined_launched(xs: Sequence[Tensor], reaches: Sequence[Tensor], wrap: Any = itself) -> list[Tensor]:
    from bitplan.executions.native.float8_cast_kernel import joined_by_kernel

    return joined_by_kernel(wrap, [x.contiguous() for x in xs], reaches)


def _cast_launched(x: Tensor, *given: Any, wrap: Any = itself, **noted: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from bitplan.executions.native.float8_cast_kernel import cast_by_kernel

    return cast_by_kernel(wrap, x.contiguous(), *given, **noted)


def fake_amax(x: Tensor, *_: Any) -> Tensor:
    """As many numbers as there are parts of a magnitude, not yet computed."""
    return x.new_empty(PARTS if x.is_cuda and x.numel() else 1, dtype=torch.float32)


def _joined_of_shape(xs: Sequence[Tensor], reaches: Sequence[Tensor]) -> list[Tensor]:
    return [fake_amax(*pair) for pair in zip(xs, reaches, strict=True)]


def fake_cast(
    x: Tensor, dtype: torch.dtype, as_rows: bool, as_columns: bool, gathers: bool, tiles: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A cast's results, not yet computed; a GPU tells magnitudes in so many tiles."""
    rows, features = x.shape
    return (
        x.new_empty((rows, features) if as_rows else (0, 0), dtype=dtype),
        x.new_empty((features, rows) if as_columns else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((tiles if x.is_cuda and x.numel() else 1) if gathers else 0, dtype=torch.float32),
    )


def _plain_cast_of_shape(
    x: Tensor,
    dtype: torch.dtype,
    parts: Tensor | None,
    reach: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_cast(x, dtype, as_rows, as_columns, gathers, tiles_of(*x.shape))


def tiles_of(rows: int, features: int) -> int:
    """How many squares cover a matrix."""
    return -(-rows // TILE) * -(-features // TILE)


_MODULES = (__name__, f"{__name__}_kernel")
for _name, _launched, _in_torch, _of_shape in (
    ("float8_amax", _amax_launched, amax_reference, fake_amax),
    ("float8_cast", _cast_launched, cast_reference, _plain_cast_of_shape),
):
    register(_LIBRARY, _name, _launched, _in_torch, _of_shape, _MODULES)
# Compiled graphs launch it; where one does not, each matrix is gone through by itself.
_LIBRARY.impl("float8_amax_joined", joined_amax_reference, "CompositeExplicitAutograd")
torch.library.register_fake("bitplan::float8_amax_joined", _joined_of_shape, lib=_LIBRARY)
register_kernels("float8_amax_joined", _joined_launched, lambda xs, *_: all(x.numel() for x in xs), _MODULES)
