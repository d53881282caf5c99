"""RMS norm fused with the cast of its result to float8.

Linear layers cast the result of the norm before them. Inductor would write it in bfloat16 in one kernel and read it for
the cast in another, once more where the backward pass recasts inputs. Besides the norm's input a fused kernel reads
only one number per row and one per feature:

* ``bitplan::norm_cast`` writes the codes;
* ``bitplan::norm_amax`` computes the amax, in partial results, in the first step. Later steps have a
  `history_amax`, and it does nothing.

`row_stats` is the number per row that the graph has in memory: the mean square, to which *eps* is added before taking
the inverse square root, or without *eps* that inverse itself. Scales are powers of two. With *rounds_twice* the
normalised value is rounded to bfloat16 before it is multiplied by the weight, as norms of transformers do that are
written out in Python (Llama, Mistral, Qwen, T5); torch's own norm and that of Gemma round once, at the end.

:mod:`bitplan.compiler.norm_fusion` puts these operations into graphs. On a GPU they are Triton kernels
(:mod:`bitplan.executions.native.norm_cast_kernel`), elsewhere the reference implementations in this file. Both compute
in float32, round to bfloat16 as eager code does, and cast as :mod:`bitplan.executions.native.float8_cast` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import register
from bitplan.executions.native.float8_cast import amax_reference, cast_reference, fake_amax, fake_cast, tile_count

#: Dtypes of a norm's input and weight. (The first norm's input is sometimes float32.)
INPUT_DTYPES = (torch.bfloat16, torch.float32)

Results = tuple[Tensor, Tensor, Tensor, Tensor]

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "norm_amax(Tensor x, Tensor row_stats, Tensor weight, float? eps, Tensor history_amax, "
    "bool rounds_twice=False) -> Tensor",
    "norm_cast(Tensor x, Tensor row_stats, Tensor weight, float? eps, ScalarType dtype, Tensor partial_amax, "
    "Tensor history_amax, bool as_rows, bool as_columns, bool returns_amax, Tensor? after=None, "
    "bool rounds_twice=False) -> (Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def rms_norm_reference(
    x: Tensor, row_stats: Tensor, weight: Tensor, eps: float | None, rounds_twice: bool = False
) -> Tensor:
    """`x`, (rows, features), normalised per row and multiplied by `weight` per feature, in bfloat16.

    >>> x = torch.tensor([[3.0, -4.0]])
    >>> rms_norm_reference(x, torch.tensor([12.5]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([[ 0.8477, -2.2656]], dtype=torch.bfloat16)
    """
    inverse = row_stats if eps is None else torch.rsqrt(row_stats + eps)
    normalised = x.float() * inverse[:, None]
    if rounds_twice:
        normalised = normalised.bfloat16().float()
    return (normalised * weight.float()).bfloat16()


def norm_amax_reference(
    x: Tensor,
    row_stats: Tensor,
    weight: Tensor,
    eps: float | None,
    history_amax: Tensor,
    rounds_twice: bool = False,
) -> Tensor:
    return amax_reference(rms_norm_reference(x, row_stats, weight, eps, rounds_twice), history_amax)


def norm_cast_reference(
    x: Tensor,
    row_stats: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    partial_amax: Tensor,
    history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    rounds_twice: bool = False,
) -> Results:
    """The cast of the norm's result."""
    result = rms_norm_reference(x, row_stats, weight, eps, rounds_twice)
    return cast_reference(result, dtype, partial_amax, history_amax, True, as_rows, as_columns, returns_amax)


def _fake_norm_cast(x: Tensor, *args: Any) -> Results:
    _, _, _, dtype, _, _, as_rows, as_columns, returns_amax, *_ = args
    return fake_cast(x, dtype, as_rows, as_columns, returns_amax, tile_count)


register(_LIBRARY, "norm_amax", norm_amax_reference, fake_amax, __name__)
register(_LIBRARY, "norm_cast", norm_cast_reference, _fake_norm_cast, __name__)
