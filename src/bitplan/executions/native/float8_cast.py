"""Casts of a matrix to float8 codes, row-major and transposed, in one pass over its memory.

FP8 units need both GEMM operands with the summed axis innermost. So a linear layer needs its input row-major for the
output and transposed for the weight gradient, and likewise its weight and the output gradient. Inductor would generate
one kernel per layout, the transposed one with scattered writes, and each would recompute the matrix. Inductor does not
fuse the custom operations below, so their input is computed once:

* ``bitplan::float8_amax`` computes the amax in :data:`PARTS` partial results, ``bitplan::float8_amax_batch`` that of
  several matrices (:mod:`bitplan.compiler.amax_fusion`);
* ``bitplan::float8_cast`` derives the scale from the partial results, divides, rounds and writes one or both layouts;
* ``bitplan::float8_padded_cast`` does so with groups of rows, each of which it pads in the transposed layout
  (:mod:`bitplan.executions.native.group_padding`).

On a GPU they are Triton kernels (:mod:`bitplan.executions.native.float8_cast_kernel`). Elsewhere the reference
implementations in this file run. Both equal :meth:`bitplan.numerics.quantizer.Quantizer.encode` bit for bit.

With delayed scaling, `history_amax` is the amax of past steps, a scalar on the device, and determines the scale. Before
the first step it is 0, and the current amax determines the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import register, register_kernels
from bitplan.numerics.dtypes import TORCH_FLOAT8
from bitplan.numerics.formats import FloatFormat
from bitplan.numerics.rounding import round_float
from bitplan.numerics.scaling import divide, step_scale

FORMATS = {dtype: target for target, dtype in TORCH_FLOAT8.items() if isinstance(target, FloatFormat)}
#: Dtypes that the operations accept. The quantizer itself casts other dtypes.
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Partial results of a GPU's amax: about four per multiprocessor.
PARTS = 512
#: The most matrices per launch of the batched amax kernel.
MAX_BATCH = 8
#: Side of the square tiles that a GPU casts.
TILE = 128
#: The most amax records that one cast updates (:mod:`bitplan.executions.native.recorded_cast`): query, key and value.
MAX_RECORDS = 3


class Cast(NamedTuple):
    """The results of casting a matrix (rows, features); layouts that were not requested are empty."""

    #: (rows, features)
    rows: Tensor
    #: (features, rows)
    columns: Tensor
    #: A float32 scalar.
    scale: Tensor
    #: Amax per tile; empty unless requested.
    tile_amax: Tensor


def cast_float8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    scaled: bool = True,
    power_of_two: bool = False,
    history_amax: Tensor | None = None,
    as_rows: bool = True,
    as_columns: bool = True,
    returns_amax: bool = False,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> Cast:
    """Cast `x`, a matrix of one of the :data:`INPUT_DTYPES`, to float8 codes.

    :param scaled: whether there is a scale; if not, `power_of_two` and `history_amax` are ignored.
    :param history_amax: the amax of past steps, for delayed scaling.
    :param returns_amax: whether to return the current amax per tile.
    :param after: a tensor that is not read; a compiled graph casts after computing it.
    :param sources: for each column of the transposed layout the row of `x` that it holds, or -1 for zeros; every row
        occurs once. None: all rows in their order.

    >>> cast = cast_float8(torch.tensor([[1.0, -896.0]]), torch.float8_e4m3fn)
    >>> cast.rows.float(), cast.columns.shape, cast.scale
    (tensor([[   0.5000, -448.0000]]), torch.Size([2, 1]), tensor(2.))
    """
    if not scaled:
        history_amax = None
    partial_amax = torch.ops.bitplan.float8_amax(x, history_amax) if scaled else None
    if sources is not None and as_columns:
        return Cast(
            *torch.ops.bitplan.float8_padded_cast(
                x, sources, dtype, partial_amax, history_amax, power_of_two, as_rows, returns_amax, after
            )
        )
    return Cast(
        *torch.ops.bitplan.float8_cast(
            x, dtype, partial_amax, history_amax, power_of_two, as_rows, as_columns, returns_amax, after
        )
    )


_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "float8_amax(Tensor x, Tensor? history_amax) -> Tensor",
    "float8_amax_batch(Tensor[] xs, Tensor[] history_amaxes) -> Tensor[]",
    "float8_cast(Tensor x, ScalarType dtype, Tensor? partial_amax, Tensor? history_amax, bool power_of_two, "
    "bool as_rows, bool as_columns, bool returns_amax, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "float8_padded_cast(Tensor x, Tensor sources, ScalarType dtype, Tensor? partial_amax, Tensor? history_amax, "
    "bool power_of_two, bool as_rows, bool returns_amax, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def amax_reference(x: Tensor, history_amax: Tensor | None) -> Tensor:
    """The amax, as one partial result."""
    if not x.numel():
        return torch.zeros(1, device=x.device)
    return torch.maximum(x.amax(), -x.amin()).float().reshape(1)


def batch_amax_reference(xs: Sequence[Tensor], history_amaxes: Sequence[Tensor]) -> list[Tensor]:
    """The amax of each matrix."""
    return [torch.ops.bitplan.float8_amax(*pair) for pair in zip(xs, history_amaxes, strict=True)]


def cast_reference(
    x: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor | None,
    history_amax: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of :class:`Cast`."""
    target = FORMATS[dtype]
    scale = torch.ones((), device=x.device)
    if partial_amax is not None:
        amax = partial_amax.amax()
        if history_amax is not None:
            amax = torch.where(history_amax > 0, history_amax, amax)
        scale = step_scale(amax, target.max, power_of_two)

    def codes_of(value: Tensor) -> Tensor:
        scaled = value if partial_amax is None else divide(value, scale)
        return round_float(scaled, target, "nearest", "saturate").to(dtype)

    codes = codes_of(x.float())
    empty = torch.empty(0, 0, dtype=dtype, device=x.device)
    columns = torch.empty_like(empty)
    if as_columns:
        columns = (codes if sources is None else codes_of(pad_rows(x.float(), sources))).t().contiguous()
    amax_of_x = amax_reference(x, None) if returns_amax else torch.empty(0, device=x.device)
    return codes if as_rows else empty, columns, scale, amax_of_x


def pad_rows(x: Tensor, sources: Tensor) -> Tensor:
    """The rows of `x` at `sources`, with zeros for -1."""
    return x.index_select(0, sources.clamp_min(0)).masked_fill((sources < 0).unsqueeze(1), 0.0)


def padded_cast_reference(
    x: Tensor,
    sources: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor | None,
    history_amax: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    returns_amax: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of :class:`Cast`, the columns padded."""
    scaling = dtype, partial_amax, history_amax, power_of_two
    return cast_reference(x, *scaling, as_rows, True, returns_amax, sources=sources)


def fake_amax(x: Tensor, *_: Any) -> Tensor:
    """An uninitialised amax, in as many partial results as the device returns."""
    return x.new_empty(PARTS if x.is_cuda and x.numel() else 1, dtype=torch.float32)


def _fake_amax_batch(xs: Sequence[Tensor], history_amaxes: Sequence[Tensor]) -> list[Tensor]:
    return [fake_amax(x) for x in xs]


def fake_cast(
    x: Tensor,
    dtype: torch.dtype,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    count_tiles: Callable[[int, int], int],
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of a cast; `count_tiles` gives the number of tiles that a GPU returns the amax of."""
    rows, features = x.shape
    columns = rows if sources is None else sources.shape[0]
    tiles = count_tiles(columns, features)
    return (
        x.new_empty((rows, features) if as_rows else (0, 0), dtype=dtype),
        x.new_empty((features, columns) if as_columns else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((tiles if x.is_cuda and x.numel() else 1) if returns_amax else 0, dtype=torch.float32),
    )


def _fake_float8_cast(x: Tensor, dtype: torch.dtype, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, as_rows, as_columns, returns_amax, *_ = args
    return fake_cast(x, dtype, as_rows, as_columns, returns_amax, tile_count)


def _fake_padded_cast(
    x: Tensor, sources: Tensor, dtype: torch.dtype, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, as_rows, returns_amax, *_ = args
    return fake_cast(x, dtype, as_rows, True, returns_amax, tile_count, sources)


def tile_count(rows: int, features: int) -> int:
    """The number of tiles that cover a matrix."""
    return -(-rows // TILE) * -(-features // TILE)


register(_LIBRARY, "float8_amax", amax_reference, fake_amax, __name__)
register(_LIBRARY, "float8_cast", cast_reference, _fake_float8_cast, __name__)
register(_LIBRARY, "float8_padded_cast", padded_cast_reference, _fake_padded_cast, __name__)
# Without a GPU implementation: outside compiled graphs, which launch the batched kernel, the matrices come one by one.
_LIBRARY.impl("float8_amax_batch", batch_amax_reference, "CompositeExplicitAutograd")
torch.library.register_fake("bitplan::float8_amax_batch", _fake_amax_batch, lib=_LIBRARY)
register_kernels("float8_amax_batch", __name__, lambda xs, *_: all(x.numel() for x in xs))
