"""The result of an RMS norm, computed where it is cast to float8.

A norm's result is what the linear layers behind it cast. Left to Inductor it is written in bfloat16 by one kernel and
read again by the cast; and where the backward pass casts inputs again, once more. What makes it is small but for the
norm's input: a number for each row and one for each feature. So a kernel that reads these can write codes at once:

* ``bitplan::norm_cast`` for the codes;
* ``bitplan::norm_amax`` looks for the largest magnitude, in parts, while there is no past: else it does nothing.

A row's number is told as graphs have it: the mean of the squares, to which *eps* is added before the inverse of the
square root is taken, or, without an *eps*, that inverse itself. Scales are powers of two.

Graphs get these operations by :mod:`bitplan.compiler.norm_fusion`. On a GPU they are Triton kernels
(:mod:`bitplan.executions.native.norm_cast_kernel`), elsewhere the plain torch below, which says what they compute: in
float32,
rounded once to bfloat16, as torch's own norm does, and then cast as :mod:`bitplan.executions.native.float8_cast` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import itself, register
from bitplan.executions.native.float8_cast import amax_reference, cast_reference, fake_amax, fake_cast, tiles_of

#: What a norm's input and weight may be. (A first norm's input is sometimes kept in float32, as which it is used.)
READ = (torch.bfloat16, torch.float32)

Results = tuple[Tensor, Tensor, Tensor, Tensor]

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "norm_amax(Tensor x, Tensor spread, Tensor weight, float? eps, Tensor reach) -> Tensor",
    "norm_cast(Tensor x, Tensor spread, Tensor weight, float? eps, ScalarType dtype, Tensor parts, Tensor reach, "
    "bool as_rows, bool as_columns, bool gathers, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def rms_norm_reference(x: Tensor, spread: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """`x`, (rows, features), normalised by each row's `spread`, times each feature's `weight`: in bfloat16.

    >>> x = torch.tensor([[3.0, -4.0]])
    >>> rms_norm_reference(x, torch.tensor([12.5]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([[ 0.8477, -2.2656]], dtype=torch.bfloat16)
    """
    inverse = spread if eps is None else torch.rsqrt(spread + eps)
    return (x.float() * inverse[:, None] * weight.float()).bfloat16()


def norm_amax_reference(x: Tensor, spread: Tensor, weight: Tensor, eps: float | None, reach: Tensor) -> Tensor:
    return amax_reference(rms_norm_reference(x, spread, weight, eps), reach)


def norm_cast_reference(
    x: Tensor,
    spread: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> Results:
    """The norm's result as a cast gives it."""
    result = rms_norm_reference(x, spread, weight, eps)
    return cast_reference(result, dtype, parts, reach, True, as_rows, as_columns, gathers)


def _amax_launched(*given: Any, wrap: Any = itself) -> Tensor:
    from bitplan.executions.native.norm_cast_kernel import norm_amax_by_kernel

    return norm_amax_by_kernel(wrap, *given)


def _cast_launched(*given: Any, wrap: Any = itself, **noted: Any) -> Results:
    from bitplan.executions.native.norm_cast_kernel import norm_cast_by_kernel

    return norm_cast_by_kernel(wrap, *given, **noted)


def _norm_cast_of_shape(
    x: Tensor,
    spread: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> Results:
    return fake_cast(x, dtype, as_rows, as_columns, gathers, tiles_of(*x.shape))


for _name, _launched, _in_torch, _of_shape in (
    ("norm_amax", _amax_launched, norm_amax_reference, fake_amax),
    ("norm_cast", _cast_launched, norm_cast_reference, _norm_cast_of_shape),
):
    register(_LIBRARY, _name, _launched, _in_torch, _of_shape, (__name__, f"{__name__}_kernel"))
